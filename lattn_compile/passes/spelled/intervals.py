"""Arithmetic on bounds of values, and how rounding to a dtype moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.aten import given_arguments, short_name
from lattn_compile.passes.spelled.subgraph import clean_state
from lattn_compile.passes.spelled.writer import value

__all__ = [
    "INF", "REALS", "Interval", "at_point", "dtype_of", "dtype_range", "is_rounded_once", "loose", "negative",
    "outward", "plus", "quotient", "rounded", "square", "times", "union",
]  # fmt: skip

Interval = tuple[float, float]
"""(lowest, highest), both included; infinities allowed."""

INF = math.inf
REALS: Interval = (-INF, INF)
_ULPS = 4


def dtype_of(node: fx.Node) -> torch.dtype | None:
    v = value(node)
    v = v[0] if isinstance(v, (list, tuple)) and v else v
    return v.dtype if isinstance(v, Tensor) else None


def dtype_range(node: fx.Node) -> Interval:
    """What a dtype can hold."""
    dtype = dtype_of(node)
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return REALS
    if dtype == torch.bool:
        return 0.0, 1.0
    return float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)


def is_rounded_once(node: fx.Node) -> bool:
    """Whether a node is a sum, a difference or a product, which is rounded to the nearest number of its dtype."""
    given = given_arguments(node)
    if short_name(node) not in ("add", "sub", "rsub", "mul") or given.get("alpha", 1) != 1:
        return False
    operands = [dtype_of(x) for x in node.all_input_nodes]
    return dtype_of(node) in (torch.float32, torch.float64) and all(d == dtype_of(node) for d in operands)


def rounded(low: float, high: float, dtype: torch.dtype | None) -> Interval:
    """The numbers of a dtype next to bounds. Rounding is monotone: what lies between them before does so behind."""
    with clean_state():
        low, high = torch.tensor([low, high], dtype=torch.float64).to(dtype).tolist()
    return low, high


def outward(low: float, high: float, dtype: torch.dtype | None) -> Interval:
    """Widened to what `dtype` may round or truncate to. Zero is never crossed, and short binary fractions stay."""
    if dtype is None:
        return low, high
    if not dtype.is_floating_point:
        return (low if math.isinf(low) else math.floor(low)), (high if math.isinf(high) else math.ceil(high))
    return -_up(-low, dtype), _up(high, dtype)


def _up(x: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    if math.isinf(x) or x == 0:
        return x
    if abs(x) > info.max:
        return INF if x > 0 else -info.max
    if info.tiny <= abs(x) and math.frexp(x)[0] * 4 % 1 == 0:
        return x  # 1, 2, 0.5, 3 ...: exact in every dtype
    up = x + abs(x) * 2 * info.eps + info.tiny
    return min(up, 0.0) if x < 0 else up if up <= info.max else INF


def union(*parts: Interval) -> Interval:
    return min(low for low, _ in parts), max(high for _, high in parts)


def times(a: Interval, b: Interval) -> Interval:
    products = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)


def plus(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def negative(a: Interval) -> Interval:
    return -a[1], -a[0]


def square(a: Interval) -> Interval:
    low, high = sorted((abs(a[0]), abs(a[1])))
    return (0.0 if a[0] <= 0 <= a[1] else low * low, high * high)


def quotient(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1]:
        return REALS  # 1 / -0.0 is -inf
    if math.inf in (abs(b[0]), abs(b[1])) and math.inf in (abs(a[0]), abs(a[1])):
        positive, negative = a[0] >= 0, a[1] <= 0
        if b[1] < 0:
            positive, negative = negative, positive
        return (0.0 if positive else -INF), (0.0 if negative else INF)
    quotients = [x / y for x in a for y in b]
    return min(quotients), max(quotients)


def at_point(f: Callable[[float], float], x: float) -> float:
    try:
        return f(x)
    except OverflowError:
        return INF
    except ValueError:
        return math.nan


def loose(low: float, high: float, dtype: torch.dtype | None, exact: Sequence[float] = ()) -> Interval:
    """A few ulps wider, but not past an exact value."""
    if dtype is None or not dtype.is_floating_point:
        return low, high
    slack = _ULPS * torch.finfo(dtype).eps
    down, up = low - slack * abs(low), high + slack * abs(high)
    down = max([down, *(x for x in exact if x <= low)])
    up = min([up, *(x for x in exact if x >= high)])
    return down, up
