"""One token's update of a state, as data: what a step is once it is proved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from lattn_compile.passes.spelled.labels import Axis, Label, flat
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import Factor

__all__ = ["NeedsMatrix", "Product", "Split", "Step", "split_product"]


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
