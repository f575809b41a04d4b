"""Gradients of the prefill's inputs, from what `prefill_backward.py` left, for all chunks at once.

    dreads = dO V'^T                  dq_in = dO S^T              dk_out = V' dS'^T
    dW     = -dV' S^T                 dU    = dV'
    dT     = dW (beta K e^G)^T + dU (beta V)^T                    dA     = -T^T dT T^T

with every operand as the forward rounded it. `deliver` of `chunk_gradients.py` sums over value heads and slices, and
goes back through the norms. Products have all rows of a chunk, so programs have two warps, see "Hopper" in `chunk.py`.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    exact_operand,
    held,
    load_matrix,
    load_rows,
    operand,
    product,
)
from lattn_compile.kernels.prefill_codec import flipped_parts, load_site, site, site_again, site_product
from lattn_compile.kernels.prefill_heads import head_weights
from lattn_compile.kernels.prefill_pairs import gate_parts, weight_of

__all__ = ["grad_keys", "grad_reads", "grad_system"]


@triton.jit
def _gates(p, total, slot, BT: tl.constexpr):
    """What pairs `j < i` make of the gates `j < l <= i` between them, summed pair by pair (`chunk_backward.py`)."""
    before = tl.where(slot[:, None] > slot[None, :], tl.cumsum(total, 1), 0.0)
    tl.store(p + slot + 1, tl.sum(before, 0), mask=slot < BT - 1)
    tl.store(p + slot, tl.zeros([BT], tl.float32), mask=slot == 0)


@triton.jit(do_not_specialize=["scale", "skip", "HV"])
def grad_reads(
    grad_o, starts, lengths, offsets, owner, index, factors, reads, news, dreads, gates, scale, skip,
    o_token, o_head, o_column, HV,
    V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DECAY: tl.constexpr, LOW: tl.constexpr, AV: tl.constexpr,
):  # fmt: skip
    """Args:
        grad_o: `[M, HV, V]`. factors: of `rows`; reads: of the pairs; news: of `walk`.
        dreads: fp32 `[NB, HV, BT, BT]`, of `q_i . k_j`, zero above the diagonal, a decay by head multiplied in.
        gates: fp32 `[NB, HV, 2, BT]`, of g by head: the first half is written.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, slot = pid.to(tl.int64), tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    D = tl.zeros([BT, BT], tl.float32)
    for first in range(0, VP, BS):
        column = first + tl.arange(0, BS)
        b_o = load_rows(grad_o, token * o_token + i_head * o_head, inside, first, o_column, V, BS).to(tl.float32)
        U = tl.load(news + (at * VP + column[:, None]) * BT + slot[None, :])
        o_U, u_scale = site(U, 1, AV, LOW)
        D += site_product(operand(b_o * (scale * u_scale)[None, :], LOW), o_U)
    D = tl.where(slot[:, None] >= slot[None, :], D, 0.0)
    place = slot[:, None] * BT + slot[None, :]
    if DECAY == 1:
        _gates(gates + at * (2 * BT), D * tl.load(reads + at * (BT * BT) + place), slot, BT)
    if DECAY < 2:
        D = D * head_weights(factors, at, slot, slot, BT, LOW)
    tl.store(dreads + at * (BT * BT) + place, D)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_system(
    k, v, starts, lengths, offsets, owner, index, norms, beta, factors, earlier, overlaps, inverses, w_left, w_scale,
    u_left, u_scale, kept, kept_scale, dnews, dv, dsolved, doverlaps, strengths, gates, skip,
    k_token, k_head, k_channel, v_token, v_head, v_column, dv_token, dv_head, dv_column, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr,
    W: tl.constexpr, U: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """Args:
        norms, beta (its strengths), factors, earlier (from_start), overlaps, inverses and the left operands: of the
            forward.
        kept, kept_scale: of `walk`. dnews: of `walk_back`.
        dv: `[M, HV, V]`, its sequences' rows written. dsolved: fp32 `[NB, HV, BT, BK]`, of `beta K e^G`.
        doverlaps: fp32 `[NB, HV, BT, BT]`, of `k_i . k_j`, a decay by head multiplied in.
        strengths: fp32 `[NB, HV, 2, BT]`, two parts of beta's gradient. gates: the second half is written.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key, slot = pid.to(tl.int64), i_head // (HV // H), tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    strength = tl.load(beta + at * BT + slot)
    dbeta = tl.zeros([BT], tl.float32)
    dT = tl.zeros([BT, BT], tl.float32)
    flip = slot[None, :] * BT + slot[:, None]
    WP: tl.constexpr = 3 if W == "" else 1
    UP: tl.constexpr = 3 if U == "" else 1
    for first in range(0, VP, BS):
        column = first + tl.arange(0, BS)
        dU = tl.load(dnews + (at * VP + column[None, :]) * BT + slot[:, None])
        b_v = load_rows(v, token * v_token + i_head * v_head, inside, first, v_column, V, BS).to(tl.float32)
        if DELTA:
            known, known_scale = site(b_v * strength[:, None], 0, U, LOW)
            dT += site_product(operand(dU * known_scale[None, :], LOW), flipped_parts(known))
            t_scale = tl.load(u_scale + at * BT + slot)
            dU = site_product(load_site(u_left, at, flip, BT * BT, UP), operand(dU * t_scale[:, None], LOW))
        dbeta += tl.sum(dU * b_v, 1)
        p_dv = dv + (token * dv_token + i_head * dv_head)[:, None] + column[None, :] * dv_column
        tl.store(p_dv, (dU * strength[:, None]).to(dv.dtype.element_ty), mask=inside[:, None] & (column < V)[None, :])
    if DELTA:
        k_norm = tl.load(norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot)
        t_scale = tl.load(w_scale + at * BT + slot)
        for first in range(0, BK, BS):
            channel = first + tl.arange(0, BS)
            dW = tl.zeros([BT, BS], tl.float32)
            for begin in range(0, VP, BS):
                column = begin + tl.arange(0, BS)
                dU = tl.load(dnews + (at * VP + column[None, :]) * BT + slot[:, None])
                S = tl.load(kept + (at * VP + column[:, None]) * BK + channel[None, :])
                s_scale = tl.load(kept_scale + at * (2 * VP) + column)
                dW -= site_product(operand(dU * s_scale[None, :], LOW), site_again(S, s_scale, 1, WS, LOW))
            if DECAY == 2:
                from_start = tl.load(earlier + (at * BT + slot[:, None]) * BK + channel[None, :]) * strength[:, None]
            else:
                b_k = load_rows(k, token * k_token + i_key * k_head, inside, first, k_channel, K, BS).to(tl.float32)
                weight = tl.load(factors + at * (4 * BT) + 2 * BT + slot) * (strength * k_norm)
                from_start = b_k * weight[:, None]
            known, known_scale = site(from_start, 0, W, LOW)
            dT += site_product(operand(dW * known_scale[None, :], LOW), flipped_parts(known))
            dX = site_product(load_site(w_left, at, flip, BT * BT, WP), operand(dW * t_scale[:, None], LOW))
            tl.store(dsolved + (at * BT + slot[:, None]) * BK + channel[None, :], dX)
        # T is not transposed by a product, see `chunk_math.py`.
        o_T = operand(load_matrix(inverses + at * (BT * BT), BT, True), False)
        dA = product(operand(product(o_T, operand(dT, False)), False), o_T)
        dA = tl.where(slot[:, None] > slot[None, :], -dA, 0.0)
        place = slot[:, None] * BT + slot[None, :]
        seen = dA * tl.load(overlaps + at * (BT * BT) + place)
        tl.store(strengths + at * (2 * BT) + BT + slot, tl.sum(seen, 1))
        dA = dA * strength[:, None]
        if DECAY == 1:
            _gates(gates + at * (2 * BT) + BT, seen * strength[:, None], slot, BT)
        if DECAY < 2:
            dA = dA * head_weights(factors, at, slot, slot, BT, LOW)
        tl.store(doverlaps + at * (BT * BT) + place, dA)
    else:
        tl.store(strengths + at * (2 * BT) + BT + slot, tl.zeros([BT], tl.float32))
        if DECAY == 1:
            tl.store(gates + at * (2 * BT) + BT + slot, tl.zeros([BT], tl.float32))
    tl.store(strengths + at * (2 * BT) + slot, dbeta)


@triton.jit
def _some_rows(
    x, row, inside, x_channel, codes, scale, norm, at, slot, first, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, FORMAT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """BS channels of what `row_operand` has."""
    if FORMAT == "":
        return operand(load_rows(x, row, inside, first, x_channel, K, BS), LOW), tl.load(norm + slot)
    else:
        place = slot[:, None] * BK + (first + tl.arange(0, BS))[None, :]
        return load_site(codes, at, place, BT * BK, 1), tl.load(scale + at * BT + slot)


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def grad_keys(
    q, k, g, grad_o, starts, lengths, offsets, owner, index, norms, beta, factors, q_codes, q_scale, k_codes, k_scale,
    read_codes, read_scale, kept, kept_scale, news, cotangents, dsolved, dreads, doverlaps, whole, dkeys, dgates, rows,
    scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, o_token, o_head, o_column,
    H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr,
    KK: tl.constexpr, QK: tl.constexpr, QS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Args:
        Those of the kernels before, and of the forward; beta: its strengths.
        dkeys: fp32 `[NB, HV, 2, BT, BK]`: of the normalised q and of the normalised k.
        dgates: fp32 `[NB, HV, BT, BK]`, of a decay by channel: of g, but for the pairs of tokens.
        rows: fp32 `[NB, HV, BK / BS, 4, BT]`, sums over these channels: gradients of the exponents from the start and
            to the end and of the whole, of a decay by head; and what erasing takes out of beta's gradient.

    Grid: (NB * HV * BK / BS,).
    """
    SLICES: tl.constexpr = BK // BS
    pid, slice = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    first = slice * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    key = block.to(tl.int64) * H + i_key
    slot, channel = tl.arange(0, BT), first + tl.arange(0, BS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    dq = tl.zeros([BT, BS], tl.float32)
    dout = tl.zeros([BT, BS], tl.float32)
    dwhole = tl.zeros([BS], tl.float32)
    for begin in range(0, VP, BS):
        column = begin + tl.arange(0, BS)
        p_state = (at * VP + column[:, None]) * BK + channel[None, :]
        S, dS = tl.load(kept + p_state), tl.load(cotangents + p_state)
        s_scale = tl.load(kept_scale + at * (2 * VP) + VP + column)
        b_o = load_rows(grad_o, token * o_token + i_head * o_head, inside, begin, o_column, V, BS).to(tl.float32)
        dq += site_product(operand(b_o * (s_scale * scale)[None, :], LOW), site_again(S, s_scale, 1, QS, LOW))
        o_U, u_scale = site(tl.load(news + (at * VP + column[None, :]) * BT + slot[:, None]), 0, KV, LOW)
        dout += site_product(o_U, operand(dS * u_scale[:, None], LOW))
        dwhole += tl.sum(S * dS, 0)

    p_norm = norms + key * (2 * BT)
    k_norm, q_norm = tl.load(p_norm + slot), tl.load(p_norm + BT + slot)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    wide_q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_norm[:, None]
    wide_k = load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_norm[:, None]
    p_keys = dkeys + at * (2 * BT * BK) + slot[:, None] * BK + channel[None, :]
    p_rows = rows + (at * SLICES + slice) * (4 * BT) + slot
    dwhole *= tl.load(whole + at * BK + channel)
    if DECAY == 2:
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
        gates = gate_parts(b_g, LOW)
        upto = tl.where(slot[None, :] <= slot[:, None], 1.0, 0.0)
        from_start, to_end = weight_of(upto, gates, LOW), weight_of(1.0 - upto, gates, LOW)
    else:
        p_factors = factors + at * (4 * BT) + slot
        from_start, to_end = tl.load(p_factors + 2 * BT)[:, None], tl.load(p_factors + 3 * BT)[:, None]
    dq = dq * from_start
    dout = dout * to_end
    start, dk = dq * wide_q, dout
    if DELTA:
        dX = tl.load(dsolved + (at * BT + slot[:, None]) * BK + channel[None, :]) * from_start
        tl.store(p_rows + 3 * BT, -tl.sum(dX * wide_k, 1))
        dX = dX * tl.load(beta + at * BT + slot)[:, None]
        start += dX * wide_k
        dk += dX
    end = dout * wide_k
    if DECAY == 2:
        # The gates behind a slot's exponent from the start are those up to it, of one to the end those after it.
        after = exact_operand(tl.where(slot[None, :] >= slot[:, None], 1.0, 0.0))
        before = exact_operand(tl.where(slot[None, :] < slot[:, None], 1.0, 0.0))
        total = product(after, operand(start, False)) + product(before, operand(end, False)) + dwhole[None, :]
        tl.store(dgates + (at * BT + slot[:, None]) * BK + channel[None, :], total)
    else:
        if DECAY == 1:
            tl.store(p_rows, tl.sum(start, 1))
            tl.store(p_rows + BT, tl.sum(end, 1))
            tl.store(p_rows + 2 * BT, tl.zeros([BT], tl.float32) + tl.sum(dwhole, 0))
        p_reads = dreads + at * (BT * BT)
        a, factor = _some_rows(
            k, k_row, inside, k_channel, read_codes, read_scale, p_norm, key, slot, first, K, BK, BS, BT, QK, LOW
        )
        dq += site_product(operand(load_matrix(p_reads, BT, False) * factor[None, :], LOW), a)
        a, factor = _some_rows(
            q, q_row, inside, q_channel, q_codes, q_scale, p_norm + BT, key, slot, first, K, BK, BS, BT, QK, LOW
        )
        dk += site_product(operand(load_matrix(p_reads, BT, True) * factor[None, :], LOW), a)
        if DELTA:
            a, factor = _some_rows(
                k, k_row, inside, k_channel, k_codes, k_scale, p_norm, key, slot, first, K, BK, BS, BT, KK, LOW
            )
            p_overlaps = doverlaps + at * (BT * BT)
            D = load_matrix(p_overlaps, BT, False) + load_matrix(p_overlaps, BT, True)
            dk += site_product(operand(D * factor[None, :], LOW), a)
    tl.store(p_keys, dq)
    tl.store(p_keys + BT * BK, dk)
