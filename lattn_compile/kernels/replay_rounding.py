"""QDQ of a state at the end of a window: the codec of `common/codec.py` on `[columns / 16, 16, channels]`."""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.bf16.triton import round_codes as round_bf16
from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.fp16.triton import round_codes as round_fp16
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP
from lattn_compile.kernels.common.codec import block_scales, round_codes, scales

__all__ = ["coded", "rounded"]

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _over_columns(most, TILE_V: tl.constexpr, BV: tl.constexpr):
    """Over TILE_V columns of `[BV / 16, 16, parts]`, what broadcasts against it. Axis by axis, and no axis that was
    joined: Triton reduces those wrongly."""
    G: tl.constexpr = most.shape[0]
    PARTS: tl.constexpr = most.shape[2]
    if TILE_V == 1:
        return most
    elif TILE_V < 16:
        tiles = tl.max(tl.reshape(most, (G, 16 // TILE_V, TILE_V, PARTS)), 2)
        tiles = tl.broadcast_to(tiles[:, :, None, :], (G, 16 // TILE_V, TILE_V, PARTS))
        return tl.reshape(tiles, (G, 16, PARTS))
    else:
        most = tl.max(most, 1)
        if TILE_V == BV:
            return tl.max(most, 0)[None, None, :]
        elif TILE_V == 16:
            return most[:, None, :]
        else:
            tiles = tl.max(tl.reshape(most, (BV // TILE_V, TILE_V // 16, PARTS)), 1)
            tiles = tl.broadcast_to(tiles[:, None, :], (BV // TILE_V, TILE_V // 16, PARTS))
            return tl.reshape(tiles, (G, PARTS))[:, None, :]


@triton.jit
def _over_tiles(bits, TILE_V: tl.constexpr, TILE_K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """The largest of each tile of `[BV / 16, 16, BK]`, what broadcasts against it."""
    G: tl.constexpr = bits.shape[0]
    if TILE_K == BK:
        return _over_columns(tl.max(bits, 2)[:, :, None], TILE_V, BV)
    else:
        most = tl.max(tl.reshape(bits, (G, 16, BK // TILE_K, TILE_K)), 3)
        most = tl.broadcast_to(_over_columns(most, TILE_V, BV), (G, 16, BK // TILE_K))
        return tl.reshape(tl.broadcast_to(most[:, :, :, None], (G, 16, BK // TILE_K, TILE_K)), (G, 16, BK))


@triton.jit
def coded(S, FORMAT: tl.constexpr, BLOCK_V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """`S [BV / 16, 16, BK]` as codes, numbers that bf16 holds exactly, and what those of a column are to be multiplied
    with: in a format whose tiles have all channels."""
    tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "bf16")
    if FORMAT == "bf16":
        return round_bf16(S), tl.full([1, 1, 1], 1.0, tl.float32)
    else:
        # A NaN may come with any sign.
        bits = S.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        LARGEST: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        step, inverse, zero = scales(_over_tiles(bits, BLOCK_V, BK, BV, BK), LARGEST)
        code, _ = round_codes(tl.fma(S, inverse, zero), FORMAT)
        return code, step


@triton.jit
def rounded(S, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """`S [BV / 16, 16, BK]` as it is read back from FORMAT; all tiles, powers of two, lie in this program."""
    if FORMAT == "bf16":
        return round_bf16(S)
    elif FORMAT == "fp16":
        return round_fp16(S)
    else:
        tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
        # A NaN may come with any sign.
        bits = S.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if FORMAT == "nvfp4":
            finite = tl.where(bits < _INFINITE, bits, 0)
            group = _over_tiles(finite, min(GROUP, BV), BK, BV, BK)
            step, inverse, zero = block_scales(_over_tiles(bits, 1, BLOCK, BV, BK), group)
        else:
            LARGEST: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
            step, inverse, zero = scales(_over_tiles(bits, BLOCK_V, BLOCK_K, BV, BK), LARGEST)
        code, _ = round_codes(tl.fma(S, inverse, zero), FORMAT)
        return code * step
