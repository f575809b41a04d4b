"""Views and selects of an expanded tensor: axes are regrouped, values stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, arguments, name_of, widens
from lattn_compile.passes.spelled.labels import (
    Axis,
    Label,
    constant_size,
    flat,
    is_one,
    regroup,
    same_size,
    size_of,
    unify,
)
from lattn_compile.passes.spelled.literals import is_mask_node
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import (
    EYE,
    Expr,
    Term,
    multiply,
)
from lattn_compile.passes.spelled.writer import value

if TYPE_CHECKING:
    from lattn_compile.passes.spelled.expand import Expander

__all__ = ["PRODUCTS", "SELECTS", "SELECT_RULES", "VIEWS", "VIEW_RULES", "dims_of", "fixed"]

VIEWS, PRODUCTS, SELECTS = 0, 1, 2
"""How far what does not depend on a state is looked into."""


def dims_of(x: Any, rank: int) -> list[int]:
    dims = [x] if isinstance(x, int) else list(x if x is not None else range(rank))
    if not dims:
        dims = list(range(rank))
    return [d % rank for d in dims]


# Views: axes are regrouped, values stay. The shape afterwards is that of the node's fake value.


def _reshape(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    return Expr(regroup(x.axes, value(node).shape), x.terms)


def _unsqueeze(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    axes = list(x.axes)
    axes.insert(a["dim"] % (len(axes) + 1), ())
    return Expr(axes, x.terms)


def _permute(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    rank = len(x.axes)
    dims = list(range(rank))
    name = name_of(node)
    if name == "aten::permute":
        dims = [d % rank for d in a["dims"]]
    elif name in ("aten::t", "aten::numpy_T"):
        dims.reverse()
    elif name == "aten::movedim":
        source, target = dims_of(a["source"], rank), dims_of(a["destination"], rank)
        rest = [d for d in dims if d not in source]
        for s, t in sorted(zip(source, target, strict=True), key=lambda p: p[1]):
            rest.insert(t, s)
        dims = rest
    elif rank >= 2:
        if name in ("aten::mT", "aten::mH", "aten::adjoint"):
            i, j = rank - 2, rank - 1
        else:
            i, j = a["dim0"] % rank, a["dim1"] % rank
        dims[i], dims[j] = dims[j], dims[i]
    return Expr([x.axes[d] for d in dims], x.terms)


def _expand(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    shape = value(node).shape
    axes: list[Axis] = [()] * (len(shape) - len(x.axes)) + list(x.axes)
    for i, n in enumerate(shape):
        if not is_one(n) and is_one(size_of(axes[i])):
            unify(axes[i], ())
            axes[i] = (Label(n),)
    return Expr(axes, x.terms)


def _repeat(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """`repeat` and `tile`: the copies are the major part of the axis."""
    x = e.expand(a["self"])
    repeats = list(a["repeats"] if "repeats" in a else a["dims"])
    axes: list[Axis] = [()] * (len(repeats) - len(x.axes)) + list(x.axes)
    repeats = [1] * (len(axes) - len(repeats)) + repeats
    for i, n in enumerate(repeats):
        if isinstance(n, fx.Node):
            raise NoMatch("AXES", "a repeat of symbolic size")
        if not is_one(n):
            axes[i] = (Label(n), *axes[i])
    return Expr(axes, x.terms)


def _repeat_interleave(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """The copies are the minor part of the axis."""
    x = e.expand(a["self"])
    n, dim = a["repeats"], a.get("dim")
    if not isinstance(n, int) or dim is None:
        raise NoMatch("AXES", "a repeat_interleave without a constant count and axis")
    axes = list(x.axes)
    if n != 1:
        axes[dim % len(axes)] = (*axes[dim % len(axes)], Label(n))
    return Expr(axes, x.terms)


def _same(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return e.expand(a["self"])


def _cast(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    source = a["self"] if "self" in a else node.args[0]
    before, after = value(source).dtype, value(node).dtype
    if not widens(before, after) and not e.stored and not is_mask_node(source):
        raise NoMatch("STATE_ROUNDED", f"the state path is cast from {before} to {after} inside a token", node)
    return e.expand(source)  # type: ignore[arg-type]


def _whole(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """A slice that keeps everything."""
    before, after = value(a["self"]).shape, value(node).shape
    if not all(same_size(m, n) for m, n in zip(before, after, strict=True)) or a.get("step", 1) != 1:
        if e.depth >= SELECTS and node not in e.path:
            return _slice(e, node, a)
        raise NoMatch("STATE_OP", "a part of the state is cut out", node)
    return e.expand(a["self"])


# Selects: an axis becomes a constant position.


def _select(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, dim, position = e.expand(a["self"]), a["dim"] % len(value(a["self"]).shape), a["index"]
    size = constant_size(value(a["self"]).shape[dim])
    if not isinstance(position, int) or size is None:
        raise NoMatch("AXES", "a select at a symbolic position", node)
    out = fixed(x, dim, position % size, keep=False)
    return _unstacked(e, out) if node in e.path else out


def _unstacked(e: Expander, x: Expr) -> Expr:
    """One entry of a stack is what was stacked: queries and keys that read the state in one product."""
    terms = []
    for term in x.terms:
        parts = [Expr([], [Term(term.coefficient, ())])]
        for f in term.factors:
            fixed = [i for i, axis in enumerate(f.index) if isinstance(axis, int)]
            if not fixed:
                parts.append(Expr([], [Term(1.0, (f,))]))
                continue
            if f.node is e.root:
                raise NoMatch("STATE_OP", "a part of the state is cut out", f.node)
            a = arguments(f.node) if f.node is not EYE and name_of(f.node) == "aten::stack" else {}
            if not a or fixed != [a["dim"] % len(f.index)]:
                parts.append(Expr([], [Term(1.0, (f,))]))
                continue
            inner = e.expand(a["tensors"][f.index[fixed[0]]])
            for axis, outer in zip(inner.axes, [i for i in f.index if not isinstance(i, int)], strict=True):
                unify(axis, outer)
            parts.append(Expr([], inner.terms))
        terms += multiply(parts).terms
    return Expr(x.axes, terms)


def _slice(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, dim = e.expand(a["self"]), a["dim"] % len(value(a["self"]).shape)
    size, start = constant_size(value(a["self"]).shape[dim]), a.get("start") or 0
    if not is_one(value(node).shape[dim]) or not isinstance(start, int) or size is None:
        raise NoMatch("AXES", "a slice of more than one position", node)
    return fixed(x, dim, start % size if start < 0 else start, keep=True)


def fixed(x: Expr, dim: int, position: int, *, keep: bool) -> Expr:
    fixed: dict[Label, int] = {}
    for label in reversed(flat(x.axes[dim])):
        size = constant_size(label.size)
        if size is None:
            raise NoMatch("AXES", "a select on a symbolic axis")
        fixed[label], position = position % size, position // size
    terms = []
    for term in x.terms:
        factors = []
        for f in term.factors:
            index: list[Any] = []
            for axis in f.index:
                labels = [] if isinstance(axis, int) else flat(axis)
                hit = [label in fixed for label in labels]
                if any(hit) and not all(hit):
                    raise NoMatch("AXES", "a select cuts across a flattened axis")
                if any(hit):
                    at = 0
                    for label in labels:
                        at = at * (constant_size(label.size) or 1) + fixed[label]
                    index.append(at)
                else:
                    index.append(axis)
            if f.node is EYE and any(isinstance(i, int) for i in index):
                raise NoMatch("AXES", "a row of an identity matrix")
            factors.append(replace(f, index=tuple(index)))
        terms.append(Term(term.coefficient, tuple(factors)))
    axes = list(x.axes)
    axes[dim : dim + 1] = [()] if keep else []
    return Expr(axes, terms)


Handler = Callable[["Expander", fx.Node, dict[str, Any]], Expr]

VIEW_RULES: dict[str, Handler] = {
    **dict.fromkeys(
        (
            "aten::view",
            "aten::_unsafe_view",
            "aten::reshape",
            "aten::flatten",
            "aten::unflatten",
            "aten::squeeze",
            "aten::view_as",
            "aten::reshape_as",
            "aten::_reshape_alias",
        ),
        _reshape,
    ),
    **dict.fromkeys(
        (
            "aten::permute",
            "aten::transpose",
            "aten::t",
            "aten::mT",
            "aten::mH",
            "aten::adjoint",
            "aten::numpy_T",
            "aten::movedim",
        ),
        _permute,
    ),
    **dict.fromkeys(("aten::expand", "aten::broadcast_to", "aten::expand_as"), _expand),
    **dict.fromkeys(("aten::clone", "aten::contiguous", "aten::alias", "aten::positive"), _same),
    **dict.fromkeys(CASTS, _cast),
    "aten::unsqueeze": _unsqueeze,
    "aten::repeat": _repeat,
    "aten::tile": _repeat,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::slice": _whole,
}

SELECT_RULES: dict[str, Handler] = {"aten::select": _select}
