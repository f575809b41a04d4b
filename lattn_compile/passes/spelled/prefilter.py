"""Whether a graph is worth a functional copy: tracing it again costs more than all that follows.

A recurrence writes outer products, or mixes tokens by masks, cumulative sums and products that are added up. A graph of
Dynamo or of `torch.export` without any of these holds none, whatever its spelling. In doubt it is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lattn_compile.passes.context import nodes_of, shape_of

__all__ = ["may_hold_a_recurrence"]

# Signs of a chunk-parallel form, or of code whose insides are not seen here.
_SIGNS = frozenset(
    (
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "tril",
        "triu",
        "tril_",
        "triu_",
        "solve_triangular",
        "linalg_solve_triangular",
        "triangular_solve",
        "inv",
        "inverse",
        "scan",
        "while_loop",
        "associative_scan",
        "outer",
        "ger",
        "addr",
        "kron",
        "einsum",
        "tensordot",
        "addcmul",
        "addcmul_",
        "baddbmm",
        "baddbmm_",
        "addbmm",
        "lerp",
        "lerp_",
    )
)
_MATRIX_PRODUCTS = frozenset(("matmul", "bmm", "mm", "imatmul"))
_PRODUCTS = frozenset(("mul", "multiply", "imul", "mul_")) | _MATRIX_PRODUCTS
_SUMS = frozenset(("add", "sub", "iadd", "isub", "add_", "sub_", "rsub", "subtract", "addmm"))
# After these, an outer product is no longer one: a rotary embedding's angles, a comparison.
_ENDS = frozenset(("cos", "sin", "cat", "concat", "softmax", "eq", "lt", "gt", "le", "ge"))

# fmt: off
_VIEWS = frozenset((
    "view", "reshape", "transpose", "permute", "t", "getattr", "squeeze", "unsqueeze", "flatten", "unflatten",
    "contiguous", "clone", "to", "float", "half", "type_as", "_to_copy", "expand", "getitem",
))
# What may stand between the two products of a parallel form, `((q @ k.mT) * mask) @ v`. A softmax may not.
_MASKS = _VIEWS | frozenset((
    "mul", "multiply", "imul", "mul_", "div", "div_", "truediv", "divide", "where", "masked_fill", "masked_fill_",
))
# fmt: on


def may_hold_a_recurrence(module: fx.GraphModule) -> bool:
    """False only where no spelled-out recurrence can be in the graph or in the bodies of its regions."""
    for node in nodes_of(module):
        name = _name(node)
        if name is None:
            continue
        if name in _SIGNS or name.startswith(("_vmap", "vmap")):
            return True
        if name in _PRODUCTS and (_outer(node, name) is not False) and _reaches_a_sum(node):
            return True
        if name in _SUMS and _adds_a_product(node):
            return True
        if name in _MATRIX_PRODUCTS and _of_computed(node) and _reaches_a_product(node):
            return True
    return False


def _name(node: fx.Node) -> str | None:
    """Name of what a node calls, the same for functions, methods, operators and overloads."""
    if node.op == "call_method":
        return str(node.target).strip("_") if str(node.target).startswith("__") else str(node.target)
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.rpartition("::")[2])
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name())
    return str(getattr(target, "__name__", target))


def _outer(node: fx.Node, name: str) -> bool | None:
    """Whether a product makes an outer product of its operands; None if that cannot be told."""
    shapes = [shape_of(x) for x in node.args[:2] if isinstance(x, fx.Node)]
    out = shape_of(node)
    if len(shapes) < 2:
        return False
    if out is None or any(s is None for s in shapes):
        return None
    x, y = shapes
    assert x is not None and y is not None
    if name in ("mul", "multiply", "imul", "mul_"):
        # Expanded operands do not show what they repeat: then the size says nothing.
        return all(_lacks(s, out) or _expanded(a) or _given_an_axis(a) for s, a in zip((x, y), node.args, strict=False))
    return len(x) > 1 and len(y) > 1 and _one(x[-1])


def _lacks(shape: tuple[Any, ...], out: tuple[Any, ...]) -> bool:
    padded = (1,) * (len(out) - len(shape)) + shape
    return any(_one(n) and not _one(m) for n, m in zip(padded, out, strict=True))


def _expanded(node: Any) -> bool:
    return isinstance(node, fx.Node) and _name(node) in ("expand", "expand_as", "broadcast_to", "repeat")


def _given_an_axis(node: Any) -> bool:
    """Whether an operand was given an axis for the product: of sizes that are 1 themselves it shows nothing."""
    while isinstance(node, fx.Node) and _name(node) == "slice":
        node = node.args[0]
    if not isinstance(node, fx.Node) or _name(node) not in ("unsqueeze", "getitem"):
        return False
    index = node.args[1] if _name(node) == "getitem" else None
    return index is None or (isinstance(index, tuple) and None in index)


def _one(n: Any) -> bool:
    return type(n) is int and n == 1


def _reaches_a_sum(node: fx.Node) -> bool:
    """Whether the result is added to something, a few calls on."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < 32:
        for user in waiting.pop().users:
            name = _name(user)
            if name in _SUMS or user.op in ("output", "call_module"):
                if user.op != "output":
                    return True
            elif name not in _ENDS and user not in seen:
                seen.add(user)
                waiting.append(user)
    return bool(waiting)


def _of_computed(node: fx.Node) -> bool:
    """Whether no weight is in a matrix product, as far as ranks tell: a weight is a matrix that nothing computes."""
    for x in node.args[:2]:
        while isinstance(x, fx.Node) and _name(x) in _VIEWS and x.args:
            x = x.args[0]
        if not isinstance(x, fx.Node):
            return False
        if x.op in ("placeholder", "get_attr") and len(shape_of(x) or (1, 1, 1)) < 3:
            return False
    return True


def _reaches_a_product(node: fx.Node) -> bool:
    """Whether a matrix product comes to another through masks and views alone."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < 32:
        for user in waiting.pop().users:
            name = _name(user)
            if name in _MATRIX_PRODUCTS and _of_computed(user):
                return True
            if name in _MASKS and user not in seen:
                seen.add(user)
                waiting.append(user)
    return bool(waiting)


def _adds_a_product(node: fx.Node) -> bool:
    """Whether a sum takes a product of two computed matrices as it is: a state of a block of tokens does."""
    for x in node.args[:2]:
        steps = 0
        while (
            isinstance(x, fx.Node) and steps < 6 and _name(x) in ("transpose", "permute", "view", "reshape", "squeeze")
        ):
            x, steps = x.args[0], steps + 1
        if isinstance(x, fx.Node) and _name(x) in ("matmul", "bmm", "mm", "imatmul"):
            return True
    return False
