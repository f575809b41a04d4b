"""QDQ of a state at a grid line: the codec of `common/codec.py` on a `[key channels, value columns]` matrix."""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.bf16.triton import round_codes as round_bf16
from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.fp16.triton import round_codes as round_fp16
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.formats.nvfp4.triton import BLOCK
from lattn_compile.kernels.common.codec import block_scales, round_codes, scales

__all__ = ["written"]

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _over_tiles(bits, TILE_K: tl.constexpr, TILE_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """The largest of each tile, at each of its places; a scalar where all is one tile."""
    if TILE_K == BK:
        columns = tl.max(bits, 0)
        if TILE_V == BV:
            return tl.max(columns, 0)
        else:
            tiles = tl.max(tl.reshape(columns, (BV // TILE_V, TILE_V)), 1)
            tiles = tl.broadcast_to(tiles[:, None], (BV // TILE_V, TILE_V))
            return tl.reshape(tiles, (BV,))[None, :]
    else:
        tiles = tl.reshape(bits, (BK // TILE_K, TILE_K, BV // TILE_V, TILE_V))
        most = tl.max(tl.max(tiles, 3), 1)
        most = tl.broadcast_to(most[:, None, :, None], (BK // TILE_K, TILE_K, BV // TILE_V, TILE_V))
        return tl.reshape(most, (BK, BV))


@triton.jit
def _rounded(
    S, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """A state as it is read back from FORMAT: PIECES tensors `[BK, BV]`, side by side.

    Tiles are powers of two; one that is wider than a piece is as wide as all of them.
    """
    written = ()
    if FORMAT == "bf16" or FORMAT == "fp16":
        for i in tl.static_range(PIECES):
            written = written + (round_bf16(S[i]) if FORMAT == "bf16" else round_fp16(S[i]),)
    else:
        tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
        WIDE: tl.constexpr = BLOCK_V > BV
        LARGEST: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        most = 0
        if WIDE:
            for i in tl.static_range(PIECES):
                if FORMAT == "nvfp4":
                    most = tl.maximum(most, _over_tiles(_finite(_magnitude(S[i])), BK, BV, BK, BV))
                else:
                    most = tl.maximum(most, _over_tiles(_magnitude(S[i]), BLOCK_K, BV, BK, BV))
        for i in tl.static_range(PIECES):
            bits = _magnitude(S[i])
            if FORMAT == "nvfp4":
                step, inverse, zero = block_scales(_over_tiles(bits, BLOCK, 1, BK, BV), most)
            else:
                if WIDE:
                    step, inverse, zero = scales(most, LARGEST)
                else:
                    step, inverse, zero = scales(_over_tiles(bits, BLOCK_K, BLOCK_V, BK, BV), LARGEST)
            code, _ = round_codes(tl.fma(S[i], inverse, zero), FORMAT)
            written = written + (code * step,)
    return written


@triton.jit
def written(
    S, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """A state as it is read back from FORMAT: PIECES tensors `[BV, BK]`, transposed, side by side."""
    upright = ()
    for i in tl.static_range(PIECES):
        upright = upright + (tl.trans(S[i]),)
    upright = _rounded(upright, FORMAT, BLOCK_K, BLOCK_V, BK, BV, PIECES)
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.trans(upright[i]),)
    return out


@triton.jit
def _magnitude(S):
    """The bits of magnitudes, which are ordered as they are, NaN on top."""
    return S.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite(bits):
    return tl.where(bits < _INFINITE, bits, 0)
