"""Row sums of a matrix of scores, which normalise a parallel form: `a = tril(q k^T ∘ D); o = (a @ v) / a.sum(-1)`.

Such a sum is the same recurrence with values of 1. A search for the outputs of a form does not see it, so that what the
scores make of the values is one; then the sum is a proposal of its own. Scores that are divided by their sums before
they meet the values are looked for as if they were divided behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_ops import CASTS, LAYOUT, PRODUCTS, STEPS, sizes_of, sources
from lattn_compile.passes.spelled.chunk_views import Sizes, View, views
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["RowSums", "find_row_sums", "sum_orders"]

_READINGS = 3
_FURTHEST = 8


@dataclass
class RowSums:
    """Attributes:
    scores: per sum, the matrix that it is the sum of.
    hidden: nodes that are no outputs of a form: the sums, and products of scores that were divided before.
    products: what is looked for in place of such a product, with that product and what it was divided by.
    """

    scores: dict[fx.Node, fx.Node] = field(default_factory=dict)
    hidden: set[fx.Node] = field(default_factory=set)
    products: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def erase(self) -> None:
        for node in self.products:
            node.graph.erase_node(node)
        self.products.clear()


def find_row_sums(graph: fx.Graph) -> RowSums:
    """The row sums of a graph. Products of undivided scores are written into it, until `erase`."""
    found = RowSums()
    overload = torch.ops.aten.sum.dim_IntList
    for node in graph.find_nodes(op="call_function", target=overload):
        if short_name(sources(node)[0]) == "detach":
            node = _detached_behind(node)
        if node.target is not overload or not _is_score(scores := sources(node)[0]):
            continue
        dims = node.args[1] if len(node.args) > 1 else None
        rank = len(value(scores).shape)
        if not isinstance(dims, (list, tuple)) or [d % rank for d in dims] != [rank - 1]:
            continue
        behind = [u for u in _through(scores) if short_name(u) in PRODUCTS]
        quotients = _quotients(scores, node)
        divided = [(p, d) for d in quotients for p in d.users if _keeps_rows(p, d)]
        if not behind and not divided:
            continue
        found.scores[node] = scores
        found.hidden.add(node)
        for product, quotient in divided:
            w = Writer(product.next, product)
            undivided = w.call(product.target, *_with(product.args, quotient, scores), **product.kwargs)
            found.products[undivided] = (product, quotient.args[1])  # type: ignore[assignment]
            found.hidden |= {product, quotient}
    return found


def _detached_behind(node: fx.Node) -> fx.Node:
    """The sum of what was detached, detached: the same value, and the same gradient."""
    x = node.args[0].args[0]  # type: ignore[union-attr]
    if not _is_score(x):  # type: ignore[arg-type]
        return node
    w = Writer(node, node)
    total = w.call(node.target, x, *node.args[1:], **node.kwargs)
    node.replace_all_uses_with(w.call(torch.ops.aten.detach.default, total))
    node.graph.erase_node(node)
    return total


def _is_score(node: fx.Node) -> bool:
    """Whether a node is a square matrix over tokens that is made of a product of two sequences by masks alone."""
    shape = sizes_of(node)
    if shape is None or len(shape) < 3 or shape[-1] != shape[-2] or shape[-1] == 1:
        return False
    waiting = [(node, 0)]
    while waiting:
        at, steps = waiting.pop()
        if at.op != "call_function" or steps > _FURTHEST:
            continue
        if short_name(at) in PRODUCTS:
            return True
        if short_name(at) in STEPS | {"exp"}:
            waiting += [(n, steps + 1) for n in sources(at) if sizes_of(n) is not None]
    return False


def _through(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value and of its views."""
    for user in node.users:
        yield user
        if short_name(user) in LAYOUT | CASTS:
            yield from _through(user)


def _quotients(scores: fx.Node, total: fx.Node) -> list[fx.Node]:
    """Scores that are divided by what is made of their sums, of a bound on them perhaps, number by number."""
    below, waiting, size = {total}, [total], math.prod(sizes_of(total) or ())
    while waiting:
        for user in waiting.pop().users:
            if user not in below and math.prod(sizes_of(user) or ()) == size:
                below.add(user)
                waiting.append(user)
    divisions = [u for u in scores.users if short_name(u) == "div" and u.args[0] is scores and u.args[1] in below]
    # By one number a row: what is divided by numbers of its columns cannot be divided behind.
    rows = [(u, sizes_of(u.args[1]) or ()) for u in divisions]  # type: ignore[arg-type]
    return [u for u, shape in rows if len(shape) == len(sizes_of(u) or ()) and shape[-1] == 1]


def _with(args: Any, old: fx.Node, new: fx.Node) -> Any:
    return fx.map_arg(args, lambda n: new if n is old else n)


def _keeps_rows(product: fx.Node, scores: fx.Node) -> bool:
    """Whether a product sums over the columns of scores and keeps their other axes where they are, its own one last:
    what their rows are divided by may as well divide the product."""
    if short_name(product) in ("matmul", "bmm"):
        return product.args[0] is scores
    if short_name(product) != "einsum" or "..." in (equation := str(product.args[0]).replace(" ", "")):
        return False
    operands: Any = product.args[1]
    subscripts, arrow, out = equation.partition("->")
    of_scores = [s for s, n in zip(subscripts.split(","), operands, strict=True) if n is scores]
    if not arrow or len(of_scores) != 1:
        return False
    (rows,) = of_scores
    return out[:-1] == rows[:-1] and rows[-1] not in out and out[-1] not in rows and len(set(rows)) == len(rows)


def sum_orders(node: fx.Node, sizes: Sizes) -> list[View]:
    """What the axes of a sum may be: one number a token and head."""
    tokens = sizes.padded if sizes.padded is not None else sizes.tokens
    return [v for v in views(node, Sizes(sizes.batch, tokens, sizes.heads, 1)) if "f" not in v.labels][:_READINGS]
