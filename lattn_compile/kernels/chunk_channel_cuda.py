"""`chunk_channel.py`'s `block_fine` where registers are told what lies in them: NVIDIA's, by Triton's Gluon.

A warp has a tile of 16 tokens. Everything it makes of the tile alone stays in its registers: what a product of gates
leaves there is where a weight belongs, and a weighted key is where both sides of the next product want it. For that
channels are taken in an order of their own: the matrix unit gives a thread every eighth pair of columns, so that the
thread's columns are counted as eight neighbours, which it loads and stores as 16 bytes. Only what other tiles need
passes through shared memory: the gates of a tile, and rows of the pairs further apart.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lattn_compile.kernels.chunk_math import block_place, common_power, exp2, fine_parts, half, held, power_of_two
from lattn_compile.kernels.chunk_rows import (
    BETA_ROW,
    END_ROW,
    ERASE_ROW,
    KEY_ROW,
    MOST_ROW,
    QUERY_ROW,
    START_ROW,
    WHOLE_ROW,
    exact_norm,
    near_one,
)
from lattn_compile.kernels.chunk_tiles import DOWN, UP

__all__ = ["block_cuda"]


@gluon.jit
def _counted(x, LAYOUT: gl.constexpr):
    """32 channels at the end of `[4, 16, 32]` in the matrix unit's order: bits 4 to 0 become 1, 0, 4, 3, 2."""
    x = gl.permute(gl.reshape(x, [4, 16, 4, 2, 4]), (0, 1, 4, 2, 3))
    return gl.convert_layout(gl.reshape(x, [4, 16, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def _recounted(x, LAYOUT: gl.constexpr):
    """Takes `_counted` back."""
    x = gl.permute(gl.reshape(x, [4, 16, 4, 4, 2]), (0, 1, 3, 4, 2))
    return gl.convert_layout(gl.reshape(x, [4, 16, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def _left(x, MMA: gl.constexpr):
    """Of a product's result the left side of another."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _right(x, MMA: gl.constexpr):
    """Of a product's result, transposed, the right side of another."""
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _pairs(P, A, o_q, o_more_q, o_late, o_more_late, o_early, o_more_early, READ: gl.constexpr, BACK: gl.constexpr,
           DELTA: gl.constexpr):  # fmt: skip
    """`_products` of chunk_channel.py."""
    if READ:
        if BACK:
            P = mma_v2(o_more_q, o_early, P)
            P = mma_v2(o_q, o_more_early, P)
        P = mma_v2(o_q, o_early, P)
    if DELTA:
        A = mma_v2(o_more_late, o_early, A)
        A = mma_v2(o_late, o_more_early, A)
        A = mma_v2(o_late, o_early, A)
    return P, A


@gluon.jit
def _rows(p, row, inside, channel, stride, K: gl.constexpr, BK: gl.constexpr):
    """`[4, 16, channels]` at p, zeros where there is no token; row, inside: `[4, 16, 1]`, channel `[1, 1, ..]`."""
    mask = inside
    if K != BK:
        mask = mask & (channel < K)
    return gl.load(p + row + channel * stride, mask=mask, other=0.0)


@gluon.jit
def _slots(LAYOUT: gl.constexpr):
    """Slots `[4, 16, 1]` of tensors `[4, 16, ..]`."""
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(tile, 1) * 16 + gl.expand_dims(row, 0), 2)


@gluon.jit
def _channels(WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels `[1, 1, WIDTH]`."""
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(channel, 0), 1)


@gluon.jit
def _sums(which, high, low, none):
    """`tile_sums` of chunk_tiles.py: which, of gates in two parts, `[4, 16, 16]`."""
    return mma_v2(which, high, mma_v2(which, low, none))


@gluon.jit
def _level(
    P, A, step, ones, q, k, high_g, low_g, row, column, MMA: gl.constexpr, READ: gl.constexpr, BACK: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Puts the pairs that a level's middle parts in their places of P and A."""
    middle = 8 >> step
    none = gl.zeros(k.shape, gl.float32, MMA)
    no_pairs = gl.zeros([4, 16, 16], gl.float32, MMA)
    weight = exp2(_sums(ones.index(step).load(gl.DotOperandLayout(0, MMA, 2)), high_g, low_g, none))
    high_k, low_k = fine_parts(k * weight)
    high_q, low_q = fine_parts(q * weight)
    level_P, level_A = _pairs(
        no_pairs, no_pairs, _left(high_q, MMA), _left(low_q, MMA), _left(high_k, MMA), _left(low_k, MMA),
        _right(high_k, MMA), _right(low_k, MMA), READ, BACK, DELTA,
    )  # fmt: skip
    apart = ((row ^ column) >= middle) & ((row ^ column) < 2 * middle) & ((row & middle) != 0)
    return gl.where(apart, P + level_P, P), gl.where(apart, level_A, A)


@gluon.jit
def _past(gates, tile, other, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """`past_tiles` of chunk_tiles.py, counted `[4, 1, 32]`: gates `[1, 4, 32]`, tile `[4, 1, 1]`, other `[1, 4, 1]`."""
    if WHICH == 0:
        counts = other < tile
    elif WHICH == 1:
        counts = other > tile
    else:
        counts = ((tile ^ other) == 1) & ((tile == 0) | (tile == 3))
    x = gl.sum(gl.where(counts, gates, 0.0), 1)
    x = gl.reshape(gl.permute(gl.reshape(x, [4, 4, 2, 4]), (0, 3, 1, 2)), [4, 32])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _store_reads(p, x, i, j, BT: gl.constexpr, BACK: gl.constexpr, FAR: gl.constexpr, LAYOUT: gl.constexpr):
    """`_store_reads` of chunk_channel.py."""
    high, low = fine_parts(x)
    gl.store(p + i * BT + j, high)
    if BACK:
        gl.store(p + BT * BT + i * BT + j, low)
    if FAR:
        nothing = gl.zeros(x.shape, gl.float16, LAYOUT)
        gl.store(p + j * BT + i, nothing)
        if BACK:
            gl.store(p + BT * BT + j * BT + i, nothing)


@gluon.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def block_cuda(
    q, k, g, beta, starts, lengths, offsets, owner, index, kept, rows, whole, factors, reads, overlaps, scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head, H, HV,
    K: gl.constexpr, BK: gl.constexpr, BT: gl.constexpr,
    DELTA: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr, READ: gl.constexpr, BACK: gl.constexpr,
    CHUNK: gl.constexpr, TOKENS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """Arguments of `block_fine`, of blocks of BT = 64 slots; but all rows are `[BT, BK]`: keys from the block's start
    and to its end in two parts each, and queries, under BACK in two parts.

    Grid: (NB * HV,), 4 warps.
    """
    gl.static_assert(BT == 64)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # Of 32 channels as they are in memory: a thread's eight neighbours, or four, are MMA's and RIGHT's columns.
    NEAR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 32],
    )  # fmt: skip
    GATE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0]],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 32],
    )  # fmt: skip
    # A tile's sums of gates: other tiles in a thread's registers, its lane the channel.
    PAST: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0]], [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 4, 32],
    )  # fmt: skip
    MMA_16: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 1, 2], instr_shape=[1, 16, 8])
    MMA_32: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])
    LEFT_16: gl.constexpr = gl.DotOperandLayout(0, MMA_16, 2)
    RIGHT_16: gl.constexpr = gl.DotOperandLayout(1, MMA_16, 2)
    LEFT_32: gl.constexpr = gl.DotOperandLayout(0, MMA_32, 2)
    RIGHT_32: gl.constexpr = gl.DotOperandLayout(1, MMA_32, 2)
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    pid = gl.program_id(0)
    block, i_head = pid // HV, (pid % HV).to(gl.int64)
    if gl.load(owner + block) < 0:
        return
    i_key, at = i_head // (HV // H), pid.to(gl.int64)
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)

    slot = _slots(NEAR)
    inside = (slot >= low) & (slot < high)
    q_row, k_row = (base + slot) * q_token + i_key * q_head, (base + slot) * k_token + i_key * k_head
    gate_slot = _slots(GATE)
    gate_inside = (gate_slot >= low) & (gate_slot < high)
    g_row = (base + gate_slot) * g_token + i_head * g_head
    channel, gate_channel = _channels(32, NEAR), _channels(32, GATE)

    # Rows' magnitudes and sums of squares, which the whole row must be known for.
    most_k = gl.zeros([4, 16], gl.float32, gl.SliceLayout(2, NEAR))
    most_q = most_k
    for first in gl.static_range(0, BK, 32):
        x_k = _rows(k, k_row, inside, channel + first, k_channel, K, BK).to(gl.float32)
        most_k = gl.maximum(most_k, gl.max(gl.abs(x_k), 2))
        x_q = _rows(q, q_row, inside, channel + first, q_channel, K, BK).to(gl.float32)
        most_q = gl.maximum(most_q, gl.max(gl.abs(x_q), 2))
    near_k, near_q = near_one(most_k)[1], near_one(most_q)[1]
    total_k = gl.zeros([4, 16], gl.float64, gl.SliceLayout(2, NEAR))
    total_q = gl.zeros([4, 16], gl.float32, gl.SliceLayout(2, NEAR))
    for first in gl.static_range(0, BK, 32):
        x_k = _rows(k, k_row, inside, channel + first, k_channel, K, BK).to(gl.float32) * gl.expand_dims(near_k, 2)
        total_k += gl.sum((x_k * x_k).to(gl.float64), 2)
        x_q = _rows(q, q_row, inside, channel + first, q_channel, K, BK).to(gl.float32) * gl.expand_dims(near_q, 2)
        total_q += gl.sum(x_q * x_q, 2)
    most_k, most_q = gl.convert_layout(most_k, ROW), gl.convert_layout(most_q, ROW)
    total_k, total_q = gl.convert_layout(total_k, ROW), gl.convert_layout(total_q, ROW)
    k_exact = exact_norm(most_k, total_k, NORM)
    k_norm = k_exact.to(gl.float32)
    q_norm = exact_norm(most_q, total_q.to(gl.float64), NORM).to(gl.float32) * scale
    down_k, down_q = power_of_two(most_k)[1], power_of_two(most_q)[1]
    own_slot = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, ROW)), 1) * 16 + gl.expand_dims(
        gl.arange(0, 16, gl.SliceLayout(0, ROW)), 0
    )
    own_inside = (own_slot >= low) & (own_slot < high)
    if BETA:
        p_beta = beta + (base + own_slot) * beta_token + i_head * beta_head
        strength = gl.load(p_beta, mask=own_inside, other=0.0).to(gl.float32)
    else:
        strength = own_inside.to(gl.float32)
    most, less = common_power(gl.max(gl.max(k_norm, 1), 0))
    p_factor = factors + at * (10 * BT) + own_slot
    one = gl.full([4, 16], 1.0, gl.float32, ROW)
    gl.store(p_factor + BETA_ROW * BT, strength)
    gl.store(p_factor + ERASE_ROW * BT, strength * k_norm)
    gl.store(p_factor + START_ROW * BT, one)
    gl.store(p_factor + END_ROW * BT, one)
    gl.store(p_factor + KEY_ROW * BT, k_norm * less)
    gl.store(p_factor + QUERY_ROW * BT, q_norm)
    gl.store(p_factor + WHOLE_ROW * BT, one)
    gl.store(p_factor + MOST_ROW * BT, one * most)
    if BACK:
        # Value heads of a key head write the same.
        p_kept = kept + (block.to(gl.int64) * H + i_key) * (2 * BT) + own_slot
        gl.store(p_kept, k_norm * down_k)
        gl.store(p_kept + BT, q_norm * down_q)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    exact = gl.allocate_shared_memory(gl.float64, [4, 16], flat)
    exact.store(k_exact)
    exact_16 = gl.allocate_shared_memory(gl.float64, [2, 2, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    exact_16.store(gl.permute(gl.reshape(k_exact, [2, 2, 16]), (1, 0, 2)))
    exact_16 = exact_16._reinterpret(gl.float64, [2, 2, 16], flat)
    exact_32 = exact._reinterpret(gl.float64, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    down_k, down_q = gl.expand_dims(down_k, 2), gl.expand_dims(down_q, 2)

    sums = gl.allocate_shared_memory(gl.float32, [4, 32], flat)
    PARTS: gl.constexpr = (4 if BACK else 3) if READ else 2
    # As they are stored, and as sides of products, with the same places.
    far_16, far_32, of_16, of_32 = (), (), (), ()
    for _ in gl.static_range(PARTS):
        x = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 32], gl.SwizzledSharedLayout(8, 2, 4, [3, 2, 1, 0]))
        far_16 = far_16 + (x,)
        of_16 = of_16 + (x._reinterpret(gl.float16, [2, 2, 16, 32], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])),)
        x = gl.allocate_shared_memory(gl.float16, [2, 32, 32], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
        far_32 = far_32 + (x,)
        of_32 = of_32 + (x._reinterpret(gl.float16, [2, 32, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])),)

    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0), 2)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA))), 0), 1)
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1), 2)
    # Which of a tile's gates lie between a token and a middle, four times, and then up to a token, or behind it, as the
    # middle of two tiles or of four lies, the block's start or its end. Kept here since registers are dear.
    ones = gl.allocate_shared_memory(gl.float16, [8, 4, 16, 16], gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
    for step in gl.static_range(4):
        middle = 8 >> step
        counts = ((row ^ column) < middle) & (((row & middle) != 0) == (column <= row)) & (tile >= 0)
        ones.index(step).store(gl.where(counts, DOWN, 0.0).to(gl.float16))
    upto = (column <= row) & (tile >= 0)
    ones.index(4).store(gl.where(upto == ((tile & 1) != 0), DOWN, 0.0).to(gl.float16))
    ones.index(5).store(gl.where(upto == ((tile & 2) != 0), DOWN, 0.0).to(gl.float16))
    ones.index(6).store(gl.where(upto, DOWN, 0.0).to(gl.float16))
    ones.index(7).store(gl.where(upto, 0.0, DOWN).to(gl.float16))
    a_tile = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, PAST))), 1), 2)
    other = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, PAST))), 0), 2)
    sum_channel = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, PAST)))

    P = gl.zeros([4, 16, 16], gl.float32, MMA)
    A = gl.zeros([4, 16, 16], gl.float64, MMA)
    P_16 = gl.zeros([2, 16, 16], gl.float32, MMA_16)
    A_16 = gl.zeros([2, 16, 16], gl.float64, MMA_16)
    P_32 = gl.zeros([32, 32], gl.float32, MMA_32)
    A_32 = gl.zeros([32, 32], gl.float64, MMA_32)
    ROWS: gl.constexpr = 4 + READ * (2 if BACK else 1)
    p_rows = rows + at * (ROWS * BT * BK) + slot * BK + channel
    for first in range(0, BK, 32):
        b_g = held(_rows(g, g_row, gate_inside, gate_channel + first, g_channel, K, BK)) * UP
        b_k = _counted(_rows(k, k_row, inside, channel + first, k_channel, K, BK), MMA).to(gl.float32) * down_k
        high_g, low_g = fine_parts(_counted(b_g, RIGHT))
        sums.store(gl.sum(b_g, 1) * DOWN)
        none = gl.zeros([4, 16, 32], gl.float32, MMA)
        no_pairs = gl.zeros([4, 16, 16], gl.float32, MMA)
        b_q = b_k
        if READ:
            b_q = _counted(_rows(q, q_row, inside, channel + first, q_channel, K, BK), MMA).to(gl.float32) * down_q
            own = mma_v2(_left(half(b_q), MMA), _right(half(b_k), MMA), no_pairs)
            P += gl.where(row == column, own, 0.0)
        more = no_pairs
        # Every pair of tokens is parted once, so that these are no sums.
        for step in gl.static_range(4):
            P, more = _level(P, more, step, ones, b_q, b_k, high_g, low_g, row, column, MMA, READ, BACK, DELTA)
        A += more.to(gl.float64)

        weight = exp2(_sums(ones.index(4).load(LEFT), high_g, low_g, none))
        far = fine_parts(b_k * weight)
        if READ:
            far_q = fine_parts(b_q * weight)
            far = far + (far_q[0],)
            if BACK:
                far = far + (far_q[1],)
        for part in gl.static_range(PARTS):
            far_16[part].store(gl.permute(gl.reshape(far[part], [2, 2, 16, 32]), (1, 0, 2, 3)))

        all_gates = sums.load(gl.SliceLayout(0, PAST))
        gl.store(whole + at * BK + first + sum_channel, exp2(gl.sum(all_gates, 0)))
        gates = gl.expand_dims(all_gates, 0)
        weight = exp2(_sums(ones.index(5).load(LEFT), high_g, low_g, none) + _past(gates, a_tile, other, 2, MMA))
        far = fine_parts(b_k * weight)
        if READ:
            far_q = fine_parts(b_q * weight)
            far = far + (far_q[0],)
            if BACK:
                far = far + (far_q[1],)
        for part in gl.static_range(PARTS):
            far_32[part].store(gl.reshape(far[part], [2, 32, 32]))
        more = gl.zeros([2, 16, 16], gl.float32, MMA_16)
        P_16, more = _pairs(
            P_16, more, of_16[2 * READ].index(1).load(LEFT_16), of_16[PARTS - 1].index(1).load(LEFT_16),
            of_16[0].index(1).load(LEFT_16), of_16[1].index(1).load(LEFT_16),
            of_16[0].index(0).permute((0, 2, 1)).load(RIGHT_16),
            of_16[1].index(0).permute((0, 2, 1)).load(RIGHT_16), READ, BACK, DELTA,
        )  # fmt: skip
        A_16 += more.to(gl.float64)

        weight = exp2(_sums(ones.index(6).load(LEFT), high_g, low_g, none) + _past(gates, a_tile, other, 0, MMA))
        high_k, low_k = fine_parts(b_k * weight)
        gl.store(p_rows + first, _recounted(high_k, NEAR))
        gl.store(p_rows + BT * BK + first, _recounted(low_k, NEAR))
        if READ:
            high_q, low_q = fine_parts(b_q * weight)
            gl.store(p_rows + 4 * BT * BK + first, _recounted(high_q, NEAR))
            if BACK:
                gl.store(p_rows + 5 * BT * BK + first, _recounted(low_q, NEAR))
        weight = exp2(_sums(ones.index(7).load(LEFT), high_g, low_g, none) + _past(gates, a_tile, other, 1, MMA))
        high_k, low_k = fine_parts(b_k * weight)
        gl.store(p_rows + 2 * BT * BK + first, _recounted(high_k, NEAR))
        gl.store(p_rows + 3 * BT * BK + first, _recounted(low_k, NEAR))

        more = gl.zeros([32, 32], gl.float32, MMA_32)
        P_32, more = _pairs(
            P_32, more, of_32[2 * READ].index(1).load(LEFT_32), of_32[PARTS - 1].index(1).load(LEFT_32),
            of_32[0].index(1).load(LEFT_32), of_32[1].index(1).load(LEFT_32),
            of_32[0].index(0).permute((1, 0)).load(RIGHT_32),
            of_32[1].index(0).permute((1, 0)).load(RIGHT_32), READ, BACK, DELTA,
        )  # fmt: skip
        A_32 += more.to(gl.float64)

    p_reads, p_overlaps = whole, whole
    if READ:
        p_reads = reads + at * ((2 if BACK else 1) * BT * BT)
    if DELTA:
        p_overlaps = overlaps + at * (BT * BT)
    # What two tiles of 16 tokens see of each other, two of 32, and a tile of itself.
    late_16 = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, MMA_16))), 1) * 32 + gl.expand_dims(
        gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA_16))), 0
    )
    early_16 = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(1, MMA_16))), 1) * 32 + gl.expand_dims(
        gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA_16))), 0
    )
    late_16, early_16 = gl.expand_dims(late_16 + 16, 2), gl.expand_dims(early_16, 1)
    late_32 = gl.expand_dims(32 + gl.arange(0, 32, gl.SliceLayout(1, MMA_32)), 1)
    early_32 = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, MMA_32)), 0)
    late, early = tile * 16 + row, tile * 16 + column
    if READ:
        _store_reads(p_reads, P, late, early, BT, BACK, False, MMA)
        _store_reads(p_reads, P_16, late_16, early_16, BT, BACK, True, MMA_16)
        _store_reads(p_reads, P_32, late_32, early_32, BT, BACK, True, MMA_32)
    if DELTA:
        of_rows = gl.expand_dims(exact.load(gl.SliceLayout(2, MMA)), 2)
        of_columns = gl.expand_dims(exact.load(gl.SliceLayout(1, MMA)), 1)
        gl.store(p_overlaps + late * BT + early, A * (of_rows * of_columns))
        of_rows = gl.expand_dims(exact_16.index(1).load(gl.SliceLayout(2, MMA_16)), 2)
        of_columns = gl.expand_dims(exact_16.index(0).load(gl.SliceLayout(1, MMA_16)), 1)
        gl.store(p_overlaps + late_16 * BT + early_16, A_16 * (of_rows * of_columns))
        of_rows = gl.expand_dims(exact_32.index(1).load(gl.SliceLayout(1, MMA_32)), 1)
        of_columns = gl.expand_dims(exact_32.index(0).load(gl.SliceLayout(0, MMA_32)), 0)
        gl.store(p_overlaps + late_32 * BT + early_32, A_32 * (of_rows * of_columns))
