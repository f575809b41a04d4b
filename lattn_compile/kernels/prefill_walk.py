"""The prefill's way through the state, chunk by chunk, and its outputs (`reference/prefill.py`).

    V' = U - W S                         S' = e^G_C S + (K e^(G_C - G))^T V'          walk, in sequence
    O  = scale ((Q e^G) S + reads V')                                                 outputs, in parallel

`walk` leaves S and V' as the operands of `outputs`. It has them transposed, and a warp has 16 value columns: what a
product leaves in its registers is where the next one wants it, and no warp waits for another.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import block_tokens, gate_exp, held, load_rows
from lattn_compile.kernels.prefill_codec import (
    factors_of,
    flipped_parts,
    for_all,
    largest,
    load_site,
    piece_of,
    scaled,
    site,
    site_product,
    store_site,
)
from lattn_compile.kernels.prefill_pairs import head_weights, row_operand

__all__ = ["outputs", "queries", "walk"]


@triton.jit(do_not_specialize=["HV"])
def walk(
    erase, erase_scale, out, out_scale, whole, updates, source, first, count, final, states, state_scale, values,
    value_scale, kept, kept_scale, news, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, G: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr, READ: tl.constexpr, KEEP: tl.constexpr,
    WS: tl.constexpr, QS: tl.constexpr, KV: tl.constexpr, AV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Args:
        erase, erase_scale, out, out_scale, whole, updates: of `prefill_operands.py`.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise, and may be the same.
        first, count: of `Schedule`.
        states: under READ `[NB, HV, parts, VP, BK]`, S before each chunk as the right operand of qs, transposed;
            state_scale: fp32 `[NB, HV, VP]`. values: `[NB, HV, parts, VP, BT]`, V' as that of av; value_scale likewise.
        kept, news: under KEEP fp32 `[NB, HV, VP, BK]` and `[NB, HV, VP, BT]`, S before each chunk and V'. kept_scale:
            fp32 `[NB, HV, 2, VP]`, the factors of S at ws and at qs.
        G: warps. W: channels of a piece of the state. STAGES: of the loop's loads.

    Grid: (VP / (16 * G) * HV * N,).
    """
    NV: tl.constexpr = VP // (16 * G)
    PIECES: tl.constexpr = BK // W
    EXACT: tl.constexpr = 2 if LOW else 3
    EP: tl.constexpr = EXACT if WS == "" else 1
    OP: tl.constexpr = EXACT if KV == "" else 1
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    channel, slot = tl.arange(0, W), tl.arange(0, BT)
    column = (i_v * (16 * G) + tl.arange(0, G)[:, None] * 16 + tl.arange(0, 16)[None, :])[:, :, None]
    some, every = channel[None, None, :], slot[None, None, :]
    p_state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + some * V + column
    S = ()
    for i in tl.static_range(PIECES):
        m_state = (some + i * W < K) & (column < V)
        S = S + (tl.load(source + (p_state + i * (W * V)), mask=m_state, other=0.0),)
    wide, tall = slot[:, None] * BK + channel[None, :], channel[:, None] * BT + slot[None, :]
    for j in tl.range(0, blocks, num_stages=STAGES):
        at = (block + j).to(tl.int64) * HV + i_head
        U = tl.load(updates + at * (VP * BT) + column * BT + every)
        s_scale, inverse, zero = factors_of(largest(S, WS if DELTA else QS), WS if DELTA else QS)
        SAME: tl.constexpr = WS == QS or not DELTA
        if DELTA:
            w_scale = tl.load(erase_scale + at * BT + slot)[None, None, :]
            seen = tl.zeros([G, 16, BT], tl.float32)
            for i in tl.static_range(PIECES):
                o_S = piece_of(S[i], s_scale, inverse, zero, WS, LOW)
                w = load_site(erase, at, i * W + wide, BT * BK, EP)
                seen += site_product(o_S, for_all(w, G))
                if READ and SAME:
                    store_site(states, at, column * BK + (i * W + some), o_S, VP * BK)
            U -= seen * (s_scale * w_scale)
            if KEEP:
                tl.store(kept_scale + at * (2 * VP) + column, s_scale)
        if READ or KEEP:
            if not SAME:
                s_scale, inverse, zero = factors_of(largest(S, QS), QS)
            if READ:
                tl.store(state_scale + at * VP + column, s_scale)
                if not (SAME and DELTA):
                    for i in tl.static_range(PIECES):
                        o_S = piece_of(S[i], s_scale, inverse, zero, QS, LOW)
                        store_site(states, at, column * BK + (i * W + some), o_S, VP * BK)
        if KEEP:
            tl.store(kept_scale + at * (2 * VP) + VP + column, s_scale)
            tl.store(news + at * (VP * BT) + column * BT + every, U)
            for i in tl.static_range(PIECES):
                tl.store(kept + at * (VP * BK) + column * BK + (i * W + some), S[i])
        u_scale, inverse, zero = factors_of(largest((U,), KV), KV)
        o_U = piece_of(U, u_scale, inverse, zero, KV, LOW)
        if READ:
            r_U, r_scale = o_U, u_scale
            if AV != KV:
                r_scale, inverse, zero = factors_of(largest((U,), AV), AV)
                r_U = piece_of(U, r_scale, inverse, zero, AV, LOW)
            store_site(values, at, column * BT + every, r_U, VP * BT)
            tl.store(value_scale + at * VP + column, r_scale)
        rest = S
        S = ()
        for i in tl.static_range(PIECES):
            o_out = load_site(out, at, i * (W * BT) + tall, BT * BK, OP)
            b_whole = tl.load(whole + at * BK + i * W + channel)[None, None, :]
            k_scale = tl.load(out_scale + at * BK + i * W + channel)[None, None, :]
            S = S + (rest[i] * b_whole + site_product(o_U, for_all(o_out, G)) * (u_scale * k_scale),)
    for i in tl.static_range(PIECES):
        m_state = (some + i * W < K) & (column < V)
        tl.store(final + (p_state + i * (W * V)), S[i], mask=m_state)


