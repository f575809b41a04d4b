"""`chunk_state.py` backwards: gradients of states and updates.

With dS' the gradient of the state after a block, D of its outputs, and the factors of `chunk_rows.py`,

    d = query D      du = key (P^T d + end K_out dS')      dr = T^T du
    dS = whole dS' + Q^T (start d) - K_in^T (erase dr)

and v's gradient beta dr. Parts, warps and ranges are those of the way forward.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import fine_parts, fine_product, power_of_two, short_parts, short_product
from lattn_compile.kernels.chunk_rows import (
    BETA_ROW,
    END_ROW,
    ERASE_ROW,
    KEY_ROW,
    MOST_ROW,
    QUERY_ROW,
    START_ROW,
    WHOLE_ROW,
)
from lattn_compile.kernels.chunk_state import loaded
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["carry_back"]


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def carry_back(
    q, grad_o, rows, factors, decay, solved, reads, source, starts, lengths, offsets, first, count, final, cotangents,
    drhs, dv, scale, skip, q_token, q_head, q_channel, o_token, o_head, o_column, dv_token, dv_head, dv_column, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Args:
        q: `[M, H, K]`; grad_o: `[M, HV, V]`, its sequences' rows read.
        rows, factors, decay: of `chunk_rows.py`, rows those of the way back.
        solved, reads: fp16 `[NB, HV, 3, BT, BT]` and `[NB, HV, 2, BT, BT]`, transposed.
        source: gradient of the states after the blocks, fp32 `[N, HV, K, V]`; final: before them, maybe the same.
        cotangents: fp32 `[NB, HV, VP, BK]`, receives the gradient of the state after every block.
        drhs: fp32 `[NB, HV, BT, VP]`, receives dr. dv: `[M, HV, V]`, its sequences' rows written.

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
    dS = ()
    for i in tl.static_range(PIECES):
        m_state = (channel + i * W < K)[None, None, :] & (column < V)
        dS = dS + (tl.load(source + (p_state + i * (W * V)), mask=m_state, other=0.0),)
    unit = tl.full([G, 16, 1], 1.0, tl.float32)
    p_o = grad_o + start * o_token + i_head * o_head
    p_dv = dv + start * dv_token + i_head * dv_head
    wide, tall = slot[:, None] * BK + channel[None, :], channel[:, None] * BT + slot[None, :]
    square = slot[:, None] * BT + slot[None, :]
    for back in tl.range(0, blocks, num_stages=STAGES):
        j = blocks - 1 - back
        at = (block + j).to(tl.int64) * HV + i_head
        if CHANNEL:
            p_rows = rows + at * (6 * SQUARE)
        else:
            p_rows = rows + ((block + j).to(tl.int64) * H + i_head // (HV // H)) * (3 * SQUARE)
        p_factor = factors + at * (10 * BT)
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        token = (base + slot).to(tl.int64)
        read = inside
        if AFTER:
            read &= (slot != high - 1) | (not line)
            if line:
                last = (base + high - 1).to(tl.int64)
                p_q = q + (start + last) * q_token + i_head // (HV // H) * q_head
                weight = scale
                if NORM:
                    total = 0.0
                    for i in tl.static_range(PIECES):
                        b_q = tl.load(p_q + (channel + i * W) * q_channel, mask=channel + i * W < K, other=0.0)
                        total += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 0)
                    weight = scale * rstd(total)
                seen = tl.load(p_o + last * o_token + column * o_column, mask=column < V, other=0.0).to(tl.float32)
                more = ()
                for i in tl.static_range(PIECES):
                    b_q = tl.load(p_q + (channel + i * W) * q_channel, mask=channel + i * W < K, other=0.0)
                    more = more + (dS[i] * unit + seen * (b_q.to(tl.float32) * weight)[None, None, :],)
                dS = more
                unit = tl.full([G, 16, 1], 1.0, tl.float32)
        m_v = (flat < V)[:, None]
        D = tl.load(p_o + token[None, :] * o_token + flat[:, None] * o_column, mask=read[None, :] & m_v, other=0.0)
        D = tl.reshape(D, (G, 16, BT)).to(tl.float32) * tl.load(p_factor + QUERY_ROW * BT + slot)[None, None, :]
        key = tl.load(p_factor + KEY_ROW * BT + slot)[None, None, :]
        most = tl.load(p_factor + MOST_ROW * BT)
        p_kept = cotangents + (at * VP + column) * BK + channel[None, None, :]
        size = tl.max(tl.abs(D), 2)[:, :, None]
        for i in tl.static_range(PIECES):
            true = dS[i] * unit
            tl.store(p_kept + i * W, true)
            size = tl.maximum(size, tl.max(tl.abs(true), 2)[:, :, None])
        new, down = power_of_two(size)
        D *= down
        ratio = unit * down
        unit = new
        dr = tl.zeros([G, 16, BT], tl.float32)
        rest = ()
        for i in tl.static_range(PIECES):
            rest = rest + (dS[i] * ratio,)
            o_out = loaded(p_rows + i * W + wide, SQUARE, PARTS, G)
            dr = fine_product(fine_parts(rest[i]), o_out, dr)
        if not CHANNEL:
            dr *= tl.load(p_factor + END_ROW * BT + slot)[None, None, :]
        dr = fine_product(fine_parts(D), loaded(reads + at * (2 * BT * BT) + square, BT * BT, 2, G), dr) * key
        if DELTA:
            o_solved = loaded(solved + at * (3 * BT * BT) + square, BT * BT, 3, G)
            dr = short_product(short_parts(dr), o_solved)
        dr *= most
        true = dr * unit
        tl.store(drhs + at * (BT * VP) + slot[None, None, :] * VP + column, true)
        true = tl.reshape(true * tl.load(p_factor + BETA_ROW * BT + slot)[None, None, :], (16 * G, BT))
        place = token[None, :] * dv_token + flat[:, None] * dv_column
        tl.store(p_dv + place, true.to(dv.dtype.element_ty), mask=inside[None, :] & m_v)
        if not CHANNEL:
            D *= tl.load(p_factor + START_ROW * BT + slot)[None, None, :]
        o_D = fine_parts(D)
        if DELTA:
            o_dr = fine_parts(dr * -tl.load(p_factor + ERASE_ROW * BT + slot)[None, None, :])
        dS = ()
        for i in tl.static_range(PIECES):
            if CHANNEL:
                left = tl.load(decay + at * BK + i * W + channel)[None, None, :]
            else:
                left = tl.load(p_factor + WHOLE_ROW * BT)
            p_tall = p_rows + (PARTS * SQUARE + i * (W * BT)) + tall
            x = rest[i] * left
            if DELTA:
                x = fine_product(o_dr, loaded(p_tall, SQUARE, PARTS, G), x)
            dS = dS + (fine_product(o_D, loaded(p_tall + PARTS * SQUARE, SQUARE, PARTS, G), x),)

    for i in tl.static_range(PIECES):
        m_state = (channel + i * W < K)[None, None, :] & (column < V)
        tl.store(final + (p_state + i * (W * V)), dS[i] * unit, mask=m_state)
