"""Numbers that a graph spells as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import arguments, is_tensor, name_of
from lattn_compile.passes.spelled.labels import is_one
from lattn_compile.passes.spelled.proposal import CONSTANT, OUTER, NoMatch
from lattn_compile.passes.spelled.subgraph import is_trained
from lattn_compile.passes.spelled.views import fill_of, of_booleans
from lattn_compile.passes.spelled.writer import value

__all__ = ["changes", "constant", "float_fill", "is_literal", "is_mask_node", "is_written", "is_zero", "number"]


def is_zero(node: fx.Node) -> bool:
    """A tensor of zeros."""
    return float_fill(node) == 0


def float_fill(node: fx.Node) -> float | None:
    """The number that every element of a tensor of floats is made as."""
    return fill_of(node) if is_tensor(node) and value(node).dtype.is_floating_point else None


_COPIES = frozenset(
    f"aten::{name}"
    for name in ("lift_fresh_copy", "lift_fresh", "clone", "alias", "_to_copy", "view", "detach", "detach_")
)


def constant(node: fx.Node) -> float | None:
    """The number that a tensor of one element is known to hold."""
    while name_of(node) in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    v = value(node)
    if not isinstance(v, torch.Tensor) or any(not is_one(n) for n in v.shape):
        return None
    if name_of(node) in ("aten::full", "aten::scalar_tensor", "aten::new_full"):
        a = arguments(node)
        x = a.get("fill_value", a.get("s"))
        return float(x) if isinstance(x, (int, float)) else None
    if isinstance(x := node.meta.get(CONSTANT), torch.Tensor):
        return float(x)
    outer = node.meta.get(OUTER)
    if outer is not None and value(outer).dim() == v.dim():
        return constant(outer)
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    x = node.graph.owning_module
    for name in str(node.target).split("."):
        x = getattr(x, name, None)  # type: ignore[assignment]
    known = isinstance(x, torch.Tensor) and not isinstance(x, (torch.nn.Parameter, torch._subclasses.FakeTensor))
    return float(x) if known and is_literal(node) else None  # type: ignore[arg-type]


def is_literal(node: fx.Node) -> bool:
    """Whether a `get_attr` is a tensor that the code makes anew at every run: a buffer, or a tensor that was closed
    over and is named alike, may be changed."""
    made_anew = node.users and all(name_of(u) in ("aten::lift_fresh_copy", "aten::lift_fresh") for u in node.users)
    return bool(made_anew) and str(node.target).startswith(("_tensor_constant", "lifted_tensor"))


def changes(node: fx.Node, x: torch.Tensor) -> bool:
    """Whether the tensor `x` that a node names may hold something else at another run: a parameter or a buffer, but
    no constant that a trace lifted."""
    lifted = any(name in str(node.target) for name in ("_tensor_constant", "lifted_tensor"))
    return is_trained(x) or (node.op == "get_attr" and not lifted)


def is_written(node: fx.Node) -> bool:
    """Whether an op of the graph may write to a node's values."""
    return any(isinstance(u.target, torch._ops.OpOverload) and u.target._schema.is_mutable for u in node.users)


def number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise NoMatch("STATE_OP", f"{x!r} is no number")
    return float(x)


def is_mask_node(x: Any) -> bool:
    return isinstance(x, fx.Node) and of_booleans(x)
