"""Values of tokens 0 .. T-1 of an unrolled loop as one value with a token axis, without the T-fold nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.frontier import is_comparison
from lattn_compile.passes.spelled.labels import constant_size, same_size
from lattn_compile.passes.spelled.lift import (
    CREATIONS,
    PARTS,
    Call,
    Operand,
    Tensors,
    bind,
    is_function,
    reshaped,
    rule_of,
    same_sizes,
)
from lattn_compile.passes.spelled.writer import Writer, aten, value

_DEPTH = 64
"""Calls between a token's value and what it is cut from; beyond, values are stacked."""


def vectorize(writer: Writer, nodes: Sequence[fx.Node]) -> fx.Node:
    """`torch.stack(nodes)` for T nodes of equal shape and dtype: `[T, *shape]`, written before `writer.before`.

    What the tokens' values have in common is computed once for all of them, as far as it goes; what is left is stacked.
    """
    return Vectorizer(writer).stack(nodes)


class _Recurrent(Exception):
    """A token's value is computed from an earlier token's: only stacking is left."""


@dataclass(frozen=True)
class Piece:
    """A node as `size` entries of `base` along `dim` from `start` on; `keep`: that axis stays, else size is 1."""

    base: fx.Node
    dim: int
    start: int
    size: int
    keep: bool

    @property
    def cut(self) -> tuple[int, int, bool]:
        return self.dim, self.size, self.keep


