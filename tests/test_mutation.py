"""Which inputs a node writes to, as graphs of Dynamo and of ATen have it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import lattn_compile  # noqa: F401  (the ops)
from lattn_compile.mutation import written_by

aten = torch.ops.aten

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str | None]] = [
    # target (a string is a method), arguments ("x", "y", "z" are inputs), keywords, inputs that are written
    ("add_", ("x", "y"), {}, "x"),
    ("add", ("x", "y"), {}, ""),
    ("__setitem__", ("x", 0, "y"), {}, "x"),
    ("__iadd__", ("x", "y"), {}, "x"),
    ("__and__", ("x", "y"), {}, ""),
    (operator.setitem, ("x", 0, "y"), {}, "x"),
    (operator.iadd, ("x", "y"), {}, "x"),
    (operator.add, ("x", "y"), {}, ""),
    (operator.invert, ("x",), {}, ""),
    (operator.index, ("x",), {}, ""),
    (torch.relu_, ("x",), {}, "x"),
    (torch.relu_, (), {"input": "x"}, "x"),
    (torch.add, ("x", "y"), {"out": "z"}, "z"),
    (torch.aminmax, ("x",), {"out": ("y", "z")}, "yz"),
    (torch._foreach_add_, (["x", "y"], ["z", "z"]), {}, "xy"),
    (F.relu, ("x",), {"inplace": True}, "x"),
    (F.relu, ("x",), {"inplace": False}, ""),
    (F.relu, ("x", True), {}, None),
    (aten.copy_.default, ("x", "y"), {}, "x"),
    (aten.copy_.default, (), {"src": "y", "self": "x"}, "x"),
    (aten.copy_, ("x", "y"), {}, "x"),
    (aten.add_, ("x", "y"), {}, "x"),
    (aten.add.out, ("x", "y"), {"out": "z"}, "z"),
    (aten.clamp, ("x", 0, 1), {"out": "z"}, "z"),
    (aten.sum.dim_IntList, ("x", [0], True), {}, ""),
    (torch.sum, ("x", 0), {"keepdim": True}, ""),
    (torch._C._set_grad_enabled, (True,), {}, ""),
    (torch.Tensor.__setitem__, ("x", 0, "y"), {}, "x"),
    (torch.Tensor.__imul__, ("x", "y"), {}, "x"),
    (torch.Tensor.__invert__, ("x",), {}, ""),
    ("__invert__", ("x",), {}, ""),
    (F.batch_norm, ("x", "y", "z"), {"training": True}, "yz"),
    (F.batch_norm, ("x", "y", "z", None, None, True), {}, "yz"),
    (F.batch_norm, ("x",), {"running_mean": "y", "running_var": "z", "training": False}, ""),
    (F.batch_norm, ("x", "y", "z"), {}, ""),
    (F.instance_norm, ("x",), {"running_mean": "y", "running_var": "z"}, "yz"),
    (F.instance_norm, ("x", "y", "z", None, None, False), {}, ""),
    (torch.batch_norm, ("x", None, None, "y", "z", True, 0.1, 1e-5, False), {}, "yz"),
    (torch.instance_norm, ("x", None, None, "y", "z", False, 0.1, 1e-5, False), {}, ""),
    (aten.batch_norm.default, ("x", None, None, "y", "z", True, 0.1, 1e-5, False), {}, "yz"),
    (aten.native_batch_norm, ("x", None, None, "y", "z", False, 0.1, 1e-5), {}, ""),
    (aten.batch_norm_update_stats, ("x", "y", "z", 0.1), {}, "yz"),
    (aten.batch_norm_gather_stats_with_counts, ("x", "x", "x", "y", "z", 0.1, 1e-5, "x"), {}, "yz"),
    (F.embedding, ("x", "y"), {"max_norm": 1.0}, "y"),
    (F.embedding, ("x", "y", None, 1.0), {}, "y"),
    (F.embedding, ("x", "y"), {"scale_grad_by_freq": True}, ""),
    (F.embedding_bag, ("x",), {"weight": "y", "max_norm": 1.0}, "y"),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "written"), CALLS)
def test_what_a_node_writes_to(
    target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any], written: str | None
) -> None:
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in "xyz"}
    args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: inputs.get(a, a) if isinstance(a, str) else a)
    node = graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
    found = written_by(node)
    assert (None if found is None else "".join(sorted(n.name for n in found))) == written
