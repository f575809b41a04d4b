"""`chunk_walk.py` backwards: gradients of states and updates, with keys and queries as they are.

With dS' the gradient of the state after a block, D of its outputs, and the factors of `chunk_walk.py`,

    dU = reads^T D + out K dS'      dR = T^T dU      dS = whole dS' + Q^T (query D) - K^T (erase dR)

dR the gradient of `beta v - erase K S`, and v's beta times it. Bits and layouts are those of the way forward.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import exact_operand, flipped, load_parts, operand, spread_product
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["walk_back"]


@triton.jit
def _rows(
    p_o, factors, at, base, low, high, line, some, o_token, column, V: tl.constexpr, BT: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """A block's gradients of outputs that it reads itself, transposed, and its factors; zeros unless `some`."""
    slot = tl.arange(0, BT)
    inside = (slot >= low) & (slot < high) & some
    read = inside
    if AFTER:
        read &= (slot != high - 1) | (not line)
    D = tl.load(
        p_o + (base + slot).to(tl.int64)[None, :] * o_token, mask=read[None, :] & (column < V)[:, None], other=0.0
    )
    p = factors + at * (5 * BT) + slot
    beta, erase = tl.load(p, mask=inside, other=0.0), tl.load(p + BT, mask=inside, other=0.0)
    out, query = tl.load(p + 2 * BT, mask=inside, other=0.0), tl.load(p + 3 * BT, mask=inside, other=0.0)
    whole = tl.load(factors + at * (5 * BT) + 4 * BT, mask=some, other=0.0)
    return D, beta, erase, out, query, whole


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def walk_back(
    q, k, grad_o, reads, solved, factors, source, starts, lengths, offsets, first, count, final, cotangents, drhs, dv,
    scale, skip, q_token, q_head, q_channel, k_token, k_head, k_channel, o_token, o_head, o_column, dv_token, dv_head,
    dv_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """Args:
        grad_o: `[M, HV, V]`, its sequences' rows read.
        source: gradient of the states after the blocks, fp32 `[N, HV, K, V]`; final: before them, maybe the same.
        cotangents: fp32 `[NB, HV, VP, BK]`, receives the gradient of the state after every block.
        drhs: fp32 `[NB, HV, BT, VP]`, receives dR. dv: `[M, HV, V]`, its sequences' rows written.
        Others as in `walk`, whose program this is, run backwards. Rounding passes gradients on.

    Grid: (VP / BV * HV * N,).
    """
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    i_key = i_head // (HV // H)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32)

    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_v = (column < V)[:, None]
    state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    m_state = (channel < K)[None, :] & m_v
    dS = tl.load(source + state, mask=m_state, other=0.0)
    p_q = q + start * q_token + i_key * q_head + channel[None, :] * q_channel
    p_k = k + start * k_token + i_key * k_head + channel[None, :] * k_channel
    p_o = grad_o + start * o_token + i_head * o_head + column[:, None] * o_column
    p_dv = dv + start * dv_token + i_head * dv_head + column[:, None] * dv_column
    at = (block + blocks - 1).to(tl.int64) * HV + i_head
    base, low, high, line = extent(blocks - 1 + skip, lead, length, CHUNK, TOKENS, PER)
    # Loaded a block ahead here, since the compiler does that for operands of products only.
    coming = _rows(p_o, factors, at, base, low, high, line, blocks > 0, o_token, column, V, BT, AFTER)
    for back in range(blocks):
        j = blocks - 1 - back
        D, beta, erase, out, query, whole = coming
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        row = (base + slot).to(tl.int64)
        m_key = inside[:, None] & (channel < K)[None, :]
        o_k = exact_operand(tl.load(p_k + row[:, None] * k_token, mask=m_key, other=0.0))
        o_q = exact_operand(tl.load(p_q + row[:, None] * q_token, mask=m_key, other=0.0))
        o_reads = load_parts(reads + at * (3 * BT * BT), BT, 3, False)
        o_solved = ()
        if DELTA:
            o_solved = load_parts(solved + at * (3 * BT * BT), BT, 3, False)
        next_base, next_low, next_high, next_line = extent(j - 1 + skip, lead, length, CHUNK, TOKENS, PER)
        coming = _rows(
            p_o, factors, at - HV, next_base, next_low, next_high, next_line, j > 0, o_token, column, V, BT, AFTER
        )
        if AFTER:  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                last = (base + high - 1).to(tl.int64)
                b_q = tl.load(p_q + last * q_token, mask=(channel < K)[None, :], other=0.0).to(tl.float32)
                if NORM:
                    b_q = b_q * rstd(tl.sum(tl.sum(b_q * b_q, 1), 0))
                dS += tl.load(p_o + last * o_token, mask=m_v, other=0.0).to(tl.float32) * (b_q * scale)
        tl.store(cotangents + (at * VP + column[:, None]) * BK + channel[None, :], dS)
        dU = spread_product(operand(D, False), o_reads)
        dU += spread_product(operand(dS, False), flipped(o_k)) * out[None, :]
        if DELTA:
            dU = spread_product(operand(dU, False), o_solved)
        tl.store(drhs + at * (BT * VP) + slot[None, :] * VP + column[:, None], dU)
        value = (dU * beta[None, :]).to(dv.dtype.element_ty)
        tl.store(p_dv + row[None, :] * dv_token, value, mask=inside[None, :] & m_v)
        dS = dS * whole + spread_product(operand(D.to(tl.float32) * query[None, :], False), o_q)
        if DELTA:
            dS -= spread_product(operand(dU * erase[None, :], False), o_k)
        at -= HV

    tl.store(final + state, dS, mask=m_state)
