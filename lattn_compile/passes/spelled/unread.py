"""States that are read otherwise than after their token's write, by one query a state, or not at all."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from lattn_compile.passes.spelled.aten import Index, name_of
from lattn_compile.passes.spelled.expand import VIEWS, Expander
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.reads import Read, find_reads, same_elements
from lattn_compile.passes.spelled.terms import simplify
from lattn_compile.passes.spelled.token import Step
from lattn_compile.passes.spelled.views import is_view, only_shape

__all__ = ["leaks", "refuse_late_reads", "refuse_unread"]

_CONTRACTIONS = frozenset(["aten::einsum", "aten::matmul", "aten::bmm"])
_PARTS = frozenset(["aten::select", "aten::slice", "aten::unbind", "aten::split", "aten::chunk", "aten::index_select"])


def refuse_unread(index: Index, run: list[Step], reads: dict[fx.Node, tuple[list[Read], bool]]) -> None:
    """A state that nothing reads is not ours. Of one step with a fixed decay that is nothing to tell: a moving average
    of outer products, as optimizers have them."""
    if any(reads[step.update][0] for step in run):
        return
    cut = next((u for step in run for u in step.update.users if name_of(u) in _PARTS and not is_view(u)), None)
    if cut is not None:
        where = f"its parts are read one by one ({name_of(cut)}): one product has to read it for all heads"
        raise NoMatch("NOT_READ", where, run[-1].update)
    if any(_read_with_a_bonus(step) for step in run):
        raise NoMatch(
            "READ_BEFORE_WRITE", "the state is read before the write, with a bonus for the token", run[-1].update
        )
    product = next((u for step in run for u in step.update.users if name_of(u) in _CONTRACTIONS), None)
    if product is not None and any(_read_by_groups(index, step.update, product) for step in run):
        raise NoMatch("GROUPED_QUERIES", f"{product.name} reads each state with several queries", run[-1].update)
    if product is not None:
        raise NoMatch("NOT_READ", f"{product.name} is no product of a state with one query", run[-1].update)
    joined = next((u for step in run for u in step.update.users if name_of(u) in _JOINS and _read(u)), None)
    if joined is not None:
        where = f"it is joined with others ({name_of(joined)}) before a product reads them: read each on its own"
        raise NoMatch("NOT_READ", where, run[-1].update)
    told = len(run) > 1 or any(p.factors for p in run[0].decay_terms)
    raise NoMatch("NOT_READ" if told else "NOT_A_STATE", "nothing reads the state", run[-1].update)


_JOINS = frozenset(["aten::cat", "aten::stack"])


def _read(node: fx.Node) -> bool:
    """Whether a product takes a value, views of it included."""
    return any(name_of(u) in _CONTRACTIONS | {"aten::mul"} or (is_view(u) and _read(u)) for u in node.users)


def _read_by_groups(index: Index, state: fx.Node, product: fx.Node) -> bool:
    """Whether a product sums over a state's keys with queries that have an axis more than the state has heads."""
    try:
        expr = simplify(Expander(index, state, {product}, VIEWS).expand(product))
    except NoMatch:
        return False
    if len(expr.terms) != 1:
        return False
    of_state = {label for f in expr.terms[0].factors if f.node is state for label in f.labels()}
    free = set(expr.free())
    return bool(of_state) and bool(of_state - free) and bool(free - of_state)


def _read_with_a_bonus(step: Step) -> bool:
    """Whether a sum of the previous state and something else than its update is read."""
    sums = (u for u in step.root.users if u is not step.update and name_of(u) in ("aten::add", "aten::addcmul"))
    return any(same_elements(u, step.update) and any(name_of(r) in _CONTRACTIONS for r in u.users) for u in sums)


def refuse_late_reads(index: Index, run: list[Step], reads: dict[fx.Node, tuple[list[Read], bool]]) -> None:
    """Reads that precede a token's write: the first state is read, or on its way to the update, and the last is not."""
    if not reads[run[-1].update][0] and (_root_reads(index, run[0]) or leaks(run[0])):
        if run[0].masks() and not _root_reads(index, run[0]):
            where = "it is read before a mask picks between it and the old state: mask that output, too, at every token"
            raise NoMatch("READ_BEFORE_WRITE", where, run[0].update)
        raise NoMatch("READ_BEFORE_WRITE", "a token's output is read before the token is written", run[0].update)


def leaks(step: Step, before: Collection[Read] = ()) -> bool:
    """Whether something on the way from the previous state to the update is used elsewhere than there and in reads.

    Args:
        before: reads of the previous state, which may share views with the step.
    """
    own = step.path | step.late
    path = own | {n for r in before for n in r.path}
    ends = {step.update, *_ends(step), *(r.node for r in before)}
    users = (user for node in own - ends for user in node.users)
    return any(user not in path and not only_shape(user) for user in users)


def _ends(step: Step) -> set[fx.Node]:
    """The read among the nodes that lead to it: the one that nothing else of them uses."""
    return {n for n in step.late if not any(u in step.late for u in n.users)}


def _root_reads(index: Index, step: Step) -> list[Read]:
    return find_reads(index, step.root, step.path)[0]
