"""Of a decay by channel: what pairs of tokens of a block make of the gradients of q, k and g.

In the tiles and levels of `pairs_channel` and `pairs_across`. A program handles some channels of a block and value
head, part after part; what one part adds to a row the next one finds in memory. Tiles are small, since a level costs
what its rows cost squared, and most of that is zero.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    exact_operand,
    held,
    load_rows,
    operand,
    product,
    weights,
)
from lattn_compile.kernels.chunk_pairs import halves, parted

__all__ = ["grad_levels", "level"]


@triton.jit
def _back(x, half, TILE: tl.constexpr, LOW: tl.constexpr):
    """`halves(half)^T @ x`: from exponents of tokens to the gates that they are sums of."""
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    which = (((i ^ j) < half) & (((j & half) != 0) == (i <= j))).to(tl.float32)
    return product(exact_operand(which), operand(x, LOW))


@triton.jit
def level(
    dq, dk, total, D1, D2, D1_flip, D2_flip, k, q, g, half,
    TILE: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Adds to a tile's gradients of q, k and g those of the pairs that the middle of 2 `half` tokens parts."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    weight = weights(halves(half, TILE), g, LOW)
    apart, apart_flip = parted(row, column, half), parted(column, row, half)
    o_k, o_q = operand(k * weight, LOW), operand(q * weight, LOW)
    # Of the later half's rows, weighted from the middle; and of the earlier half's, to the middle.
    dlate = product(operand(tl.where(apart, D1, 0.0), LOW), o_k)
    dearly = product(operand(tl.where(apart_flip, D1_flip, 0.0), LOW), o_q)
    exponent = dlate * q
    dq += dlate * weight
    if DELTA:
        dlate = product(operand(tl.where(apart, D2, 0.0), LOW), o_k)
        dearly += product(operand(tl.where(apart_flip, D2_flip, 0.0), LOW), o_k)
        exponent += dlate * k
        dk += dlate * weight
    dk += dearly * weight
    return dq, dk, total + _back((exponent + dearly * k) * weight, half, TILE, LOW)


@triton.jit
def _across(
    p_q, p_k, p_g, starts, lengths, offsets, owner, index, p_norm, p_reads, p_overlaps, p_keys, p_gates, block, skip,
    first, q_token, q_channel, k_token, k_channel, g_token, g_channel,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Adds what the 2 HALF tokens from slot FIRST on make of each other across their middle. Pointers: of the head."""
    early = FIRST + tl.arange(0, HALF)
    late = early + HALF
    at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, late, CHUNK, TOKENS, PER)
    at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, early, CHUNK, TOKENS, PER)
    l_q = load_rows(p_q, at_i * q_token, in_i, first, q_channel, K, BS).to(tl.float32)
    l_q = l_q * tl.load(p_norm + BT + late)[:, None]
    e_k = load_rows(p_k, at_j * k_token, in_j, first, k_channel, K, BS).to(tl.float32)
    e_k = e_k * tl.load(p_norm + early)[:, None]
    l_g = held(load_rows(p_g, at_i * g_token, in_i, first, g_channel, K, BS))
    e_g = held(load_rows(p_g, at_j * g_token, in_j, first, g_channel, K, BS))
    m = tl.arange(0, HALF)
    upto = (m[None, :] <= m[:, None]).to(tl.float32)
    weight = weights(upto, l_g, LOW)
    before = weights(1.0 - upto, e_g, LOW)
    there, back = late[:, None] * BT + early[None, :], late[None, :] * BT + early[:, None]
    at_late, at_early = late[:, None] * BK, early[:, None] * BK
    o_k = operand(e_k * before, LOW)
    dlate = product(operand(tl.load(p_reads + there), LOW), o_k)
    dearly = product(operand(tl.load(p_reads + back), LOW), operand(l_q * weight, LOW))
    exponent = dlate * l_q
    tl.store(p_keys + at_late, tl.load(p_keys + at_late) + dlate * weight)
    if DELTA:
        l_k = load_rows(p_k, at_i * k_token, in_i, first, k_channel, K, BS).to(tl.float32)
        l_k = l_k * tl.load(p_norm + late)[:, None]
        dlate = product(operand(tl.load(p_overlaps + there), LOW), o_k)
        dearly += product(operand(tl.load(p_overlaps + back), LOW), operand(l_k * weight, LOW))
        exponent += dlate * l_k
        p_late = p_keys + BT * BK + at_late
        tl.store(p_late, tl.load(p_late) + dlate * weight)
    gates = tl.load(p_gates + at_late) + tl.cumsum(exponent * weight, 0, reverse=True)
    tl.store(p_gates + at_late, gates)
    dearly = dearly * before
    p_early = p_keys + BT * BK + at_early
    tl.store(p_early, tl.load(p_early) + dearly)
    exponent = dearly * e_k
    tl.store(p_gates + at_early, tl.load(p_gates + at_early) + (tl.cumsum(exponent, 0) - exponent))


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_levels(
    q, k, g, starts, lengths, offsets, owner, index, norms, dreads, doverlaps, dkeys, dgates, dg, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    dg_token, dg_head, dg_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Adds to `dkeys` and `dgates` (of `grad_keys`), and writes g's gradients to `dg`.

    Args:
        dreads, doverlaps: of `grad_pairs`. TILE: 16 tokens.

    Grid: (NB * HV * BK / BS,).
    """
    SLICES: tl.constexpr = BK // BS
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    channel = first + tl.arange(0, BS)
    p_q, p_k, p_g = q + i_key * q_head, k + i_key * k_head, g + i_head * g_head
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    p_keys, p_gates = dkeys + at * (2 * BT * BK) + channel[None, :], dgates + at * (BT * BK) + channel[None, :]
    p_reads, p_overlaps = dreads + at * (BT * BT), doverlaps
    if DELTA:
        p_overlaps = doverlaps + at * (BT * BT)
    i = tl.arange(0, TILE)
    row, column = i[:, None], i[None, :]
    for tile in range(BT // TILE):
        slot = tile * TILE + i
        token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
        b_q = load_rows(p_q, token * q_token, inside, first, q_channel, K, BS).to(tl.float32)
        b_k = load_rows(p_k, token * k_token, inside, first, k_channel, K, BS).to(tl.float32)
        b_k, b_q = b_k * tl.load(p_norm + slot)[:, None], b_q * tl.load(p_norm + BT + slot)[:, None]
        b_g = held(load_rows(p_g, token * g_token, inside, first, g_channel, K, BS))
        pair, flip = slot[:, None] * BT + tile * TILE + column, (tile * TILE + column) * BT + slot[:, None]
        D1, D1_flip = tl.load(p_reads + pair), tl.load(p_reads + flip)
        D2, D2_flip = D1, D1_flip
        if DELTA:
            D2, D2_flip = tl.load(p_overlaps + pair), tl.load(p_overlaps + flip)
        own = tl.sum(tl.where(row == column, D1, 0.0), 1)[:, None]
        place = slot[:, None] * BK
        dq, dk = tl.load(p_keys + place) + own * b_k, tl.load(p_keys + BT * BK + place) + own * b_q
        total = tl.load(p_gates + place)
        for step in range(4):  # unrolled, it would want more registers
            dq, dk, total = level(
                dq, dk, total, D1, D2, D1_flip, D2_flip, b_k, b_q, b_g, TILE // 2 >> step, TILE, DELTA, LOW
            )
        tl.store(p_keys + place, dq)
        tl.store(p_keys + BT * BK + place, dk)
        tl.store(p_gates + place, total)
    # The pairs of two neighbouring parts: of 16 tokens each, twice, and then of 32.
    for pair in tl.static_range(3 if BT == 64 else 0):
        tl.debug_barrier()
        _across(
            p_q, p_k, p_g, starts, lengths, offsets, owner, index, p_norm, p_reads, p_overlaps, p_keys, p_gates,
            block, skip, first, q_token, q_channel, k_token, k_channel, g_token, g_channel, K, BK, BS, BT,
            pair % 2 * 32, 32 if pair == 2 else 16, DELTA, LOW, CHUNK, TOKENS, PER,
        )  # fmt: skip
    tl.debug_barrier()
    slot = tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    p_dg = dg + (token * dg_token + i_head * dg_head)[:, None] + channel[None, :] * dg_channel
    total = tl.load(p_gates + slot[:, None] * BK)
    tl.store(p_dg, total.to(dg.dtype.element_ty), mask=inside[:, None] & (channel < K)[None, :])
