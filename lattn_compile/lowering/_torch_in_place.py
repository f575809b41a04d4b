"""Ops that write in place, in a graph where they are said to return what they wrote. Private interfaces of torch, as of
2.11 and 2.13: `auto_functionalized_v2`, and `eager_input_vals`, the layouts that such an op may count on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

__all__ = ["calls", "change"]


def calls(graph: fx.Graph, ops: Iterable[Any]) -> list[tuple[fx.Node, dict[str, Any]]]:
    """Calls of one of these ops in `graph`, with what they are given but to write to, by name."""
    wanted = set(ops)
    nodes = graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2)
    return [(node, dict(node.kwargs)) for node in nodes if node.args[0] in wanted]


def change(node: fx.Node, **arguments: fx.Node) -> None:
    """Gives such a call other arguments."""
    node.kwargs = {**node.kwargs, **arguments}
    if "eager_input_vals" in node.meta:
        args, kwargs = node.meta["eager_input_vals"]
        node.meta["eager_input_vals"] = (args, {**kwargs, **{name: x.meta["val"] for name, x in arguments.items()}})
