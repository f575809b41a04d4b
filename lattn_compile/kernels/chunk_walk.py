"""The chunk form's way through the state with keys and queries as they are, where a decay has one number per head.

Then rows of k and q carry norms, decay and beta as factors of the row, which stay outside of every product:

    U = T (beta v - erase K S)      O = query Q S + reads U      S <- whole S + K^T (out U)

T the inverse of `chunk_solve.py`; erase, query, out: of `row_factors`. bf16 keys are one exact part of a product each,
so that all 24 bits of S, T and U cost three products (six where T meets the values), as many as 16 bits of both sides
do in `chunk_forward.py`. Outputs, which are bf16, get 16 bits.

The state stays in registers, in fp32, transposed and in PIECES of BV columns: then every product has BV rows, see
`chunk.py`, also where a tile of the state's format is wider.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import (
    block_tokens,
    exact_operand,
    flipped,
    load_parts,
    operand,
    row_weights,
    spread_product,
)
from lattn_compile.kernels.chunk_rounding import written
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["FACTORS", "row_factors", "walk"]

FACTORS = 5
"""Rows of `factors`."""


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def row_factors(
    g, starts, lengths, offsets, owner, index, norms, strengths, factors, skip, g_token, g_head, H, HV,
    BT: tl.constexpr, DECAY: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        g: `[M, HV]`. norms, strengths: of `pairs_head`.
        factors: fp32 `[NB, HV, 5, BT]`: beta, erase, out, query, and in every slot that of the whole block.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    slot = tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    from_start, to_end = row_weights(g, token, inside, g_token, i_head, g_head, BT, DECAY, True)
    p_norm = norms + (block.to(tl.int64) * H + i_head // (HV // H)) * (2 * BT) + slot
    k_norm, q_norm = tl.load(p_norm), tl.load(p_norm + BT)
    strength = tl.load(strengths + pid.to(tl.int64) * BT + slot)
    p_out = factors + pid.to(tl.int64) * (5 * BT) + slot
    tl.store(p_out, strength)
    tl.store(p_out + BT, strength * k_norm * from_start)
    tl.store(p_out + 2 * BT, k_norm * to_end)
    tl.store(p_out + 3 * BT, q_norm * from_start)
    tl.store(p_out + 4 * BT, tl.zeros([BT], tl.float32) + tl.sum(tl.where(slot == BT - 1, from_start, 0.0), 0))


@triton.jit
def _rows(
    p_v, factors, at, base, low, high, some, v_token, v_column, column, V: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A block's v, transposed and in pieces, and its factors; zeros unless `some`."""
    slot = tl.arange(0, BT)
    inside = (slot >= low) & (slot < high) & some
    row = (base + slot).to(tl.int64)[None, :] * v_token
    values = ()
    for i in tl.static_range(PIECES):
        place = column + i * BV
        mask = inside[None, :] & (place < V)[:, None]
        values = values + (tl.load(p_v + row + place[:, None] * v_column, mask=mask, other=0.0),)
    p = factors + at * (5 * BT) + slot
    beta, erase = tl.load(p, mask=inside, other=0.0), tl.load(p + BT, mask=inside, other=0.0)
    out, query = tl.load(p + 2 * BT, mask=inside, other=0.0), tl.load(p + 3 * BT, mask=inside, other=0.0)
    whole = tl.load(factors + at * (5 * BT) + 4 * BT, mask=some, other=0.0)
    return values, beta, erase, out, query, whole


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def walk(
    q, k, v, reads, solved, factors, source, starts, lengths, offsets, first, count, o, final, states, updates, scale,
    skip, q_token, q_head, q_channel, k_token, k_head, k_channel, v_token, v_head, v_column, o_token, o_head, o_column,
    H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AFTER: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, v: `[M, HV, V]`, bf16. reads, solved: of `pairs_head` and `solve`, in parts.
        factors: of `row_factors`.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise, and may be the same.
        first, count: of `Schedule`.
        o: `[M, HV, V]`, its sequences' rows written under READ.
        states, updates: under KEEP, the state before every block, fp32 `[NB, HV, VP, BK]`, and U, `[NB, HV, BT, VP]`.
        FORMAT: "" rounds nothing; else at every grid line, in tiles of BLOCK_K x BLOCK_V. AFTER: a line's last token
            reads what was written.

    Grid: (VP / (PIECES * BV) * HV * N,).
    """
    NV: tl.constexpr = VP // (PIECES * BV)
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    i_key = i_head // (HV // H)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32)

    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * (PIECES * BV) + tl.arange(0, BV)
    p_state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    S = ()
    for i in tl.static_range(PIECES):
        m_state = (channel < K)[None, :] & (column + i * BV < V)[:, None]
        S = S + (tl.load(source + (p_state + i * BV), mask=m_state, other=0.0),)
    at = block.to(tl.int64) * HV + i_head
    p_q = q + start * q_token + i_key * q_head + channel[None, :] * q_channel
    p_k = k + start * k_token + i_key * k_head + channel[None, :] * k_channel
    p_v = v + start * v_token + i_head * v_head
    p_o = o
    if READ:
        p_o = o + start * o_token + i_head * o_head
    base, low, high, line = extent(skip, lead, length, CHUNK, TOKENS, PER)
    # Loaded a block ahead here, since the compiler does that for operands of products only.
    coming = _rows(p_v, factors, at, base, low, high, blocks > 0, v_token, v_column, column, V, BV, BT, PIECES)
    for j in range(blocks):
        values, beta, erase, out, query, whole = coming
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        row = (base + slot).to(tl.int64)
        m_key = inside[:, None] & (channel < K)[None, :]
        o_k = exact_operand(tl.load(p_k + row[:, None] * k_token, mask=m_key, other=0.0))
        o_q, o_reads, o_solved = (), (), ()
        if DELTA:
            o_solved = flipped(load_parts(solved + at * (3 * BT * BT), BT, 3, False))
        if READ:
            o_q = exact_operand(tl.load(p_q + row[:, None] * q_token, mask=m_key, other=0.0))
            o_reads = flipped(load_parts(reads + at * (3 * BT * BT), BT, 2, False))
        next_base, next_low, next_high, _ = extent(j + 1 + skip, lead, length, CHUNK, TOKENS, PER)
        coming = _rows(
            p_v, factors, at + HV, next_base, next_low, next_high, j + 1 < blocks, v_token, v_column, column, V, BV,
            BT, PIECES,
        )  # fmt: skip
        rest = S
        S = ()
        for i in tl.static_range(PIECES):
            place = column + i * BV
            o_S = operand(rest[i], False)
            U = values[i].to(tl.float32) * beta[None, :]
            if DELTA:
                U -= spread_product(o_S, flipped(o_k)) * erase[None, :]
                U = spread_product(operand(U, False), o_solved)
            if KEEP:
                tl.store(states + (at * VP + place[:, None]) * BK + channel[None, :], rest[i])
                tl.store(updates + at * (BT * VP) + slot[None, :] * VP + place[:, None], U)
            S = S + (rest[i] * whole + spread_product(operand(U * out[None, :], False), o_k),)
            if READ:
                read = spread_product((o_S[0], o_S[1]), flipped(o_q)) * query[None, :]
                read += spread_product(operand(U, True), o_reads)
                m_out = inside
                if AFTER:
                    m_out &= (slot != high - 1) | (not line)
                p_out = p_o + place[:, None] * o_column + row[None, :] * o_token
                tl.store(p_out, read.to(o.dtype.element_ty), mask=m_out[None, :] & (place < V)[:, None])
        if FORMAT != "":  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                S = written(S, FORMAT, BLOCK_K, BLOCK_V, BK, BV, PIECES)
                if AFTER and READ:
                    last = (base + high - 1).to(tl.int64)
                    b_q = tl.load(p_q + last * q_token, mask=(channel < K)[None, :], other=0.0).to(tl.float32)
                    if NORM:
                        b_q = b_q * rstd(tl.sum(tl.sum(b_q * b_q, 1), 0))
                    for i in tl.static_range(PIECES):
                        seen = tl.sum(S[i] * (b_q * scale), 1)[:, None]
                        p_last = p_o + (column + i * BV)[:, None] * o_column + last * o_token
                        tl.store(p_last, seen.to(o.dtype.element_ty), mask=(column + i * BV < V)[:, None])
        at += HV

    for i in tl.static_range(PIECES):
        m_state = (channel < K)[None, :] & (column + i * BV < V)[:, None]
        tl.store(final + (p_state + i * BV), S[i], mask=m_state)
