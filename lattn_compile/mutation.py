"""Which values a node of a graph that is not functional writes to: ATen calls say so in schemas, Python's in names."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = ["written_by"]

_NAMES = vars(operator)
_IN_PLACE = frozenset(
    f for n, f in _NAMES.items() if n == "setitem" or (n[0] == "i" and (n[1:] in _NAMES or f"{n[1:]}_" in _NAMES))
)


def written_by(node: fx.Node) -> list[fx.Node] | None:
    """The inputs of `node` whose memory it writes to; None where it may write, and nothing tells to which of them.

    What shares memory with them is written as well. Of a higher-order op nothing is said: its bodies are graphs of
    their own.
    """
    target, given = node.target, node.args[:1] or (node.kwargs.get("input", node.kwargs.get("self")),)
    if node.op == "call_module":
        return None
    if node.op == "call_method":
        name = str(target)
        writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return _nodes(given) if writes else _nodes(node.kwargs.get("out"))
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator) or not node.all_input_nodes:
        return []
    if isinstance(target, torch._ops.OpOverloadPacket) and "default" in target.overloads() and "out" not in node.kwargs:
        target = target.default
    if isinstance(target, torch._ops.OpOverload):
        return _by_schema(target, node)
    if target in _IN_PLACE:
        return _nodes(node.args[0])
    name = str(getattr(target, "__name__", ""))
    if not name:
        return None
    if (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True:
        return _nodes(given)
    if any(x is True for x in node.args):
        return None  # F.relu(x, True) writes as well; that a True says something else is no harm
    return _nodes(node.kwargs.get("out"))


def _by_schema(overload: torch._ops.OpOverload, node: fx.Node) -> list[fx.Node]:
    arguments = overload._schema.arguments
    given = [*zip(arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
    return _nodes([x for a, x in given if a.alias_info is not None and a.alias_info.is_write])


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
