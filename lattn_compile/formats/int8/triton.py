"""int8 in Triton: what its codec does to one value (semantics §3). Scales and tiles are `kernels.common.codec`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LARGEST", "from_bytes", "round_codes", "to_bytes"]

LARGEST = tl.constexpr(127.0)

# In [2^23, 2^24) fp32's numbers are the integers, so adding a number of that range rounds to nearest, ties to even, and
# the low byte of the sum is the code, 128 too high: no conversion, of which a multiprocessor does but 16 a clock.
_SHIFT = tl.constexpr(12582912.0 + 128.0)
_SHIFT_BITS = tl.constexpr(0x4B400000)  # of 12582912
_LOWEST = tl.constexpr(8388608.0 + 128.0)
_LOWEST_BITS = tl.constexpr(0x4B000000)  # of 8388608


@triton.jit
def round_codes(y):
    """Scaled values, below 127.5 in magnitude, to the nearest integers, ties to even, never -0; and for `to_bytes`."""
    shifted = y + _SHIFT
    return shifted - _SHIFT, shifted


@triton.jit
def to_bytes(rounded):
    """From the second of what `round_codes` returned to bytes in int32, 128 too high; of a NaN, any number."""
    return rounded.to(tl.int32, bitcast=True) - _SHIFT_BITS


@triton.jit
def from_bytes(byte):
    """From bytes to codes, fp32."""
    return (byte | _LOWEST_BITS).to(tl.float32, bitcast=True) - _LOWEST
