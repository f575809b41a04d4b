"""How far the numbers in a graph reach along a size that is symbolic.

A window of 16 tokens is no window at 8. So a self-check at sizes below the numbers that positions are compared with,
cut by, divided by or shifted by proves nothing about larger sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.subgraph import Region, is_symbolic, sources
from lattn_compile.passes.spelled.writer import value

__all__ = ["Needs", "needs", "numbers"]

Needs = dict[sympy.Expr, int]
"""Per symbolic size, what it must be at least."""

_MORE = 4
"""Above the sum of all numbers: what only two of them together show is seen too."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMPARED = _words(
    "eq ne lt le gt ge clamp clamp_min clamp_max clip maximum minimum max min searchsorted bucketize isin fmin fmax"
)
_MOVED = _words("add sub rsub subtract where masked_fill")
_PICKED = _words("slice narrow index _unsafe_index index_select gather embedding")
_GROUPED = _words("div divide true_divide floor_divide remainder fmod")
_DIAGONALS = _words("tril triu diagonal diag_embed")
_SHIFTS = _words("constant_pad_nd pad roll bitwise_left_shift bitwise_right_shift __lshift__ __rshift__")
_COUNTS = _words("arange cumsum sum nonzero cumprod logcumsumexp")
_BENT = _words(
    "exp exp2 expm1 log log1p log2 sqrt rsqrt pow square reciprocal sigmoid tanh sin cos erf softplus log_sigmoid"
)
_LARGEST = 1 << 20
"""A number that no size comes up to stands for infinity."""


def numbers(nodes: Iterable[fx.Node]) -> list[torch.SymInt]:
    """The symbolic sizes of all nodes."""
    found: list[torch.SymInt] = []
    for node in nodes:
        for leaf in tree_leaves(value(node)):
            sizes = leaf.shape if isinstance(leaf, Tensor) else [leaf]
            found.extend(n for n in sizes if isinstance(n, torch.SymInt))
    return found


def needs(regions: Sequence[Region], data: Iterable[fx.Node]) -> Needs:
    """What every symbolic size must be at least for the numbers along it to show.

    Args:
        data: values that are no positions.
    """
    found: dict[sympy.Expr, set[int]] = {}
    for region in regions:
        _Positions(region, set(data), found)
        for n in numbers([*region.inputs, *region.nodes]):
            for symbol in n.node.expr.free_symbols:
                found.setdefault(symbol, set()).update(_of_size(n.node.expr))
    return {size: sum(literals) + _MORE for size, literals in found.items() if literals}


def _of_size(expr: sympy.Expr) -> Iterator[int]:
    """Numbers that a size is added to, divided by or bounded by; not those that it is a multiple of."""
    multiples = [abs(int(c)) for m in expr.atoms(sympy.Mul) if (c := m.as_coeff_Mul()[0]).is_Integer and c != 0]
    for part in sympy.preorder_traversal(expr):
        if not isinstance(part, (sympy.Mul, sympy.Pow)):
            for x in part.args:
                if getattr(x, "is_Integer", False) and 1 < abs(int(x)) < 1 << 62:
                    yield math.ceil(abs(int(x)) / max([1, *multiples]))


