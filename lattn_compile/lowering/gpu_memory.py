"""What stands in memory for our kernels' launches in a graph: each input once.

Inductor fuses what it writes itself, and has an input of a user's kernel computed for every launch that reads it, and
for every view of it. Keys, queries and values are views of one projection, and where runs of tokens begin is the same
in every layer; so what a launch reads is put in memory by name (`lattn::kept`), and equal constants are one.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from lattn_compile.lowering import _torch_triton as private

__all__ = ["keep_inputs"]

_aten, _prims = torch.ops.aten, torch.ops.prims

_VIEWS = frozenset(
    {
        _aten.expand.default,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)

_CONSTANTS = frozenset(
    {
        _aten.add.Tensor,
        _aten.full.default,
        _aten.mul.Tensor,
        _aten.sub.Tensor,
        _prims.iota.default,
    }
)
"""What lengths of a batch without any are made of."""


def keep_inputs(graph: fx.Graph) -> int:
    """Puts what launches of kernels in `graph` read into memory; returns how many values.

    A pass behind all others (`post_grad_custom_post_pass`): views and constants have their last form.
    """
    if not private.launches(graph):
        return 0
    _merge_constants(graph)
    bases = dict.fromkeys(
        base
        for _, arguments in private.launches(graph)
        for x in arguments.values()
        if isinstance(x, fx.Node) and (base := _base(x)) is not None
    )
    for base in bases:
        with graph.inserting_after(base):
            kept = graph.call_function(private.kept(), (base,))
        kept.meta = {**base.meta}
        base.replace_all_uses_with(kept, functools.partial(operator.is_not, kept))
    return len(bases)


def _base(x: fx.Node) -> fx.Node | None:
    """What `x` is a view of, if that is computed: not an input, nor the memory or the result of a launch."""
    seen = x
    while seen.target in _VIEWS or (_is_item(seen) and seen.args[0].target in _VIEWS):  # type: ignore[union-attr,operator]
        (seen, *_) = seen.all_input_nodes
    computed = seen.op == "call_function" and isinstance(seen.target, torch._ops.OpOverload)
    if not computed or seen.target in (_aten.empty.memory_format, _aten.empty_strided.default, private.kept()):
        return None
    return seen if isinstance(seen.meta.get("val"), torch.Tensor) else None


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _merge_constants(graph: fx.Graph) -> None:
    """Integers that are made of nothing but integers are made once."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target not in _CONSTANTS or not isinstance(value, torch.Tensor) or value.dtype is not torch.int64:
            continue
        if any(x not in first.values() for x in node.all_input_nodes):
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node
