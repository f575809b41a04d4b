"""Outputs put together token by token, put together at once: what is left of a loop after its recurrence is one op.

A `stack`, a `cat`, or a buffer written entry by entry, of values that are cut from one tensor and treated alike, is
that tensor with its axes moved, treated once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from lattn_compile.passes.spelled.labels import constant_size
from lattn_compile.passes.spelled.lift import Operand, as_before, bind, reshaped, same_sizes
from lattn_compile.passes.spelled.vectorize import Vectorizer
from lattn_compile.passes.spelled.writer import Writer, aten, keep_gradient, value

_SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
_UPWARD = 16
"""Nodes looked at between what the stacked values are cut from and an output of a fused loop."""


def simplify_stacks(gm: fx.GraphModule, outputs: Collection[fx.Node] | None = None) -> int:
    """Replace every stack, cat or buffer of like-treated pieces by one expression.

    What is replaced, and what only it used, is erased from the graph.

    Args:
        gm: a functional graph.
        outputs: only values cut from these, through a few calls, are put together; None: all.

    Returns: how many were replaced.
    """
    erased: list[fx.Node] = []
    written = 0
    for node, column in columns_of(gm.graph):
        writer = Writer(before=node, like=node)
        vectorizer = Vectorizer(writer)
        operand = vectorizer.operand(column.nodes)
        if operand.write is None or not (outputs is None or _comes_from(operand, outputs)):
            continue
        new = as_before(writer, column.join(writer, vectorizer.stack(column.nodes)), node)
        if new is not None:
            keep_gradient(new, node)
            node.replace_all_uses_with(new)
            erased.append(node)
            written += 1
        else:
            writer.undo()
        _erase_unused(writer.inserted)
    _erase_unused(erased)
    return written


def columns_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, Column]]:
    """Every stack, cat of equal parts, and buffer that was written entry by entry."""
    lengths: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if (column := _column(node, lengths)) is not None:
            yield node, column


@dataclass
class Column:
    """`nodes` put together along `dim` of `shape`: as a new axis, or (`joined`) end to end."""

    nodes: list[fx.Node]
    dim: int
    shape: torch.Size
    joined: bool

    def join(self, writer: Writer, x: fx.Node) -> fx.Node:
        """`[T, *]` to `shape`."""
        joined = self.joined
        if joined and x.target is aten.unsqueeze.default and x in writer.inserted and x.args[1] == self.dim + 1:
            x, joined = x.args[0], False  # type: ignore[assignment]
        others = list(range(1, value(x).dim()))
        x = writer.permute(x, [*others[: self.dim], 0, *others[self.dim :]])
        return reshaped(writer, x, self.shape) if joined else x


def _column(node: fx.Node, lengths: dict[fx.Node, int]) -> Column | None:
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    shape = value(node).shape
    if node.target in (aten.stack.default, aten.cat.default):
        args = bind(node.target, node.args, node.kwargs)
        nodes, dim, joined = list(args["tensors"]), args.get("dim", 0) % len(shape), node.target is aten.cat.default
        if joined and not _equal_parts(nodes, dim, len(shape)):
            return None
        return Column(nodes, dim, shape, joined)
    return _written(node, lengths) if node.target in _SCATTERS else None


def _equal_parts(nodes: list[fx.Node], dim: int, rank: int) -> bool:
    values = [value(n) for n in nodes]
    if any(v.dim() != rank or v.dtype != values[0].dtype for v in values):
        return False
    size = constant_size(values[0].shape[dim])
    return size is not None and all(constant_size(v.shape[dim]) == size for v in values)


@dataclass(frozen=True)
class _Write:
    """`source` goes to entries `start .. start + size` of `buffer` along `dim`; `joined`: source has that axis too."""

    buffer: fx.Node
    source: fx.Node
    dim: int
    start: int
    size: int
    joined: bool


def _whole(node: fx.Node) -> fx.Node:
    """The node, seen through slices of everything and through scatters over everything."""
    while node.op == "call_function":
        if node.target is aten.alias.default:
            node = node.args[0]  # type: ignore[assignment]
            continue
        if node.target not in (aten.slice.Tensor, aten.slice_scatter.default):
            break
        args = bind(node.target, node.args, node.kwargs)
        n = constant_size(value(node).shape[args.get("dim", 0)])
        start, end = args.get("start"), args.get("end")
        inner: fx.Node = args["src"] if node.target is aten.slice_scatter.default else args["self"]
        if args.get("step", 1) != 1 or start not in (None, 0):
            break
        everything = end is None or (isinstance(end, int) and (end == _END or (n is not None and end >= n)))
        if not everything or not same_sizes(value(inner).shape, value(node).shape):
            break
        if value(inner).dtype != value(node).dtype:
            break
        node = inner
    return node


_END = 2**63 - 1


def _write(node: fx.Node) -> _Write | None:
    if node.target not in _SCATTERS:
        return None
    args = bind(node.target, node.args, node.kwargs)
    shape = value(node).shape
    dim = args.get("dim", 0) % len(shape)
    n = constant_size(shape[dim])
    if n is None:
        return None
    if node.target is aten.select_scatter.default:
        if not isinstance(args["index"], int):
            return None
        return _Write(args["self"], args["src"], dim, args["index"] % n, 1, joined=False)
    start, end = args.get("start"), args.get("end")
    if args.get("step", 1) != 1 or not isinstance(start, int | None) or not isinstance(end, int | None):
        return None
    start, end, _ = slice(start, end).indices(n)
    return _Write(args["self"], args["src"], dim, start, end - start, joined=True) if end > start else None


def _written(node: fx.Node, lengths: dict[fx.Node, int]) -> Column | None:
    """A buffer every entry of which was written, as equal parts; of two writes to one entry the later one counts."""
    last = _write(node)
    if last is None:
        return None
    lengths[node] = lengths.get(_whole(last.buffer), 0) + 1
    total = constant_size(value(node).shape[last.dim])
    assert total is not None
    count, rest = divmod(total, last.size)
    if rest or lengths[node] < count:
        return None
    sources: dict[int, fx.Node] = {}
    write: _Write | None = last
    while write is not None and (write.dim, write.size, write.joined) == (last.dim, last.size, last.joined):
        if write.start % write.size:
            return None
        sources.setdefault(write.start // write.size, write.source)
        if len(sources) == count:
            return Column([sources[i] for i in range(count)], last.dim, value(node).shape, last.joined)
        write = _write(_whole(write.buffer))
    return None


def _comes_from(operand: Operand, outputs: Collection[fx.Node]) -> bool:
    queue, seen = list(operand.sources), set(operand.sources)
    for node in queue:
        if node in outputs:
            return True
        for argument in node.all_input_nodes:
            if argument not in seen and len(seen) < _UPWARD:
                seen.add(argument)
                queue.append(argument)
    return False


def _erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase those that nothing uses, and what only they used."""
    queue = list(nodes)
    erased: set[fx.Node] = set()
    while queue:
        node = queue.pop()
        if node in erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        queue.extend(inputs)
