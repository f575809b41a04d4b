"""Counts the residuals of approximate inverses on the device: one small launch in place of a dozen of torch's."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.host import on
from lattn_compile.kernels.common.launch import launched

__all__ = ["count_residuals"]

_BLOCK = 4096


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["bound", "count"])
def tally(norms, counts, largest, bound, count, BLOCK: tl.constexpr):
    """Args:
        norms: fp32, `count` of them, negative where there was no chunk.
        counts: int64 `[2]`, gets how many there are, and how many of them are not at most `bound`.
        largest: float64, gets the largest, NaN once there was one.

    Grid: (1,).
    """
    slot = tl.arange(0, BLOCK)
    there = tl.zeros([BLOCK], tl.int32)
    over = tl.zeros([BLOCK], tl.int32)
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        x = tl.load(norms + first + slot, mask=first + slot < count, other=-1.0)
        there += tl.where(x < 0.0, 0, 1)
        over += tl.where(x <= bound, 0, 1)
        most = _larger(most, x)
    tl.store(counts, tl.load(counts) + tl.sum(there, 0))
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(over, 0))
    tl.store(largest, _larger(tl.load(largest), tl.reduce(most, 0, _larger).to(tl.float64)))


def count_residuals(norms: Tensor, bound: float, counts: Tensor, largest: Tensor) -> None:
    """Adds the residuals `norms`, fp32 and contiguous, to counters on their device, without waiting for it.

    Args:
        bound: a number of float32. counts, largest: as `tally` has them.
    """
    with on(norms.device):
        launched(tally)[(1,)](norms, counts, largest, bound, norms.numel(), BLOCK=_BLOCK, num_warps=8)
