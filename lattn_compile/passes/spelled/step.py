"""One token's update of a recurrent state, recognised by what it computes.

    S' = D ∘ S + w ⊗ u − e ⊗ (rᵀ (D ∘ S))

A candidate is an addition that an outer product flows into. It is expanded multilinearly in the previous state; the
terms are then *proved* to be a decay, a rank-one write, and an erase that reads along the key it writes along.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, is_tensor, name_of
from lattn_compile.passes.spelled.expand import PRODUCTS, SELECTS, VIEWS, Expander, expandable
from lattn_compile.passes.spelled.labels import Axis, Label, flat, unify
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.spine import full_size, is_view, path_between
from lattn_compile.passes.spelled.terms import Expr, Factor, Term, frozenset_of, simplify
from lattn_compile.passes.spelled.writer import value

__all__ = ["NeedsMatrix", "Product", "Step", "match_step", "split_product"]


@dataclass(frozen=True)
class Product:
    """coefficient · Π factors."""

    coefficient: float = 1.0
    factors: tuple[Factor, ...] = ()


@dataclass
class Step:
    """One matched update.

    Attributes:
        update: the new state; root: the previous one.
        path: nodes from root to update, both excluded from use by others if the update is to go away.
        batch, key, column: labels of the state: sequences and heads, K, V.
        axes: of the update; root_index: labels of the root's axes.
        decay_terms: D as a sum of products; one product of coefficient 1 without factors is no decay.
        k: a product; v, beta: sums of products. beta None is 1.
        late: nodes of a read that is spelled with the previous state.
        failure: why the step cannot be used after all.
    """

    update: fx.Node
    root: fx.Node
    path: set[fx.Node]
    rule: str
    axes: list[Axis]
    root_index: tuple[Axis, ...]
    batch: list[Label]
    key: list[Label]
    column: list[Label]
    decay_terms: list[Product]
    k: Product
    v: list[Product]
    beta: list[Product] | None
    depth: int = 0
    failure: NoMatch | None = None
    late: set[fx.Node] = field(default_factory=set)

    @property
    def decay(self) -> str:
        labels = {label for p in self.decay_terms for f in p.factors for label in f.labels()}
        if labels & set(self.keys()):
            return "channel"
        plain = len(self.decay_terms) == 1 and not self.decay_terms[0].factors
        return "none" if plain and self.decay_terms[0].coefficient == 1.0 else "head"

    def keys(self) -> list[Label]:
        return flat(self.key)


# Matching.


class NeedsMatrix(Exception):
    """A factor holds two axes that have to be told apart: look into it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node


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
    key, renames = _key_labels(expr, erases, order, root, update, key_axis, decays)
    decay_terms = [Product(t.coefficient, _without(t, root)) for t in decays]
    if len(decay_terms) > 1:
        for p in decay_terms:
            for f in p.factors:
                if (inner := _sum_inside(f.node)) is not None and inner not in looked_into:
                    raise NeedsMatrix(inner)
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
        k=Product(),
        v=[],
        beta=None,
        depth=depth,
    )
    step.column = _column(step, free, writes, order)
    step.batch = [x for x in free if x not in step.key and x not in step.column]
    columns = set(step.column)
    for p in decay_terms:
        if any(columns & set(f.labels()) for f in p.factors):
            raise NoMatch("DECAY_AXIS", "the decay depends on the value axis of the state", update)
    if erases:
        _prove_delta(step, erases, writes, renames, root)
        if step.beta is None:
            _refuse_hidden_beta(step, index)
    else:
        _split_additive(step, writes)
    return step


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
) -> tuple[list[Label], list[dict[Label, Label]]]:
    """Labels of K, and for each erase what its summed labels are called outside."""
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
        return [x for x in expr.free() if x in outer], renames
    if key_axis is not None:
        return flat(expr.axes[key_axis]), []
    # Nothing reads the state: a decay per channel tells K, else the order of the axes does.
    decayed = {x for t in decays for f in t.factors if f.node is not root for x in f.labels()}
    wide = [axis for axis in expr.axes if flat(axis)]
    if len(wide) < 2:
        raise NoMatch("NOT_A_STATE", "the state has no two axes", update)
    return (flat(wide[-1]) if decayed & set(flat(wide[-1])) else flat(wide[-2])), []


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


