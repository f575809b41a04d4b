"""What stands around a site and disappears into its loops when its op is taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

__all__ = ["folded", "folded_into_a_kernel"]

_CASTS = frozenset(("float", "half", "bfloat16", "double", "to", "type", "type_as", "_to_copy"))
_COMPUTED = _CASTS.union(
    ("abs", "add", "clamp", "div", "exp", "log", "logsigmoid", "masked_fill", "mean", "mul", "neg", "pow", "relu"),
    ("rms_norm", "rsqrt", "sigmoid", "silu", "softplus", "sqrt", "square", "sub", "sum", "tanh", "truediv", "where"),
)
_VIEWED = frozenset(
    (
        "chunk",
        "contiguous",
        "expand",
        "flatten",
        "getitem",
        "permute",
        "repeat_interleave",
        "reshape",
        "select",
        "slice",
    )
).union(("split", "split_with_sizes", "squeeze", "transpose", "unbind", "unflatten", "unsqueeze", "view"))
"""They move nothing in generated loops, or are one more index; not worth a word."""


_IN_A_KERNEL = {"beta": ({"sigmoid"}, {"cast"}), "g": ({"softplus", "exp", "neg", "mul", "add"}, {"cast"})}
"""What a GPU's kernel computes of an operand: these operations, all of them, and maybe those (`gpu_fold.py`)."""


def folded(node: fx.Node) -> tuple[str, ...]:
    """Of an op `lattn::decode` that Inductor takes apart: what it fuses with each operand, one line an operand.

    An elementwise operation or a reduction in front of the op ends up in the same loops, up to the first producer that
    is a call (a product with weights) or comes from outside the graph.
    """
    return _lines(node, _operations(node))


def folded_into_a_kernel(node: fx.Node) -> tuple[str, ...]:
    """Of an op `lattn::decode` of one token that is a kernel of ours on a GPU: what of its surroundings it computes."""
    found = {}
    for operand, names in _operations(node).items():
        all_of, maybe = _IN_A_KERNEL.get(operand, ({"l2norm"}, set()))
        names = [x for x in names if x in all_of | maybe] if operand in ("q", "k") else names
        if names and all_of <= set(names) <= all_of | maybe:
            found[operand] = names
    return _lines(node, found)


def _lines(node: fx.Node, operations: dict[str, list[str]]) -> tuple[str, ...]:
    lines = [f"{operand}: {', '.join(names)}" for operand, names in operations.items() if names]
    if any(_name(user) == "copy_" for user in _readers_of_the_state(node)):
        lines.append("final_state: written in place")
    return tuple(lines)


def _operations(node: fx.Node) -> dict[str, list[str]]:
    """By operand, what stands in front of it."""
    names_of = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    named = dict(zip(names_of, node.args, strict=False)) | dict(node.kwargs)
    found = {}
    for operand in ("q", "k", "v", "g", "beta", "initial_state"):
        found[operand] = list(dict.fromkeys(_names(named.get(operand), set())))
        if operand in ("q", "k") and named.get("qk_l2norm"):
            found[operand].append("l2norm")
    return found


def _names(node: Any, seen: set[fx.Node]) -> Iterator[str]:
    """In the order of computation."""
    if not isinstance(node, fx.Node) or node in seen:
        return
    seen.add(node)
    name = _name(node)
    if name in _COMPUTED or name in _VIEWED:
        for operand in node.all_input_nodes:
            yield from _names(operand, seen)
    if name in _CASTS:
        if len({x.dtype for x in map(_value, (node, *node.all_input_nodes[:1])) if isinstance(x, torch.Tensor)}) > 1:
            yield "cast"
    elif name in _COMPUTED:
        yield name


def _readers_of_the_state(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _name(user) == "getitem" and user.args[1] == 1:
            for reader in user.users:
                yield from reader.users if _name(reader) in _CASTS else (reader,)
                yield reader


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._opname)
    return getattr(node.target, "__name__", "")
