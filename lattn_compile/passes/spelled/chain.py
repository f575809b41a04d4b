"""Chains of steps: which states follow one another, who reads them, and where a chain has to be cut."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import Index, is_snapshot, is_tensor, name_of
from lattn_compile.passes.spelled.expand import PRODUCTS, VIEWS, Expander
from lattn_compile.passes.spelled.labels import flat, same_size, unify
from lattn_compile.passes.spelled.literals import is_zero
from lattn_compile.passes.spelled.proposal import NearMiss, NoMatch
from lattn_compile.passes.spelled.reads import Read, fate_of, find_late_read, find_reads
from lattn_compile.passes.spelled.spine import candidates, path_between, roots_of, stored_origin
from lattn_compile.passes.spelled.step import match_step
from lattn_compile.passes.spelled.storage import LOW, lowest_dtype, rounding_of, stored_casts
from lattn_compile.passes.spelled.terms import simplify
from lattn_compile.passes.spelled.token import NeedsMatrix, Product, Step, split_product
from lattn_compile.passes.spelled.unread import leaks, refuse_late_reads, refuse_unread
from lattn_compile.passes.spelled.writer import value

__all__ = ["Chain", "Link", "find_chains"]


@dataclass
class Link:
    """One token of a chain: the step, and the read of its state."""

    step: Step
    read: Read | None


@dataclass
class Chain:
    """Steps that follow one another with nobody looking in between.

    Attributes:
        links: one a token. root: the state before the first; None for zeros.
        state_dtype: dtype to which the graph rounds the state after every token, None if it does not.
    """

    links: list[Link]
    root: fx.Node | None
    state_dtype: torch.dtype | None = None
    evidence: dict[str, object] = field(default_factory=dict)


def find_chains(index: Index, *, in_loop: bool = False) -> tuple[list[Chain], list[NearMiss], set[fx.Node]]:
    """Every chain of the graph, cut where it has to be; the candidates that came near; and nodes of refused ones.

    Args:
        in_loop: whether the graph is a loop's body: its state is carried, and may be read after the loop only.
    """
    steps, misses, refused = _match_all(index)
    children: dict[fx.Node, list[Step]] = {}
    for step in steps.values():
        children.setdefault(stored_origin(step.root), []).append(step)
    reads = _reads(index, steps, children)
    chains: list[Chain] = []
    seen: set[fx.Node] = set()
    early: set[fx.Node] = set()  # states of recurrences that are read before the write
    for step in steps.values():
        if step.update in seen:
            continue
        run = [step]
        while len(after := _followers_of(children, run[-1])) == 1:
            run.append(after[0])
        seen.update(s.update for s in run)
        try:
            chains += _cut(index, run, reads, children, _is_source(run[0].root, steps), in_loop)
        except NoMatch as error:
            root = run[0].root
            if error.code in _UNSEEN:
                refused |= {n for s in run for n in s.path}
            if error.code == "READ_BEFORE_WRITE":
                early |= {s.update for s in run}
            if error.code == "NOT_A_STATE":
                if told := _through_an_op(index, root, run[-1].update, steps):
                    misses += told
                    refused |= {n for s in run for n in s.path}  # a token that was told is no chunk form
                continue
            if _is_source(root, steps):
                near = {x for s in run for n in s.path for x in (n, *n.all_input_nodes)}
                misses.append(replace(error.at(run[-1].update, steps=len(run)), token=frozenset(near)))
            elif lowest_dtype(root) != value(run[0].update).dtype and any(
                _is_source(r, steps) for r in roots_of(index, stored_origin(root), steps)
            ):
                inside = NoMatch("STATE_ROUNDED", "a state is rounded on its way to its update", root)
                misses.append(inside.at(run[-1].update, steps=len(run)))
    return _not_after(early, chains), _told_once(misses), refused


def _not_after(early: set[fx.Node], chains: list[Chain]) -> list[Chain]:
    """Without the chains of a state of `early`: some tokens of such a recurrence, between which nobody looks at the
    state, are no recurrence of their own that a policy could round."""
    kept: list[Chain] = []
    for chain in chains:  # in order: a piece comes behind the one that it goes on from
        mine = {link.step.update for link in chain.links}
        if not early.isdisjoint(mine) or (chain.root is not None and stored_origin(chain.root) in early):
            early |= mine
        else:
            kept.append(chain)
    return kept


def _told_once(misses: list[NearMiss]) -> list[NearMiss]:
    """An op in the way of a state stands there once a token, before one update and behind another: one is enough."""
    told: dict[object, NearMiss] = {}
    for miss in misses:
        module = tuple(miss.node.meta.get("nn_module_stack") or ())
        op = miss.stopped_at.rpartition(" ")[2]
        told.setdefault((miss.reason.code, module, op) if miss.reason.code in _ONCE else miss.node, miss)
    return list(told.values())


def _followers_of(children: dict[fx.Node, list[Step]], step: Step) -> list[Step]:
    return children.get(step.update, [])


_ONCE = frozenset(["STATE_OP", "READ_BEFORE_WRITE"])
_UNSEEN = frozenset(["STATE_ROUNDED", "ARITHMETIC_DTYPE"])


def _match_all(index: Index) -> tuple[dict[fx.Node, Step], list[NearMiss], set[fx.Node]]:
    steps: dict[fx.Node, Step] = {}
    missed: dict[fx.Node, Any] = {}  # their followers fail with them
    known: Mapping[fx.Node, Any] = ChainMap(steps, missed)
    inside: set[fx.Node] = set()
    pending: list[tuple[list[fx.Node], fx.Node, NoMatch]] = []
    for ladder in candidates(index):
        if any(n in steps for n in ladder) or ladder[-1] in inside:
            continue
        first: tuple[fx.Node, NoMatch] | None = None
        for update in ladder:
            step, root, miss = _match_one(index, update, known)
            if step is not None:
                steps[update] = step
                inside |= step.path
                break
            if miss is not None and root is not None and first is None:
                first = (root, miss)
        else:
            if first is not None:
                if stored_origin(first[0]) not in missed:
                    pending.append((ladder, *first))
                if _is_source(first[0], known):
                    missed[ladder[0]] = first
    misses = []
    for ladder, root, miss in pending:
        if ladder[-1] not in inside and _worth_telling(index, ladder, root, steps, miss):
            misses.append(replace(miss.at(ladder[0]), token=_between(root, ladder[0])))
    refused = {n for n, (_, miss) in missed.items() if n not in inside and miss.code in _UNSEEN}
    return steps, misses, refused


def _between(root: fx.Node, update: fx.Node) -> frozenset[fx.Node]:
    """What is computed from the state on the way to its update, which stands behind it."""
    below = {root}
    node = root
    while node is not update:
        node = node.next
        if any(x in below for x in node.all_input_nodes):
            below.add(node)
    above, waiting = set(), [update]
    while waiting:
        node = waiting.pop()
        if node in below and node not in above:
            above.add(node)
            waiting += node.all_input_nodes
    return frozenset(above)


def _match_one(
    index: Index, update: fx.Node, steps: Mapping[fx.Node, Any]
) -> tuple[Step | None, fx.Node | None, NoMatch | None]:
    miss: NoMatch | None = None
    missed: fx.Node | None = None
    for root in roots_of(index, update, steps)[:4]:
        try:
            return match_step(index, update, root, states=steps), root, None
        except NoMatch as error:
            if miss is None:
                miss, missed = error, root
            origin = stored_origin(root)
            if error.code not in ("NOT_A_STATE", "AXES") and (
                origin in steps or origin.op in ("placeholder", "get_attr")
            ):
                break
    return None, missed, miss


_PART_WRITES = frozenset(["aten::select_scatter", "aten::slice_scatter"])


def _through_an_op(index: Index, root: fx.Node, update: fx.Node, steps: Mapping[fx.Node, Any]) -> list[NearMiss]:
    """A state that comes from an input through one op that is no view, told once, at the first token. Several writes to
    parts of it are one."""
    root = stored_origin(root)
    if name_of(root) == "getitem" and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    while name_of(root) in _PART_WRITES and isinstance(inside := root.args[0], fx.Node):
        if name_of(inside) not in _PART_WRITES:
            break
        root = inside
    for x in root.all_input_nodes if root.op == "call_function" else ():
        if not is_tensor(x) or not same_size(value(x).numel(), value(update).numel()):
            continue
        before = [stored_origin(x), *(stored_origin(r) for r in roots_of(index, x, steps))]
        if any(o not in steps and o is not root and _is_source(o, steps) for o in before):
            return [NoMatch("STATE_OP", f"the state goes through {name_of(root)}", root).at(update)]
    return []


_PICKS = frozenset(["aten::select", "aten::slice", "aten::index_select", "aten::index", "aten::detach", "getitem"])


def _is_source(root: fx.Node, steps: Mapping[fx.Node, Any]) -> bool:
    """Whether a state may begin here: an input, a constant, or an earlier state."""
    origin = stored_origin(root)
    while name_of(origin) in _PICKS or is_snapshot(origin):
        first = origin.args[0]
        if not isinstance(first, fx.Node):
            break
        origin = stored_origin(first)
    made = origin in steps or origin.op in ("placeholder", "get_attr") or is_zero(origin)
    return made or not origin.all_input_nodes


def _worth_telling(
    index: Index, ladder: list[fx.Node], root: fx.Node, steps: dict[fx.Node, Step], miss: NoMatch
) -> bool:
    """A near miss is a state in earnest: it comes from an input, a constant or a state, and goes on or out."""
    if miss.code in ("NOT_A_STATE", "AXES", "TOO_MANY_TERMS") or not _is_source(root, steps):
        return False
    fate = fate_of(index, ladder[0], ())
    return fate.escapes or fate.blocked is not None


def _reads(
    index: Index, steps: dict[fx.Node, Step], children: dict[fx.Node, list[Step]]
) -> dict[fx.Node, tuple[list[Read], bool]]:
    """Reads of every state; an additive step is matched again where they say that another axis is K."""
    found: dict[fx.Node, tuple[list[Read], bool]] = {}
    for update, step in steps.items():
        exclude = {n for child in _followers_of(children, step) for n in child.path}
        reads, others = find_reads(index, update, exclude)
        if step.rule == "additive" and reads:
            (axis,) = reads[0].key_axes
            if set(flat(step.axes[axis])) != set(flat(step.key)):
                try:
                    again = match_step(index, update, step.root, axis, steps)
                    step.__dict__.update(again.__dict__)
                except NoMatch as error:
                    step.failure = error
        mine = _along_key(step, reads)
        others = others or len(mine) != len(reads)
        if not mine and leaks(step) and (late := find_late_read(index, step)) is not None:
            mine, step.late = [late], path_between(index, step.root, late.node)
        found[update] = (mine, others)
    return found


def _along_key(step: Step, reads: list[Read]) -> list[Read]:
    """The reads of a step's state along its keys, their axes called as the step calls them."""
    mine = [r for r in reads if set(flat(step.axes[r.key_axes[0]])) == set(flat(step.key))]
    for read in mine:
        for a, b in zip(read.index, step.axes, strict=True):
            unify(a, b)
    return mine


