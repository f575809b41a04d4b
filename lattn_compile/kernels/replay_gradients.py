"""Gradients of all windows of a stretch at once, from the states and their gradients that the two walks left.

`settle` and `contract` sum over value columns, one program a window and value head; `deliver` undoes weights and norms
and sums over the value heads of a key head, one program a window and key head; `tally` has what is left, a number a
token and value head. In the notation of `replay_prepare.py`,

    dF = Y^T dE  (= dv)        dquery = dO S^T     derase's k = -dF S^T     dout = beta (E dS^T)
    dreads = (dO E^T) beta     doverlaps = -(dF E^T) beta                   dwhole = sum_v dS S
    Z = (dO E^T) reads - (dF E^T) overlaps
    dbeta_j = sum_i Z_ij + out_j . (E dS^T)_j      a gate between j and i gets beta_j Z_ij

No division by beta, which may be 0.

Under `factors`, updates as they are written stand for beta E in all of that, and gradients pass through their rounding:
`contract` gets them for E, and beta is 1 from there on. dbeta is E (dU - overlaps^T dF), which `settle` sums, as it
does what a token's own update gets of its output where that is read as it was (`downs`).
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import no_more
from lattn_compile.kernels.common.products import (
    after_sum,
    flipped,
    gate_exp,
    halves,
    held,
    joined,
    load_operand,
    operand,
    product,
    segments,
    summed,
    until_sum,
)
from lattn_compile.kernels.replay_decay import load_rows, norms, parted
from lattn_compile.kernels.replay_windows import rows

__all__ = ["contract", "deliver", "settle", "tally"]


@triton.jit(do_not_specialize=["first", "HV"])
def settle(
    owner, step, starts, lengths, leads, system, errors, anchored, written, derrors, danchored, overlaps, strengths,
    grad_o, drecord, dv, by_pair, of_record, downs, first, do_token, do_head, do_column, dv_token, dv_head, HV,
    V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, AFTER: tl.constexpr, PAIR: tl.constexpr,
    READ: tl.constexpr, RECORD: tl.constexpr, FACTORS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The gradient of v, and what tokens' gradients are to each other's errors.

    Args:
        owner to leads: of `Windows`. system, overlaps, strengths: of `relate`, errors, anchored, written: of `walk`.
            derrors, danchored: of `retreat`, dE (dU under FACTORS); dF on return. grad_o, drecord: as `retreat` takes
            them. dv: `[M, HV, V]`, contiguous in V.
        by_pair: fp32 `[S, HV, 2, BT, BT]`: dO E^T, dF E^T; under PAIR the latter is of both states.
        of_record: under RECORD, fp32 `[S, HV, BT]`: the sum over columns of E times the gradient of what is recorded;
            under FACTORS, the gradient of beta. downs: under APART, fp32 `[S, HV, BT]`: beta E dO.
        BV: columns at a time.

    Grid: (S * HV,).
    """
    pid = tl.program_id(0)
    slot, i_head = pid // HV, pid % HV
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    at = pid.to(tl.int64)
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    i = tl.arange(0, BT)
    live = inside
    if AFTER:
        # A window's last token reads what is stored.
        live = live & (i != W - 1)
    if DELTA:
        Y = tl.load(system + at * (BT * BT) + i[:, None] * BT + i[None, :])
        o_Y = flipped(operand(Y, PART, ASSEMBLY))
    if FACTORS != "":
        b_beta = tl.load(strengths + at * BT + i)
        if DELTA:
            A = tl.load(overlaps + at * (BT * BT) + i[None, :] * BT + i[:, None])
            o_overlaps = operand(A, PART, ASSEMBLY)
    queried = tl.zeros([BT, BT], tl.float32)
    erased = tl.zeros([BT, BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    down = tl.zeros([BT], tl.float32)
    for part in range(0, VP, BV):
        column = part + tl.arange(0, BV)
        m_v = (column < V)[None, :]
        p_columns = (at * VP + column[None, :]) * BT + i[:, None]
        E = tl.load(errors + p_columns)
        dF = tl.load(derrors + p_columns)
        if FACTORS == "":
            o_E = flipped(operand(E, PART, ASSEMBLY))
        else:
            o_E = flipped(operand(tl.load(written + p_columns), PART, ASSEMBLY))
            dU = dF
            dF = dU * b_beta[:, None]
        if DELTA:
            dF = product(o_Y, operand(dF, PART, ASSEMBLY), PRECISION)
            o_dF = operand(dF, PART, ASSEMBLY)
            erased += product(o_dF, o_E, PRECISION)
            if FACTORS != "":
                dU -= product(o_overlaps, o_dF, PRECISION)
        if DELTA or FACTORS != "":
            tl.store(derrors + p_columns, dF)
        if FACTORS != "":
            total += tl.sum(E * dU, 1)
        if PAIR:
            dF_A = tl.load(danchored + p_columns)
            if DELTA:
                dF_A = product(o_Y, operand(dF_A, PART, ASSEMBLY), PRECISION)
                tl.store(danchored + p_columns, dF_A)
                o_A = flipped(operand(tl.load(anchored + p_columns), PART, ASSEMBLY))
                erased += product(operand(dF_A, PART, ASSEMBLY), o_A, PRECISION)
            dF += dF_A
        if RECORD and FACTORS == "":
            i_seq = tl.load(owner + rank)
            flushes = (tl.load(leads + i_seq) + tl.load(lengths + i_seq)) // W
            recorded = inside & (i < W - 1) & (tl.load(step + rank) == flushes)
            p_record = drecord + ((i_seq.to(tl.int64) * (W - 1) + i[:, None]) * HV + i_head) * V + column[None, :]
            total += tl.sum(E * tl.load(p_record, mask=recorded[:, None] & m_v, other=0.0), 1)
        p_dv = dv + token[:, None] * dv_token + i_head * dv_head + column[None, :]
        tl.store(p_dv, dF.to(dv.dtype.element_ty), mask=inside[:, None] & m_v)
        if READ:
            p_do = grad_o + token[:, None] * do_token + i_head * do_head + column[None, :] * do_column
            b_do = tl.load(p_do, mask=live[:, None] & m_v, other=0.0)
            queried += product(operand(b_do, PART, ASSEMBLY), o_E, PRECISION)
            if APART:
                down += tl.sum(b_do.to(tl.float32) * E, 1) * b_beta
    p_pair = by_pair + at * (2 * BT * BT) + i[:, None] * BT + i[None, :]
    tl.store(p_pair, queried)
    tl.store(p_pair + BT * BT, erased)
    if RECORD or FACTORS != "":
        tl.store(of_record + at * BT + i, total)
    if APART:
        tl.store(downs + at * BT + i, down)


@triton.jit(do_not_specialize=["first", "HV"])
def contract(
    owner, step, starts, lengths, leads, errors, anchored, derrors, danchored, kept, kept_copies, dkept, grad_o,
    by_channel, dwhole,
    first, do_token, do_head, do_column, HV,
    BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, AFTER: tl.constexpr, PAIR: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """Sums over value columns, by key channel.

    Args:
        derrors, danchored: dF, of `settle`, which has the other tensors; errors: under FACTORS, written. kept,
            kept_copies: of `walk`, dkept: of `retreat`. Under PAIR, what is read is the copy, and what is erased
            belongs to both.
        by_channel: fp32 `[S, HV, 3, BT, BK]`: dO S^T, -dF S^T, E dS^T. dwhole: fp32 `[S, HV, BK]`.
        BS: channels of a program, BV: columns at a time.

    Grid: (BK / BS, S * HV).
    """
    pid = tl.program_id(1)
    slot, i_head = pid // HV, pid % HV
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    at = pid.to(tl.int64)
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    i = tl.arange(0, BT)
    channel = tl.program_id(0) * BS + tl.arange(0, BS)
    live = inside
    if AFTER:
        live = live & (i != W - 1)
    dquery = tl.zeros([BT, BS], tl.float32)
    derase = tl.zeros([BT, BS], tl.float32)
    dout = tl.zeros([BT, BS], tl.float32)
    total = tl.zeros([BS], tl.float32)
    for part in range(0, VP, BV):
        column = part + tl.arange(0, BV)
        p_columns = (at * VP + column[None, :]) * BT + i[:, None]
        p_kept = (at * VP + column[:, None]) * BK + channel[None, :]
        S, dS = tl.load(kept + p_kept), tl.load(dkept + p_kept)
        total += tl.sum(S * dS, 0)
        o_S, o_dS = operand(S, PART, ASSEMBLY), operand(dS, PART, ASSEMBLY)
        p_E, p_dF = errors + p_columns, derrors + p_columns
        if PAIR:
            p_E = anchored + p_columns
            if DELTA:
                derase -= product(operand(tl.load(danchored + p_columns), PART, ASSEMBLY), o_S, PRECISION)
            o_S = operand(tl.load(kept_copies + p_kept), PART, ASSEMBLY)
        if DELTA:
            derase -= product(operand(tl.load(p_dF), PART, ASSEMBLY), o_S, PRECISION)
        dout += product(operand(tl.load(p_E), PART, ASSEMBLY), o_dS, PRECISION)
        if READ:
            p_do = grad_o + token[:, None] * do_token + i_head * do_head + column[None, :] * do_column
            b_do = tl.load(p_do, mask=live[:, None] & (column < V)[None, :], other=0.0)
            dquery += product(operand(b_do, PART, ASSEMBLY), o_S, PRECISION)
    p_out = by_channel + at * (3 * BT * BK) + i[:, None] * BK + channel[None, :]
    tl.store(p_out, dquery)
    tl.store(p_out + BT * BK, derase)
    tl.store(p_out + 2 * BT * BK, dout)
    tl.store(dwhole + at * BK + channel, total)


@triton.jit
def _shifted(x, BT: tl.constexpr):
    """`[BT]` moved one slot on; 0 enters."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return tl.sum(tl.where(j + 1 == i, x[None, :], 0.0), 1)


@triton.jit
def _between(Z, BT: tl.constexpr):
    """`sum_{i > m >= j} Z_ij` for every m, `[BT]`: what the gate of slot m + 1 gets of pairs j < i."""
    i, m = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return tl.sum(tl.where(i > m, tl.cumsum(Z, 1), 0.0), 0)


@triton.jit(do_not_specialize=["scale", "first", "H", "HV"])
def deliver(
    q, k, g, codes, sizes, owner, step, starts, lengths, leads, strengths, whole, by_channel, by_pair, by_slot, downs,
    dwhole, late, drecord, dq, dk, dg, scale, first, q_token, q_head, q_channel, k_token, k_head, k_channel,
    g_token, g_head, g_channel, dq_token, dq_head, dk_token, dk_head, dg_token, dg_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, RATIO: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, LATE: tl.constexpr, RECORD: tl.constexpr,
    FACTORS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gradients of q and k, and of g by channel.

    Args:
        q, k, g, codes, sizes, owner to leads, scale: as `prepare` takes them; strengths, whole: of `relate` and it.
            by_channel, by_pair, downs, dwhole: of `contract` and `settle`; the first is overwritten. late: of `walk`,
            LATE blocks a window; 0 is none. drecord: fp32 `[N, W - 1, H, K]`, contiguous, of recorded keys, under
            RECORD.
        by_slot: fp32 `[S, HV, BK / BS, 3, BT]`, for `tally`: sums over channels of out (E dS^T), of query dquery +
            erase derase, and of whole dwhole.
        dq, dk: `[M, H, K]`, dg: `[M, HV, K]`, contiguous in K. RATIO: HV / H. BS: channels at a time.

    Grid: (S * H,).
    """
    pid = tl.program_id(0)
    slot, i_key = pid // H, pid % H
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    SLABS: tl.constexpr = BK // BS
    FAST: tl.constexpr = PART == "bf16"
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    w_row = (token * H + i_key) * K
    if FACTORS != "":
        w_size = tl.load(sizes + token * H + i_key, mask=inside, other=0.0)
    i_seq = tl.load(owner + rank)
    recorded = inside
    if RECORD:
        flushes = (tl.load(leads + i_seq) + tl.load(lengths + i_seq)) // W
        recorded = inside & (i < W - 1) & (tl.load(step + rank) == flushes)
    # Of a key head's first value head: read before it is written.
    p_raw = by_channel + (slot.to(tl.int64) * HV + i_key * RATIO) * (3 * BT * BK) + row * BK
    q_total = tl.zeros([BT], tl.float32)
    k_total = tl.zeros([BT], tl.float32)
    for slab in range(0, BK, BS):
        channel = slab + tl.arange(0, BS)
        m_rows = inside[:, None] & (channel < K)[None, :]
        x_q = load_rows(q, q_row, inside, slab, q_channel, K, BS).to(tl.float32)
        x_k = load_rows(k, k_row, inside, slab, k_channel, K, BS).to(tl.float32)
        b_q = x_q * (q_norm * scale)[:, None]
        b_k = x_k * k_norm[:, None]
        b_w = b_k
        if FACTORS != "":
            b_w = load_rows(codes, w_row, inside, slab, 1, K, BS).to(tl.float32) * w_size[:, None]
        sum_q = tl.zeros([BT, BS], tl.float32)
        sum_k = tl.zeros([BT, BS], tl.float32)
        for r in range(RATIO):
            i_head = i_key * RATIO + r
            at = slot.to(tl.int64) * HV + i_head
            b_beta = tl.full([BT], 1.0, tl.float32)
            if FACTORS == "":
                b_beta = tl.load(strengths + at * BT + i)
            p_square = by_pair + at * (2 * BT * BT) + row * BT + column
            G_reads = tl.where(row >= column, tl.load(p_square) * b_beta[None, :], 0.0)
            if APART:
                G_reads = tl.where(row > column, G_reads, 0.0)
                down = tl.load(downs + at * BT + i)[:, None]
                sum_q += down * b_k
                sum_k += down * b_q
            G_overlaps = tl.zeros([BT, BT], tl.float32)
            if DELTA:
                G_overlaps = tl.where(row > column, -tl.load(p_square + BT * BT) * b_beta[None, :], 0.0)
            p_rows = by_channel + at * (3 * BT * BK) + row * BK + channel[None, :]
            dquery, derase = tl.load(p_rows), tl.load(p_rows + BT * BK)
            dout = tl.load(p_rows + 2 * BT * BK)
            p_slot = by_slot + (at * SLABS + slab // BS) * (3 * BT) + i
            b_dwhole = tl.load(dwhole + at * BK + channel) * tl.load(whole + at * BK + channel)
            if DECAY == 2:
                b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, slab, g_channel, K, BS))
                until = (column <= row).to(tl.float32)
                behind = (column > row).to(tl.float32)
                from_start = gate_exp(no_more(summed(until, b_g, PART, PRECISION, ASSEMBLY, False), 0.0), FAST)
                to_end = gate_exp(no_more(summed(behind, b_g, PART, PRECISION, ASSEMBLY, False), 0.0), FAST)
                out = b_w * to_end * dout
                tl.store(p_slot, tl.sum(out, 1))
                own = tl.sum(tl.where(row == column, G_reads, 0.0), 1)[:, None]
                dquery = dquery * from_start
                derase = derase * from_start
                exponent = dquery * b_q + derase * b_k
                # Row l of the transpose has ones where l's gate stands in the sum.
                b_dg = summed(tl.trans(until), exponent, PART, PRECISION, ASSEMBLY, False)
                b_dg += summed(tl.trans(behind), out * b_beta[:, None], PART, PRECISION, ASSEMBLY, False)
                b_dg += b_dwhole[None, :]
                sum_q += dquery + own * b_w
                sum_k += derase + dout * b_beta[:, None] * to_end + own * b_q
                half = BT // 2
                while half > 0:
                    which = halves(half, BT)
                    weight = gate_exp(no_more(summed(which, b_g, PART, PRECISION, ASSEMBLY, False), 0.0), FAST)
                    here, later = parted(half, BT), (row // half % 2 == 1)
                    w_q, w_w = b_q * weight, b_w * weight
                    o_w = operand(w_w, PART, ASSEMBLY)
                    o_reads = operand(tl.where(here, G_reads, 0.0), PART, ASSEMBLY)
                    dlate = product(o_reads, o_w, PRECISION)
                    dearly = product(flipped(o_reads), operand(w_q, PART, ASSEMBLY), PRECISION)
                    sum_q += dlate * weight
                    exponent = tl.where(later, dlate * w_q, 0.0)
                    if DELTA:
                        o_overlaps = operand(tl.where(here, G_overlaps, 0.0), PART, ASSEMBLY)
                        dlate = product(o_overlaps, o_w, PRECISION)
                        if FACTORS == "":
                            dearly += product(flipped(o_overlaps), o_w, PRECISION)
                            # Either is 0 where the other is not.
                            dearly += dlate
                            exponent += dearly * w_w
                        else:
                            w_k = b_k * weight
                            dearly += product(flipped(o_overlaps), operand(w_k, PART, ASSEMBLY), PRECISION)
                            exponent += dearly * w_w + dlate * w_k
                            dearly += dlate
                    else:
                        exponent += dearly * w_w
                    sum_k += dearly * weight
                    b_dg += summed(tl.trans(which), exponent, PART, PRECISION, ASSEMBLY, False)
                    half = half // 2
                p_dg = dg + token[:, None] * dg_token + i_head * dg_head + channel[None, :]
                tl.store(p_dg, b_dg.to(dg.dtype.element_ty), mask=m_rows)
            else:
                from_start = tl.full([BT], 1.0, tl.float32)
                to_end = tl.full([BT], 1.0, tl.float32)
                decay = tl.where(row >= column, 1.0, 0.0)
                if DECAY == 1:
                    b_g = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
                    from_start = gate_exp(until_sum(b_g))
                    to_end = gate_exp(after_sum(b_g))
                    decay = gate_exp(segments(b_g, BT, False))
                tl.store(p_slot, tl.sum(b_w * dout, 1) * to_end)
                dquery = dquery * from_start[:, None]
                derase = derase * from_start[:, None]
                tl.store(p_slot + BT, tl.sum(dquery * b_q + derase * b_k, 1))
                tl.store(p_slot + 2 * BT, tl.zeros([BT], tl.float32) + tl.sum(b_dwhole, 0))
                o_reads = operand(G_reads * decay, PART, ASSEMBLY)
                o_w = operand(b_w, PART, ASSEMBLY)
                sum_q += dquery + product(o_reads, o_w, PRECISION)
                sum_k += derase + dout * (b_beta * to_end)[:, None]
                sum_k += product(flipped(o_reads), operand(b_q, PART, ASSEMBLY), PRECISION)
                if DELTA:
                    o_overlaps = G_overlaps * decay
                    if FACTORS == "":
                        o_overlaps = operand(o_overlaps + tl.trans(o_overlaps), PART, ASSEMBLY)
                        sum_k += product(o_overlaps, o_w, PRECISION)
                    else:
                        o_overlaps = operand(o_overlaps, PART, ASSEMBLY)
                        sum_k += product(o_overlaps, o_w, PRECISION)
                        sum_k += product(flipped(o_overlaps), operand(b_k, PART, ASSEMBLY), PRECISION)
            for block in tl.static_range(LATE):
                b_late = tl.load(late + (at * LATE + block) * BK + channel)
                sum_q += tl.where(row == W - 1, b_late[None, :], 0.0)
        sum_q = sum_q * scale
        if RECORD:
            p_record = drecord + ((i_seq.to(tl.int64) * (W - 1) + row) * H + i_key) * K + channel[None, :]
            sum_k += tl.load(p_record, mask=recorded[:, None] & (channel < K)[None, :], other=0.0)
        q_total += tl.sum(sum_q * x_q, 1)
        k_total += tl.sum(sum_k * x_k, 1)
        if SLABS > 1:
            tl.store(p_raw + channel[None, :], sum_q)
            tl.store(p_raw + BT * BK + channel[None, :], sum_k)
        else:
            _store_rows(dq, token * dq_token + i_key * dq_head, channel, m_rows, sum_q, x_q, q_norm, q_total, NORM)
            _store_rows(dk, token * dk_token + i_key * dk_head, channel, m_rows, sum_k, x_k, k_norm, k_total, NORM)
    if SLABS > 1:
        tl.debug_barrier()
        for slab in range(0, BK, BS):
            channel = slab + tl.arange(0, BS)
            m_rows = inside[:, None] & (channel < K)[None, :]
            x_q = load_rows(q, q_row, inside, slab, q_channel, K, BS).to(tl.float32)
            x_k = load_rows(k, k_row, inside, slab, k_channel, K, BS).to(tl.float32)
            sum_q = tl.load(p_raw + channel[None, :])
            sum_k = tl.load(p_raw + BT * BK + channel[None, :])
            _store_rows(dq, token * dq_token + i_key * dq_head, channel, m_rows, sum_q, x_q, q_norm, q_total, NORM)
            _store_rows(dk, token * dk_token + i_key * dk_head, channel, m_rows, sum_k, x_k, k_norm, k_total, NORM)


@triton.jit
def _store_rows(p, row, channel, mask, dx, x, size, total, NORM: tl.constexpr):
    """Stores gradients of vectors `x` as they came, of which `dx` are those of their normalised selves; `size`: their
    reciprocal norms, `total`: the sums over all channels of `dx x`."""
    if NORM:
        dx = (dx - x * (size * size * total)[:, None]) * size[:, None]
    tl.store(p + row[:, None] + channel[None, :], dx.to(p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "HV", "dbeta_token", "dbeta_head", "dg_token", "dg_head"])
def tally(
    owner, step, starts, lengths, leads, reads, overlaps, strengths, by_pair, by_slot, of_record, dg, dbeta,
    first, dg_token, dg_head, dbeta_token, dbeta_head, HV,
    W: tl.constexpr, BT: tl.constexpr, SLABS: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, PART: tl.constexpr, RECORD: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Gradients of beta, and of g by head.

    Args:
        owner to leads: of `Windows`. reads, overlaps, strengths: of `relate`. by_pair, of_record: of `settle`; by_slot:
            of `deliver`. dg, dbeta: `[M, HV]`.

    Grid: (S * HV,).
    """
    pid = tl.program_id(0)
    slot, i_head = pid // HV, pid % HV
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    PARTS: tl.constexpr = 1 if PART == "fp32" else 3
    at = pid.to(tl.int64)
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    i = tl.arange(0, BT)
    square = i[:, None] * BT + i[None, :]
    p_pair = by_pair + at * (2 * BT * BT) + square
    # In float64: a repeated key makes them alternate in sign.
    Z = tl.load(p_pair).to(tl.float64)
    Z = Z * joined(load_operand(reads + at * (PARTS * BT * BT) + square, BT * BT, PARTS)).to(tl.float64)
    if DELTA:
        Z -= tl.load(p_pair + BT * BT).to(tl.float64) * tl.load(overlaps + at * (BT * BT) + square).to(tl.float64)
    out = tl.zeros([BT], tl.float64)
    start = tl.zeros([BT], tl.float64)
    total = tl.zeros([BT], tl.float64)
    for slab in tl.static_range(SLABS):
        p_slot = by_slot + (at * SLABS + slab) * (3 * BT) + i
        out += tl.load(p_slot).to(tl.float64)
        if DECAY == 1:
            start += tl.load(p_slot + BT).to(tl.float64)
            total += tl.load(p_slot + 2 * BT).to(tl.float64)
    if BETA:
        if FACTORS != "":
            b_dbeta = tl.load(of_record + at * BT + i).to(tl.float64)
        else:
            b_dbeta = tl.sum(Z, 0) + out
            if RECORD:
                b_dbeta += tl.load(of_record + at * BT + i)
        tl.store(
            dbeta + token * dbeta_token + i_head * dbeta_head,
            b_dbeta.to(tl.float32).to(dbeta.dtype.element_ty),
            mask=inside,
        )
    if DECAY == 1:
        b_beta = tl.full([BT], 1.0, tl.float64)
        if FACTORS == "":
            b_beta = tl.load(strengths + at * BT + i).to(tl.float64)
        b_dg = tl.cumsum(start, 0, reverse=True) + total
        b_dg += _shifted(tl.cumsum(out * b_beta, 0) + _between(Z * b_beta[None, :], BT), BT)
        tl.store(dg + token * dg_token + i_head * dg_head, b_dg.to(tl.float32).to(dg.dtype.element_ty), mask=inside)
