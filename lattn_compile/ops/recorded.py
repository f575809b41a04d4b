"""`lattn::decode` and its backward under names that a CUDA graph may record.

Inductor cuts its CUDA graphs around ops that are tagged as unsafe. A tag is an op's, not a call's, and the reference
kernels read lengths on the host, so the ops are tagged; the Triton kernels are sized by shapes and read nothing. Which
of them serves a call is known once devices are. So when gradients are in the graph already, calls that Triton serves
get the name without the tag: the same function, `lattn::decode_recorded` and `lattn::decode_backward_recorded`. Nothing
that looks for recurrences ever sees these names, and they have no autograd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lattn_compile.ops import decode, dispatch
from lattn_compile.ops.validate import Tensors

__all__ = ["name_recorded_calls", "recorded"]

_BEFORE = {"decode": 0, "decode_backward": 2}
"""Arguments in front of an op's tensors: incoming gradients."""

_RECORDED: dict[Any, tuple[Any, int]] = {}

for _name, _call, _fake in (
    ("decode", decode.run, decode.run_fake),
    ("decode_backward", decode.run_backward, decode.run_backward_fake),
):
    _op = getattr(torch.ops.lattn, _name).default
    _schema = str(_op._schema).removeprefix(f"lattn::{_name}")
    torch.library.define(f"lattn::{_name}_recorded", _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"lattn::{_name}_recorded", "default", _call)
    torch.library.register_fake(f"lattn::{_name}_recorded", _fake)
    _RECORDED[_op] = getattr(torch.ops.lattn, f"{_name}_recorded").default, _BEFORE[_name]


def name_recorded_calls(graph: fx.Graph) -> int:
    """Renames the calls of `graph`, traced with gradients and with values of known devices; returns how many."""
    renamed = 0
    for node in graph.nodes:
        if node.op == "call_function" and (target := recorded(node)) is not None:
            node.target = target
            renamed += 1
    return renamed


def recorded(node: fx.Node) -> Any | None:
    """The op to record in the place of `node`'s, None where it has none or this call would read the host."""
    if node.target not in _RECORDED:
        return None
    target, before = _RECORDED[node.target]
    values: Any = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    args, options = values
    t = Tensors(*args[before : before + len(Tensors.__dataclass_fields__)])
    if t.q.device.type != "cuda":
        return None
    _, shared = decode.DecodeOptions(**options).checked(t)
    if dispatch.choose("decode", shared.implementation, shared.work) != "triton":
        return None
    if t.prefix_lengths is not None and shared.prefill is not None:
        return None  # the reference computes that
    if t.prefix_lengths is not None and shared.quantize is not None:
        # The exact prefix is the chunk form's.
        exact = replace(shared.work, quantize=None)
        if dispatch.objection("chunk", exact) or dispatch.choose("chunk", shared.implementation, exact) != "triton":
            return None
    return target
