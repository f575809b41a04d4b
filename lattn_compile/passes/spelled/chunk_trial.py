"""A region run on fixed random inputs in float64, to see what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.analytic import vet
from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_ops import PRODUCTS, sizes_of, sources
from lattn_compile.passes.spelled.chunk_region import Boundary
from lattn_compile.passes.spelled.chunk_tables import Tables, find_tables
from lattn_compile.passes.spelled.chunk_views import Sizes, views
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.scaled import real
from lattn_compile.passes.spelled.subgraph import Region, clean_state, extract, run
from lattn_compile.passes.spelled.writer import value

__all__ = ["Trial"]


_EXPONENTIAL = ("exp", "exp2")
_OF_DECAYS = ("log", "log2", "cumprod")


class Trial:
    """Inputs for a region, and its outputs for them.

    Attributes:
        values: of the inputs. constants: of tables among the region's constants, which hold rounded numbers.
        through, as_decay: per tensor of tokens, whether all that is made of it is exp of it, or its logarithm.
    """

    def __init__(self, exits: Sequence[fx.Node], boundary: Boundary, sizes: Sizes) -> None:
        self.exits, self.boundary, self.sizes = exits, boundary, sizes
        self.inputs = [*boundary.tokens, *boundary.states, *boundary.statics]
        self.region: Region = extract(exits, self.inputs)
        self.through = {n: self._passes(n, _EXPONENTIAL, _OF_DECAYS) for n in boundary.tokens}
        self.as_decay = {n: self._passes(n, _OF_DECAYS, _EXPONENTIAL) for n in boundary.tokens}
        self.values: dict[fx.Node, Any] = {}
        self.tables: Tables | None = None
        self.constants: dict[fx.Node, Tensor] = {}

    def look_for_tables(self) -> None:
        """Tells leaves that are tables of a decay's powers; they are drawn as such from then on."""
        self.tables = find_tables([*self.boundary.statics, *self.region.constants], self.sizes.heads)

    def prepare(self, *, negative: bool = False) -> None:
        """Draws the inputs; with `negative`, what no token reaches are numbers below 0.

        Raises Rejected where random numbers could not prove anything.
        """
        vet(self.region, self.inputs)
        generator = torch.Generator().manual_seed(0)
        self.values = {n: self._draw(n, generator) for n in self.inputs}
        if negative:
            for n in self.boundary.statics:
                self.values[n] = -self.values[n] if isinstance(self.values[n], Tensor) else self.values[n]
        if self.tables is not None:
            drawn = self.tables.drawn(
                real, lambda shape: -0.05 - 0.2 * torch.rand(shape, generator=generator, dtype=torch.float64)
            )
            self.values |= {n: x for n, x in drawn.items() if n in self.values}
            self.constants = {n: x for n, x in drawn.items() if n in self.region.constants}

    def _passes(self, node: fx.Node, names: Sequence[str], others: Sequence[str]) -> bool:
        """Whether every path from a node to an output goes through one of these operators before one of the others."""
        inside = set(self.region.nodes)
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            if n in self.exits:
                return False
            for u in n.users:
                if u in inside and short_name(u) in others:
                    return False
                if u in inside and u not in seen and short_name(u) not in names:
                    seen.add(u)
                    stack.append(u)
        return True

    def multiplies(self, key: fx.Node) -> bool:
        """Whether keys are multiplied with keys, as the delta rule does."""
        made: dict[fx.Node, bool] = {key: True}
        for node in self.region.nodes:
            above = [n for n in sources(node) if n in made]
            if not above:
                continue
            if short_name(node) in PRODUCTS and len(sources(node)) > 1 and len(above) == len(sources(node)):
                return True
            made[node] = True
        return False

    def is_gate(self, node: fx.Node) -> bool:
        return self.through.get(node, False) or self.as_decay.get(node, False)

    def decay_and_strength(self, gates: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
        """Which of two gates is summed up over tokens, and which meets the exponent as it is: an input gate."""
        summed = [self._passes(n, ("cumsum",), _EXPONENTIAL) for n in gates]
        if sum(summed) != 1 or not all(self.through[n] for n in gates):
            return None
        at = summed.index(True)
        return gates[at], gates[1 - at]

    def _draw(self, node: fx.Node, generator: torch.Generator) -> Any:
        v = value(node)
        if isinstance(v, (list, tuple)):
            raise NoMatch("CHUNK_INPUTS", f"{node} is several tensors", node)
        if not isinstance(v, Tensor):
            return real(node)
        shape = sizes_of(node)
        assert shape is not None
        if not v.is_floating_point():
            raise NoMatch("CHUNK_INPUTS", f"{node} is {v.dtype}", node)
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
        if self.as_decay.get(node):
            return 0.9 + 0.09 * x
        if self.through.get(node):
            return -0.1 * x - 0.005
        kinds = views(node, self.sizes)
        if node in self.boundary.tokens and kinds and "f" not in kinds[0].labels:
            return 0.1 + 0.8 * x
        if node in self.boundary.statics:
            return 0.05 + 0.2 * x
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        at = kinds[0].labels.find("f") if kinds else -1
        return torch.nn.functional.normalize(x, dim=at) if x.dim() else x

    def run(self, change: dict[fx.Node, Tensor] | None = None, *, state: bool) -> list[Tensor]:
        """The exits' values; `change` replaces inputs. Without `state` the initial state is zero."""
        values = {**self.values, **(change or {})}
        for n in self.boundary.states:
            if not state:
                values[n] = torch.zeros_like(values[n])
        with clean_state(), torch.no_grad():
            return run(self.region, [values[n] for n in self.inputs], real, self.constants)
