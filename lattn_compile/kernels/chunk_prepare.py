"""What the blocks of a chunk-form call need besides the state: one program a block and value head.

In the notation of `reference/chunk.py`, with X = (I + beta overlaps)^-1 beta and all of one block of BT slots,

    U = X (V - k_in S)      O = q_in S + reads U      S' = whole S + k_out^T U

is linear in the state before the block:

    U = U0 - W S            W  = X k_in               U0 = X V
    O = O0 + Q S            Q  = q_in - reads W       O0 = reads U0

so that two products are all that stands between a state and the next. These five and k_out are made here, whole too.
For the additive rule X is beta, W nothing and Q q_in. Slots without a token get zeros.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import (
    after_sum,
    flipped,
    gate_exp,
    held,
    inverse,
    operand,
    product,
    segments,
    split_sum,
    store_operand,
)
from lattn_compile.kernels.common.inputs import rstd

__all__ = [
    "ERASE",
    "OUT",
    "QUERY",
    "block_tokens",
    "halves",
    "load_rows",
    "norms",
    "prepare_channel",
    "prepare_head",
    "summed",
]

ERASE = tl.constexpr(0)
QUERY = tl.constexpr(1)
OUT = tl.constexpr(2)
"""Places of W, Q and k_out among a block's operands."""


