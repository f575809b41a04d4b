"""fp8_e4m3 in Triton: what its codec does to one value (semantics §3), in fp32 arithmetic.

No hardware conversion: this rounds the same everywhere, sm_80 and Triton's interpreter included, where the type is
missing or wrong, and costs no more than converting there and back.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LARGEST", "from_bytes", "round_codes", "round_to_minifloat", "to_bytes"]

LARGEST = tl.constexpr(448.0)

_SIGN = tl.constexpr(-(2**31))
_REBIAS = tl.constexpr(2.0**-120)  # from fp32's exponent bias, 127, to e4m3's, 7
_BIAS = tl.constexpr(2.0**120)


@triton.jit
def round_to_minifloat(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """`y` to the nearest float with MANTISSA stored bits, subnormal below `2**MIN_EXPONENT`, ties to the even code.

    The sign of zero is kept; there is no upper limit. With p the power of two at or below |y|, fp32's numbers around
    1.5 · 2^(23 - MANTISSA) p are spaced as the target's around y, so adding that number rounds; it is even in units of
    that spacing, so ties go where they should. Both sums are exact but for this one rounding.
    """
    SHIFT: tl.constexpr = 1.5 * 2.0 ** (23 - MANTISSA)
    LEAST: tl.constexpr = (127 + MIN_EXPONENT) << 23
    bits = y.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & 0x7F800000, LEAST).to(tl.float32, bitcast=True)
    rounded = tl.fma(power, -SHIFT, tl.fma(power, SHIFT, y)).to(tl.int32, bitcast=True)
    return ((rounded & 0x7FFFFFFF) | (bits & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def round_codes(y):
    """Scaled values, below 464 in magnitude, to the nearest E4M3 numbers; and the same for `to_bytes`."""
    code = round_to_minifloat(y, 3, -6)
    return code, code


@triton.jit
def to_bytes(code):
    """E4M3 numbers to their bytes, in int32; of a NaN, any byte."""
    bits = (code * _REBIAS).to(tl.int32, bitcast=True)
    return ((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def from_bytes(byte):
    """Inverse of `to_bytes`, fp32."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * _BIAS
