"""What a block's tokens see of each other: `reads` and `overlaps` of `reference/decay.py`, in tiles of TILE tokens.

A program makes one tile of the lower triangle; a block of 64 has three. Tiles, because a product of 64 rows would be
one of Hopper's asynchronous ones (see `chunk.py`), and because half of a block's matrix is zero.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    after_sum,
    block_tokens,
    fine_parts,
    flipped,
    gate_exp,
    half,
    held,
    load_beta,
    load_rows,
    operand,
    product,
    split_sum,
    summed,
)
from lattn_compile.kernels.chunk_rows import GATE_ROW, KEY_ROW, MOST_ROW, QUERY_ROW
from lattn_compile.kernels.common.inputs import no_more, rstd

__all__ = [
    "halves",
    "pairs_across",
    "pairs_channel",
    "pairs_head",
    "pairs_rows",
    "parted",
    "store_reads",
    "store_tile",
    "tile_of",
    "tile_weights",
]


@triton.jit
def tile_of(pid, BT: tl.constexpr, TILE: tl.constexpr):
    """Of a program: (its number without the tile, the tile's row, its column)."""
    if BT == TILE:
        return pid, 0, 0
    else:
        tile = pid % 3
        return pid // 3, (tile + 1) // 2, tile // 2


@triton.jit
def tile_weights(g_i, g_j, off, TILE: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr):
    """`exp(g_{j+1} + ... + g_i)` of a tile, 0 for j > i; held gates of its rows and columns. off: not on the diagonal.

    Every exponent is summed from the gates of its own segment.
    """
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    if WIDE:
        total = tl.cumsum(g_i.to(tl.float64), 0)
        behind = tl.cumsum(g_j.to(tl.float64), 0, reverse=True) - g_j.to(tl.float64)
        inside = total[:, None] - total[None, :]
        across = total[:, None] + behind[None, :]
    else:
        coarse, fine = split_sum(g_i, False)
        inside = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        across = (coarse + fine)[:, None] + after_sum(g_j)[None, :]
    total = tl.where(off, across, tl.where(i >= j, inside, float("-inf")))
    return gate_exp(no_more(total, 0.0), LOW)


@triton.jit
def store_tile(p, x, i_tile, j_tile, BT: tl.constexpr, TILE: tl.constexpr):
    """One tile of `[BT, BT]` at `p`; the one above the diagonal is zero, and is stored with its mirror image."""
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    tl.store(p + (i_tile * TILE + i) * BT + j_tile * TILE + j, x)
    if BT > TILE:  # noqa: SIM102 # one is known when compiled, the other is not
        if i_tile != j_tile:
            tl.store(p + (j_tile * TILE + i) * BT + i_tile * TILE + j, tl.zeros([TILE, TILE], x.dtype))


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def pairs_head(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, strengths, reads, overlaps, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Decay by head, or none.

    Args:
        q, k: `[M, H, K]`, g, beta: `[M, HV]`, any strides.
        norms: fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q.
        strengths: fp32 `[NB, HV, BT]`: beta in its slots.
        reads: fp32 `[NB, HV, BT, BT]`. overlaps: float64, likewise, of the delta rule.
        skip: blocks of each sequence before the first that is scheduled. BS: channels at a time.

    Grid: (NB * H * tiles,).
    """
    pid, i_tile, j_tile = tile_of(tl.program_id(0), BT, TILE)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    i, j = tl.arange(0, TILE), tl.arange(0, TILE)
    at_i, in_i = block_tokens(
        owner, index, starts, lengths, offsets, block, skip, i_tile * TILE + i, CHUNK, TOKENS, PER
    )
    at_j, in_j = block_tokens(
        owner, index, starts, lengths, offsets, block, skip, j_tile * TILE + j, CHUNK, TOKENS, PER
    )
    P = tl.zeros([TILE, TILE], tl.float32)
    A = tl.zeros([TILE, TILE], tl.float64 if DELTA else tl.float32)
    q_i = tl.zeros([TILE], tl.float32)
    k_i = tl.zeros([TILE], tl.float32)
    k_j = tl.zeros([TILE], tl.float32)
    for first in range(0, BK, BS):
        b_q = load_rows(q, at_i * q_token + i_key * q_head, in_i, first, q_channel, K, BS)
        b_k = load_rows(k, at_i * k_token + i_key * k_head, in_i, first, k_channel, K, BS)
        early = load_rows(k, at_j * k_token + i_key * k_head, in_j, first, k_channel, K, BS)
        o_early = flipped(operand(early, False))
        P += product(operand(b_q, False), o_early)
        if DELTA:
            A += tl.dot(b_k.to(tl.float64), tl.trans(early.to(tl.float64)), out_dtype=tl.float64)
        if NORM:
            q_i += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
            k_i += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
            k_j += tl.sum(early.to(tl.float32) * early.to(tl.float32), 1)
    q_i, k_i, k_j = _rstd(q_i, NORM) * scale, _rstd(k_i, NORM), _rstd(k_j, NORM)
    if i_tile == j_tile:
        p_norm = norms + pid.to(tl.int64) * (2 * BT) + i_tile * TILE + i
        tl.store(p_norm, k_i)
        tl.store(p_norm + BT, q_i)
    P = P * (q_i[:, None] * k_j[None, :])
    A = A * k_i.to(A.dtype)[:, None] * k_j.to(A.dtype)[None, :]
    strict = (i[:, None] > j[None, :]) | (i_tile != j_tile)
    decay = tl.where(strict | (i[:, None] == j[None, :]), 1.0, 0.0).to(A.dtype)
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        at = block.to(tl.int64) * HV + i_head
        if i_tile == j_tile:
            b_beta = load_beta(beta, at_i, in_i, beta_token, i_head, beta_head, BETA)
            tl.store(strengths + at * BT + i_tile * TILE + i, b_beta)
        if DECAY == 1:
            g_i = held(tl.load(g + at_i * g_token + i_head * g_head, mask=in_i, other=0.0))
            g_j = held(tl.load(g + at_j * g_token + i_head * g_head, mask=in_j, other=0.0))
            decay = tile_weights(g_i, g_j, i_tile != j_tile, TILE, False, DELTA)
        store_tile(reads + at * (BT * BT), P * decay.to(tl.float32), i_tile, j_tile, BT, TILE)
        if DELTA:
            store_tile(overlaps + at * (BT * BT), tl.where(strict, A * decay, 0.0), i_tile, j_tile, BT, TILE)


@triton.jit
def store_reads(
    p, at, x, i_tile, j_tile, BT: tl.constexpr, TILE: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr
):  # fmt: skip
    """A tile of what tokens see of each other without factors of rows: fp16 `[NB, HV, BT, BT]`, under BACK in two
    parts, `[NB, HV, 2, BT, BT]`, under TURN transposed."""
    if BACK:
        high, low = fine_parts(x)
        place = p + at * (2 * BT * BT)
        if TURN:
            store_tile(place, tl.trans(high), j_tile, i_tile, BT, TILE)
            store_tile(place + BT * BT, tl.trans(low), j_tile, i_tile, BT, TILE)
        else:
            store_tile(place, high, i_tile, j_tile, BT, TILE)
            store_tile(place + BT * BT, low, i_tile, j_tile, BT, TILE)
    else:
        store_tile(p + at * (BT * BT), half(x), i_tile, j_tile, BT, TILE)


@triton.jit(do_not_specialize=["H", "HV"])
def pairs_rows(
    owner, rows, factors, exact, reads, overlaps, seen, H, HV, BK: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Decay by head, or none, from rows of `chunk_rows.py`.

    Args:
        exact: of `head_rows`. reads: of `store_reads`, under READ.
        overlaps: float64 `[NB, HV, BT, BT]`, of the delta rule, strictly lower.
            Its rounding errors are amplified by the norm of the inverse.
        seen: under BACK, of a decay: `reads` with their factors, fp32 `[NB, HV, BT, BT]`.

    Grid: (NB * H * tiles,).
    """
    pid, i_tile, j_tile = tile_of(tl.program_id(0), BT, TILE)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    i, channel = tl.arange(0, TILE), tl.arange(0, BK)
    at_i, at_j = i_tile * TILE + i, j_tile * TILE + i
    ROWS: tl.constexpr = (1 if WIDE else 2) + READ
    p_rows = rows + pid.to(tl.int64) * (ROWS * BT * BK)
    P = tl.zeros([TILE, TILE], tl.float32)
    if READ:
        p_q = p_rows + (ROWS - 1) * BT * BK
        early = tl.trans(tl.load(p_rows + at_j[:, None] * BK + channel[None, :]))
        if TURN:
            b_q = tl.trans(tl.load(p_q + channel[:, None] * BT + at_i[None, :]))
        else:
            b_q = tl.load(p_q + at_i[:, None] * BK + channel[None, :])
        P = tl.dot(b_q, early)
    if DELTA:
        # One product's sixteen channels are exact in fp32, their sum in float64.
        A = tl.zeros([TILE, TILE], tl.float64)
        few = tl.arange(0, 16)[None, :]
        for begin in range(0, BK, 16):
            late = tl.load(p_rows + at_i[:, None] * BK + begin + few)
            sooner = tl.load(p_rows + at_j[:, None] * BK + begin + few)
            A += tl.dot(late, tl.trans(sooner)).to(tl.float64)
    strict = (i[:, None] > i[None, :]) | (i_tile != j_tile)
    decay = tl.where(strict | (i[:, None] == i[None, :]), 1.0, 0.0).to(tl.float64)
    for ratio in range(HV // H):
        at = block.to(tl.int64) * HV + i_key * (HV // H) + ratio
        p = factors + at * (10 * BT)
        if DECAY == 1:
            g_i, g_j = tl.load(p + GATE_ROW * BT + at_i), tl.load(p + GATE_ROW * BT + at_j)
            decay = tile_weights(g_i, g_j, i_tile != j_tile, TILE, True, True)
        D = P * decay.to(tl.float32)
        if READ:
            store_reads(reads, at, D, i_tile, j_tile, BT, TILE, BACK, TURN)
        if BACK and DECAY == 1:
            k_j = tl.load(p + KEY_ROW * BT + at_j) * tl.load(p + MOST_ROW * BT)
            q_i = tl.load(p + QUERY_ROW * BT + at_i)
            store_tile(seen + at * (BT * BT), D * (q_i[:, None] * k_j[None, :]), i_tile, j_tile, BT, TILE)
        if DELTA:
            wide = tl.where(strict, A * decay, 0.0)
            p_exact = exact + pid.to(tl.int64) * BT
            wide = wide * tl.load(p_exact + at_i)[:, None] * tl.load(p_exact + at_j)[None, :]
            tl.store(overlaps + at * (BT * BT) + at_i[:, None] * BT + at_j[None, :], wide)


@triton.jit
def _rstd(total, NORM: tl.constexpr):
    """From rows' sums of squares to what the rows are multiplied with: 1 where they stay as they are."""
    if NORM:
        return rstd(total)
    else:
        return tl.full(total.shape, 1.0, tl.float32)


@triton.jit
def halves(half, SIZE: tl.constexpr):
    """0-1 matrix `[SIZE, SIZE]`, fp32: the gates between a token and the middle of its 2 `half` tokens, a power of
    two."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.where(((i ^ j) < half) & (((i & half) != 0) == (j <= i)), 1.0, 0.0)


@triton.jit
def parted(late, early, half):
    """Whether the middle of 2 `half` tokens, a power of two, parts token `late` from an earlier one."""
    return ((late ^ early) >= half) & ((late ^ early) < 2 * half) & ((late & half) != 0)


@triton.jit
def _level(P, A, q, k, g, half, TILE: tl.constexpr, DELTA: tl.constexpr):
    """Adds to `P` and `A` the pairs that the middle of 2 `half` tokens parts; q, k, g: some channels of a tile."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    weight = gate_exp(summed(halves(half, TILE), g, False, DELTA), False)
    apart = parted(row, column, half)
    weighted = k.to(weight.dtype) * weight
    o_early = flipped(operand(weighted, False))
    P += tl.where(apart, product(operand(q * weight.to(tl.float32), False), o_early), 0.0)
    if DELTA:
        A += tl.where(apart, tl.dot(weighted, tl.trans(weighted), out_dtype=tl.float64), 0.0)
    return P, A


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def pairs_channel(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, strengths, reads, overlaps, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Decay by channel, g `[M, HV, K]`: the tiles on the diagonal. Other arguments as in `pairs_head`.

    As `reference/decay.py` does: a weight inside the contraction factors at any token between the two, so a tile is
    halved again and again, and every pair of tokens is part of a product at the level that parts it.

    Grid: (NB * HV * BT / TILE,).
    """
    tile, pid = tl.program_id(0) % (BT // TILE), tl.program_id(0) // (BT // TILE)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    i = tl.arange(0, TILE)
    slot = tile * TILE + i
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    row, column = i[:, None], i[None, :]
    P = tl.zeros([TILE, TILE], tl.float32)
    A = tl.zeros([TILE, TILE], tl.float64 if DELTA else tl.float32)
    q_norm = tl.zeros([TILE], tl.float32)
    k_norm = tl.zeros([TILE], tl.float32)
    for first in range(0, BK, BS):
        b_q = load_rows(q, token * q_token + i_key * q_head, inside, first, q_channel, K, BS).to(tl.float32)
        b_k = load_rows(k, token * k_token + i_key * k_head, inside, first, k_channel, K, BS).to(tl.float32)
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
        P += tl.where(row == column, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        half = TILE // 2
        while half > 0:
            P, A = _level(P, A, b_q, b_k, b_g, half, TILE, DELTA)
            half = half // 2
        if NORM:
            q_norm += tl.sum(b_q * b_q, 1)
            k_norm += tl.sum(b_k * b_k, 1)
    q_norm, k_norm = _rstd(q_norm, NORM) * scale, _rstd(k_norm, NORM)
    if i_head % (HV // H) == 0:
        p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot
        tl.store(p_norm, k_norm)
        tl.store(p_norm + BT, q_norm)
    b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
    tl.store(strengths + pid.to(tl.int64) * BT + slot, b_beta)
    at = pid.to(tl.int64)
    store_tile(reads + at * (BT * BT), P * (q_norm[:, None] * k_norm[None, :]), tile, tile, BT, TILE)
    if DELTA:
        A = A * k_norm.to(A.dtype)[:, None] * k_norm.to(A.dtype)[None, :]
        store_tile(overlaps + at * (BT * BT), A, tile, tile, BT, TILE)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def pairs_across(
    q, k, g, starts, lengths, offsets, owner, index, norms, reads, overlaps, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Decay by channel: the tiles below the diagonal that part a block's 2 HALF tokens in the middle.

    After `pairs_channel`, whose `norms` it takes. Grid: (NB * HV * BT / (2 * HALF),).
    """
    part, pid = tl.program_id(0) % (BT // (2 * HALF)), tl.program_id(0) // (BT // (2 * HALF))
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    i = tl.arange(0, HALF)
    early = part * (2 * HALF) + i
    late = early + HALF
    at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, late, CHUNK, TOKENS, PER)
    at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, early, CHUNK, TOKENS, PER)
    upto = (i[None, :] <= i[:, None]).to(tl.float32)
    P = tl.zeros([HALF, HALF], tl.float32)
    A = tl.zeros([HALF, HALF], tl.float64 if DELTA else tl.float32)
    for first in range(0, BK, BS):
        b_q = load_rows(q, at_i * q_token + i_key * q_head, in_i, first, q_channel, K, BS).to(tl.float32)
        b_k = load_rows(k, at_i * k_token + i_key * k_head, in_i, first, k_channel, K, BS).to(tl.float32)
        b_g = held(load_rows(g, at_i * g_token + i_head * g_head, in_i, first, g_channel, K, BS))
        e_k = load_rows(k, at_j * k_token + i_key * k_head, in_j, first, k_channel, K, BS).to(tl.float32)
        e_g = held(load_rows(g, at_j * g_token + i_head * g_head, in_j, first, g_channel, K, BS))
        later = gate_exp(summed(upto, b_g, False, DELTA), False)
        before = gate_exp(summed(1.0 - upto, e_g, False, DELTA), False)
        weighted = e_k.to(before.dtype) * before
        o_early = flipped(operand(weighted, False))
        P += product(operand(b_q * later.to(tl.float32), False), o_early)
        if DELTA:
            A += tl.dot(b_k.to(tl.float64) * later, tl.trans(weighted), out_dtype=tl.float64)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    k_i, k_j, q_i = tl.load(p_norm + late), tl.load(p_norm + early), tl.load(p_norm + BT + late)
    at, corner = pid.to(tl.int64), part * (2 * HALF) * (BT + 1)
    store_tile(reads + at * (BT * BT) + corner, P * (q_i[:, None] * k_j[None, :]), 1, 0, BT, HALF)
    if DELTA:
        A = A * k_i.to(A.dtype)[:, None] * k_j.to(A.dtype)[None, :]
        store_tile(overlaps + at * (BT * BT) + corner, A, 1, 0, BT, HALF)
