"""Fold: what stands around a site goes into its arguments, or is spelled so that it is compiled once.

transformers 5.17 repeats the key heads before the call, where later versions pass them unrepeated; the op groups heads
itself (value head j uses key head j // R), so the repeat is dropped and the key heads stay at H.

A cache that is still empty is concatenated with the first keys and values. `torch.cat` returns a contiguous tensor;
Inductor's decomposition of a cat with one non-empty operand returns the operand's own strides. The next decode step
would then be compiled twice, once for either layout, so the copy is spelled out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lattn_compile.mutation import written_by
from lattn_compile.passes.context import PassContext, SiteNode, nodes_of, shape_of, value_of


def run(context: PassContext) -> None:
    for site in context.sites:
        _fold_head_repeat(site)
    if context.sites:
        for node in list(nodes_of(context.module)):
            if node.op == "call_function" and node.target is torch.cat:
                _spell_out_copy(node)


def _fold_head_repeat(site: SiteNode) -> None:
    q, k = (_repeated(site.arguments[name]) for name in ("q", "k"))
    if q is None or k is None or q[1] != k[1]:
        return
    if any(_written_between(site.arguments[name], site.node) for name in ("q", "k")):
        return
    shape_q, shape_k = shape_of(q[0]), shape_of(k[0])
    if shape_q is None or shape_k is None or shape_q[2] != shape_k[2]:
        return
    # The repeats themselves stay, without users: they are pure, and the compiler behind us drops them.
    site.arguments["q"], site.arguments["k"] = q[0], k[0]
    site.folded.append(f"repeat_interleave x{q[1]}")


def _repeated(node: Any) -> tuple[fx.Node, int] | None:
    """`(x, r)` where `node` is `x.repeat_interleave(r, dim=2)` of a 4-d tensor with a constant `r`."""
    if not isinstance(node, fx.Node):
        return None
    method = node.op == "call_method" and node.target == "repeat_interleave"
    function = node.op == "call_function" and node.target in (
        torch.repeat_interleave,
        torch.ops.aten.repeat_interleave.self_int,
    )
    if not (method or function):
        return None
    x = node.args[0]
    repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    shape = shape_of(x)
    if type(repeats) is not int or not isinstance(x, fx.Node) or shape is None or len(shape) != 4 or dim not in (2, -2):
        return None
    return x, repeats


def _written_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether anything between two nodes of one graph may write to a tensor.

    A Dynamo graph is not functional: what the repeat read may have changed when the op runs, and views hide whose
    memory a write reaches. So any write at all counts.
    """
    node = first.next
    while node is not last:
        if node.op == "root" or _may_write(node):
            return True
        node = node.next
    return False


def _may_write(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) or written_by(node) != []


def _spell_out_copy(node: fx.Node) -> None:
    operands = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(operands, (list, tuple)) or "out" in node.kwargs:
        return
    shapes = [shape_of(x) for x in operands]
    filled = [
        x
        for x, shape in zip(operands, shapes, strict=True)
        if not (shape and any(type(n) is int and n == 0 for n in shape))
    ]
    value = value_of(node)
    if len(filled) != 1 or len(operands) < 2 or not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return
    (x,) = filled
    if not isinstance(x, fx.Node) or value_of(x) is None or value_of(x).dtype != value.dtype:
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_method("clone", (x,), {"memory_format": torch.contiguous_format})
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    node.graph.erase_node(node)
