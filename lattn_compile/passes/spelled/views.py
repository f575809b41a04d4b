"""What a node's values are without computing them: those of its first argument, or 0 and 1."""

from __future__ import annotations

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, SHAPE_ONLY, arguments, is_snapshot, is_tensor, name_of
from lattn_compile.passes.spelled.labels import same_size
from lattn_compile.passes.spelled.writer import value

__all__ = ["PICKS", "fill_of", "is_view", "of_booleans", "only_shape"]

PICKS = frozenset(["aten::select", "aten::slice", "aten::flip", "aten::index_select"])
"""Some of the values of their first argument."""

_VIEWS = frozenset(
    f"aten::{name}"
    for name in [
        "view",
        "_unsafe_view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "t",
        "mT",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "expand",
        "clone",
        "contiguous",
        "alias",
        "positive",
        "_reshape_alias",
        "numpy_T",
        "adjoint",
        "mH",
        "view_as",
        "reshape_as",
    ]
)


def is_view(node: fx.Node) -> bool:
    """Whether a node holds the very values of its first argument."""
    name = name_of(node)
    if is_snapshot(node):
        return False
    if name == "aten::slice":
        source = value(node.args[0])
        return all(same_size(a, b) for a, b in zip(source.shape, value(node).shape, strict=True))
    if name in CASTS:
        return is_tensor(node.args[0]) and value(node.args[0]).dtype == value(node).dtype
    return name in _VIEWS


def of_booleans(node: fx.Node) -> bool:
    """Whether a tensor holds 0 and 1 for certain: booleans, or a cast of them."""
    while is_tensor(node) and value(node).dtype != torch.bool:
        if not (is_view(node) or name_of(node) in PICKS or name_of(node) in CASTS):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return is_tensor(node)


def only_shape(node: fx.Node) -> bool:
    """Whether nothing but the shape of a node's first argument is used: a `zeros_like` of it, or of a part of it."""
    waiting = [node]
    while waiting:
        user = waiting.pop()
        if name_of(user) in SHAPE_ONLY:
            continue
        part = is_tensor(user) and (is_view(user) or name_of(user) in PICKS or name_of(user) in CASTS)
        if not part or not user.users or user.op != "call_function":
            return False
        waiting.extend(user.users)
    return True


def fill_of(node: fx.Node) -> float | None:
    """The number that every element of a tensor is made as."""
    name = name_of(node)
    if not is_tensor(node) or name not in _FILLS:
        return None
    if _FILLS[name] is not None:
        return _FILLS[name]
    x = arguments(node).get("fill_value")
    return float(x) if isinstance(x, (int, float)) else None


_FILLS = {
    **dict.fromkeys(("aten::zeros", "aten::new_zeros", "aten::zeros_like"), 0.0),
    **dict.fromkeys(("aten::ones", "aten::new_ones", "aten::ones_like"), 1.0),
    **dict.fromkeys(("aten::full", "aten::new_full", "aten::full_like"), None),
}
