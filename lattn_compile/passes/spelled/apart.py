"""Calls that do several things at once, taken apart while a graph is searched, and put together again where nothing
of them became a site: code that stays computes what it did, in the same calls.

    lerp(a, b, w)             w * b + (1 - w) * a, where that writes an outer product: HGRN's S = lerp(kv, S, f)
    einsum of n > 2 operands  einsums of two, from left to right, as torch computes it
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import arguments, is_tensor, name_of
from lattn_compile.passes.spelled.labels import is_one
from lattn_compile.passes.spelled.writer import Writer, keep_gradient, value

__all__ = ["Apart", "put_together", "take_einsums_apart", "take_lerps_apart"]

aten = torch.ops.aten


@dataclass
class Apart:
    """One call that was taken apart.

    Attributes:
        parts: the nodes in its place, in order; the last has its value. target: what was called.
        equation: of an einsum. meta: of the call.
    """

    parts: list[fx.Node]
    target: Any
    meta: dict[str, Any]
    equation: str = ""

    def call(self) -> tuple[Any, ...]:
        """The arguments of the call, read off its parts: a pass may have put others in their place."""
        if self.equation:
            first, *others = (part.args[1] for part in self.parts)
            return self.equation, [*first, *(pair[1] for pair in others)]  # type: ignore[index, misc]
        _, kept, rest, _ = self.parts
        return rest.args[1], kept.args[1], kept.args[0]


def put_together(apart: list[Apart], used: Collection[fx.Node]) -> None:
    """Write the calls again, but for those of which a node is `used`, or of which something else reads a part."""
    for one in reversed(apart):
        *inner, last = one.parts
        if any(n in used for n in one.parts) or any(u not in one.parts for n in inner for u in n.users):
            continue
        with last.graph.inserting_before(last):
            node = last.graph.call_function(one.target, one.call())
        node.meta = dict(one.meta)
        last.replace_all_uses_with(node)
        for part in reversed(one.parts):
            part.graph.erase_node(part)
    apart.clear()


def take_lerps_apart(graph: fx.Graph) -> list[Apart]:
    """Lerps by a tensor, of which the weight and one of the ends are an outer product."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.lerp.Tensor):
        a = arguments(node)
        start, end, weight = a["self"], a["end"], a["weight"]
        if not any(_outer(x, weight, node) for x in (start, end)):
            continue
        w = Writer(node, node)
        other = w.call(aten.rsub.Scalar, weight, 1)
        kept, rest = w.call(aten.mul.Tensor, weight, end), w.call(aten.mul.Tensor, other, start)
        found.append(_replaced(node, [other, kept, rest, w.call(aten.add.Tensor, kept, rest)]))
    return found


def take_einsums_apart(graph: fx.Graph, taken: Collection[fx.Node]) -> list[Apart]:
    """Einsums of more than two operands that name each axis and are not `taken`."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.einsum.default):
        a = arguments(node)
        equation = str(a["equation"]).replace(" ", "")
        left, arrow, right = equation.partition("->")
        names, operands = left.split(","), list(a["tensors"])
        plain = bool(arrow) and "." not in equation and all(len(set(n)) == len(n) for n in names)
        if len(operands) < 3 or not plain or a.get("path") is not None or node in taken:
            continue
        w = Writer(node, node)
        made, name, parts = operands[0], names[0], []
        for i, (operand, other) in enumerate(zip(operands[1:], names[1:], strict=True), 2):
            needed = set("".join((right, *names[i:])))
            pair = "".join(dict.fromkeys(c for c in name + other if c in needed))
            to = right if i == len(operands) else pair
            made, name = w.call(aten.einsum.default, f"{name},{other}->{to}", [made, operand]), to
            parts.append(made)
        found.append(_replaced(node, parts, equation))
    return found


def _replaced(node: fx.Node, parts: list[fx.Node], equation: str = "") -> Apart:
    keep_gradient(parts[-1], node)
    node.replace_all_uses_with(parts[-1])
    node.graph.erase_node(node)
    return Apart(parts, node.target, dict(node.meta), equation)


def _outer(x: Any, y: Any, like: fx.Node) -> bool:
    """Whether each of two operands holds the same values again and again along an axis that the other varies along."""
    if not is_tensor(x) or not is_tensor(y):
        return False
    rank = value(like).dim()
    one, two = ([True] * (rank - len(r)) + r for r in (_repeats(x), _repeats(y)))
    return any(a and not b for a, b in zip(one, two, strict=True)) and any(
        b and not a for a, b in zip(one, two, strict=True)
    )


def _repeats(x: fx.Node) -> list[bool]:
    """For each axis, whether it is of size 1 or expanded from one."""
    if name_of(x) in ("aten::expand", "aten::expand_as", "aten::broadcast_to") and is_tensor(x.args[0]):
        inner = _repeats(x.args[0])  # type: ignore[arg-type]
        return [True] * (value(x).dim() - len(inner)) + inner
    return [is_one(n) for n in value(x).shape]
