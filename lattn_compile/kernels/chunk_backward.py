"""The chunk form's way back: gradients of states and updates, and of the matrices between tokens.

With dS' the gradient of the state after a block, D of its outputs, and `chunk_operands.py`'s notation,

    dU = reads^T D + k_out dS'
    dS = whole dS' + q_in^T D - k_in^T beta X^T dU  =  whole dS' + Q^T D - W^T (k_out dS')

so only the two products with dS' stand between a state's gradient and the next (`retreat`), and they take what the
forward made. All else is for all blocks at once: `grad_updates` gives, with X = (I + beta overlaps)^-1, the gradient
`X^T dU` of `beta (v - k_in S)`, and v's; `grad_pairs` those of `reads` and `overlaps`. (`reference/adjoint.py`.)
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import (
    block_tokens,
    flipped,
    held,
    load_beta,
    load_operand,
    load_reads,
    load_rows,
    load_solved,
    operand,
    product,
    solved_product,
    spread_product,
)
from lattn_compile.kernels.chunk_operands import ERASE, OUT, QUERY
from lattn_compile.kernels.chunk_pairs import tile_of, tile_weights
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["grad_pairs", "grad_updates", "load_outputs", "reads_inside", "retreat"]


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def retreat(
    q, grad_o, operands, whole, source, starts, lengths, offsets, first, count, final, cotangents, scale, skip,
    q_token, q_head, q_channel, o_token, o_head, o_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        grad_o: `[M, HV, V]`, its sequences' rows read.
        source: gradient of the states after the blocks, fp32 `[N, HV, K, V]`; final: before them, maybe the same.
        cotangents: fp32 `[NB, HV, VP, BK]`, receives the gradient of the state after every block.
        Others as in `advance`, whose program this is, run backwards; transposed likewise. Rounding passes gradients on.

    Grid: (VP / BV * HV * N,).
    """
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32)

    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_v = column < V
    state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    m_state = (channel < K)[None, :] & m_v[:, None]
    dS = tl.load(source + state, mask=m_state, other=0.0)

    p_o = grad_o + start * o_token + i_head * o_head + column[:, None] * o_column
    for back in range(blocks):
        j = blocks - 1 - back
        at = (block + j).to(tl.int64) * HV + i_head
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        m_out = (slot >= low) & (slot < high)
        if AFTER:
            m_out &= (slot != high - 1) | (not line)
            if line:
                last = (base + high - 1).to(tl.int64)
                p_q = q + (start + last) * q_token + i_head // (HV // H) * q_head + channel * q_channel
                b_q = tl.load(p_q, mask=channel < K, other=0.0).to(tl.float32)
                if NORM:
                    b_q = b_q * rstd(tl.sum(b_q * b_q, 0))
                read = tl.load(p_o + last * o_token, mask=m_v[:, None], other=0.0).to(tl.float32)
                dS += read * (b_q * scale)[None, :]
        p_out = p_o + (base + slot).to(tl.int64)[None, :] * o_token
        D = tl.load(p_out, mask=m_out[None, :] & m_v[:, None], other=0.0)
        tl.store(cotangents + (at * VP + column[:, None]) * BK + channel[None, :], dS)
        p_block = operands + at * (9 * BT * BK) + slot[:, None] * BK + channel[None, :]
        w = tl.load(whole + at * BK + channel)[None, :]
        o_dS = operand(dS, False)
        dS = dS * w + spread_product(operand(D, False), load_operand(p_block + QUERY * (3 * BT * BK), BT * BK))
        if DELTA:
            E = spread_product(o_dS, flipped(load_operand(p_block + OUT * (3 * BT * BK), BT * BK)))
            dS -= spread_product(operand(E, False), load_operand(p_block + ERASE * (3 * BT * BK), BT * BK))

    tl.store(final + state, dS, mask=m_state)


