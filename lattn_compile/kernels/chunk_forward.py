"""The chunk form's way through the state: one program takes some value columns of a head from block to block.

    U = U0 - W S      O = O0 + Q S      S <- whole S + k_out^T U        as `chunk_operands.py` has it

The state stays in registers, in fp32, transposed and in PIECES of BV columns: then every product has BV rows, see
`chunk.py`, also where a tile of the state's format is wider. Blocks' operands do not depend on it and are loaded ahead.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import flipped, load_operand, operand, spread_product
from lattn_compile.kernels.chunk_operands import ERASE, OUT, QUERY
from lattn_compile.kernels.chunk_rounding import written
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["advance"]


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def advance(
    q, operands, updates, outputs, whole, source, starts, lengths, offsets, first, count, o, final, states, scale, skip,
    q_token, q_head, q_channel, o_token, o_head, o_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AFTER: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Args:
        q: `[M, H, K]`. operands, updates, outputs, whole: of `key_operands` and `value_operands`.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise, and may be the same.
        first, count: of `Schedule`.
        o: `[M, HV, V]`, its sequences' rows written under READ.
        states: under KEEP, the state before every block, fp32 `[NB, HV, VP, BK]`, and U takes U0's place.
        FORMAT: "" rounds nothing; else at every grid line, in tiles of BLOCK_K x BLOCK_V. AFTER: a line's last token
            reads what was written.

    Grid: (VP / (PIECES * BV) * HV * N,).
    """
    NV: tl.constexpr = VP // (PIECES * BV)
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32)

    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * (PIECES * BV) + tl.arange(0, BV)
    p_state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    at = block.to(tl.int64) * HV + i_head
    p_o = o
    if READ:
        p_o = o + start * o_token + i_head * o_head + column[:, None] * o_column
    # Loaded a block ahead here, not by the compiler, which would keep copies in shared memory.
    value = at * (BT * VP) + slot[None, :] * VP + column[:, None]
    some = blocks > 0
    S = ()
    next_U = ()
    next_out = ()
    for i in tl.static_range(PIECES):
        m_state = (channel < K)[None, :] & (column + i * BV < V)[:, None]
        S = S + (tl.load(source + (p_state + i * BV), mask=m_state, other=0.0),)
        next_U = next_U + (tl.load(updates + (value + i * BV), mask=some, other=0.0),)
        if READ:
            next_out = next_out + (tl.load(outputs + (value + i * BV), mask=some, other=0.0),)
    for j in range(blocks):
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        p_block = operands + at * (9 * BT * BK) + slot[:, None] * BK + channel[None, :]
        value = at * (BT * VP) + slot[None, :] * VP + column[:, None]
        following = value + tl.where(j + 1 < blocks, HV, 0).to(tl.int64) * (BT * VP)
        w = tl.load(whole + at * BK + channel)[None, :]
        m_out = (slot >= low) & (slot < high)
        if AFTER:
            m_out &= (slot != high - 1) | (not line)
        o_erase, o_query = (), ()
        if DELTA:
            o_erase = flipped(load_operand(p_block + ERASE * (3 * BT * BK), BT * BK))
        if READ:
            o_query = flipped(load_operand(p_block + QUERY * (3 * BT * BK), BT * BK))
        o_out = load_operand(p_block + OUT * (3 * BT * BK), BT * BK)
        rest = S
        coming_U, coming_out = next_U, next_out
        S = ()
        next_U = ()
        next_out = ()
        for i in tl.static_range(PIECES):
            U = coming_U[i]
            next_U = next_U + (tl.load(updates + (following + i * BV)),)
            if KEEP:
                p_kept = states + (at * VP + (column + i * BV)[:, None]) * BK + channel[None, :]
                tl.store(p_kept, rest[i])
            o_S = operand(rest[i], False)
            if DELTA:
                U -= spread_product(o_S, o_erase)
                if KEEP:
                    tl.store(updates + (value + i * BV), U)
            if READ:
                next_out = next_out + (tl.load(outputs + (following + i * BV)),)
                out = coming_out[i] + spread_product(o_S, o_query)
                p_out = p_o + i * BV * o_column + (base + slot).to(tl.int64)[None, :] * o_token
                m_piece = m_out[None, :] & (column + i * BV < V)[:, None]
                tl.store(p_out, out.to(o.dtype.element_ty), mask=m_piece)
            S = S + (rest[i] * w + spread_product(operand(U, False), o_out),)
        if FORMAT != "":  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                S = written(S, FORMAT, BLOCK_K, BLOCK_V, BK, BV, PIECES)
                if AFTER and READ:
                    last = (base + high - 1).to(tl.int64)
                    p_q = q + (start + last) * q_token + i_head // (HV // H) * q_head + channel * q_channel
                    b_q = tl.load(p_q, mask=channel < K, other=0.0).to(tl.float32)
                    if NORM:
                        b_q = b_q * rstd(tl.sum(b_q * b_q, 0))
                    for i in tl.static_range(PIECES):
                        read = tl.sum(S[i] * (b_q * scale)[None, :], 1)[:, None]
                        p_last = p_o + i * BV * o_column + last * o_token
                        tl.store(p_last, read.to(o.dtype.element_ty), mask=(column + i * BV < V)[:, None])
        at += HV

    for i in tl.static_range(PIECES):
        m_state = (channel < K)[None, :] & (column + i * BV < V)[:, None]
        tl.store(final + (p_state + i * BV), S[i], mask=m_state)
