"""nvfp4 in Triton: what its codec does to one value and to one block's scale (semantics §3)."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import round_to_minifloat

__all__ = ["BLOCK", "GROUP", "LARGEST", "LARGEST_GROUP", "round_block_scale", "round_codes"]

BLOCK = tl.constexpr(16)  # key channels that share an E4M3 scale
GROUP = tl.constexpr(64)  # value columns that share an fp32 scale
LARGEST = tl.constexpr(6.0)  # of E2M1
LARGEST_GROUP = tl.constexpr(6.0 * 448.0)


@triton.jit
def round_codes(y):
    """Scaled values, below 7 in magnitude, to the nearest E2M1 numbers, twice; the sign of zero is kept."""
    code = round_to_minifloat(y, 1, 0)
    return code, code


@triton.jit
def round_block_scale(ratio):
    """A block's scale over its group's, to E4M3 within [2^-6, 448]."""
    return round_to_minifloat(tl.minimum(tl.maximum(ratio, 0.015625), 448.0), 3, -6)
