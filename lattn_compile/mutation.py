"""Which values a node of a graph that is not functional writes to: ATen calls say so in schemas, Python's in names."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

__all__ = ["written_by"]

_NAMES = vars(operator)
_IN_PLACE = frozenset(
    f for n, f in _NAMES.items() if n == "setitem" or (n[0] == "i" and (n[1:] in _NAMES or f"{n[1:]}_" in _NAMES))
)

# What neither a schema nor a name tells: a norm that trains updates its statistics, an embedding rescales its rows.
_OVER_RANKS = ("batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
_NORMS = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", *_OVER_RANKS}
_DEFAULTS: dict[Any, dict[str, Any]] = {
    f: {name: p.default for name, p in inspect.signature(f).parameters.items()}
    for f in (F.batch_norm, F.instance_norm, F.embedding, F.embedding_bag)
} | {
    f: {a.name: None for a in op.default._schema.arguments}
    for f, op in ((torch.batch_norm, torch.ops.aten.batch_norm), (torch.instance_norm, torch.ops.aten.instance_norm))
}


def written_by(node: fx.Node) -> list[fx.Node] | None:
    """The inputs of `node` whose memory it writes to; None where it may write, and nothing tells to which of them.

    What shares memory with them is written as well. Of a higher-order op nothing is said: its bodies are graphs of
    their own.
    """
    target, given = node.target, node.args[:1] or (node.kwargs.get("input", node.kwargs.get("self")),)
    if node.op == "call_module":
        return None
    if node.op == "call_method":
        return _nodes(given) if _writes_by_name(str(target)) else _nodes(node.kwargs.get("out"))
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator) or not node.all_input_nodes:
        return []
    if isinstance(target, torch._ops.OpOverloadPacket) and "default" in target.overloads() and "out" not in node.kwargs:
        target = target.default
    if isinstance(target, torch._ops.OpOverload):
        return _by_schema(target, node)
    if target in _IN_PLACE:
        return _nodes(node.args[0])
    if target in _DEFAULTS:
        defaults = _DEFAULTS[target]
        return _on_the_side({**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs})
    name = str(getattr(target, "__name__", ""))
    if not name:
        return None
    if _writes_by_name(name) or node.kwargs.get("inplace") is True:
        return _nodes(given)
    if any(x is True for x in node.args):
        return None  # F.relu(x, True) writes as well; that a True says something else is no harm
    return _nodes(node.kwargs.get("out"))


def _writes_by_name(name: str) -> bool:
    """Whether a method, or a method of `torch.Tensor` called as a function, writes to its first argument."""
    inside = name.startswith("__i") and name.strip("_") not in ("invert", "index", "int")
    return name in ("__setitem__", "__delitem__") or inside or (name.endswith("_") and not name.endswith("__"))


def _on_the_side(given: dict[str, Any]) -> list[fx.Node]:
    """Statistics of a norm and the table of an embedding, if these arguments, by their names, have it write to them."""
    if given.get("max_norm") is not None:
        return _nodes(given.get("weight"))
    trains = given.get("training", given.get("use_input_stats", True))
    return _nodes((given.get("running_mean"), given.get("running_var"))) if trains is not False else []


def _by_schema(overload: torch._ops.OpOverload, node: fx.Node) -> list[fx.Node]:
    arguments = overload._schema.arguments
    given = [*zip(arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
    if overload._schema.name.rpartition("::")[2] in _NORMS:
        return _on_the_side({a.name: x for a, x in given})
    return _nodes([x for a, x in given if a.alias_info is not None and a.alias_info.is_write])


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
