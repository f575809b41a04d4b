"""Launches that begin before the kernel in front has ended, on Hopper and later (programmatic dependent launch).

A kernel that is launched so may do what needs nothing of the kernels before it, waits for the one in front of it, and
only then lets the next one begin: then whatever it reads or writes is settled, and whoever begins behind it may count
on all that came before it. Inductor writes its kernels so under its option `triton.enable_pdl`; ours in its module
follow that (`lowering/gpu.py`). A kernel that can has a constant `EARLY`.
"""

# Triton's language, not Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fetch", "wait_for_before"]


@triton.jit
def wait_for_before():
    """Until the kernel in front has ended and what it wrote is seen; then lets the next one begin."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(p):
    """Sends for the lines of memory that these addresses lie in, as far as the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p], dtype=tl.int32, is_pure=False, pack=1
    )
