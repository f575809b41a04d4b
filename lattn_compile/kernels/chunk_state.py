"""The chunk form's way through the state of bf16 inputs: one program takes some value columns from block to block.

    r = beta v - erase (K_in S)      u = key (T r)      S <- whole S + K_out^T (end u)
    o = query (start (Q S) + P u)

T the inverse of `chunk_solve.py`, P what tokens see of each other; rows of keys and queries, and the factors, of
`chunk_rows.py`. What stays in fp32, S, r, u and T, goes into products in two fp16 parts with 24 bits, outputs, which
are bf16, in one.

A warp has 16 value columns, and with S transposed all of a product's results are in the registers where the next one
wants its operand: nothing but keys, queries and the two matrices passes through shared memory. They are copied there
while the block before is computed; for that keys are there twice, once transposed, and in PIECES of W channels, or
Triton would have registers hold them. Products are batches of a warp each, so none is one of Hopper's asynchronous
ones, see `chunk.py`.

Columns have ranges of their own: S is kept divided by a power of two for each column, so that it and what is made of it
fits fp16.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import fine_parts, fine_product, power_of_two, short_parts, short_product
from lattn_compile.kernels.chunk_rounding import written_groups
from lattn_compile.kernels.chunk_rows import (
    BETA_ROW,
    END_ROW,
    ERASE_ROW,
    KEY_ROW,
    LIFT_ROW,
    MOST_ROW,
    QUERY_ROW,
    START_ROW,
    WHOLE_ROW,
)
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["carry", "loaded"]


@triton.jit
def _spread(x, G: tl.constexpr):
    """An operand's part `[m, n]` for every warp, `[G, m, n]`."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[None, :, :], (G, M, N))


