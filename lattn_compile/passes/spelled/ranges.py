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

from lattn_compile.passes.spelled.proposal import CONSTANT, OUTER
from lattn_compile.passes.spelled.subgraph import arguments, clean_state, constant, name_of
from lattn_compile.passes.spelled.writer import value

__all__ = ["Interval", "interval", "is_decay", "is_log_decay"]

Interval = tuple[float, float]
"""(lowest, highest), both included; infinities allowed."""

_INF = math.inf
_REALS: Interval = (-_INF, _INF)
_ULPS = 4
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
    return None if low != low or high != high else _loose(low, high, _dtype(node), [0.0, 1.0])


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
    return _RULES.get(name_of(node))


def _bounded(node: fx.Node, rule: _Rule | None, known: dict[fx.Node, Interval]) -> Interval:
    whole = _whole(node)
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
    if whole != _REALS and any(_whole(n) == _REALS for n in node.all_input_nodes):
        return whole  # NaN becomes some integer
    dtype = _dtype(node)
    low, high = _rounded(low, high, dtype) if _is_rounded_once(node) else _outward(low, high, dtype)
    # Integers wrap around, and a number that an integer type cannot hold becomes some other.
    return (low, high) if whole[0] <= low and high <= whole[1] else whole


def _dtype(node: fx.Node) -> torch.dtype | None:
    v = value(node)
    v = v[0] if isinstance(v, (list, tuple)) and v else v
    return v.dtype if isinstance(v, Tensor) else None


def _whole(node: fx.Node) -> Interval:
    """What a dtype can hold."""
    dtype = _dtype(node)
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return _REALS
    if dtype == torch.bool:
        return 0.0, 1.0
    return float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)


def _is_rounded_once(node: fx.Node) -> bool:
    """Whether a node is a sum, a difference or a product, which is rounded to the nearest number of its dtype."""
    given = arguments(node)
    if name_of(node) not in ("add", "sub", "rsub", "mul") or given.get("alpha", 1) != 1:
        return False
    operands = [_dtype(x) for x in node.all_input_nodes]
    return _dtype(node) in (torch.float32, torch.float64) and all(d == _dtype(node) for d in operands)


def _rounded(low: float, high: float, dtype: torch.dtype | None) -> Interval:
    """The numbers of a dtype next to bounds. Rounding is monotone: what lies between them before does so behind."""
    with clean_state():
        low, high = torch.tensor([low, high], dtype=torch.float64).to(dtype).tolist()
    return low, high


def _outward(low: float, high: float, dtype: torch.dtype | None) -> Interval:
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
        return _INF if x > 0 else -info.max
    if info.tiny <= abs(x) and math.frexp(x)[0] * 4 % 1 == 0:
        return x  # 1, 2, 0.5, 3 ...: exact in every dtype
    up = x + abs(x) * 2 * info.eps + info.tiny
    return min(up, 0.0) if x < 0 else up if up <= info.max else _INF


def _read(node: fx.Node) -> Interval:
    """The bounds of a constant."""
    if (found := _constant(node)) is None:
        return _whole(node)
    with clean_state(), torch.no_grad():
        low, high = found.to(torch.float64).aminmax()
        return float(low), float(high)


def _constant(node: fx.Node) -> Tensor | None:
    """A tensor that stays as it is. A parameter does not: training changes it."""
    found = constant(node)
    if (
        not isinstance(found, Tensor)
        or isinstance(found, (torch.nn.Parameter, torch._subclasses.FakeTensor))
        or found.requires_grad
        or found.is_complex()
        or not 0 < found.numel() <= _READ_ELEMENTS
        or found.device.type == "meta"
        or any(_writes(user) for user in node.users)
    ):
        return None
    return found


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Call:
    """One call: its arguments by their names in the schema, and their bounds."""

    def __init__(self, node: fx.Node, known: dict[fx.Node, Interval]) -> None:
        self.node, self._known, self.arguments = node, known, arguments(node)

    def number(self, name: str, default: float) -> float | None:
        """A plain number; None if it is not known when compiling."""
        x = self.arguments.get(name, default)
        x = default if x is None else x
        return float(x) if isinstance(x, (int, float)) else None

    def of(self, x: Any) -> Interval:
        if isinstance(x, fx.Node):
            return self._known[x]
        if isinstance(x, (bool, int, float)):
            rounds = _rounded if _is_rounded_once(self.node) else _outward
            return rounds(float(x), float(x), _dtype(self.node))
        return _REALS

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


