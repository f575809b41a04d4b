"""fp16 in Triton: a plain cast (semantics §3)."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["round_codes"]


@triton.jit
def round_codes(x):
    """`x`, fp32, as it is read back from float16; infinite beyond its range."""
    return x.to(tl.float16).to(tl.float32)
