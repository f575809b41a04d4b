"""What the in-place kernels of both forms do to a state in pieces: update it, and write it back into its slot."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import to_bytes as fp8_to_bytes
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, code_bits
from lattn_compile.kernels.common.codec import group_scale, scales_in_group
from lattn_compile.kernels.common.packed_nibbles import one_step
from lattn_compile.kernels.common.packed_rows import channels
from lattn_compile.kernels.common.packed_tiles import store_plain
from lattn_compile.kernels.common.pieces import over_channels
from lattn_compile.kernels.decode_checkpoints import keep
from lattn_compile.kernels.decode_codec import (
    magnitudes_of_blocks,
    magnitudes_of_groups,
    over_groups,
    tile_scales,
)

__all__ = ["FP8_BYTES", "INT8_BYTES", "keys", "updated", "write_back"]

_INFINITE = tl.constexpr(0x7F800000)
_NAN_BYTE = tl.constexpr(0x7F)  # of E4M3

# Four bytes of two codes each: `code_bits` of both, and the numbers that they were made of, for the signs.
_BYTES = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d, low, high;
    shl.b32 a, $5, 4;
    add.u32 a, a, $1;
    shl.b32 b, $6, 4;
    add.u32 b, b, $2;
    shl.b32 c, $7, 4;
    add.u32 c, c, $3;
    shl.b32 d, $8, 4;
    add.u32 d, d, $4;
    prmt.b32 a, a, b, 0x0040;
    prmt.b32 c, c, d, 0x0040;
    prmt.b32 a, a, c, 0x5410;
    prmt.b32 low, $9, $10, 0x0073;
    prmt.b32 b, $11, $12, 0x0073;
    prmt.b32 low, low, b, 0x5410;
    prmt.b32 high, $13, $14, 0x0073;
    prmt.b32 d, $15, $16, 0x0073;
    prmt.b32 high, high, d, 0x5410;
    shr.u32 low, low, 4;
    lop3.b32 high, high, low, 0x80808080, 0xE4;
    lop3.b32 $0, a, high, 0x88888888, 0xD8;
    }
    """
)


