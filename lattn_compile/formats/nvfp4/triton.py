"""nvfp4 in Triton: what its codec does to one value and to one block's scale (semantics §3)."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import round_to_minifloat

__all__ = [
    "BLOCK",
    "GROUP",
    "LARGEST",
    "LARGEST_GROUP",
    "code_bits",
    "from_nibbles",
    "round_block_scale",
    "round_codes",
    "to_nibbles",
]

BLOCK = tl.constexpr(16)  # key channels that share an E4M3 scale
GROUP = tl.constexpr(64)  # value columns that share an fp32 scale
LARGEST = tl.constexpr(6.0)  # of E2M1
LARGEST_GROUP = tl.constexpr(6.0 * 448.0)

_REBIAS = tl.constexpr(2.0**-126)  # from fp32's exponent bias, 127, to E2M1's, 1
_BIAS = tl.constexpr(2.0**126)

_EXPONENT = tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(127 << 23)  # the bits of 1, E2M1's least normal number
_SPACED = tl.constexpr((22 << 23) + 214)  # see `code_bits`


@triton.jit
def round_codes(y):
    """Scaled values, below 7 in magnitude, to the nearest E2M1 numbers, twice; the sign of zero is kept."""
    code = round_to_minifloat(y, 1, 0)
    return code, code


@triton.jit
def code_bits(y):
    """The magnitudes' 3 bits of what `round_codes` makes of scaled values, in the lowest byte of an int32; the other
    bytes are rubbish.

    With p the power of two at or below |y|, and 1 at least, the code is 2 log2(p) + n, n the integer next to 2|y| / p.
    Added to (2^22 + 107) p, whose neighbours are p / 2 apart, |y| is rounded so; the sum's bits are
    (149 + log2(p)) 2^23 + 214 + n, and what they and the same 22 places lower add up to is 512 + 2 log2(p) + n in the
    lowest ones. A NaN has any code.
    """
    bits = y.to(tl.int32, bitcast=True)
    spaced = tl.maximum((bits & _EXPONENT) + _SPACED, _LEAST + _SPACED).to(tl.float32, bitcast=True)
    rounded = (tl.abs(y) + spaced).to(tl.int32, bitcast=True)
    return rounded + (rounded >> 22)


@triton.jit
def to_nibbles(code):
    """E2M1 numbers to their 4 bits, in int32; of a NaN, any."""
    bits = (code * _REBIAS).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def from_nibbles(nibble):
    """Inverse of `to_nibbles`, fp32."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _BIAS


@triton.jit
def round_block_scale(ratio):
    """A block's scale over its group's, to E4M3 within [2^-6, 448]."""
    return round_to_minifloat(tl.minimum(tl.maximum(ratio, 0.015625), 448.0), 3, -6)
