"""`chunk_levels.py`'s `grad_levels` where registers are told what lies in them: NVIDIA's, by Triton's Gluon.

A warp has a tile of 16 tokens, whose channels are the rows of its products, in the order of `chunk_channel_cuda.py`:
a thread has four neighbours. Levels within a tile pass nothing through shared memory. Of pairs further apart, a product
takes both tiles' tokens, or all four's, with zeros between those that this level does not part.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lattn_compile.kernels.chunk_math import block_place, exact_operand, exp2, fine_parts, held, operand
from lattn_compile.kernels.chunk_tiles import DOWN, UP

__all__ = ["levels_cuda"]


@gluon.jit
def _counted(x, LAYOUT: gl.constexpr):
    """32 channels of `[4, 32, 16]` in the matrix unit's order: bits 4 to 0 become 1, 0, 4, 3, 2."""
    x = gl.reshape(gl.permute(gl.reshape(x, [4, 8, 4, 16]), (0, 2, 1, 3)), [4, 32, 16])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _recounted(x, LAYOUT: gl.constexpr):
    """Takes `_counted` back."""
    x = gl.reshape(gl.permute(gl.reshape(x, [4, 4, 8, 16]), (0, 2, 1, 3)), [4, 32, 16])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _left(x, MMA: gl.constexpr):
    """Of a product's result the left side of another."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _three(high, low, other, more, out):
    """`(high + low) @ (other + more)`, added to `out`, the smallest terms first."""
    out = mma_v2(high, more, out)
    out = mma_v2(low, other, out)
    return mma_v2(high, other, out)


@gluon.jit
def _index(N: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to N - 1 along one axis of three."""
    if AXIS == 0:
        x = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(x, 1), 2)
    elif AXIS == 1:
        x = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(x, 0), 2)
    else:
        x = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit
def _received(dq, dk, first, second, q, k, weight, late, DELTA: gl.constexpr):
    """As in chunk_levels.py."""
    first = first * weight
    dq += gl.where(late, first, 0.0)
    dk += gl.where(late, 0.0, first)
    exponent = first * gl.where(late, q, k)
    if DELTA:
        second = second * weight
        dk += second
        exponent += second * k
    return dq, dk, exponent


@gluon.jit
def _neighbour(x, place, tile, other, which, LAYOUT: gl.constexpr, ALL: gl.constexpr):
    """Of sums `[4, 32]` of tiles what the tile beside has, where `which` holds of a tile, else 0: `[4, 32, 1]`."""
    place.store(x)
    x = gl.expand_dims(place.load(gl.SliceLayout(0, ALL)), 0)
    x = gl.sum(gl.where(((tile ^ other) == 1) & which, x, 0.0), 1)
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(2, LAYOUT), assert_trivial=True), 2)


