"""What the windows of a replay call need besides the state: one program a window and value head.

With S the state before a window, q^ and k^ normalised, q^ scaled, f and e the weights from its start and to its end,

    overlaps[i, j] = k^_i . w(j -> i) k^_j  (j < i)        reads[i, j] = q^_i . w(j -> i) k^_j  (j <= i)
    E = v - S~^T k of every token = Y (V - (f k^) S),      Y = (I + overlaps diag(beta))^-1
    O = (f q^) S + reads (beta E)                          S' = whole S + (e k^)^T (beta E)

so that E = E0 - erase S is all that a walk from window to window solves for (`replay_walk.py`):

    erase = Y (f k^)       E0 = Y V       query = f q^       out = e k^

For the additive rule Y is 1 and there is no erase. Slots without a token get zeros. E0 is laid out `[V, BT]`, as states
are `[V, K]`: a walk's state is the first operand of all its products, and stays where it is.

Without a decay by channel, query and out are rows of q and k times a number each (`weights`), which walks multiply
their results with: so rows of bf16 inputs are operands of one part, and exact.

Under `factors`, what is written is not k (`replay_factors.py`): the written keys stand behind overlaps and reads, which
then have no diagonal if a token reads its own update as it was (`own`), and in out. A walk rounds updates one by one,
so it gets f k^ and V themselves, without Y.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import no_more
from lattn_compile.kernels.common.products import (
    after_sum,
    fixed,
    fixed_product,
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
from lattn_compile.kernels.replay_decay import level, load_rows, norms, power_below
from lattn_compile.kernels.replay_windows import rows

__all__ = ["prepare", "relate", "tiles"]


def tiles(parts: int, rows: bool, backward: bool) -> int:
    """Operand tiles `[BT, BK]` of a window: as `prepare` lays them out."""
    narrow = 1 if rows else parts
    return 2 * parts + 3 * narrow if backward else parts + 2 * narrow


@triton.jit(do_not_specialize=["scale", "first", "H", "HV", "beta_token", "beta_head"])
def relate(
    q, k, g, beta, codes, sizes, owner, step, starts, lengths, leads, system, reads, overlaps, strengths, owns,
    scale, first, q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    FACTORS: tl.constexpr, APART: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """What tokens of a window are to each other, for the windows of ranks `first` on, in slots of their own.

    Args:
        q, k: `[M, H, K]`, g: `[M, HV(, K)]`, beta: `[M, HV]`, any strides. codes, sizes: of `encode`, under FACTORS.
        owner, step, starts, lengths, leads: of `Windows`.
        system: float64 `[S, HV, BT, BT]`, receives Y under SOLVE; of the delta rule. What is off in it, and in A,
            errors that alternate in sign are off by a hundred times (one key repeated, beta 1.9): so A is summed in
            float64, or in fixed point (`fixed`).
        reads: operand `[S, HV, parts, BT, BT]`. overlaps: fp32 `[S, HV, BT, BT]`, of the delta rule.
        strengths: fp32 `[S, HV, BT]`: beta, 0 in slots without a token. owns: likewise, under APART: q^_i . k^_i.
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
    PARTS: tl.constexpr = 1 if PART == "fp32" else 3
    WIDE: tl.constexpr = DELTA and PART == "fp32"
    FIXED: tl.constexpr = DELTA and PART != "fp32"

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

    w_row = (token * H + i_key) * K
    w_size = k_norm
    if FACTORS != "":
        w_size = tl.load(sizes + token * H + i_key, mask=inside, other=0.0)

    # What keys are multiplied with for their norms to be up to 1.
    k_unit = k_norm
    w_unit = w_size
    restore = tl.full([BT], 1.0, tl.float32)
    if FIXED and not NORM:
        k_unit = power_below(norms(k, k_row, inside, k_channel, K, BK, BS, BT))
        w_unit = w_size * k_unit
        restore = 1.0 / k_unit

    P = tl.zeros([BT, BT], tl.float32)
    if WIDE:
        A = (tl.zeros([BT, BT], tl.float64),)
    else:
        A = (P, P, P)
    own = tl.zeros([BT], tl.float32)
    for slab in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, slab, k_channel, K, BS)
        b_q = load_rows(q, q_row, inside, slab, q_channel, K, BS)
        b_w = b_k
        if FACTORS != "":
            b_w = load_rows(codes, w_row, inside, slab, 1, K, BS)
        if APART:
            own += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        if DECAY == 2:
            b_q = b_q.to(tl.float32) * q_norm[:, None]
            b_k = b_k.to(tl.float32) * k_unit[:, None]
            b_w = b_w.to(tl.float32) * w_unit[:, None]
            b_g = held(load_rows(g, g_row, inside, slab, g_channel, K, BS))
            P += tl.where(row == column, tl.sum(b_q * b_w, 1)[:, None], 0.0)
            half = BT // 2
            while half > 0:
                P, A = level(P, A, b_q, b_k, b_w, b_g, half, BT, DELTA, PART, PRECISION, ASSEMBLY, WIDE, FACTORS != "")
                half = half // 2
        else:
            P += product(operand(b_q, PART, ASSEMBLY), flipped(operand(b_w, PART, ASSEMBLY)), PRECISION)
            if WIDE:
                A = (A[0] + tl.dot(b_k.to(tl.float64), tl.trans(b_w.to(tl.float64)), out_dtype=tl.float64),)
            elif FIXED:
                f_w = fixed(b_w.to(tl.float32) * w_unit[:, None], PART, ASSEMBLY)
                f_k = f_w
                if FACTORS != "":
                    f_k = fixed(b_k.to(tl.float32) * k_unit[:, None], PART, ASSEMBLY)
                found = fixed_product(f_k, flipped(f_w))
                A = (A[0] + found[0], A[1] + found[1], A[2] + found[2])
    if DECAY == 2:
        P = P * restore[None, :]
    else:
        P = P * (q_norm[:, None] * w_size[None, :])
    if WIDE:
        A = A[0]
    elif DELTA:
        A = A[0].to(tl.float64) + (A[1].to(tl.float64) + A[2].to(tl.float64))
        A = A * (restore[:, None] * restore[None, :]).to(tl.float64)
    if DECAY != 2:
        if DECAY == 1:
            b_g = held(tl.load(g + g_row, mask=inside, other=0.0))
            decay = gate_exp(segments(b_g, BT, DELTA))
        else:
            decay = tl.where(row >= column, 1.0, 0.0)
        P = P * decay.to(tl.float32)
        if DELTA:
            A = A * decay.to(tl.float64)
            if WIDE:
                A = A * k_norm.to(tl.float64)[:, None] * w_size.to(tl.float64)[None, :]
    if APART:
        tl.store(owns + at * BT + i, own * (q_norm * k_norm))
        P = tl.where(row > column, P, 0.0)
    p_reads = reads + at * (PARTS * BT * BT) + row * BT + column
    store_operand(p_reads, operand(P, PART, ASSEMBLY), BT * BT)
    if DELTA:
        A = tl.where(row > column, A, 0.0)
        tl.store(overlaps + at * (BT * BT) + row * BT + column, A.to(tl.float32))
        if SOLVE:
            inverse(A * b_beta.to(tl.float64)[None, :], system + at * (BT * BT), BT, PART, ASSEMBLY)


