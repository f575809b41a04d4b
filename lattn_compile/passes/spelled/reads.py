"""Who reads a state, and whether it lives on.

o = scale · Sᵀ q: a node that contracts the state along one of its axes with something that does not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, is_tensor, name_of
from lattn_compile.passes.spelled.expand import PRODUCTS, VIEWS, Expander
from lattn_compile.passes.spelled.labels import Axis, Label, equal_but_for_order, flat, is_one, unify
from lattn_compile.passes.spelled.literals import is_mask_node
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.spine import path_between
from lattn_compile.passes.spelled.terms import Expr, Factor, Term, is_mask, keyed, simplify
from lattn_compile.passes.spelled.token import Step
from lattn_compile.passes.spelled.views import is_view, only_shape
from lattn_compile.passes.spelled.writer import value

__all__ = ["Fate", "Read", "fate_of", "find_late_read", "find_reads", "same_elements"]

_THROUGH = frozenset(["aten::mul", "aten::neg", "aten::div"])


@dataclass
class Read:
    """A contraction of a state.

    Attributes:
        node: the result. axes: its labels. index: the labels of the state's axes.
        key_axes: axes of the state that are summed over.
        scale: coefficient. q: factors that are multiplied in. path: nodes from the state to the result.
    """

    node: fx.Node
    axes: list[Axis]
    index: tuple[Axis, ...]
    key_axes: list[int]
    scale: float
    q: tuple[Factor, ...]
    path: frozenset[fx.Node] = frozenset()


def find_reads(index: Index, state: fx.Node, exclude: Collection[fx.Node]) -> tuple[list[Read], bool]:
    """The reads of `state`, and whether anything else uses it.

    Args:
        exclude: nodes whose use of the state is another's business (the next update and all that leads to it).
    """
    reads: list[Read] = []
    others = False
    waiting: list[tuple[fx.Node, frozenset[fx.Node]]] = [(state, frozenset())]
    seen: set[fx.Node] = set()
    while waiting:
        node, path = waiting.pop()
        for user in index.users(node):
            if user in seen or only_shape(user):
                continue
            seen.add(user)
            if user in exclude:
                if is_view(user):  # of a view that the next token shares with a read
                    waiting.append((user, path | {user}))
                continue
            along = path | {user}
            read = _as_read(index, state, user, along)
            if read is not None and any(_depends(index, f.node, state) for f in read.q):
                read = None  # what it reads with is made of the state itself
            if read is not None:
                read.path = along
                reads.append(read)
            elif len(along) < 12 and is_tensor(user) and (is_view(user) or name_of(user) in _THROUGH | CASTS):
                if user.users:
                    waiting.append((user, along))
            else:
                others = True
    reads.sort(key=lambda r: index.order[r.node])
    return reads, others


def _depends(index: Index, node: fx.Node, state: fx.Node) -> bool:
    """Whether a value is computed from a state. Long ways back count as such."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        if current is state or len(seen) > 2000:
            return True
        for x in current.all_input_nodes:
            if x not in seen and index.order[x] >= index.order[state]:
                seen.add(x)
                waiting.append(x)
    return False


def _as_read(index: Index, state: fx.Node, node: fx.Node, path: frozenset[fx.Node]) -> Read | None:
    if not is_tensor(node) or is_view(node) or (name_of(node) in _THROUGH and not _shrinks(state, node)):
        return None
    for depth in (VIEWS, PRODUCTS):
        try:
            expr = simplify(Expander(index, state, path, depth).expand(node))
        except NoMatch:
            return None
        if len(expr.terms) != 1:
            return None
        (term,) = expr.terms
        read = _from_term(node, expr.axes, term, state)
        if read is not None:
            return read
    return None


def _shrinks(state: fx.Node, node: fx.Node) -> bool:
    """A product with a singleton axis of the other operand is a contraction where that axis of the state is 1."""
    return len([n for n in value(node).shape if not is_one(n)]) < len([n for n in value(state).shape if not is_one(n)])


def _from_term(node: fx.Node, axes: list[Axis], term: Term, state: fx.Node) -> Read | None:
    of_state = [f for f in term.factors if f.node is state]
    if len(of_state) != 1 or any(isinstance(a, int) for a in of_state[0].index):
        return None
    (factor,) = of_state
    rest = tuple(f for f in term.factors if f is not factor)
    free = {label for axis in axes for label in flat(axis)}
    labels = factor.labels()
    summed = [x for x in labels if x not in free]
    if not summed or not free <= set(labels) or len(labels) != len(set(labels)):
        return None
    index = tuple(a for a in factor.index if not isinstance(a, int))
    key_axes = [i for i, a in enumerate(index) if flat(a) and set(flat(a)) <= set(summed)]
    if len(key_axes) != 1 or set(flat(index[key_axes[0]])) != set(summed):
        return None
    if not any(set(f.labels()) & set(summed) for f in rest):
        return None  # a plain sum reads with no query
    return Read(node, axes, index, key_axes, term.coefficient, rest)


def find_late_read(index: Index, step: Step) -> Read | None:
    """A read that is spelled without the new state: o = Sᵀ (Γ q) + (q·k) u, which saves a pass over the state; or of
    what a token would make of the state if it were not skipped, where outputs of skipped tokens are masked off.

    The query is read off the term with the old state; the rest has to be what it then must be, term by term.
    """
    tried = 0
    for node in _below(index, step):
        tried += 1
        if tried > 24:
            break
        try:
            read = _equals_read(index, step, node)
        except (NoMatch, ValueError):
            continue
        if read is not None:
            return read
    return None