@triton.jit
def block_tokens(
    owner, index, starts, lengths, offsets, block, skip,
    GRID: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Tokens of a block's slots, int64 `[BT]`, and which slots have one."""
    i_seq = tl.load(owner + block)
    lead = tl.load(offsets + i_seq) % CHUNK if GRID else 0
    base, low, high, _ = extent(tl.load(index + block) + skip, lead, tl.load(lengths + i_seq), CHUNK, TOKENS, PER)
    slot = tl.arange(0, BT)
    return tl.load(starts + i_seq) + base + slot, (slot >= low) & (slot < high)


@triton.jit
def load_rows(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Channels `first` to `first + WIDTH` of rows at `p + row`, `[BT, WIDTH]`, as they are; SIZE: all channels."""
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None] & (channel < SIZE)[None, :]
    return tl.load(p + row[:, None] + channel[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def norms(x, row, inside, stride, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr):
    """Reciprocal norms of rows at `x + row`, `[BT]`."""
    total = tl.zeros([BT], tl.float32)
    for first in range(0, BK, BS):
        b_x = load_rows(x, row, inside, first, stride, K, BS).to(tl.float32)
        total += tl.sum(b_x * b_x, 1)
    return rstd(total)


@triton.jit
def _store_values(
    v, row, inside, stride, o_X, o_reads_X, b_beta, o_reads, updates, outputs, at,
    V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U0 and O0, VP columns in all."""
    for first in range(0, VP, BS):
        b_v = load_rows(v, row, inside, first, stride, V, BS)
        place = at * (BT * VP) + tl.arange(0, BT)[:, None] * VP + (first + tl.arange(0, BS))[None, :]
        if DELTA:
            o_v = operand(b_v, LOW)
            tl.store(updates + place, product(o_X, o_v, PRECISION))
            tl.store(outputs + place, product(o_reads_X, o_v, PRECISION))
        else:
            U = b_v.to(tl.float32) * b_beta[:, None]
            tl.store(updates + place, U)
            tl.store(outputs + place, product(o_reads, operand(U, LOW), PRECISION))


@triton.jit(do_not_specialize=["scale", "skip"])
def prepare_head(
    q, k, v, g, beta, starts, lengths, offsets, owner, index, system, operands, updates, outputs, whole, solved, reads,
    scale, skip, q_token, q_head, q_channel, k_token, k_head, k_channel, v_token, v_head, v_column, g_token, g_head,
    beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, GRID: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Decay by head, or none.

    Args:
        q, k: `[M, H, K]`, v: `[M, HV, V]`, g, beta: `[M, HV]`, any strides.
        system: scratch `[NB, HV, BT, BT]`, fp32, or float64 where inputs are fp32; of the delta rule.
        operands: `[NB, HV, 3, parts, BT, BK]`: W, Q, k_out. updates, outputs: fp32 `[NB, HV, BT, VP]`: U0, O0.
        whole: fp32 `[NB, HV, BK]`.
        solved, reads: under KEEP, fp32 `[NB, HV, BT, BT]`: X, its beta left out, and reads.
        skip: blocks of each sequence before the first that is scheduled. BS: channels at a time.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = block.to(tl.int64) * HV + i_head
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, GRID, BT, CHUNK, TOKENS, PER)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]

    WIDE: tl.constexpr = DELTA and not LOW
    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    q_norm = q_norm * scale
    P = tl.zeros([BT, BT], tl.float32)
    A = tl.zeros([BT, BT], tl.float64 if WIDE else tl.float32)
    for first in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, first, k_channel, K, BS)
        b_q = load_rows(q, q_row, inside, first, q_channel, K, BS)
        o_k = flipped(operand(b_k, LOW))
        P += product(operand(b_q, LOW), o_k, PRECISION)
        if WIDE:
            A += tl.dot(b_k.to(tl.float64), tl.trans(b_k.to(tl.float64)), out_dtype=tl.float64)
        elif DELTA:
            A += product(operand(b_k, LOW), o_k, PRECISION)
    b_beta = inside.to(tl.float32)
    if BETA:
        b_beta = tl.load(beta + token * beta_token + i_head * beta_head, mask=inside, other=0.0).to(tl.float32)
    from_start = tl.full([BT], 1.0, tl.float32)
    to_end = tl.full([BT], 1.0, tl.float32)
    if DECAY:
        b_g = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
        coarse, fine = split_sum(b_g, False)
        from_start = gate_exp(tl.minimum(coarse + fine, 0.0), LOW)
        to_end = gate_exp(tl.minimum(after_sum(b_g), 0.0), LOW)
        decay = gate_exp(segments(b_g, BT, WIDE), LOW)
    else:
        decay = tl.where(row >= column, 1.0, 0.0)
    p_whole = whole + at * BK + tl.arange(0, BK)
    tl.store(p_whole, tl.zeros([BK], tl.float32) + tl.sum(tl.where(i == BT - 1, from_start, 0.0), 0))
    P = P * decay.to(tl.float32) * (q_norm[:, None] * k_norm[None, :])
    if KEEP:
        tl.store(reads + at * (BT * BT) + row * BT + column, P)
    o_P = operand(P, LOW)
    o_X, o_reads_X, o_erase, o_reads_erase = o_P, o_P, o_P, o_P
    if DELTA:
        A = A * decay.to(A.dtype) * (b_beta * k_norm).to(A.dtype)[:, None] * k_norm.to(A.dtype)[None, :]
        X = inverse(tl.where(row > column, A, 0.0), system + at * (BT * BT), BT).to(tl.float32)
        if KEEP:
            tl.store(solved + at * (BT * BT) + row * BT + column, X)
        X = X * b_beta[None, :]
        reads_X = product(o_P, operand(X, LOW), PRECISION)
        o_X, o_reads_X = operand(X, LOW), operand(reads_X, LOW)
        into = (from_start * k_norm)[None, :]
        o_erase, o_reads_erase = operand(X * into, LOW), operand(reads_X * into, LOW)

    PARTS: tl.constexpr = 2 if LOW else 1
    for first in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, first, k_channel, K, BS)
        Q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * (from_start * q_norm)[:, None]
        p_out = operands + at * (3 * PARTS * BT * BK) + row * BK + (first + tl.arange(0, BS))[None, :]
        if DELTA:
            o_k = operand(b_k, LOW)
            Q -= product(o_reads_erase, o_k, PRECISION)
            store_operand(p_out + ERASE * (PARTS * BT * BK), product(o_erase, o_k, PRECISION), BT * BK, LOW)
        store_operand(p_out + QUERY * (PARTS * BT * BK), Q, BT * BK, LOW)
        out = b_k.to(tl.float32) * (to_end * k_norm)[:, None]
        store_operand(p_out + OUT * (PARTS * BT * BK), out, BT * BK, LOW)
    v_row = token * v_token + i_head * v_head
    _store_values(
        v, v_row, inside, v_column, o_X, o_reads_X, b_beta, o_P, updates, outputs, at,
        V, VP, BT, BS, DELTA, LOW, PRECISION,
    )  # fmt: skip


