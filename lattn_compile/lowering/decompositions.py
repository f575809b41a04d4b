"""What the backend gives AOTAutograd to take apart beside Inductor's own decompositions: a line an op and spelling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from lattn_compile.lowering import gpu, gpu_conv
from lattn_compile.lowering.around import folded, folded_into_a_kernel
from lattn_compile.lowering.conv import short_convolution
from lattn_compile.lowering.packed import packed_step, takes_packed_step
from lattn_compile.lowering.step import decode_step, is_one_token
from lattn_compile.ops.decode import DecodeOptions
from lattn_compile.ops.validate import Tensors
from lattn_compile.report import Report

__all__ = ["DECOMPOSITIONS", "LOWERINGS", "Lowering", "in_turn", "name_kernels"]


INDUCTOR = "inductor"
"""Computed by loops that Inductor writes, together with what stands around them."""


class Lowering(NamedTuple):
    """One way to spell an op.

    Attributes:
        op: the overload.
        spelled: takes the op's arguments; NotImplemented for a call that it declines, then the next one is asked.
        kernel: what a site's report says computes it.
        takes: whether `spelled` takes a call of these tensors and options (as keywords), without tracing it; None for
            an op that is no site.
    """

    op: Any
    spelled: Callable[..., Any]
    kernel: str = INDUCTOR
    takes: Callable[[Tensors, dict[str, Any]], bool] | None = None


def _one_token(t: Tensors, options: dict[str, Any]) -> bool:
    return is_one_token(t, DecodeOptions(**options))


LOWERINGS = (
    Lowering(torch.ops.lattn.decode.default, decode_step, takes=_one_token),
    Lowering(torch.ops.lattn.decode_packed.default, packed_step, takes=takes_packed_step),
    Lowering(torch.ops.aten.convolution.default, short_convolution),
    Lowering(torch.ops.aten.convolution.default, gpu_conv.convolution),
    Lowering(torch.ops.aten.convolution_backward.default, gpu_conv.convolution_backward),
    *(Lowering(*x) for x in gpu.LOWERINGS),
)
"""In the order in which they are asked. Below autograd: a gradient is the op's own backward still."""


def in_turn(lowerings: Iterable[Lowering]) -> dict[Any, Callable[..., Any]]:
    """A table of decompositions, in which a call that every spelling of its op declines is NotImplemented."""
    by_op: dict[Any, list[Callable[..., Any]]] = {}
    for lowering in lowerings:
        by_op.setdefault(lowering.op, []).append(lowering.spelled)
    return {op: functools.partial(_first_taken, spellings) for op, spellings in by_op.items()}


def _first_taken(spellings: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    for spelled in spellings:
        result = spelled(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


DECOMPOSITIONS = in_turn(LOWERINGS)
"""What AOTAutograd gets: a call that is declined stays a call of the op."""


def name_kernels(report: Report, nodes: list[fx.Node]) -> None:
    """Writes into each site what computes its op, the node of the same place, if one of these spellings takes it, and
    what is computed with it."""
    for i, node in enumerate(nodes):
        for lowering in LOWERINGS:
            if node.target is lowering.op and lowering.takes is not None and _takes(lowering.takes, node):
                site = report.sites[i]
                around = folded(node) if lowering.kernel == INDUCTOR else _in_a_kernel(node)
                report.sites[i] = dataclasses.replace(site, kernel=lowering.kernel, folded=(*site.folded, *around))
                break


def _in_a_kernel(node: fx.Node) -> tuple[str, ...]:
    q = _value(node.args[0])
    one = node.target is torch.ops.lattn.decode.default and q.shape[1] == 1
    return folded_into_a_kernel(node) if one else ()


def _takes(takes: Callable[[Tensors, dict[str, Any]], bool], node: fx.Node) -> bool:
    values = [_value(x) for x in node.args]
    known = all(v is not None or x is None for v, x in zip(values, node.args, strict=True))
    if len(values) < len(Tensors.__dataclass_fields__) - 2:  # a packed step, whose state is a list
        values = [*values[:5], *[None] * 5]
    options = {name: _value(x) for name, x in node.kwargs.items()}
    return known and takes(Tensors(*values), options)


def _value(x: Any) -> Any:
    return x.meta.get("val", x.meta.get("example_value")) if isinstance(x, fx.Node) else x
