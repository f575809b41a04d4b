"""The state's codec in Triton, bit for bit the torch codec of `lattn_compile.formats` (semantics §3).

`scales` and `block_scales` make a tile's scale of its largest magnitude; which values are a tile's is the business of
each form's kernels. Magnitudes are compared as int32: the bits of non-negative floats are ordered as they are, with
infinity and NaN on top, so a maximum propagates NaN on every device, and a warp has an instruction for it.

No step can be contracted with another. Products with an inverse scale are `fma(x, inverse, zero)` with a zero that is
no compile-time -0, which no compiler may undo; a code times its scale is exact; divisions are `div_rn`.

No clamp: |x| <= amax, and amax / scale exceeds the largest code by at most 2^-16 relatively (nvfp4: 2^-4), which rounds
back to it. Rounding to nearest only. Stochastic rounding adds numbers to `round_codes`, and there needs the clamp.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import from_bytes as fp8_from_bytes
from lattn_compile.formats.fp8_e4m3.triton import round_codes as round_fp8
from lattn_compile.formats.fp8_e4m3.triton import to_bytes as fp8_to_bytes
from lattn_compile.formats.int8.triton import from_bytes as int8_from_bytes
from lattn_compile.formats.int8.triton import round_codes as round_int8
from lattn_compile.formats.int8.triton import to_bytes as int8_to_bytes
from lattn_compile.formats.nvfp4.triton import LARGEST, LARGEST_GROUP, round_block_scale
from lattn_compile.formats.nvfp4.triton import round_codes as round_nvfp4

__all__ = [
    "block_scales",
    "from_bytes",
    "group_scale",
    "rn16",
    "round_codes",
    "scales",
    "scales_in_group",
    "to_bytes",
]

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
def _reciprocal(x):
    """`1 / x` rounded to nearest, of normal numbers up to 2^126 whose mantissas are not all ones: the GPU's own, which
    is off by one unit in the last place at most, and a step of Newton's (Markstein 1990, theorem 1)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 y, e;
        rcp.approx.ftz.f32 y, $1;
        neg.f32 e, $1;
        fma.rn.f32 e, e, y, 0f3F800000;
        fma.rn.f32 $0, e, y, y;
        }
        """,
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _quotient(a, b, reciprocal):
    """`a / b` rounded to nearest, of a b of 16 significant bits, from the rounded reciprocal of b.

    The product is off by less than two units, so its remainder is exact; the remainder's part of the quotient is off by
    less than 2^-22 units, and no quotient lies nearer than 2^-17 to the middle between two numbers.
    """
    q = a * reciprocal
    return tl.fma(tl.fma(q, -b, a), reciprocal, q)


@triton.jit
def scales(amax, LARGEST: tl.constexpr, FAST: tl.constexpr = False):
    """From the bits of tiles' largest magnitudes to what their values are multiplied with.

    FAST: without divisions, which branch, to the same bits; NVIDIA only.

    Returns:
        (scale, inverse, zero), fp32: codes are `round_codes(fma(x, inverse, zero))`, values `code * scale`. A tiny tile
        gets scale 1 and exact +0; one with a NaN or an infinity a NaN scale.
    """
    finite = amax < _INFINITE
    live = (amax >= _TINY) & finite
    most = amax.to(tl.float32, bitcast=True)
    if FAST:
        ratio = _quotient(most, LARGEST, 1.0 / LARGEST)
    else:
        ratio = tl.div_rn(most, LARGEST)
    scale = tl.where(live, rn16(ratio), 1.0)
    if FAST:
        inverse = _reciprocal(scale)
    else:
        inverse = tl.div_rn(1.0, scale)
    return tl.where(finite, scale, float("nan")), tl.where(live, inverse, 0.0), _zero(live)


@triton.jit
def group_scale(group_amax):
    """A group's scale of nvfp4, from the bits of its largest finite magnitude."""
    scale = rn16(tl.div_rn(group_amax.to(tl.float32, bitcast=True), LARGEST_GROUP))
    return tl.where(group_amax >= _TINY, scale, 1.0)


@triton.jit
def scales_in_group(amax, group, FAST: tl.constexpr):
    """nvfp4's `scales`, from the bits of blocks' largest magnitudes and their groups' scales; the blocks' own scales,
    an E4M3 number each or NaN, come first.

    FAST: without divisions, which branch, to the same bits. What is too small for that is no live block, or a ratio
    that is rounded up.
    """
    finite = amax < _INFINITE
    live = (amax >= _TINY) & finite
    most = amax.to(tl.float32, bitcast=True)
    if FAST:
        ratio = _quotient(_quotient(most, LARGEST, 1.0 / LARGEST), group, _reciprocal(group))
    else:
        ratio = tl.div_rn(tl.div_rn(most, LARGEST), group)
    block = tl.where(live, round_block_scale(ratio), 1.0)
    step = block * group
    if FAST:
        inverse = _reciprocal(step)
    else:
        inverse = tl.div_rn(1.0, step)
    # The step of a tiny block may overflow nothing: its codes are zero whatever it is.
    nan = float("nan")
    return tl.where(finite, block, nan), tl.where(finite, step, nan), tl.where(live, inverse, 0.0), _zero(live)


@triton.jit
def block_scales(amax, group_amax):
    """nvfp4's `scales`, from the bits of blocks' largest and groups' largest finite magnitudes."""
    _, step, inverse, zero = scales_in_group(amax, group_scale(group_amax), False)
    return step, inverse, zero


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
