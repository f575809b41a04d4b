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
    "head_rows",
    "load_norms",
    "store_factors",
    "store_sums",
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
def row_sums(x):
    """Of rows that bf16 holds, along the last axis: their largest magnitude, and the sum of their squares, float64, of
    rows brought near 1 by `near_one`."""
    most = tl.max(tl.abs(x), len(x.shape) - 1)
    near = x * tl.expand_dims(near_one(most)[1], len(x.shape) - 1)
    return most, tl.sum((near * near).to(tl.float64), len(x.shape) - 1)


@triton.jit
def near_one(most):
    """The power of two that rows are divided by for their sums of squares, and its reciprocal."""
    return power_of_two(tl.maximum(most, 2.0**-10))


@triton.jit
def exact_norm(most, total, NORM: tl.constexpr):
    """What a product of rows that were brought into fp16's range is multiplied with, float64; of `row_sums`.

    In float64 because the delta rule's matrix wants it: an error of a norm is one of beta, which a repeated key
    amplifies. A root in fp32 and one step of Newton's: one in float64 takes hundreds of instructions.
    """
    up, _ = power_of_two(most)
    if NORM:
        _, down = near_one(most)
        total += 1e-6 * (down * down).to(tl.float64)
        root = tl.div_rn(1.0, tl.sqrt_rn(total.to(tl.float32))).to(tl.float64)
        return (root * (1.5 - 0.5 * total * root * root)) * (up * down).to(tl.float64)
    else:
        return up.to(tl.float64)


@triton.jit
def store_sums(p, slot, q, k, BT: tl.constexpr):
    """Leaves what `load_norms` wants of rows `q` and `k` at p, fp32 `[6, BT]`, for whoever passes the next barrier.

    Where rows lie in registers a thread has the same sums as others, of many rows; read again, of one.
    """
    most, total = row_sums(k)
    tl.store(p + slot, most)
    high = total.to(tl.float32)
    tl.store(p + BT + slot, high)
    tl.store(p + 2 * BT + slot, (total - high.to(tl.float64)).to(tl.float32))
    most = tl.max(tl.abs(q), len(q.shape) - 1)
    near = q * tl.expand_dims(near_one(most)[1], len(q.shape) - 1)
    tl.store(p + 3 * BT + slot, most)
    tl.store(p + 4 * BT + slot, tl.sum(near * near, len(q.shape) - 1))


@triton.jit
def load_norms(p, slot, scale, BT: tl.constexpr, NORM: tl.constexpr):
    """Of rows of keys and of queries: what each is multiplied with to come into fp16's range, and what is left to
    multiply the product with.

    Returns:
        (k_down, k_norm, k_norm in float64, q_down, q_norm).
    """
    k_most, q_most = tl.load(p + slot), tl.load(p + 3 * BT + slot)
    total = tl.load(p + BT + slot).to(tl.float64) + tl.load(p + 2 * BT + slot).to(tl.float64)
    k_exact = exact_norm(k_most, total, NORM)
    q_norm = exact_norm(q_most, tl.load(p + 4 * BT + slot).to(tl.float64), NORM).to(tl.float32) * scale
    return power_of_two(k_most)[1], k_exact.to(tl.float32), k_exact, power_of_two(q_most)[1], q_norm


@triton.jit
def store_factors(
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
    READ: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Of a decay by head, or none.

    Args:
        q, k: `[M, H, K]`, bf16, g, beta: `[M, HV]`, any strides.
        rows: fp16 `[NB, H, 3, BT * BK]`: keys `[BT, BK]`, their transpose, and queries, under TURN transposed too;
            zeros without a token. Under WIDE `[NB, H, 2, BT * BK]`, keys and queries as they are. READ: with queries.
        factors: `FACTORS`, but LIFT. exact: float64 `[NB, H, BT]`, of `load_norms`.
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
    # Its sums lie where the first of its value heads has its factors later.
    p_sums = factors + (block.to(tl.int64) * HV + i_key * (HV // H)) * (10 * BT)
    store_sums(p_sums, slot, b_q, b_k, BT)
    tl.debug_barrier()
    k_down, k_norm, k_exact, q_down, q_norm = load_norms(p_sums, slot, scale, BT, NORM)
    tl.debug_barrier()
    tl.store(exact + pid.to(tl.int64) * BT + slot, k_exact)
    keys = half(b_k * k_down[:, None])
    ROWS: tl.constexpr = (1 if WIDE else 2) + READ
    p_rows = rows + pid.to(tl.int64) * (ROWS * BT * BK)
    place = slot[:, None] * BK + channel[None, :]
    flip = slot[None, :] + channel[:, None] * BT
    tl.store(p_rows + place, keys)
    if not WIDE:
        tl.store(p_rows + BT * BK + flip, tl.trans(keys))
    if READ:
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
        store_factors(
            factors + (block.to(tl.int64) * HV + i_head) * (10 * BT), slot, strength, strength * k_norm * from_start,
            from_start, to_end, k_norm, q_norm, gates, BT, DECAY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def channel_rows(
    q, k, g, starts, lengths, offsets, owner, index, norms, rows, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Of a decay by channel, g `[M, HV, K]`, whose weights are multiplied into the rows: as `carry_back` takes them.

    Args:
        norms: fp32 `[NB, H, 4, BT]` of `load_norms`.
        rows: fp16 `[NB, HV, 6, BT * BK]`: keys to the block's end in two parts, `[BT, BK]`, keys and queries from its
            start, `[BK, BT]`.

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
    p_rows = rows + pid.to(tl.int64) * (6 * BT * BK)
    wide, tall = p_rows + slot[:, None] * BK + channel[None, :], p_rows + slot[None, :] + channel[:, None] * BT
    b_k = b_k * k_down[:, None]
    b_q = b_q * (q_down[:, None] * from_start)
    _store_parts(wide, fine_parts(b_k * to_end), BT * BK, False)
    _store_parts(tall + 2 * BT * BK, fine_parts(b_k * from_start), BT * BK, True)
    _store_parts(tall + 4 * BT * BK, fine_parts(b_q), BT * BK, True)