@triton.jit
def halves(half, BT: tl.constexpr):
    """0-1 matrix `[BT, BT]`, fp32: the gates between a token and the middle of its 2 `half` tokens."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    later = i // half % 2 == 1
    return ((i // half == j // half) & (later == (j <= i))).to(tl.float32)


@triton.jit
def summed(which, g, PRECISION: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr):
    """`which @ g`: sums of gates `[BT, channels]`, each of its own segment; float64 if WIDE.

    On tensor cores with 16 bits of each gate: off by x 2^-17 at most, and `exp` of it by 2^-18, for `x exp(x) < 1 / 2`.
    """
    if WIDE:
        return tl.dot(which.to(tl.float64), g.to(tl.float64), out_dtype=tl.float64)
    elif LOW:
        return tl.minimum(product((which.to(tl.bfloat16),), operand(g, LOW), PRECISION), 0.0)
    else:
        return tl.minimum(product((which,), (g,), PRECISION), 0.0)


@triton.jit
def _level(
    P, A, q, k, g, half, BT: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to `P` and `A` the pairs that the middle of 2 `half` tokens parts; q, k, g: some channels `[BT, ..]`."""
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    weight = gate_exp(summed(halves(half, BT), g, PRECISION, LOW, WIDE), LOW)
    parted = (row // half == column // half + 1) & (row // half % 2 == 1)
    weighted = k.to(weight.dtype) * weight
    o_k = operand(weighted, LOW)
    o_early = flipped(o_k)
    P += tl.where(parted, product(operand(q * weight.to(tl.float32), LOW), o_early, PRECISION), 0.0)
    if WIDE:
        A += tl.where(parted, tl.dot(weighted, tl.trans(weighted), out_dtype=tl.float64), 0.0)
    elif DELTA:
        A += tl.where(parted, product(o_k, o_early, PRECISION), 0.0)
    return P, A


@triton.jit(do_not_specialize=["scale", "skip"])
def prepare_channel(
    q, k, v, g, beta, starts, lengths, offsets, owner, index, system, operands, updates, outputs, whole, solved, reads,
    scale, skip, q_token, q_head, q_channel, k_token, k_head, k_channel, v_token, v_head, v_column, g_token, g_head,
    g_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, GRID: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Decay by channel, g `[M, HV, K]`. Other arguments and the grid as in `prepare_head`.

    As `reference/decay.py` does: a weight inside the contraction factors at any token between the two, so the block is
    halved again and again, and every pair of tokens is part of a product at the level that parts it.
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = block.to(tl.int64) * HV + i_head
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, GRID, BT, CHUNK, TOKENS, PER)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    g_row = token * g_token + i_head * g_head
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]

    WIDE: tl.constexpr = DELTA and not LOW
    k_norm = tl.full([BT], 1.0, tl.float32)
    q_norm = tl.full([BT], 1.0, tl.float32)
    if NORM:
        k_norm = norms(k, k_row, inside, k_channel, K, BK, BS, BT)
        q_norm = norms(q, q_row, inside, q_channel, K, BK, BS, BT)
    q_norm = q_norm * scale
    b_beta = inside.to(tl.float32)
    if BETA:
        b_beta = tl.load(beta + token * beta_token + i_head * beta_head, mask=inside, other=0.0).to(tl.float32)

    P = tl.zeros([BT, BT], tl.float32)
    A = tl.zeros([BT, BT], tl.float64 if WIDE else tl.float32)
    for first in range(0, BK, BS):
        b_q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_norm[:, None]
        b_k = load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_norm[:, None]
        b_g = held(load_rows(g, g_row, inside, first, g_channel, K, BS))
        P += tl.where(row == column, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        half = BT // 2
        while half > 0:
            P, A = _level(P, A, b_q, b_k, b_g, half, BT, DELTA, LOW, WIDE, PRECISION)
            half = half // 2
    if KEEP:
        tl.store(reads + at * (BT * BT) + row * BT + column, P)
    o_P = operand(P, LOW)
    o_X, o_reads_X = o_P, o_P
    if DELTA:
        X = inverse(A * b_beta.to(A.dtype)[:, None], system + at * (BT * BT), BT).to(tl.float32)
        if KEEP:
            tl.store(solved + at * (BT * BT) + row * BT + column, X)
        X = X * b_beta[None, :]
        o_X = operand(X, LOW)
        o_reads_X = operand(product(o_P, o_X, PRECISION), LOW)

    PARTS: tl.constexpr = 2 if LOW else 1
    for first in range(0, BK, BS):
        b_k = load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_norm[:, None]
        b_g = held(load_rows(g, g_row, inside, first, g_channel, K, BS))
        weight = gate_exp(summed((column <= row).to(tl.float32), b_g, PRECISION, LOW, False), LOW)
        Q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_norm[:, None] * weight
        p_out = operands + at * (3 * PARTS * BT * BK) + row * BK + (first + tl.arange(0, BS))[None, :]
        tl.store(whole + at * BK + first + tl.arange(0, BS), tl.sum(tl.where(row == BT - 1, weight, 0.0), 0))
        if DELTA:
            o_k = operand(b_k * weight, LOW)
            Q -= product(o_reads_X, o_k, PRECISION)
            store_operand(p_out + ERASE * (PARTS * BT * BK), product(o_X, o_k, PRECISION), BT * BK, LOW)
        store_operand(p_out + QUERY * (PARTS * BT * BK), Q, BT * BK, LOW)
        weight = gate_exp(summed((column > row).to(tl.float32), b_g, PRECISION, LOW, False), LOW)
        store_operand(p_out + OUT * (PARTS * BT * BK), b_k * weight, BT * BK, LOW)
    v_row = token * v_token + i_head * v_head
    _store_values(
        v, v_row, inside, v_column, o_X, o_reads_X, b_beta, o_P, updates, outputs, at,
        V, VP, BT, BS, DELTA, LOW, PRECISION,
    )  # fmt: skip
