"""Sums of products of indexed tensors: what a multilinear expression of a graph is, element by element.

mul, sum: (Σ_terms coefficient · Π factor[labels]); a label that is not on an axis of the result is summed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from lattn_compile.passes.spelled.labels import Axis, Label, constant_size, flat, is_one, unify
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.views import of_booleans
from lattn_compile.passes.spelled.writer import value

__all__ = [
    "EYE",
    "Expr",
    "Factor",
    "Term",
    "add",
    "atom",
    "broadcast",
    "contract",
    "inverse",
    "is_mask",
    "keyed",
    "multiply",
    "negated_mask",
    "simplify",
]

MAX_TERMS = 64

Index = Axis | int


class _Eye:
    def __repr__(self) -> str:
        return "eye"


EYE: Any = _Eye()
"""The node of a factor that is 1 where its two labels are equal, else 0."""


@dataclass(frozen=True)
class Factor:
    """`node[index]`: an axis of the node is an axis of labels, or a constant position.

    Attributes:
        inverse: 1 / `node[index]` instead. negated: 1 - `node[index]`, of a mask.
    """

    node: fx.Node
    index: tuple[Index, ...]
    inverse: bool = False
    negated: bool = False

    def labels(self) -> list[Label]:
        return [label for axis in self.index if not isinstance(axis, int) for label in flat(axis)]

    def key(self, rename: dict[Label, Any] | None = None) -> tuple[Any, ...]:
        """Equal for equal factors, after `rename`."""
        rename = rename or {}
        return (
            self.node,
            self.inverse,
            self.negated,
            *(axis if isinstance(axis, int) else tuple(rename.get(x, x) for x in flat(axis)) for axis in self.index),
        )

    def renamed(self, rename: dict[Label, Label]) -> Factor:
        index = tuple(a if isinstance(a, int) else tuple(rename.get(x, x) for x in flat(a)) for a in self.index)
        return Factor(self.node, index, self.inverse, self.negated)


def is_mask(f: Factor) -> bool:
    """Whether a factor is 0 or 1 for certain."""
    return f.node is not EYE and of_booleans(f.node)


@dataclass(frozen=True)
class Term:
    coefficient: float
    factors: tuple[Factor, ...]

    def labels(self) -> set[Label]:
        return {label for f in self.factors for label in f.labels()}

    def times(self, c: float) -> Term:
        return Term(self.coefficient * c, self.factors)


@dataclass
class Expr:
    axes: list[Axis]
    terms: list[Term]

    def scaled(self, c: float) -> Expr:
        return Expr(self.axes, [t.times(c) for t in self.terms])

    def free(self) -> list[Label]:
        return [label for axis in self.axes for label in flat(axis)]


def atom(node: fx.Node, repeated: Collection[int] = (), *, ones: bool = False) -> Expr:
    """A tensor that is not looked into. Along the axes `repeated` it holds the same values again and again.

    `ones`: axes of size 1 have an index, too.
    """
    axes: list[Axis] = [() if is_one(n) and not ones else (Label(n),) for n in value(node).shape]
    index = tuple(0 if i in repeated and axis else axis for i, axis in enumerate(axes))
    return Expr(axes, [Term(1.0, (Factor(node, index),))])


def inverse(expr: Expr) -> Expr:
    """1 / expr, of a single product."""
    if len(expr.terms) != 1 or expr.terms[0].coefficient == 0.0:
        raise NoMatch("STATE_OP", "a division by a sum")
    (term,) = expr.terms
    factors = tuple(Factor(f.node, f.index, not f.inverse) for f in term.factors)
    if any(f.node is EYE or is_mask(f) for f in factors) or term.labels() - set(expr.free()):
        raise NoMatch("STATE_OP", "a division by a contraction")
    return Expr(expr.axes, [Term(1.0 / term.coefficient, factors)])


def negated_mask(x: Expr) -> Expr | None:
    """1 - x, of one mask."""
    if len(x.terms) != 1 or x.terms[0].coefficient != 1.0 or len(x.terms[0].factors) != 1:
        return None
    (mask,) = x.terms[0].factors
    return Expr(x.axes, [Term(1.0, (replace(mask, negated=not mask.negated),))]) if is_mask(mask) else None


def broadcast(exprs: Sequence[Expr]) -> list[Axis]:
    """The common axes of operands that broadcast, their labels unified."""
    rank = max(len(e.axes) for e in exprs)
    out: list[Axis] = [()] * rank
    for e in exprs:
        for i, axis in enumerate(e.axes, rank - len(e.axes)):
            if not flat(axis):
                continue
            if flat(out[i]):
                unify(axis, out[i])
            if not flat(out[i]):
                out[i] = axis
    return out


def add(exprs: Sequence[Expr]) -> Expr:
    axes = broadcast(exprs)
    return Expr(axes, _limited([t for e in exprs for t in e.terms]))


def multiply(exprs: Sequence[Expr]) -> Expr:
    axes = broadcast(exprs)
    return Expr(axes, _product(exprs))


def contract(exprs: Sequence[Expr], subscripts: Sequence[Sequence[Any]], output: Sequence[Any]) -> Expr:
    """einsum: `subscripts[i][j]` names axis j of operand i; names that are not in `output` are summed over."""
    named: dict[Any, Axis] = {}
    for e, names in zip(exprs, subscripts, strict=True):
        for axis, name in zip(e.axes, names, strict=True):
            if name in named and flat(named[name]) and flat(axis):
                unify(axis, named[name])
            if name not in named or not flat(named[name]):
                named[name] = axis
    summed = [label for name, axis in named.items() if name not in output for label in flat(axis)]
    return Expr([named[name] for name in output], sum_over(_product(exprs), summed))


def sum_over(terms: Iterable[Term], labels: Sequence[Label]) -> list[Term]:
    """Terms after a sum over `labels`: one that does not depend on a label is multiplied by its size."""
    out = []
    for term in terms:
        present = term.labels()
        for label in labels:
            if label not in present:
                if (n := constant_size(label.size)) is None:
                    raise NoMatch("AXES", "a sum over a broadcast axis of symbolic size")
                term = term.times(float(n))
        out.append(term)
    return out


def _product(exprs: Sequence[Expr]) -> list[Term]:
    terms = [Term(1.0, ())]
    for e in exprs:
        terms = _limited([Term(a.coefficient * b.coefficient, a.factors + b.factors) for a in terms for b in e.terms])
    return terms


def _summed_names(term: Term, free: set[Label]) -> dict[Label, Any]:
    """A name for each label that is summed over, by where it stands: the label itself is new in every term."""
    places: dict[Label, list[Any]] = {}
    for f in term.factors:
        for i, axis in enumerate(f.index):
            for j, label in enumerate(() if isinstance(axis, int) else flat(axis)):
                if label not in free:
                    places.setdefault(label, []).append((f.node.name if f.node is not EYE else "eye", i, j))
    return {label: tuple(sorted(where)) for label, where in places.items()}


def _limited(terms: list[Term]) -> list[Term]:
    if len(terms) > MAX_TERMS:
        raise NoMatch("TOO_MANY_TERMS", f"more than {MAX_TERMS} products in one state update")
    return terms


def keyed(expr: Expr) -> dict[Any, float]:
    """Coefficients by product, summed labels called by where they stand: equal for equal expressions."""
    free = set(expr.free())
    return {frozenset_of(f.key(_summed_names(t, free)) for f in t.factors): t.coefficient for t in expr.terms}


def simplify(expr: Expr) -> Expr:
    """Carries out sums over identity matrices, drops zero terms, and adds up equal ones, those of one mask included."""
    free = set(expr.free())
    terms = _added(free, [_without_eyes(term, free) for term in expr.terms])
    for mask in _masks(terms, free):
        terms = _limited(_by_mask(terms, mask, free))
    return Expr(expr.axes, terms)


def _added(free: set[Label], terms: Iterable[Term]) -> list[Term]:
    merged: dict[Any, Term] = {}
    for term in terms:
        if term.coefficient == 0.0:
            continue
        key = frozenset_of(f.key(_summed_names(term, free)) for f in term.factors)
        known = merged.get(key)
        merged[key] = term if known is None else Term(known.coefficient + term.coefficient, term.factors)
    return [t for t in merged.values() if t.coefficient != 0.0]


def _masks(terms: Iterable[Term], free: set[Label]) -> list[Factor]:
    """The masks that choose between terms: factors of 0 or 1 that nothing is summed over with."""
    found: dict[Any, Factor] = {}
    for term in terms:
        for f in term.factors:
            if is_mask(f) and set(f.labels()) <= free:
                plain = replace(f, negated=False)
                found.setdefault(plain.key(), plain)
    return list(found.values())


def _by_mask(terms: Iterable[Term], mask: Factor, free: set[Label]) -> list[Term]:
    """Terms where a mask is set, and where it is not; what is the same in both is one term again."""
    true, false = mask.key(), replace(mask, negated=True).key()
    where: dict[bool, list[Term]] = {True: [], False: []}
    for term in terms:
        keys = {f.key() for f in term.factors}
        rest = Term(term.coefficient, tuple(f for f in term.factors if f.key() not in (true, false)))
        if false not in keys:
            where[True].append(rest)
        if true not in keys:
            where[False].append(rest)
    on, off = (
        {frozenset_of(f.key(_summed_names(t, free)) for f in t.factors): t for t in _added(free, where[side])}
        for side in (True, False)
    )
    both = {k for k in on.keys() & off.keys() if on[k].coefficient == off[k].coefficient}
    return [
        *(on[k] if k in both else Term(on[k].coefficient, (*on[k].factors, mask)) for k in on),
        *(Term(t.coefficient, (*t.factors, replace(mask, negated=True))) for k, t in off.items() if k not in both),
    ]


def frozenset_of(keys: Iterable[Any]) -> frozenset[tuple[Any, int]]:
    """A multiset, hashable."""
    counts: dict[Any, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return frozenset(counts.items())


def _without_eyes(term: Term, free: set[Label]) -> Term:
    while True:
        for i, f in enumerate(term.factors):
            if f.node is not EYE:
                continue
            rows, columns = (flat(axis) for axis in f.index if not isinstance(axis, int))
            if len(rows) != len(columns):
                raise NoMatch("AXES", "the axes of an identity matrix are cut differently")
            pairs = dict(zip(columns, rows, strict=True))
            if any(c in free for c in columns):
                pairs = {r: c for c, r in pairs.items()}
                if any(r in free for r in pairs):
                    continue
            rest = term.factors[:i] + term.factors[i + 1 :]
            term = Term(term.coefficient, tuple(g.renamed(pairs) for g in rest))
            break
        else:
            return term
