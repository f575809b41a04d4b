"""What is computed from one mask, element by element: `1 - m`, `m != 0`, `m.clamp(0, 1)` of a cast of booleans.

Such a value has two numbers, one where the mask is set and one where it is not, whatever the ops between them are: they
are run on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.aten import CASTS, arguments, is_tensor, name_of
from lattn_compile.passes.spelled.labels import same_size
from lattn_compile.passes.spelled.subgraph import clean_state
from lattn_compile.passes.spelled.views import PICKS, fill_of, is_view
from lattn_compile.passes.spelled.writer import value

__all__ = ["ELEMENTWISE", "OfMask", "makes_booleans", "of_mask"]

# fmt: off
ELEMENTWISE = frozenset(f"aten::{name}" for name in (
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "square", "pow", "clamp", "clamp_min", "clamp_max", "minimum",
    "maximum", "relu", "relu6", "sign", "sqrt", "round", "floor", "ceil", "trunc", "eq", "ne", "gt", "ge", "lt", "le",
    "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or",
    "bitwise_xor", "__and__", "__or__", "__xor__", "where", "masked_fill",
))
# fmt: on
"""Each element of the result is made of one element of each tensor."""

_COMPARISONS = frozenset(
    f"aten::{name}"
    for name in (
        "gt",
        "ge",
        "lt",
        "le",
        "eq",
        "ne",
        "isnan",
        "isinf",
        "isfinite",
        "isneginf",
        "isposinf",
        "logical_not",
    )
)
_PARTS = frozenset(["aten::unbind", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split"])
_FURTHEST = 24


@dataclass(frozen=True)
class OfMask:
    """A value that is decided by one mask.

    Attributes:
        mask: of dtype bool.
        steps: nodes between the value and the mask, the value first; with each the node that it is made from.
        unset, set: the numbers where the mask is false and where it is true.
    """

    mask: fx.Node
    steps: tuple[tuple[fx.Node, fx.Node], ...]
    unset: float
    set: float


def of_mask(node: fx.Node) -> OfMask | None:
    """What `node` is a function of, if that is one mask; None for the mask itself and for anything else."""
    steps: list[tuple[fx.Node, fx.Node]] = []
    length = 0  # of the steps down to the last boolean
    at = node
    while len(steps) < _FURTHEST and (source := _source(at)) is not None:
        steps.append((at, source))
        at = source
        if value(at).dtype == torch.bool:
            length = len(steps)
    if not length:
        return None
    steps = steps[:length]
    with clean_state(), torch.no_grad():
        numbers = torch.tensor([False, True])
        for at, source in reversed(steps):
            if (found := _applied(at, source, numbers)) is None:
                return None
            numbers = found
        unset, set_ = (float(x) for x in numbers)
    return OfMask(steps[-1][1], tuple(steps), unset, set_)


def makes_booleans(node: fx.Node) -> bool:
    """Whether a node makes booleans of what is no mask: it compares numbers, or asks whether they are 0."""
    name = name_of(node)
    if name not in _COMPARISONS | {"aten::logical_not"} and not (
        name in CASTS and is_tensor(node) and value(node).dtype == torch.bool
    ):
        return False
    tensors = [x for x in node.all_input_nodes if is_tensor(x)]
    return any(value(x).dtype != torch.bool for x in tensors) and of_mask(node) is None


def _source(node: fx.Node) -> fx.Node | None:
    """The one tensor that a node is made from, element by element or by taking some of its elements."""
    name = name_of(node)
    if name == "getitem":
        whole = node.args[0]
        if isinstance(whole, fx.Node) and name_of(whole) in _PARTS and is_tensor(node):
            return whole.args[0]  # type: ignore[return-value]
        return None
    if not is_tensor(node) or node.op != "call_function":
        return None
    if is_view(node) or name in PICKS or name in CASTS:
        source = node.args[0]
        return source if is_tensor(source) else None  # type: ignore[return-value]
    if name not in ELEMENTWISE:
        return None
    tensors = {x for x in node.all_input_nodes if fill_of(x) is None}
    if len(tensors) != 1:
        return None
    (source,) = tensors
    if not is_tensor(source) or value(source).dim() != value(node).dim():
        return None
    same = all(same_size(m, n) for m, n in zip(value(source).shape, value(node).shape, strict=True))
    return source if same else None


def _applied(node: fx.Node, source: fx.Node, numbers: Tensor) -> Tensor | None:
    """What a step makes of the two numbers."""
    if name_of(node) not in ELEMENTWISE:
        return numbers.to(value(node).dtype)

    def argument(x: Any) -> Any:
        if x is source:
            return numbers
        if isinstance(x, fx.Node):
            return torch.full((), fill_of(x) or 0.0, dtype=value(x).dtype)
        return x

    try:
        out = node.target(**{k: argument(x) for k, x in arguments(node).items()})  # type: ignore[operator]
    except (RuntimeError, TypeError):
        return None
    return out.to(value(node).dtype) if isinstance(out, Tensor) and out.shape == (2,) else None
