"""The gradient of the state from window to window, backwards: one program a sequence, value head and block of columns.

Rounding passes gradients on, so nothing is rounded here and columns do not meet: any block of them is a program. With
dS that of the state after a window,

    dU = reads^T dO + out dS      dE = beta dU      dS' = whole dS + query^T dO - erase^T dE

which is all that waits for the window behind; `replay_gradients.py` does the rest for all windows at once.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.products import flipped, load_operand, operand, product, shared
from lattn_compile.kernels.replay_walk import last_query
from lattn_compile.kernels.replay_windows import runs

__all__ = ["retreat"]


@triton.jit(do_not_specialize=["scale", "first", "last", "H", "HV"])
def retreat(
    q, operands, reads, weights, owns, whole, strengths, starts, lengths, leads, at, begin, origin, place, count,
    grad_o, grad_anchor, drecord, dstates, dcopies, derrors, danchored, dkept, scale, first, last,
    q_token, q_head, q_channel, do_token, do_head, do_column, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    AFTER: tl.constexpr, PAIR: tl.constexpr, ANCHORS: tl.constexpr, READ: tl.constexpr, RECORD: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, FACTORS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Windows of ranks `first <= rank < last`, of every sequence those it has there, from the last back.

    Args:
        operands, reads, weights, owns, whole, strengths: of `prepare` and `relate`. ROWS: without a decay by channel.
        starts to count: of `Windows`.
        grad_o: `[M, HV, V]`, under READ. grad_anchor: fp32 `[N, HV, K, V]`, contiguous, of what the last flush stored,
            under ANCHORS. drecord: fp32 `[N, W - 1, HV, V]`, of the recorded updates, contiguous, under RECORD.
        dstates: fp32 `[N, HV, K, V]`, of the states after these windows; of those before them on return.
        dcopies: under PAIR, likewise, receives those of the read copies before all windows. Between windows a copy's
            gradient is its state's.
        derrors: fp32 `[S, HV, VP, BT]`, receives dE, under FACTORS dU, without beta; under PAIR, danchored likewise
            that of E against the state. dkept: fp32 `[S, HV, VP, BK]`, receives dS.
        q, scale, NORM: for AFTER, see `walk`.

    Grid: (VP / BV * HV * N,).
    """
    BLOCKS: tl.constexpr = VP // BV
    PARTS: tl.constexpr = 1 if PART == "fp32" else 3
    NARROW: tl.constexpr = 1 if ROWS else PARTS
    TILE: tl.constexpr = BT * BK
    G: tl.constexpr = BV // 16
    pid = tl.program_id(0)
    i_block, i_head, i_seq = pid % BLOCKS, (pid // BLOCKS) % HV, pid // (BLOCKS * HV)
    low, high, i_origin, i_place = runs(at, begin, origin, place, count, i_seq, first, last)
    if low >= high:
        return
    start, lead = tl.load(starts + i_seq), tl.load(leads + i_seq)
    length = tl.load(lengths + i_seq)
    flushes = (lead + length) // W

    slot, key = tl.arange(0, BT), tl.arange(0, BK)
    i, channel = slot[None, None, :], key[None, None, :]
    column = i_block * BV + tl.arange(0, G)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    m_v = column < V
    state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel * V + column
    m_state = m_v & (channel < K)
    dS = tl.load(dstates + state, mask=m_state, other=0.0)

    p_begin = begin + i_origin
    following = (tl.load(p_begin + high - 1) + i_place - first).to(tl.int64) * HV + i_head
    n_whole = tl.load(whole + following * BK + key)
    n_beta = tl.load(strengths + following * BT + slot)
    for back in range(high - low):
        j = high - 1 - back
        here, w, b_beta = following, n_whole, n_beta
        following = (tl.load(p_begin + tl.maximum(j - 1, low)) + i_place - first).to(tl.int64) * HV + i_head
        n_whole = tl.load(whole + following * BK + key)
        n_beta = tl.load(strengths + following * BT + slot)
        p_window = operands + here * (TILES * TILE) + slot[:, None] * BK + key[None, :]
        p_turned = operands + here * (TILES * TILE) + slot[None, :] + key[:, None] * BT
        base = j * W - lead
        if ANCHORS:
            if j == flushes - 1:
                dS += tl.load(grad_anchor + state, mask=m_state, other=0.0)
        if AFTER and READ:
            if j < flushes:
                end = start + base + (W - 1)
                p_last = grad_o + end * do_token + i_head * do_head + column * do_column
                b_last = tl.load(p_last, mask=m_v, other=0.0).to(tl.float32)
                b_q = last_query(q, end, i_head // (HV // H), scale, q_token, q_head, q_channel, K, BK, NORM)
                dS += b_last * b_q[None, None, :]
        o_dS = operand(dS, PART, ASSEMBLY)
        tl.store(dkept + (here * VP + column) * BK + channel, dS)
        o_out = shared(flipped(load_operand(p_window + (PARTS + 2 * NARROW) * TILE, TILE, NARROW)), G)
        dU = product(o_dS, o_out, PRECISION)
        if ROWS:
            dU = dU * tl.load(weights + here * (2 * BT) + BT + slot)[None, None, :]
        dS = dS * w[None, None, :]
        p_errors = (here * VP + column) * BT + i
        dR = dS
        if PAIR and DELTA:
            o_erase = shared(flipped(load_operand(p_turned + (PARTS + 3 * NARROW) * TILE, TILE, PARTS)), G)
        if PAIR:
            dE = dU * b_beta[None, None, :]
            tl.store(danchored + p_errors, dE)
            if DELTA:
                dS -= product(operand(dE, PART, ASSEMBLY), o_erase, PRECISION)
            dU = tl.zeros_like(dU)
            dR = tl.zeros_like(dS)
        live = (i < W) & (base + i >= 0) & (base + i < length)
        if READ:
            m_do = live
            if AFTER:
                m_do = live & (i != W - 1)
            p_do = grad_o + (start + base + i) * do_token + i_head * do_head + column * do_column
            b_do = tl.load(p_do, mask=m_do & m_v, other=0.0)
            o_do = operand(b_do, PART, ASSEMBLY)
            p_reads = reads + here * (PARTS * BT * BT) + slot[None, :] * BT + slot[:, None]
            dU += product(o_do, shared(flipped(load_operand(p_reads, BT * BT, PARTS)), G), PRECISION, 1)
            if APART:
                dU += b_do.to(tl.float32) * tl.load(owns + here * BT + slot)[None, None, :]
            if ROWS:
                weight = tl.load(weights + here * (2 * BT) + slot)[None, None, :]
                o_do = operand(b_do.to(tl.float32) * weight, PART, ASSEMBLY)
            o_query = shared(flipped(load_operand(p_turned + PARTS * TILE, TILE, NARROW)), G)
            dR += product(o_do, o_query, PRECISION, 2)
        if RECORD:
            if j == flushes:
                p_record = drecord + ((i_seq.to(tl.int64) * (W - 1) + i) * HV + i_head) * V + column
                dU += tl.load(p_record, mask=live & (i < W - 1) & m_v, other=0.0)
        dE = dU * b_beta[None, None, :]
        tl.store(derrors + p_errors, dU if FACTORS != "" else dE)
        if DELTA:
            if not PAIR:
                o_erase = shared(flipped(load_operand(p_turned + (PARTS + 3 * NARROW) * TILE, TILE, PARTS)), G)
            dR -= product(operand(dE, PART, ASSEMBLY), o_erase, PRECISION)
        if PAIR:
            if j == 0:
                tl.store(dcopies + state, dR, mask=m_state)
            else:
                dS += dR
        else:
            dS = dR
    tl.store(dstates + state, dS, mask=m_state)
