"""What a block's tokens see of each other under a decay by channel, where inputs are bf16, and the rows that the way
through the state takes: of a block at once, since all of it is made of the same weights.

As `pairs_channel` and `pairs_across`, of rows in fp16's range, a warp for each tile of 16 tokens. `overlaps`, whose
inverse the delta rule wants, come of two fp16 parts with 24 bits; `reads`, of which outputs are made, of one, but on
the way back.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_place,
    exp2,
    fine_parts,
    fine_product,
    half,
    load_beta,
    power_of_two,
)
from lattn_compile.kernels.chunk_pairs import halves, parted
from lattn_compile.kernels.chunk_rows import load_norms, store_factors, store_sums
from lattn_compile.kernels.chunk_tiles import DOWN, past_tiles, spread, tile_gate_rows, tile_rows

__all__ = ["block_fine"]


@triton.jit
def _products(P, A, o_q, o_late, o_early, READ: tl.constexpr, DELTA: tl.constexpr):
    """What rows that lie behind a middle see of rows before it, added to `P` for queries, and to `A` for keys.
    Operands `[tiles, rows, ..]` or `[rows, ..]`; o_q of one part or two."""
    turned = ()
    for i in tl.static_range(2):
        x = o_early[i]
        turned = turned + ((tl.trans(x) if len(x.shape) == 2 else tl.trans(x, (0, 2, 1))),)
    if READ:
        if len(o_q) == 2:
            P = fine_product(o_q, turned, P)
        else:
            P = tl.dot(o_q[0], turned[0], P)
    if DELTA:
        A = fine_product(o_late, turned, A)
    return P, A


@triton.jit
def _query(q, BACK: tl.constexpr):
    if BACK:
        return fine_parts(q)
    else:
        return (half(q),)


@triton.jit
def _sides(a, HALF: tl.constexpr):
    """Of operands of four tiles those before a middle of 2 HALF tokens and those behind it: tiles `[2, 16, ..]`, or of
    32 tokens rows `[32, ..]`."""
    WIDTH: tl.constexpr = a[0].shape[2]
    before, behind = (), ()
    for i in tl.static_range(len(a)):
        x = tl.reshape(a[i], (2, 2, 16, WIDTH))
        if HALF == 16:
            early, late = tl.split(tl.trans(x, (0, 2, 3, 1)))
        else:
            early, late = tl.split(tl.trans(x, (1, 2, 3, 0)))
            early, late = tl.reshape(early, (32, WIDTH)), tl.reshape(late, (32, WIDTH))
        before, behind = before + (early,), behind + (late,)
    return before, behind


@triton.jit
def _store_reads(p, x, i, j, BT: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr, FAR: tl.constexpr):
    """`store_reads` of pairs of slots i, j; FAR: also zeros for j, i."""
    there, mirror = i * BT + j, j * BT + i
    if TURN:
        there, mirror = mirror, there
    parts = fine_parts(x) if BACK else (half(x),)
    for part in tl.static_range(len(parts)):
        tl.store(p + part * (BT * BT) + there, parts[part])
        if FAR:
            tl.store(p + part * (BT * BT) + mirror, tl.zeros(x.shape, tl.float16))


@triton.jit
def _store_overlaps(p, p_exact, x, i, j, BT: tl.constexpr):
    tl.store(p + i * BT + j, x * (tl.load(p_exact + i) * tl.load(p_exact + j)))


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def block_fine(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, exact, kept, rows, whole, factors, reads, overlaps,
    scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, READ: tl.constexpr, BACK: tl.constexpr,
    TURN: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, bf16, g: `[M, HV, K]`, beta: `[M, HV]`, any strides.
        norms: fp32 `[NB, H, 4, BT]`, gets what `load_norms` returns. exact: float64 `[NB, H, BT]`, of it too.
        kept: under BACK, fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q.
        rows: fp16 `[NB, HV, 5, BT * BK]`: keys from the block's start in two parts, `[BT, BK]`, keys to its end in two
            parts, `[BK, BT]`, and queries from its start, `[BT, BK]`. Without READ no queries, hence four, nor `reads`.
        whole: fp32 `[NB, HV, BK]`. factors: `FACTORS`, but GATE and LIFT.
        reads: of `store_reads`. overlaps: float64 `[NB, HV, BT, BT]`, of the delta rule.

    Grid: (NB * HV,), BT / 16 warps.
    """
    TILE: tl.constexpr = 16
    TILES: tl.constexpr = BT // TILE
    pid = tl.program_id(0)
    block, i_head = pid // HV, (pid % HV).to(tl.int64)
    if tl.load(owner + block) < 0:
        return
    i_key, at = i_head // (HV // H), pid.to(tl.int64)
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)
    i = tl.arange(0, TILE)
    row, column = i[:, None], i[None, :]
    tile = tl.arange(0, TILES)[:, None]
    slot = tile * TILE + column
    token, inside = base + slot, (slot >= low) & (slot < high)
    q_row, k_row, g_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head, token * g_token
    p_g = g + i_head * g_head
    all_q = tile_rows(q, q_row, inside, 0, q_channel, K, BK).to(tl.float32)
    all_k = tile_rows(k, k_row, inside, 0, k_channel, K, BK).to(tl.float32)
    p_factors = factors + at * (10 * BT)
    store_sums(p_factors, slot, all_q, all_k, BT)
    q_down = power_of_two(tl.max(tl.abs(all_q), 2))[1][:, :, None]
    k_down = power_of_two(tl.max(tl.abs(all_k), 2))[1][:, :, None]
    tl.debug_barrier()
    flat = tl.arange(0, BT)
    down_k, k_norm, k_exact, down_q, q_norm = load_norms(p_factors, flat, scale, BT, NORM)
    strength = load_beta(beta, base + flat, (flat >= low) & (flat < high), beta_token, i_head, beta_head, BETA)
    tl.debug_barrier()
    # Value heads of a key head write the same.
    p_exact = exact + (block.to(tl.int64) * H + i_key) * BT
    tl.store(p_exact + flat, k_exact)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (4 * BT) + flat
    tl.store(p_norm, down_k)
    tl.store(p_norm + BT, k_norm)
    tl.store(p_norm + 2 * BT, down_q)
    tl.store(p_norm + 3 * BT, q_norm)
    if BACK:
        p_kept = kept + (block.to(tl.int64) * H + i_key) * (2 * BT) + flat
        tl.store(p_kept, k_norm * down_k)
        tl.store(p_kept + BT, q_norm * down_q)
    ones = tl.full([BT], 1.0, tl.float32)
    store_factors(p_factors, flat, strength, strength * k_norm, ones, ones, k_norm, q_norm, ones, BT, 2)

    P = tl.zeros([TILES, TILE, TILE], tl.float32)
    A = tl.zeros([TILES, TILE, TILE], tl.float64)
    if TILES == 4:
        P_16 = tl.zeros([2, 16, 16], tl.float32)
        A_16 = tl.zeros([2, 16, 16], tl.float64)
        P_32 = tl.zeros([32, 32], tl.float32)
        A_32 = tl.zeros([32, 32], tl.float64)
    p_rows = rows + at * ((4 + READ) * BT * BK)
    upto = spread((column <= row).to(tl.float32), TILES)
    for first in range(0, BK, BS):
        channel = first + tl.arange(0, BS)
        b_k = tile_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_down
        b_g = tile_gate_rows(p_g, g_row, inside, first, g_channel, K, BS)
        o_g = fine_parts(b_g)
        zero = tl.zeros([TILES, TILE, BS], tl.float32)
        if READ:
            b_q = tile_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_down
            self_P = tl.dot(half(b_q), tl.trans(half(b_k), (0, 2, 1)))
            P += tl.where(row == column, self_P, 0.0)
        pairs = tl.zeros([TILES, TILE, TILE], tl.float32)
        more = pairs
        # Every pair of tokens is parted once, so that these are no sums.
        for step in range(4):  # unrolled, it would want more registers
            middle = TILE // 2 >> step
            which = spread(halves(middle, TILE) * DOWN, TILES).to(tl.float16)
            weight = exp2(fine_product((which,), o_g, zero))
            o_k = fine_parts(b_k * weight)
            o_q = o_k
            if READ:
                o_q = _query(b_q * weight, BACK)
            level_P, level_A = _products(pairs, pairs, o_q, o_k, o_k, READ, DELTA)
            apart = parted(row, column, middle)[None, :, :]
            P = tl.where(apart, P + level_P, P)
            more = tl.where(apart, level_A, more)
        A += more.to(tl.float64)

        # Gates of the tile up to a token, and behind it.
        since = fine_product(((upto * DOWN).to(tl.float16),), o_g, zero)
        until = fine_product((((1.0 - upto) * DOWN).to(tl.float16),), o_g, zero)
        gates = tl.sum(b_g, 1) * DOWN
        if TILES == 4:
            late = (tile & 1 != 0)[:, :, None]
            weight = exp2(tl.where(late, since, until))
            o_early, o_late = _sides(fine_parts(b_k * weight), 16)
            o_q = o_late
            if READ:
                _, o_q = _sides(_query(b_q * weight, BACK), 16)
            P_16, more_16 = _products(P_16, tl.zeros([2, 16, 16], tl.float32), o_q, o_late, o_early, READ, DELTA)
            A_16 += more_16.to(tl.float64)
            late = (tile & 2 != 0)[:, :, None]
            weight = exp2(tl.where(late, since, until) + past_tiles(gates, 2, TILES))
            o_early, o_late = _sides(fine_parts(b_k * weight), 32)
            o_q = o_late
            if READ:
                _, o_q = _sides(_query(b_q * weight, BACK), 32)
            P_32, more_32 = _products(P_32, tl.zeros([32, 32], tl.float32), o_q, o_late, o_early, READ, DELTA)
            A_32 += more_32.to(tl.float64)
        weight = exp2(since + past_tiles(gates, 0, TILES))
        place = slot[:, :, None] * BK + channel[None, None, :]
        parts = fine_parts(b_k * weight)
        tl.store(p_rows + place, parts[0])
        tl.store(p_rows + BT * BK + place, parts[1])
        if READ:
            tl.store(p_rows + 4 * (BT * BK) + place, half(b_q * weight))
        parts = fine_parts(b_k * exp2(until + past_tiles(gates, 1, TILES)))
        place = slot[:, :, None] + channel[None, None, :] * BT
        tl.store(p_rows + 2 * BT * BK + place, parts[0])
        tl.store(p_rows + 3 * BT * BK + place, parts[1])
        tl.store(whole + at * BK + channel, exp2(tl.sum(gates, 0)))

    tl.debug_barrier()
    p_reads, p_overlaps = reads, overlaps
    if READ:
        p_reads = reads + at * ((2 if BACK else 1) * BT * BT)
    if DELTA:
        p_overlaps = overlaps + at * (BT * BT)
    slot_i, slot_j = slot[:, :, None], slot[:, None, :]
    if READ:
        _store_reads(p_reads, P, slot_i, slot_j, BT, BACK, TURN, False)
    if DELTA:
        _store_overlaps(p_overlaps, p_exact, A, slot_i, slot_j, BT)
    if TILES == 4:
        pair = tl.arange(0, 2)[:, None, None] * 32
        slot_i, slot_j = pair + 16 + row[None, :, :], pair + column[None, :, :]
        if READ:
            _store_reads(p_reads, P_16, slot_i, slot_j, BT, BACK, TURN, True)
        if DELTA:
            _store_overlaps(p_overlaps, p_exact, A_16, slot_i, slot_j, BT)
        slot_i, slot_j = 32 + tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
        if READ:
            _store_reads(p_reads, P_32, slot_i, slot_j, BT, BACK, TURN, True)
        if DELTA:
            _store_overlaps(p_overlaps, p_exact, A_32, slot_i, slot_j, BT)
