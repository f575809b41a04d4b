"""How a chunk form groups its tokens: the sizes of its chunks, and what it is padded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_ops import PADS, is_analytic, sizes_of, sources
from lattn_compile.passes.spelled.chunk_region import Survey

__all__ = ["Grain", "grain_of"]


@dataclass(frozen=True)
class Grain:
    """How tokens are grouped: axes along which a region mixes tokens, and pads `(from, to)`."""

    mixed: set[int]
    pads: set[tuple[int, int]]

    def rank(self, tokens: int) -> int:
        """0 if `tokens` is a whole number of chunks, or is padded to one; 2 if not, which a block loop may do."""
        lengths = {tokens} | {n for m, n in self.pads if m == tokens}
        return 0 if self.mixed and any(n % max(self.mixed) == 0 for n in lengths) else 2

    def chunks(self, tokens: int) -> list[int]:
        """What the tokens may have been cut into, largest first."""
        return sorted((c for c in self.mixed if c < tokens and tokens % c == 0), reverse=True)


def grain_of(survey: Survey, exits: Sequence[fx.Node], core: set[fx.Node]) -> Grain:
    mixed: set[int] = set()
    for node in core:
        shape = sizes_of(node)
        if shape is None or len(shape) < 2:
            continue
        if short_name(node) in ("cumsum", "cumprod"):
            mixed.add(shape[int(node.args[1])])  # type: ignore[arg-type]
        elif shape[-1] == shape[-2]:
            mixed.add(shape[-1])
    pads: set[tuple[int, int]] = set()
    stack, seen = list(exits), set(exits)
    while stack:
        node = stack.pop()
        if not is_analytic(node):
            continue
        above = [n for n in sources(node) if not survey.is_constant(n)]
        if short_name(node) in PADS:
            a, b = sizes_of(above[0]), sizes_of(node)
            if a is not None and b is not None and a != b:
                pads.update((m, n) for m, n in zip(a, b, strict=True) if m < n)
                continue
        for n in above:
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return Grain({c for c in mixed if c > 1}, pads)
