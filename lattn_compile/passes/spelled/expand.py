"""Expand a node of a functional ATen graph into sums of products of indexed tensors.

Nodes on the state path are always expanded, and must be multilinear: anything else ends the match. What does not depend
on the state is looked into as far as `depth` says: through views only, through products too, or through selects too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, arguments, is_snapshot, is_tensor, name_of, widens
from lattn_compile.passes.spelled.expand_products import PRODUCT_RULES, SUM_RULES
from lattn_compile.passes.spelled.expand_views import PRODUCTS, SELECT_RULES, SELECTS, VIEW_RULES, VIEWS, fixed
from lattn_compile.passes.spelled.labels import (
    Label,
    is_one,
)
from lattn_compile.passes.spelled.literals import constant, float_fill, is_mask_node, number
from lattn_compile.passes.spelled.masks import ELEMENTWISE, OfMask, of_mask
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import (
    EYE,
    Expr,
    Term,
    atom,
    multiply,
    negated_mask,
)
from lattn_compile.passes.spelled.views import PICKS
from lattn_compile.passes.spelled.writer import value

__all__ = ["PRODUCTS", "SELECTS", "VIEWS", "Expander", "expandable"]

_MAX_VISITS = 4000


class Expander:
    """Expands nodes with `root` as an opaque tensor.

    Args:
        index: of the graph.
        root: the previous state; None where there is none.
        path: the nodes that depend on it.
        depth: how far other nodes are looked into: VIEWS, PRODUCTS or SELECTS.
        matrices: nodes to be expanded whatever they are, one level.
        stored: whether casts that round are looked through: between two tokens they are how the state is stored.
    """

    def __init__(
        self,
        index: Index,
        root: fx.Node | None,
        path: Collection[fx.Node],
        depth: int,
        matrices: Collection[fx.Node] = (),
        *,
        stored: bool = False,
    ) -> None:
        self.index, self.root, self.path, self.depth, self.matrices = index, root, path, depth, matrices
        self.stored = stored
        self.given: dict[fx.Node, Expr] = {}  # what is expanded already
        self.visits = 0

    def expand(self, node: fx.Node) -> Expr:
        self.visits += 1
        if self.visits > _MAX_VISITS:
            raise NoMatch("TOO_MANY_TERMS", "the state update is too large to expand", node)
        if node is self.root:
            return atom(node, ones=self.index.ones)
        if self.given and node in self.given:
            return self.given[node]
        name = name_of(node)
        on_path = node in self.path
        if not on_path and (mask := self._mask(node)) is not None:
            return mask
        handler = None if is_snapshot(node) else VIEW_RULES.get(name)
        if handler is None and (on_path or self.depth >= PRODUCTS or self._constant(node)):
            handler = PRODUCT_RULES.get(name)
        if handler is None and (on_path or node in self.matrices):
            handler = SUM_RULES.get(name) or PRODUCT_RULES.get(name)
        if handler is None and (on_path or self.depth >= SELECTS):
            handler = SELECT_RULES.get(name)
        if not on_path and (not is_tensor(node) or (name in CASTS and not self._exact_cast(node))):
            handler = None
        if handler is not None and name not in VIEW_RULES and value(node).dtype not in (torch.float32, torch.float64):
            if on_path:
                raise NoMatch("ARITHMETIC_DTYPE", f"{name} computes in {value(node).dtype} on the state path", node)
            handler = None  # its rounding is part of the value
        if name == "getitem" and self.depth >= SELECTS and not on_path and (part := self._part(node)) is not None:
            return part
        if handler is None or not isinstance(node.target, torch._ops.OpOverload):
            if on_path:
                raise NoMatch("STATE_OP", f"{name} stands on the state path", node)
            return self._atom(node)
        try:
            return handler(self, node, arguments(node))
        except NoMatch as error:
            if on_path:
                error.node = error.node or node
                raise
            return self._atom(node)

    def _atom(self, node: fx.Node) -> Expr:
        node = self.index.same[node]
        if (known := constant(node)) is not None:
            return Expr([()] * len(value(node).shape), [Term(known, ())])
        if (fill := float_fill(node)) is not None:
            return Expr([() if is_one(n) else (Label(n),) for n in value(node).shape], [Term(fill, ())] if fill else [])
        return self.opaque(node)

    def _mask(self, node: fx.Node) -> Expr | None:
        """A value that is made of masks: 0 or 1 by one of them, or two that are both set."""
        name = name_of(node)
        if name in _ANDS and all(is_mask_node(x) and value(x).dtype == torch.bool for x in node.args):
            return multiply([self.expand(x) for x in node.args])  # type: ignore[arg-type]
        if not (name in ELEMENTWISE or name in PICKS or name in CASTS or name == "getitem"):
            return None
        if (found := of_mask(node)) is None or {found.unset, found.set} - {0.0, 1.0}:
            return None
        try:
            mask = self._along(found)
        except NoMatch:
            return None
        if found.unset == found.set:
            return Expr(mask.axes, [Term(1.0, ())] if found.set else [])
        return mask if found.set else negated_mask(mask)

    def _along(self, found: OfMask) -> Expr:
        """The mask with the axes of what is made of it."""
        x = self.expand(found.mask)
        for node, _ in reversed(found.steps):
            name = name_of(node)
            if name in ELEMENTWISE or name in CASTS:
                continue
            made = Expander(self.index, None, (), SELECTS)
            made.given[node.args[0] if name != "getitem" else node.args[0].args[0]] = x  # type: ignore[union-attr, index]
            if name == "getitem":
                part = made._part(node)
                if part is None:
                    raise NoMatch("AXES", "a part of a mask", node)
                x = part
            else:
                handler = VIEW_RULES.get(name) or SELECT_RULES.get(name)
                if handler is None:
                    raise NoMatch("AXES", f"{name} of a mask", node)
                x = handler(made, node, arguments(node))
        return x

    def opaque(self, node: fx.Node) -> Expr:
        """A tensor that is not looked into."""
        return atom(node, self.index.repeated(node), ones=self.index.ones)

    def _part(self, node: fx.Node) -> Expr | None:
        """One of the tensors that `unbind` returns, or `split` into parts of one position each."""
        whole, position = node.args
        if not isinstance(whole, fx.Node) or name_of(whole) not in _PARTS or not isinstance(position, int):
            return None
        a = arguments(whole)
        dim, keep = a["dim"] % value(a["self"]).dim(), name_of(whole) != "aten::unbind"
        if keep and not all(is_one(part.shape[dim]) for part in value(whole)):
            return None
        try:
            return fixed(self.expand(a["self"]), dim, position, keep=keep)
        except NoMatch:
            return None

    def _constant(self, node: fx.Node) -> bool:
        """Products with a number are always looked into: the number belongs to the coefficient."""
        if name_of(node) not in ("aten::mul", "aten::div", "aten::neg", "aten::eye", "aten::diag_embed"):
            return False
        return not isinstance(node.args[1] if len(node.args) > 1 else None, fx.Node)

    def _exact_cast(self, node: fx.Node) -> bool:
        source = node.args[0]
        return is_tensor(source) and (widens(value(source).dtype, value(node).dtype) or is_mask_node(source))

    def operand(self, x: Any) -> Expr:
        """A tensor operand, or a number as an expression without axes."""
        if isinstance(x, fx.Node):
            if not is_tensor(x):
                raise NoMatch("STATE_OP", f"{x.name} is a number that is only known at run time", x)
            return self.expand(x)
        return Expr([], [Term(number(x), ())])


def expandable(node: fx.Node) -> bool:
    """Whether there is anything to look into."""
    if node is EYE:
        return False
    name = name_of(node)
    return name in SUM_RULES or name in PRODUCT_RULES or name in VIEW_RULES or name in SELECT_RULES


_PARTS = frozenset(["aten::unbind", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split"])
_ANDS = frozenset(["aten::logical_and", "aten::bitwise_and", "aten::__and__"])
