"""Functions with a kink in a run that proves equalities of analytic ones.

A clamp, a relu or an absolute value is the limit of analytic functions of one more parameter, its sharpness. The run
puts such a function in its place, of an ordinary sharpness. Two spellings that agree then, agree for every sharpness
(they are analytic in it too), and so in the limit: a kink is nothing that random numbers would have to hit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.writer import value

__all__ = ["can_smooth", "smoothed"]

_SHARPNESS = math.e / 1.6

Arguments = Mapping[str, Any]


def _near(bound: float) -> float:
    """A number that stands for a bound, within reach of values of order 1: a clamp at 1e9 is no identity here, and one
    at 1e-12 not one at 0. Signs, 0, and what is of order 1 stay."""
    if bound == 0 or 1e-3 <= abs(bound) <= 2 or not math.isfinite(bound):
        return bound
    spread = math.modf(abs(math.log(abs(bound))) * _SHARPNESS)[0]
    return math.copysign(0.05 * (1 + spread) if abs(bound) < 1 else 2 + spread, bound)


def _above(x: Tensor) -> Tensor:
    """max(x, 0), and always above 0."""
    return torch.nn.functional.softplus(x, beta=_SHARPNESS, threshold=600.0)


def _clamp(x: Tensor, a: Arguments) -> Tensor:
    low, high = (x if x is None else _near(x) for x in (a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))))
    if low is None:
        return x if high is None else high - _above(high - x)
    if high is None:
        return low + _above(x - low)
    return low + _above(x - low) - _above(x - high)


def _elu(x: Tensor, a: Arguments) -> Tensor:
    alpha, scale, inside = a.get("alpha", 1.0), a.get("scale", 1.0), a.get("input_scale", 1.0)
    return scale * (_above(x) + alpha * torch.expm1(-inside * _above(-x)))


_SMOOTH_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": lambda x, y: x + _above(y - x),
    "minimum": lambda x, y: x - _above(x - y),
}
"""Of two tensors: a running scale is such a maximum."""

_SMOOTH: dict[str, Callable[[Tensor, Arguments], Tensor]] = {
    "relu": lambda x, a: _above(x),
    "relu6": lambda x, a: _above(x) - _above(x - 6.0),
    "hardsigmoid": lambda x, a: (_above(x + 3.0) - _above(x - 3.0)) / 6.0,
    "leaky_relu": lambda x, a: _above(x) - a.get("negative_slope", 0.01) * _above(-x),
    "abs": lambda x, a: (x * x + 1 / _SHARPNESS**2).sqrt(),
    "elu": _elu,
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max", "hardtanh"), _clamp),
}


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: x for a, x in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def can_smooth(node: fx.Node, name: str) -> bool:
    """Whether a call has such a function in its place: two tensors of floats, or one, and bounds that are numbers, not
    the smallest of a dtype (below which this package holds a decay, and which has to stay where it is)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name in _SMOOTH_PAIRS:
        return len(node.args) == 2 and all(isinstance(x, fx.Node) and _floating(x) for x in node.args)
    if name not in _SMOOTH:
        return False
    tensor, *rest = _arguments(node).values()
    tiny = {torch.finfo(d).tiny for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    return isinstance(tensor, fx.Node) and all(x is None or (type(x) in (int, float) and x not in tiny) for x in rest)


def _floating(node: fx.Node) -> bool:
    v = value(node)
    return isinstance(v, Tensor) and v.is_floating_point()


def smoothed(node: fx.Node, name: str, env: Mapping[fx.Node, Any]) -> Tensor:
    """The call, without its kink. `env`: the values of its tensors, in float64."""
    tensors = [env[x] for x in node.args if isinstance(x, fx.Node)]
    return _SMOOTH_PAIRS[name](*tensors) if name in _SMOOTH_PAIRS else _SMOOTH[name](tensors[0], _arguments(node))
