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

__all__ = ["written", "written_groups"]

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
def _over_columns(most, G: tl.constexpr, C: tl.constexpr, TILE_V: tl.constexpr):
    """Of `[G, 16, C]` the largest over TILE_V columns, the second axis and then the first; it broadcasts."""
    if TILE_V == 1:
        return most
    elif TILE_V < 16:
        tiles = tl.max(tl.reshape(most, (G, 16 // TILE_V, TILE_V, C)), 2)
        tiles = tl.broadcast_to(tiles[:, :, None, :], (G, 16 // TILE_V, TILE_V, C))
        return tl.reshape(tiles, (G, 16, C))
    else:
        tiles = tl.max(most, 1)
        if TILE_V == 16 * G:
            if G > 1:
                return tl.max(tiles, 0)[None, None, :]
            else:
                return tiles[:, None, :]
        elif TILE_V > 16:
            SPAN: tl.constexpr = TILE_V // 16
            tiles = tl.max(tl.reshape(tiles, (G // SPAN, SPAN, C)), 1)
            tiles = tl.reshape(tl.broadcast_to(tiles[:, None, :], (G // SPAN, SPAN, C)), (G, C))
            return tiles[:, None, :]
        else:
            return tiles[:, None, :]


@triton.jit
def _most(S, FINITE: tl.constexpr, G: tl.constexpr, W: tl.constexpr, TILE_K: tl.constexpr):
    """Magnitudes of pieces `[G, 16, W]`, the largest of each TILE_K channels: one tensor a piece, or one for all of
    those that share a tile."""
    out = ()
    C: tl.constexpr = W // TILE_K if TILE_K < W else 1
    SHARE: tl.constexpr = TILE_K // W if TILE_K > W else 1
    for i in tl.static_range(len(S)):
        bits = _magnitude(S[i])
        if FINITE:
            bits = _finite(bits)
        if C > 1:
            most = tl.max(tl.reshape(bits, (G, 16, C, TILE_K)), 3)
        else:
            most = tl.max(bits, 2)[:, :, None]
        if i % SHARE == 0:
            shared = most
        else:
            shared = tl.maximum(shared, most)
        if i % SHARE == SHARE - 1:
            out = out + (shared,)
    return out


@triton.jit
def _along(x, W: tl.constexpr, C: tl.constexpr):
    """What C tiles of channels share, at each of a piece's W channels."""
    if C == 1:
        return x
    else:
        M: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        return tl.reshape(tl.broadcast_to(x[:, :, :, None], (M, N, C, W // C)), (M, N, W))


@triton.jit
def written_groups(
    S, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BK: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A state as it is read back from FORMAT: pieces `[G, 16, W]`, groups of 16 value columns and W key channels.

    Tiles are powers of two and not wider than all groups.
    """
    out = ()
    if FORMAT == "bf16" or FORMAT == "fp16":
        for i in tl.static_range(len(S)):
            out = out + (round_bf16(S[i]) if FORMAT == "bf16" else round_fp16(S[i]),)
    else:
        tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
        LARGEST: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        TILE_K: tl.constexpr = BLOCK if FORMAT == "nvfp4" else BLOCK_K
        TILE_V: tl.constexpr = 1 if FORMAT == "nvfp4" else BLOCK_V
        C: tl.constexpr = W // TILE_K if TILE_K < W else 1
        SHARE: tl.constexpr = TILE_K // W if TILE_K > W else 1
        most = _most(S, False, G, W, TILE_K)
        if FORMAT == "nvfp4":
            group = _over_columns(_most(S, True, G, W, BK)[0], G, 1, BLOCK_V)
        for i in tl.static_range(len(S)):
            if i % SHARE == 0:
                tiles = _over_columns(most[i // SHARE], G, C, TILE_V)
                if FORMAT == "nvfp4":
                    step, inverse, zero = block_scales(tiles, group)
                else:
                    step, inverse, zero = scales(tiles, LARGEST)
            code, _ = round_codes(tl.fma(S[i], _along(inverse, W, C), _along(zero, W, C)), FORMAT)
            out = out + (code * _along(step, W, C),)
    return out


@triton.jit
def _magnitude(S):
    """The bits of magnitudes, which are ordered as they are, NaN on top."""
    return S.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite(bits):
    return tl.where(bits < _INFINITE, bits, 0)