@gluon.jit(do_not_specialize=["skip", "H", "HV"])
def levels_cuda(
    q, k, g, starts, lengths, offsets, owner, index, norms, dreads, doverlaps, dkeys, dgates, dg, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    dg_token, dg_head, dg_channel, H, HV,
    K: gl.constexpr, BK: gl.constexpr, BT: gl.constexpr, DELTA: gl.constexpr,
    CHUNK: gl.constexpr, TOKENS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """Arguments of `grad_levels`, of bf16 inputs and blocks of BT = 64 slots.

    Grid: (NB * HV * BK / 32,), 4 warps.
    """
    gl.static_assert(BT == 64)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # Channels as they are in memory, of which a thread has four neighbours, and tokens.
    NEAR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 8]],
        [[0, 0, 2], [0, 0, 4], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 32, 16],
    )  # fmt: skip
    # Sums of tiles by channel: other tiles in a thread's registers.
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 4, 32],
    )  # fmt: skip
    MMA_16: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 1, 2], instr_shape=[1, 16, 8])
    MMA_32: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
    SLICES: gl.constexpr = BK // 32
    pid = gl.program_id(0) // SLICES
    first = gl.program_id(0) % SLICES * 32
    block, i_head = pid // HV, (pid % HV).to(gl.int64)
    if gl.load(owner + block) < 0:
        return
    i_key, at = i_head // (HV // H), pid.to(gl.int64)
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)

    channel = first + _index(32, 1, NEAR)
    slot = _index(4, 0, NEAR) * 16 + _index(16, 2, NEAR)
    inside = (slot >= low) & (slot < high)
    mask = inside & (channel < K)
    b_q = gl.load(q + (base + slot) * q_token + i_key * q_head + channel * q_channel, mask=mask, other=0.0)
    b_k = gl.load(k + (base + slot) * k_token + i_key * k_head + channel * k_channel, mask=mask, other=0.0)
    b_g = gl.load(g + (base + slot) * g_token + i_head * g_head + channel * g_channel, mask=mask, other=0.0)
    p_keys = dkeys + (at * (2 * BT) + slot) * BK + channel
    dq, dk = gl.load(p_keys), gl.load(p_keys + BT * BK)
    total = _counted(gl.load(dgates + (at * BT + slot) * BK + channel), MMA)
    tile, column = _index(4, 0, MMA), _index(16, 2, MMA)
    p_norm = norms + (block.to(gl.int64) * H + i_key) * (2 * BT) + tile * 16 + column
    b_k = _counted(b_k, MMA).to(gl.float32) * gl.load(p_norm)
    b_q = _counted(b_q, MMA).to(gl.float32) * gl.load(p_norm + BT)
    b_g = _counted(held(b_g) * UP, MMA)
    high_g, low_g = fine_parts(b_g)
    high_g, low_g = _left(high_g, MMA), _left(low_g, MMA)
    p_reads, p_overlaps = dreads + at * (BT * BT), dreads
    if DELTA:
        p_overlaps = doverlaps + at * (BT * BT)
    own = gl.load(p_reads + (tile * 16 + column) * (BT + 1))
    dq = _counted(dq, MMA) + own * b_k
    dk = _counted(dk, MMA) + own * b_q

    # Symmetric: read along the side that is summed over.
    i, j, of = _index(16, 1, RIGHT), _index(16, 2, RIGHT), _index(4, 0, RIGHT)
    pair = (of * 16 + j) * BT + of * 16 + i
    D1 = operand(gl.load(p_reads + pair), True)
    D2 = D1
    if DELTA:
        D2 = operand(gl.load(p_overlaps + pair), True)
    none = gl.zeros([4, 32, 16], gl.float32, MMA)
    zero = gl.zeros([4, 16, 16], D1[0].dtype, RIGHT)
    for step in range(4):
        half = 8 >> step
        late = (column & half) != 0
        distance = i ^ j
        apart = (distance >= half) & (distance < 2 * half) & (of >= 0)
        # Gates between a token and the middle, gates by tokens, and the other way round.
        counts = (distance < half) & (((j & half) != 0) == (i <= j)) & (of >= 0)
        to_tokens = gl.where(counts, DOWN, 0.0).to(gl.float16)
        counts = (distance < half) & (((i & half) != 0) == (j <= i)) & (of >= 0)
        to_gates = exact_operand(gl.where(counts, 1.0, 0.0))[0]
        weight = exp2(mma_v2(high_g, to_tokens, mma_v2(low_g, to_tokens, none)))
        x = operand(gl.where(late, b_q, b_k) * weight, True)
        seen = _three(
            _left(x[0], MMA), _left(x[1], MMA), gl.where(apart, D1[0], zero), gl.where(apart, D1[1], zero), none
        )
        second = seen
        if DELTA:
            x = operand(b_k * weight, True)
            second = _three(
                _left(x[0], MMA), _left(x[1], MMA), gl.where(apart, D2[0], zero), gl.where(apart, D2[1], zero), none
            )
        dq, dk, exponent = _received(dq, dk, seen, second, b_q, b_k, weight, late, DELTA)
        x = operand(exponent, True)
        total = mma_v2(_left(x[0], MMA), to_gates, mma_v2(_left(x[1], MMA), to_gates, total))

    sums = gl.allocate_shared_memory(gl.float32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    more_sums = gl.allocate_shared_memory(gl.float32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    a_tile, other = _index(4, 0, ALL), _index(4, 1, ALL)
    outer = (a_tile == 0) | (a_tile == 3)
    # Whole tiles: the two beside each other, and those two on the other side of the block's middle.
    for step in gl.static_range(2):
        late = (tile & (1 << step)) != 0
        behind = (of & (1 << step)) != 0
        to_tokens = gl.where((i > j) != behind, DOWN, 0.0).to(gl.float16)
        exponents = mma_v2(high_g, to_tokens, mma_v2(low_g, to_tokens, none))
        if step == 1:  # the outer two have all of their neighbours between themselves and the middle
            exponents += _neighbour(gl.sum(b_g, 2) * DOWN, sums, a_tile, other, outer, MMA, ALL)
        weight = exp2(exponents)
        x = operand(gl.where(late, b_q, b_k) * weight, True)
        keys = x
        if DELTA:
            keys = operand(b_k * weight, True)
        if step == 0:
            seen = _beside(x, p_reads, BT, MMA, MMA_16)
            second = seen
            if DELTA:
                second = _beside(keys, p_overlaps, BT, MMA, MMA_16)
        else:
            seen = _across(x, p_reads, BT, MMA, MMA_32)
            second = seen
            if DELTA:
                second = _across(keys, p_overlaps, BT, MMA, MMA_32)
        dq, dk, exponent = _received(dq, dk, seen, second, b_q, b_k, weight, late, DELTA)
        to_gates = exact_operand(gl.where((j > i) != behind, 1.0, 0.0))[0]
        x = operand(exponent, False)
        total = mma_v2(_left(x[2], MMA), to_gates, total)
        total = mma_v2(_left(x[1], MMA), to_gates, total)
        total = mma_v2(_left(x[0], MMA), to_gates, total)
        if step == 1:
            total += _neighbour(gl.sum(exponent, 2), more_sums, a_tile, other, outer == 0, MMA, ALL)
    gl.store(p_keys, _recounted(dq, NEAR))
    gl.store(p_keys + BT * BK, _recounted(dk, NEAR))
    p_dg = dg + (base + slot) * dg_token + i_head * dg_head + channel * dg_channel
    gl.store(p_dg, _recounted(total, NEAR).to(dg.dtype.element_ty), mask=mask)


@gluon.jit
def _beside(x, p, BT: gl.constexpr, MMA: gl.constexpr, MMA_16: gl.constexpr):
    """`x @ D` of the two tiles beside each other, D of pairs of tokens at p, symmetric; `[4, 32, 16]`."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    high = gl.allocate_shared_memory(x[0].dtype, [2, 32, 32], SHARED)
    low = gl.allocate_shared_memory(x[0].dtype, [2, 32, 32], SHARED)
    high.store(gl.reshape(gl.permute(gl.reshape(x[0], [2, 2, 32, 16]), (0, 2, 1, 3)), [2, 32, 32]))
    low.store(gl.reshape(gl.permute(gl.reshape(x[1], [2, 2, 32, 16]), (0, 2, 1, 3)), [2, 32, 32]))
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA_16, 2)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA_16, 2)
    of, i, j = _index(2, 0, RIGHT) * 32, _index(32, 1, RIGHT), _index(32, 2, RIGHT)
    j = (j & 7) | ((j & 16) >> 1) | ((j & 8) << 1)  # so that each warp has a tile's columns
    D = operand(gl.load(p + (of + j) * BT + of + i, mask=((i ^ j) & 16) != 0, other=0.0), True)
    none = gl.zeros([2, 32, 32], gl.float32, MMA_16)
    out = _three(high.load(LEFT), low.load(LEFT), D[0], D[1], none)
    out = gl.permute(gl.reshape(out, [2, 32, 2, 2, 8]), (0, 3, 1, 2, 4))
    return gl.convert_layout(gl.reshape(out, [4, 32, 16]), MMA, assert_trivial=True)


@gluon.jit
def _across(x, p, BT: gl.constexpr, MMA: gl.constexpr, MMA_32: gl.constexpr):
    """The same of tiles on both sides of the block's middle."""
    STORED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    high = gl.allocate_shared_memory(x[0].dtype, [2, 32, 32], STORED)
    low = gl.allocate_shared_memory(x[0].dtype, [2, 32, 32], STORED)
    high.store(gl.reshape(gl.permute(gl.reshape(x[0], [2, 2, 32, 16]), (0, 2, 1, 3)), [2, 32, 32]))
    low.store(gl.reshape(gl.permute(gl.reshape(x[1], [2, 2, 32, 16]), (0, 2, 1, 3)), [2, 32, 32]))
    high = high._reinterpret(x[0].dtype, [2, 32, 32], SHARED)
    low = low._reinterpret(x[0].dtype, [2, 32, 32], SHARED)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA_32, 2)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA_32, 2)
    i = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, RIGHT)), 1)
    j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, RIGHT)), 0)
    j = (j & 7) | ((j & 32) >> 2) | ((j & 24) << 1)
    out = gl.zeros([32, 64], gl.float32, MMA_32)
    for side in gl.static_range(2):  # one is all zeros; both at once would leave the registers
        D = operand(gl.load(p + j * BT + 32 * side + i, mask=(j & 32) != 32 * side, other=0.0), True)
        out = _three(high.index(side).load(LEFT), low.index(side).load(LEFT), D[0], D[1], out)
    out = gl.permute(gl.reshape(out, [32, 2, 4, 8]), (2, 0, 1, 3))
    return gl.convert_layout(gl.reshape(out, [4, 32, 16]), MMA, assert_trivial=True)
