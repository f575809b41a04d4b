"""The state's codec in Triton, bit for bit the torch codec of `lattn_compile.formats` (semantics §3).

`scales` and `block_scales` make a tile's scale of its largest magnitude; `quantize` finds the tiles of a state in
pieces (`pieces.py`). Magnitudes are compared as int32: the bits of non-negative floats are ordered as they are, with
infinity and NaN on top, so a maximum propagates NaN on every device, and a warp has an instruction for it.

No step can be contracted with another. Products with an inverse scale are `fma(x, inverse, zero)` with a zero that is
no compile-time -0, which no compiler may undo; a code times its scale is exact; divisions are `div_rn`.

No clamp: |x| <= amax, and amax / scale exceeds the largest code by at most 2^-16 relatively (nvfp4: 2^-4), which rounds
back to it. Rounding to nearest only. Stochastic rounding adds numbers to `round_codes`, and there needs the clamp.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.bf16.triton import round_codes as round_bf16
from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.fp8_e4m3.triton import from_bytes as fp8_from_bytes
from lattn_compile.formats.fp8_e4m3.triton import round_codes as round_fp8
from lattn_compile.formats.fp8_e4m3.triton import to_bytes as fp8_to_bytes
from lattn_compile.formats.fp16.triton import round_codes as round_fp16
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.formats.int8.triton import from_bytes as int8_from_bytes
from lattn_compile.formats.int8.triton import round_codes as round_int8
from lattn_compile.formats.int8.triton import to_bytes as int8_to_bytes
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, LARGEST, LARGEST_GROUP, round_block_scale
from lattn_compile.formats.nvfp4.triton import round_codes as round_nvfp4

__all__ = ["block_scales", "from_bytes", "quantize", "rn16", "round_codes", "scales", "to_bytes"]

_TINY = tl.constexpr((127 - 100) << 23)  # the bits of 2^-100: tiles below it store zeros
_INFINITE = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def rn16(x):
    """`x >= 0` to 16 significant bits, ties to even, so that an 8-bit code times it is exact in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + (0x7F + ((bits >> 8) & 1))) & -0x100).to(tl.float32, bitcast=True)


@triton.jit
def _zero(live):
    """What a product is rounded to a code with: -0, which keeps the sign of zero, in tiles that have codes, else 0."""
    return tl.where(live, _SIGN, 0).to(tl.float32, bitcast=True)  # the literal -0.0 is 0.0 to Triton


@triton.jit
def scales(amax, LARGEST: tl.constexpr):
    """From the bits of tiles' largest magnitudes to what their values are multiplied with.

    Returns:
        (scale, inverse, zero), fp32: codes are `round_codes(fma(x, inverse, zero))`, values `code * scale`. A tiny tile
        gets scale 1 and exact +0; one with a NaN or an infinity a NaN scale.
    """
    finite = amax < _INFINITE
    live = (amax >= _TINY) & finite
    scale = tl.where(live, rn16(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST)), 1.0)
    inverse = tl.where(live, tl.div_rn(1.0, scale), 0.0)
    return tl.where(finite, scale, float("nan")), inverse, _zero(live)


@triton.jit
def block_scales(amax, group_amax):
    """nvfp4's `scales`, from the bits of blocks' largest and groups' largest finite magnitudes."""
    group = rn16(tl.div_rn(group_amax.to(tl.float32, bitcast=True), LARGEST_GROUP))
    group = tl.where(group_amax >= _TINY, group, 1.0)
    finite = amax < _INFINITE
    live = (amax >= _TINY) & finite
    ratio = tl.div_rn(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST), group)
    step = tl.where(live, round_block_scale(ratio), 1.0) * group
    inverse = tl.where(live, tl.div_rn(1.0, step), 0.0)
    # The step of a tiny block may overflow nothing: its codes are zero whatever it is.
    return tl.where(finite, step, float("nan")), inverse, _zero(live)


@triton.jit
def round_codes(y, FORMAT: tl.constexpr):
    """Scaled values to the numbers that codes stand for; and what `to_bytes` makes bytes of."""
    tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
    if FORMAT == "int8":
        return round_int8(y)
    elif FORMAT == "fp8_e4m3":
        return round_fp8(y)
    else:
        return round_nvfp4(y)


@triton.jit
def to_bytes(code, FORMAT: tl.constexpr):
    """The second of what `round_codes` returned as bytes in int32. Not the stored codes: int8's are shifted."""
    tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3")
    if FORMAT == "int8":
        return int8_to_bytes(code)
    else:
        return fp8_to_bytes(code)


