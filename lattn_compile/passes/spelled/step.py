"""One token's update of a recurrent state, recognised by what it computes.

    S' = D ∘ S + w ⊗ u − e ⊗ (rᵀ (D ∘ S))

A candidate is an addition that an outer product flows into. It is expanded multilinearly in the previous state; the
terms are then *proved* to be a decay, a rank-one write, and an erase that reads along the key it writes along.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from lattn_compile.passes.spelled.aten import Index, is_tensor
from lattn_compile.passes.spelled.expand import PRODUCTS, SELECTS, VIEWS, Expander, expandable
from lattn_compile.passes.spelled.labels import Label, flat, unify
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.rules import prove_delta, refuse_hidden_beta, split_additive, sum_inside
from lattn_compile.passes.spelled.spine import full_size, path_between
from lattn_compile.passes.spelled.terms import Expr, Factor, Term, is_mask, simplify
from lattn_compile.passes.spelled.token import NeedsMatrix, Product, Step
from lattn_compile.passes.spelled.views import is_view

__all__ = ["match_step"]

# Looking deeper into what does not depend on the state changes nothing about these.
_FINAL = frozenset(["STATE_OP", "STATE_ROUNDED", "ARITHMETIC_DTYPE"])


def match_step(
    index: Index,
    update: fx.Node,
    root: fx.Node,
    key_axis: int | None = None,
    states: Collection[fx.Node] = (),
    within: bool = False,
) -> Step:
    """Prove that `update` is one step from `root`. Raises NoMatch saying how far it came.

    Args:
        key_axis: the axis of `update` that is read along, which an additive rule does not say itself.
        states: known states. within: whether `root` is the decayed state.
    """
    path = path_between(index, root, update, states)
    if update not in path:
        raise NoMatch("NOT_A_STATE", "the update does not depend on it", root)
    try:
        return _match_along(index, update, root, path, key_axis, states, within)
    except NoMatch as error:
        if error.code not in _OF_ANOTHER_KEY or not (without := _without_reads(index, root, update, path, states)):
            raise
        try:
            step = _match_along(index, update, root, without, key_axis, states, within)
        except NoMatch:
            raise error from None
        if _reads_along_key(index, step, path - without):
            raise
        return step


# What an output that a token's value is made of looks like: an erase along the query of that output.
_OF_ANOTHER_KEY = frozenset(["KEYS_DIFFER", "DECAY_ORDER", "NOT_RANK_ONE", "BETA_ONE_SIDE", "STATE_NONLINEAR"])


def _reads_along_key(index: Index, step: Step, beside: set[fx.Node]) -> bool:
    """Whether what lies beside a step's path reads the state along what is made of its own key, or after its decay:
    that is no output of an earlier token, but an erase in the wrong order or along the wrong key."""
    keys = {f.node for p in step.k for f in p.factors}
    first = min((index.order[k] for k in keys), default=0)
    waiting: list[fx.Node] = []
    for read in (n.all_input_nodes for n in beside if any(full_size(x, step.update) for x in n.all_input_nodes)):
        if any(x in step.path and not is_view(x) for x in read):
            return True
        waiting += (x for x in read if not full_size(x, step.update))
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in keys:
            return True
        if node not in seen and index.order[node] > first:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _match_along(
    index: Index,
    update: fx.Node,
    root: fx.Node,
    path: set[fx.Node],
    key_axis: int | None,
    states: Collection[fx.Node],
    within: bool,
) -> Step:
    best: NoMatch | None = None
    for depth in (VIEWS, PRODUCTS, SELECTS):
        matrices: set[fx.Node] = set()
        for _ in range(12):
            try:
                expr = simplify(Expander(index, root, path, depth, matrices).expand(update))
                return _classify(expr, index, update, root, path, depth, key_axis, matrices)
            except NeedsMatrix as needed:
                if needed.node in matrices or needed.node in path or not expandable(needed.node):
                    best = best or NoMatch("NOT_RANK_ONE", f"{needed.node} is no outer product", update)
                    break
                matrices.add(needed.node)
            except NoMatch as error:
                best = error if best is None else best
                if error.code == "STATE_OP" and (without := _without_reads(index, root, update, path, states)):
                    path, best = without, None
                    continue
                if error.code in _FINAL:
                    raise
                break
        else:
            best = best or NoMatch("TOO_MANY_TERMS", "the update is a sum of too many products", update)
    assert best is not None
    if best.code == "DECAY_FORM" and not within:
        return _match_beyond_decay(index, update, root, path, states, best)
    raise best


def _without_reads(
    index: Index, root: fx.Node, update: fx.Node, path: set[fx.Node], states: Collection[fx.Node]
) -> set[fx.Node] | None:
    """The path without what depends on the state through an output only: a key that is made of the last output is a
    key like any other."""
    outputs = {
        n
        for n in path
        if n is not update and is_tensor(n) and not full_size(n, update) and any(u not in path for u in n.users)
    }
    shorter = path_between(index, root, update, {*states, *outputs}) if outputs else path
    return shorter if update in shorter and len(shorter) < len(path) else None


def _match_beyond_decay(
    index: Index, update: fx.Node, root: fx.Node, path: set[fx.Node], states: Collection[fx.Node], failure: NoMatch
) -> Step:
    """A delta rule whose decay is a sum of terms: the decayed state is found first, and the step matched from there."""
    order = sorted((n for n in path if n is not update), key=index.order.__getitem__)
    for middle in [n for n in order if is_tensor(n) and full_size(n, update)][:8]:
        before = path_between(index, root, middle)
        if any(u in path and u not in before for n in (root, *before) if n is not middle for u in n.users):
            continue  # something else than the decayed state is used
        try:
            step = match_step(index, update, middle, states=states, within=True)
            decayed = simplify(Expander(index, root, before, PRODUCTS).expand(middle))
        except NoMatch:
            continue
        if step.rule != "delta" or step.decay != "none" or any(len(_roots(t, root)) != 1 for t in decayed.terms):
            continue
        order_of = _roots(decayed.terms[0], root)[0]
        try:
            for mine, theirs in zip(decayed.axes, step.root_index, strict=True):
                unify(mine, theirs)
        except NoMatch:
            continue
        labels = order_of.labels()
        if any(_roots(t, root)[0].labels() != labels for t in decayed.terms) or set(labels) != set(decayed.free()):
            continue
        step.root, step.path = root, path
        step.root_index = tuple(a for a in order_of.index if not isinstance(a, int))
        step.decay_terms = [Product(t.coefficient, _without(t, root)) for t in decayed.terms]
        columns = {x for axis in step.axes for x in flat(axis)} & set(flat(step.column))
        if any(columns & set(f.labels()) for p in step.decay_terms for f in p.factors):
            raise NoMatch("DECAY_AXIS", "the decay depends on the value axis of the state", update)
        return step
    raise failure


def _roots(term: Term, root: fx.Node) -> list[Factor]:
    return [f for f in term.factors if f.node is root]


def _classify(
    expr: Expr,
    index: Index,
    update: fx.Node,
    root: fx.Node,
    path: set[fx.Node],
    depth: int,
    key_axis: int | None,
    looked_into: Collection[fx.Node] = (),
) -> Step:
    free = expr.free()
    of_state: list[Term] = []
    writes: list[Term] = []
    for term in expr.terms:
        roots = _roots(term, root)
        if len(roots) > 1:
            raise NoMatch("STATE_NONLINEAR", "the update is of second order in the state", update)
        (of_state if roots else writes).append(term)
    if not of_state:
        raise NoMatch("NOT_A_STATE", "the previous state cancels out", update)
    decays: list[Term] = []
    erases: list[Term] = []
    for term in of_state:
        labels = _root_factor(term, root).labels()
        (decays if set(labels) == set(free) and len(labels) == len(free) else erases).append(term)
    for term in erases:
        _look_into_matrices(term, root, set(free))
    if not decays:
        raise NoMatch("STATE_MIXED", "no term carries the state over as it is", update)
    order = _root_factor(decays[0], root).labels()
    if any(_root_factor(t, root).labels() != order for t in decays):
        raise NoMatch("STATE_MIXED", "the state is carried over transposed", update)
    if not writes:
        raise NoMatch("NO_WRITE", "nothing is written to the state", update)

    for term in writes:
        summed = term.labels() - set(free)
        if sum(bool(summed & set(f.labels()) and set(f.labels()) & set(free)) for f in term.factors) > 1:
            raise NoMatch("NOT_RANK_ONE", "what is written is a sum of outer products", update)
    decay_terms = [Product(t.coefficient, _without(t, root)) for t in decays]
    if len(decay_terms) > 1 and not any(is_mask(f) for p in decay_terms for f in p.factors):
        for p in decay_terms:
            for f in p.factors:
                if (inner := sum_inside(f.node)) is not None and inner not in looked_into:
                    raise NeedsMatrix(inner)
    keys, renames = _key_labels(expr, erases, order, root, update, key_axis, decays)
    failure: Exception | None = None
    for key in keys:
        step = Step(
            update=update,
            root=root,
            path=path,
            rule="delta" if erases else "additive",
            axes=expr.axes,
            root_index=tuple(a for a in _root_factor(decays[0], root).index if not isinstance(a, int)),
            batch=[],
            key=key,
            column=[],
            decay_terms=decay_terms,
            k=[],
            v=[],
            beta=None,
            depth=depth,
        )
        try:
            _prove(step, free, writes, order, erases, renames, root, index)
        except (NoMatch, NeedsMatrix) as error:
            failure = failure or error
        else:
            return step
    assert failure is not None
    raise failure


def _prove(
    step: Step,
    free: list[Label],
    writes: list[Term],
    order: list[Label],
    erases: list[Term],
    renames: list[dict[Label, Label]],
    root: fx.Node,
    index: Index,
) -> None:
    """The rule of a step whose key axis is known or supposed."""
    step.column = _column(step, free, writes, order)
    step.batch = [x for x in free if x not in step.key and x not in step.column]
    columns = set(step.column)
    for p in step.decay_terms:
        if any(columns & set(f.labels()) for f in p.factors):
            raise NoMatch("DECAY_AXIS", "the decay depends on the value axis of the state", step.update)
    if erases:
        prove_delta(step, erases, writes, renames, root)
        if step.beta is None:
            refuse_hidden_beta(step, index)
    else:
        split_additive(step, writes)


def _root_factor(term: Term, root: fx.Node) -> Factor:
    return _roots(term, root)[0]


def _without(term: Term, root: fx.Node) -> tuple[Factor, ...]:
    return tuple(f for f in term.factors if f.node is not root)


def _look_into_matrices(term: Term, root: fx.Node, free: set[Label]) -> None:
    """A factor with a summed and an unsummed axis of the state is a transition matrix."""
    state = set(_root_factor(term, root).labels())
    for f in _without(term, root):
        labels = set(f.labels())
        if labels & (state - free) and labels & (free - state):
            raise NeedsMatrix(f.node)


def _key_labels(
    expr: Expr,
    erases: list[Term],
    order: list[Label],
    root: fx.Node,
    update: fx.Node,
    key_axis: int | None,
    decays: list[Term],
) -> tuple[list[list[Label]], list[dict[Label, Label]]]:
    """Labels that may be those of K, likeliest first, and for each erase what its summed labels are called outside."""
    free = set(expr.free())
    renames: list[dict[Label, Label]] = []
    for term in erases:
        labels = _root_factor(term, root).labels()
        if len(labels) != len(order):
            raise NoMatch("STATE_MIXED", "the erase reads other axes than the state has", update)
        summed = {a: b for a, b in zip(labels, order, strict=True) if a is not b}
        if not summed or any(a in free for a in summed):
            raise NoMatch("STATE_MIXED", "the state is mixed along an axis that no key runs along", update)
        renames.append(summed)
    if renames:
        outer = set(renames[0].values())
        if any(set(r.values()) != outer for r in renames):
            raise NoMatch("STATE_MIXED", "two erases read along different axes", update)
        return [[x for x in expr.free() if x in outer]], renames
    if key_axis is not None:
        return [flat(expr.axes[key_axis])], []
    # Nothing reads the state: a decay per channel tells K, else the order of the axes does.
    decayed = {x for t in decays for f in t.factors if f.node is not root for x in f.labels()}
    wide = [axis for axis in expr.axes if flat(axis)]
    if len(wide) < 2:
        raise NoMatch("NOT_A_STATE", "the state has no two axes", update)
    likely = wide[-1] if decayed & set(flat(wide[-1])) else wide[-2]
    return [flat(likely), *(flat(axis) for axis in reversed(wide) if axis is not likely)], []


def _column(step: Step, free: list[Label], writes: list[Term], order: list[Label]) -> list[Label]:
    """Labels of V: of what is written and of nothing that reads, erases or decays, the last axis of the state."""
    keys = set(step.key)
    # A factor that runs along K carries heads too; what none of those carries can be V.
    along_key = {x for t in writes for f in t.factors if keys & set(f.labels()) for x in f.labels()}
    scale = {x for p in step.decay_terms for f in p.factors for x in f.labels()}
    rest = [x for x in free if x not in keys and x not in along_key and x not in scale]
    written = {x for t in writes for x in t.labels()}
    for axis in reversed(step.axes):
        labels = [x for x in flat(axis) if x in rest and x in written]
        if labels:
            if len(labels) != len(flat(axis)):
                labels = labels[-1:]
            return labels
    for axis in reversed(step.axes):  # the decay is on it: say so later
        labels = [x for x in flat(axis) if x not in keys]
        if labels and not set(labels) & along_key:
            return labels
    for t in writes:
        for f in t.factors:
            if keys & set(f.labels()) and set(f.labels()) - keys:
                raise NeedsMatrix(f.node)
    raise NoMatch("NOT_RANK_ONE", "what is written is no outer product of a key and a value", step.update)
