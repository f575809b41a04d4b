"""Expand a node of a functional ATen graph into sums of products of indexed tensors.

Nodes on the state path are always expanded, and must be multilinear: anything else ends the match. What does not depend
on the state is looked into as far as `depth` says: through views only, through products too, or through selects too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, arguments, is_snapshot, is_tensor, name_of, widens
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
from lattn_compile.passes.spelled.masks import ELEMENTWISE, OfMask, of_mask
from lattn_compile.passes.spelled.proposal import CONSTANT, OUTER, NoMatch
from lattn_compile.passes.spelled.terms import (
    EYE,
    Expr,
    Factor,
    Term,
    add,
    atom,
    contract,
    inverse,
    is_mask,
    multiply,
    sum_over,
)
from lattn_compile.passes.spelled.views import PICKS, fill_of, of_booleans
from lattn_compile.passes.spelled.writer import value

__all__ = ["PRODUCTS", "SELECTS", "VIEWS", "Expander", "constant", "expandable", "is_literal", "is_zero"]

VIEWS, PRODUCTS, SELECTS = 0, 1, 2

_MAX_VISITS = 4000


class Expander:
    """Expands nodes with `root` as an opaque tensor.

    Args:
        index: of the graph.
        root: the previous state; None where there is none.
        path: the nodes that depend on it.
        depth: how far other nodes are looked into: VIEWS, PRODUCTS or SELECTS.
        matrices: nodes to be expanded whatever they are, one level.
        stored: whether casts that round are looked through: between two tokens they are how the state is stored.
    """

    def __init__(
        self,
        index: Index,
        root: fx.Node | None,
        path: Collection[fx.Node],
        depth: int,
        matrices: Collection[fx.Node] = (),
        *,
        stored: bool = False,
    ) -> None:
        self.index, self.root, self.path, self.depth, self.matrices = index, root, path, depth, matrices
        self.stored = stored
        self.given: dict[fx.Node, Expr] = {}  # what is expanded already
        self.visits = 0

    def expand(self, node: fx.Node) -> Expr:
        self.visits += 1
        if self.visits > _MAX_VISITS:
            raise NoMatch("TOO_MANY_TERMS", "the state update is too large to expand", node)
        if node is self.root:
            return atom(node, ones=self.index.ones)
        if self.given and node in self.given:
            return self.given[node]
        name = name_of(node)
        on_path = node in self.path
        if not on_path and (mask := self._mask(node)) is not None:
            return mask
        handler = None if is_snapshot(node) else _VIEWS.get(name)
        if handler is None and (on_path or self.depth >= PRODUCTS or self._constant(node)):
            handler = _PRODUCTS.get(name)
        if handler is None and (on_path or node in self.matrices):
            handler = _SUMS.get(name) or _PRODUCTS.get(name)
        if handler is None and (on_path or self.depth >= SELECTS):
            handler = _SELECTS.get(name)
        if not on_path and (not is_tensor(node) or (name in CASTS and not self._exact_cast(node))):
            handler = None
        if handler is not None and name not in _VIEWS and value(node).dtype not in (torch.float32, torch.float64):
            if on_path:
                raise NoMatch("ARITHMETIC_DTYPE", f"{name} computes in {value(node).dtype} on the state path", node)
            handler = None  # its rounding is part of the value
        if name == "getitem" and self.depth >= SELECTS and not on_path and (part := self._part(node)) is not None:
            return part
        if handler is None or not isinstance(node.target, torch._ops.OpOverload):
            if on_path:
                raise NoMatch("STATE_OP", f"{name} stands on the state path", node)
            return self._atom(node)
        try:
            return handler(self, node, arguments(node))
        except NoMatch as error:
            if on_path:
                error.node = error.node or node
                raise
            return self._atom(node)

    def _atom(self, node: fx.Node) -> Expr:
        node = self.index.same[node]
        if (known := constant(node)) is not None:
            return Expr([()] * len(value(node).shape), [Term(known, ())])
        if (fill := _fill(node)) is not None:
            return Expr([() if is_one(n) else (Label(n),) for n in value(node).shape], [Term(fill, ())] if fill else [])
        return self.opaque(node)

    def _mask(self, node: fx.Node) -> Expr | None:
        """A value that is made of masks: 0 or 1 by one of them, or two that are both set."""
        name = name_of(node)
        if name in _ANDS and all(_is_mask(x) and value(x).dtype == torch.bool for x in node.args):
            return multiply([self.expand(x) for x in node.args])  # type: ignore[arg-type]
        if not (name in ELEMENTWISE or name in PICKS or name in CASTS or name == "getitem"):
            return None
        if (found := of_mask(node)) is None or {found.unset, found.set} - {0.0, 1.0}:
            return None
        try:
            mask = self._along(found)
        except NoMatch:
            return None
        if found.unset == found.set:
            return Expr(mask.axes, [Term(1.0, ())] if found.set else [])
        return mask if found.set else _negated(mask)

    def _along(self, found: OfMask) -> Expr:
        """The mask with the axes of what is made of it."""
        x = self.expand(found.mask)
        for node, _ in reversed(found.steps):
            name = name_of(node)
            if name in ELEMENTWISE or name in CASTS:
                continue
            made = Expander(self.index, None, (), SELECTS)
            made.given[node.args[0] if name != "getitem" else node.args[0].args[0]] = x  # type: ignore[union-attr, index]
            if name == "getitem":
                part = made._part(node)
                if part is None:
                    raise NoMatch("AXES", "a part of a mask", node)
                x = part
            else:
                handler = _VIEWS.get(name) or _SELECTS.get(name)
                if handler is None:
                    raise NoMatch("AXES", f"{name} of a mask", node)
                x = handler(made, node, arguments(node))
        return x

    def opaque(self, node: fx.Node) -> Expr:
        """A tensor that is not looked into."""
        return atom(node, self.index.repeated(node), ones=self.index.ones)

    def _part(self, node: fx.Node) -> Expr | None:
        """One of the tensors that `unbind` returns, or `split` into parts of one position each."""
        whole, position = node.args
        if not isinstance(whole, fx.Node) or name_of(whole) not in _PARTS or not isinstance(position, int):
            return None
        a = arguments(whole)
        dim, keep = a["dim"] % value(a["self"]).dim(), name_of(whole) != "aten::unbind"
        if keep and not all(is_one(part.shape[dim]) for part in value(whole)):
            return None
        try:
            return _fixed(self.expand(a["self"]), dim, position, keep=keep)
        except NoMatch:
            return None

    def _constant(self, node: fx.Node) -> bool:
        """Products with a number are always looked into: the number belongs to the coefficient."""
        if name_of(node) not in ("aten::mul", "aten::div", "aten::neg", "aten::eye", "aten::diag_embed"):
            return False
        return not isinstance(node.args[1] if len(node.args) > 1 else None, fx.Node)

    def _exact_cast(self, node: fx.Node) -> bool:
        source = node.args[0]
        return is_tensor(source) and (widens(value(source).dtype, value(node).dtype) or _is_mask(source))

    def operand(self, x: Any) -> Expr:
        """A tensor operand, or a number as an expression without axes."""
        if isinstance(x, fx.Node):
            if not is_tensor(x):
                raise NoMatch("STATE_OP", f"{x.name} is a number that is only known at run time", x)
            return self.expand(x)
        return Expr([], [Term(number(x), ())])


def _is_mask(x: Any) -> bool:
    return isinstance(x, fx.Node) and of_booleans(x)


def _negated(x: Expr) -> Expr | None:
    """1 - x, of one mask."""
    if len(x.terms) != 1 or x.terms[0].coefficient != 1.0 or len(x.terms[0].factors) != 1:
        return None
    (mask,) = x.terms[0].factors
    return Expr(x.axes, [Term(1.0, (replace(mask, negated=not mask.negated),))]) if is_mask(mask) else None


def expandable(node: fx.Node) -> bool:
    """Whether there is anything to look into."""
    if node is EYE:
        return False
    name = name_of(node)
    return name in _SUMS or name in _PRODUCTS or name in _VIEWS or name in _SELECTS


def is_zero(node: fx.Node) -> bool:
    """A tensor of zeros."""
    return _fill(node) == 0


def _fill(node: fx.Node) -> float | None:
    """The number that every element of a tensor of floats is made as."""
    return fill_of(node) if is_tensor(node) and value(node).dtype.is_floating_point else None


_PARTS = frozenset(["aten::unbind", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split"])
_ANDS = frozenset(["aten::logical_and", "aten::bitwise_and", "aten::__and__"])
_COPIES = frozenset(
    f"aten::{name}"
    for name in ("lift_fresh_copy", "lift_fresh", "clone", "alias", "_to_copy", "view", "detach", "detach_")
)


def constant(node: fx.Node) -> float | None:
    """The number that a tensor of one element is known to hold."""
    while name_of(node) in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    v = value(node)
    if not isinstance(v, torch.Tensor) or any(not is_one(n) for n in v.shape):
        return None
    if name_of(node) in ("aten::full", "aten::scalar_tensor", "aten::new_full"):
        a = arguments(node)
        x = a.get("fill_value", a.get("s"))
        return float(x) if isinstance(x, (int, float)) else None
    if isinstance(x := node.meta.get(CONSTANT), torch.Tensor):
        return float(x)
    outer = node.meta.get(OUTER)
    if outer is not None and value(outer).dim() == v.dim():
        return constant(outer)
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    x = node.graph.owning_module
    for name in str(node.target).split("."):
        x = getattr(x, name, None)  # type: ignore[assignment]
    known = isinstance(x, torch.Tensor) and not isinstance(x, (torch.nn.Parameter, torch._subclasses.FakeTensor))
    return float(x) if known and is_literal(node) else None  # type: ignore[arg-type]


def is_literal(node: fx.Node) -> bool:
    """Whether a `get_attr` is a tensor that the code makes anew at every run: a buffer, or a tensor that was closed
    over and is named alike, may be changed."""
    made_anew = node.users and all(name_of(u) in ("aten::lift_fresh_copy", "aten::lift_fresh") for u in node.users)
    return bool(made_anew) and str(node.target).startswith(("_tensor_constant", "lifted_tensor"))


def number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise NoMatch("STATE_OP", f"{x!r} is no number")
    return float(x)


def _dims(x: Any, rank: int) -> list[int]:
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
        source, target = _dims(a["source"], rank), _dims(a["destination"], rank)
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
    if not widens(before, after) and not e.stored and not _is_mask(source):
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
    out = _fixed(x, dim, position % size, keep=False)
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
    return _fixed(x, dim, start % size if start < 0 else start, keep=True)


def _fixed(x: Expr, dim: int, position: int, *, keep: bool) -> Expr:
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


# Products.


def _mul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return multiply([e.operand(a["self"]), e.operand(a["other"])])


def _div(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a.get("rounding_mode") is not None or a["other"] in e.path or a["other"] is e.root:
        raise NoMatch("STATE_OP", "a division by the state", node)
    return multiply([e.operand(a["self"]), inverse(e.operand(a["other"]))])


def _neg(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return e.expand(a["self"]).scaled(-1.0)


def _einsum(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    operands = [e.expand(x) for x in a["tensors"]]
    equation = a["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    subscripts = [_letters(s, len(x.axes)) for s, x in zip(left.split(","), operands, strict=True)]
    if arrow:
        rank = max((sum(isinstance(c, int) for c in s) for s in subscripts), default=0)
        output = _letters(right, len(right.replace("...", "")) + rank)
    else:
        letters = [c for s in subscripts for c in s]
        output = sorted((c for c in set(letters) if isinstance(c, int)), reverse=True)
        output += sorted(c for c in set(letters) if isinstance(c, str) and letters.count(c) == 1)
    for s in subscripts:
        if len(set(s)) != len(s):
            raise NoMatch("AXES", "a diagonal in an einsum", node)
    return contract(operands, subscripts, output)


def _letters(subscript: str, rank: int) -> list[Any]:
    """One name an axis; the axes of `...` are counted from the last, so that they line up."""
    head, dots, tail = subscript.partition("...")
    hidden = rank - len(head) - len(tail) if dots else 0
    return [*head, *range(hidden - 1, -1, -1), *tail]


def _matmul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    names = list(a)
    return _product(e.operand(a[names[0]]), e.operand(a[names[1]]))


def _product(x: Expr, y: Expr) -> Expr:
    """torch.matmul: vectors are rows on the left and columns on the right, batch axes broadcast."""
    m, n = len(x.axes), len(y.axes)
    rows = [*range(m - 3, -1, -1), "i", "j"] if m > 1 else ["j"]
    columns = [*range(n - 3, -1, -1), "j", "l"] if n > 1 else ["j"]
    batch = list(range(max(m, n) - 3, -1, -1))
    return contract([x, y], [rows, columns], [*batch, *(["i"] if m > 1 else []), *(["l"] if n > 1 else [])])


def _outer(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    names = list(a)
    return contract([e.operand(a[names[0]]), e.operand(a[names[1]])], [["i"], ["j"]], ["i", "j"])


def _vecdot(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["x"]), e.operand(a["y"])
    product = multiply([x, y])
    return _summed(product, [a["dim"] % len(product.axes)], keep=False)


def _inner(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    left = [("x", i) for i in range(len(x.axes) - 1)]
    right = [("y", i) for i in range(len(y.axes) - 1)]
    return contract([x, y], [[*left, "j"], [*right, "j"]], [*left, *right])


def _tensordot(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    left: list[Any] = [("x", i) for i in range(len(x.axes))]
    right: list[Any] = [("y", i) for i in range(len(y.axes))]
    for n, (i, j) in enumerate(zip(a["dims_self"], a["dims_other"], strict=True)):
        left[i % len(left)] = right[j % len(right)] = n
    return contract([x, y], [left, right], [n for n in left + right if not isinstance(n, int)])


def _kron(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    rank = max(len(x.axes), len(y.axes))
    left, right = ([()] * (rank - len(z.axes)) + z.axes for z in (x, y))
    return Expr(
        [(*i, *j) for i, j in zip(left, right, strict=True)], multiply([Expr([], x.terms), Expr([], y.terms)]).terms
    )


def _chain(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """linalg.multi_dot and chain_matmul."""
    first, *rest = (e.operand(x) for x in next(iter(a.values())))
    for y in rest:
        first = _product(first, y)
    return first


def _linear(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a.get("bias") is not None:
        raise NoMatch("STATE_OP", "a linear layer with a bias", node)
    x, w = e.operand(a["input"]), e.operand(a["weight"])
    batch = list(range(len(x.axes) - 1))
    return contract([x, w], [[*batch, "j"], ["i", "j"]], [*batch, "i"])


def _sum(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    dims = _dims(a.get("dim"), len(x.axes))
    out = _summed(x, dims, keep=bool(a.get("keepdim", False)))
    if name_of(node) == "aten::mean":
        count = math.prod(constant_size(value(a["self"]).shape[d]) or 0 for d in dims)
        if not count:
            raise NoMatch("AXES", "a mean over a symbolic axis", node)
        out = out.scaled(1.0 / count)
    return out


def _summed(x: Expr, dims: Sequence[int], *, keep: bool) -> Expr:
    labels = [label for d in dims for label in flat(x.axes[d])]
    axes = [() if i in dims else axis for i, axis in enumerate(x.axes) if keep or i not in dims]
    return Expr(axes, sum_over(x.terms, labels))


def _diag_embed(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    rank = len(value(node).shape)
    if a.get("offset", 0) != 0 or {a.get("dim1", -2) % rank, a.get("dim2", -1) % rank} != {rank - 2, rank - 1}:
        raise NoMatch("STATE_OP", "a diagonal beside the main one", node)
    column: Axis = tuple(Label(label.size) for label in flat(x.axes[-1]))
    eye = Factor(EYE, (x.axes[-1], column))
    return Expr([*x.axes, column], [Term(t.coefficient, (*t.factors, eye)) for t in x.terms])


def _eye(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    rows, columns = value(node).shape
    if not same_size(rows, columns):
        raise NoMatch("STATE_OP", "an identity matrix that is not square", node)
    if is_one(rows):
        return Expr([(), ()], [Term(1.0, ())])
    axes: list[Axis] = [(Label(rows),), (Label(columns),)]
    return Expr(axes, [Term(1.0, (Factor(EYE, tuple(axes)),))])


# Sums: expanded on the state path, and in matrices that act on it.


def _add(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    alpha = number(a.get("alpha", 1))
    name = name_of(node)
    if name == "aten::sub":
        return add([x, y.scaled(-alpha)])
    if name == "aten::rsub":
        return add([y, x.scaled(-alpha)])
    return add([x, y.scaled(alpha)])


def _addcmul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    product = multiply([e.operand(a["tensor1"]), e.operand(a["tensor2"])])
    return add([e.operand(a["self"]), product.scaled(number(a.get("value", 1)))])


def _addcdiv(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a["tensor2"] in e.path or a["tensor2"] is e.root:
        raise NoMatch("STATE_OP", "a division by the state", node)
    quotient = multiply([e.operand(a["tensor1"]), inverse(e.operand(a["tensor2"]))])
    return add([e.operand(a["self"]), quotient.scaled(number(a.get("value", 1)))])


def _addmm(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """baddbmm, addbmm, addmm, addmv, addr: beta * input + alpha * (first @ second)."""
    names, name = list(a), name_of(node)
    x, y = e.operand(a[names[1]]), e.operand(a[names[2]])
    if name == "aten::addr":
        product = contract([x, y], [["i"], ["j"]], ["i", "j"])
    elif name == "aten::addbmm":
        product = contract([x, y], [["n", "i", "j"], ["n", "j", "l"]], ["i", "l"])
    else:
        product = _product(x, y)
    beta, alpha = number(a.get("beta", 1)), number(a.get("alpha", 1))
    return add([e.operand(a[names[0]]).scaled(beta), product.scaled(alpha)])


def _lerp(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """start + weight * (end - start)"""
    start, end, weight = e.operand(a["self"]), e.operand(a["end"]), e.operand(a["weight"])
    again, other = e.operand(a["self"]), e.operand(a["weight"])
    return add([start, multiply([weight, end]), multiply([other, again]).scaled(-1.0)])


def _choice(e: Expander, node: fx.Node, mask: Any, x: Expr, y: Expr) -> Expr:
    """x where the mask is set, else y."""
    if not isinstance(mask, fx.Node) or mask in e.path or mask is e.root:
        raise NoMatch("STATE_OP", f"what {name_of(node)} keeps of the state depends on the state", node)
    chosen, other = e.expand(mask), _negated(e.expand(mask))
    if other is None:
        chosen, other = e.opaque(mask), _negated(e.opaque(mask))
    assert other is not None
    return add([multiply([chosen, x]), multiply([other, y])])


def _where(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return _choice(e, node, a["condition"], e.operand(a["self"]), e.operand(a["other"]))


def _masked_fill(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return _choice(e, node, a["mask"], e.operand(a["value"]), e.operand(a["self"]))


Handler = Callable[[Expander, fx.Node, dict[str, Any]], Expr]

_VIEWS: dict[str, Handler] = {
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

_PRODUCTS: dict[str, Handler] = {
    "aten::mul": _mul,
    "aten::div": _div,
    "aten::neg": _neg,
    "aten::einsum": _einsum,
    "aten::matmul": _matmul,
    "aten::bmm": _matmul,
    "aten::mm": _matmul,
    "aten::mv": _matmul,
    "aten::dot": _matmul,
    "aten::vdot": _matmul,
    "aten::outer": _outer,
    "aten::linalg_vecdot": _vecdot,
    "aten::inner": _inner,
    "aten::tensordot": _tensordot,
    "aten::kron": _kron,
    "aten::linalg_multi_dot": _chain,
    "aten::chain_matmul": _chain,
    "aten::linear": _linear,
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::diag_embed": _diag_embed,
    "aten::eye": _eye,
}

_SUMS: dict[str, Handler] = {
    "aten::add": _add,
    "aten::sub": _add,
    "aten::rsub": _add,
    "aten::addcmul": _addcmul,
    "aten::addcdiv": _addcdiv,
    "aten::baddbmm": _addmm,
    "aten::addbmm": _addmm,
    "aten::addmm": _addmm,
    "aten::addmv": _addmm,
    "aten::addr": _addmm,
    "aten::lerp": _lerp,
    "aten::where": _where,
    "aten::masked_fill": _masked_fill,
}

_SELECTS: dict[str, Handler] = {"aten::select": _select}
