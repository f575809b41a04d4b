"""`chunk_gradients.py`'s `grad_keys` of a decay by channel where registers are told what lies in them: NVIDIA's, by
Triton's Gluon.

Channels are the rows of its products, 16 of them a warp's, in the order of `chunk_channel_cuda.py`: a thread has two
neighbours. So a state, of which each warp has its own channels, is split into parts in the registers that take it from
memory, and what a product leaves there is summed up over tokens by the next. What all warps read, values of tokens,
is split once and passes through shared memory.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lattn_compile.kernels.chunk_backward import reads_inside
from lattn_compile.kernels.chunk_math import block_place, exact_operand, fine_parts, held, load_beta, operand
from lattn_compile.kernels.common.inputs import no_more

__all__ = ["keys_cuda"]


@gluon.jit
def _counted(x, N: gl.constexpr, LAYOUT: gl.constexpr):
    """64 channels of `[64, N]` in the matrix unit's order: of every 16, bits 3 to 0 become 0, 3, 2, 1."""
    x = gl.reshape(gl.permute(gl.reshape(x, [4, 8, 2, N]), (0, 2, 1, 3)), [64, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _recounted(x, LAYOUT: gl.constexpr):
    """Takes `_counted` of `[64, 64]` back."""
    x = gl.reshape(gl.permute(gl.reshape(x, [4, 2, 8, 64]), (0, 2, 1, 3)), [64, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _left(x, MMA: gl.constexpr):
    """Of a product's result the left side of another."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _six(a, b, out):
    """`product` of chunk_math.py, of three parts and three, added to `out`."""
    out = mma_v2(a[2], b[0], out)
    out = mma_v2(a[1], b[1], out)
    out = mma_v2(a[0], b[2], out)
    out = mma_v2(a[1], b[0], out)
    out = mma_v2(a[0], b[1], out)
    return mma_v2(a[0], b[0], out)


@gluon.jit
def _shared(x, places, RIGHT: gl.constexpr):
    """Three parts of fp32 `[64 tokens, 16]` by way of shared memory: right sides `[16, 64 tokens]`."""
    parts = operand(x, False)
    places[0].store(parts[0])
    places[1].store(parts[1])
    places[2].store(parts[2])
    return (
        places[0].permute((1, 0)).load(RIGHT), places[1].permute((1, 0)).load(RIGHT),
        places[2].permute((1, 0)).load(RIGHT),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["skip", "H", "HV"])
def keys_cuda(
    q, k, g, beta, grad_o, starts, lengths, offsets, owner, index, norms, states, cotangents, updates, drhs, whole,
    dkeys, dgates, rows, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head,
    o_token, o_head, o_column, H, HV,
    K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, VP: gl.constexpr, BT: gl.constexpr,
    DELTA: gl.constexpr, BETA: gl.constexpr, AFTER: gl.constexpr,
    CHUNK: gl.constexpr, TOKENS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """Arguments of `grad_keys`, of bf16 inputs and blocks of BT = 64 slots; rows of every 16 channels, of which only
    what erasing takes out of beta's gradient is written.

    Grid: (NB * HV * BK / 64,), 4 warps.
    """
    gl.static_assert(BT == 64)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # Channels as they are in memory, a thread's two neighbours, with 16 columns of v or 64 tokens.
    STATE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    NEAR: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    ROW: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    VALUE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    SLICES: gl.constexpr = BK // 64
    pid = gl.program_id(0) // SLICES
    slice = gl.program_id(0) % SLICES
    block, i_head = pid // HV, (pid % HV).to(gl.int64)
    if gl.load(owner + block) < 0:
        return
    i_key, at = i_head // (HV // H), pid.to(gl.int64)
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)

    value_slot = gl.arange(0, 64, gl.SliceLayout(1, VALUE))
    value_column = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, VALUE)), 0)
    value_inside = (value_slot >= low) & (value_slot < high)
    read = reads_inside(
        owner, index, starts, lengths, offsets, block, skip, value_slot, value_inside, AFTER, CHUNK, TOKENS, PER
    )
    read = gl.expand_dims(read, 1)
    value_slot = gl.expand_dims(value_slot, 1)
    p_o = grad_o + (base + value_slot) * o_token + i_head * o_head + value_column * o_column
    p_value = at * (BT * VP) + value_slot * VP + value_column
    state_channel = slice * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, STATE)), 1)
    p_state = (at * VP + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, STATE)), 0)) * BK + state_channel

    o_at = gl.allocate_shared_memory(grad_o.dtype.element_ty, [64, 16], SHARED)
    PART: gl.constexpr = operand(gl.zeros([64, 16], gl.float32, VALUE), False)[0].dtype
    u_at = (
        gl.allocate_shared_memory(PART, [64, 16], SHARED), gl.allocate_shared_memory(PART, [64, 16], SHARED),
        gl.allocate_shared_memory(PART, [64, 16], SHARED),
    )  # fmt: skip
    r_at = u_at
    if DELTA:
        r_at = (
            gl.allocate_shared_memory(PART, [64, 16], SHARED), gl.allocate_shared_memory(PART, [64, 16], SHARED),
            gl.allocate_shared_memory(PART, [64, 16], SHARED),
        )  # fmt: skip

    none = gl.zeros([64, 64], gl.float32, MMA)
    dq, seen, dout = none, none, none
    dwhole = gl.zeros([64, 16], gl.float32, STATE)
    # Gates' gradients are sums that cancel where keys repeat: 16 bits of a factor are too few.
    for begin in range(0, VP, 16):
        b_o = gl.load(p_o + begin * o_column, mask=read & (value_column + begin < V), other=0.0)
        b_u = gl.load(updates + p_value + begin)
        S, dS = gl.load(states + p_state + begin * BK), gl.load(cotangents + p_state + begin * BK)
        if DELTA:
            b_r = gl.load(drhs + p_value + begin)
        dwhole += S * dS
        S = operand(_counted(S, 16, LEFT), False)
        dS = operand(_counted(dS, 16, LEFT), False)
        o_at.store(b_o)
        o_u = _shared(b_u, u_at, RIGHT)
        o_o = o_at.permute((1, 0)).load(RIGHT)
        dq += mma_v2(S[0], o_o, mma_v2(S[1], o_o, mma_v2(S[2], o_o, none)))
        dout += _six(dS, o_u, none)
        if DELTA:
            seen += _six(S, _shared(b_r, r_at, RIGHT), none)

    # Sums of gates from the block's start to a token and behind it, as products with ones.
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, MMA)), 1)
    j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, MMA)), 0)
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    upto = gl.allocate_shared_memory(gl.float16, [64, 64], WIDE)
    past = gl.allocate_shared_memory(gl.float16, [64, 64], WIDE)
    upto.store(gl.where(i <= j, 2.0**-7, 0.0).to(gl.float16))
    past.store(gl.where(i > j, 2.0**-7, 0.0).to(gl.float16))
    before = gl.allocate_shared_memory(PART, [64, 64], WIDE)
    behind = gl.allocate_shared_memory(PART, [64, 64], WIDE)
    before.store(exact_operand(gl.where(i < j, 1.0, 0.0))[0])
    behind.store(exact_operand(gl.where(i >= j, 1.0, 0.0))[0])

    channel = slice * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, NEAR)), 1)
    slot = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, NEAR)), 0)
    mask = (slot >= low) & (slot < high) & (channel < K)
    b_q = gl.load(q + (base + slot) * q_token + i_key * q_head + channel * q_channel, mask=mask, other=0.0)
    b_k = gl.load(k + (base + slot) * k_token + i_key * k_head + channel * k_channel, mask=mask, other=0.0)
    b_g = gl.load(g + (base + slot) * g_token + i_head * g_head + channel * g_channel, mask=mask, other=0.0)
    high_g, low_g = fine_parts(_counted(held(b_g) * 2.0**7, 64, MMA))
    high_g, low_g = _left(high_g, MMA), _left(low_g, MMA)
    weight = upto.load(RIGHT)
    weight = gl.exp(no_more(mma_v2(high_g, weight, mma_v2(low_g, weight, none)), 0.0))
    p_norm = norms + (block.to(gl.int64) * H + i_key) * (2 * BT) + j
    b_q = _counted(b_q, 64, MMA).to(gl.float32) * gl.load(p_norm + BT)
    b_k = _counted(b_k, 64, MMA).to(gl.float32) * gl.load(p_norm)
    dq = dq * weight
    seen = seen * weight
    weight = past.load(RIGHT)
    weight = gl.exp(no_more(mma_v2(high_g, weight, mma_v2(low_g, weight, none)), 0.0))
    dout = dout * weight
    if BETA:
        # Of the warp's 16 channels.
        row = gl.sum(gl.reshape(seen * b_k, [4, 16, 64]), 1)
        row = gl.convert_layout(row, ROW)
        warp = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, ROW)), 1)
        token = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROW)), 0)
        gl.store(rows + (at * (4 * SLICES) + slice * 4 + warp) * (4 * BT) + 3 * BT + token, row)
    beta_slot = gl.arange(0, 64, gl.SliceLayout(0, MMA))
    inside = (beta_slot >= low) & (beta_slot < high)
    seen = seen * gl.expand_dims(load_beta(beta, base + beta_slot, inside, beta_token, i_head, beta_head, BETA), 0)
    start = operand(dq * b_q - seen * b_k, False)
    end = operand(dout * b_k, False)
    dk = dout - seen
    # The gates behind a slot's exponent from the start are those up to it, of one to the end those after it.
    ones = behind.load(RIGHT)
    total = mma_v2(_left(start[1], MMA), ones, mma_v2(_left(start[2], MMA), ones, none))
    total = mma_v2(_left(start[0], MMA), ones, total)
    ones = before.load(RIGHT)
    more = mma_v2(_left(end[1], MMA), ones, mma_v2(_left(end[2], MMA), ones, none))
    total = total + mma_v2(_left(end[0], MMA), ones, more)
    p_place = (at * BT + slot) * BK + channel
    total = _recounted(total, NEAR)
    of_state = gl.expand_dims(gl.sum(dwhole, 1), 1)
    of_state = of_state * gl.load(whole + at * BK + state_channel)
    total = total + gl.convert_layout(of_state, NEAR)
    gl.store(dgates + p_place, total)
    p_keys = dkeys + (at * (2 * BT) + slot) * BK + channel
    gl.store(p_keys, _recounted(dq, NEAR))
    gl.store(p_keys + BT * BK, _recounted(dk, NEAR))