def _union(*parts: Interval) -> Interval:
    return min(low for low, _ in parts), max(high for _, high in parts)


def _times(a: Interval, b: Interval) -> Interval:
    products = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)


def _plus(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _negative(a: Interval) -> Interval:
    return -a[1], -a[0]


def _alpha(c: _Call) -> Interval:
    alpha = c.arguments.get("alpha")
    return (1.0, 1.0) if alpha is None else c.of(alpha)


def _add(c: _Call) -> Interval:
    whole = _plus(c[0], _times(c[1], _alpha(c)))
    mixed = _mixture(c) if _alpha(c) == (1.0, 1.0) else None
    return whole if mixed is None else (max(whole[0], mixed[0]), min(whole[1], mixed[1]))


def _mixture(c: _Call) -> Interval | None:
    """w x + (1 - w) y with w in [0, 1] lies between x and y, as with x = 1 in w + (1 - w) y."""
    for a, b in ((c.raw(0), c.raw(1)), (c.raw(1), c.raw(0))):
        for rest, y in _factors(b):
            if not isinstance(rest, fx.Node) or name_of(rest) not in ("rsub", "sub"):
                continue
            one, w = (rest.args[1], rest.args[0]) if name_of(rest) == "rsub" else rest.args[:2]
            if one != 1 or not isinstance(w, fx.Node) or len(rest.args) != 2:
                continue
            low, high = c.bounds(w)
            x = next((x for v, x in [(a, 1.0), *_factors(a)] if v is w), None)
            if x is not None and low >= 0 and high <= 1:
                # Rounding 1 - w takes no sum of the two above 1.
                return _loose(*_union(c.bounds(x), c.bounds(y)), _dtype(c.node), [0.0, 1.0])
    return None


def _factors(x: Any) -> list[tuple[Any, Any]]:
    """The two factors of a product, in either order."""
    if not isinstance(x, fx.Node) or name_of(x) != "mul":
        return []
    return [(x.args[0], x.args[1]), (x.args[1], x.args[0])]


def _sub(c: _Call) -> Interval:
    return _plus(c[0], _negative(_times(c[1], _alpha(c))))


def _rsub(c: _Call) -> Interval:
    return _plus(c[1], _negative(_times(c[0], _alpha(c))))


def _square(a: Interval) -> Interval:
    low, high = sorted((abs(a[0]), abs(a[1])))
    return (0.0 if a[0] <= 0 <= a[1] else low * low, high * high)


def _mul(c: _Call) -> Interval:
    a, b = c.raw(0), c.raw(1)
    return _square(c[0]) if a is b and isinstance(a, fx.Node) else _times(c[0], c[1])


def _quotient(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1]:
        return _REALS  # 1 / -0.0 is -inf
    if math.inf in (abs(b[0]), abs(b[1])) and math.inf in (abs(a[0]), abs(a[1])):
        positive, negative = a[0] >= 0, a[1] <= 0
        if b[1] < 0:
            positive, negative = negative, positive
        return (0.0 if positive else -_INF), (0.0 if negative else _INF)
    quotients = [x / y for x in a for y in b]
    return min(quotients), max(quotients)


def _div(c: _Call) -> Interval:
    return _REALS if c.has("rounding_mode") else _quotient(c[0], c[1])


def _monotone(f: Callable[[float], float], exact: Sequence[float] = (0.0,)) -> _Rule:
    """A function that rises; `f` is exact at `exact`, where its values stand, and off by a few ulps elsewhere."""

    def rule(c: _Call) -> Interval:
        return _loose(_at(f, c[0][0]), _at(f, c[0][1]), _dtype(c.node), [_at(f, x) for x in exact])

    return rule


def _at(f: Callable[[float], float], x: float) -> float:
    try:
        return f(x)
    except OverflowError:
        return _INF
    except ValueError:
        return math.nan


def _loose(low: float, high: float, dtype: torch.dtype | None, exact: Sequence[float] = ()) -> Interval:
    """A few ulps wider, but not past an exact value."""
    if dtype is None or not dtype.is_floating_point:
        return low, high
    slack = _ULPS * torch.finfo(dtype).eps
    down, up = low - slack * abs(low), high + slack * abs(high)
    down = max([down, *(x for x in exact if x <= low)])
    up = min([up, *(x for x in exact if x >= high)])
    return down, up


def _log(x: float) -> float:
    return -_INF if x <= 0 else math.log(x)


def _log1p(x: float) -> float:
    return -_INF if x <= -1 else math.log1p(x)


def _exp(x: float) -> float:
    return 0.0 if x == -_INF else math.exp(x)


def _softplus(c: _Call) -> Interval:
    """Within max(x, 0) and max(x, 0) + log(2) / beta, and never below 0."""
    beta = c.number("beta", 1.0)
    if beta is None or beta <= 0:
        return _REALS
    # The other branch, x itself, begins at the threshold, which need not be positive.
    threshold = c.number("threshold", 20.0)
    floor = 0.0 if threshold is not None and threshold >= 0 else min(c[0][0], 0.0)
    return floor, max(c[0][1], 0.0) + 0.6932 / beta


def _clamp(c: _Call) -> Interval:
    low, high = c[0]
    for name, at in (("min", 1), ("max", 2)):
        bound = c.arguments.get(name, c.arguments.get(f"{name}_val"))
        if bound is None and name_of(c.node) == "hardtanh":
            bound = {1: -1.0, 2: 1.0}[at]
        if bound is None:
            continue
        a, b = c.of(bound)
        low, high = (max(low, a), max(high, b)) if at == 1 else (min(low, a), min(high, b))
    return low, high


def _lerp(c: _Call) -> Interval:
    """Between its ends, for a weight between 0 and 1."""
    low, high = c.of(c.arguments["weight"])
    return _loose(*_union(c[0], c[1]), _dtype(c.node), [0.0, 1.0]) if low >= 0 and high <= 1 else _REALS


def _threshold(c: _Call) -> Interval:
    return _union(c[0], c.of(c.arguments["value"]))


def _pow(c: _Call) -> Interval:
    """Constant exponents that are whole, and bases that are numbers or lie on one side of 1."""
    exponent = c.raw(1)
    if isinstance(exponent, (int, float)):
        low, high = c[0]
        if exponent == 2:
            return _square(c[0])
        if exponent == 1:
            return c[0]
        if low > 0 and exponent < 0:
            return 0.0, (1.0 if low >= 1 else _INF)
        if low >= 0 and exponent > 0:
            return 0.0, (1.0 if high <= 1 else _INF)
        if exponent >= 0 and exponent % 2 == 0:
            return 0.0, _INF
        return _REALS
    low, high = c[1]
    if c[0][0] > 0:
        return 0.0, (1.0 if (c[0][0] >= 1 and high <= 0) or (c[0][1] <= 1 and low >= 0) else _INF)
    return (0.0, (1.0 if c[0][1] <= 1 else _INF)) if c[0][0] >= 0 and low >= 0 else _REALS


def _abs(c: _Call) -> Interval:
    low, high = sorted((abs(c[0][0]), abs(c[0][1])))
    return (0.0 if c[0][0] <= 0 <= c[0][1] else low), high


def _signs(c: _Call) -> Interval:
    """A sum: of any number of terms, so only its sign is known."""
    return (0.0 if c[0][0] >= 0 else -_INF), (0.0 if c[0][1] <= 0 else _INF)


def _product(c: _Call) -> Interval:
    if c[0][0] < 0:
        return _REALS
    return 0.0, (1.0 if c[0][1] <= 1 else _INF)


def _fixed(low: float, high: float) -> _Rule:
    return lambda c: (low, high)


def _same(c: _Call) -> Interval:
    return c[0]


def _with(*positions: int, also: tuple[float, ...] = ()) -> _Rule:
    """Every value comes from one of these arguments, or is one of `also`."""
    return lambda c: _union(*(c[i] for i in positions), *((x, x) for x in also))


def _cat(c: _Call) -> Interval:
    tensors = c.raw(0)
    return _union(*(c.of(t) for t in tensors)) if tensors else _REALS


def _pad(c: _Call) -> Interval:
    if c.arguments.get("mode", "constant") != "constant":
        return c[0]
    fill = c.arguments.get("value")
    return _union(c[0], c.of(0.0 if fill is None else fill))


def _getitem(c: _Call) -> Interval:
    source = c.node.args[0]
    # Of a call with several results the bounds are those of the values; the others are indices or buffers.
    if isinstance(source, fx.Node) and name_of(source) in _FIRST_ONLY and c.node.args[1] != 0:
        return _whole(c.node)
    return c[0]


def _full(c: _Call) -> Interval:
    fill = c.arguments.get("fill_value")
    return c.of(fill)


def _arange(c: _Call) -> Interval:
    ends = [c.arguments.get("start", 0), c.arguments.get("end")]
    step = c.arguments.get("step", 1)
    if not all(isinstance(x, (int, float)) for x in [*ends, step]):
        return (0.0, _INF) if isinstance(ends[0], (int, float)) and ends[0] >= 0 and step == 1 else _REALS
    return float(min(ends)), float(max(ends))


def _index_put(c: _Call) -> Interval:
    return _REALS if c.arguments.get("accumulate") else _union(c[0], c[2])


def _scatter(c: _Call) -> Interval:
    return _REALS if c.has("reduce") else _union(c[0], c[3])


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
    **_each("neg negative", lambda c: _negative(c[0])),
    **_each("reciprocal", lambda c: _quotient((1.0, 1.0), c[0])),
    **_each("rsqrt", lambda c: _loose(*_quotient((1.0, 1.0), _root(c[0])), _dtype(c.node), [1.0])),
    **_each("sqrt", _monotone(lambda x: math.sqrt(max(x, 0.0)), (0.0, 1.0))),
    **_each("exp", _monotone(_exp, (-_INF, 0.0))),
    **_each("exp2", _monotone(lambda x: 0.0 if x == -_INF else 2.0**x, (-_INF, 0.0))),
    **_each("expm1", _monotone(math.expm1, (-_INF, 0.0))),
    **_each("log log2 log10", lambda c: _log_signs(c[0], 1.0)),
    **_each("log1p", _monotone(_log1p)),
    **_each("tanh", _monotone(math.tanh, (-_INF, 0.0, _INF))),
    **_each("erf", _monotone(math.erf, (-_INF, 0.0, _INF))),
    **_each("erfc", _fixed(0.0, 2.0)),
    **_each("atan", _monotone(math.atan)),
    **_each("sigmoid softmax _softmax special_ndtr hardsigmoid", _fixed(0.0, 1.0)),
    **_each("relu6", lambda c: (min(max(c[0][0], 0.0), 6.0), min(max(c[0][1], 0.0), 6.0))),
    **_each("lerp", _lerp),
    **_each("threshold", _threshold),
    **_each("sin cos", _fixed(-1.0, 1.0)),
    **_each("log_sigmoid log_sigmoid_forward log_softmax _log_softmax", _fixed(-_INF, 0.0)),
    **_each("softplus", _softplus),
    **_each("relu", lambda c: (max(c[0][0], 0.0), max(c[0][1], 0.0))),
    **_each("clamp clip hardtanh", _clamp),
    **_each("clamp_min", lambda c: (max(c[0][0], c[1][0]), max(c[0][1], c[1][1]))),
    **_each("clamp_max", lambda c: (min(c[0][0], c[1][0]), min(c[0][1], c[1][1]))),
    **_each("max min", lambda c: _union(*(c.of(n) for n in c.node.all_input_nodes))),
    **_each("maximum", lambda c: (max(c[0][0], c[1][0]), max(c[0][1], c[1][1]))),
    **_each("minimum", lambda c: (min(c[0][0], c[1][0]), min(c[0][1], c[1][1]))),
    **_each("abs", _abs),
    **_each("square", lambda c: _square(c[0])),
    **_each("pow", _pow),
    **_each("cumsum sum mean", _signs),
    **_each("logcumsumexp", lambda c: (c[0][0], _INF)),
    **_each("prod cumprod", _product),
    **_each("linalg_vector_norm norm", _fixed(0.0, _INF)),
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
    return (0.0 if a[0] >= one else -_INF), (0.0 if a[1] <= one else _INF)
