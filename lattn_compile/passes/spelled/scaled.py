"""Smaller shapes for a test run: fewer sequences, heads and channels than the graph was traced with.

Which axis of which node is the batch follows from the `lattn::` op, whose axes are known: axes that an op ties together
form classes, reshapes tie groups of axes, and a dimension is carried by exactly the classes that it reaches. A graph
that cuts or indexes such an axis is not scaled.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.proposal import Proposal
from lattn_compile.passes.spelled.reach import Needs, numbers
from lattn_compile.passes.spelled.subgraph import Region, hint, shape_of
from lattn_compile.passes.spelled.writer import value

__all__ = ["Sizes", "Unscalable", "other_sizes", "plans", "reaching_sizes", "real"]

Sizes = Callable[[fx.Node], Any]
"""A node's shape (a list of them for several tensors), or the number that it is."""

FEW = 2
"""Not 1: size-one axes broadcast, which could hide a mistake."""

FEW_CHANNELS = 8


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME = _words(
    "clone alias contiguous to _to_copy type_as lift_fresh_copy convert_element_type flip roll tril triu cumsum "
    "cumprod softmax log_softmax logsumexp copy fill log_sigmoid_forward"
)
_POINTWISE = _words(
    "add sub rsub mul multiply div divide true_divide neg reciprocal exp exp2 expm1 log log1p log2 sigmoid "
    "log_sigmoid softplus silu tanh pow square sqrt rsqrt erf sin cos logaddexp lerp addcmul addcdiv where masked_fill "
    "expand_as expand broadcast_to eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and "
    "bitwise_or"
)
_MATMULS = _words("mm bmm matmul addmm baddbmm mv dot")
_RESHAPES = _words("view _unsafe_view reshape view_as reshape_as flatten unflatten")
_REDUCTIONS = _words("sum mean prod linalg_vector_norm norm logsumexp")
_LIKE = _words("zeros_like ones_like empty_like full_like")


class Unscalable(Exception):
    """An op stands in the way, or the smaller shapes do not fit together."""


def real(node: fx.Node) -> Any:
    """The sizes the graph was traced with."""
    return _each_shape(value(node), hint)


def _each_shape(v: Any, number: Callable[[Any], Any]) -> Any:
    return tree_map(lambda x: tuple(number(n) for n in x.shape) if isinstance(x, Tensor) else number(x), v)


def other_sizes(regions: Sequence[Region], frontier: Sequence[fx.Node]) -> Iterator[Sizes]:
    """Other sizes of a graph whose sizes are symbolic, such that all its guards hold; none if no size is.

    One size proves little: at two tokens, a sum of two terms is as good as an inverse.
    """
    known, holds = _symbols([*frontier, *regions[0].nodes])
    for change in (lambda n: n + 5, lambda n: 2 * n, lambda n: 4 * n, lambda n: n + 1, lambda n: n - 1):
        chosen = {s: change(n) for s, n in known.items()}
        if known and holds(chosen):
            yield _resized(chosen)


