"""The chunk form's way through the state: one program takes some value columns of a head from block to block.

    U = U0 - W S      O = O0 + Q S      S <- whole S + k_out^T U        as `chunk_prepare.py` has it

The state stays in registers, in fp32. Blocks' operands do not depend on it and are loaded ahead.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import flipped, load_operand, operand, product
from lattn_compile.kernels.chunk_prepare import ERASE, OUT, QUERY
from lattn_compile.kernels.chunk_rounding import rounded
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["advance"]


@triton.jit(do_not_specialize=["scale", "skip"])
def advance(
    q, operands, updates, outputs, whole, source, starts, lengths, offsets, first, count, o, final, states, scale, skip,
    q_token, q_head, q_channel, o_token, o_head, o_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, GRID: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AFTER: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Args:
        q: `[M, H, K]`. operands, updates, outputs, whole, skip: of `prepare_head`.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise.
        first, count: of `Schedule`.
        o: `[M, HV, V]`, its sequences' rows written under READ.
        states: under KEEP, the state before every block, `[NB, HV, BK, VP]`, in its dtype, and U takes U0's place.
        FORMAT: "" rounds nothing; else at every grid line, in tiles of BLOCK_K x BLOCK_V. AFTER: a line's last token
            reads what was written.

    Grid: (VP / BV * HV * N,).
    """
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32) if GRID else 0

    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_v = column < V
    state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[:, None] * V + column[None, :]
    m_state = (channel < K)[:, None] & m_v[None, :]
    S = tl.load(source + state, mask=m_state, other=0.0)

    PARTS: tl.constexpr = 2 if LOW else 1
    at = block.to(tl.int64) * HV + i_head
    p_o = o
    if READ:
        p_o = o + start * o_token + i_head * o_head + column[None, :] * o_column
    # Not left to the compiler, which would keep copies in shared memory.
    value = at * (BT * VP) + slot[:, None] * VP + column[None, :]
    some = blocks > 0
    next_U = tl.load(updates + value, mask=some, other=0.0)
    next_out = next_U
    if READ:
        next_out = tl.load(outputs + value, mask=some, other=0.0)
    for j in range(blocks):
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        p_block = operands + at * (3 * PARTS * BT * BK) + slot[:, None] * BK + channel[None, :]
        value = at * (BT * VP) + slot[:, None] * VP + column[None, :]
        U, out = next_U, next_out
        following = value + tl.where(j + 1 < blocks, HV, 0).to(tl.int64) * (BT * VP)
        next_U = tl.load(updates + following)
        if READ:
            next_out = tl.load(outputs + following)
        w = tl.load(whole + at * BK + channel)[:, None]
        if KEEP:
            p_state = states + (at * BK + channel[:, None]) * VP + column[None, :]
            tl.store(p_state, S.to(states.dtype.element_ty))
        o_S = operand(S, LOW)
        if DELTA:
            U -= product(load_operand(p_block + ERASE * (PARTS * BT * BK), BT * BK, LOW), o_S, PRECISION)
            if KEEP:
                tl.store(updates + value, U)
        if READ:
            out += product(load_operand(p_block + QUERY * (PARTS * BT * BK), BT * BK, LOW), o_S, PRECISION)
            m_out = (slot >= low) & (slot < high)
            if AFTER:
                m_out &= (slot != high - 1) | (not line)
            p_out = p_o + (base + slot).to(tl.int64)[:, None] * o_token
            tl.store(p_out, out.to(o.dtype.element_ty), mask=m_out[:, None] & m_v[None, :])
        o_out = flipped(load_operand(p_block + OUT * (PARTS * BT * BK), BT * BK, LOW))
        S = S * w + product(o_out, operand(U, LOW), PRECISION)
        if FORMAT != "":  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                S = rounded(S, FORMAT, BLOCK_K, BLOCK_V, BK, BV)
                if AFTER and READ:
                    last = (base + high - 1).to(tl.int64)
                    p_q = q + (start + last) * q_token + i_head // (HV // H) * q_head + channel * q_channel
                    b_q = tl.load(p_q, mask=channel < K, other=0.0).to(tl.float32)
                    if NORM:
                        b_q = b_q * rstd(tl.sum(b_q * b_q, 0))
                    read = tl.sum(S * (b_q * scale)[:, None], 0)[None, :]
                    tl.store(p_o + last * o_token, read.to(o.dtype.element_ty), mask=m_v[None, :])
        at += HV

    tl.store(final + state, S, mask=m_state)
