"""The state from window to window: one program a sequence, value head and block of value columns.

All that is done here waits for the window before. The state is `[columns / 16, 16, channels]`, 16 value columns a
warp, and products are batches of as many: so it is the first operand of every product, in the registers where it is,
and nothing but a tile's maximum is exchanged between warps. (A batch is also what keeps Triton from wgmma, which is
not safe with the ptxas that it brings: see `chunk.py`.)
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import rstd
from lattn_compile.kernels.common.products import coarse, flipped, load_operand, operand, product, shared
from lattn_compile.kernels.replay_factors import rounded_updates, solved
from lattn_compile.kernels.replay_rounding import coded, rounded
from lattn_compile.kernels.replay_windows import runs

__all__ = ["last_query", "walk"]


@triton.jit
def last_query(
    q, token, i_key, scale, q_token, q_head, q_channel, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr
):
    """The scaled query of one token, fp32 `[BK]`."""
    channel = tl.arange(0, BK)
    p_q = q + token * q_token + i_key * q_head + channel * q_channel
    b_q = tl.load(p_q, mask=channel < K, other=0.0).to(tl.float32)
    if NORM:
        b_q = b_q * rstd(tl.sum(b_q * b_q, 0))
    return b_q * scale


@triton.jit
def _solved(E, o_state, o_erase, DELTA: tl.constexpr, PRECISION: tl.constexpr):
    """Errors of a window's tokens against a state, from those against no state."""
    if DELTA:
        return E - product(o_state, o_erase, PRECISION)
    else:
        return E


