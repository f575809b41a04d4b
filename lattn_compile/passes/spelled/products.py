"""Products of indexed tensors, written into a graph as one tensor with an axis a group of labels."""

from __future__ import annotations

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, name_of
from lattn_compile.passes.spelled.labels import Label, flat, size_of
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import Factor, is_mask
from lattn_compile.passes.spelled.token import Product
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["again", "device_of", "filled", "narrow", "placed", "product_of", "sum_of"]

aten = torch.ops.aten


def product_of(w: Writer, product: Product, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """coefficient · Π factors as one tensor with an axis a group."""
    return filled(w, narrow(w, product, groups, dtype), groups)


def narrow(w: Writer, product: Product, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """The product with one axis a label, of size 1 where nothing depends on it."""
    wanted = [label for group in groups for label in group]
    out: fx.Node | None = None
    # A mask picks, and does not multiply: what is masked off may be NaN.
    masks = [f for f in product.factors if is_mask(f)]
    factors = [f for f in product.factors if f not in masks]
    if not factors and masks:
        factors, masks = masks[:1], masks[1:]
    for f in factors:
        x = w.to(placed(w, f, wanted), dtype)
        if f.inverse:
            out = w.call(aten.reciprocal.default, x) if out is None else w.call(aten.div.Tensor, out, x)
        else:
            out = x if out is None else w.call(aten.mul.Tensor, out, x)
    if out is None:
        like = device_of(w)
        out = w.call(aten.full.default, [1] * len(wanted), product.coefficient, dtype=dtype, device=like)
    elif product.coefficient != 1.0:
        out = w.call(aten.mul.Scalar, out, product.coefficient)
    for f in masks:
        out = w.call(aten.where.ScalarOther, placed(w, f, wanted), out, 0.0)
    return out


def device_of(w: Writer) -> torch.device:
    return value(w.like).device  # type: ignore[no-any-return]


def placed(w: Writer, f: Factor, wanted: list[Label]) -> fx.Node:
    """A factor's tensor with an axis for each of `wanted`, in their order."""
    node = _booleans(w, f.node) if is_mask(f) else f.node
    for dim in reversed(range(len(f.index))):
        at = f.index[dim]
        if isinstance(at, int):
            node = w.select(node, dim, at)
    axes = [flat(a) for a in f.index if not isinstance(a, int)]
    labels = [label for axis in axes for label in axis]
    if len(set(labels)) != len(labels) or not set(labels) <= set(wanted):
        raise NoMatch("NOT_RANK_ONE", f"{f.node.name} runs along other axes than its role has", f.node)
    node = w.reshape(node, [label.size for label in labels])
    order = sorted(range(len(labels)), key=lambda i: wanted.index(labels[i]))
    node = w.permute(node, order)
    node = w.reshape(node, [label.size if label in labels else 1 for label in wanted])
    return w.call(aten.logical_not.default, node) if f.negated else node


def _booleans(w: Writer, node: fx.Node) -> fx.Node:
    """The booleans that a mask was cast from, in its shape."""
    if value(node).dtype == torch.bool:
        return node
    inside = _booleans(w, node.args[0])  # type: ignore[arg-type]
    return inside if name_of(node) in CASTS else again(w, node, inside)


def again(w: Writer, node: fx.Node, x: fx.Node) -> fx.Node:
    """A view or a part, of another tensor of the same shape, whose strides may be others."""
    target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
    return w.call(target, x, *node.args[1:], **node.kwargs)


def filled(w: Writer, node: fx.Node, groups: list[list[Label]]) -> fx.Node:
    """Axes of labels grouped, broadcast ones at full size."""
    wanted = [label for group in groups for label in group]
    node = w.expand(node, [label.size for label in wanted])
    return w.reshape(node, [size_of(group) for group in groups])


def sum_of(w: Writer, products: list[Product], groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    out = narrow(w, products[0], groups, dtype)
    for p in products[1:]:
        out = w.call(aten.add.Tensor, out, narrow(w, p, groups, dtype))
    return filled(w, out, groups)
