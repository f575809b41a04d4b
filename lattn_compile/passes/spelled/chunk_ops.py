"""What the chunk-form matcher knows of ATen operators, and which nodes of a graph matter to it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.literals import is_literal
from lattn_compile.passes.spelled.proposal import CONSTANT
from lattn_compile.passes.spelled.subgraph import Rejected, constant, shape_of, sources
from lattn_compile.passes.spelled.writer import value

__all__ = [
    "ANALYTIC", "CASTS", "CONTRACTIONS", "LAYOUT", "PADS", "PRODUCTS", "SOLVES", "STEPS", "WRITES",
    "Constants", "alive_nodes", "is_analytic", "is_number", "ones_dropped", "sizes_of", "sources", "users_of",
]  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYOUT = _words("""
    view _unsafe_view reshape clone contiguous unsqueeze squeeze permute transpose t mT movedim moveaxis swapaxes
    swapdims flatten unflatten alias expand expand_as view_as repeat_interleave numpy_T matrix_H
""")
"""The same numbers in another arrangement (perhaps repeated)."""

PICKS = _words("select slice narrow split split_with_sizes chunk unbind getitem")
PADS = _words("pad constant_pad_nd")
CASTS = _words("to _to_copy type_as")
WRITES = _words("copy select_scatter slice_scatter cat stack")
JOINS = WRITES | _words("repeat tile flip roll index_select index")
PRODUCTS = _words("matmul bmm mm einsum baddbmm")
SOLVES = _words("linalg_solve_triangular linalg_solve linalg_solve_ex linalg_inv linalg_inv_ex inverse")
CONTRACTIONS = PRODUCTS | SOLVES | _words("sum mean cumsum cumprod addbmm linalg_vector_norm prod")
"""Sums over an axis: what mixes tokens is among these."""

STEPS = _words("mul add sub rsub neg div where masked_fill tril triu cumsum cat stack") | LAYOUT | PICKS | PADS | CASTS
"""May stand between a product of two sequences and the next contraction."""

POINTWISE = _words("""
    mul add sub rsub neg div addcmul exp exp2 log log2 where masked_fill tril triu pow rsqrt sqrt reciprocal square lerp
    diag_embed diagonal nan_to_num
""")
ANALYTIC = LAYOUT | PICKS | PADS | CASTS | JOINS | CONTRACTIONS | POINTWISE
"""May stand inside a region. No gate or norm of a layer around it: those end a region."""


def is_analytic(node: fx.Node) -> bool:
    """Whether a node may stand inside a region. One of several results may if the call may that it is a result of."""
    if node.op != "call_function" or (name := short_name(node)) not in ANALYTIC:
        return False
    whole = node.args[0] if name == "getitem" else None
    return not isinstance(whole, fx.Node) or short_name(whole) in ANALYTIC


def sizes_of(node: fx.Node) -> tuple[int, ...] | None:
    """Size hints of a tensor node; None for anything else, and for sizes that depend on data."""
    if not isinstance(value(node), torch.Tensor):
        return None
    try:
        return shape_of(node)
    except Rejected:
        return None


def ones_dropped(sizes: Sequence[int]) -> list[int]:
    """Positions of the axes that are longer than one."""
    return [i for i, n in enumerate(sizes) if n != 1]


class Constants:
    """Which nodes hold values that no input reaches: constructors, lifted constants, and what is made from them."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, bool] = {}

    def __contains__(self, node: object) -> bool:
        assert isinstance(node, fx.Node)
        stack = [node]
        while stack:
            n = stack[-1]
            if n in self._known:
                stack.pop()
                continue
            verdict = self._at_once(n)
            if verdict is None:
                unknown = [i for i in sources(n) if i not in self._known]
                if unknown:
                    stack.extend(unknown)
                    continue
                verdict = all(self._known[i] for i in sources(n))
            self._known[n] = verdict
        return self._known[node]

    @staticmethod
    def _at_once(node: fx.Node) -> bool | None:
        """None: as its sources are."""
        if node.op == "get_attr" or CONSTANT in node.meta:
            x = constant(node)
            fake = isinstance(x, torch._subclasses.FakeTensor)
            changes = node.op == "get_attr" and not is_literal(node)  # a buffer, say
            return isinstance(x, torch.Tensor) and not x.requires_grad and not fake and not changes
        if node.op != "call_function":
            return False
        if is_number(node):
            return True
        if isinstance(node.target, torch._ops.OpOverload):
            impure = torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable
            return False if impure else None
        return None if node.target is operator.getitem else False


def alive_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output or a side effect needs; assertions are none."""
    alive: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _is_assertion(node):
            continue
        if node in alive or node.op == "output" or (node.op == "call_function" and node.is_impure()):
            alive.add(node)
            alive.update(sources(node) if node.op == "call_function" else node.all_input_nodes)
    return alive


def users_of(node: fx.Node, alive: set[fx.Node]) -> Iterator[fx.Node]:
    """Live users that read the node's values, and not its sizes alone."""
    return (
        u for u in node.users if u in alive and (u.op != "call_function" or (node in sources(u) and not is_number(u)))
    )


def is_number(node: fx.Node) -> bool:
    """Whether a node is a number, as sizes are."""
    return isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_assertion(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return "_assert" in name or name == "aten::_linalg_check_errors"
