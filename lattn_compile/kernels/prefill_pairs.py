"""What a chunk's tokens see of each other, of rounded keys and queries: sites `kk` and `qk`.

As `reference/prefill_pairs.py` has it,

    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i
    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i

A decay of whole heads stands outside of the products; rows are rounded once, and a program has TILE of them and all
columns of their chunk. A decay by channel is inside: 16 rows meet each earlier 16 tokens at the rows' start, rounded
there; among themselves they are exact, and halved again and again, as in `chunk_pairs.py`.
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
    product,
    split_sum,
    summed,
)
from lattn_compile.kernels.chunk_pairs import halves
from lattn_compile.kernels.common.inputs import no_more, rstd
from lattn_compile.kernels.prefill_codec import flipped_parts, load_site, site, site_product, store_site

__all__ = ["SUB_BLOCK", "head_weights", "overlaps_of_heads", "pairs_of_channels", "row_operand", "rows"]

SUB_BLOCK = tl.constexpr(16)


@triton.jit
def _norm(x, NORM: tl.constexpr):
    """What rows `x` are multiplied with: 1 where they stay as they are."""
    if NORM:
        x = x.to(tl.float32)
        return rstd(tl.sum(x * x, 1))
    else:
        return tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def _store_rows(x, factor, codes, scale, at, BT: tl.constexpr, FORMAT: tl.constexpr):
    """Rows times their factors as a rounded left operand; an exact one stays where it is."""
    if FORMAT != "":
        BK: tl.constexpr = x.shape[1]
        slot, channel = tl.arange(0, BT), tl.arange(0, BK)
        a, a_scale = site(x.to(tl.float32) * factor[:, None], 1, FORMAT, False)
        store_site(codes, at, slot[:, None] * BK + channel[None, :], a, BT * BK)
        tl.store(scale + at * BT + slot, a_scale)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def rows(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, strengths, factors, q_codes, q_scale, k_codes,
    k_scale, read_codes, read_scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    LOW: tl.constexpr, KK: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """What a chunk's rows have by themselves.

    Args:
        norms: fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q. strengths: fp32 `[NB, HV, BT]`: beta.
        factors: unless DECAY is 2, fp32 `[NB, HV, 4, BT]`: the running sum of the gates in two numbers, as
            `chunk_math.split_sum` has them, and the weights from the chunk's start and to its end.
        q_codes, k_codes, read_codes: of these decays, `[NB, H, parts, BT, BK]`, rows of q and k rounded for qk, kk and
            qk; q_scale and others: fp32 `[NB, H, BT]`. What a site does not round is None, and so is read_codes where
            it would be k_codes.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    at, slot = pid.to(tl.int64), tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK)
    k_norm = _norm(b_k, NORM)
    tl.store(norms + at * (2 * BT) + slot, k_norm)
    if k_codes is not None:
        _store_rows(b_k, k_norm, k_codes, k_scale, at, BT, KK)
    if read_codes is not None:
        _store_rows(b_k, k_norm, read_codes, read_scale, at, BT, QK)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK)
    q_norm = _norm(b_q, NORM)
    tl.store(norms + at * (2 * BT) + BT + slot, q_norm)
    if q_codes is not None:
        _store_rows(b_q, q_norm, q_codes, q_scale, at, BT, QK)
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        head = block.to(tl.int64) * HV + i_head
        tl.store(strengths + head * BT + slot, load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA))
        if DECAY < 2:
            p = factors + head * (4 * BT) + slot
            b_g = tl.zeros([BT], tl.float32)
            if DECAY == 1:
                b_g = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
            coarse, fine = split_sum(b_g, False)
            tl.store(p, coarse)
            tl.store(p + BT, fine)
            tl.store(p + 2 * BT, gate_exp(no_more(coarse + fine, 0.0), LOW))
            tl.store(p + 3 * BT, gate_exp(no_more(after_sum(b_g), 0.0), LOW))


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


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def overlaps_of_heads(
    k, starts, lengths, offsets, owner, index, norms, factors, codes, scale, overlaps, skip,
    k_token, k_head, k_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr, KK: tl.constexpr,
):  # fmt: skip
    """Decay by head, or none.

    Args:
        k: `[M, H, K]`, any strides. norms, factors: of `rows`; codes, scale: its k_codes.
        overlaps: fp32 `[NB, HV, BT, BT]`, zero on and above its diagonal. KK: the site's format.

    Grid: (NB * H * BT / TILE,).
    """
    TILES: tl.constexpr = BT // TILE
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    i, j = tile * TILE + tl.arange(0, TILE), tl.arange(0, BT)
    at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, i, BT, BT, 1)
    at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, j, BT, BT, 1)
    norm = norms + at * (2 * BT)
    row_i, row_j = at_i * k_token + i_key * k_head, at_j * k_token + i_key * k_head
    a, a_scale = row_operand(k, row_i, in_i, k_channel, codes, scale, norm, at, i, K, BK, BT, KK, LOW)
    b, b_scale = row_operand(k, row_j, in_j, k_channel, codes, scale, norm, at, j, K, BK, BT, KK, LOW)
    A = site_product(a, flipped_parts(b)) * (a_scale[:, None] * b_scale[None, :])
    A = tl.where(j[None, :] < i[:, None], A, 0.0)
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        head = block.to(tl.int64) * HV + i_head
        p = overlaps + head * (BT * BT) + i[:, None] * BT + j[None, :]
        tl.store(p, A * head_weights(factors, head, i, j, BT, LOW))


