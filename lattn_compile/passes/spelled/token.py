"""One token's update of a state, as data: what a step is once it is proved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from lattn_compile.passes.spelled.labels import Axis, Label, flat
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import Expr, Factor, Term, is_mask, simplify

__all__ = ["NeedsMatrix", "Product", "Split", "Step", "split_product"]


@dataclass(frozen=True)
class Product:
    """coefficient · Π factors."""

    coefficient: float = 1.0
    factors: tuple[Factor, ...] = ()

    def masked(self, masks: Iterable[Factor], labels: Iterable[Label]) -> Product:
        """Itself where the masks are set, and 0 elsewhere; masks that run along other labels aside."""
        mine, known = set(labels), {f.key() for f in self.factors}
        more = [f for f in masks if f.key() not in known and set(f.labels()) <= mine]
        return Product(self.coefficient, (*self.factors, *more))


@dataclass
class Step:
    """One matched update.

    Attributes:
        update: the new state; root: the previous one.
        path: nodes from root to update, both excluded from use by others if the update is to go away.
        batch, key, column: labels of the state: sequences and heads, K, V.
        axes: of the update; root_index: labels of the root's axes.
        decay_terms: D as a sum of products; one product of coefficient 1 without factors is no decay.
        k, v, beta: sums of products. beta None is 1.
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
    k: list[Product]
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

    def masks(self) -> list[Factor]:
        """The masks that every write carries: a token that one of them leaves out writes nothing. A delta rule of which
        values alone are masked takes away what was there, and its keys count."""
        shared: list[Factor] = []
        for products in (self.v if self.rule == "additive" else [], self.beta or []):
            for f in products[0].factors if products else ():
                everywhere = all(any(g.key() == f.key() for g in p.factors) for p in products)
                if is_mask(f) and everywhere and all(f.key() != g.key() for g in shared):
                    shared.append(f)
        return shared

    def kept(self) -> list[Product] | None:
        """Where the state is kept, as a sum of products of masks that is 0 where it is cleared; None: everywhere."""
        axes = [(label,) for label in (*self.batch, *self.key, *self.column)]
        masks = [Term(1.0, tuple(f for f in p.factors if is_mask(f))) for p in self.decay_terms]
        kept = simplify(Expr(list(axes), masks)).terms  # a mask and its opposite are 1
        return [Product(t.coefficient, t.factors) for t in kept] if kept and all(t.factors for t in kept) else None


class NeedsMatrix(Exception):
    """A factor holds two axes that have to be told apart: look into it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node


@dataclass
class Split:
    """Factors of one product by the axes they run along."""

    key: list[Factor]
    column: list[Factor]
    scalar: list[Factor]


def split_product(factors: Iterable[Factor], keys: set[Label], columns: set[Label]) -> Split:
    out = Split([], [], [])
    for f in factors:
        labels = set(f.labels())
        if labels & keys and labels & columns:
            raise NeedsMatrix(f.node)
        (out.key if labels & keys else out.column if labels & columns else out.scalar).append(f)
    return out