@triton.jit
def queries(
    q, k, g, starts, lengths, offsets, owner, index, norms, factors, q_codes, q_scale, read_codes, read_scale, reads,
    block, i_head, tile, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr,
    QK: tl.constexpr, QS: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk's `reads`, fp32 `[ROWS, BT]`, and of `Q e^G` as the left operand of qs, with its factors.

    Arguments as in `outputs`.
    """
    at, i_key = block.to(tl.int64) * HV + i_head, i_head // (HV // H)
    slot, row = tl.arange(0, BT), tile * ROWS + tl.arange(0, ROWS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, row, BT, BT, 1)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    q_norm = tl.load(p_norm + BT + row)
    if DECAY == 2:
        # Gates up to each row: those before the tile together, then one by one.
        p_g = g + i_head * g_head
        b_g = held(load_rows(p_g, token * g_token, inside, 0, g_channel, K, BK))
        before = tl.zeros([BK], tl.float32)
        if tile > 0:
            early, some = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
            before = tl.sum(held(load_rows(p_g, early * g_token, some & (slot < tile * ROWS), 0, g_channel, K, BK)), 0)
        weight = gate_exp(tl.cumsum(b_g, 0) + before[None, :], LOW)
        o_q, o_scale = site(b_q.to(tl.float32) * q_norm[:, None] * weight, 1, QS, LOW)
        P = tl.load(reads + at * (BT * BT) + row[:, None] * BT + slot[None, :])
    else:
        at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
        key = block.to(tl.int64) * H + i_key
        row_i, row_j = token * q_token + i_key * q_head, at_j * k_token + i_key * k_head
        a, a_scale = row_operand(
            q, row_i, inside, q_channel, q_codes, q_scale, p_norm + BT, key, row, K, BK, BT, QK, LOW
        )
        b, b_scale = row_operand(
            k, row_j, in_j, k_channel, read_codes, read_scale, p_norm, key, slot, K, BK, BT, QK, LOW
        )
        P = site_product(a, flipped_parts(b)) * (a_scale[:, None] * b_scale[None, :])
        P = tl.where(slot[None, :] <= row[:, None], P * head_weights(factors, at, row, slot, BT, LOW), 0.0)
        o_q, o_scale = scaled(b_q, q_norm * tl.load(factors + at * (4 * BT) + 2 * BT + row), QS, LOW)
    return P, o_q, o_scale


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def outputs(
    q, k, g, starts, lengths, offsets, owner, index, norms, factors, q_codes, q_scale, read_codes, read_scale, reads,
    states, state_scale, values, value_scale, o, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, o_token, o_head, o_column,
    H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    ROWS: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr,
    QK: tl.constexpr, QS: tl.constexpr, AV: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, g: `[M, HV]` or `[M, HV, K]` as DECAY says.
        norms, factors, and codes and scales of q and of k as qk reads it: of `rows`.
        reads: fp32 `[NB, HV, BT, BT]` of `pairs_of_channels`; None of a decay by head, where they are made here.
        states, state_scale, values, value_scale: of `walk`. o: `[M, HV, V]`, the sequences' rows are written.

    Grid: (NB * HV * BT / ROWS * VP / BV,).
    """
    NV: tl.constexpr = VP // BV
    TILES: tl.constexpr = BT // ROWS
    EXACT: tl.constexpr = 2 if LOW else 3
    SP: tl.constexpr = EXACT if QS == "" else 1
    UP: tl.constexpr = EXACT if AV == "" else 1
    i_v, tile, pid = tl.program_id(0) % NV, tl.program_id(0) // NV % TILES, tl.program_id(0) // (NV * TILES)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    slot, channel, column = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    P, o_q, o_scale = queries(
        q, k, g, starts, lengths, offsets, owner, index, norms, factors, q_codes, q_scale, read_codes, read_scale,
        reads, block, i_head, tile, skip, q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head,
        g_channel, H, HV, K, BK, BT, ROWS, DECAY, LOW, QK, QS,
    )  # fmt: skip
    o_S = load_site(states, at, column[:, None] * BK + channel[None, :], VP * BK, SP)
    s_scale = tl.load(state_scale + at * VP + column)
    O = site_product(o_q, flipped_parts(o_S)) * (o_scale[:, None] * s_scale[None, :])
    o_P, p_scale = site(P, 1, AV, LOW)
    o_U = load_site(values, at, column[:, None] * BT + slot[None, :], VP * BT, UP)
    v_scale = tl.load(value_scale + at * VP + column)
    O += site_product(o_P, flipped_parts(o_U)) * (p_scale[:, None] * v_scale[None, :])
    row = tile * ROWS + tl.arange(0, ROWS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, row, BT, BT, 1)
    p_o = o + token[:, None] * o_token + i_head * o_head + column[None, :] * o_column
    tl.store(p_o, (O * scale).to(o.dtype.element_ty), mask=inside[:, None] & (column < V)[None, :])