@triton.jit(do_not_specialize=["scale", "first", "H", "HV"])
def prepare(
    q, k, v, g, codes, sizes, owner, step, starts, lengths, leads, system, operands, weights, errors, whole,
    scale, first, q_token, q_head, q_channel, k_token, k_head, k_channel, v_token, v_head, v_column,
    g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    FACTORS: tl.constexpr, TILES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What walks multiply with. A launch of its own, lest the shapes of `relate` decide how warps share these products.

    `walk` multiplies with erase and query, whose channels are summed over, and with out, whose tokens are: so that one
    is stored the other way round, `[BK, BT]`, lest every product turns it. `retreat` needs them all as `walk` does not:
    query turned, in the place of query, out as it is and erase turned, behind the others.

    Args:
        q, k, g, codes, sizes, owner to leads, scale, first: as `relate` takes them; v: `[M, HV, V]`. system: as it made
        it.
        operands: `[S, HV, TILES, BT * BK]`; BACK: what `retreat` needs, too. weights: fp32 `[S, HV, 2, BT]`, of rows of
        query and out, without a decay by channel. errors: fp32 `[S, HV, VP, BT]`: E0. whole: fp32 `[S, HV, BK]`.
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
    PARTS: tl.constexpr = 1 if PART == "fp32" else 3
    NARROW: tl.constexpr = PARTS if DECAY == 2 else 1
    TILE: tl.constexpr = BT * BK
    SOLVED: tl.constexpr = DELTA and (FACTORS == "" or BACK)

    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    q_norm = q_norm * scale
    w_row = (token * H + i_key) * K
    w_size = k_norm
    if FACTORS != "":
        w_size = tl.load(sizes + token * H + i_key, mask=inside, other=0.0)
    from_start = tl.full([BT], 1.0, tl.float32)
    to_end = tl.full([BT], 1.0, tl.float32)
    if DECAY == 1:
        b_g = held(tl.load(g + g_row, mask=inside, other=0.0))
        from_start = gate_exp(until_sum(b_g))
        to_end = gate_exp(after_sum(b_g))
    if DECAY != 2:
        p_whole = whole + at * BK + tl.arange(0, BK)
        tl.store(p_whole, tl.zeros([BK], tl.float32) + tl.sum(tl.where(i == BT - 1, from_start, 0.0), 0))
        tl.store(weights + at * (2 * BT) + i, from_start * q_norm)
        tl.store(weights + at * (2 * BT) + BT + i, to_end * w_size)
    if SOLVED:
        # With more bits than fp32 has: what it is multiplied with is summed with signs that alternate.
        Y = tl.load(system + at * (BT * BT) + row * BT + column)
        o_Y = operand(Y, PART, ASSEMBLY)
        if DECAY != 2:
            # Rows of bf16 inputs stay operands of one part: their norms and decays are the other operand's.
            o_erase = operand(Y * (from_start * k_norm).to(tl.float64)[None, :], PART, ASSEMBLY)

    for slab in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, slab, k_channel, K, BS)
        b_q = load_rows(q, q_row, inside, slab, q_channel, K, BS)
        b_w = b_k
        if FACTORS != "":
            b_w = load_rows(codes, w_row, inside, slab, 1, K, BS)
        channel = slab + tl.arange(0, BS)
        p_rows = operands + at * (TILES * TILE) + row * BK + channel[None, :]
        p_turned = operands + at * (TILES * TILE) + column + channel[:, None] * BT
        if DECAY == 2:
            b_g = held(load_rows(g, g_row, inside, slab, g_channel, K, BS))
            exponent = summed((column <= row).to(tl.float32), b_g, PART, PRECISION, ASSEMBLY, False)
            weight = gate_exp(no_more(exponent, 0.0))
            tl.store(whole + at * BK + channel, tl.sum(tl.where(row == BT - 1, weight, 0.0), 0))
            b_q = b_q.to(tl.float32) * q_norm[:, None] * weight
            b_k = b_k.to(tl.float32) * k_norm[:, None]
            b_w = b_w.to(tl.float32) * w_size[:, None]
            o_raw = operand(b_k * weight, PART, ASSEMBLY)
            if SOLVED:
                erase = product(o_Y, o_raw, PRECISION)
            exponent = summed((column > row).to(tl.float32), b_g, PART, PRECISION, ASSEMBLY, False)
            b_w = b_w * gate_exp(no_more(exponent, 0.0))
        else:
            if SOLVED:
                erase = product(o_erase, operand(b_k, PART, ASSEMBLY), PRECISION)
            if FACTORS != "":
                o_raw = operand(b_k.to(tl.float32) * (from_start * k_norm)[:, None], PART, ASSEMBLY)
        o_query = operand(b_q, PART, ASSEMBLY)
        o_out = operand(b_w, PART, ASSEMBLY)
        if DELTA:
            if FACTORS != "":
                store_operand(p_rows, o_raw, TILE)
            if SOLVED:
                o_part = operand(erase, PART, ASSEMBLY)
                if FACTORS == "":
                    store_operand(p_rows, o_part, TILE)
                if BACK:
                    store_operand(p_turned + (PARTS + 3 * NARROW) * TILE, flipped(o_part), TILE)
        store_operand(p_turned + (PARTS + NARROW) * TILE, flipped(o_out), TILE)
        if BACK:
            store_operand(p_turned + PARTS * TILE, flipped(o_query), TILE)
            store_operand(p_rows + (PARTS + 2 * NARROW) * TILE, o_out, TILE)
        else:
            store_operand(p_rows + PARTS * TILE, o_query, TILE)

    v_row = token * v_token + i_head * v_head
    for part in range(0, VP, BV):
        E = load_rows(v, v_row, inside, part, v_column, V, BV)
        if DELTA and FACTORS == "":
            E = product(o_Y, operand(E, PART, ASSEMBLY), PRECISION)
        place = errors + at * (VP * BT) + (part + tl.arange(0, BV))[:, None] * BT + i[None, :]
        tl.store(place, tl.trans(E.to(tl.float32)))