def reaching_sizes(regions: Sequence[Region], needed: Needs) -> Iterator[Sizes]:
    """The traced sizes, made so large where they are symbolic that all of `needed` hold, and the guards.

    If the graph does not take sizes that large, the largest that it takes.
    """
    known, holds = _symbols([n for region in regions for n in [*region.inputs, *region.nodes]])
    if not known:
        return
    short = {s for size, n in needed.items() if int(size.xreplace(known)) < n for s in size.free_symbols}
    if not short:
        yield _resized(known)
        return
    if not short <= known.keys():
        return
    steps = [lambda n, m=m: n + m for m in (5, 16, 40, 100, 200, 400, 800)]
    steps += [lambda n, m=m: n * m for m in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    for change in sorted(steps, key=lambda f: max(f(known[s]) for s in short)):
        chosen = {s: change(n) if s in short else n for s, n in known.items()}
        if max(chosen[s] for s in short) > _MOST:
            break
        if holds(chosen) and all(int(size.xreplace(chosen)) >= n for size, n in needed.items()):
            yield _resized(chosen)
    env = _numbers_of(regions)[0].node.shape_env
    ends = {s: env.var_to_range[s].upper for s in short}
    if all(getattr(n, "is_Integer", False) and n <= _MOST for n in ends.values()):
        for less in range(int(min(ends.values()))):
            chosen = {s: int(ends[s]) - less if s in ends else n for s, n in known.items()}
            if holds(chosen):
                yield _resized(chosen)
                return


_MOST = 4096
"""Tokens, or chunks, of a self-check at a size that was not traced."""


def _numbers_of(regions: Sequence[Region]) -> list[torch.SymInt]:
    return numbers(n for region in regions for n in [*region.inputs, *region.nodes])


def traced(regions: Sequence[Region], size: Any) -> int:
    """A symbolic size as traced; 0 if that is not known."""
    known, _ = _symbols([n for region in regions for n in [*region.inputs, *region.nodes]])
    return int(size.xreplace(known)) if size.free_symbols <= known.keys() else 0


def symbolic(regions: Sequence[Region]) -> tuple[list[str], list[str]]:
    """The sizes that are symbolic, and the ranges of their symbols, as text."""
    found = _numbers_of(regions)
    free = {s: n.node.shape_env.var_to_range.get(s) for n in found for s in n.node.expr.free_symbols}
    return [str(n.node.expr) for n in found], sorted(f"{s} {bounds}" for s, bounds in free.items())


def _symbols(nodes: Sequence[fx.Node]) -> tuple[dict[Any, int], Callable[[dict[Any, int]], bool]]:
    """The symbols of all sizes as traced, none if one is unknown; and whether other numbers keep all guards."""
    found = numbers(nodes)
    free = sorted({s for n in found for s in n.node.expr.free_symbols}, key=str)
    if not free:
        return {}, lambda chosen: False
    env = found[0].node.shape_env
    traced = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # the latter before 2.12
    known = {s: traced.get(s) for s in free}
    if any(size is None for size in known.values()):
        return {}, lambda chosen: False

    def holds(chosen: dict[Any, int]) -> bool:
        ranges = all(env.var_to_range[s].lower <= n <= env.var_to_range[s].upper for s, n in chosen.items())
        return ranges and not any(g.expr.xreplace(chosen) == False for g in env.guards)  # noqa: E712

    return {s: int(n) for s, n in known.items()}, holds


def _resized(chosen: dict[Any, int]) -> Sizes:
    def number(n: Any) -> Any:
        if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return n
        found = n.node.expr.xreplace(chosen)
        kind = int if isinstance(n, torch.SymInt) else float if isinstance(n, torch.SymFloat) else bool
        return kind(found)

    def of(node: fx.Node) -> Any:
        return _each_shape(value(node), number)

    return of


def plans(proposal: Proposal, regions: Sequence[Region]) -> Iterator[Sizes]:
    """Smaller and smaller sizes. Ends early where a dimension cannot be followed through the graph."""
    q, v = proposal.op.args[0], proposal.op.args[2]
    if not isinstance(q, fx.Node) or not isinstance(v, fx.Node) or len(shape_of(q)) != 4:
        return
    try:
        axes = _Axes(proposal.frontier, regions)
        for old, new in zip(proposal.old, proposal.new, strict=True):
            axes.same(axes.of[old][0], axes.of[new][0])
    except Unscalable:
        return
    if q not in axes.of or v not in axes.of:
        return
    (batch, _, heads, keys), (_, _, value_heads, channels) = axes.of[q][0], axes.of[v][0]
    dimensions = (((batch,), FEW), ((heads, value_heads), FEW), ((channels,), FEW_CHANNELS), ((keys,), FEW_CHANNELS))
    for seeds, few in dimensions:
        size = axes.size[seeds[0]]
        if size > few:
            with contextlib.suppress(Unscalable):
                axes.carry(seeds, size, few)
                yield axes.sizes(dict(axes.carried))


class _Axes:
    """The axes of all nodes, numbered; those that must be equal are merged (union-find).

    Attributes:
        size: of each axis, as traced.
        fixed: axes that must keep their size.
        groups: axes of one side hold the same elements as those of the other.
        of: per node and tensor, its axes.
        carried: per class, the dimensions that it carries as (size, smaller size).
    """

    def __init__(self, frontier: Sequence[fx.Node], regions: Sequence[Region]) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.fixed: set[int] = set()
        self.groups: list[tuple[list[int], list[int]]] = []
        self.of: dict[fx.Node, list[list[int]]] = {}
        self.carried: dict[int, list[tuple[int, int]]] = {}
        for node in frontier:
            self._new(node)
        for region in regions:
            for node in region.nodes:
                if node not in self.of:
                    self._new(node)
                    if node in region.constants:
                        self.fixed.update(x for axes in self.of[node] for x in axes)
                    elif node.op == "call_function" and self.of[node]:
                        self._tie(node)

    def _new(self, node: fx.Node) -> None:
        shapes = real(node)
        v = value(node)
        if isinstance(v, Tensor):
            shapes = [shapes]
        elif not isinstance(v, (list, tuple)):
            shapes = []
        self.of[node] = [[self._axis(n) for n in shape] for shape in shapes if isinstance(shape, tuple)]

    def _axis(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def find(self, x: int) -> int:
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def same(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        """The axes are equal where their sizes are; the rest was broadcast."""
        for x, y in zip(xs, ys, strict=True):
            if self.size[x] == self.size[y]:
                self.parent[self.find(x)] = self.find(y)
            elif 1 not in (self.size[x], self.size[y]):
                self.fixed.update((x, y))

    def _tie(self, node: fx.Node) -> None:
        name, (out, *more) = short_name(node), self.of[node]
        tensors = [a for a in node.all_input_nodes if self.of.get(a)]
        ins = [self.of[a][0] for a in tensors]
        args: Any = node.args
        if name == "getitem":
            source = self.of[args[0]]
            self.same(source[args[1]], out)
        elif name.startswith("higher_order::"):
            raise Unscalable(name)
        elif name.startswith("lattn::"):
            self._lattn(node)
        elif not ins or name.startswith("new_"):
            if name in ("eye", "arange", "tril_indices", "triu_indices", "scalar_tensor", "tensor"):
                self.fixed.update(out)
        elif name in _SAME or name in _LIKE:
            for axes in [out, *more]:
                self.same(ins[0], axes) if len(axes) == len(ins[0]) else None
        elif name in _POINTWISE:
            for axes in ins:
                self._broadcast(axes, out)
        elif name in _RESHAPES:
            self._reshape(ins[0], out)
        elif name in _REDUCTIONS:
            self._reduction(node, ins[0], out)
        elif name == "einsum":
            self._einsum(node, out)
        elif name in _MATMULS:
            self._matmul(args, name, out)
        elif name == "linalg_solve_triangular":
            self._broadcast(ins[0][:-2], out[:-2])
            self._broadcast(ins[1], out)
            self.same(ins[0][-2:], [out[-2]] * 2)
        elif name in ("transpose", "swapaxes", "permute", "t", "mT", "numpy_T", "movedim", "diagonal"):
            self._permute(node, name, ins[0], out)
        else:
            self._cut(node, name, ins, [out, *more])

    def _broadcast(self, axes: Sequence[int], out: Sequence[int]) -> None:
        if axes:
            self.same(axes, out[len(out) - len(axes) :])

    def _lattn(self, node: fx.Node) -> None:
        q, k, v, g, beta, state = [self.of[a][0] if isinstance(a, fx.Node) else None for a in node.args[:6]]
        if any(a is not None for a in node.args[6:]):
            raise Unscalable("lengths")
        assert q is not None and k is not None and v is not None
        o, final, *rest = self.of[node]
        self.same(q, k)
        self.same(q[:2], v[:2])
        self.same(v, o)
        for gate in (g, beta):
            if gate is not None:
                self.same(gate[:3], v[:3])
                self.same(gate[3:], k[3 : len(gate)])
        for s in (state, final):
            if s is not None:
                self.same(s, [v[0], v[2], k[3], v[3]])
        for axes in rest:
            if any(self.size[x] for x in axes):
                raise Unscalable("checkpoints")

    def _reshape(self, ins: list[int], out: list[int]) -> None:
        """Ties the smallest runs of axes with equal products."""
        i = j = 0
        while i < len(ins) or j < len(out):
            left, right = ins[i : i + 1], out[j : j + 1]
            i, j = i + len(left), j + len(right)
            a, b = math.prod(self.size[x] for x in left), math.prod(self.size[x] for x in right)
            while a != b:
                if a < b and i < len(ins):
                    left.append(ins[i])
                    a, i = a * self.size[ins[i]], i + 1
                elif b < a and j < len(out):
                    right.append(out[j])
                    b, j = b * self.size[out[j]], j + 1
                else:
                    raise Unscalable("reshape")
            left = [x for x in left if self.size[x] != 1]
            right = [x for x in right if self.size[x] != 1]
            if len(left) == len(right) == 1:
                self.same(left, right)
            elif left or right:
                self.groups.append((left, right))

    def _reduction(self, node: fx.Node, ins: list[int], out: list[int]) -> None:
        if len(ins) == len(out):
            self.same(ins, out)
        elif out:
            at = 2 if short_name(node) in ("linalg_vector_norm", "norm") else 1
            dims = node.args[at] if len(node.args) > at else node.kwargs.get("dim")
            gone = {d % len(ins) for d in ([dims] if isinstance(dims, int) else dims)}  # type: ignore[union-attr, operator]
            self.same([x for d, x in enumerate(ins) if d not in gone], out)

    def _einsum(self, node: fx.Node, out: list[int]) -> None:
        equation, operands = node.args[:2]
        left, _, right = str(equation).replace(" ", "").partition("->")
        if "." in left or not right:
            raise Unscalable("einsum")
        letter: dict[str, int] = {}
        for term, axes in zip([*left.split(","), right], [*(self.of[n][0] for n in operands), out], strict=True):  # type: ignore[union-attr, index]
            for c, x in zip(term, axes, strict=True):
                self.same([x], [letter.setdefault(c, x)])

    def _matmul(self, args: Sequence[Any], name: str, out: list[int]) -> None:
        operands = [self.of[a][0] for a in args if isinstance(a, fx.Node)]
        if name in ("addmm", "baddbmm"):
            self._broadcast(operands.pop(0), out)
        a, b = operands
        self.same([a[-1]], [b[-2] if len(b) > 1 else b[0]])
        rest = list(out)
        if len(b) > 1:
            self.same([b[-1]], [rest.pop()])
        if len(a) > 1:
            self.same([a[-2]], [rest.pop()])
        self._broadcast(a[:-2], rest)
        self._broadcast(b[:-2], rest)

    def _permute(self, node: fx.Node, name: str, ins: list[int], out: list[int]) -> None:
        order = list(range(len(ins)))
        args: Any = node.args
        if name == "permute":
            order = [d % len(ins) for d in args[1]]
        elif name in ("transpose", "swapaxes"):
            a, b = args[1], args[2]
            order[a], order[b] = order[b], order[a]
        elif name in ("t", "mT") and len(order) > 1:
            order[-1], order[-2] = order[-2], order[-1]
        elif name == "numpy_T":
            order.reverse()
        else:
            raise Unscalable(name)
        self.same([ins[d] for d in order], out)

    def _cut(self, node: fx.Node, name: str, ins: list[list[int]], outs: list[list[int]]) -> None:
        """Ops along one axis, which is then not scaled."""
        args: Any = node.args
        out, x = outs[0], ins[0]

        def dim(at: int, n: int, default: int = 0) -> int:
            d: Any = args[at] if len(args) > at else node.kwargs.get("dim", default)
            return operator.index(d) % n

        if name == "unsqueeze":
            d = dim(1, len(out))
            self.same(x, out[:d] + out[d + 1 :])
        elif name == "squeeze":
            self.same([a for a in x if self.size[a] != 1], [a for a in out if self.size[a] != 1])
            self.fixed.update(a for a in x if self.size[a] == 1)
        elif name in ("select", "unbind"):
            d = dim(1, len(x))
            self.fixed.add(x[d])
            for axes in outs:
                self.same(x[:d] + x[d + 1 :], axes)
        elif name in ("slice", "narrow", "split", "split_with_sizes", "chunk"):
            d = dim(1 if name in ("slice", "narrow") else 2, len(x))
            for axes in outs:
                self.same(x, axes)
                if self.size[x[d]] != self.size[axes[d]]:
                    self.fixed.update((x[d], axes[d]))
        elif name in ("cat", "concat", "stack"):
            d = dim(1, len(out))
            for axes in ins:
                self.same(axes, out[:d] + out[d + 1 :] if name == "stack" else [*out[:d], axes[d], *out[d + 1 :]])
                self.fixed.update([out[d]] if name == "stack" else [out[d], axes[d]])
        elif name in ("pad", "constant_pad_nd"):
            self.same(x, out)
            self.fixed.update(
                a for pair in zip(x, out, strict=True) for a in pair if self.size[pair[0]] != self.size[pair[1]]
            )
        elif name in ("select_scatter", "slice_scatter"):
            d = dim(2, len(out))
            self.same(x, out)
            part = ins[-1]
            if name == "select_scatter":
                self.fixed.add(out[d])
                self.same(out[:d] + out[d + 1 :], part)
            else:
                self.same(out, part)
                if self.size[out[d]] != self.size[part[d]]:
                    self.fixed.update((out[d], part[d]))
        elif name == "repeat_interleave" and len(args) > 2:
            d = dim(2, len(x))
            self.same(x[:d] + x[d + 1 :], out[:d] + out[d + 1 :])
            self.groups.append(([x[d]], [out[d]]))
        else:
            raise Unscalable(name)

    def carry(self, seeds: Sequence[int], size: int, few: int) -> None:
        """Scales a dimension of `size` to `few` wherever it goes, from the axes `seeds`. Raises Unscalable."""
        carrying = {self.find(x) for x in seeds}
        groups = [([self.find(x) for x in a], [self.find(y) for y in b]) for a, b in self.groups]
        fixed = {self.find(x) for x in self.fixed}
        guess = False
        while True:
            changed = False
            for pair in groups:
                counts = [sum(x in carrying for x in side) for side in pair]
                if counts[0] == counts[1]:
                    continue
                lacking = pair[counts[0] > counts[1]]
                can = [x for x in lacking if x not in carrying and x not in fixed and self._left(x) % size == 0]
                if not can:
                    raise Unscalable("reshape")
                if len(can) == 1 or guess:
                    # Among several the first: where a dimension is merged or split, the batch is the outermost.
                    carrying.add(can[0])
                    changed, guess = True, False
            if changed:
                continue
            if all(sum(x in carrying for x in a) == sum(y in carrying for y in b) for a, b in groups):
                break
            guess = True
        if carrying & fixed:
            raise Unscalable("a cut axis")
        for x in carrying:
            self.carried[x] = [*self.carried.get(x, []), (size, few)]

    def _left(self, x: int) -> int:
        """The part of an axis that carries nothing yet."""
        return self.size[x] // math.prod(size for size, _ in self.carried.get(x, ()))

    def sizes(self, carried: dict[int, list[tuple[int, int]]]) -> Sizes:
        def scaled(x: int) -> int:
            n = self.size[x]
            for size, few in carried.get(self.find(x), ()):
                n = n // size * few
            return n

        def of(node: fx.Node) -> Any:
            v = value(node)
            if node not in self.of or not isinstance(v, (Tensor, list, tuple)):
                return real(node)
            shapes = [tuple(scaled(x) for x in axes) for axes in self.of[node]]
            return shapes[0] if isinstance(v, Tensor) else shapes

        return of