def _cut(
    index: Index,
    run: list[Step],
    reads: dict[fx.Node, tuple[list[Read], bool]],
    children: dict[fx.Node, list[Step]],
    source: bool,
    in_loop: bool,
) -> list[Chain]:
    """The pieces of a run of steps that can each become one op."""
    for step in run:
        if step.failure is not None:
            raise step.failure
    first, last = run[0], run[-1]
    fate = fate_of(index, last.update, ())
    more = len(_followers_of(children, last)) > 1
    if is_zero(stored_origin(first.root)):
        first.decay_terms = [Product()]  # there is nothing to decay
    head = _from_nothing(index, first)
    if len(run) == 1 and not source and head is None:
        raise NoMatch("NOT_A_STATE", "the updated tensor is computed in the graph", first.root)
    if len(run) == 1 and head is None and not fate.escapes and not more:
        if fate.blocked is not None:
            raise NoMatch("STATE_OP", f"the new state goes on through {name_of(fate.blocked)}", fate.blocked)
        if first.rule == "additive" and first.decay == "none":
            raise NoMatch("NOT_A_STATE", "an outer product is added to a tensor once", last.update)
        raise NoMatch("NOT_CARRIED", "the updated tensor is neither kept nor updated again", last.update)
    refuse_late_reads(index, run, reads)
    if not in_loop:
        refuse_unread(index, run, reads)
    if head is not None:
        found, others = find_reads(index, head.update, first.path)
        mine = _along_key(head, found)
        reads[head.update] = (mine, others or len(mine) != len(found))
        run = [head, *run]
        if len(run) == 2 and first.rule == "additive" and first.decay == "none" and not mine:
            raise NoMatch("NOT_A_STATE", "a sum of two outer products", first.root)
    pieces: list[list[Link]] = [[]]
    dtype = rounding_of(index, run)
    for i, step in enumerate(run):
        mine, others = reads[step.update]
        foreign = others and not (dtype is not None and _only_stored(index, step, dtype, children, mine))
        read_before = reads[run[i - 1].update][0] if i else []
        if pieces[-1] and (leaks(step, read_before) or not _alike(index, pieces[-1][-1].step, step)):
            pieces.append([])
        pieces[-1].append(Link(step, mine[0] if mine else None))
        if (foreign or len(mine) > 1) and i + 1 < len(run):
            pieces.append([])
    chains = []
    for piece in filter(None, pieces):
        root: fx.Node | None = piece[0].step.root
        if root is piece[0].step.update or (root is not None and is_zero(stored_origin(root))):
            root = None
        chains.append(Chain(piece, root, dtype))
    return chains


