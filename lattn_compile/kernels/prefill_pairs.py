"""What a chunk's tokens see of each other under a decay by channel, of rounded keys and queries: sites `kk` and `qk`.

As `reference/prefill_pairs.py` has it,

    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i
    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i

The decay is inside: 16 rows meet each earlier 16 tokens at the rows' start, rounded there. Among themselves they are
exact. Those of different halves meet in the middle; those of one half go pair by pair without a matrix product, which
would want a middle of its own, with weights, parts and a layout, for every halving.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    gate_exp,
    held,
    load_beta,
    load_rows,
    operand,
    product,
    summed,
)
from lattn_compile.kernels.chunk_pairs import halves
from lattn_compile.kernels.common.inputs import rstd
from lattn_compile.kernels.prefill_codec import flipped_parts, site, site_product

__all__ = ["SUB_BLOCK", "norm_of", "pairs_of_channels", "rows", "weights"]

SUB_BLOCK = tl.constexpr(16)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def norm_of(x, NORM: tl.constexpr):
    """What rows `x` are multiplied with: 1 where they stay as they are."""
    if NORM:
        x = x.to(tl.float32)
        return rstd(tl.sum(x * x, 1))
    else:
        return tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def rows(
    q, k, beta, starts, lengths, offsets, owner, index, norms, strengths, skip, q_token, q_head, q_channel, k_token,
    k_head, k_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What a chunk's rows have by themselves.

    Args:
        norms: fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q. strengths: fp32 `[NB, HV, BT]`: beta.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    at, slot = pid.to(tl.int64), tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK)
    tl.store(norms + at * (2 * BT) + slot, norm_of(b_k, NORM))
    tl.store(norms + at * (2 * BT) + BT + slot, norm_of(b_q, NORM))
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
        tl.store(strengths + (block.to(tl.int64) * HV + i_head) * BT + slot, b_beta)


@triton.jit(do_not_specialize=["skip", "HV"])
def weights(
    g, starts, lengths, offsets, owner, index, from_start, to_end, whole, skip, g_token, g_head, g_channel, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Of a decay by channel: each token's weights from its chunk's start and to its end, once for all who want them.

    Args:
        g: `[M, HV, K]`. from_start, to_end: fp32 `[NB, HV, BT, BK]`. whole: fp32 `[NB, HV, BK]`, the whole chunk's.
            BS: channels of a program, of one warp: sums over tokens stay in it.

    Grid: (NB * HV * BK / BS,).
    """
    first, pid = tl.program_id(0) % (BK // BS) * BS, tl.program_id(0) // (BK // BS)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, slot, channel = pid.to(tl.int64), tl.arange(0, BT), first + tl.arange(0, BS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    behind, follows = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot + 1, BT, BT, 1)
    p_g = g + i_head * g_head
    b_g = held(load_rows(p_g, token * g_token, inside, first, g_channel, K, BS))
    later = held(load_rows(p_g, behind * g_token, follows & (slot < BT - 1), first, g_channel, K, BS))
    place = (at * BT + slot[:, None]) * BK + channel[None, :]
    tl.store(from_start + place, gate_exp(tl.cumsum(b_g, 0), LOW))
    tl.store(to_end + place, gate_exp(tl.cumsum(later, 0, reverse=True), LOW))
    tl.store(whole + at * BK + channel, gate_exp(tl.sum(b_g, 0), LOW))


@triton.jit
def _decayed(x, LOW: tl.constexpr):
    """`gate_exp`, below 2^-126 zero: two instructions a number instead of five."""
    if LOW and not is_hip():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * _LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return gate_exp(x, LOW)


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def pairs_of_channels(
    q, k, g, starts, lengths, offsets, owner, index, norms, overlaps, reads, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr,
    KK: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, g: `[M, HV, K]`, any strides. norms: of `rows`.
        reads: fp32 `[NB, HV, BT, BT]`; overlaps likewise, without beta, zero on and above its diagonal; None unless
            DELTA. KK, QK: the sites' formats. BS: channels at a time, of products of exact pairs.

    Grid: (NB * HV * BT / 16,).
    """
    SIZE: tl.constexpr = SUB_BLOCK
    HALF: tl.constexpr = SIZE // 2
    TILES: tl.constexpr = BT // SIZE
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    i = tl.arange(0, SIZE)
    slot, channel = tile * SIZE + i, tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    row_q, row_k = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    row_g = token * g_token + i_head * g_head
    b_q = load_rows(q, row_q, inside, 0, q_channel, K, BK).to(tl.float32)
    b_k = load_rows(k, row_k, inside, 0, k_channel, K, BK).to(tl.float32)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    k_norm, q_norm = tl.load(p_norm + slot), tl.load(p_norm + BT + slot)
    p_reads = reads + pid.to(tl.int64) * (BT * BT) + slot * BT
    p_overlaps = p_reads
    if DELTA:
        p_overlaps = overlaps + pid.to(tl.int64) * (BT * BT) + slot * BT

    # Pairs that the middle of the 16 parts meet there; all others are of one half.
    P = tl.zeros([SIZE, SIZE], tl.float32)
    A = tl.zeros([SIZE, SIZE], tl.float32)
    for first in range(0, BK, BS):
        s_q = load_rows(q, row_q, inside, first, q_channel, K, BS).to(tl.float32)
        s_k = load_rows(k, row_k, inside, first, k_channel, K, BS).to(tl.float32)
        s_g = held(load_rows(g, row_g, inside, first, g_channel, K, BS))
        weight = gate_exp(summed(halves(HALF, SIZE), s_g, LOW, False), LOW)
        o_k = operand(s_k * weight, LOW)
        P += product(operand(s_q * weight, LOW), flipped_parts(o_k))
        if DELTA:
            A += product(o_k, flipped_parts(o_k))
    parted = (i >= HALF)[:, None] & (i < HALF)[None, :]
    place = tile * SIZE + i[None, :]
    tl.store(p_reads[:, None] + place, tl.where(parted, P * (q_norm[:, None] * k_norm[None, :]), 0.0))
    if DELTA:
        tl.store(p_overlaps[:, None] + place, tl.where(parted, A * (k_norm[:, None] * k_norm[None, :]), 0.0))
    tl.debug_barrier()  # other threads have these places next
    since = tl.zeros([SIZE, BK], tl.float32)
    for back in range(HALF):
        # Each row and the one that many before it: the gates between are summed from one step to the next.
        old = inside & (i % HALF >= back)
        since += load_rows(g, row_g - (back - 1) * g_token, old & (back > 0), 0, g_channel, K, BK)
        e_k = load_rows(k, row_k - back * k_token, old, 0, k_channel, K, BK).to(tl.float32) * _decayed(since, LOW)
        at_j = slot - back
        e_norm = tl.load(p_norm + at_j, mask=old, other=0.0)
        tl.store(p_reads + at_j, tl.sum(b_q * e_k, 1) * (q_norm * e_norm), mask=old)
        if DELTA:
            tl.store(p_overlaps + at_j, tl.sum(b_k * e_k, 1) * (k_norm * e_norm), mask=old & (back > 0))

    later = gate_exp(tl.cumsum(held(load_rows(g, row_g, inside, 0, g_channel, K, BK)), 0), LOW)
    o_q, q_scale = site(b_q * q_norm[:, None] * later, 1, QK, LOW)
    o_k, k_scale = site(b_k * k_norm[:, None] * later, 1, KK, LOW)
    between = tl.zeros([BK], tl.float32)
    for back in range(1, TILES):
        # To the left of the diagonal, then what is above it, all zeros.
        other = tile - back
        if other < 0:
            other += TILES
        at_j = other * SIZE + i
        P = tl.zeros([SIZE, SIZE], tl.float32)
        A = tl.zeros([SIZE, SIZE], tl.float32)
        if back <= tile:
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
        tl.store(p_reads[:, None] + at_j[None, :], P)
        if DELTA:
            tl.store(p_overlaps[:, None] + at_j[None, :], A)
