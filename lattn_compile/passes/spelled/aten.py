"""Reading a functional ATen graph: arguments by name, order, and which nodes are the same value."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.writer import value

__all__ = ["Index", "arguments", "is_tensor", "name_of", "widens"]


def name_of(node: fx.Node) -> str:
    """`aten::mul` of a node that calls an overload, `getitem`, or the name of anything else that is called."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if target is operator.getitem:
        return "getitem"
    return str(getattr(target, "__name__", target)) if node.op == "call_function" else node.op


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an overload by schema name, defaults filled in."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    out: dict[str, Any] = {}
    for i, a in enumerate(target._schema.arguments):
        out[a.name] = node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
    return out


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps every value: it is no rounding."""
    if source == target:
        return True
    if not (source.is_floating_point and target.is_floating_point):
        return not source.is_floating_point and not source.is_complex and target.is_floating_point
    return torch.finfo(target).bits > torch.finfo(source).bits


class Index:
    """Order of the nodes of one graph, and one representative for nodes that compute the same value."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order: dict[fx.Node, int] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        known: dict[Any, fx.Node] = {}
        for i, node in enumerate(graph.nodes):
            self.order[node] = i
            key = self._key(node)
            self.same[node] = node if key is None else known.setdefault(key, node)

    def _key(self, node: fx.Node) -> Any:
        target = node.target
        pure = target is operator.getitem or (
            isinstance(target, torch._ops.OpOverload)
            and target.namespace == "aten"
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
            # `empty` is a new unknown value each time.
            and "empty" not in target._schema.name
        )
        if node.op != "call_function" or not pure:
            return None
        try:
            key = (target, self._plain(node.args), self._plain(tuple(sorted(node.kwargs.items()))))
            hash(key)
        except TypeError:
            return None
        return key

    def _plain(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.same[x]
        if isinstance(x, (list, tuple)):
            return tuple(self._plain(y) for y in x)
        # 1, 1.0 and True are equal keys, and not equal arguments.
        return (type(x), x)

    def users(self, node: fx.Node) -> Iterator[fx.Node]:
        yield from sorted(node.users, key=self.order.__getitem__)