@triton.jit
def from_bytes(byte, FORMAT: tl.constexpr):
    """Inverse of `to_bytes`, fp32."""
    tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3")
    if FORMAT == "int8":
        return int8_from_bytes(byte)
    else:
        return fp8_from_bytes(byte)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _over_tiles(bits, RUNS: tl.constexpr, BLOCK_V: tl.constexpr, FLIP: tl.constexpr):
    """Maxima of tiles of RUNS lane groups by BLOCK_V columns, from one number a place.

    `bits` int32, one piece; returns something that broadcasts against a piece (a scalar where all is one tile).
    """
    if FLIP:
        m = tl.max(bits, 0)  # [WARPS, LANES, COLUMNS]
    else:
        m = tl.permute(tl.max(bits, 2), (1, 0, 2))
    WARPS: tl.constexpr = m.shape[0]
    LANES: tl.constexpr = m.shape[1]
    COLUMNS: tl.constexpr = m.shape[2]
    if RUNS == LANES and BLOCK_V >= WARPS * COLUMNS:
        # All lanes of a warp at once, for which there is one instruction; then the warps.
        return tl.max(tl.max(tl.reshape(m, (WARPS, LANES * COLUMNS)), 1), 0)
    else:
        if RUNS > 1:
            runs = tl.max(tl.reshape(m, (WARPS, LANES // RUNS, RUNS, COLUMNS)), 2)
            runs = tl.broadcast_to(runs[:, :, None, :], (WARPS, LANES // RUNS, RUNS, COLUMNS))
            m = tl.reshape(runs, (WARPS, LANES, COLUMNS))
        if BLOCK_V > 1 and BLOCK_V < COLUMNS:
            tiles = tl.max(tl.reshape(m, (WARPS, LANES, COLUMNS // BLOCK_V, BLOCK_V)), 3)
            tiles = tl.broadcast_to(tiles[:, :, :, None], (WARPS, LANES, COLUMNS // BLOCK_V, BLOCK_V))
            m = tl.reshape(tiles, (WARPS, LANES, COLUMNS))
        elif BLOCK_V >= COLUMNS:
            SPAN: tl.constexpr = min(BLOCK_V // COLUMNS, WARPS)
            tiles = tl.max(tl.reshape(tl.max(m, 2), (WARPS // SPAN, SPAN, LANES)), 1)
            tiles = tl.broadcast_to(tiles[:, None, :], (WARPS // SPAN, SPAN, LANES))
            m = tl.broadcast_to(tl.reshape(tiles, (WARPS, LANES))[:, :, None], (WARPS, LANES, COLUMNS))
        if FLIP:
            return m[None, :, :, :]
        else:
            return tl.permute(m, (1, 0, 2))[:, :, None, :]


@triton.jit
def _magnitude_bits(S, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Bits of the largest magnitude of COUNT pieces from FIRST on, at each place."""
    m = tl.abs(S[FIRST])
    for i in tl.static_range(FIRST + 1, FIRST + COUNT):
        m = _largest(m, tl.abs(S[i]))
    # A NaN may come with any sign.
    return m.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite_bits(S, PIECES: tl.constexpr):
    """Bits of the largest finite magnitude of all pieces, at each place; 0 where there is none."""
    m = tl.zeros(S[0].shape, tl.int32)
    for i in tl.static_range(PIECES):
        bits = tl.abs(S[i]).to(tl.int32, bitcast=True)
        m = tl.maximum(m, tl.where(bits < _INFINITE, bits, 0))
    return m


@triton.jit
def quantize(
    S,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
):
    """QDQ of a state in pieces, every tile of which lies in this program.

    Args:
        BLOCK_K, BLOCK_V: the tile, powers of two; at least all channels, or columns, where it is the whole axis.
            Ignored for nvfp4, whose runs must hold whole blocks of 16 channels. STEP divides BLOCK_K.

    Returns:
        (written, codes, scale): the state that is read back, the numbers its codes stand for, and the first tile's
        scale; plain formats return the written state and a scale of 1 for the last two.
    """
    if FORMAT == "bf16" or FORMAT == "fp16":
        out = ()
        for i in tl.static_range(PIECES):
            out = out + (round_bf16(S[i]) if FORMAT == "bf16" else round_fp16(S[i]),)
        return out, out, 1.0
    else:
        tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
        NVFP4: tl.constexpr = FORMAT == "nvfp4"
        LARGEST_CODE: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        RUN: tl.constexpr = PIECES * STEP
        LANES: tl.constexpr = S[0].shape[2] if FLIP else S[0].shape[0]
        ROWS: tl.constexpr = BLOCK if NVFP4 else BLOCK_K
        # A tile is some lanes' whole runs, or a group of pieces in a lane's run.
        COUNT: tl.constexpr = min(ROWS // STEP, PIECES)
        RUNS: tl.constexpr = min((ROWS + RUN - 1) // RUN, LANES)
        if NVFP4:
            group = _over_tiles(_finite_bits(S, PIECES), LANES, GROUP, FLIP)
        written = ()
        codes = ()
        scale = 1.0
        for tile in tl.static_range(PIECES // COUNT):
            amax = _over_tiles(_magnitude_bits(S, tile * COUNT, COUNT), RUNS, 1 if NVFP4 else BLOCK_V, FLIP)
            if NVFP4:
                step, inverse, zero = block_scales(amax, group)
            else:
                step, inverse, zero = scales(amax, LARGEST_CODE)
            for i in tl.static_range(tile * COUNT, (tile + 1) * COUNT):
                code, rounded = round_codes(tl.fma(S[i], inverse, zero), FORMAT)
                codes = codes + (rounded,)
                written = written + (code * step,)
            if tile == 0:
                scale = step
        return written, codes, scale