@dataclass
class _Split:
    """Factors of one product by the axes they run along."""

    key: list[Factor]
    column: list[Factor]
    scalar: list[Factor]


def split_product(factors: Iterable[Factor], keys: set[Label], columns: set[Label]) -> _Split:
    out = _Split([], [], [])
    for f in factors:
        labels = set(f.labels())
        if labels & keys and labels & columns:
            raise NeedsMatrix(f.node)
        (out.key if labels & keys else out.column if labels & columns else out.scalar).append(f)
    return out


def _keys_of(factors: Iterable[Factor], rename: dict[Label, Label] | None = None) -> frozenset[tuple[object, int]]:
    return frozenset_of(f.key(rename) for f in factors)  # type: ignore[arg-type]


def _take(from_: list[Factor], what: Iterable[Factor]) -> list[Factor] | None:
    """`from_` without `what`, as multisets; None if something is missing."""
    rest = list(from_)
    for f in what:
        hit = next((g for g in rest if g.key() == f.key()), None)
        if hit is None:
            return None
        rest.remove(hit)
    return rest


def _prove_delta(
    step: Step, erases: list[Term], writes: list[Term], renames: list[dict[Label, Label]], root: fx.Node
) -> None:
    if len(step.decay_terms) > 1:
        raise NoMatch("DECAY_FORM", "the decay of a delta rule is a sum of terms", step.update)
    if len(erases) > 1:
        for term in erases:
            for f in _without(term, root):
                if (inner := _sum_inside(f.node)) is not None:
                    raise NeedsMatrix(inner)
        raise NoMatch("NOT_RANK_ONE", "more than one erase", step.update)
    (decay,), (erase,), (rename,) = step.decay_terms, erases, renames
    keys, columns = set(step.key), set(step.column)
    # An erase reads the decayed state: its factors hold the decay, along the summed axis.
    names_inside = {outer: summed for summed, outer in rename.items()}
    factors = _take(list(_without(erase, root)), [f.renamed(names_inside) for f in decay.factors])
    if factors is None:
        raise NoMatch("DECAY_ORDER", "the erase does not read the decayed state", step.update)
    read = [f for f in factors if set(f.labels()) & set(rename)]
    outside = [f for f in factors if f not in read]
    for f in read:
        if set(f.labels()) & (keys | columns):
            raise NeedsMatrix(f.node)
    parts = split_product(outside, keys, columns)
    if parts.column:
        raise NoMatch("STATE_MIXED", "the erase depends on the value axis", step.update)
    if _keys_of(read, rename) != _keys_of(parts.key):
        raise NoMatch("KEYS_DIFFER", "the state is erased along another key than it is read along", step.update)
    if decay.coefficient == 0.0:
        raise NoMatch("DECAY_RANGE", "the decay is zero", step.update)
    strength = -erase.coefficient / decay.coefficient
    if strength <= 0.0:
        raise NoMatch("ERASE_SIGN", "the erase adds what it should take away", step.update)
    values: list[Product] = []
    key, beta = None, None
    for term in writes:
        w = split_product(term.factors, keys, columns)
        if _keys_of(w.key) != _keys_of(parts.key):
            raise NoMatch("KEYS_DIFFER", "the state is written along another key than it is erased along", step.update)
        norms, rest = _shared_scalars(parts.scalar, w.scalar, step)
        found = (tuple(parts.key + norms), tuple(rest))
        if (key, beta) == (None, None):
            key, beta = found
        elif (_keys_of(key or ()), _keys_of(beta or ())) != (_keys_of(found[0]), _keys_of(found[1])):
            raise NoMatch("NOT_RANK_ONE", "two writes along different keys", step.update)
        if not w.column:
            raise NoMatch("NOT_RANK_ONE", "a write without a value", step.update)
        if abs(term.coefficient / strength - 1.0) > 1e-12 and len(writes) == 1:
            raise NoMatch("BETA_ONE_SIDE", "write and erase have different strengths", step.update)
        values.append(Product(term.coefficient / strength, tuple(w.column)))
    step.k, step.v = Product(1.0, key or ()), values
    step.beta = None if not beta and strength == 1.0 else [Product(strength, beta or ())]


