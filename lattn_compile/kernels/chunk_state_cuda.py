"""`chunk_state.py`'s `carry` where shared memory and matrix units are told what to do: NVIDIA's, by Triton's Gluon.

A loop over blocks is a chain of products, each of the last one's result, and there are few programs. So a block's work
is spread over eight warps, two times 16 value columns and four parts of tokens or channels, and what one product hands
to the next passes through shared memory: 4 to 16 KiB, between barriers, instead of the registers of one warp, which
would wait for every one of its 2,000 instructions in turn. Keys are in shared memory once and read in both
orientations; the next block's matrices are copied there meanwhile.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import fine_parts, power_of_two, short_parts
from lattn_compile.kernels.chunk_rows import (
    BETA_ROW,
    END_ROW,
    ERASE_ROW,
    KEY_ROW,
    LIFT_ROW,
    MOST_ROW,
    QUERY_ROW,
    START_ROW,
    WHOLE_ROW,
)
from lattn_compile.kernels.common.codec import round_codes, scales
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["carry_back_cuda", "carry_cuda"]

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # so Triton calls it up to 3.6, and since


@gluon.jit
def _copy(target, p, M: gl.constexpr, N: gl.constexpr):
    """Starts to copy fp16 `[M, N]`, contiguous at p, to shared memory."""
    ALONG: gl.constexpr = N // 8
    at: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, M, gl.SliceLayout(1, at))
    j = gl.arange(0, N, gl.SliceLayout(0, at))
    async_copy.async_copy_global_to_shared(target, p + i[:, None] * N + j[None, :])


@gluon.jit
def _copies(
    target, more, p, slot, M: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Starts to copy an operand of one part or two, which follow each other at p, to place `slot` of its buffers."""
    _copy(target.index(slot), p, M, N)
    if PARTS == 2:
        _copy(more.index(slot), p + M * N, M, N)


@gluon.jit
def _values(
    p_v, p_factor, p_decay, base, low, high, slot, channel, column, v_token, V: gl.constexpr, BT: gl.constexpr,
    CHANNEL: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """A block's v, transposed, as it is, and its factors: of rows, of the whole block or its channels, and LIFT."""
    inside = (slot >= low) & (slot < high)
    token = (base + slot).to(gl.int64)
    mask = inside[None, :] & (column < V)[:, None]
    value = gl.load(p_v + token[None, :] * v_token, mask=mask, other=0.0)
    beta, erase = gl.load(p_factor + BETA_ROW * BT + slot), gl.load(p_factor + ERASE_ROW * BT + slot)
    start, end = gl.load(p_factor + START_ROW * BT + slot), gl.load(p_factor + END_ROW * BT + slot)
    key, query = gl.load(p_factor + KEY_ROW * BT + slot), gl.load(p_factor + QUERY_ROW * BT + slot)
    most = gl.load(p_factor + MOST_ROW * BT)
    if CHANNEL:
        whole = gl.load(p_decay + channel)
    else:
        whole = gl.load(p_factor + WHOLE_ROW * BT)
    lift = key
    if LIFT:
        lift = gl.load(p_factor + LIFT_ROW * BT + slot)
    return value, beta, erase, start, end, key, query, most, whole, lift


@gluon.jit
def _warps_most(x, BV: gl.constexpr, N: gl.constexpr, OWN: gl.constexpr):
    """Largest magnitudes of `[BV, N]`, one of a warp's columns for each lane and neighbour: `[BV, 4, 8]`."""
    x = gl.max(gl.reshape(gl.abs(x), [BV, N // 32, 4, 8]), 1)
    return gl.convert_layout(x, OWN, assert_trivial=True)


@gluon.jit
def _largest(value, place, S, unit, BV: gl.constexpr, MMA: gl.constexpr):
    """The largest magnitude of each row of `value` and of `S unit`, `[BV]`, by way of `place`, `[BV, 4]`: behind one
    barrier, where Triton's own maximum of each wants two."""
    ROWS: gl.constexpr = [[16, 0, 0]] if BV == 32 else []
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]], [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[0, 1, 0], [0, 2, 0]] + ROWS, [], [BV, 4, 8],
    )  # fmt: skip
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]] + [[16, 0]] * len(ROWS), [], [BV, 4],
    )  # fmt: skip
    size = _warps_most(S, BV, S.shape[1], OWN)
    factor = gl.convert_layout(unit, gl.SliceLayout(1, gl.SliceLayout(2, OWN)), assert_trivial=True)
    size = size * gl.expand_dims(gl.expand_dims(factor, 1), 2)
    size = gl.maximum(size, _warps_most(value, BV, value.shape[1], OWN))
    place.store(gl.max(size, 2))
    return gl.convert_layout(gl.max(place.load(ALL), 1), gl.SliceLayout(1, MMA), assert_trivial=True)


