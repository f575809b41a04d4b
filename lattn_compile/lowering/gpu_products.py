"""The products with weights of a decode step on a GPU: kernels for a few rows (`kernels/few_rows.py`).

A pass over a graph of a decode step that is about to be lowered: of its products with parameters, those of few rows are
launches of a kernel made for them, and two of one input, the one through `silu` times the other, are one.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from lattn_compile.lowering import _torch_triton as private
from lattn_compile.lowering.gpu_fold import erase, origin, silu, transposed

__all__ = ["fold_products"]

_aten = torch.ops.aten


def fold_products(graph: fx.Graph) -> int:
    """Puts kernels in the place of products of few rows in `graph`; returns how many."""
    found = 0
    products = [x for x in graph.find_nodes(op="call_function", target=_aten.mm.default) if _weights(x) is not None]
    for node in products:
        if not node.users or (gated := _gated(node)) is None:
            continue
        other, result = gated
        _replace(graph, result, [node.args[0], _weights(node), _weights(other)])  # type: ignore[list-item]
        found += 1
    gone = set(products) - set(graph.find_nodes(op="call_function", target=_aten.mm.default))
    for node in products:
        if node not in gone:
            _replace(graph, node, [node.args[0], _weights(node)])  # type: ignore[list-item]
            found += 1
    return found


def _weights(node: fx.Node) -> fx.Node | None:
    """The parameter that a product of few rows is with, if there is a kernel for it."""
    from lattn_compile.kernels import few_rows

    x, matrix = node.args
    weight = transposed(matrix)
    value = x.meta["val"] if isinstance(x, fx.Node) else None
    if weight is None or value is None or not all(isinstance(n, int) for n in value.shape):
        return None
    columns, depth = weight.meta["val"].shape
    if value.dtype is not weight.meta["val"].dtype or value.stride(1) != 1:
        return None
    return weight if few_rows.supports(value.shape[0], columns, depth, value.dtype) else None


def _gated(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Of `silu(node) * other`, where other is another product of the same input and of the same size: other, and the
    result, if nothing else reads either."""
    active = silu(_seen(node))
    if active is None or len(active.users) != 1:
        return None
    (result,) = active.users
    if result.target is not _aten.mul.Tensor or len(result.args) != 2:
        return None
    (factor,) = [x for x in result.args if x is not active] or [None]
    if not isinstance(factor, fx.Node) or (other := origin(factor)).target is not _aten.mm.default:
        return None
    x, y = (origin(z.args[0]) for z in (node, other))  # type: ignore[arg-type]
    if x is not y or _seen(other) is not factor or len(factor.users) != 1:
        return None
    if not active.meta["val"].shape == factor.meta["val"].shape == result.meta["val"].shape:
        return None
    weights = _weights(other)
    same = weights is not None and weights.meta["val"].shape == _weights(node).meta["val"].shape  # type: ignore[union-attr]
    return (other, result) if same and result.meta["val"].dtype is node.meta["val"].dtype else None


def _seen(node: fx.Node) -> fx.Node:
    """`node`, or the last of the shapes that it is only read in."""
    while len(node.users) == 1 and origin(next(iter(node.users))) is not next(iter(node.users)):
        node = next(iter(node.users))
    return node


def _replace(graph: fx.Graph, node: fx.Node, nodes: list[fx.Node]) -> None:
    from lattn_compile.kernels import few_rows

    shape = tuple(node.meta["val"].shape)

    def call(*tensors: Tensor) -> Tensor:
        o = few_rows.forward(*tensors)
        return o if o.shape == shape else o.view(shape)

    node.replace_all_uses_with(private.inserted(graph, node, call, nodes))
    erase(graph, [node])