def _below(index: Index, step: Step) -> list[fx.Node]:
    """Sums and masked values that depend on the previous state and are not on the way to the new one, nearest first."""
    waiting = [u for n in step.path if n is not step.update for u in n.users if u not in step.path]
    seen = set(waiting)
    found: list[fx.Node] = []
    while waiting and len(seen) < 64:
        node = waiting.pop(0)
        if not is_tensor(node):
            continue
        if name_of(node) in _SUMS or (name_of(node) in _MASKED and any(map(is_mask_node, node.args))):
            found.append(node)
        for user in node.users:
            if user not in seen and user not in step.path:
                seen.add(user)
                waiting.append(user)
    return sorted(found, key=index.order.__getitem__)


_SUMS = frozenset(
    ["aten::add", "aten::sub", "aten::addcmul", "aten::baddbmm", "aten::addbmm", "aten::addmm", "aten::rsub"]
)
_MASKED = frozenset(["aten::where", "aten::masked_fill", "aten::mul"])


def _equals_read(index: Index, step: Step, node: fx.Node) -> Read | None:
    new = simplify(Expander(index, step.root, step.path, PRODUCTS).expand(step.update))
    path = path_between(index, step.root, node)
    out = simplify(Expander(index, step.root, path, PRODUCTS).expand(node))
    decays = [t for t in new.terms if _root(t, step) and set(_root(t, step)[0].labels()) == set(new.free())]
    reading = [t for t in out.terms if _root(t, step)]
    for decay, term in itertools.product(decays, sorted(reading, key=lambda t: len(t.factors))):
        # Of the token of a mask, its outputs elsewhere are none of the state's: they have to be masked off.
        masks = [f for f in decay.factors if is_mask(f)] if len(decays) > 1 else []
        read = _through(step, new, out, decay, term, masks)
        if read is not None:
            read.node = node
            return read
    return None


def _through(step: Step, new: Expr, out: Expr, decay: Term, term: Term, masks: list[Factor]) -> Read | None:
    """The read that `out` is if `term` of it is what is read of `decay`, where the masks are set."""
    free = set(out.free())
    (mine,), (theirs,) = _root(term, step), _root(decay, step)
    rename: dict[Label, Label] = {}
    for axis, other in zip(mine.index, theirs.index, strict=True):
        if isinstance(axis, int) or isinstance(other, int):
            return None
        if set(flat(axis)) <= free:
            unify(axis, other)
        else:
            rename.update(zip(flat(axis), flat(other), strict=True))
    if not rename:
        return None
    q = [f.renamed(rename) for f in term.factors if f is not mine]
    for f in decay.factors:
        if f.node is not step.root:
            hit = next((g for g in q if g.key() == f.key()), None)
            if hit is None:
                return None
            q.remove(hit)
    q += masks
    scale = term.coefficient / decay.coefficient
    expected = simplify(Expr(out.axes, [Term(t.coefficient * scale, (*t.factors, *q)) for t in new.terms]))
    want, got = keyed(expected), keyed(out)
    if want.keys() != got.keys() or any(abs(want[k] - got[k]) > 1e-12 * abs(want[k]) for k in want):
        return None
    for axis, other in zip(new.axes, step.axes, strict=True):
        unify(axis, other)
    return Read(step.update, out.axes, tuple(step.axes), [], scale, tuple(q))


def _root(term: Term, step: Step) -> list[Factor]:
    return [f for f in term.factors if f.node is step.root]


@dataclass
class Fate:
    """What becomes of a state: `escapes` (an output, or written back to an input), or `blocked` by a node that is no
    copy of it."""

    escapes: bool
    blocked: fx.Node | None


_KEEPING = frozenset(
    f"aten::{name}"
    for name in [
        "stack",
        "cat",
        "copy_",
        "copy",
        "index_put",
        "index_put_",
        "index_copy",
        "index_copy_",
        "scatter",
        "select_scatter",
        "slice_scatter",
        "scatter_",
        "index_add",
        "repeat",
        "expand",
        "select_scatter",
        "as_strided",
        "masked_scatter",
        "unbind",
        "split",
        "concat",
        "concatenate",
        "hstack",
        "vstack",
        "detach",
    ]
) | {"getitem", "output"}


def fate_of(index: Index, state: fx.Node, exclude: Collection[fx.Node]) -> Fate:
    """Follows copies of a state through the graph."""
    blocked: fx.Node | None = None
    waiting, seen = [state], {state}
    while waiting:
        node = waiting.pop()
        for user in index.users(node):
            if user in seen or user in exclude:
                continue
            seen.add(user)
            name = name_of(user)
            if (
                user.op == "output"
                or name == "aten::detach"
                or name in ("aten::copy_", "aten::index_copy_", "aten::index_put_")
            ):
                return Fate(True, None)
            if isinstance(user.target, torch._ops.HigherOrderOperator) or user.op == "call_module":
                return Fate(True, None)
            if is_view(user) or name in _KEEPING or name in CASTS:
                waiting.append(user)
            elif blocked is None and is_tensor(user) and same_elements(user, state):
                blocked = user
    return Fate(False, blocked)


def same_elements(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values are tensors of the same sizes, axes of 1 and their order aside."""
    return is_tensor(a) and is_tensor(b) and equal_but_for_order(value(a).shape, value(b).shape)
