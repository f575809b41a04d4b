"""Clamps that keep a mask of decays from overflowing: `exp((c_i - c_j).clamp(max=0)) * tril`, c a cumulative log decay.

A log decay is never above 0, so its sum over tokens falls: the difference of token i and an earlier or equal token j is
at most 0, that of a later one at least 0. The clamp is then `where(i >= j, c_i - c_j, 0)`, which is what a search for
chunk forms looks at in its place. Where nothing says that the decay is at most 0, the clamp stays, and is a reason.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, arguments, is_tensor, name_of, widens
from lattn_compile.passes.spelled.expand import VIEWS, Expander
from lattn_compile.passes.spelled.labels import Label, constant_size, flat
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.ranges import is_log_decay
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["Clamps", "find_clamps", "restore_clamps"]

aten = torch.ops.aten

_CLAMP = "lattn_clamp"
"""Key of a stand-in's metadata for the op and the bounds that it stands for."""

_BOUNDS = {aten.clamp.default: ("min", "max"), aten.clamp_max.default: ("", "max"), aten.clamp_min.default: ("min", "")}


@dataclass
class Clamps:
    """Attributes:
    masks: what stands for a clamp, by the clamp, while a graph is searched. written: nodes made for that.
    kept: clamps of differences of cumulative sums that may do something, and why.
    """

    masks: dict[fx.Node, fx.Node] = field(default_factory=dict)
    written: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    kept: dict[fx.Node, str] = field(default_factory=dict)

    def restore(self, used: Collection[fx.Node]) -> None:
        """Put the clamps back, but for those whose stand-in is `used` by a proposal."""
        for clamp, mask in self.masks.items():
            if mask not in used:
                mask.replace_all_uses_with(clamp)
                for node in reversed(self.written[clamp]):
                    node.graph.erase_node(node)
        self.masks.clear()


def restore_clamps(graph: fx.Graph) -> None:
    """Once all is checked, stand-ins are clamps again, for whatever of it stays: equal in value, but where a log decay
    is exactly 0, a clamp has the gradient of its kink."""
    for node in graph.find_nodes(op="call_function", target=aten.where.ScalarOther):
        if _CLAMP in node.meta:
            target, bounds = node.meta.pop(_CLAMP)
            node.target, node.args = target, (node.args[1], *bounds)


def find_clamps(graph: fx.Graph) -> Clamps:
    """The clamps of differences of cumulative sums; a mask is written in place of those that are one."""
    found = Clamps()
    clamps = [n for target in _BOUNDS for n in graph.find_nodes(op="call_function", target=target)]
    if not clamps:
        return found
    index = Index(graph)
    for clamp in sorted(clamps):
        try:
            axes = _difference(index, clamp.args[0])
        except NoMatch:
            axes = None
        if axes is None:
            continue
        low, high = (arguments(clamp).get(name) if name else None for name in _BOUNDS[clamp.target])
        falls, later, earlier = axes
        if low is not None:
            found.kept[clamp] = "it bounds decays from below"
        elif type(high) not in (int, float) or high != 0:
            found.kept[clamp] = f"its upper bound is {high} and not 0"
        elif not falls:
            found.kept[clamp] = "it does nothing where log decays are at most 0, of which these are not certain"
        else:
            w = Writer(clamp.next, clamp)
            found.masks[clamp] = _masked(w, clamp, later, earlier)
            found.written[clamp] = w.inserted
    return found


def _masked(w: Writer, clamp: fx.Node, later: int, earlier: int) -> fx.Node:
    """where(i >= j, x, 0), i and j the indices along two axes, in place of a clamp of x."""
    v = value(clamp)
    n, rank = v.shape[later], v.dim()
    square = w.call(aten.ones.default, [n, n], dtype=torch.bool, device=v.device)
    square = w.call(aten.tril.default if later < earlier else aten.triu.default, square)
    keep = w.reshape(square, [n if i in (later, earlier) else 1 for i in range(rank)])
    mask = w.call(aten.where.ScalarOther, keep, clamp.args[0], 0.0)
    mask.meta[_CLAMP] = aten.clamp.default, (None, 0)
    clamp.replace_all_uses_with(mask)
    return mask


def _difference(index: Index, node: object) -> tuple[bool, int, int] | None:
    """Of c_i - c_j, with c a cumulative sum over tokens: whether c falls, and the axes of i and of j."""
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    if not all(is_tensor(x) for x in node.args):
        return None
    one, two = (_places(index, x, value(node).dim()) for x in node.args)  # type: ignore[arg-type]
    if one is None or two is None:
        return None
    (source, first), (other, second) = one, two
    if index.same[source] is not index.same[other]:
        return None
    moved = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(moved) != 1 or (falls := _falls(index, source, moved[0])) is None:
        return None
    later, earlier = first[moved[0]], second[moved[0]]
    shape = value(node).shape
    if later in second or earlier in first or constant_size(shape[later]) is None:
        return None
    return falls, later, earlier


def _places(index: Index, node: fx.Node, rank: int) -> tuple[fx.Node, list[int]] | None:
    """The tensor that a node is a view of, and where in the node each of its axes went, counted from the end."""
    expr = Expander(index, None, (), VIEWS).expand(node)
    if len(expr.terms) != 1 or expr.terms[0].coefficient != 1.0 or len(expr.terms[0].factors) != 1:
        return None
    (factor,) = expr.terms[0].factors
    if factor.inverse or factor.negated:
        return None
    where: dict[Label, int] = {}
    for i, outer in enumerate(expr.axes):
        labels = flat(outer)
        if len(labels) > 1:
            return None
        where.update((label, i + rank - len(expr.axes)) for label in labels)
    places = []
    for axis in factor.index:
        labels = [] if isinstance(axis, int) else flat(axis)
        if isinstance(axis, int) or len(labels) > 1 or any(label not in where for label in labels):
            return None
        places.append(where[labels[0]] if labels else -1)
    return factor.node, places


def _falls(index: Index, node: fx.Node, axis: int) -> bool | None:
    """Whether values never rise along an axis, being cumulative sums of log decays; None if they are no such sums."""
    while True:
        name, a = name_of(node), arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        if name == "aten::cumsum":
            rank = value(node).dim()
            return is_log_decay(a["self"]) if a["dim"] % rank == axis else None
        if name == "aten::slice":
            node = a["self"]
        elif name == "aten::select":
            axis += axis >= a["dim"] % value(a["self"]).dim()
            node = a["self"]
        elif name in CASTS and widens(value(node.args[0]).dtype, value(node).dtype):
            node = node.args[0]  # type: ignore[assignment]
        else:
            found = _places(index, node, value(node).dim())
            if found is None or found[0] is node or axis not in found[1]:
                return None
            node, axis = found[0], found[1].index(axis)
