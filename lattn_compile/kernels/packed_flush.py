"""The end of a window on the device: records written to a stored state; and `lattn::flush_`, which is nothing else."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import exps, log_decays_of
from lattn_compile.kernels.common.packed_rows import slot_of
from lattn_compile.kernels.common.packed_tiles import decoded, load_codes, load_steps
from lattn_compile.kernels.common.pieces import columns, dot, key_channels, scaled
from lattn_compile.kernels.decode_codec import quantize
from lattn_compile.kernels.packed_write import keys, updated, write_back

__all__ = ["flush", "start", "store", "ticket", "walked"]


@triton.jit
def ticket(cursor, PROGRAMS: tl.constexpr):
    """A slot's cursor, and whether all other programs of the sequence have read it: then this one may write it.

    The count lies in the upper half of the number, above a cursor of 16 bits, and goes when the last one writes.
    """
    if PROGRAMS == 1:
        at = tl.load(cursor)
        return at, at == at
    else:
        old = tl.atomic_add(cursor, 1 << 16)
        low = old & 0xFFFF
        at = tl.where(low == 0xFFFF, -1, low)
        return at, (((old - at) >> 16) & 0xFFFF) == PROGRAMS - 1


@triton.jit
def walked(
    S,
    records,
    p_k,
    p_u,
    p_g,
    p_v,
    p_beta,
    channel,
    column,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    MASKED: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    TWO: tl.constexpr,
):
    """The state after `records` records of a slot's ring, of which one head's begin at the pointers.

    TWO: the recurrence from the raw v and beta; else what was added is in u.
    """
    for i in range(records):
        b_k = keys(p_k + i * (H * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
        if DECAY == 1:
            S = scaled(S, exp(tl.load(p_g + i * HV)), False, PIECES)
        if DECAY == 2:
            g = log_decays_of(p_g + i * (HV * K), None, None, 0.0, 0, channel, K, PIECES, STEP, MASKED, 0)
            S = scaled(S, exps(g, PIECES), True, PIECES)
        if TWO:
            u = tl.load(p_v + i * (HV * V) + column, mask=column < V, other=0.0)
            if DELTA:
                u = u - dot(S, b_k, PIECES, FLIP)
            if p_beta is not None:
                u = tl.load(p_beta + i * HV) * u
        else:
            u = tl.load(p_u + i * (HV * V) + column, mask=column < V, other=0.0)
        S = updated(S, b_k, u, PIECES)
    return S


@triton.jit
def start(
    codes,
    scales,
    blocks,
    channel,
    column,
    first,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
):
    """A stored state, fp32; zeros where `inside` is not."""
    raw = load_codes(codes, channel, column, inside, K, V, VECTOR, PIECES, STEP, FORMAT)
    steps = load_steps(
        scales, blocks, channel, column, first, inside, K, V, WIDTH, PIECES, STEP, FORMAT, BLOCK_K, BLOCK_V, VECTOR
    )
    return decoded(raw, steps, channel, PIECES, FORMAT, FAST)


@triton.jit
def store(
    codes,
    scales,
    blocks,
    read_codes,
    read_scales,
    read_blocks,
    S,
    channel,
    column,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
):
    """Writes a state as a window's end does: rounded; in two_precision as the anchor, and rounded as its read copy."""
    if TWO:
        if ANCHOR != "":
            S, _, _ = quantize(S, ANCHOR, 1, 1, PIECES, STEP, FLIP)
        write_back(
            codes, None, None, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
            FLIP, ANCHOR, 1, 1,
            False,
        )  # fmt: skip
        write_back(
            read_codes, read_scales, read_blocks, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
            FLIP, FORMAT, BLOCK_K, BLOCK_V, FAST,
        )  # fmt: skip
    else:
        write_back(
            codes, scales, blocks, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, FORMAT,
            BLOCK_K, BLOCK_V, FAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "slots", "padding"])
def flush(
    codes,
    scales,
    blocks,
    read_codes,
    read_scales,
    read_blocks,
    ring_k,
    ring_u,
    ring_g,
    ring_v,
    ring_beta,
    cursor,
    indices,
    slots,
    padding,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    WINDOW: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
    HEAD_CODES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
):
    """Pending records of slots into their states, as `step` takes them all. Grid: (column blocks * HV * N,)."""
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    i_block, head, i_seq = i % BLOCKS, i // BLOCKS % HV, i // (BLOCKS * HV)
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    slot, live, _ = slot_of(i_seq, indices, padding, slots)
    if live == 0:
        return
    at, last = ticket(cursor + slot, BLOCKS * HV)
    if last:
        tl.store(cursor + slot, tl.minimum(at, 0))
    if at <= 0:
        return
    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    column = columns(i_block * WIDTH, WARPS, COLUMNS)
    row = slot * HV + head
    at_head = slot * (WINDOW - 1) * HV + head
    p_codes = codes + row * (K * V if TWO else HEAD_CODES)
    p_scales = scales
    p_blocks = blocks
    p_read = read_codes
    p_read_scales = read_scales
    p_read_blocks = read_blocks
    if TWO:
        p_read = read_codes + row * HEAD_CODES
        if HEAD_SCALES:
            p_read_scales = read_scales + row * HEAD_SCALES
        if HEAD_BLOCKS:
            p_read_blocks = read_blocks + row * HEAD_BLOCKS
        S = start(
            p_codes, None, None, channel, column, 0, live, K, V, WIDTH, VECTOR, PIECES, STEP, ANCHOR, 1, 1, False
        )  # fmt: skip
    else:
        if HEAD_SCALES:
            p_scales = scales + row * HEAD_SCALES
        if HEAD_BLOCKS:
            p_blocks = blocks + row * HEAD_BLOCKS
        S = start(
            p_codes, p_scales, p_blocks, channel, column, i_block * WIDTH, live, K, V, WIDTH, VECTOR, PIECES, STEP,
            FORMAT,
            BLOCK_K, BLOCK_V, FAST,
        )  # fmt: skip
    S = walked(
        S, at, ring_k + slot * (WINDOW - 1) * (H * K) + head // (HV // H) * K, ring_u + at_head * V,
        ring_g + at_head * (K if DECAY == 2 else 1) if DECAY else None, ring_v + at_head * V if TWO else None,
        ring_beta + at_head if ring_beta is not None else None, channel, column, H, HV, K, V, PIECES, STEP, FLIP,
        MASKED, DELTA, DECAY, TWO,
    )  # fmt: skip
    store(
        p_codes, p_scales, p_blocks, p_read, p_read_scales, p_read_blocks, S, channel, column, i_block * WIDTH, K, V,
        WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ANCHOR, FORMAT, BLOCK_K, BLOCK_V, FAST, TWO,
    )  # fmt: skip
