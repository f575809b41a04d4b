"""The products with weights of a decode step on a GPU: kernels for a few rows (`kernels/few_rows.py`).

A pass over a graph of a decode step that is about to be lowered: of its products with parameters, those of few rows are
launches of a kernel made for them, and two of one input, the one through `silu` times the other, are one; so are up to
three of one input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    left = set(graph.find_nodes(op="call_function", target=_aten.mm.default))
    by_input: dict[tuple[fx.Node, int], list[fx.Node]] = {}  # what is seen in two shapes is two inputs
    for node in products:
        if node in left:
            of: fx.Node = node.args[0]  # type: ignore[assignment]
            by_input.setdefault((origin(of), of.meta["val"].shape[0]), []).append(node)
    for together in by_input.values():
        for group in _groups(together):
            _replace_all(graph, group)
            found += len(group)
    return found


def _kernels(rows: int) -> Any:
    """The module of kernels for products of so many rows."""
    from lattn_compile.kernels import few_rows, some_rows

    return few_rows if rows <= few_rows.MOST_ROWS else some_rows


def _groups(products: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Products that are one launch: up to three, of which all but the last end where a program's columns do."""
    group: list[fx.Node] = []
    for node in products:
        columns = sum(x.meta["val"].shape[1] for x in group)
        kernels = _kernels(node.meta["val"].shape[0])
        wide = not kernels.supports(*_sizes(node, columns))
        if group and (len(group) == kernels.MOST_MATRICES or columns % kernels.COLUMNS or wide):
            yield group
            group = []
        group.append(node)
    yield group


def _sizes(node: fx.Node, more: int = 0) -> tuple[int, int, int, torch.dtype]:
    """Rows, columns, depth and dtype of a product."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    return x.shape[0], node.meta["val"].shape[1] + more, x.shape[1], x.dtype


def _replace_all(graph: fx.Graph, products: list[fx.Node]) -> None:
    """Puts one launch in the place of products of one input."""
    if len(products) == 1:
        _replace(graph, products[0], [products[0].args[0], _weights(products[0])])  # type: ignore[list-item]
        return
    first = products[0]
    forward = _kernels(first.meta["val"].shape[0]).forward
    results = private.inserted(graph, first, forward, [first.args[0], *map(_weights, products)])  # type: ignore[list-item]
    for node, result in zip(products, results, strict=True):
        node.replace_all_uses_with(result)
    erase(graph, list(products))


def _weights(node: fx.Node) -> fx.Node | None:
    """The parameter that a product of few rows is with, if there is a kernel for it."""
    x, matrix = node.args
    weight = transposed(matrix)
    value = x.meta["val"] if isinstance(x, fx.Node) else None
    if weight is None or value is None or not all(isinstance(n, int) for n in value.shape):
        return None
    columns, depth = weight.meta["val"].shape
    if value.dtype is not weight.meta["val"].dtype or value.stride(1) != 1:
        return None
    return weight if _kernels(value.shape[0]).supports(value.shape[0], columns, depth, value.dtype) else None


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
    shape = tuple(node.meta["val"].shape)

    def call(*tensors: Tensor) -> Tensor:
        (o,) = _kernels(tensors[0].shape[0]).forward(*tensors, pair=len(tensors) > 2)
        return o if o.shape == shape else o.view(shape)

    node.replace_all_uses_with(private.inserted(graph, node, call, nodes))
    erase(graph, [node])
