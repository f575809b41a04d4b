"""Decayed products inside a window, and rows of tokens: what the preparation and the gradients of replay share.

`w(j -> i) = exp(g_{j+1} + ... + g_i)`. By head that is one matrix. By channel it stands inside the contraction, and
factors at any token between the two: the window is halved again and again, and every pair of tokens is part of a
product at the level that parts it (`reference/decay.py`).
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import rstd
from lattn_compile.kernels.common.products import (
    fixed,
    fixed_product,
    flipped,
    gate_exp,
    halves,
    operand,
    product,
    summed,
)

__all__ = ["level", "load_rows", "norms", "parted", "power_below"]


@triton.jit
def load_rows(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Channels `first` to `first + WIDTH` of rows at `p + row`, `[BT, WIDTH]`, as they are; SIZE: all channels."""
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None] & (channel < SIZE)[None, :]
    return tl.load(p + row[:, None] + channel[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def norms(x, row, inside, stride, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr):
    """Reciprocal norms of rows at `x + row`, `[BT]`."""
    total = tl.zeros([BT], tl.float32)
    for part in tl.static_range(BK // BS):
        b_x = load_rows(x, row, inside, part * BS, stride, K, BS).to(tl.float32)
        total += tl.sum(b_x * b_x, 1)
    return rstd(total)


@triton.jit
def power_below(x):
    """The largest power of two up to `x >= 0`; 0 of subnormal numbers."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def parted(half, BT: tl.constexpr):
    """bool `[BT, BT]`: pairs that the middle of 2 `half` tokens parts, the later one in front."""
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return (row // half == column // half + 1) & (row // half % 2 == 1)


@triton.jit
def level(
    P, A, q, k, w, g, half, BT: tl.constexpr, DELTA: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, WIDE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Adds to `P` and `A` the pairs that the middle of 2 `half` tokens parts.

    Args:
        q, k, g: some channels `[BT, ..]`, w: of the keys as they are written, which are others if APART. k and w have
            norms up to 1, or any if WIDE.
        A: a float64 matrix if WIDE, else three as `fixed_product` has them.
    """
    weight = gate_exp(summed(halves(half, BT), g, PART, PRECISION, ASSEMBLY, WIDE))
    here = parted(half, BT)
    weighted = k.to(weight.dtype) * weight
    written = weighted
    if APART:
        written = w.to(weight.dtype) * weight
    o_early = flipped(operand(written, PART, ASSEMBLY))
    P += tl.where(here, product(operand(q * weight.to(tl.float32), PART, ASSEMBLY), o_early, PRECISION), 0.0)
    if WIDE:
        A = (A[0] + tl.where(here, tl.dot(weighted, tl.trans(written), out_dtype=tl.float64), 0.0),)
    elif DELTA:
        f_early = fixed(written, PART, ASSEMBLY)
        f_late = f_early
        if APART:
            f_late = fixed(weighted, PART, ASSEMBLY)
        found = fixed_product(f_late, flipped(f_early))
        A = (
            A[0] + tl.where(here, found[0], 0.0),
            A[1] + tl.where(here, found[1], 0.0),
            A[2] + tl.where(here, found[2], 0.0),
        )
    return P, A