@triton.jit(do_not_specialize=["scale", "base_rank", "first", "last", "H", "HV"])
def walk(
    q, operands, reads, weights, errors, overlaps, owns, whole, strengths, starts, lengths, leads, at, begin, origin,
    place, count, states, source, target, copies, source_copies, target_copies, final, anchors, o, kept, kept_copies,
    anchored, written, late, record, scale, base_rank, first, last, q_token, q_head, q_channel, o_token, o_head,
    o_column, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AFTER: tl.constexpr,
    PAIR: tl.constexpr, CAST: tl.constexpr,
    ON: tl.constexpr, FINAL: tl.constexpr, ANCHORS: tl.constexpr, READ: tl.constexpr, KEEP: tl.constexpr, RECORD:
    tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, FACTORS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Windows of ranks `first <= rank < last`, of every sequence those it has there, one after another.

    Args:
        operands, reads, weights, errors, overlaps, owns, whole, strengths: of `prepare` and `relate`; the windows' E is
        left in errors under KEEP. ROWS: without a decay by channel. starts, lengths, leads, step, begin, place, count:
        of `Windows`.
        states: fp32 `[N, HV, K, V]`, before these windows, and after them on return.
        copies: under PAIR, likewise, the read copies: tokens see these, and write to both; a flush makes them anew.
        anchors: fp32 `[N, HV, K, V]`, under ANCHORS receives what a sequence's last flush stores.
        o: `[M, HV, V]`, written if READ. q, scale, NORM: for AFTER, where a window's last token reads what is stored.
        kept: under KEEP, fp32 `[S, HV, VP, BK]`, the state before each window; kept_copies: under PAIR, its
            read copy; anchored: fp32 `[S, HV, VP, BT]`, E against the state, as errors has it against the copy;
            written: under FACTORS, likewise, updates as they are written.
        late: under KEEP and AFTER, fp32 `[S, HV, VP / BV, BK]`: the stored state times a last token's row of `o`, which
            is its gradient then, and not written.
        record: under RECORD, fp32 `[N, W - 1, HV, V]`, receives the updates of windows that are not full.
        FORMAT: "" rounds nothing. CAST: under PAIR, what states are cast to at a flush.

    Grid: (VP / BV * HV * N,).
    """
    BLOCKS: tl.constexpr = VP // BV
    PARTS: tl.constexpr = 1 if PART == "fp32" else 3
    NARROW: tl.constexpr = 1 if ROWS else PARTS
    TILE: tl.constexpr = BT * BK
    FEW: tl.constexpr = 1 if PART == "fp32" else 2
    G: tl.constexpr = BV // 16
    pid = tl.program_id(0)
    i_block, i_head, i_seq = pid % BLOCKS, (pid // BLOCKS) % HV, pid // (BLOCKS * HV)
    low, high, i_origin, i_place = runs(at, begin, origin, place, count, i_seq, first, last)
    start, lead = tl.load(starts + i_seq), tl.load(leads + i_seq)
    length = tl.load(lengths + i_seq)
    flushes = (lead + length) // W

    slot, key = tl.arange(0, BT), tl.arange(0, BK)
    i, channel = slot[None, None, :], key[None, None, :]
    column = i_block * BV + tl.arange(0, G)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    m_v = column < V
    inner = i_head * (K * V) + channel * V + column
    state = i_seq.to(tl.int64) * (HV * K * V) + inner
    between = i_place.to(tl.int64) * (HV * K * V) + inner
    m_state = m_v & (channel < K)
    m_begun = m_state & (low > 0)
    m_new = m_state & (low == 0)
    most = tl.load(count + i_seq)
    if low >= high:
        if ON:
            # A sequence that has begun and waits for its turn, where a stretch is shorter than a group.
            m_begun = m_begun & (low < most)
            tl.store(target + between, tl.load(source + between, mask=m_begun), mask=m_begun)
            if PAIR:
                tl.store(target_copies + between, tl.load(source_copies + between, mask=m_begun), mask=m_begun)
        return
    # One of the two is masked off altogether.
    S = tl.load(states + state, mask=m_new, other=0.0) + tl.load(source + between, mask=m_begun, other=0.0)
    R = S
    if PAIR:
        R = tl.load(copies + state, mask=m_new, other=0.0) + tl.load(source_copies + between, mask=m_begun, other=0.0)

    # Not left to the compiler: what the next window needs is on its way while one is computed.
    p_begin = begin + i_origin
    here = (tl.load(p_begin + low) + i_place - base_rank).to(tl.int64) * HV + i_head
    p_errors = column * BT + i
    n_E = tl.load(errors + here * (VP * BT) + p_errors)
    n_whole = tl.load(whole + here * BK + key)
    n_beta = tl.load(strengths + here * BT + slot)
    following = here
    # A state that is stored as codes is an exact operand of one part. One that a sequence starts from may be any other;
    # if it is codes, too, it is taken as such, so that a run that is cut there has the bits of one that goes on.
    CODED: tl.constexpr = FORMAT == "bf16" or ((FORMAT == "int8" or FORMAT == "fp8_e4m3") and BLOCK_K == BK)
    CODES: tl.constexpr = CODED and PART != "fp32" and not PAIR
    middle = high
    C = S
    size = S
    if CODES:
        C, size = coded(S, FORMAT, BLOCK_V, BV, BK)
        other = tl.max(tl.max(tl.max((C * size != S).to(tl.int32), 2), 1), 0)
        C = C.to(tl.bfloat16 if PART == "bf16" else tl.float32)
        middle = low + other
    for PHASE in tl.static_range(2 if CODES else 1):
        for j in range(low if PHASE == 0 else middle, middle if PHASE == 0 else high):
            here, E, w, b_beta = following, n_E, n_whole, n_beta
            following = (tl.load(p_begin + tl.minimum(j + 1, high - 1)) + i_place - base_rank).to(
                tl.int64
            ) * HV + i_head
            n_E = tl.load(errors + following * (VP * BT) + p_errors)
            n_whole = tl.load(whole + following * BK + key)
            n_beta = tl.load(strengths + following * BT + slot)
            p_window = operands + here * (TILES * TILE) + slot[:, None] * BK + key[None, :]
            p_turned = operands + here * (TILES * TILE) + slot[None, :] + key[:, None] * BT
            p_reads = reads + here * (PARTS * BT * BT) + slot[:, None] * BT + slot[None, :]

            p_kept = (here * VP + column) * BK + channel
            if PHASE == 1:
                S = C.to(tl.float32) * size
                o_S = (C,)
            else:
                o_S = operand(S, PART, ASSEMBLY)
            o_R = o_S
            o_erase = o_S
            if DELTA:
                o_erase = shared(flipped(load_operand(p_window, TILE, PARTS)), G)
            if PAIR:
                o_R = operand(R, PART, ASSEMBLY)
                E_A = _solved(E, o_S, o_erase, DELTA, PRECISION)
                if KEEP:
                    tl.store(kept_copies + p_kept, R)
                    tl.store(anchored + here * (VP * BT) + p_errors, E_A)
            if PHASE == 1:
                if DELTA:
                    # Said as one step, for every launch to have the same bits.
                    E = tl.fma(product(o_S, o_erase, PRECISION, 1), -size, E)
            else:
                E = _solved(E, o_R, o_erase, DELTA, PRECISION)
            U = E
            if FACTORS == "":
                U = E * b_beta[None, None, :]
            elif DELTA:
                E, U = solved(E, overlaps + here * (BT * BT), strengths + here * BT, W, BT, FACTORS)
            else:
                U = rounded_updates(E * b_beta[None, None, :], FACTORS)
            if KEEP:
                tl.store(kept + p_kept, S)
                tl.store(errors + here * (VP * BT) + p_errors, E)
                if FACTORS != "":
                    tl.store(written + here * (VP * BT) + p_errors, U)
            base = j * W - lead
            live = (i < W) & (base + i >= 0) & (base + i < length)
            if READ:
                o_query = shared(flipped(load_operand(p_window + PARTS * TILE, TILE, min(NARROW, FEW))), G)
                read = product(coarse(o_R), o_query, PRECISION, 2)
                if PHASE == 1:
                    read = read * size
                if ROWS:
                    read = read * tl.load(weights + here * (2 * BT) + slot)[None, None, :]
                o_reads = shared(flipped(load_operand(p_reads, BT * BT, FEW)), G)
                read += product(coarse(operand(U, PART, ASSEMBLY)), o_reads, PRECISION, 3)
                if APART:
                    read += E * (b_beta * tl.load(owns + here * BT + slot))[None, None, :]
                m_read = live
                if AFTER:
                    m_read = live & (i != W - 1)
                p_o = o + (start + base + i) * o_token + i_head * o_head + column * o_column
                tl.store(p_o, read.to(o.dtype.element_ty), mask=m_read & m_v)
            if RECORD:
                if j == flushes:
                    p_record = record + ((i_seq.to(tl.int64) * (W - 1) + i) * HV + i_head) * V + column
                    tl.store(p_record, U, mask=live & (i < W - 1) & m_v)
            o_out = shared(flipped(load_operand(p_turned + (PARTS + NARROW) * TILE, TILE, NARROW)), G)
            if PAIR:
                U = E_A * b_beta[None, None, :]
            if ROWS:
                U = U * tl.load(weights + here * (2 * BT) + BT + slot)[None, None, :]
            S = S * w[None, None, :] + product(operand(U, PART, ASSEMBLY), o_out, PRECISION)
            # Rounded also after a last window that is not full: nobody sees that state.
            if PAIR:
                if CAST != "":
                    S = rounded(S, CAST, 1, 1, BV, BK)
                R = S
                if FORMAT != "":
                    R = rounded(S, FORMAT, BLOCK_K, BLOCK_V, BV, BK)
            elif CODES:
                code, size = coded(S, FORMAT, BLOCK_V, BV, BK)
                C = code.to(C.dtype)
                S = code * size
            elif FORMAT != "":
                S = rounded(S, FORMAT, BLOCK_K, BLOCK_V, BV, BK)
            if ANCHORS:
                if j == flushes - 1:
                    tl.store(anchors + state, S, mask=m_state)
            if AFTER:
                if j < flushes:
                    end = start + base + (W - 1)
                    p_last = o + end * o_token + i_head * o_head + column * o_column
                    if KEEP:
                        b_do = tl.load(p_last, mask=m_v, other=0.0).to(tl.float32)
                        tl.store(late + (here * BLOCKS + i_block) * BK + key, tl.sum(tl.sum(S * b_do, 1), 0))
                    if READ:
                        b_q = last_query(q, end, i_head // (HV // H), scale, q_token, q_head, q_channel, K, BK, NORM)
                        last_read = tl.sum(S * b_q[None, None, :], 2)[:, :, None]
                        tl.store(p_last, last_read.to(o.dtype.element_ty), mask=m_v)
    if ON:
        tl.store(target + between, S, mask=m_state & (high < most))
        if PAIR:
            tl.store(target_copies + between, R, mask=m_state & (high < most))
    if FINAL:
        tl.store(final + state, S, mask=m_state & (high == most))
