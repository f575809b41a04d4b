"""What the blocks of a chunk-form call need besides the state.

In the notation of `reference/chunk.py`, with X = (I + beta overlaps)^-1 beta and all of one block of BT slots,

    U = X (V - k_in S)      O = q_in S + reads U      S' = whole S + k_out^T U

is linear in the state before the block:

    U = U0 - W S            W  = X k_in               U0 = X V
    O = O0 + Q S            Q  = q_in - reads W       O0 = reads U0

so that two products are all that stands between a state and the next; the same W, Q and k_out take the state's gradient
back (`chunk_backward.py`). For the additive rule X is beta, W nothing and Q q_in. Slots without a token get zeros. A
program makes BS columns of a block's W, Q and k_out, or of its U0 and O0.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    channel_weight,
    held,
    load_beta,
    load_reads,
    load_rows,
    load_solved,
    operand,
    product,
    row_weights,
    solved_product,
    store_operand,
)

__all__ = ["ERASE", "OUT", "QUERY", "key_operands", "value_operands"]

ERASE = tl.constexpr(0)
QUERY = tl.constexpr(1)
OUT = tl.constexpr(2)
"""Places of W, Q and k_out among a block's operands."""


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def key_operands(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, reads, solved, operands, whole, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, g: `[M, HV]` or `[M, HV, K]` as DECAY says, beta: `[M, HV]`.
        norms, reads: of `pairs_head`. solved: of `solve`.
        operands: `[NB, HV, 3, 3, BT, BK]`: W, Q, k_out, in three parts. whole: fp32 `[NB, HV, BK]`.

    Grid: (NB * HV * BK / BS,).
    """
    SLICES: tl.constexpr = BK // BS
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    slot = tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot
    k_norm, q_norm = tl.load(p_norm), tl.load(p_norm + BT)
    channel = first + tl.arange(0, BS)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, first, k_channel, K, BS)
    Q = load_rows(q, token * q_token + i_key * q_head, inside, first, q_channel, K, BS).to(tl.float32)
    from_start, to_end = row_weights(g, token, inside, g_token, i_head, g_head, BT, DECAY, False)
    p_whole = whole + at * BK + channel
    if DECAY == 2:
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
        weight = channel_weight(b_g, BT, False, False)
        tl.store(p_whole, tl.sum(tl.where((slot == BT - 1)[:, None], weight, 0.0), 0))
        Q = Q * weight * q_norm[:, None]
        k_in = b_k.to(tl.float32) * weight
        out = b_k.to(tl.float32) * channel_weight(b_g, BT, True, False) * k_norm[:, None]
    else:
        tl.store(p_whole, tl.zeros([BS], tl.float32) + tl.sum(tl.where(slot == BT - 1, from_start, 0.0), 0))
        Q = Q * (q_norm * from_start)[:, None]
        k_in = b_k
        out = b_k.to(tl.float32) * (k_norm * to_end)[:, None]
    p_out = operands + at * (9 * BT * BK) + slot[:, None] * BK + channel[None, :]
    store_operand(p_out + OUT * (3 * BT * BK), out, BT * BK)
    if DELTA:
        strength = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA) * k_norm * from_start
        X = load_solved(solved, at, BT, False)
        W = solved_product(X * strength.to(X.dtype)[None, :], k_in)
        Q -= product(load_reads(reads, at, BT, False), operand(W, False))
        store_operand(p_out + ERASE * (3 * BT * BK), W, BT * BK)
    store_operand(p_out + QUERY * (3 * BT * BK), Q, BT * BK)


@triton.jit(do_not_specialize=["skip", "HV"])
def value_operands(
    v, beta, starts, lengths, offsets, owner, index, reads, solved, updates, outputs, skip,
    v_token, v_head, v_column, beta_token, beta_head, HV,
    V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, READ: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        v: `[M, HV, V]`. reads, solved: as in `key_operands`.
        updates, outputs: fp32 `[NB, HV, BT, VP]`: U0, and O0 under READ.

    Grid: (NB * HV * VP / BS,).
    """
    SLICES: tl.constexpr = VP // BS
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    slot = tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    b_v = load_rows(v, token * v_token + i_head * v_head, inside, first, v_column, V, BS)
    b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
    if DELTA:
        X = load_solved(solved, at, BT, False)
        X = X * b_beta.to(X.dtype)[None, :]
        U = solved_product(X, b_v)
    else:
        U = b_v.to(tl.float32) * b_beta[:, None]
    place = at * (BT * VP) + slot[:, None] * VP + (first + tl.arange(0, BS))[None, :]
    tl.store(updates + place, U)
    if READ:
        tl.store(outputs + place, product(load_reads(reads, at, BT, False), operand(U, False)))
