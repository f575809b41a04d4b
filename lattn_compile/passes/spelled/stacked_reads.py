"""States that are kept and read all at once: `o = einsum("bthkv,bthk->bthv", torch.stack(states, 1), q)`.

While a graph is searched such a read is written token by token, each from its own state. The read itself stays in the
graph, unused and out of sight (`Index.hidden`), and takes its place again where nothing of it became a site.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import Index
from lattn_compile.passes.spelled.labels import Label, constant_size, flat, is_one
from lattn_compile.passes.spelled.reads import Read, find_reads
from lattn_compile.passes.spelled.spine import stored_origin
from lattn_compile.passes.spelled.stacks import Column, columns_of
from lattn_compile.passes.spelled.terms import EYE, Factor
from lattn_compile.passes.spelled.writer import Writer, keep_gradient, value

__all__ = ["StackedRead", "put_reads_together", "take_reads_apart", "unused"]

aten = torch.ops.aten

_BETWEEN = 64
"""Nodes looked at between a state and the next one."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class StackedRead:
    """`parts` stand for `whole`, which has their value and which nothing reads; the last part does so in its shape."""

    whole: fx.Node
    parts: list[fx.Node]


def take_reads_apart(graph: fx.Graph) -> list[StackedRead]:
    """Every read of stacked states that one product of one query a token makes."""
    found: list[StackedRead] = []
    index = Index(graph)
    for node, column in columns_of(graph):
        states = [stored_origin(n) for n in column.nodes]
        if len([n for n in value(states[0]).shape if not is_one(n)]) < 2:
            continue
        if not all(_leads(a, b) or _leads(b, a) for a, b in itertools.pairwise(states)):
            continue
        reads, others = find_reads(index, node, ())
        if others:
            continue  # the states themselves are wanted
        for read in reads:
            w = Writer(read.node, read.node)
            if (new := _apart(w, node, column, read)) is None:
                w.undo()
                continue
            keep_gradient(new, read.node)
            read.node.replace_all_uses_with(new, delete_user_cb=lambda u, w=w: u not in w.inserted)  # type: ignore[misc]
            found.append(StackedRead(read.node, list(w.inserted)))
    return found


def put_reads_together(stacked: list[StackedRead], used: Collection[fx.Node]) -> None:
    """Put the reads back of whose parts none is `used`."""
    for one in stacked:
        if one.whole.users or any(n in used for n in one.parts):
            continue
        one.parts[-1].replace_all_uses_with(one.whole)
        for part in reversed(one.parts):
            part.graph.erase_node(part)
    stacked.clear()


def unused(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, which nothing reads, and what is there for them alone."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and all(u in found for u in node.users) and node.op == "call_function":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _leads(state: fx.Node, later: fx.Node) -> bool:
    """Whether a state is computed from another one, a few calls back."""
    waiting, seen = [later], {later}
    while waiting and len(seen) < _BETWEEN:
        for x in waiting.pop(0).all_input_nodes:
            if x is state:
                return True
            if x not in seen:
                seen.add(x)
                waiting.append(x)
    return False


def _apart(w: Writer, stack: fx.Node, column: Column, read: Read) -> fx.Node | None:
    """The read with an einsum a token. None where its axes cannot be told apart."""
    index = [tuple(flat(axis)) for axis in read.index]
    if len(index) != value(stack).dim():
        return None
    out = [x for axis in read.axes for x in flat(axis)]
    factors = [*read.q]
    if any(f.node is EYE or f.inverse or f.negated for f in factors):
        return None
    token: Label | None = None  # of one token there is no label
    if len(column.nodes) > 1:
        token, *rest_of_axis = index[column.dim] or (None,)
        if token not in out or constant_size(token.size) != len(column.nodes) or (rest_of_axis and not column.joined):
            return None
        index[column.dim] = tuple(rest_of_axis)
    labels = [x for axis in index for x in axis]
    if {value(f.node).dtype for f in factors} | {value(stack).dtype} != {value(read.node).dtype}:
        return None
    letters: dict[Label, str] = {}
    for x in [*labels, *(x for f in factors for x in f.labels())]:
        letters.setdefault(x, _LETTERS[len(letters) % len(_LETTERS)])
    if len(letters) > len(_LETTERS):
        return None
    rest = [x for x in out if x is not token]
    others = [(_spread(w, f), f.labels()) for f in factors]
    made = []
    for t, state in enumerate(column.nodes):
        operands, names = [w.reshape(state, [x.size for x in labels])], ["".join(letters[x] for x in labels)]
        for other, axes in others:
            at = next((i for i, x in enumerate(axes) if x is token), None)
            operands.append(other if at is None else w.select(other, at, t))
            names.append("".join(letters[a] for a in axes if a is not token))
        o = w.call(aten.einsum.default, f"{','.join(names)}->{''.join(letters[x] for x in rest)}", operands)
        made.append(o if read.scale == 1 else w.call(aten.mul.Tensor, o, read.scale))
    new = made[0] if token is None else w.call(aten.stack.default, made, out.index(token))
    return w.call(aten.reshape.default, new, [w.size(n) for n in value(read.node).shape])


def _spread(w: Writer, factor: Factor) -> fx.Node:
    """A factor with an axis for each of its labels and no other."""
    x = factor.node
    for dim in reversed(range(len(factor.index))):
        if isinstance(at := factor.index[dim], int):
            x = w.select(x, dim, at)
    return w.reshape(x, [label.size for label in factor.labels()])