# A word of the integers next to four numbers, ties to even, of which a mask keeps all or none. Adding 1.5 * 2^23
# rounds, and leaves the integer's two's complement in the lowest byte. Two permutations bring two of these each beside
# zeros, which are the signs of highest bytes, so that `or` joins them and `and` drops them.
INT8_BYTES = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    add.rn.f32 a, $1, 0f4B400000;
    add.rn.f32 b, $2, 0f4B400000;
    add.rn.f32 c, $3, 0f4B400000;
    add.rn.f32 d, $4, 0f4B400000;
    prmt.b32 a, a, b, 0xBB40;
    prmt.b32 c, c, d, 0x40BB;
    lop3.b32 $0, a, c, $5, 0xA8;
    }
    """
)

# The same of E4M3 numbers.
FP8_BYTES = tl.constexpr(
    """
    {
    .reg .b16 low, high;
    .reg .b32 bytes;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 bytes, {low, high};
    and.b32 $0, bytes, $5;
    }
    """
)


@triton.jit
def keys(p, norm, scale, channel, K: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """A vector of key channels in pieces, fp32, times two factors, one after the other."""
    x = channels(p, channel, K, PIECES, STEP, MASKED)
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (x[i].to(tl.float32) * norm * scale,)
    return out


@triton.jit
def updated(S, k, u, PIECES: tl.constexpr):
    """`S + k u^T`, u `[LANES, WARPS, 1, COLUMNS]`."""
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.fma(over_channels(k[i]), u, S[i]),)
    return out


@triton.jit
def _int8_bytes(y, keep):
    """Bytes of the integers next to scaled values, ties to even, four at a time."""
    return tl.inline_asm_elementwise(
        INT8_BYTES,
        "=r,r,r,r,r,r,r,r,r",
        [y.to(tl.int32, bitcast=True), keep],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _fp8_bytes(y, keep):
    """Bytes of the E4M3 numbers next to scaled values, ties to even, four at a time."""
    return tl.inline_asm_elementwise(
        FP8_BYTES,
        "=r,f,f,f,f,r,r,r,r",
        [y, keep],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def store_bytes(
    p,
    p_scales,
    S,
    channel,
    column,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Rounds one head's state to int8 or fp8 and stores it, where FAST holds."""
    EACH: tl.constexpr = BLOCK_V % 4 != 0  # four values are not of one tile
    steps, inverses, zeros = tile_scales(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP, True)
    COUNT: tl.constexpr = PIECES // len(steps)
    LANES: tl.constexpr = S[0].shape[2] if FLIP else S[0].shape[0]
    FULL: tl.constexpr = LANES * PIECES * STEP == K and V % WIDTH == 0
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    if TURNED:
        place = p + (v * K + k)
    else:
        place = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
    APART: tl.constexpr = STEP if TURNED else STEP * V
    for tile in tl.static_range(len(steps)):
        if BLOCK_K >= K and BLOCK_V >= WIDTH:
            tl.store(p_scales + first // BLOCK_V, steps[tile])
        else:
            row = k + tile * COUNT * STEP
            mine = (row % BLOCK_K == 0) & (v % BLOCK_V == 0) & (row < K) & (v < V)
            at = row // BLOCK_K * TILES + v // BLOCK_V
            tl.store(p_scales + at, tl.broadcast_to(steps[tile], S[0].shape), mask=mine)
        step = tl.broadcast_to(steps[tile], S[0].shape)
        # A tile that is NaN has codes of 0: its scale says so.
        finite = step == step
        bits = tl.where(EACH | finite, -1, 0)
        for i in tl.static_range(tile * COUNT, (tile + 1) * COUNT):
            y = tl.fma(S[i], inverses[tile], zeros[tile])
            if EACH:
                y = tl.where(finite, y, 0.0)
            if FORMAT == "int8":
                bytes4 = _int8_bytes(y, bits)
            else:
                bytes4 = _fp8_bytes(y, bits)
            if FULL:
                tl.store(place + i * APART, bytes4)
            else:
                tl.store(place + i * APART, bytes4, mask=(k + i * STEP < K) & (v < V))


@triton.jit
def _bytes_of(low, high, FAST: tl.constexpr):
    """Bytes of the codes of scaled values of an even channel and of the one after it."""
    a, b = code_bits(low), code_bits(high)
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    if FAST == 2:
        return tl.inline_asm_elementwise(
            _BYTES,
            "=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [a, b, low, high],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        byte = (a & 7) | ((low >> 28) & 8) | ((b & 7) << 4) | ((high >> 24) & 0x80)
        return byte.to(tl.uint8)


@triton.jit
def store_nibbles(
    p,
    p_scales,
    p_blocks,
    S,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    FLIP: tl.constexpr,
    FAST: tl.constexpr,
):
    """Rounds one head's state to nvfp4 and stores its codes, its blocks' scales and its groups', where FAST holds."""
    amax = magnitudes_of_blocks(S, PIECES, FLIP)
    most = over_groups(amax, FLIP)
    if len(most.shape) > 0:
        top = tl.max(tl.max(tl.max(tl.max(amax, 3), 2), 1), 0)
    else:
        top = most
    if top >= _INFINITE:
        # A block that is no number has codes of 0, its scale says so, and its group goes by what is finite.
        most = magnitudes_of_groups(S, PIECES, FLIP)
        cleared = ()
        for i in tl.static_range(PIECES):
            cleared = cleared + (tl.where(amax < _INFINITE, S[i], 0.0),)
        S = cleared
    group = group_scale(most)
    block, _, inverse, zero = scales_in_group(amax, group, FAST == 2)
    lane = one_step(channel, 1)[:, None, :, None]
    v = column[None, :, None, :]
    mine = (lane == 0) & (v % GROUP == 0) & (v < V)
    tl.store(p_scales + (v // GROUP + lane * 0), tl.broadcast_to(group, amax.shape), mask=mine)
    byte = tl.where(block == block, fp8_to_bytes(block), _NAN_BYTE)
    at = tl.max_contiguous(lane * V + v, (1, 1, 1, VECTOR))
    tl.store(p_blocks + at, byte.to(tl.uint8), mask=(lane * BLOCK < K) & (v < V))
    row = one_step(channel, PIECES)[:, None, :, None]
    at = tl.max_contiguous(row * V + v, (1, 1, 1, VECTOR))
    for i in tl.static_range(PIECES):
        y = tl.fma(S[i], inverse, zero)
        if FLIP:
            low, high = tl.split(tl.permute(y, (1, 2, 3, 0)))
            byte = _bytes_of(low, high, FAST)[None, :, :, :]
        else:
            low, high = tl.split(tl.permute(y, (0, 1, 3, 2)))
            byte = _bytes_of(low, high, FAST)[:, :, None, :]
        tl.store(p + at + i * V, byte, mask=(row + i < (K + 1) // 2) & (v < V))


@triton.jit
def write_back(
    p_codes,
    p_scales,
    p_blocks,
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
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Rounds one head's state and stores its codes and scales. `first`: the program's first column, of WIDTH."""
    if FORMAT == "" or FORMAT == "bf16" or FORMAT == "fp16":
        store_plain(
            p_codes,
            S,
            channel,
            column,
            K,
            V,
            VECTOR,
            PIECES,
            STEP,
            LANES * PIECES * STEP == K and V % WIDTH == 0,
            TURNED,
        )
    elif FAST and FORMAT == "nvfp4":
        store_nibbles(
            p_codes, p_scales, p_blocks, S, channel, column, K, V, VECTOR, PIECES, FLIP, FAST
        )  # fmt: skip
    elif FAST:
        store_bytes(
            p_codes, p_scales, S, channel, column, first, K, V, WIDTH, VECTOR, PIECES, STEP, FLIP, FORMAT, BLOCK_K,
            BLOCK_V, TURNED,
        )  # fmt: skip
    else:
        keep(
            p_codes, p_scales, p_blocks, S, channel, column, K, V, LANES, PIECES, STEP, VECTOR, FLIP, FORMAT, BLOCK_K,
            BLOCK_V, TURNED,
        )  # fmt: skip
