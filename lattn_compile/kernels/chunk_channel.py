"""What a block's tokens see of each other under a decay by channel, where inputs are bf16; as `pairs_channel` and
`pairs_across`, of rows in fp16's range.

`overlaps`, whose inverse the delta rule wants, come of two fp16 parts with 24 bits; `reads`, of which outputs are made,
of one, but on the way back.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    fine_parts,
    fine_product,
    fine_weight,
    flipped,
    half,
    held,
    load_rows,
)
from lattn_compile.kernels.chunk_pairs import halves, parted, store_reads
from lattn_compile.kernels.chunk_rows import exact_norm, row_norms

__all__ = ["across_fine", "tiles_fine"]


@triton.jit
def _pairs(P, A, q, later, early, DELTA: tl.constexpr, BACK: tl.constexpr):
    """Products of rows that lie behind the middle of some tokens with rows before it, added to `P` and `A`."""
    o_early = flipped(fine_parts(early))
    if BACK:
        P = fine_product(fine_parts(q), o_early, P)
    else:
        P = tl.dot(half(q), o_early[0], P)
    if DELTA:
        A = fine_product(fine_parts(later), o_early, A)
    return P, A


@triton.jit
def _level(
    P, A, q, k, g, half, TILE: tl.constexpr, DELTA: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """Adds to `P` and `A` the pairs that the middle of 2 `half` tokens parts."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    weight = fine_weight(halves(half, TILE), g)
    weighted, zero = k * weight, tl.zeros([TILE, TILE], tl.float32)
    more_P, more_A = _pairs(zero, zero, q * weight, weighted, weighted, DELTA, BACK)
    apart = parted(row, column, half)
    return P + tl.where(apart, more_P, 0.0), A + tl.where(apart, more_A, 0.0)


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def tiles_fine(
    q, k, g, starts, lengths, offsets, owner, index, norms, exact, kept, reads, overlaps, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """The tiles on the diagonal.

    Args:
        norms: fp32 `[NB, H, 4, BT]`, gets what `row_norms` returns. exact: float64 `[NB, H, BT]`, of `exact_norm`.
        kept: under BACK, fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q.
        reads: of `store_reads`. overlaps: float64 `[NB, HV, BT, BT]`, of the delta rule. TILE: 16.

    Grid: (NB * HV * BT / TILE,).
    """
    tile, pid = tl.program_id(0) % (BT // TILE), tl.program_id(0) // (BT // TILE)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_head = i_head.to(tl.int64)
    i_key = i_head // (HV // H)
    i = tl.arange(0, TILE)
    slot = tile * TILE + i
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    row, column = i[:, None], i[None, :]
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    all_q = load_rows(q, q_row, inside, 0, q_channel, K, BK).to(tl.float32)
    all_k = load_rows(k, k_row, inside, 0, k_channel, K, BK).to(tl.float32)
    k_down, k_norm, q_down, q_norm = row_norms(
        tl.max(tl.abs(all_k), 1),
        tl.max(tl.abs(all_q), 1),
        tl.sum(all_k * all_k, 1),
        tl.sum(all_q * all_q, 1),
        scale,
        NORM,
    )
    k_exact = exact_norm(all_k, k_down, NORM)
    if i_head % (HV // H) == 0:
        tl.store(exact + (block.to(tl.int64) * H + i_key) * BT + slot, k_exact)
        p_norm = norms + (block.to(tl.int64) * H + i_key) * (4 * BT) + slot
        tl.store(p_norm, k_down)
        tl.store(p_norm + BT, k_norm)
        tl.store(p_norm + 2 * BT, q_down)
        tl.store(p_norm + 3 * BT, q_norm)
        if BACK:
            p_kept = kept + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot
            tl.store(p_kept, k_norm * k_down)
            tl.store(p_kept + BT, q_norm * q_down)
    P = tl.zeros([TILE, TILE], tl.float32)
    A = tl.zeros([TILE, TILE], tl.float64)
    for first in range(0, BK, BS):
        b_q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_down[:, None]
        b_k = load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_down[:, None]
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
        P += tl.where(row == column, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        # Every pair of tokens is parted once, so that these are no sums.
        more = tl.zeros([TILE, TILE], tl.float32)
        for step in range(4):  # unrolled, it would want more registers
            P, more = _level(P, more, b_q, b_k, b_g, TILE // 2 >> step, TILE, DELTA, BACK)
        A += more.to(tl.float64)
    at = pid.to(tl.int64)
    store_reads(reads, at, 0, P, tile, tile, BT, TILE, BACK, TURN)
    if DELTA:
        tl.store(
            overlaps + at * (BT * BT) + slot[:, None] * BT + tile * TILE + column,
            A * (k_exact[:, None] * k_exact[None, :]),
        )


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def across_fine(
    q, k, g, starts, lengths, offsets, owner, index, norms, exact, reads, overlaps, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr,
    DELTA: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """The tiles below the diagonal that part a block's 2 HALF tokens in the middle; after `tiles_fine`.

    Grid: (NB * HV * BT / (2 * HALF),).
    """
    part, pid = tl.program_id(0) % (BT // (2 * HALF)), tl.program_id(0) // (BT // (2 * HALF))
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_head = i_head.to(tl.int64)
    i_key = i_head // (HV // H)
    i = tl.arange(0, HALF)
    early = part * (2 * HALF) + i
    late = early + HALF
    at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, late, CHUNK, TOKENS, PER)
    at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, early, CHUNK, TOKENS, PER)
    upto = (i[None, :] <= i[:, None]).to(tl.float32)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (4 * BT)
    down_i, down_j, q_down = tl.load(p_norm + late), tl.load(p_norm + early), tl.load(p_norm + 2 * BT + late)
    P = tl.zeros([HALF, HALF], tl.float32)
    A = tl.zeros([HALF, HALF], tl.float64)
    for first in range(0, BK, BS):
        b_q = load_rows(q, at_i * q_token + i_key * q_head, in_i, first, q_channel, K, BS).to(tl.float32)
        b_k = load_rows(k, at_i * k_token + i_key * k_head, in_i, first, k_channel, K, BS).to(tl.float32)
        b_g = held(load_rows(g, at_i * g_token + i_head * g_head, in_i, first, g_channel, K, BS))
        e_k = load_rows(k, at_j * k_token + i_key * k_head, in_j, first, k_channel, K, BS).to(tl.float32)
        e_g = held(load_rows(g, at_j * g_token + i_head * g_head, in_j, first, g_channel, K, BS))
        later, before = fine_weight(upto, b_g), fine_weight(1.0 - upto, e_g)
        q_late, k_late = b_q * (q_down[:, None] * later), b_k * (down_i[:, None] * later)
        zero = tl.zeros([HALF, HALF], tl.float32)
        P, more = _pairs(P, zero, q_late, k_late, e_k * (down_j[:, None] * before), DELTA, BACK)
        A += more.to(tl.float64)
    at, corner = pid.to(tl.int64), part * (2 * HALF) * (BT + 1)
    store_reads(reads, at, corner, P, 1, 0, BT, HALF, BACK, TURN)
    if DELTA:
        p_exact = exact + (block.to(tl.int64) * H + i_key) * BT
        k_i, k_j = tl.load(p_exact + late), tl.load(p_exact + early)
        tl.store(overlaps + at * (BT * BT) + late[:, None] * BT + early[None, :], A * (k_i[:, None] * k_j[None, :]))