def _alike(index: Index, a: Step, b: Step) -> bool:
    """Whether two steps are of one kind and their states are cut into the same axes."""
    # From a state of zeros, both rules write the same.
    if a.rule != b.rule and not (a.rule == "additive" and (a.root is a.update or is_zero(stored_origin(a.root)))):
        return False
    try:
        chain = Expander(index, a.update, _views_between(a.update, b.root), VIEWS, stored=True).expand(b.root)
        (term,) = chain.terms
        (factor,) = term.factors
        for mine, theirs in zip(chain.axes, b.root_index, strict=True):
            unify(mine, theirs)
        for inner, theirs in zip(factor.index, a.axes, strict=True):
            unify(inner, theirs)  # type: ignore[arg-type]
    except (NoMatch, ValueError):
        return False
    same = [set(flat(x)) == set(flat(y)) for x, y in ((a.key, b.key), (a.column, b.column), (a.batch, b.batch))]
    return all(same)


def _views_between(state: fx.Node, root: fx.Node) -> set[fx.Node]:
    path = set()
    while root is not state:
        path.add(root)
        if not root.args or not isinstance(root.args[0], fx.Node):
            break
        root = root.args[0]
    return path


def _only_stored(
    index: Index, step: Step, dtype: torch.dtype, children: dict[fx.Node, list[Step]], reads: list[Read]
) -> bool:
    """Whether a rounded state is used in its rounded form only, the reads and the next step aside."""
    exclude = {n for child in _followers_of(children, step) for n in child.path} | {r.node for r in reads}
    exclude |= set(stored_casts(step.update, dtype))
    return not find_reads(index, step.update, exclude)[1]