class Vectorizer:
    """Vectorizes several columns (the T values of one name in the loop) with what they share written once."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._memo: dict[tuple[fx.Node, ...], Operand] = {}
        self._busy: set[fx.Node] = set()
        self._parts: dict[fx.Node, list[Piece | None] | None] = {}
        self._depth = 0
        self._budget = 2 * len(writer.graph.nodes) + 4096  # nodes looked at, in columns; a graph has at most its own

    def stack(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """As `vectorize`."""
        column = tuple(nodes)
        mark = len(self.writer.inserted)
        x = self.operand(column).stacked()
        first = value(column[0])
        if value(x).dtype == first.dtype and same_sizes(value(x).shape, [len(column), *first.shape]):
            return x
        for node in reversed(self.writer.inserted[mark:]):
            self.writer.graph.erase_node(node)
        del self.writer.inserted[mark:]
        self._memo.clear()
        return self._opaque(column).stacked()

    def operand(self, nodes: Sequence[fx.Node]) -> Operand:
        """How to write the column; nothing is written yet."""
        column = tuple(nodes)
        try:
            return self._plan(column)
        except _Recurrent:
            return self._opaque(column)
        finally:
            self._busy.clear()
            self._depth = 0

    def _operand(self, column: tuple[fx.Node, ...], **how: Any) -> Operand:
        return Operand(self.writer, len(column), value(column[0]), column=column, **how)

    def _opaque(self, column: tuple[fx.Node, ...]) -> Operand:
        operand = self._memo[column] = self._operand(column)
        return operand

    def _plan(self, column: tuple[fx.Node, ...]) -> Operand:
        if (known := self._memo.get(column)) is not None:
            return known
        self._budget -= len(column)
        first = column[0]
        if len(column) == 1:
            planned = self._pieces(column) or self._operand(column, constant=first)
        elif all(alike(first, node) for node in column[1:]):
            planned = self._operand(column, constant=first)
        elif self._depth >= _DEPTH or self._budget < 0:
            planned = self._operand(column)
        else:
            if not self._busy.isdisjoint(column):
                raise _Recurrent
            self._busy.update(column)
            self._depth += 1
            planned = self._pieces(column) or self._call(column) or self._operand(column)
            self._depth -= 1
            self._busy.difference_update(column)
        self._memo[column] = planned
        return planned

    def _call(self, column: tuple[fx.Node, ...]) -> Operand | None:
        """The same call in every token, made once."""
        first = column[0]
        rule = rule_of(first.target) if first.op == "call_function" else None
        if rule is None or any(node.target is not first.target for node in column):
            return None
        if not isinstance(value(first), torch.Tensor):
            return None
        if is_comparison(first):
            return None  # a value that the self-check draws, as it stands
        if any(len(n.args) != len(first.args) or n.kwargs.keys() != first.kwargs.keys() for n in column):
            return None
        try:
            args = tuple(_unify(arg) for arg in zip(*(n.args for n in column), strict=True))
            kwargs = {name: _unify(tuple(n.kwargs[name] for n in column)) for name in first.kwargs}
        except _Differ:
            return None
        call = Call(self.writer, len(column), first, bind(first.target, args, kwargs), self._plan)
        write = rule(call)
        varying = [x for x in call.asked if x.constant is None]
        if write is None or (varying and all(x.opaque for x in varying)):
            return None
        if not varying:
            return self._operand(column, constant=first)
        return self._operand(column, write=write, sources=frozenset().union(*(x.sources for x in call.asked)))

    # --- pieces of a tensor ------------------------------------------------------------------------------------------

    def _pieces(self, column: tuple[fx.Node, ...]) -> Operand | None:
        pieces: list[Piece] = []
        for node in column:
            piece = self._piece(node)
            if piece is None or (pieces and piece.cut != pieces[0].cut):
                return None
            pieces.append(piece)
        first = pieces[0]
        starts = [p.start for p in pieces]
        if len(column) == 1 and constant_size(value(first.base).shape[first.dim]) != first.size:
            return None  # a slice and an unsqueeze are no better than the unsqueeze
        like = value(first.base)
        if any(value(p.base).dtype != like.dtype or not same_sizes(value(p.base).shape, like.shape) for p in pieces):
            return None
        if all(alike(first.base, p.base) for p in pieces[1:]):
            return self._from_run(column, first, starts)
        if all(start == first.start for start in starts):
            return self._from_every_base(column, pieces)
        return self._from_runs(column, pieces) or self._from_equal_bases(column, pieces)

    def _from_run(self, column: tuple[fx.Node, ...], first: Piece, starts: list[int]) -> Operand | None:
        if not regular(starts, first.size):
            return None
        return self._operand(
            column,
            write=lambda: self._run(first.base, first.dim, starts, first, to=0),
            sources=frozenset([first.base]),
        )

    def _from_every_base(self, column: tuple[fx.Node, ...], pieces: list[Piece]) -> Operand | None:
        """The same cut in every token."""
        base, first = self._plan(tuple(p.base for p in pieces)), pieces[0]
        if base.opaque:
            return None
        if base.constant is not None:
            return self._operand(column, constant=column[0])

        def write() -> fx.Node:
            if first.keep:
                return self._slice(base.stacked(), first.dim + 1, first.start, first.start + first.size)
            if constant_size(base.value.shape[first.dim]) == 1:
                return reshaped(self.writer, base.stacked(), [len(column), *value(column[0]).shape])
            return self.writer.select(base.stacked(), first.dim + 1, first.start)

        return self._operand(column, write=write, sources=base.sources)

    def _from_equal_bases(self, column: tuple[fx.Node, ...], pieces: list[Piece]) -> Operand | None:
        """Bases that are the same value, computed anew for every token."""
        base = self._plan(tuple(p.base for p in pieces))
        return None if base.constant is None else self._from_run(column, pieces[0], [p.start for p in pieces])

    def _from_runs(self, column: tuple[fx.Node, ...], pieces: list[Piece]) -> Operand | None:
        """Token `i * m + j` is piece j of base i."""
        bases: list[fx.Node] = []
        for p in pieces:
            if not bases or not alike(bases[-1], p.base):
                bases.append(p.base)
        m, rest = divmod(len(pieces), len(bases))
        starts, first = [p.start for p in pieces[:m]], pieces[0]
        if rest or m < 2 or len(bases) < 2 or not regular(starts, first.size):
            return None
        for i, base in enumerate(bases):
            run = pieces[i * m : (i + 1) * m]
            if [p.start for p in run] != starts or not all(alike(base, p.base) for p in run):
                return None
        stacked = self._plan(tuple(bases))
        if stacked.opaque:
            return None

        def write() -> fx.Node:
            x = self._run(stacked.stacked(), first.dim + 1, starts, first, to=1)
            sizes = [self.writer.size(n) for n in (len(column), *value(x).shape[2:])]
            return self.writer.call(aten.reshape.default, x, sizes)

        return self._operand(column, write=write, sources=stacked.sources)

    def _run(self, base: fx.Node, dim: int, starts: list[int], like: Piece, to: int) -> fx.Node:
        """The pieces of `base` along `dim` at `starts`, their number as axis `to`."""
        low, high, n, size = min(starts), max(starts), len(starts), like.size
        step = abs(starts[1] - starts[0]) if n > 1 else 1
        x = self._slice(base, dim, low, high + size, step if size == 1 else 1)
        shape = value(x).shape
        if like.keep:
            if size == 1:
                x = self.writer.unsqueeze(x, dim + 1)
            else:
                split = [self.writer.size(s) for s in (*shape[:dim], n, size, *shape[dim + 1 :])]
                x = self.writer.call(aten.reshape.default, x, split)
        if n > 1 and starts[1] < starts[0]:
            x = self.writer.call(aten.flip.default, x, [dim])
        others = [d for d in range(value(x).dim()) if d != dim]
        return self.writer.permute(x, [*others[:to], dim, *others[to:]])

    def _slice(self, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
        if start == 0 and step == 1 and constant_size(value(x).shape[dim]) == end:
            return x
        return self.writer.call(aten.slice.Tensor, x, dim, start, end, step)

    def _piece(self, node: fx.Node) -> Piece | None:
        """The node as entries of another along one axis of known size, seen through cuts of cuts."""
        piece = self._cut(node)
        while piece is not None and (inner := self._cut(piece.base)) is not None:
            if not inner.keep or inner.dim != piece.dim:
                break
            piece = Piece(inner.base, piece.dim, inner.start + piece.start, piece.size, piece.keep)
        return piece

    def _cut(self, node: fx.Node) -> Piece | None:
        if node.op != "call_function" or not node.args or not isinstance(base := node.args[0], fx.Node):
            return None
        if node.target is operator.getitem:
            return self._part(base, node.args[1])
        x = value(base)
        if node.target not in (aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.squeeze.dims):
            return None
        if node.target in (aten.squeeze.dim, aten.squeeze.dims):
            dims = [node.args[1]] if isinstance(node.args[1], int) else list(node.args[1])  # type: ignore[arg-type, call-overload]
            if len(dims) != 1 or x.dim() == 0 or constant_size(x.shape[dims[0]]) != 1:
                return None
            return Piece(base, dims[0] % x.dim(), 0, 1, keep=False)
        args = bind(node.target, node.args, node.kwargs)
        dim = args.get("dim", 0) % x.dim()
        n = constant_size(x.shape[dim])
        if n is None:
            return None
        if node.target is aten.select.int:
            index = args["index"]
            return Piece(base, dim, index % n, 1, keep=False) if isinstance(index, int) else None
        start, end, step = args.get("start"), args.get("end"), args.get("step", 1)
        if step != 1 or not isinstance(start, int | None) or not isinstance(end, int | None):
            return None
        start, end, _ = slice(start, end).indices(n)
        return Piece(base, dim, start, end - start, keep=True) if end > start else None

    def _part(self, source: fx.Node, index: Any) -> Piece | None:
        if source not in self._parts:
            self._parts[source] = parts(source)
        known = self._parts[source]
        return None if known is None or not isinstance(index, int) else known[index]


def parts(source: fx.Node) -> list[Piece | None] | None:
    """The outputs of split, chunk or unbind as pieces of what was split, if sizes are known; empty ones are None."""
    if source.target not in PARTS:
        return None
    args = bind(source.target, source.args, source.kwargs)
    base, keep = args["self"], source.target is not aten.unbind.int
    dim, at = args.get("dim", 0) % value(base).dim(), 0
    pieces: list[Piece | None] = []
    for part in value(source):
        size = constant_size(part.shape[dim]) if keep else 1
        if size is None:
            return None
        pieces.append(Piece(base, dim, at, size, keep) if size else None)
        at += size
    return pieces


def regular(starts: list[int], size: int) -> bool:
    """Whether pieces of `size` at `starts` are cut by one slice: evenly spaced, and without gaps if larger than 1."""
    if len(starts) < 2:
        return True
    step = starts[1] - starts[0]
    if step == 0 or (size > 1 and abs(step) != size):
        return False
    return all(b - a == step for a, b in itertools.pairwise(starts))


class _Differ(Exception):
    """Arguments that are not tensors differ between tokens."""


def _unify(arg: tuple[Any, ...]) -> Any:
    """One argument of T calls: `Tensors` where it is a tensor, else what they agree on."""
    first = arg[0]
    if isinstance(first, fx.Node) and isinstance(value(first), torch.Tensor):
        if not all(isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor) for x in arg):
            raise _Differ
        shape = value(first).shape
        if not all(value(x).dtype == value(first).dtype and same_sizes(value(x).shape, shape) for x in arg[1:]):
            raise _Differ
        return Tensors(arg)
    if isinstance(first, list | tuple):
        if not all(isinstance(x, list | tuple) and len(x) == len(first) for x in arg):
            raise _Differ
        return [_unify(items) for items in zip(*arg, strict=True)]
    if not all(_agree(first, x) for x in arg[1:]):
        raise _Differ
    return first


def _agree(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two arguments have the same value in every run."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return False
        x, y = value(a), value(b)
        if isinstance(x, torch.SymInt) and isinstance(y, torch.SymInt):
            return same_size(x, y)
        return alike(a, b, depth)
    if isinstance(a, list | tuple):
        return (
            isinstance(b, list | tuple)
            and len(a) == len(b)
            and all(_agree(x, y, depth) for x, y in zip(a, b, strict=True))
        )
    return type(a) is type(b) and bool(a == b)


def alike(a: fx.Node, b: fx.Node, depth: int = 8) -> bool:
    """Whether two nodes compute the same value: the same calls on the same nodes, `depth` deep at most."""
    if a is b:
        return True
    if depth == 0 or a.target is not b.target or not is_function(a) or b.op != "call_function":
        return False
    if a.target in CREATIONS and a.args and isinstance(a.args[0], fx.Node):
        if not isinstance(b.args[0], fx.Node) or a.args[1:] != b.args[1:] or a.kwargs != b.kwargs:
            return False
        x, y = value(a), value(b)
        return x.dtype == y.dtype and x.device == y.device and same_sizes(x.shape, y.shape)
    return (
        len(a.args) == len(b.args)
        and a.kwargs.keys() == b.kwargs.keys()
        and all(_agree(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))
        and all(_agree(a.kwargs[k], b.kwargs[k], depth - 1) for k in a.kwargs)
    )