@gluon.jit(do_not_specialize=["skip", "H", "HV"])
def carry_cuda(
    v, rows, factors, decay, solved, reads, source, starts, lengths, offsets, first, count, o, final, states, updates,
    skip, v_token, v_head, v_column, o_token, o_head, o_column, H, HV,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, VP: gl.constexpr, BT: gl.constexpr,
    DELTA: gl.constexpr, CHANNEL: gl.constexpr, CHUNK: gl.constexpr, TOKENS: gl.constexpr, PER: gl.constexpr,
    FORMAT: gl.constexpr, BV: gl.constexpr, READ: gl.constexpr, KEEP: gl.constexpr, ROWS: gl.constexpr,
    SOLVED: gl.constexpr,
):  # fmt: skip
    """Arguments of `carry`. FORMAT: "" or one of a tile of all key channels and the program's columns, BV = 32; every
    token reads what stood there before the write. ROWS: matrices of a block in `rows`. SOLVED: parts of `solved`,
    2 or 3. A matrix makes room in shared memory for the next block's as soon as it was used.

    Grid: (VP / BV * HV * N,), BV / 4 warps.
    """
    SQUARE: gl.constexpr = BT * BK
    PARTS: gl.constexpr = 2 if CHANNEL else 1
    NV: gl.constexpr = VP // BV
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[BV // 16, 4], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(1, MMA)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    pid = gl.program_id(0)
    i_v, i_head, i_seq = pid % NV, (pid // NV % HV).to(gl.int64), pid // (NV * HV)
    i_key = i_head // (HV // H)
    blocks, block = gl.load(count + i_seq), gl.load(first + i_seq)
    begin, length = gl.load(starts + i_seq), gl.load(lengths + i_seq).to(gl.int32)
    lead = (gl.load(offsets + i_seq) % CHUNK).to(gl.int32)

    channel, slot = gl.arange(0, BK, ROW), gl.arange(0, BT, ROW)
    column = i_v * BV + gl.arange(0, BV, COLUMN)
    p_state = (i_seq.to(gl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    m_state = (channel < K)[None, :] & (column < V)[:, None]
    S = gl.load(source + p_state, mask=m_state, other=0.0)
    unit = gl.full([BV], 1.0, gl.float32, COLUMN)
    p_v = v + begin * v_token + i_head * v_head + column[:, None] * v_column
    p_o = o
    if READ:
        p_o = o + begin * o_token + i_head * o_head + column[:, None] * o_column

    # By head keys are used first and last.
    KEYS: gl.constexpr = 1 if CHANNEL else 2
    keys = gl.allocate_shared_memory(gl.float16, [KEYS, BT, BK], SHARED)
    T = gl.allocate_shared_memory(gl.float16, [1, BT, BT], SHARED)
    more_T = gl.allocate_shared_memory(gl.float16, [1, BT, BT], SHARED)
    least_T = more_T
    if SOLVED == 3:
        least_T = gl.allocate_shared_memory(gl.float16, [1, BT, BT], SHARED)
    queries, P, more_keys, out, more_out = keys, T, keys, keys, keys
    if READ:
        queries = gl.allocate_shared_memory(gl.float16, [1, BT, BK], SHARED)
        P = gl.allocate_shared_memory(gl.float16, [1, BT, BT], SHARED)
    if CHANNEL:
        more_keys = gl.allocate_shared_memory(gl.float16, [1, BT, BK], SHARED)
        out = gl.allocate_shared_memory(gl.float16, [1, BT, BK], SHARED)
        more_out = gl.allocate_shared_memory(gl.float16, [1, BT, BK], SHARED)
    # What warps hand to each other has a place for each part: Triton puts a barrier between two writes to one.
    high_S_at = gl.allocate_shared_memory(gl.float16, [BV, BK], SHARED)
    low_S_at = gl.allocate_shared_memory(gl.float16, [BV, BK], SHARED)
    high_r_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    low_r_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    least_r_at = low_r_at
    if SOLVED == 3:
        least_r_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    high_end_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    low_end_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    high_u_at, low_u_at = high_end_at, low_end_at
    if READ:
        high_u_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
        low_u_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    most_at = gl.allocate_shared_memory(gl.float32, [BV, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    at = block.to(gl.int64) * HV + i_head
    # Of rows, one place a value head under CHANNEL, else one a key head; their distance from block to block.
    row_at, along = at, HV
    if not CHANNEL:
        row_at, along = block.to(gl.int64) * H + i_key, H
    base, low, high, _ = extent(skip, lead, length, CHUNK, TOKENS, PER)
    p_rows = rows + row_at * (ROWS * SQUARE)
    p_P, p_T = p_rows, p_rows
    if READ:
        p_P = reads + at * (BT * BT)
    if DELTA:
        p_T = solved + at * (SOLVED * BT * BT)
    if blocks > 0:
        if DELTA or not CHANNEL:
            _copies(keys, more_keys, p_rows, 0, BT, BK, PARTS)
        if READ:
            _copy(queries.index(0), p_rows + (4 if CHANNEL else 1) * SQUARE, BT, BK)
        async_copy.commit_group()
        if DELTA:
            _copies(T, more_T, p_T, 0, BT, BT, 2)
            if SOLVED == 3:
                _copy(least_T.index(0), p_T + 2 * BT * BT, BT, BT)
        async_copy.commit_group()
    at_factor = gl.where(blocks > 0, at, 0)
    p_decay = factors
    if CHANNEL:
        p_decay = decay + at_factor * BK
    coming = _values(
        p_v, factors + at_factor * (10 * BT), p_decay, base, low, gl.where(blocks > 0, high, low), slot, channel,
        column, v_token, V, BT, CHANNEL, KEEP and DELTA,
    )  # fmt: skip
    no_tokens = gl.zeros([BV, BT], gl.float32, MMA)
    for j in range(blocks):
        value, beta, erase, start, end, key, query, most, whole, lift = coming
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        more = gl.where(j + 1 < blocks, 1, 0)
        p_out, p_reads = p_rows, p_P
        p_rows = rows + (row_at + more * along) * (ROWS * SQUARE)
        if READ:
            p_P = reads + (at + more * HV) * (BT * BT)
        if DELTA:
            p_T = solved + (at + more * HV) * (SOLVED * BT * BT)
        key_now = j - j // KEYS * KEYS
        async_copy.wait_group(1)
        _barrier()
        # What this block takes last; of the next one what it takes first, when that was used.
        if CHANNEL:
            _copies(out, more_out, p_out + 2 * SQUARE, 0, BT, BK, 2)
        else:
            _copy(keys.index(1 - key_now), p_rows, BT, BK)
        if READ:
            _copy(P.index(0), p_reads, BT, BT)
        async_copy.commit_group()
        next_base, next_low, next_high, _ = extent(j + more + skip, lead, length, CHUNK, TOKENS, PER)
        if CHANNEL:
            p_decay = decay + (at + more * HV) * BK
        coming = _values(
            p_v, factors + (at + more * HV) * (10 * BT), p_decay, next_base, next_low, next_high, slot, channel,
            column, v_token, V, BT, CHANNEL, KEEP and DELTA,
        )  # fmt: skip
        if KEEP:
            p_kept = states + (at * VP + column[:, None]) * BK + channel[None, :]
            gl.store(p_kept, S * unit[:, None])

        value = value.to(gl.float32) * beta[None, :]
        new, down = power_of_two(_largest(value, most_at, S, unit, BV, MMA))
        value = value * down[:, None]
        S = S * (unit * down)[:, None]
        unit = new
        high_S, low_S = fine_parts(S)
        high_S_at.store(high_S)
        low_S_at.store(low_S)
        r = value
        # The right sides of products are read before the barrier that the left ones wait for.
        if DELTA:
            o_keys = keys.index(key_now).permute((1, 0)).load(RIGHT)
        if READ:
            o_queries = queries.index(0).permute((1, 0)).load(RIGHT)
        o_S = high_S_at.load(LEFT)
        if DELTA:
            o_low = low_S_at.load(LEFT)
            seen = mma_v2(o_low, o_keys, no_tokens)
            if CHANNEL:
                seen = mma_v2(o_S, more_keys.index(0).permute((1, 0)).load(RIGHT), seen)
            seen = mma_v2(o_S, o_keys, no_tokens) + seen
            r = value - seen * erase[None, :]
            if SOLVED == 3:
                r_parts = short_parts(r)
                least_r_at.store(r_parts[2])
            else:
                r_parts = fine_parts(r)
            high_r_at.store(r_parts[0])
            low_r_at.store(r_parts[1])
        read = no_tokens
        if READ:
            read = mma_v2(o_S, o_queries, no_tokens) * start[None, :]
        async_copy.wait_group(1)
        _barrier()
        if DELTA and CHANNEL:
            _copies(keys, more_keys, p_rows, 0, BT, BK, PARTS)
        if READ:
            _copy(queries.index(0), p_rows + (4 if CHANNEL else 1) * SQUARE, BT, BK)
        async_copy.commit_group()
        if DELTA:
            o_T = T.index(0).permute((1, 0)).load(RIGHT)
            o_more_T = more_T.index(0).permute((1, 0)).load(RIGHT)
        if DELTA:
            o_r, o_more = high_r_at.load(LEFT), low_r_at.load(LEFT)
            r = mma_v2(o_r, o_T, no_tokens)
            x = mma_v2(o_more, o_T, no_tokens)
            x = mma_v2(o_r, o_more_T, x)
            if SOLVED == 3:
                lowest = mma_v2(least_r_at.load(LEFT), o_T, no_tokens)
                lowest = mma_v2(o_r, least_T.index(0).permute((1, 0)).load(RIGHT), lowest)
                x = x + mma_v2(o_more, o_more_T, lowest)
            r = r + x
        if KEEP:
            u = r * unit[:, None]
            if DELTA:
                u = u * lift[None, :]
            gl.store(updates + at * (BT * VP) + slot[None, :] * VP + column[:, None], u)
        u = r * key[None, :]
        high_u, low_u = fine_parts(u * end[None, :])
        high_end_at.store(high_u)
        low_end_at.store(low_u)
        if READ:
            high_u, low_u = fine_parts(u)
            high_u_at.store(high_u)
            low_u_at.store(low_u)
        less = ((254 << 23) - most.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
        if CHANNEL:
            S = S * (whole * less)[None, :]
        else:
            S = S * (whole * less)
        async_copy.wait_group(1)
        _barrier()
        if DELTA:
            _copies(T, more_T, p_T, 0, BT, BT, 2)
            if SOLVED == 3:
                _copy(least_T.index(0), p_T + 2 * BT * BT, BT, BT)
        async_copy.commit_group()
        if CHANNEL:
            o_out = out.index(0).load(RIGHT)
        else:
            o_out = keys.index(key_now).load(RIGHT)
        if READ:
            o_P = P.index(0).permute((1, 0)).load(RIGHT)
        o_u = high_end_at.load(LEFT)
        if CHANNEL:
            S = mma_v2(o_u, more_out.index(0).load(RIGHT), S)
        S = mma_v2(low_end_at.load(LEFT), o_out, S)
        S = mma_v2(o_u, o_out, S)
        if READ:
            more_read = mma_v2(low_u_at.load(LEFT), o_P, no_tokens)
            more_read = mma_v2(high_u_at.load(LEFT), o_P, more_read)
            read = (read + more_read * most) * query[None, :] * unit[:, None]
            token = (base + slot).to(gl.int64)
            m_out = inside[None, :] & (column < V)[:, None]
            gl.store(p_o + token[None, :] * o_token, read.to(o.dtype.element_ty), mask=m_out)
        unit = unit * most
        if FORMAT != "":  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                S = S * unit[:, None]
                unit = gl.full([BV], 1.0, gl.float32, COLUMN)
                largest = gl.max(gl.max(S.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
                step, inverse, zero = scales(largest, INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST)
                rounded = round_codes(gl.fma(S, inverse, zero), FORMAT)
                S = rounded[0] * step
        at += HV
        row_at += along

    async_copy.wait_group(0)  # of the last block's again
    gl.store(final + p_state, S * unit[:, None], mask=m_state)


@gluon.jit
def _cotangents(
    p_o, p_factor, p_decay, base, low, high, line, slot, channel, column, o_token, V: gl.constexpr, BT: gl.constexpr,
    CHANNEL: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """A block's gradients of outputs that it reads itself, transposed, and its factors."""
    read = (slot >= low) & (slot < high)
    if AFTER:
        read = read & ((slot != high - 1) | (line == 0))
    token = (base + slot).to(gl.int64)
    D = gl.load(p_o + token[None, :] * o_token, mask=read[None, :] & (column < V)[:, None], other=0.0)
    beta, erase = gl.load(p_factor + BETA_ROW * BT + slot), gl.load(p_factor + ERASE_ROW * BT + slot)
    start, end = gl.load(p_factor + START_ROW * BT + slot), gl.load(p_factor + END_ROW * BT + slot)
    key, query = gl.load(p_factor + KEY_ROW * BT + slot), gl.load(p_factor + QUERY_ROW * BT + slot)
    most = gl.load(p_factor + MOST_ROW * BT)
    if CHANNEL:
        whole = gl.load(p_decay + channel)
    else:
        whole = gl.load(p_factor + WHOLE_ROW * BT)
    return D, beta, erase, start, end, key, query, most, whole


@gluon.jit(do_not_specialize=["scale", "skip", "H", "HV"])
def carry_back_cuda(
    q, grad_o, rows, factors, decay, solved, reads, source, starts, lengths, offsets, first, count, final, cotangents,
    drhs, dv, scale, skip, q_token, q_head, q_channel, o_token, o_head, o_column, dv_token, dv_head, dv_column, H, HV,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, VP: gl.constexpr, BT: gl.constexpr,
    DELTA: gl.constexpr, CHANNEL: gl.constexpr, NORM: gl.constexpr, AFTER: gl.constexpr,
    CHUNK: gl.constexpr, TOKENS: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`chunk_state_back.py`'s `carry_back`, likewise; rows, solved and reads as `carry_cuda` takes them, reads in two
    parts, and queries too under CHANNEL.

    Grid: (VP / 32 * HV * N,), 8 warps.
    """
    gl.static_assert(CHANNEL or STAGES == 2)
    BV: gl.constexpr = 32
    SQUARE: gl.constexpr = BT * BK
    PARTS: gl.constexpr = 2 if CHANNEL else 1
    ROWS: gl.constexpr = 6 if CHANNEL else 2
    NV: gl.constexpr = VP // BV
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 4], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(1, MMA)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    pid = gl.program_id(0)
    i_v, i_head, i_seq = pid % NV, (pid // NV % HV).to(gl.int64), pid // (NV * HV)
    i_key = i_head // (HV // H)
    blocks, block = gl.load(count + i_seq), gl.load(first + i_seq)
    begin, length = gl.load(starts + i_seq), gl.load(lengths + i_seq).to(gl.int32)
    lead = (gl.load(offsets + i_seq) % CHUNK).to(gl.int32)

    channel, slot = gl.arange(0, BK, ROW), gl.arange(0, BT, ROW)
    column = i_v * BV + gl.arange(0, BV, COLUMN)
    p_state = (i_seq.to(gl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    m_state = (channel < K)[None, :] & (column < V)[:, None]
    dS = gl.load(source + p_state, mask=m_state, other=0.0)
    unit = gl.full([BV], 1.0, gl.float32, COLUMN)
    p_q = q + begin * q_token + i_key * q_head + channel * q_channel
    p_o = grad_o + begin * o_token + i_head * o_head + column[:, None] * o_column
    p_dv = dv + begin * dv_token + i_head * dv_head + column[:, None] * dv_column

    keys = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
    queries = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
    P = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BT], SHARED)
    more_P = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BT], SHARED)
    T, more_T, least_T, more_keys, more_queries, out, more_out = P, P, P, keys, keys, keys, keys
    if DELTA:
        T = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BT], SHARED)
        more_T = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BT], SHARED)
        least_T = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BT], SHARED)
    if CHANNEL:
        more_keys = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
        more_queries = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
        out = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
        more_out = gl.allocate_shared_memory(gl.float16, [STAGES, BT, BK], SHARED)
    # Every part has a place of its own, as in `carry_cuda`.
    high_S_at = gl.allocate_shared_memory(gl.float16, [BV, BK], SHARED)
    low_S_at = gl.allocate_shared_memory(gl.float16, [BV, BK], SHARED)
    high_d_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    low_d_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    high_start_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    low_start_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    high_u_at, middle_u_at, low_u_at, high_r_at, low_r_at = high_d_at, high_d_at, high_d_at, high_d_at, high_d_at
    if DELTA:
        high_u_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
        middle_u_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
        low_u_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
        high_r_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
        low_r_at = gl.allocate_shared_memory(gl.float16, [BV, BT], SHARED)
    most_at = gl.allocate_shared_memory(gl.float32, [BV, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    at = (block + blocks - 1).to(gl.int64) * HV + i_head
    row_at, along = at, HV
    if not CHANNEL:
        row_at, along = (block + blocks - 1).to(gl.int64) * H + i_key, H
    base, low, high, line = extent(blocks - 1 + skip, lead, length, CHUNK, TOKENS, PER)
    p_rows, p_P = rows + row_at * (ROWS * SQUARE), reads + at * (2 * BT * BT)
    p_T = p_P
    if DELTA:
        p_T = solved + at * (3 * BT * BT)
    if blocks > 0:
        if CHANNEL:
            _copies(out, more_out, p_rows + 2 * SQUARE, 0, BT, BK, 2)
        _copies(P, more_P, p_P, 0, BT, BT, 2)
        async_copy.commit_group()
        if DELTA:
            _copies(T, more_T, p_T, 0, BT, BT, 2)
            _copy(least_T.index(0), p_T + 2 * BT * BT, BT, BT)
        if STAGES == 2:
            if DELTA or not CHANNEL:
                _copies(keys, more_keys, p_rows, 0, BT, BK, PARTS)
            _copies(queries, more_queries, p_rows + (4 if CHANNEL else 1) * SQUARE, 0, BT, BK, PARTS)
        async_copy.commit_group()
    at_factor = gl.where(blocks > 0, at, 0)
    p_decay = factors
    if CHANNEL:
        p_decay = decay + at_factor * BK
    coming = _cotangents(
        p_o, factors + at_factor * (10 * BT), p_decay, base, low, gl.where(blocks > 0, high, low), line.to(gl.int32),
        slot, channel, column, o_token, V, BT, CHANNEL, AFTER,
    )  # fmt: skip
    no_tokens = gl.zeros([BV, BT], gl.float32, MMA)
    for back in range(blocks):
        j = blocks - 1 - back
        now = back - back // STAGES * STAGES
        then = back + 1 - (back + 1) // STAGES * STAGES
        D, beta, erase, start, end, key, query, most, whole = coming
        base, low, high, line = extent(j + skip, lead, length, CHUNK, TOKENS, PER)
        inside = (slot >= low) & (slot < high)
        more = gl.where(j > 0, 1, 0)
        p_keys = p_rows
        p_rows = rows + (row_at - more * along) * (ROWS * SQUARE)
        p_P = reads + (at - more * HV) * (2 * BT * BT)
        if DELTA:
            p_T = solved + (at - more * HV) * (3 * BT * BT)
        async_copy.wait_group(1 if STAGES == 1 else 0)
        _barrier()
        if STAGES == 1:  # as in `carry_cuda`
            if DELTA or not CHANNEL:
                _copies(keys, more_keys, p_keys, 0, BT, BK, PARTS)
            _copies(queries, more_queries, p_keys + (4 if CHANNEL else 1) * SQUARE, 0, BT, BK, PARTS)
            async_copy.commit_group()
        if STAGES == 2:
            if CHANNEL:
                _copies(out, more_out, p_rows + 2 * SQUARE, then, BT, BK, 2)
            _copies(P, more_P, p_P, then, BT, BT, 2)
            if DELTA:
                _copies(T, more_T, p_T, then, BT, BT, 2)
                _copy(least_T.index(then), p_T + 2 * BT * BT, BT, BT)
            if DELTA or not CHANNEL:
                _copies(keys, more_keys, p_rows, then, BT, BK, PARTS)
            _copies(queries, more_queries, p_rows + (4 if CHANNEL else 1) * SQUARE, then, BT, BK, PARTS)
            async_copy.commit_group()
        next_base, next_low, next_high, next_line = extent(j - more + skip, lead, length, CHUNK, TOKENS, PER)
        if CHANNEL:
            p_decay = decay + (at - more * HV) * BK
        coming = _cotangents(
            p_o, factors + (at - more * HV) * (10 * BT), p_decay, next_base, next_low, next_high,
            next_line.to(gl.int32), slot, channel, column, o_token, V, BT, CHANNEL, AFTER,
        )  # fmt: skip
        dS = dS * unit[:, None]
        if AFTER:  # noqa: SIM102 # one is known when compiled, the other is not
            if line:
                last = (base + high - 1).to(gl.int64)
                b_q = gl.load(p_q + last * q_token, mask=channel < K, other=0.0).to(gl.float32)
                if NORM:
                    b_q = b_q * rstd(gl.sum(b_q * b_q, 0))
                seen = gl.load(
                    grad_o + (begin + last) * o_token + i_head * o_head + column * o_column, mask=column < V, other=0.0
                )
                dS = dS + seen.to(gl.float32)[:, None] * (b_q * scale)[None, :]
        gl.store(cotangents + (at * VP + column[:, None]) * BK + channel[None, :], dS)

        d = D.to(gl.float32) * query[None, :]
        unit, down = power_of_two(_largest(d, most_at, dS, gl.full([BV], 1.0, gl.float32, COLUMN), BV, MMA))
        d = d * down[:, None]
        dS = dS * down[:, None]
        high_S, low_S = fine_parts(dS)
        high_S_at.store(high_S)
        low_S_at.store(low_S)
        high_d, low_d = fine_parts(d)
        high_d_at.store(high_d)
        low_d_at.store(low_d)
        # The right sides of products are read before the barrier that the left ones wait for.
        if CHANNEL:
            o_out = out.index(now).permute((1, 0)).load(RIGHT)
        else:
            o_out = keys.index(now).permute((1, 0)).load(RIGHT)
        o_P = P.index(now).load(RIGHT)
        o_S = high_S_at.load(LEFT)
        dr = no_tokens
        if CHANNEL:
            dr = mma_v2(o_S, more_out.index(now).permute((1, 0)).load(RIGHT), no_tokens)
        dr = mma_v2(low_S_at.load(LEFT), o_out, dr)
        dr = (mma_v2(o_S, o_out, no_tokens) + dr) * end[None, :]
        o_d = high_d_at.load(LEFT)
        x = mma_v2(low_d_at.load(LEFT), o_P, no_tokens)
        x = mma_v2(o_d, more_P.index(now).load(RIGHT), x)
        dr = (mma_v2(o_d, o_P, dr) + x) * key[None, :]
        if DELTA:
            high_u, middle_u, low_u = short_parts(dr)
            high_u_at.store(high_u)
            middle_u_at.store(middle_u)
            low_u_at.store(low_u)
        if STAGES == 1:
            async_copy.wait_group(1)
            _barrier()
            if CHANNEL:
                _copies(out, more_out, p_rows + 2 * SQUARE, 0, BT, BK, 2)
            _copies(P, more_P, p_P, 0, BT, BT, 2)
            async_copy.commit_group()
        if DELTA:
            o_T, o_more_T = T.index(now).load(RIGHT), more_T.index(now).load(RIGHT)
            o_u, o_more = high_u_at.load(LEFT), middle_u_at.load(LEFT)
            lowest = mma_v2(low_u_at.load(LEFT), o_T, no_tokens)
            dr = mma_v2(o_u, o_T, no_tokens)
            lowest = mma_v2(o_u, least_T.index(now).load(RIGHT), lowest)
            x = mma_v2(o_more, o_T, no_tokens)
            lowest = mma_v2(o_more, o_more_T, lowest)
            x = mma_v2(o_u, o_more_T, x)
            dr = dr + (x + lowest)
        dr = dr * most
        true = dr * unit[:, None]
        gl.store(drhs + at * (BT * VP) + slot[None, :] * VP + column[:, None], true)
        value = (true * beta[None, :]).to(dv.dtype.element_ty)
        token = (base + slot).to(gl.int64)
        gl.store(p_dv + token[None, :] * dv_token, value, mask=inside[None, :] & (column < V)[:, None])

        if CHANNEL:
            dS = dS * whole[None, :]
        else:
            dS = dS * whole
        high_d, low_d = fine_parts(d * start[None, :])
        high_start_at.store(high_d)
        low_start_at.store(low_d)
        if DELTA:
            high_u, low_u = fine_parts(dr * -erase[None, :])
            high_r_at.store(high_u)
            low_r_at.store(low_u)
        if STAGES == 1:
            async_copy.wait_group(1)
            _barrier()
            if DELTA:
                _copies(T, more_T, p_T, 0, BT, BT, 2)
                _copy(least_T.index(0), p_T + 2 * BT * BT, BT, BT)
            async_copy.commit_group()
        o_q = queries.index(now).load(RIGHT)
        if DELTA:
            o_keys = keys.index(now).load(RIGHT)
        o_d = high_start_at.load(LEFT)
        if CHANNEL:
            dS = mma_v2(o_d, more_queries.index(now).load(RIGHT), dS)
        dS = mma_v2(low_start_at.load(LEFT), o_q, dS)
        dS = mma_v2(o_d, o_q, dS)
        if DELTA:
            o_u = high_r_at.load(LEFT)
            if CHANNEL:
                dS = mma_v2(o_u, more_keys.index(now).load(RIGHT), dS)
            dS = mma_v2(low_r_at.load(LEFT), o_keys, dS)
            dS = mma_v2(o_u, o_keys, dS)
        at -= HV
        row_at -= along

    async_copy.wait_group(0)  # of the first block's again
    gl.store(final + p_state, dS * unit[:, None], mask=m_state)
