"""The prefill's way through the state, chunk by chunk, and its outputs (`reference/prefill.py`).

    V' = U - W S          O = scale ((Q e^G) S + reads V')          S' = e^G_C S + (K e^(G_C - G))^T V'

All transposed, and a warp has 16 value columns: what a product leaves in its registers is where the next one wants it,
and no warp waits for another. So S is rounded where it is, and is never in memory between two chunks.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.prefill_codec import (
    factors_of,
    for_all,
    lanes,
    largest,
    load_site,
    piece_of,
    site_product,
)

__all__ = ["walk"]


@triton.jit(do_not_specialize=["scale", "skip", "HV"])
def walk(
    erase, erase_scale, out, out_scale, whole, updates, source, starts, lengths, first, count, final, query,
    query_scale, seen, seen_scale, o, kept, kept_scale, news, scale, skip, o_token, o_head, o_column, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, G: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr, KEEP: tl.constexpr,
    WS: tl.constexpr, QS: tl.constexpr, KV: tl.constexpr, AV: tl.constexpr, QP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Args:
        erase, erase_scale, out, out_scale, whole, updates: of `prefill_operands.py`.
        source: states fp32 `[N, HV, K, V]`, contiguous; final likewise, and may be the same.
        first, count: of `Schedule`.
        query, query_scale, seen, seen_scale: of `prefill_pairs.py`; o: `[M, HV, V]`, the sequences' rows are written.
            All None where no outputs are wanted. QP: parts of query.
        kept, news: under KEEP fp32 `[NB, HV, VP, BK]` and `[NB, HV, VP, BT]`, S before each chunk and V'. kept_scale:
            fp32 `[NB, HV, 2, VP]`, the factors of S at ws and at qs.
        G: warps. W: channels of a piece of the state. STAGES: of the loop's loads.

    Grid: (VP / (16 * G) * HV * N,).
    """
    NV: tl.constexpr = VP // (16 * G)
    PIECES: tl.constexpr = BK // W
    EP: tl.constexpr = 3 if WS == "" else 1
    OP: tl.constexpr = 3 if KV == "" else 1
    PP: tl.constexpr = 3 if AV == "" else 1
    READ: tl.constexpr = o is not None
    SAME: tl.constexpr = WS == QS or not DELTA
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
    length = tl.load(lengths + i_seq)
    if READ:
        p_o = o + tl.load(starts + i_seq) * o_token + i_head * o_head + column * o_column
    for j in tl.range(0, blocks, num_stages=STAGES):
        at = (block + j).to(tl.int64) * HV + i_head
        U = tl.load(updates + at * (VP * BT) + column * BT + every)
        s_scale, inverse, zero = factors_of(largest(S, WS if DELTA else QS), WS if DELTA else QS)
        O = tl.zeros([G, 16, BT], tl.float32)
        if DELTA:
            w_scale = tl.load(erase_scale + at * BT + slot)[None, None, :]
            erased = tl.zeros([G, 16, BT], tl.float32)
            for i in tl.static_range(PIECES):
                o_S = piece_of(S[i], s_scale, inverse, zero, WS, LOW)
                w = load_site(erase, at, i * W + wide, BT * BK, EP)
                erased += site_product(lanes(o_S, erase), for_all(w, G))
                if READ and SAME:
                    O += site_product(lanes(o_S, query), for_all(load_site(query, at, i * W + wide, BT * BK, QP), G))
            U -= erased * (s_scale * w_scale)
            if KEEP:
                tl.store(kept_scale + at * (2 * VP) + column, s_scale)
        if not SAME:
            s_scale, inverse, zero = factors_of(largest(S, QS), QS)
        if READ:
            if not (SAME and DELTA):
                for i in tl.static_range(PIECES):
                    o_S = piece_of(S[i], s_scale, inverse, zero, QS, LOW)
                    O += site_product(lanes(o_S, query), for_all(load_site(query, at, i * W + wide, BT * BK, QP), G))
            O = O * ((s_scale * scale) * tl.load(query_scale + at * BT + slot)[None, None, :])
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
            P = load_site(seen, at, slot[:, None] * BT + slot[None, :], BT * BT, PP)
            p_scale = tl.load(seen_scale + at * BT + slot)[None, None, :]
            O += site_product(lanes(r_U, seen), for_all(P, G)) * ((r_scale * scale) * p_scale)
            row = (skip + j).to(tl.int64) * BT + every
            tl.store(p_o + row * o_token, O.to(o.dtype.element_ty), mask=(row < length) & (column < V))
        rest = S
        S = ()
        for i in tl.static_range(PIECES):
            o_out = load_site(out, at, i * (W * BT) + tall, BT * BK, OP)
            b_whole = tl.load(whole + at * BK + i * W + channel)[None, None, :]
            k_scale = tl.load(out_scale + at * BK + i * W + channel)[None, None, :]
            S = S + (rest[i] * b_whole + site_product(lanes(o_U, out), for_all(o_out, G)) * (u_scale * k_scale),)
    for i in tl.static_range(PIECES):
        m_state = (some + i * W < K) & (column < V)
        tl.store(final + (p_state + i * (W * V)), S[i], mask=m_state)
