"""Proofs of the two rules: that a write and an erase share their key and their strength, or that there is no erase."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, is_tensor, name_of
from lattn_compile.passes.spelled.expand import SELECTS, Expander
from lattn_compile.passes.spelled.labels import Label, flat
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import Expr, Factor, Term, frozenset_of, is_mask, simplify
from lattn_compile.passes.spelled.token import NeedsMatrix, Product, Step, split_product
from lattn_compile.passes.spelled.views import is_view
from lattn_compile.passes.spelled.writer import value

__all__ = ["prove_delta", "refuse_hidden_beta", "split_additive", "sum_inside"]


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


def prove_delta(
    step: Step, erases: list[Term], writes: list[Term], renames: list[dict[Label, Label]], root: fx.Node
) -> None:
    """k, v and beta of writes with an erase: erase = beta k (kᵀ D S), write = beta k v. Raises NoMatch.

    A mask on the write may be part of beta, for tokens that leave the state alone: then the decay is another where
    the mask is set than where it is not, and the erase reads the former.
    """
    if len(erases) > 1:
        for term in erases:
            for f in _others(term, root):
                if (inner := sum_inside(f.node)) is not None:
                    raise NeedsMatrix(inner)
        if len(step.decay_terms) > 1:
            raise NoMatch("DECAY_FORM", "the decay of a delta rule is a sum of terms", step.update)
        raise NoMatch("NOT_RANK_ONE", "more than one erase", step.update)
    (erase,), (rename,) = erases, renames
    masks = [f for f in writes[0].factors if is_mask(f)]
    masks = [f for f in masks if all(_take(list(t.factors), [f]) is not None for t in writes)]
    try:
        _prove_masked(step, erase, writes, rename, root, masks)
    except NoMatch:
        if not masks:
            raise
        _prove_masked(step, erase, writes, rename, root, [])  # they are part of the values


def _prove_masked(
    step: Step, erase: Term, writes: list[Term], rename: dict[Label, Label], root: fx.Node, masks: list[Factor]
) -> None:
    decay = _where_written(step, masks)
    keys, columns = set(step.key), set(step.column)
    # An erase reads the decayed state: its factors hold the decay, along the summed axis.
    names_inside = {outer: summed for summed, outer in rename.items()}
    factors = _take(list(_others(erase, root)), [f.renamed(names_inside) for f in decay.factors])
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
        w = split_product(_take(list(term.factors), masks) or (), keys, columns)
        of_value = [f for f in w.scalar if is_mask(f) and f not in parts.scalar]
        scalars = [f for f in w.scalar if f not in of_value]
        if _keys_of(w.key) != _keys_of(parts.key):
            raise NoMatch("KEYS_DIFFER", "the state is written along another key than it is erased along", step.update)
        norms, rest = _shared_scalars(parts.scalar, scalars, step)
        found = (tuple(parts.key + norms), tuple(rest))
        if (key, beta) == (None, None):
            key, beta = found
        elif (_keys_of(key or ()), _keys_of(beta or ())) != (_keys_of(found[0]), _keys_of(found[1])):
            raise NoMatch("NOT_RANK_ONE", "two writes along different keys", step.update)
        if not w.column:
            raise NoMatch("NOT_RANK_ONE", "a write without a value", step.update)
        # A number on the write alone is the value's; one on the erase is no part of this rule.
        if len(writes) == 1 and all(abs(x - 1.0) > 1e-12 for x in (term.coefficient / strength, strength)):
            raise NoMatch("BETA_ONE_SIDE", "write and erase have different strengths", step.update)
        values.append(Product(term.coefficient / strength, (*w.column, *of_value)))
    strengths = (*(beta or ()), *masks)
    step.k, step.v = [Product(1.0, key or ())], values
    step.beta = None if not strengths and strength == 1.0 else [Product(strength, strengths)]


def _where_written(step: Step, masks: list[Factor]) -> Product:
    """The decay of the tokens that are written: one product, the masks among its factors."""
    axes = [(label,) for label in (*step.batch, *step.key, *step.column)]
    terms = [Term(p.coefficient, (*p.factors, *masks)) for p in step.decay_terms]
    found = simplify(Expr(list(axes), terms)).terms
    if not found:
        raise NoMatch("DECAY_ORDER", "where a token is written, its state is cleared after the erase", step.update)
    if len(found) > 1:
        raise NoMatch("DECAY_FORM", "the decay of a delta rule is a sum of terms", step.update)
    return Product(found[0].coefficient, found[0].factors)


def _others(term: Term, root: fx.Node) -> tuple[Factor, ...]:
    return tuple(f for f in term.factors if f.node is not root)


def sum_inside(node: fx.Node) -> fx.Node | None:
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


def refuse_hidden_beta(step: Step, index: Index) -> None:
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


def split_additive(step: Step, writes: list[Term]) -> None:
    """k, v and beta of writes without an erase. Values may be summed, or strengths, along one key; or keys, of one
    value and strength."""
    keys, columns = set(step.key), set(step.column)
    splits = [(t, split_product(t.factors, keys, columns)) for t in writes]
    first = splits[0][1]
    if any(not s.key or not s.column for _, s in splits):
        raise NoMatch("NOT_RANK_ONE", "what is written is no outer product of a key and a value", step.update)
    if any(_keys_of(s.key) != _keys_of(first.key) for _, s in splits):
        if any(_keys_of((*s.column, *s.scalar)) != _keys_of((*first.column, *first.scalar)) for _, s in splits):
            raise NoMatch("NOT_RANK_ONE", "two writes along different keys", step.update)
        step.k = [Product(t.coefficient, tuple(s.key)) for t, s in splits]
        step.v, step.beta = [Product(1.0, tuple(first.column))], None
        if first.scalar:
            step.beta = [Product(1.0, tuple(first.scalar))]
        return
    step.k = [Product(1.0, tuple(first.key))]
    if len({_keys_of(s.scalar) for _, s in splits}) > 1:  # of masked writes, each is of its own value
        for _, s in splits:
            s.column += [f for f in s.scalar if is_mask(f)]
            s.scalar = [f for f in s.scalar if not is_mask(f)]
    if all(_keys_of(s.scalar) == _keys_of(first.scalar) for _, s in splits):
        step.beta = [Product(1.0, tuple(first.scalar))] if first.scalar else None
        step.v = [Product(t.coefficient, tuple(s.column)) for t, s in splits]
    elif all(_keys_of(s.column) == _keys_of(first.column) for _, s in splits):
        step.beta = [Product(t.coefficient, tuple(s.scalar)) for t, s in splits]
        step.v = [Product(1.0, tuple(first.column))]
    else:
        raise NoMatch("NOT_RANK_ONE", "two writes of different values and strengths", step.update)
