"""Bounds that the values of a node provably keep: is this a log decay, is that a decay?

Interval arithmetic over a functional ATen graph. Every operand counts on its own, so `x - x` is not 0. A bound holds
for what is computed, in the node's dtype: rounding is monotone, so 0 and 1 stand, and other bounds are widened by a few
units in the last place. NaN lies in every interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.aten import given_arguments, short_name
from lattn_compile.passes.spelled.intervals import (
    INF,
    REALS,
    Interval,
    at_point,
    dtype_of,
    dtype_range,
    is_rounded_once,
    loose,
    negative,
    outward,
    plus,
    quotient,
    rounded,
    square,
    times,
    union,
)
from lattn_compile.passes.spelled.literals import is_literal, is_written
from lattn_compile.passes.spelled.proposal import CONSTANT, OUTER
from lattn_compile.passes.spelled.subgraph import clean_state, constant
from lattn_compile.passes.spelled.writer import value

__all__ = ["Interval", "interval", "is_decay", "is_log_decay"]
_READ_ELEMENTS = 1 << 22
_COMPUTED_NODES = 64


def is_log_decay(node: fx.Node, known: dict[fx.Node, Interval] | None = None) -> bool:
    """Whether no value is above 0."""
    return interval(node, known)[1] <= 0


def is_decay(node: fx.Node, known: dict[fx.Node, Interval] | None = None) -> bool:
    """Whether all values lie in [0, 1]."""
    low, high = interval(node, known)
    return low >= 0 and high <= 1


def interval(node: fx.Node, known: dict[fx.Node, Interval] | None = None) -> Interval:
    """Bounds of the values of a node (of all its tensors, where it returns several).

    Args:
        known: bounds found before, and where those found now are kept; valid while the graph stays as it is.
    """
    known = {} if known is None else known
    stack = [node]
    while stack:
        at = stack[-1]
        if at in known:
            stack.pop()
            continue
        rule = _rule(at)
        missing = [n for n in at.all_input_nodes if n not in known] if rule is not None else []
        if missing:
            stack.extend(missing)
            continue
        known[at] = _bounded(at, rule, known)
        stack.pop()
    low, high = known[node]
    if high > 0 and not (low >= 0 and high <= 1) and (found := _evaluated(node)) is not None:
        known[node] = found
    return known[node]


def _evaluated(node: fx.Node) -> Interval | None:
    """The bounds of a value that is made of constants alone, found by computing it."""
    order: list[fx.Node] = []
    waiting, seen = [node], {node}
    while waiting:
        at = waiting.pop()
        order.append(at)
        if at.op == "get_attr" or CONSTANT in at.meta:
            if _constant(at) is None:
                return None
            continue
        if at.op != "call_function" or len(order) > _COMPUTED_NODES or not _computable(at):
            return None
        fresh = [n for n in at.all_input_nodes if n not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    values: dict[fx.Node, Any] = {}
    try:
        with clean_state(), torch.no_grad():
            for at in sorted(order):
                if at.op == "get_attr" or CONSTANT in at.meta:
                    values[at] = _constant(at).to("cpu")  # type: ignore[union-attr]
                    continue
                args, kwargs = fx.map_arg((at.args, at.kwargs), values.__getitem__)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                values[at] = at.target(*args, **kwargs)  # type: ignore[operator]
            low, high = (float(x) for x in values[node].to(torch.float64).aminmax())
    except Exception:  # whatever an op does not like: nothing is known then
        return None
    return None if low != low or high != high else loose(low, high, dtype_of(node), [0.0, 1.0])


def _computable(node: fx.Node) -> bool:
    target, made = node.target, value(node)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name:
        return False
    return isinstance(made, Tensor) and all(isinstance(n, int) for n in made.shape) and made.numel() <= _READ_ELEMENTS


def _rule(node: fx.Node) -> _Rule | None:
    if node.op != "call_function":
        return None
    return _RULES.get(short_name(node))


def _bounded(node: fx.Node, rule: _Rule | None, known: dict[fx.Node, Interval]) -> Interval:
    whole = dtype_range(node)
    if node.op == "get_attr" or CONSTANT in node.meta:
        found = _read(node)
    elif OUTER in node.meta:
        found = interval(node.meta[OUTER])
    elif rule is None:
        return whole
    else:
        found = rule(_Call(node, known))
    low, high = found
    if low != low or high != high or low > high:
        return whole
    if whole != REALS and any(dtype_range(n) == REALS for n in node.all_input_nodes):
        return whole  # NaN becomes some integer
    dtype = dtype_of(node)
    low, high = rounded(low, high, dtype) if is_rounded_once(node) else outward(low, high, dtype)
    # Integers wrap around, and a number that an integer type cannot hold becomes some other.
    return (low, high) if whole[0] <= low and high <= whole[1] else whole


def _read(node: fx.Node) -> Interval:
    """The bounds of a constant."""
    if (found := _constant(node)) is None:
        return dtype_range(node)
    with clean_state(), torch.no_grad():
        low, high = found.to(torch.float64).aminmax()
        return float(low), float(high)


def _constant(node: fx.Node) -> Tensor | None:
    """A tensor that stays as it is. A parameter does not, training changes it; and anyone may change a buffer."""
    found = constant(node)
    if (
        not isinstance(found, Tensor)
        or (node.op == "get_attr" and not is_literal(node))
        or isinstance(found, (torch.nn.Parameter, torch._subclasses.FakeTensor))
        or found.requires_grad
        or found.is_complex()
        or not 0 < found.numel() <= _READ_ELEMENTS
        or found.device.type == "meta"
        or is_written(node)
    ):
        return None
    return found


class _Call:
    """One call: its arguments by their names in the schema, and their bounds."""

    def __init__(self, node: fx.Node, known: dict[fx.Node, Interval]) -> None:
        self.node, self._known, self.arguments = node, known, given_arguments(node)

    def number(self, name: str, default: float) -> float | None:
        """A plain number; None if it is not known when compiling."""
        x = self.arguments.get(name, default)
        x = default if x is None else x
        return float(x) if isinstance(x, (int, float)) else None

    def of(self, x: Any) -> Interval:
        if isinstance(x, fx.Node):
            return self._known[x]
        if isinstance(x, (bool, int, float)):
            rounds = rounded if is_rounded_once(self.node) else outward
            return rounds(float(x), float(x), dtype_of(self.node))
        return REALS

    def bounds(self, x: Any) -> Interval:
        """As `of`, of a node that may stand further up."""
        return interval(x, self._known) if isinstance(x, fx.Node) else self.of(x)

    def __getitem__(self, at: int) -> Interval:
        """The bounds of the argument at a position of the schema."""
        return self.of(self.raw(at))

    def raw(self, at: int) -> Any:
        if at < len(self.node.args):
            return self.node.args[at]
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        return self.node.kwargs.get(schema[at].name)

    def has(self, name: str) -> bool:
        return self.arguments.get(name) is not None


_Rule = Callable[[_Call], Interval]


def _alpha(c: _Call) -> Interval:
    alpha = c.arguments.get("alpha")
    return (1.0, 1.0) if alpha is None else c.of(alpha)


def _add(c: _Call) -> Interval:
    whole = plus(c[0], times(c[1], _alpha(c)))
    mixed = _mixture(c) if _alpha(c) == (1.0, 1.0) else None
    return whole if mixed is None else (max(whole[0], mixed[0]), min(whole[1], mixed[1]))


def _mixture(c: _Call) -> Interval | None:
    """w x + (1 - w) y with w in [0, 1] lies between x and y, as with x = 1 in w + (1 - w) y."""
    for a, b in ((c.raw(0), c.raw(1)), (c.raw(1), c.raw(0))):
        for rest, y in _factors(b):
            if not isinstance(rest, fx.Node) or short_name(rest) not in ("rsub", "sub"):
                continue
            one, w = (rest.args[1], rest.args[0]) if short_name(rest) == "rsub" else rest.args[:2]
            if one != 1 or not isinstance(w, fx.Node) or len(rest.args) != 2:
                continue
            low, high = c.bounds(w)
            x = next((x for v, x in [(a, 1.0), *_factors(a)] if v is w), None)
            if x is not None and low >= 0 and high <= 1:
                # Rounding 1 - w takes no sum of the two above 1.
                return loose(*union(c.bounds(x), c.bounds(y)), dtype_of(c.node), [0.0, 1.0])
    return None


def _factors(x: Any) -> list[tuple[Any, Any]]:
    """The two factors of a product, in either order."""
    if not isinstance(x, fx.Node) or short_name(x) != "mul":
        return []
    return [(x.args[0], x.args[1]), (x.args[1], x.args[0])]


def _sub(c: _Call) -> Interval:
    return plus(c[0], negative(times(c[1], _alpha(c))))


def _rsub(c: _Call) -> Interval:
    return plus(c[1], negative(times(c[0], _alpha(c))))


def _mul(c: _Call) -> Interval:
    a, b = c.raw(0), c.raw(1)
    return square(c[0]) if a is b and isinstance(a, fx.Node) else times(c[0], c[1])


def _div(c: _Call) -> Interval:
    return REALS if c.has("rounding_mode") else quotient(c[0], c[1])


def _monotone(f: Callable[[float], float], exact: Sequence[float] = (0.0,)) -> _Rule:
    """A function that rises; `f` is exact at `exact`, where its values stand, and off by a few ulps elsewhere."""

    def rule(c: _Call) -> Interval:
        return loose(at_point(f, c[0][0]), at_point(f, c[0][1]), dtype_of(c.node), [at_point(f, x) for x in exact])

    return rule


def _log(x: float) -> float:
    return -INF if x <= 0 else math.log(x)


def _log1p(x: float) -> float:
    return -INF if x <= -1 else math.log1p(x)


def _exp(x: float) -> float:
    return 0.0 if x == -INF else math.exp(x)


def _softplus(c: _Call) -> Interval:
    """Within max(x, 0) and max(x, 0) + log(2) / beta, and never below 0."""
    beta = c.number("beta", 1.0)
    if beta is None or beta <= 0:
        return REALS
    # The other branch, x itself, begins at the threshold, which need not be positive.
    threshold = c.number("threshold", 20.0)
    floor = 0.0 if threshold is not None and threshold >= 0 else min(c[0][0], 0.0)
    return floor, max(c[0][1], 0.0) + 0.6932 / beta


def _clamp(c: _Call) -> Interval:
    low, high = c[0]
    for name, at in (("min", 1), ("max", 2)):
        bound = c.arguments.get(name, c.arguments.get(f"{name}_val"))
        if bound is None and short_name(c.node) == "hardtanh":
            bound = {1: -1.0, 2: 1.0}[at]
        if bound is None:
            continue
        a, b = c.of(bound)
        low, high = (max(low, a), max(high, b)) if at == 1 else (min(low, a), min(high, b))
    return low, high


def _lerp(c: _Call) -> Interval:
    """Between its ends, for a weight between 0 and 1."""
    low, high = c.of(c.arguments["weight"])
    return loose(*union(c[0], c[1]), dtype_of(c.node), [0.0, 1.0]) if low >= 0 and high <= 1 else REALS


def _threshold(c: _Call) -> Interval:
    return union(c[0], c.of(c.arguments["value"]))


def _pow(c: _Call) -> Interval:
    """Constant exponents that are whole, and bases that are numbers or lie on one side of 1."""
    exponent = c.raw(1)
    if isinstance(exponent, (int, float)):
        low, high = c[0]
        if exponent == 2:
            return square(c[0])
        if exponent == 1:
            return c[0]
        if low > 0 and exponent < 0:
            return 0.0, (1.0 if low >= 1 else INF)
        if low >= 0 and exponent > 0:
            return 0.0, (1.0 if high <= 1 else INF)
        if exponent >= 0 and exponent % 2 == 0:
            return 0.0, INF
        return REALS
    low, high = c[1]
    if c[0][0] > 0:
        return 0.0, (1.0 if (c[0][0] >= 1 and high <= 0) or (c[0][1] <= 1 and low >= 0) else INF)
    return (0.0, (1.0 if c[0][1] <= 1 else INF)) if c[0][0] >= 0 and low >= 0 else REALS


def _abs(c: _Call) -> Interval:
    low, high = sorted((abs(c[0][0]), abs(c[0][1])))
    return (0.0 if c[0][0] <= 0 <= c[0][1] else low), high


def _signs(c: _Call) -> Interval:
    """A sum: of any number of terms, so only its sign is known."""
    return (0.0 if c[0][0] >= 0 else -INF), (0.0 if c[0][1] <= 0 else INF)


def _product(c: _Call) -> Interval:
    if c[0][0] < 0:
        return REALS
    return 0.0, (1.0 if c[0][1] <= 1 else INF)


def _fixed(low: float, high: float) -> _Rule:
    return lambda c: (low, high)


def _same(c: _Call) -> Interval:
    return c[0]


def _with(*positions: int, also: tuple[float, ...] = ()) -> _Rule:
    """Every value comes from one of these arguments, or is one of `also`."""
    return lambda c: union(*(c[i] for i in positions), *((x, x) for x in also))


def _cat(c: _Call) -> Interval:
    tensors = c.raw(0)
    return union(*(c.of(t) for t in tensors)) if tensors else REALS


def _pad(c: _Call) -> Interval:
    if c.arguments.get("mode", "constant") != "constant":
        return c[0]
    fill = c.arguments.get("value")
    return union(c[0], c.of(0.0 if fill is None else fill))


def _getitem(c: _Call) -> Interval:
    source = c.node.args[0]
    # Of a call with several results the bounds are those of the values; the others are indices or buffers.
    if isinstance(source, fx.Node) and short_name(source) in _FIRST_ONLY and c.node.args[1] != 0:
        return dtype_range(c.node)
    return c[0]


def _full(c: _Call) -> Interval:
    fill = c.arguments.get("fill_value")
    return c.of(fill)


def _arange(c: _Call) -> Interval:
    ends = [c.arguments.get("start", 0), c.arguments.get("end")]
    step = c.arguments.get("step", 1)
    if not all(isinstance(x, (int, float)) for x in [*ends, step]):
        return (0.0, INF) if isinstance(ends[0], (int, float)) and ends[0] >= 0 and step == 1 else REALS
    return float(min(ends)), float(max(ends))


def _index_put(c: _Call) -> Interval:
    return REALS if c.arguments.get("accumulate") else union(c[0], c[2])


def _scatter(c: _Call) -> Interval:
    return REALS if c.has("reduce") else union(c[0], c[3])


_FIRST_ONLY = ("max", "min", "log_sigmoid_forward", "aminmax", "sort", "topk")


def _each(names: str, rule: _Rule) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, _Rule] = {
    **_each(
        "view _unsafe_view reshape clone alias detach select slice narrow unsqueeze squeeze permute transpose t mT "
        "numpy_T movedim swapaxes expand expand_as broadcast_to split split_with_sizes chunk unbind flatten unflatten "
        "view_as reshape_as contiguous lift_fresh_copy flip roll repeat repeat_interleave tile index _unsafe_index "
        "index_select gather unfold diagonal amax amin",
        _same,
    ),
    **_each("to _to_copy type_as convert_element_type", _same),
    **_each("add", _add),
    **_each("sub subtract", _sub),
    **_each("rsub", _rsub),
    **_each("mul multiply", _mul),
    **_each("div divide true_divide", _div),
    **_each("neg negative", lambda c: negative(c[0])),
    **_each("reciprocal", lambda c: quotient((1.0, 1.0), c[0])),
    **_each("rsqrt", lambda c: loose(*quotient((1.0, 1.0), _root(c[0])), dtype_of(c.node), [1.0])),
    **_each("sqrt", _monotone(lambda x: math.sqrt(max(x, 0.0)), (0.0, 1.0))),
    **_each("exp", _monotone(_exp, (-INF, 0.0))),
    **_each("exp2", _monotone(lambda x: 0.0 if x == -INF else 2.0**x, (-INF, 0.0))),
    **_each("expm1", _monotone(math.expm1, (-INF, 0.0))),
    **_each("log log2 log10", lambda c: _log_signs(c[0], 1.0)),
    **_each("log1p", _monotone(_log1p)),
    **_each("tanh", _monotone(math.tanh, (-INF, 0.0, INF))),
    **_each("erf", _monotone(math.erf, (-INF, 0.0, INF))),
    **_each("erfc", _fixed(0.0, 2.0)),
    **_each("atan", _monotone(math.atan)),
    **_each("sigmoid softmax _softmax special_ndtr hardsigmoid", _fixed(0.0, 1.0)),
    **_each("relu6", lambda c: (min(max(c[0][0], 0.0), 6.0), min(max(c[0][1], 0.0), 6.0))),
    **_each("lerp", _lerp),
    **_each("threshold", _threshold),
    **_each("sin cos", _fixed(-1.0, 1.0)),
    **_each("log_sigmoid log_sigmoid_forward log_softmax _log_softmax", _fixed(-INF, 0.0)),
    **_each("softplus", _softplus),
    **_each("relu", lambda c: (max(c[0][0], 0.0), max(c[0][1], 0.0))),
    **_each("clamp clip hardtanh", _clamp),
    **_each("clamp_min", lambda c: (max(c[0][0], c[1][0]), max(c[0][1], c[1][1]))),
    **_each("clamp_max", lambda c: (min(c[0][0], c[1][0]), min(c[0][1], c[1][1]))),
    **_each("max min", lambda c: union(*(c.of(n) for n in c.node.all_input_nodes))),
    **_each("maximum", lambda c: (max(c[0][0], c[1][0]), max(c[0][1], c[1][1]))),
    **_each("minimum", lambda c: (min(c[0][0], c[1][0]), min(c[0][1], c[1][1]))),
    **_each("abs", _abs),
    **_each("square", lambda c: square(c[0])),
    **_each("pow", _pow),
    **_each("cumsum sum mean", _signs),
    **_each("logcumsumexp", lambda c: (c[0][0], INF)),
    **_each("prod cumprod", _product),
    **_each("linalg_vector_norm norm", _fixed(0.0, INF)),
    **_each("where", _with(1, 2)),
    **_each("masked_fill", _with(0, 2)),
    **_each("tril triu", _with(0, also=(0.0,))),
    **_each("fill copy", _with(1)),
    **_each("select_scatter slice_scatter diagonal_scatter", _with(0, 1)),
    **_each("index_put", _index_put),
    **_each("scatter", _scatter),
    **_each("cat concat stack hstack vstack", _cat),
    **_each("pad constant_pad_nd", _pad),
    **_each("zeros zeros_like new_zeros", _fixed(0.0, 0.0)),
    **_each("ones ones_like new_ones", _fixed(1.0, 1.0)),
    **_each("eye", _fixed(0.0, 1.0)),
    **_each("full full_like new_full", _full),
    **_each("scalar_tensor", _with(0)),
    **_each("arange", _arange),
    **_each("getitem", _getitem),
}
"""Bounds by op. An op without a rule has those of its dtype, and its arguments are not looked at."""


def _root(a: Interval) -> Interval:
    return math.sqrt(max(a[0], 0.0)), math.sqrt(max(a[1], 0.0))


def _log_signs(a: Interval, one: float) -> Interval:
    return (0.0 if a[0] >= one else -INF), (0.0 if a[1] <= one else INF)