@triton.jit
def _level(P, A, q, k, g, HALF: tl.constexpr, SIZE: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr):
    """Adds to `P` and `A` the pairs that the middle of 2 HALF tokens parts."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    weight = gate_exp(summed(halves(HALF, SIZE), g, LOW, False), LOW)
    parted = (row // HALF == column // HALF + 1) & (row // HALF % 2 == 1)
    o_k = operand(k * weight, LOW)
    o_early = flipped_parts(o_k)
    P += tl.where(parted, product(operand(q * weight, LOW), o_early), 0.0)
    if DELTA:
        A += tl.where(parted, product(o_k, o_early), 0.0)
    return P, A


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def pairs_of_channels(
    q, k, g, starts, lengths, offsets, owner, index, norms, overlaps, reads, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr,
    KK: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """Decay by channel, g `[M, HV, K]`. Others as in `overlaps_of_heads`.

    Args:
        reads: fp32 `[NB, HV, BT, BT]`. overlaps: None unless DELTA. KK, QK: the sites' formats. BS: channels at a
            time, of exact pairs.

    Grid: (NB * HV * BT / 16,).
    """
    SIZE: tl.constexpr = SUB_BLOCK
    TILES: tl.constexpr = BT // SIZE
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    i = tl.arange(0, SIZE)
    row, column = i[:, None], i[None, :]
    slot, channel = tile * SIZE + i, tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    row_q, row_k = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    row_g = token * g_token + i_head * g_head
    P = tl.zeros([SIZE, SIZE], tl.float32)
    A = tl.zeros([SIZE, SIZE], tl.float32)
    for first in range(0, BK, BS):
        s_q = load_rows(q, row_q, inside, first, q_channel, K, BS).to(tl.float32)
        s_k = load_rows(k, row_k, inside, first, k_channel, K, BS).to(tl.float32)
        s_g = held(load_rows(g, row_g, inside, first, g_channel, K, BS))
        P += tl.where(row == column, tl.sum(s_q * s_k, 1)[:, None], 0.0)
        for step in tl.static_range(4):
            P, A = _level(P, A, s_q, s_k, s_g, 8 >> step, SIZE, DELTA, LOW)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    k_norm, q_norm = tl.load(p_norm + slot), tl.load(p_norm + BT + slot)
    P = P * (q_norm[:, None] * k_norm[None, :])
    A = A * (k_norm[:, None] * k_norm[None, :])

    p_reads = reads + pid.to(tl.int64) * (BT * BT) + slot[:, None] * BT
    p_overlaps = p_reads
    if DELTA:
        p_overlaps = overlaps + pid.to(tl.int64) * (BT * BT) + slot[:, None] * BT
    later = gate_exp(tl.cumsum(held(load_rows(g, row_g, inside, 0, g_channel, K, BK)), 0), LOW)
    b_q = load_rows(q, row_q, inside, 0, q_channel, K, BK).to(tl.float32)
    b_k = load_rows(k, row_k, inside, 0, k_channel, K, BK).to(tl.float32)
    o_q, q_scale = site(b_q * q_norm[:, None] * later, 1, QK, LOW)
    o_k, k_scale = site(b_k * k_norm[:, None] * later, 1, KK, LOW)
    between = tl.zeros([BK], tl.float32)
    for back in range(TILES):
        # To the left of the diagonal from it on, then what is above it, all zeros.
        other = tile - back
        if other < 0:
            other += TILES
        at_j = other * SIZE + i
        if back > 0:
            P = tl.zeros([SIZE, SIZE], tl.float32)
            A = tl.zeros([SIZE, SIZE], tl.float32)
        if (back > 0) & (back <= tile):
            token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, at_j, BT, BT, 1)
            e_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK).to(tl.float32)
            # The gates behind each token, and the whole tile's.
            p_g = g + i_head * g_head
            token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, at_j + 1, BT, BT, 1)
            behind = held(load_rows(p_g, token * g_token, inside & (i < SIZE - 1), 0, g_channel, K, BK))
            top, some = block_tokens(owner, index, starts, lengths, offsets, block, skip, other * SIZE, BT, BT, 1)
            opening = tl.load(p_g + top * g_token + channel * g_channel, mask=some & (channel < K), other=0.0)
            earlier = gate_exp(tl.cumsum(behind, 0, reverse=True) + between[None, :], LOW)
            between += tl.sum(behind, 0) + held(opening)
            e_k = e_k * tl.load(p_norm + at_j)[:, None] * earlier
            o_early, e_scale = site(e_k, 1, QK, LOW)
            P = site_product(o_q, flipped_parts(o_early)) * (q_scale[:, None] * e_scale[None, :])
            if DELTA:
                if KK != QK:
                    o_early, e_scale = site(e_k, 1, KK, LOW)
                A = site_product(o_k, flipped_parts(o_early)) * (k_scale[:, None] * e_scale[None, :])
        tl.store(p_reads + at_j[None, :], P)
        if DELTA:
            tl.store(p_overlaps + at_j[None, :], A)
