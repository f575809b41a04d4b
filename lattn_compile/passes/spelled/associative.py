"""Recurrences that are spelled as an `associative_scan` over the states of all tokens: told, and left as they are.

Of what is not pointwise torch writes a tree of slices with step 2, under `torch.compile` and `torch.export` alike: no
state follows another there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import Index, arguments, is_tensor, name_of
from lattn_compile.passes.spelled.labels import is_one
from lattn_compile.passes.spelled.proposal import NearMiss, NoMatch
from lattn_compile.passes.spelled.spine import is_outer, stored_origin
from lattn_compile.passes.spelled.writer import value

__all__ = ["find_associative_scans"]


def find_associative_scans(index: Index, taken: Collection[fx.Node]) -> list[NearMiss]:
    """One near miss for each outer product of all tokens that an associative scan adds up."""
    found: dict[fx.Node, NearMiss] = {}
    for node in index.graph.nodes:
        for x in _scanned(node):
            origin = _written(index, x)
            if origin is not None and origin not in taken:
                why = f"it adds up {origin.name}, the outer products of all tokens"
                found.setdefault(origin, NoMatch("ASSOCIATIVE_SCAN", why).at(node))
    return list(found.values())


def _written(index: Index, x: fx.Node) -> fx.Node | None:
    """The outer products that a scan is given, the first of them perhaps added to a state that was there before."""
    waiting, seen = [x], 0
    while waiting and seen < _NEAR:
        origin, seen = stored_origin(waiting.pop()), seen + 1
        if is_tensor(origin) and _of_many(origin) and is_outer(index, origin):
            return origin
        if name_of(origin) in _AROUND:
            waiting += [n for n in reversed(origin.all_input_nodes) if is_tensor(n)]
    return None


_NEAR = 12
_AROUND = frozenset(f"aten::{name}" for name in ("cat", "slice", "select", "add", "slice_scatter", "select_scatter"))


def _of_many(node: fx.Node) -> bool:
    """Whether outer products have axes beside those of keys, values and tokens, as those of heads have."""
    return len([n for n in value(node).shape if not is_one(n)]) > 3


def _scanned(node: fx.Node) -> Sequence[fx.Node]:
    """What an associative scan combines: its operands, or every second element, where it is written out."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "associative_scan":
        return [x for x in node.all_input_nodes if is_tensor(x)]
    if name_of(node) != "aten::slice":
        return []
    a = arguments(node)
    if a.get("step") != 2 or a.get("start") not in (0, None) or a.get("end") != -1:
        return []
    # S_i . a_(i + 1) + S_(i + 1): the elements between come in as they are.
    sums = (s for product in node.users if name_of(product) == "aten::mul" for s in product.users)
    return [a["self"]] if any(name_of(s) == "aten::add" for s in sums) else []
