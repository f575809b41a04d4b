"""Rows of keys and queries as the products of the forward take them, where inputs are bf16.

A product of the forward has fp16 operands. bf16's eight bits fit into fp16's eleven, and a power of two for each row
brings them into its range: keys and queries stay exact. Everything that is no power of two, and beta, norms and decays
by head, are factors of a row outside of the products, `FACTORS`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    common_power,
    fine_parts,
    fine_weight,
    half,
    held,
    load_beta,
    load_rows,
    power_of_two,
    row_weights,
)
from lattn_compile.kernels.common.inputs import rstd

__all__ = [
    "BETA_ROW",
    "END_ROW",
    "ERASE_ROW",
    "FACTORS",
    "GATE_ROW",
    "KEY_ROW",
    "LIFT_ROW",
    "MOST_ROW",
    "QUERY_ROW",
    "START_ROW",
    "WHOLE_ROW",
    "channel_rows",
    "exact_norm",
    "head_rows",
    "row_norms",
]

FACTORS = 10
"""Rows of a block's and value head's `factors`, fp32 `[NB, HV, FACTORS, BT]`, one number a slot:"""

BETA_ROW = tl.constexpr(0)  # beta
ERASE_ROW = tl.constexpr(1)  # of what a token's key reads from the state before the block
START_ROW = tl.constexpr(2)  # a decay by head from the block's start to the token, else 1
END_ROW = tl.constexpr(3)  # from behind the token to the block's end, else 1
KEY_ROW = tl.constexpr(4)  # of a key where it writes, at most 1 after division by MOST
QUERY_ROW = tl.constexpr(5)
WHOLE_ROW = tl.constexpr(6)  # a decay by head over the block, the same in every slot
MOST_ROW = tl.constexpr(7)  # a power of two, the same in every slot
GATE_ROW = tl.constexpr(8)  # the gate by head itself, above -256
LIFT_ROW = tl.constexpr(9)  # a power of two: rows of the inverse are stored without it


@triton.jit
def row_norms(most_k, most_q, total_k, total_q, scale, NORM: tl.constexpr):
    """Of rows of keys and of queries, from their largest magnitudes and sums of squares: what each is multiplied with
    to come into fp16's range, and what is left to multiply the product with.

    Returns:
        (k_down, k_norm, q_down, q_norm).
    """
    k_up, k_down = power_of_two(most_k)
    q_up, q_down = power_of_two(most_q)
    k_norm, q_norm = k_up, q_up * scale
    if NORM:
        k_norm, q_norm = k_up * rstd(total_k), q_up * (rstd(total_q) * scale)
    return k_down, k_norm, q_down, q_norm


@triton.jit
def exact_norm(k, k_down, NORM: tl.constexpr):
    """`k_norm` of `row_norms` in float64, of rows `k`, which bf16 holds.

    The delta rule's matrix wants it: an error of a norm is one of beta, which a repeated key amplifies.
    """
    up = 1.0 / k_down.to(tl.float64)
    if NORM:
        wide = k.to(tl.float64)
        return up / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    else:
        return up


@triton.jit
def _store_factors(
    p, slot, strength, erase, from_start, to_end, key, query, gates, BT: tl.constexpr, DECAY: tl.constexpr
):
    most, down = common_power(tl.max(key, 0))
    tl.store(p + BETA_ROW * BT + slot, strength)
    tl.store(p + ERASE_ROW * BT + slot, erase)
    tl.store(p + START_ROW * BT + slot, from_start)
    tl.store(p + END_ROW * BT + slot, to_end)
    tl.store(p + KEY_ROW * BT + slot, key * down)
    tl.store(p + QUERY_ROW * BT + slot, query)
    whole = tl.zeros([BT], tl.float32) + tl.sum(tl.where(slot == BT - 1, from_start, 0.0), 0)
    tl.store(p + WHOLE_ROW * BT + slot, whole)
    tl.store(p + MOST_ROW * BT + slot, tl.zeros([BT], tl.float32) + most)
    if DECAY == 1:
        tl.store(p + GATE_ROW * BT + slot, gates)


@triton.jit
def _store_parts(p, parts, NEXT: tl.constexpr, FLIP: tl.constexpr):
    for i in tl.static_range(len(parts)):
        tl.store(p + i * NEXT, tl.trans(parts[i]) if FLIP else parts[i])


@triton.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def head_rows(
    q, k, g, beta, starts, lengths, offsets, owner, index, rows, factors, exact, norms, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    BACK: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Of a decay by head, or none.

    Args:
        q, k: `[M, H, K]`, bf16, g, beta: `[M, HV]`, any strides.
        rows: fp16 `[NB, H, 3, BT * BK]`: keys `[BT, BK]`, their transpose, and queries, under TURN transposed too;
            zeros without a token. Under WIDE `[NB, H, 2, BT * BK]`, keys and queries as they are.
        factors: `FACTORS`, but LIFT. exact: float64 `[NB, H, BT]`, of `exact_norm`.
        norms: under BACK, fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, (pid % H).to(tl.int64)
    if tl.load(owner + block) < 0:
        return
    slot, channel = tl.arange(0, BT), tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK).to(tl.float32)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK).to(tl.float32)
    k_down, k_norm, q_down, q_norm = row_norms(
        tl.max(tl.abs(b_k), 1), tl.max(tl.abs(b_q), 1), tl.sum(b_k * b_k, 1), tl.sum(b_q * b_q, 1), scale, NORM
    )
    tl.store(exact + pid.to(tl.int64) * BT + slot, exact_norm(b_k, k_down, NORM))
    keys = half(b_k * k_down[:, None])
    ROWS: tl.constexpr = 2 if WIDE else 3
    p_rows = rows + pid.to(tl.int64) * (ROWS * BT * BK)
    place = slot[:, None] * BK + channel[None, :]
    flip = slot[None, :] + channel[:, None] * BT
    tl.store(p_rows + place, keys)
    if not WIDE:
        tl.store(p_rows + BT * BK + flip, tl.trans(keys))
    queries = half(b_q * q_down[:, None])
    if TURN:
        tl.store(p_rows + (ROWS - 1) * BT * BK + flip, tl.trans(queries))
    else:
        tl.store(p_rows + (ROWS - 1) * BT * BK + place, queries)
    if BACK:
        p_norm = norms + pid.to(tl.int64) * (2 * BT) + slot
        tl.store(p_norm, k_norm * k_down)
        tl.store(p_norm + BT, q_norm * q_down)
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        strength = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
        from_start, to_end = row_weights(g, token, inside, g_token, i_head, g_head, BT, DECAY, False)
        gates = tl.zeros([BT], tl.float32)
        if DECAY == 1:
            gates = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
        _store_factors(
            factors + (block.to(tl.int64) * HV + i_head) * (10 * BT), slot, strength, strength * k_norm * from_start,
            from_start, to_end, k_norm, q_norm, gates, BT, DECAY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def channel_rows(
    q, k, g, beta, starts, lengths, offsets, owner, index, norms, rows, whole, factors, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BETA: tl.constexpr,
    BACK: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Of a decay by channel, g `[M, HV, K]`, whose weights are multiplied into the rows.

    Args:
        norms: fp32 `[NB, H, 4, BT]` of `row_norms`.
        rows: fp16 `[NB, HV, 5, BT * BK]`: keys from the block's start in two parts, `[BT, BK]`, keys to its end in two
            parts, `[BK, BT]`, or under WIDE `[BT, BK]`, and queries from its start, `[BT, BK]`; under BACK
            `[NB, HV, 6, BT * BK]`, queries in two parts. Under TURN six too: keys to the end, `[BT, BK]`, keys and
            queries from the start, `[BK, BT]`.
        whole: fp32 `[NB, HV, BK]`. factors: `FACTORS`, but GATE and LIFT. Neither is written under TURN.

    Grid: (NB * HV * BK / BS,).
    """
    SLICES: tl.constexpr = BK // BS
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_head = i_head.to(tl.int64)
    i_key = i_head // (HV // H)
    slot, channel = tl.arange(0, BT), first + tl.arange(0, BS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (4 * BT) + slot
    k_down, q_down = tl.load(p_norm), tl.load(p_norm + 2 * BT)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, first, q_channel, K, BS).to(tl.float32)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, first, k_channel, K, BS).to(tl.float32)
    b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
    from_start = fine_weight((slot[None, :] <= slot[:, None]).to(tl.float32), b_g)
    to_end = fine_weight((slot[None, :] > slot[:, None]).to(tl.float32), b_g)
    p_rows = rows + pid.to(tl.int64) * ((6 if BACK or TURN else 5) * BT * BK)
    wide, tall = p_rows + slot[:, None] * BK + channel[None, :], p_rows + slot[None, :] + channel[:, None] * BT
    b_k = b_k * k_down[:, None]
    b_q = b_q * (q_down[:, None] * from_start)
    if TURN:
        _store_parts(wide, fine_parts(b_k * to_end), BT * BK, False)
        _store_parts(tall + 2 * BT * BK, fine_parts(b_k * from_start), BT * BK, True)
        _store_parts(tall + 4 * BT * BK, fine_parts(b_q), BT * BK, True)
    else:
        _store_parts(wide, fine_parts(b_k * from_start), BT * BK, False)
        if WIDE:
            _store_parts(wide + 2 * BT * BK, fine_parts(b_k * to_end), BT * BK, False)
        else:
            _store_parts(tall + 2 * BT * BK, fine_parts(b_k * to_end), BT * BK, True)
        if BACK:
            _store_parts(wide + 4 * BT * BK, fine_parts(b_q), BT * BK, False)
        else:
            tl.store(wide + 4 * BT * BK, half(b_q))
        last = tl.sum(tl.where((slot == BT - 1)[:, None], from_start, 0.0), 0)
        tl.store(whole + pid.to(tl.int64) * BK + channel, last)
        if first == 0:
            k_norm, q_norm = tl.load(p_norm + BT), tl.load(p_norm + 3 * BT)
            strength = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
            ones = tl.full([BT], 1.0, tl.float32)
            _store_factors(
                factors + pid.to(tl.int64) * (10 * BT), slot, strength, strength * k_norm, ones, ones, k_norm, q_norm,
                ones, BT, 2,
            )  # fmt: skip
