"""What a program of the in-place kernels fetches for a tile, as it lies in memory: codes, inputs and records.

A tile is the columns of a head that a program holds; tile i of a sequence is of head i // BLOCKS, its first column
i % BLOCKS * WIDTH. `once`: the columns of a head's first tile, `[LANES, WARPS, 1, COLUMNS]`, the same for all lanes.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.packed_nibbles import load_nibbles, nibble_steps
from lattn_compile.kernels.common.packed_rows import inputs_of
from lattn_compile.kernels.common.packed_tiles import load_codes, load_steps, load_words
from lattn_compile.kernels.common.pieces import columns, lanes

__all__ = ["after", "bring", "codes_of", "inputs_of_tile", "issued", "likely_slot", "records_of"]


@triton.jit
def issued(number):
    """Some number above 0, once the loads before have begun, which are put off otherwise to save registers: no load
    moves over a barrier, and what `after` this number waits for it. NVIDIA only. number: any but -1."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, -1; bar.red.popc.u32 $0, 0, p; }",
        "=r,r",
        [number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def after(threads, x):
    """Pieces `x` as they are, of which the first waits for what `issued` returned."""
    out = (tl.where(threads > 0, x[0], 0.0),)
    for i in tl.static_range(1, len(x)):
        out = out + (x[i],)
    return out


@triton.jit
def bring(p, rows, ROWS: tl.constexpr, APART: tl.constexpr, COUNT: tl.constexpr):
    """Has `rows` rows of COUNT numbers at `p`, at most ROWS, a power of two, and APART numbers from each other, brought
    to the L2 cache, and waits for nothing. NVIDIA only."""
    SIZE: tl.constexpr = p.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = (COUNT * SIZE + 127) // 128
    row = tl.minimum(tl.arange(0, ROWS), rows - 1)[:, None]
    at = p.to(tl.pointer_type(tl.uint8)) + (row * (APART * SIZE) + tl.arange(0, LINES)[None, :] * 128)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def likely_slot(i_seq, indices, slots):
    """The slot of a sequence, int64, as memory has it before the kernel before this one has ended: what to bring to the
    cache, and no more. Read past the nearest cache, which would keep an old index for who asks in earnest."""
    if indices is None:
        given = i_seq.to(tl.int64)
    else:
        given = tl.load(indices + i_seq, cache_modifier=".cg").to(tl.int64)
    return tl.minimum(tl.maximum(given, 0), slots - 1)


@triton.jit
def codes_of(
    tile,
    inside,
    row,
    codes,
    scales,
    blocks,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_CODES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """A tile's codes, and what they are multiplied with."""
    head = tile // BLOCKS
    first = tile % BLOCKS * WIDTH
    p = codes + (row + head) * HEAD_CODES
    p_scales = scales + (row + head) * HEAD_SCALES if HEAD_SCALES else None
    p_blocks = blocks + (row + head) * HEAD_BLOCKS if HEAD_BLOCKS else None
    word = columns(first // 4, WARPS, COLUMNS // 4)
    if WORDS and FORMAT == "nvfp4":
        raw = load_nibbles(p, channel, word, inside, K, V, VECTOR, PIECES, ODD)
        steps = nibble_steps(p_scales, p_blocks, channel, column + first, inside, K, V, VECTOR)
    else:
        if WORDS:
            raw = load_words(p, channel, word, inside, K, V, VECTOR, PIECES, STEP, MASKED or V % WIDTH != 0)
        else:
            raw = load_codes(p, channel, column + first, inside, K, V, VECTOR, PIECES, STEP, FORMAT, TURNED, ODD)
        steps = load_steps(
            p_scales, p_blocks, channel, column + first, first, inside, K, V, WIDTH, PIECES, STEP, FORMAT, BLOCK_K,
            BLOCK_V, VECTOR,
        )  # fmt: skip
    return raw, steps


@triton.jit
def inputs_of_tile(
    tile,
    token,
    v,
    g,
    beta,
    v_token,
    v_head,
    v_column,
    g_token,
    g_head,
    beta_token,
    beta_head,
    channel,
    once,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    DECAY: tl.constexpr,
    ROW: tl.constexpr,
):
    """`inputs_of` a tile; under ROW the decays of its channels are a vector of so many, and not pieces."""
    head = tile // BLOCKS
    x = inputs_of(
        token, head, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel,
        once + tile % BLOCKS * WIDTH, K, V, PIECES, STEP, MASKED, 0 if ROW else DECAY,
    )  # fmt: skip
    if ROW:
        return x[0], tl.load(g + (token * g_token + head * g_head) + tl.arange(0, ROW)), x[2]
    else:
        return x


@triton.jit
def records_of(
    tile,
    inside,
    at_row,
    ring_u,
    ring_g,
    c,
    once,
    HV: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    FLIP: tl.constexpr,
    DECAY: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A tile's `c` records, a group of them over the lanes; nothing of them if not `inside`.

    Returns:
        (us, gs): u of the record before each place, `[LANES, WARPS, 1, COLUMNS]`; and under a decay by head the
        logarithms of the places' own decays, `[LANES]`.
    """
    at_head = at_row + tile // BLOCKS
    column = once + tile % BLOCKS * WIDTH
    us = ()
    gs = ()
    for n in tl.static_range(GROUPS):
        at = lanes(LANES, FLIP) + (n * LANES - 1)
        is_record = (at >= 0) & (at < c) & (column < V) & inside
        us = us + (tl.load(ring_u + at_head * V + (at * (HV * V) + column), mask=is_record, other=0.0),)
        if DECAY == 1:
            place = tl.arange(0, LANES) + n * LANES
            gs = gs + (tl.load(ring_g + at_head + place * HV, mask=(place < c) & inside, other=0.0),)
    return us, gs
