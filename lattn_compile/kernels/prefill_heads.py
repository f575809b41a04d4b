"""What a chunk's tokens see of each other under a decay by head, or none: sites `kk` and `qk`, and operands of it.

    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i
    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i

The decay stands outside of the products. Rows are rounded once and lie in memory, where the program that rounded them
loads them as operands of products, ROWS of them and all columns of their chunk.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    after_sum,
    block_tokens,
    gate_exp,
    held,
    load_beta,
    load_rows,
    operand,
    split_sum,
)
from lattn_compile.kernels.common.inputs import no_more
from lattn_compile.kernels.prefill_codec import flipped_parts, lanes, load_site, scaled, site, site_product, store_site
from lattn_compile.kernels.prefill_pairs import norm_of

__all__ = ["head_weights", "pairs_of_heads", "row_operand"]


@triton.jit
def _store_rows(x, factor, codes, scale, at, BT: tl.constexpr, FORMAT: tl.constexpr):
    """Rows times their factors as a rounded left operand; an exact one stays where it is."""
    if FORMAT != "":
        BK: tl.constexpr = x.shape[1]
        slot, channel = tl.arange(0, BT), tl.arange(0, BK)
        a, a_scale = site(x.to(tl.float32) * factor[:, None], 1, FORMAT, False)
        store_site(codes, at, slot[:, None] * BK + channel[None, :], a, BT * BK)
        tl.store(scale + at * BT + slot, a_scale)


@triton.jit
def row_operand(
    x, row, inside, x_channel, codes, scale, norm, at, slot, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
    FORMAT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Some slots' rows of q or k as a left operand, and their factors: of `rows`, or as they came, at `x + row`."""
    if FORMAT == "":
        b_x = load_rows(x, row, inside, 0, x_channel, K, BK)
        return operand(b_x, LOW), tl.load(norm + slot)
    else:
        place = slot[:, None] * BK + tl.arange(0, BK)[None, :]
        return load_site(codes, at, place, BT * BK, 1), tl.load(scale + at * BT + slot)


@triton.jit
def head_weights(factors, at, i, j, BT: tl.constexpr, LOW: tl.constexpr):
    """`w(j -> i)` of slots i and j under a decay by head, 0 for j > i; at: number of the chunk and head."""
    p = factors + at * (4 * BT)
    total = (tl.load(p + i)[:, None] - tl.load(p + j)[None, :]) + (
        tl.load(p + BT + i)[:, None] - tl.load(p + BT + j)[None, :]
    )
    within = j[None, :] <= i[:, None]
    return gate_exp(tl.where(within, no_more(total, 0.0), float("-inf")), LOW)