@triton.jit
def load_outputs(
    grad_o, token, inside, o_token, i_head, o_head, first, o_column, V: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Columns of the outputs' gradients, `[slots, WIDTH]`, as they are."""
    return load_rows(grad_o, token * o_token + i_head * o_head, inside, first, o_column, V, WIDTH)


@triton.jit
def reads_inside(
    owner, index, starts, lengths, offsets, block, skip, slot, inside,
    AFTER: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Which slots' outputs are read from their own block: all that have a token, but a line's last under AFTER."""
    if AFTER:
        i_seq = tl.load(owner + block)
        lead = tl.load(offsets + i_seq) % CHUNK
        at = tl.load(index + block) + skip
        _, _, high, line = extent(at, lead, tl.load(lengths + i_seq), CHUNK, TOKENS, PER)
        return inside & ((slot != high - 1) | (not line))
    else:
        return inside


@triton.jit(do_not_specialize=["skip", "HV"])
def grad_updates(
    grad_o, beta, starts, lengths, offsets, owner, index, reads, solved, operands, cotangents, dv, drhs, skip,
    o_token, o_head, o_column, beta_token, beta_head, dv_token, dv_head, dv_column, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, AFTER: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        reads, solved, operands: of the forward. cotangents: of `retreat`.
        dv: `[M, HV, V]`, its sequences' rows written. drhs: fp32 `[NB, HV, BT, VP]`, gradient of `beta (v - k_in S)`.

    Grid: (NB * HV * VP / BS,).
    """
    SLICES: tl.constexpr = VP // BS
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    slot, column = tl.arange(0, BT), first + tl.arange(0, BS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    read = reads_inside(owner, index, starts, lengths, offsets, block, skip, slot, inside, AFTER, CHUNK, TOKENS, PER)
    D = load_outputs(grad_o, token, read, o_token, i_head, o_head, first, o_column, V, BS)
    dU = product(load_reads(reads, at, BT, True), operand(D, False))
    p_out = operands + (at * 3 + OUT) * (3 * BT * BK) + slot[:, None] * BK
    p_state = cotangents + (at * VP + column[:, None]) * BK
    WIDTH: tl.constexpr = min(BK, 32)
    for begin in range(0, BK, WIDTH):
        channel = begin + tl.arange(0, WIDTH)[None, :]
        o_dS = flipped(operand(tl.load(p_state + channel), False))
        dU += product(load_operand(p_out + channel, BT * BK), o_dS)
    if DELTA:
        dU = solved_product(load_solved(solved, at, BT, True), dU)
    tl.store(drhs + at * (BT * VP) + slot[:, None] * VP + column[None, :], dU)
    b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
    p_dv = dv + (token * dv_token + i_head * dv_head)[:, None] + column[None, :] * dv_column
    tl.store(p_dv, (dU * b_beta[:, None]).to(dv.dtype.element_ty), mask=inside[:, None] & (column < V)[None, :])


@triton.jit(do_not_specialize=["skip", "HV"])
def grad_pairs(
    grad_o, v, g, beta, starts, lengths, offsets, owner, index, reads, overlaps, updates, drhs, dreads, doverlaps,
    strengths, gates, skip,
    o_token, o_head, o_column, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, HV,
    V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, LOW: tl.constexpr,
    AFTER: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of the matrices between tokens, a decay by head multiplied in.

    Args:
        reads, overlaps, updates (U), drhs: of the kernels before.
        dreads, doverlaps: fp32 `[NB, HV, BT, BT]`: of `q_i . k_j` and `k_i . k_j`, zero above the diagonal,
            and of a decay by channel symmetric.
        strengths: fp32 `[NB, HV, 2, BT]`: parts of beta's gradient, of the tiles on the diagonal and off it.
        gates: likewise, of g's by head: what the pairs of tokens around a gate make of it.

    Grid: (NB * HV * tiles,).
    """
    pid, i_tile, j_tile = tile_of(tl.program_id(0), BT, TILE)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    i, j = tl.arange(0, TILE), tl.arange(0, TILE)
    slot_i, slot_j = i_tile * TILE + i, j_tile * TILE + j
    at_i, in_i = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot_i, CHUNK, TOKENS, PER)
    at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot_j, CHUNK, TOKENS, PER)
    read = reads_inside(owner, index, starts, lengths, offsets, block, skip, slot_i, in_i, AFTER, CHUNK, TOKENS, PER)
    D1 = tl.zeros([TILE, TILE], tl.float32)
    WIDE: tl.constexpr = DELTA and not LOW
    D2 = tl.zeros([TILE, TILE], tl.float64 if WIDE else tl.float32)
    strength = tl.zeros([TILE], tl.float32)
    for first in range(0, VP, BS):
        column = first + tl.arange(0, BS)[None, :]
        b_o = load_outputs(grad_o, at_i, read, o_token, i_head, o_head, first, o_column, V, BS)
        dR = tl.load(drhs + at * (BT * VP) + slot_i[:, None] * VP + column)
        U = tl.load(updates + at * (BT * VP) + slot_j[:, None] * VP + column)
        o_U = flipped(operand(U, False))
        D1 += product(operand(b_o, LOW), o_U)
        if WIDE:
            D2 += tl.dot(dR.to(tl.float64), tl.trans(U.to(tl.float64)), out_dtype=tl.float64)
        elif DELTA:
            D2 += product(operand(dR, False), o_U)
        if BETA:
            b_v = load_rows(v, at_i * v_token + i_head * v_head, in_i, first, v_column, V, BS).to(tl.float32)
            strength += tl.sum(dR * b_v, 1)
    off = i_tile != j_tile
    strict = (i[:, None] > j[None, :]) | off
    D1 = tl.where(strict | (i[:, None] == j[None, :]), D1, 0.0)
    D2 = tl.where(strict, -D2, 0.0)
    place = at * (BT * BT) + slot_i[:, None] * BT + slot_j[None, :]
    strength = tl.where(off, 0.0, strength)
    total = D1
    if DECAY == 1:
        total = D1 * tl.load(reads + place)
    if DELTA:
        b_beta = load_beta(beta, at_i, in_i, beta_token, i_head, beta_head, BETA)
        # Terms of repeated keys alternate in sign: their sums are much smaller than they are.
        seen = D2 * tl.load(overlaps + place, mask=strict, other=0.0)
        if DECAY == 1:
            total = total.to(D2.dtype) + seen * b_beta.to(D2.dtype)[:, None]
        strength += tl.sum(seen, 1).to(tl.float32)
        D2 = (D2 * b_beta.to(D2.dtype)[:, None]).to(tl.float32)
    part = at * (2 * BT) + tl.where(off, BT, 0)
    if BETA:
        tl.store(strengths + part + slot_i, strength)
    if DECAY == 1:
        _store_gates(gates + part, total, slot_i, slot_j, off, TILE)
        g_i = held(tl.load(g + at_i * g_token + i_head * g_head, mask=in_i, other=0.0))
        g_j = held(tl.load(g + at_j * g_token + i_head * g_head, mask=in_j, other=0.0))
        weight = tile_weights(g_i, g_j, off, TILE, False, False)
        D1 *= weight
        D2 = D2 * weight
    mirror = at * (BT * BT) + slot_j[:, None] * BT + slot_i[None, :]
    turned, turned_2 = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
    if DECAY == 2:
        turned, turned_2 = tl.trans(D1), tl.trans(D2)
        below = strict | (i[:, None] == i[None, :])
        D1, D2 = tl.where(below, D1, turned), tl.where(below, D2, turned_2)
    tl.store(dreads + place, D1)
    if DELTA:
        tl.store(doverlaps + place, D2)
    if BT > TILE:  # noqa: SIM102 # one is known when compiled, the other is not
        if off:
            tl.store(dreads + mirror, turned)
            if DELTA:
                tl.store(doverlaps + mirror, turned_2)
            if BETA:
                tl.store(strengths + part + slot_j, tl.zeros([TILE], tl.float32))


@triton.jit
def _store_gates(p, total, slot_i, slot_j, off, TILE: tl.constexpr):
    """What a tile's pairs `j < i` make of the gates `j < l <= i` between them, summed pair by pair.

    The usual difference of two running sums cancels under strong decay, and terms of repeated keys alternate in sign.
    """
    i, j = tl.arange(0, TILE), tl.arange(0, TILE)
    if off:
        tl.store(p + slot_i, tl.cumsum(tl.sum(total, 1), 0, reverse=True))
        # Gate j + 1 has the columns up to j before it.
        tl.store(p + slot_j + 1, tl.cumsum(tl.sum(total, 0), 0), mask=j < TILE - 1)
    else:
        before = tl.where(i[:, None] > j[None, :], tl.cumsum(total, 1), 0.0)
        tl.store(p + slot_j + 1, tl.sum(before, 0), mask=j < TILE - 1)
    tl.store(p + slot_j, tl.zeros([TILE], tl.float32), mask=j == 0)