class _Positions:
    """Follows what is made of positions, and no data, through a region.

    Attributes:
        scale: per node, how many tokens a unit of its values is, at most; infinity where that is unknown.
    """

    def __init__(self, region: Region, data: set[fx.Node], found: dict[sympy.Expr, set[int]]) -> None:
        self.region, self.found = region, found
        self.tainted = set(data)
        self.scale: dict[fx.Node, float] = {}
        for node in region.nodes:
            if node.op == "call_function" and not is_symbolic(node):
                self._visit(node, short_name(node))

    def _visit(self, node: fx.Node, name: str) -> None:
        operands = sources(node)
        literals = [float(x) for x in tree_leaves((node.args[1:], node.kwargs)) if _is_number(x)]
        if name.startswith("higher_order::"):
            self._count_turns(node)
        if name in _DIAGONALS:
            self._need(node, [x for x in literals if abs(x) > 1], axes=2 if name in ("tril", "triu") else None)
        if name in _SHIFTS:
            self._need(node, literals)
        if any(n in self.tainted for n in operands):
            self.tainted.add(node)
            return
        # A table that does not grow is cut to a size.
        if name in _PICKED and isinstance(value(node.args[0]), Tensor):
            table = value(node.args[0]).shape
            self._need(node, [float(n) for n in table if isinstance(n, int)])
        if name == "arange":
            ends = [float(x) for x in node.args if _is_number(x)]
            step = float(node.args[2]) if len(node.args) > 2 and _is_number(node.args[2]) else 1.0
            self.scale[node] = 1 / abs(step) if step else 1.0
            self._need(node, [x * self.scale[node] for x in ends])
            return
        above = [self.scale[n] for n in operands if n in self.scale]
        if name in _COUNTS:
            above.append(1.0)
        if not above:
            return
        scale = max(above)
        literals += [x for n in operands if (x := self._constant(n)) is not None]
        if node.args and _is_number(node.args[0]):
            literals.append(float(node.args[0]))
        if name in _COMPARED:
            # 0 and 1 are the ends of every exponential.
            self._need(node, [x * scale for x in literals if math.isfinite(scale) or x not in (0.0, 1.0)])
        elif name in _MOVED:
            # What is added to an exponential, or put in the place of a position, is none; it may be infinite.
            self._need(node, [x * scale for x in literals if math.isfinite(x * scale) and abs(x) < _LARGEST])
        elif name in ("mul", "multiply"):
            factor = min([abs(x) for x in literals if x] or [1.0 if len(above) > 1 else math.nan])
            many = any(n in self.region.constants and self.region.constants[n].numel() > 1 for n in operands)
            scale = scale / factor if factor == factor and not many else math.inf
        elif name in _GROUPED:
            factor = max([abs(x) for x in literals if x] or [math.nan])
            scale = scale * factor if factor == factor else math.inf
            if node.kwargs.get("rounding_mode") is not None or name not in ("div", "divide", "true_divide"):
                self._need(node, [scale])
        elif name in _BENT:
            scale = math.inf
        v = value(node)
        if isinstance(v, Tensor) and v.dtype != torch.bool:
            self.scale[node] = scale

    def _count_turns(self, node: fx.Node) -> None:
        """A loop may count its turns."""
        literals = [
            float(x)
            for n in node.all_input_nodes
            if n in self.region.modules
            for inner in self.region.modules[n].graph.nodes
            if inner.op == "call_function" and short_name(inner) in _COMPARED | _MOVED | _GROUPED
            if not any(isinstance(v := value(i), Tensor) and v.is_floating_point() for i in inner.all_input_nodes)
            for x in tree_leaves((inner.args, inner.kwargs))
            if _is_number(x)
        ]
        for source in node.all_input_nodes:
            if source not in self.region.modules:
                self._need(source, literals)

    def _constant(self, node: fx.Node) -> float | None:
        """The largest number of a constant, or that a tensor is filled with."""
        if node in self.region.constants:
            t = self.region.constants[node]
            return float(t.detach().double().abs().max()) if t.numel() and t.dtype != torch.bool else None
        if node.op == "call_function" and short_name(node) in ("full", "scalar_tensor", "full_like", "new_full"):
            return next((float(x) for x in reversed(node.args) if _is_number(x)), None)
        if node.op == "call_function" and short_name(node) in ("lift_fresh_copy", "lift_fresh", "clone", "_to_copy"):
            return self._constant(node.args[0])  # type: ignore[arg-type]
        return None

    def _need(self, node: fx.Node, reached: Sequence[float], axes: int | None = None) -> None:
        v = value(node)
        if not isinstance(v, Tensor):
            return
        shape: list[Any] = list(v.shape)[-axes:] if axes else list(v.shape)
        sizes = [n.node.expr for n in shape if isinstance(n, torch.SymInt) and n.node.expr.free_symbols]
        literals = {math.ceil(min(abs(x), _LARGEST)) for x in reached if x == x and abs(x) > 1 and not _is_never(x)}
        for size in sizes if literals else ():
            self.found.setdefault(size, set()).update(literals)


def _is_number(x: Any) -> TypeGuard[int | float]:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_never(x: float) -> bool:
    """The end of a slice that has none."""
    return x >= 1 << 62
