"""Of a decay by channel: what pairs of tokens of a chunk make of the gradients of q, k and g.

As `prefill_pairs.py` computes them: among 16 tokens by the levels of `chunk_levels.py`, exact, and between 16 rows and
each earlier 16 tokens at the rows' start, with their operands as the forward rounded them. A program has 16 tokens: as
rows of earlier columns, and as columns of later rows.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_levels import level
from lattn_compile.kernels.chunk_math import block_tokens, gate_exp, held, load_rows, operand
from lattn_compile.kernels.prefill_codec import site, site_product
from lattn_compile.kernels.prefill_pairs import SUB_BLOCK

__all__ = ["grad_channels", "grad_gates"]


@triton.jit
def _gates_behind(
    p_g, owner, index, starts, lengths, offsets, block, skip, tile, g_token, g_channel, K: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of 16 tokens: held sums of the gates behind each, and of all."""
    SIZE: tl.constexpr = SUB_BLOCK
    i, channel = tl.arange(0, SIZE), tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, tile * SIZE + i + 1, BT, BT, 1)
    behind = held(load_rows(p_g, token * g_token, inside & (i < SIZE - 1), 0, g_channel, K, BK))
    top, some = block_tokens(owner, index, starts, lengths, offsets, block, skip, tile * SIZE, BT, BT, 1)
    opening = tl.load(p_g + top * g_token + channel * g_channel, mask=some & (channel < K), other=0.0)
    return tl.cumsum(behind, 0, reverse=True), tl.sum(behind, 0) + held(opening)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_channels(
    q, k, g, starts, lengths, offsets, owner, index, norms, dreads, doverlaps, dkeys, dgates, passed, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, KK: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """Adds to `dkeys` and `dgates` of `grad_keys`.

    Args:
        dreads, doverlaps: of the kernels before. BS: channels at a time, of exact pairs.
        passed: fp32 `[NB, HV, BT / 16, BT / 16, BK]`: what the columns of one 16 and the rows of a later one, in this
            order, make of each gate of the tokens between them.

    Grid: (NB * HV * BT / 16,).
    """
    SIZE: tl.constexpr = SUB_BLOCK
    TILES: tl.constexpr = BT // SIZE
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at, i = pid.to(tl.int64), tl.arange(0, SIZE)
    slot, channel = tile * SIZE + i, tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    p_q, p_k, p_g = q + i_key * q_head, k + i_key * k_head, g + i_head * g_head
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    k_norm, q_norm = tl.load(p_norm + slot)[:, None], tl.load(p_norm + BT + slot)[:, None]
    p_reads, p_overlaps = dreads + at * (BT * BT), doverlaps
    if DELTA:
        p_overlaps = doverlaps + at * (BT * BT)
    p_keys, p_gates = dkeys + at * (2 * BT * BK) + slot[:, None] * BK, dgates + (at * BT + slot[:, None]) * BK
    pair, flip = slot[:, None] * BT + tile * SIZE + i[None, :], (tile * SIZE + i[None, :]) * BT + slot[:, None]
    D1, D1_flip = tl.load(p_reads + pair), tl.load(p_reads + flip)
    D2, D2_flip = D1, D1_flip
    if DELTA:
        D2, D2_flip = tl.load(p_overlaps + pair), tl.load(p_overlaps + flip)
    own = tl.sum(tl.where(i[:, None] == i[None, :], D1, 0.0), 1)[:, None]
    for first in range(0, BK, BS):
        s_q = load_rows(p_q, token * q_token, inside, first, q_channel, K, BS).to(tl.float32) * q_norm
        s_k = load_rows(p_k, token * k_token, inside, first, k_channel, K, BS).to(tl.float32) * k_norm
        s_g = held(load_rows(p_g, token * g_token, inside, first, g_channel, K, BS))
        place = (first + tl.arange(0, BS))[None, :]
        s_dq, s_dk = tl.load(p_keys + place) + own * s_k, tl.load(p_keys + BT * BK + place) + own * s_q
        total = tl.load(p_gates + place)
        for step in tl.static_range(4):
            s_dq, s_dk, total = level(
                s_dq, s_dk, total, D1, D2, D1_flip, D2_flip, s_k, s_q, s_g, 8 >> step, SIZE, DELTA, LOW
            )
        tl.store(p_keys + place, s_dq)
        tl.store(p_keys + BT * BK + place, s_dk)
        tl.store(p_gates + place, total)
    tl.debug_barrier()  # other threads have these channels next

    b_q = load_rows(p_q, token * q_token, inside, 0, q_channel, K, BK).to(tl.float32) * q_norm
    b_k = load_rows(p_k, token * k_token, inside, 0, k_channel, K, BK).to(tl.float32) * k_norm
    later = gate_exp(tl.cumsum(held(load_rows(p_g, token * g_token, inside, 0, g_channel, K, BK)), 0), LOW)
    dq = tl.zeros([SIZE, BK], tl.float32)
    dk = tl.zeros([SIZE, BK], tl.float32)
    between = tl.zeros([BK], tl.float32)
    for back in range(1, tile + 1):
        other = tile - back
        at_j = other * SIZE + i
        there, some = block_tokens(owner, index, starts, lengths, offsets, block, skip, at_j, BT, BT, 1)
        behind, all_of = _gates_behind(
            p_g, owner, index, starts, lengths, offsets, block, skip, other, g_token, g_channel, K, BK, BT
        )
        e_k = load_rows(p_k, there * k_token, some, 0, k_channel, K, BK).to(tl.float32)
        e_k = e_k * tl.load(p_norm + at_j)[:, None] * gate_exp(behind + between[None, :], LOW)
        between += all_of
        place = slot[:, None] * BT + at_j[None, :]
        o_early, e_scale = site(e_k, 1, QK, LOW)
        dq += site_product(operand(tl.load(p_reads + place) * e_scale[None, :], LOW), o_early)
        if DELTA:
            if KK != QK:
                o_early, e_scale = site(e_k, 1, KK, LOW)
            dk += site_product(operand(tl.load(p_overlaps + place) * e_scale[None, :], LOW), o_early)
    dq, dk = dq * later, dk * later
    total = tl.cumsum(dq * b_q + dk * b_k, 0, reverse=True)
    behind, all_of = _gates_behind(
        p_g, owner, index, starts, lengths, offsets, block, skip, tile, g_token, g_channel, K, BK, BT
    )
    between = tl.zeros([BK], tl.float32)
    for other in range(tile + 1, TILES):
        at_i = other * SIZE + i
        there, some = block_tokens(owner, index, starts, lengths, offsets, block, skip, at_i, BT, BT, 1)
        l_g = held(load_rows(p_g, there * g_token, some, 0, g_channel, K, BK))
        weight = gate_exp(tl.cumsum(l_g, 0), LOW)
        place = at_i[None, :] * BT + slot[:, None]
        l_x = load_rows(p_q, there * q_token, some, 0, q_channel, K, BK).to(tl.float32)
        o_late, l_scale = site(l_x * tl.load(p_norm + BT + at_i)[:, None] * weight, 1, QK, LOW)
        dy = site_product(operand(tl.load(p_reads + place) * l_scale[None, :], LOW), o_late)
        if DELTA:
            l_x = load_rows(p_k, there * k_token, some, 0, k_channel, K, BK).to(tl.float32)
            o_late, l_scale = site(l_x * tl.load(p_norm + at_i)[:, None] * weight, 1, KK, LOW)
            dy += site_product(operand(tl.load(p_overlaps + place) * l_scale[None, :], LOW), o_late)
        dy = dy * gate_exp(behind + between[None, :], LOW)
        between += tl.sum(l_g, 0)
        dk += dy
        exponent = dy * b_k
        total += tl.cumsum(exponent, 0) - exponent
        tl.store(passed + ((at * TILES + tile) * TILES + other) * BK + channel, tl.sum(exponent, 0))
    p_keys += channel[None, :]
    p_gates += channel[None, :]
    tl.store(p_keys, tl.load(p_keys) + dq)
    tl.store(p_keys + BT * BK, tl.load(p_keys + BT * BK) + dk)
    tl.store(p_gates, tl.load(p_gates) + total)


@triton.jit(do_not_specialize=["skip", "HV"])
def grad_gates(
    starts, lengths, offsets, owner, index, dgates, passed, dg, skip, dg_token, dg_head, dg_channel, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Writes g's gradients to `dg`, `[M, HV, K]`. Grid: (NB * HV * BT / 16,)."""
    SIZE: tl.constexpr = SUB_BLOCK
    TILES: tl.constexpr = BT // SIZE
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, slot, channel = pid.to(tl.int64), tile * SIZE + tl.arange(0, SIZE), tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    over = tl.zeros([BK], tl.float32)
    for early in range(tile):
        for late in range(tile + 1, TILES):
            over += tl.load(passed + ((at * TILES + early) * TILES + late) * BK + channel)
    total = tl.load(dgates + (at * BT + slot[:, None]) * BK + channel[None, :]) + over[None, :]
    p_dg = dg + (token * dg_token + i_head * dg_head)[:, None] + channel[None, :] * dg_channel
    tl.store(p_dg, total.to(dg.dtype.element_ty), mask=inside[:, None] & (channel < K)[None, :])