@triton.jit
def loaded(p, NEXT: tl.constexpr, PARTS: tl.constexpr, G: tl.constexpr):
    """An operand of PARTS parts, NEXT apart, transposed on the way."""
    out = (_spread(tl.trans(tl.load(p)), G),)
    if PARTS > 1:
        out = out + (_spread(tl.trans(tl.load(p + NEXT)), G),)
    if PARTS > 2:
        out = out + (_spread(tl.trans(tl.load(p + 2 * NEXT)), G),)
    return out


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def carry(
    q, v, rows, factors, decay, solved, reads, source, starts, lengths, offsets, first, count, o, final, states,
    updates, scale, skip, q_token, q_head, q_channel, v_token, v_head, v_column, o_token, o_head, o_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AFTER: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, SOLVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Args:
        q: `[M, H, K]`, v: `[M, HV, V]`, bf16.
        rows, factors: of `chunk_rows.py`. decay: under CHANNEL, its `whole`.
        solved: fp16 `[NB, HV, SOLVED, BT, BT]`, of the delta rule. reads: fp16 `[NB, HV, BT, BT]`, under READ.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise, and may be the same.
        first, count: of `Schedule`.
        o: `[M, HV, V]`, its sequences' rows written under READ.
        states, updates: under KEEP, the state before every block, fp32 `[NB, HV, VP, BK]`, and U, `[NB, HV, BT, VP]`.
        FORMAT: "" rounds nothing; else at every grid line, in tiles of BLOCK_K x BLOCK_V. AFTER: a line's last token
            reads what was written.
        G: warps, and groups of 16 columns. ROWS: matrices of a block in `rows`. STAGES: of the loop's loads.

    Grid: (VP / (16 * G) * HV * N,).
    """
    NV: tl.constexpr = VP // (16 * G)
    PIECES: tl.constexpr = BK // W
    PARTS: tl.constexpr = 2 if CHANNEL else 1
    SQUARE: tl.constexpr = BT * BK
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, (pid // NV % HV).to(tl.int64), pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq).to(tl.int32)
    lead = (tl.load(offsets + i_seq) % CHUNK).to(tl.int32)

    channel, slot, flat = tl.arange(0, W), tl.arange(0, BT), i_v * (16 * G) + tl.arange(0, 16 * G)
    group, inner = tl.arange(0, G), tl.arange(0, 16)
    column = (i_v * (16 * G) + group[:, None] * 16 + inner[None, :])[:, :, None]
    p_state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, None, :] * V + column
    S = ()
    for i in tl.static_range(PIECES):
        m_state = (channel + i * W < K)[None, None, :] & (column < V)
        S = S + (tl.load(source + (p_state + i * (W * V)), mask=m_state, other=0.0),)
    unit = tl.full([G, 16, 1], 1.0, tl.float32)
    p_v = v + start * v_token + i_head * v_head + flat[:, None] * v_column
    p_o = o
    if READ:
        p_o = o + start * o_token + i_head * o_head + flat[:, None] * o_column
    wide, tall = slot[:, None] * BK + channel[None, :], channel[:, None] * BT + slot[None, :]
    square = slot[:, None] * BT + slot[None, :]
    for j in tl.range(0, blocks, num_stages=STAGES):
        at = (block + j).to(tl.int64) * HV + i_head
        if CHANNEL:
            p_rows = rows + at * (ROWS * SQUARE)
        else:
            p_rows = rows + ((block + j).to(tl.int64) * H + i_head // (HV // H)) * (ROWS * SQUARE)
        p_factor = factors + at * (10 * BT)
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        token = (base + slot).to(tl.int64)
        m_v = inside[None, :] & (flat < V)[:, None]
        value = tl.load(p_v + token[None, :] * v_token, mask=m_v, other=0.0)
        value = tl.reshape(value, (G, 16, BT)).to(tl.float32)
        value *= tl.load(p_factor + BETA_ROW * BT + slot)[None, None, :]
        key = tl.load(p_factor + KEY_ROW * BT + slot)[None, None, :]
        most = tl.load(p_factor + MOST_ROW * BT)
        less = ((254 << 23) - most.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        if KEEP:
            p_kept = states + (at * VP + column) * BK + channel[None, None, :]
            for i in tl.static_range(PIECES):
                tl.store(p_kept + i * W, S[i] * unit)

        size = tl.max(tl.abs(value), 2)[:, :, None]
        for i in tl.static_range(PIECES):
            size = tl.maximum(size, tl.max(tl.abs(S[i]), 2)[:, :, None] * unit)
        new, down = power_of_two(size)
        value *= down
        ratio = unit * down
        unit = new
        rest = ()
        S_parts = ()
        r = value
        if DELTA:
            seen = tl.zeros([G, 16, BT], tl.float32)
        for i in tl.static_range(PIECES):
            rest = rest + (S[i] * ratio,)
            o_S = fine_parts(rest[i])
            S_parts = S_parts + (o_S[0],)
            if DELTA:
                seen = fine_product(o_S, loaded(p_rows + i * W + wide, SQUARE, PARTS, G), seen)
        if READ:
            out = tl.zeros([G, 16, BT], tl.float32)
            for i in tl.static_range(PIECES):
                p_q = p_rows + (2 * PARTS * SQUARE + i * W)
                out = tl.dot(S_parts[i], _spread(tl.trans(tl.load(p_q + wide)), G), out)
            if not CHANNEL:
                out *= tl.load(p_factor + START_ROW * BT + slot)[None, None, :]
        if DELTA:
            r = value - seen * tl.load(p_factor + ERASE_ROW * BT + slot)[None, None, :]
            o_solved = loaded(solved + at * (SOLVED * BT * BT) + square, BT * BT, SOLVED, G)
            if SOLVED == 3:
                r = short_product(short_parts(r), o_solved)
            else:
                r = fine_product(fine_parts(r), o_solved, tl.zeros(r.shape, tl.float32))
        if KEEP:
            u = r * unit
            if DELTA:
                u *= tl.load(p_factor + LIFT_ROW * BT + slot)[None, None, :]
            tl.store(updates + at * (BT * VP) + slot[None, None, :] * VP + column, u)
        u = r * key
        if READ:
            o_reads = _spread(tl.trans(tl.load(reads + at * (BT * BT) + square)), G)
            out += fine_product(fine_parts(u), (o_reads,), tl.zeros([G, 16, BT], tl.float32)) * most
            out *= tl.load(p_factor + QUERY_ROW * BT + slot)[None, None, :]
            out = tl.reshape((out * unit).to(o.dtype.element_ty), (16 * G, BT))
            m_out = m_v
            if AFTER:
                m_out &= ((slot != high - 1) | (not line))[None, :]
            tl.store(p_o + token[None, :] * o_token, out, mask=m_out)
        if not CHANNEL:
            u *= tl.load(p_factor + END_ROW * BT + slot)[None, None, :]
        o_u = fine_parts(u)
        S = ()
        for i in tl.static_range(PIECES):
            if CHANNEL:
                left = tl.load(decay + at * BK + i * W + channel)[None, None, :]
            else:
                left = tl.load(p_factor + WHOLE_ROW * BT)
            p_out = p_rows + (PARTS * SQUARE + i * (W * BT))
            S = S + (fine_product(o_u, loaded(p_out + tall, SQUARE, PARTS, G), rest[i] * (left * less)),)
        unit *= most
        if FORMAT != "":  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                rest = ()
                for i in tl.static_range(PIECES):
                    rest = rest + (S[i] * unit,)
                S = written_groups(rest, FORMAT, BLOCK_K, BLOCK_V, BK, G, W)
                unit = tl.full([G, 16, 1], 1.0, tl.float32)
                if AFTER and READ:
                    last = (base + high - 1).to(tl.int64)
                    p_channel = q + (start + last) * q_token + i_head // (HV // H) * q_head + channel * q_channel
                    total = 0.0
                    read = tl.zeros([G, 16], tl.float32)
                    for i in tl.static_range(PIECES):
                        b_q = tl.load(p_channel + i * W * q_channel, mask=channel + i * W < K, other=0.0)
                        b_q = b_q.to(tl.float32)
                        total += tl.sum(b_q * b_q, 0)
                        read += tl.sum(S[i] * b_q[None, None, :], 2)
                    if NORM:
                        read *= rstd(total)
                    p_last = o + (start + last) * o_token + i_head * o_head + column * o_column
                    tl.store(p_last, (read * scale)[:, :, None].to(o.dtype.element_ty), mask=column < V)

    for i in tl.static_range(PIECES):
        m_state = (channel + i * W < K)[None, None, :] & (column < V)
        tl.store(final + (p_state + i * (W * V)), S[i] * unit, mask=m_state)