def _from_nothing(index: Index, first: Step) -> Step | None:
    """A chain whose first state is itself a written token: the token before it, from a state of zeros."""
    origin = stored_origin(first.root)
    if origin.op != "call_function" or is_zero(origin):
        return None
    if lowest_dtype(first.root) not in (value(origin).dtype, *LOW):
        return None
    matrices = {origin}
    for _ in range(8):
        try:
            expr = simplify(Expander(index, None, (), PRODUCTS, matrices).expand(origin))
            path = _views_between(origin, first.root)
            between = Expander(index, origin, path, VIEWS, stored=True).expand(first.root)
            (term,) = between.terms
            for mine, theirs in zip(between.axes, first.root_index, strict=True):
                unify(mine, theirs)
            for inner, theirs in zip(term.factors[0].index, expr.axes, strict=True):
                unify(inner, theirs)  # type: ignore[arg-type]
            keys, columns = set(flat(first.key)), set(flat(first.column))
            if len(expr.terms) != 1:
                return None
            (write,) = expr.terms
            parts = split_product(write.factors, keys, columns)
        except NeedsMatrix as needed:
            if needed.node in matrices:
                return None
            matrices.add(needed.node)
            continue
        except (NoMatch, ValueError):
            return None
        free = set(expr.free())
        if not parts.key or not parts.column or write.labels() - free:
            return None
        return Step(
            update=origin,
            root=origin,
            path=path_between(index, origin, origin),
            rule="additive",
            axes=expr.axes,
            root_index=tuple(expr.axes),
            batch=first.batch,
            key=first.key,
            column=first.column,
            decay_terms=[Product()],
            k=[Product(1.0, tuple(parts.key))],
            v=[Product(write.coefficient, tuple(parts.column))],
            beta=[Product(1.0, tuple(parts.scalar))] if parts.scalar else None,
        )
    return None
