"""What the windows of a replay call need besides the state: one program a window and value head.

With S the state before a window, q^ and k^ normalised, q^ scaled, f and e the weights from its start and to its end,

    overlaps[i, j] = k^_i . w(j -> i) k^_j  (j < i)        reads[i, j] = q^_i . w(j -> i) k^_j  (j <= i)
    E = v - S~^T k of every token = Y (V - (f k^) S),      Y = (I + overlaps diag(beta))^-1
    O = (f q^) S + reads (beta E)                          S' = whole S + (e k^)^T (beta E)

so that E = E0 - erase S is all that a walk from window to window solves for (`replay_walk.py`):

    erase = Y (f k^)       E0 = Y V       query = f q^       out = e k^

For the additive rule Y is 1 and there is no erase. Slots without a token get zeros. E0 is laid out `[V, BT]`, as states
are `[V, K]`: a walk's state is the first operand of all its products, and stays where it is.
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
    held,
    inverse,
    operand,
    product,
    segments,
    store_operand,
    summed,
    until_sum,
)
from lattn_compile.kernels.replay_decay import level, load_rows, norms
from lattn_compile.kernels.replay_windows import rows

__all__ = ["AGAIN", "BACKWARD", "ERASE", "FORWARD", "OUT", "QUERY", "prepare", "relate"]

ERASE = tl.constexpr(0)
QUERY = tl.constexpr(1)
OUT = tl.constexpr(2)
AGAIN = tl.constexpr(3)
FORWARD = 3
BACKWARD = 5
"""Places among a window's operands, and how many there are. `walk` multiplies with erase and query, whose channels are
summed over, and with out, whose tokens are: so the latter is stored the other way round, `[BK, BT]`, lest every product
turns it. `retreat` needs them all as `walk` does not: AGAIN is out as it is, behind it erase turned, and at QUERY is
query turned."""


@triton.jit(do_not_specialize=["scale", "first", "H", "HV", "beta_token", "beta_head"])
def relate(
    q, k, g, beta, owner, step, starts, lengths, leads, system, reads, overlaps, strengths,
    scale, first, q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """What tokens of a window are to each other, for the windows of ranks `first` on, in slots of their own.

    Args:
        q, k: `[M, H, K]`, g: `[M, HV(, K)]`, beta: `[M, HV]`, any strides.
        owner, step, starts, lengths, leads: of `Windows`.
        system: `[S, HV, BT, BT]`, receives Y; float64 where operands are fp32, else fp32; of the delta rule.
        reads: operand `[S, HV, parts, BT, BT]`. overlaps: fp32 `[S, HV, BT, BT]`, of the delta rule.
        strengths: fp32 `[S, HV, BT]`: beta, 0 in slots without a token.
        DECAY: 0 none, 1 by head, 2 by channel. BS: channels at a time.

    Grid: (S * HV,).
    """
    pid = tl.program_id(0)
    slot, i_head = pid // HV, pid % HV
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    g_row = token * g_token + i_head * g_head
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]
    PARTS: tl.constexpr = 1 if PART == "fp32" else 2
    WIDE: tl.constexpr = DELTA and PART == "fp32"

    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    q_norm = q_norm * scale
    b_beta = inside.to(tl.float32)
    if BETA:
        b_beta = tl.load(beta + token * beta_token + i_head * beta_head, mask=inside, other=0.0).to(tl.float32)
    tl.store(strengths + at * BT + i, b_beta)

    P = tl.zeros([BT, BT], tl.float32)
    A = tl.zeros([BT, BT], tl.float64 if WIDE else tl.float32)
    for slab in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, slab, k_channel, K, BS)
        b_q = load_rows(q, q_row, inside, slab, q_channel, K, BS)
        if DECAY == 2:
            b_q = b_q.to(tl.float32) * q_norm[:, None]
            b_k = b_k.to(tl.float32) * k_norm[:, None]
            b_g = held(load_rows(g, g_row, inside, slab, g_channel, K, BS))
            P += tl.where(row == column, tl.sum(b_q * b_k, 1)[:, None], 0.0)
            half = BT // 2
            while half > 0:
                P, A = level(P, A, b_q, b_k, b_g, half, BT, DELTA, PART, PRECISION, ASSEMBLY, WIDE)
                half = half // 2
        else:
            o_k = flipped(operand(b_k, PART, ASSEMBLY))
            P += product(operand(b_q, PART, ASSEMBLY), o_k, PRECISION)
            if WIDE:
                A += tl.dot(b_k.to(tl.float64), tl.trans(b_k.to(tl.float64)), out_dtype=tl.float64)
            elif DELTA:
                A += product(operand(b_k, PART, ASSEMBLY), o_k, PRECISION)
    if DECAY != 2:
        if DECAY == 1:
            b_g = held(tl.load(g + g_row, mask=inside, other=0.0))
            decay = gate_exp(segments(b_g, BT, WIDE), PART)
        else:
            decay = tl.where(row >= column, 1.0, 0.0)
        P = P * decay.to(tl.float32) * (q_norm[:, None] * k_norm[None, :])
        A = A * decay.to(A.dtype) * k_norm.to(A.dtype)[:, None] * k_norm.to(A.dtype)[None, :]
    p_reads = reads + at * (PARTS * BT * BT) + row * BT + column
    store_operand(p_reads, operand(P, PART, ASSEMBLY), BT * BT)
    if DELTA:
        A = tl.where(row > column, A, 0.0)
        tl.store(overlaps + at * (BT * BT) + row * BT + column, A.to(tl.float32))
        inverse(A * b_beta.to(A.dtype)[None, :], system + at * (BT * BT), BT, PART, ASSEMBLY)


@triton.jit(do_not_specialize=["scale", "first", "H", "HV"])
def prepare(
    q, k, v, g, owner, step, starts, lengths, leads, system, operands, errors, whole,
    scale, first, q_token, q_head, q_channel, k_token, k_head, k_channel, v_token, v_head, v_column,
    g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    PLACES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What walks multiply with. A launch of its own, lest the shapes of `relate` decide how warps share these products.

    Args:
        q, k, g, owner to leads, scale, first: as `relate` takes them; v: `[M, HV, V]`. system: as it made it.
        operands: `[S, HV, PLACES, parts, BT * BK]`; BACK: what `retreat` needs, too. errors: fp32 `[S, HV, VP, BT]`:
        E0. whole: fp32 `[S, HV, BK]`.
        BS: channels, BV: value columns at a time.

    Grid: (S * HV,).
    """
    pid = tl.program_id(0)
    slot, i_head = pid // HV, pid % HV
    rank = first + slot
    if tl.load(owner + rank) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    token, inside = rows(owner, step, starts, lengths, leads, rank, W, BT)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    g_row = token * g_token + i_head * g_head
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]
    PARTS: tl.constexpr = 1 if PART == "fp32" else 2

    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    q_norm = q_norm * scale
    from_start = tl.full([BT], 1.0, tl.float32)
    to_end = tl.full([BT], 1.0, tl.float32)
    if DECAY == 1:
        b_g = held(tl.load(g + g_row, mask=inside, other=0.0))
        from_start = gate_exp(until_sum(b_g), PART)
        to_end = gate_exp(after_sum(b_g), PART)
    if DECAY != 2:
        p_whole = whole + at * BK + tl.arange(0, BK)
        tl.store(p_whole, tl.zeros([BK], tl.float32) + tl.sum(tl.where(i == BT - 1, from_start, 0.0), 0))
    if DELTA:
        Y = tl.load(system + at * (BT * BT) + row * BT + column).to(tl.float32)
        o_Y = operand(Y, PART, ASSEMBLY)
        if DECAY != 2:
            # What came in parts of 16 bits keeps them: its norm and decay are the other operand's.
            o_erase = operand(Y * (from_start * k_norm)[None, :], PART, ASSEMBLY)

    for slab in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, slab, k_channel, K, BS)
        b_q = load_rows(q, q_row, inside, slab, q_channel, K, BS).to(tl.float32)
        channel = slab + tl.arange(0, BS)
        p_out = operands + at * (PLACES * PARTS * BT * BK) + row * BK + channel[None, :]
        p_turned = operands + at * (PLACES * PARTS * BT * BK) + column + channel[:, None] * BT
        if DECAY == 2:
            b_g = held(load_rows(g, g_row, inside, slab, g_channel, K, BS))
            exponent = summed((column <= row).to(tl.float32), b_g, PART, PRECISION, ASSEMBLY, False)
            weight = gate_exp(no_more(exponent, 0.0), PART)
            tl.store(whole + at * BK + channel, tl.sum(tl.where(row == BT - 1, weight, 0.0), 0))
            b_q = b_q * q_norm[:, None] * weight
            b_k = b_k.to(tl.float32) * k_norm[:, None]
            if DELTA:
                erase = product(o_Y, operand(b_k * weight, PART, ASSEMBLY), PRECISION)
            exponent = summed((column > row).to(tl.float32), b_g, PART, PRECISION, ASSEMBLY, False)
            out = b_k * gate_exp(no_more(exponent, 0.0), PART)
        else:
            b_q = b_q * (from_start * q_norm)[:, None]
            if DELTA:
                erase = product(o_erase, operand(b_k, PART, ASSEMBLY), PRECISION)
            out = b_k.to(tl.float32) * (to_end * k_norm)[:, None]
        o_query = operand(b_q, PART, ASSEMBLY)
        o_out = operand(out, PART, ASSEMBLY)
        if DELTA:
            o_part = operand(erase, PART, ASSEMBLY)
            store_operand(p_out + ERASE * (PARTS * BT * BK), o_part, BT * BK)
            if BACK:
                store_operand(p_turned + (AGAIN + 1) * (PARTS * BT * BK), flipped(o_part), BT * BK)
        store_operand(p_turned + OUT * (PARTS * BT * BK), flipped(o_out), BT * BK)
        if BACK:
            store_operand(p_turned + QUERY * (PARTS * BT * BK), flipped(o_query), BT * BK)
            store_operand(p_out + AGAIN * (PARTS * BT * BK), o_out, BT * BK)
        else:
            store_operand(p_out + QUERY * (PARTS * BT * BK), o_query, BT * BK)

    v_row = token * v_token + i_head * v_head
    for part in range(0, VP, BV):
        E = load_rows(v, v_row, inside, part, v_column, V, BV)
        if DELTA:
            E = product(o_Y, operand(E, PART, ASSEMBLY), PRECISION)
        place = errors + at * (VP * BT) + (part + tl.arange(0, BV))[:, None] * BT + i[None, :]
        tl.store(place, tl.trans(E.to(tl.float32)))
