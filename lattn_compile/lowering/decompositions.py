"""What the backend gives AOTAutograd to take apart beside Inductor's own decompositions, op by op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lattn_compile.lowering.conv import short_convolution
from lattn_compile.lowering.step import decode_step, is_one_token
from lattn_compile.ops.decode import DecodeOptions
from lattn_compile.ops.validate import Tensors
from lattn_compile.report import Report

__all__ = ["DECOMPOSITIONS", "name_kernels"]

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.lattn.decode.default: decode_step,
    torch.ops.aten.convolution.default: short_convolution,
}
"""Below autograd, so a gradient is the op's own backward still. One that returns NotImplemented leaves the op."""


def name_kernels(report: Report, nodes: list[fx.Node]) -> None:
    """Writes `inductor` as the kernel of each site whose op, the node of the same place, is taken apart."""
    for i, node in enumerate(nodes):
        if node.target is torch.ops.lattn.decode.default and _is_taken_apart(node):
            report.sites[i] = dataclasses.replace(report.sites[i], kernel="inductor")


def _is_taken_apart(node: fx.Node) -> bool:
    values = [_value(x) for x in node.args]
    options: dict[str, Any] = dict(node.kwargs)
    known = all(v is not None or x is None for v, x in zip(values, node.args, strict=True))
    return known and is_one_token(Tensors(*values), DecodeOptions(**options))


def _value(x: Any) -> Any:
    return x.meta.get("val", x.meta.get("example_value")) if isinstance(x, fx.Node) else x
