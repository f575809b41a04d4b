"""Roundings that every format shares, written so that every device and compiler gives the same bits.

Each function is a fixed sequence of elementwise operations of which each is exact or correctly rounded. Nothing depends
on the order of a sum, on a cast's rounding mode, or on whether a multiply and an add are contracted.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TINY", "divide", "invert", "keep_where", "rn16", "round_at_random", "round_to_minifloat_"]

TINY = 2.0**-100
"""Tiles whose largest magnitude lies below this store zeros: their scale, or its inverse, would leave fp32's range."""

# dtype -> (integer of the same width, stored mantissa bits, exponent bias)
_LAYOUT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def divide(a: Tensor, b: Tensor | float) -> Tensor:
    """`a / b`, correctly rounded to the dtype of `a` (fp32 or fp64).

    An fp32 quotient is formed in fp64 and rounded once more, which is innocuous (53 >= 2·24 + 2 bits). It has to be:
    CUDA's eager kernels and Inductor replace a division by a number by a product with its reciprocal, and Triton's fp32
    `/` is approximate. In fp64 such errors (2^-52) do no harm, because the quotient of a 24-bit number by 6, 127, 448
    or 2688 is never closer than 2^-32, relatively, to the midpoint of two fp32 numbers.
    """
    if a.dtype == torch.float32:
        return (a.double() / (b.double() if isinstance(b, Tensor) else b)).float()
    if not isinstance(b, Tensor):
        # CUDA truly divides by a tensor on its device.
        b = torch.full((), b, dtype=a.dtype, device=a.device)
    return a / b


def invert(x: Tensor) -> Tensor:
    """`1 / x`, correctly rounded to the dtype of `x`, for the reason given at `divide`."""
    return x.double().reciprocal().to(x.dtype)


def rn16(x: Tensor) -> Tensor:
    """`x >= 0` rounded to 16 significant bits, ties to even, so that an 8-bit code times it is exact in fp32."""
    integer, mantissa, _ = _LAYOUT[x.dtype]
    drop = mantissa - 15  # 15 stored bits and the implicit one
    bits = x.view(integer)
    odd = (bits >> drop).bitwise_and_(1)
    return odd.add_(bits).add_((1 << (drop - 1)) - 1).bitwise_and_(-(1 << drop)).view(x.dtype)


def keep_where(keep: Tensor, x: Tensor) -> Tensor:
    """A new tensor: `x` where `keep` (bool, broadcast), exact +0 elsewhere, whatever stands there (NaN, Inf, -0).

    The same as `torch.where(keep, x, 0)`; on a CPU the bitwise form takes a sixth of the time.
    """
    integer, _, _ = _LAYOUT[x.dtype]
    return (x.view(integer) & keep.to(integer).neg_()).view(x.dtype)


def round_at_random(y: Tensor, r: Tensor) -> Tensor:
    """The integers `f + (r < y - f)`, `f = floor(y)`: y itself where it is an integer, else up with odds `y - f`.

    `r` holds fp32 numbers of [0, 1), uniform on the multiples of 2^-24. The difference is rounded to the dtype of `y`,
    which matters between -1 and 0 only and shifts the odds by 2^-25. Zeros come out as +0.
    """
    low = y.floor()
    return low.add_(r < y - low)


def round_to_minifloat_(y: Tensor, *, mantissa: int, min_exponent: int, r: Tensor | None = None) -> Tensor:
    """`y`, which it overwrites, rounded to the nearest float with `mantissa` stored bits and subnormals below
    `2**min_exponent`.

    Ties go to the even code; the sign of zero is kept. There is no upper limit: clamp first. Works from fp32 and from
    fp64 with one rounding, where a cast from fp64 to fp8 would round twice; from fp32 it equals the cast, and is
    several times faster on a CPU. With `r` (see `round_at_random`), to one of the two neighbours, by distance; the
    spacing must not be so small that its inverse overflows the dtype of `y`: bf16's subnormals need fp64.
    """
    integer, stored, bias = _LAYOUT[y.dtype]
    exponent_field = (2 * bias + 1) << stored
    # The power of two by which the target's numbers around y are spaced, as bits; then its inverse, and back.
    power = (y.view(integer) & exponent_field).clamp_min_((bias + min_exponent) << stored)
    power.neg_().add_((2 * bias + mantissa) << stored)
    y.mul_(power.view(y.dtype))
    # By floor whatever the sign, as int8 is rounded: a spacing divides its power of two, so both ends are codes.
    y = y.round_() if r is None else round_at_random(y, r).copysign_(y)
    power.neg_().add_((2 * bias) << stored)
    return y.mul_(power.view(y.dtype))