@triton.jit
def _factors(g, token, inside, p, g_token, i_head, g_head, DECAY: tl.constexpr, BT: tl.constexpr, LOW: tl.constexpr):
    """A head's `factors`, stored at p."""
    b_g = tl.zeros([BT], tl.float32)
    if DECAY == 1:
        b_g = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
    coarse, fine = split_sum(b_g, False)
    tl.store(p, coarse)
    tl.store(p + BT, fine)
    tl.store(p + 2 * BT, gate_exp(no_more(coarse + fine, 0.0), LOW))
    tl.store(p + 3 * BT, gate_exp(no_more(after_sum(b_g), 0.0), LOW))


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def pairs_of_heads(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, strengths, factors, q_codes, q_scale, k_codes,
    k_scale, read_codes, read_scale, overlaps, reads, query, query_scale, seen, seen_scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, LOW: tl.constexpr,
    KK: tl.constexpr, QK: tl.constexpr, QS: tl.constexpr, AV: tl.constexpr, QP: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, g, beta: `[M, HV]`, any strides. norms, strengths: as in `prefill_pairs.rows`.
        factors: fp32 `[NB, HV, 4, BT]`: the running sum of the gates in two numbers, as `chunk_math.split_sum` has
            them, and the weights from the chunk's start and to its end.
        q_codes, k_codes, read_codes: `[NB, H, 1, BT, BK]`, rows of q and k rounded for qk, kk and qk; q_scale and
            others: fp32 `[NB, H, BT]`. What a site does not round is None, and read_codes is k_codes where it would be
            the same.
        overlaps: fp32 `[NB, HV, BT, BT]`, without beta, zero on and above its diagonal; None unless DELTA.
        reads: fp32 `[NB, HV, BT, BT]`, or None.
        query, query_scale, seen, seen_scale: as in `prefill_pairs.py`.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    SHARED: tl.constexpr = DELTA and KK == QK
    at, slot = pid.to(tl.int64), tl.arange(0, BT)
    token, every = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    at_k = token * k_token + i_key * k_head
    b_k = load_rows(k, at_k, every, 0, k_channel, K, BK)
    b_q = load_rows(q, token * q_token + i_key * q_head, every, 0, q_channel, K, BK)
    k_norm, q_norm = norm_of(b_k, NORM), norm_of(b_q, NORM)
    norm = norms + at * (2 * BT)
    tl.store(norm + slot, k_norm)
    tl.store(norm + BT + slot, q_norm)
    if DELTA:
        _store_rows(b_k, k_norm, k_codes, k_scale, at, BT, KK)
    if not SHARED:
        _store_rows(b_k, k_norm, read_codes, read_scale, at, BT, QK)
    _store_rows(b_q, q_norm, q_codes, q_scale, at, BT, QK)
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        head = block.to(tl.int64) * HV + i_head
        b_beta = load_beta(beta, token, every, beta_token, i_head, beta_head, BETA)
        tl.store(strengths + head * BT + slot, b_beta)
        _factors(g, token, every, factors + head * (4 * BT) + slot, g_token, i_head, g_head, DECAY, BT, LOW)
    tl.debug_barrier()  # other threads have these rows next

    o_read, o_scale = row_operand(k, at_k, every, k_channel, read_codes, read_scale, norm, at, slot, K, BK, BT, QK, LOW)
    for tile in range(BT // ROWS):
        row = tile * ROWS + tl.arange(0, ROWS)
        at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, row, BT, BT, 1)
        row_q, row_k = at_i * q_token + i_key * q_head, at_i * k_token + i_key * k_head
        a, a_scale = row_operand(q, row_q, in_i, q_channel, q_codes, q_scale, norm + BT, at, row, K, BK, BT, QK, LOW)
        P = site_product(a, flipped_parts(o_read)) * (a_scale[:, None] * o_scale[None, :])
        A = P
        if DELTA:
            a, a_scale = row_operand(k, row_k, in_i, k_channel, k_codes, k_scale, norm, at, row, K, BK, BT, KK, LOW)
            o_key, k_factor = o_read, o_scale
            if not SHARED:
                o_key, k_factor = row_operand(
                    k, at_k, every, k_channel, k_codes, k_scale, norm, at, slot, K, BK, BT, KK, LOW
                )
            A = site_product(a, flipped_parts(o_key)) * (a_scale[:, None] * k_factor[None, :])
            A = tl.where(slot[None, :] < row[:, None], A, 0.0)
        t_q = load_rows(q, row_q, in_i, 0, q_channel, K, BK)
        t_norm = tl.load(norm + BT + row)
        place = row[:, None] * BT + slot[None, :]
        for ratio in range(HV // H):
            i_head = i_key * (HV // H) + ratio
            head = block.to(tl.int64) * HV + i_head
            weight = head_weights(factors, head, row, slot, BT, LOW)
            if DELTA:
                tl.store(overlaps + head * (BT * BT) + place, A * weight)
            b_reads = tl.where(slot[None, :] <= row[:, None], P * weight, 0.0)
            if reads is not None:
                tl.store(reads + head * (BT * BT) + place, b_reads)
            o_P, scale = site(b_reads, 1, AV, LOW)
            store_site(seen, head, place, lanes(o_P, seen), BT * BT)
            tl.store(seen_scale + head * BT + row, scale)
            o_q, scale = scaled(t_q, t_norm * tl.load(factors + head * (4 * BT) + 2 * BT + row), QS, LOW)
            tl.static_assert(len(o_q) == QP)
            store_site(query, head, row[:, None] * BK + tl.arange(0, BK)[None, :], lanes(o_q, query), BT * BK)
            tl.store(query_scale + head * BT + row, scale)