def _sum_inside(node: fx.Node) -> fx.Node | None:
    """The sum that a node is a view of, if it is one of one number and one tensor: 1 - beta."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if name_of(node) not in ("aten::rsub", "aten::sub", "aten::add"):
        return None
    return node if len(node.all_input_nodes) == 1 else None


def _shared_scalars(erase: list[Factor], write: list[Factor], step: Step) -> tuple[list[Factor], list[Factor]]:
    """(norms, beta): the erase carries norms² · beta, the write norms · beta; nothing else is allowed."""
    doubled: list[Factor] = []
    rest = list(erase)
    for f in erase:
        once = _take(rest, [f])
        twice = None if once is None else _take(once, [f])
        if twice is not None:
            doubled.append(f)
            rest = twice
    for n in range(len(doubled), -1, -1):
        norms = doubled[:n]
        beta = _take(erase, norms + norms)
        if beta is not None and _take(write, norms + beta) == []:
            return norms, beta
    raise NoMatch("BETA_ONE_SIDE", "a factor stands on the write or on the erase only", step.update)


def _refuse_hidden_beta(step: Step, index: Index) -> None:
    """Without a beta, a value that is itself scaled per head is a beta on the write alone. A mask is none."""
    columns = set(step.column)
    for p in step.v:
        for f in p.factors:
            inside = Expander(index, None, (), SELECTS).expand(f.node)
            along = {
                label
                for axis, labels in zip(f.index, inside.axes, strict=True)
                if not isinstance(axis, int) and set(flat(axis)) & columns
                for label in flat(labels)
            }
            for term in inside.terms if along else ():
                if any(not along & set(g.labels()) and not _is_mask(g.node) for g in term.factors):
                    raise NoMatch("BETA_ONE_SIDE", "a factor stands on the write only", f.node)


def _is_mask(node: fx.Node) -> bool:
    """Whether a tensor is a cast of integers or booleans."""
    while is_view(node) or name_of(node) in CASTS or name_of(node) in ("aten::select", "aten::slice"):
        if not is_tensor(node.args[0]):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return not value(node).dtype.is_floating_point


def _split_additive(step: Step, writes: list[Term]) -> None:
    """k, v and beta of writes without an erase. Values may be summed, or strengths, along one key."""
    keys, columns = set(step.key), set(step.column)
    splits = [(t, split_product(t.factors, keys, columns)) for t in writes]
    first = splits[0][1]
    for _, s in splits:
        if not s.key or not s.column:
            raise NoMatch("NOT_RANK_ONE", "what is written is no outer product of a key and a value", step.update)
        if _keys_of(s.key) != _keys_of(first.key):
            raise NoMatch("NOT_RANK_ONE", "two writes along different keys", step.update)
    step.k = Product(1.0, tuple(first.key))
    if all(_keys_of(s.scalar) == _keys_of(first.scalar) for _, s in splits):
        step.beta = [Product(1.0, tuple(first.scalar))] if first.scalar else None
        step.v = [Product(t.coefficient, tuple(s.column)) for t, s in splits]
    elif all(_keys_of(s.column) == _keys_of(first.column) for _, s in splits):
        step.beta = [Product(t.coefficient, tuple(s.scalar)) for t, s in splits]
        step.v = [Product(1.0, tuple(first.column))]
    else:
        raise NoMatch("NOT_RANK_ONE", "two writes of different values and strengths", step.update)
