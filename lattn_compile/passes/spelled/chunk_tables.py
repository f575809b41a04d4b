"""Tables of the powers of a decay that a region reads as inputs or constants, told by the numbers they hold.

A layer may keep exp(-slope * n) for every position of a block in buffers. That they are powers of one decay a head is
in their values, not in the graph, and the values are rounded. So a table that holds such powers to the last digits is
taken for exactly them while a region is tried and checked, for any decay; and the rewritten graph asserts, every time
it runs, that the tables it is given still are what it took them for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.literals import is_literal, is_written
from lattn_compile.passes.spelled.proposal import CONSTANT, Proposal
from lattn_compile.passes.spelled.subgraph import constant, is_trained

__all__ = [
    "TINY",
    "VALUE",
    "ChunkProposal",
    "Powers",
    "Tables",
    "find_tables",
    "head_axes",
    "known_buffer",
    "known_value",
]

VALUE = "lattn_value"
"""Key of a placeholder's metadata for the tensor that the traced call passed there. Another call may pass another."""

_ELEMENTS = 1 << 23
TINY = 1e-36
"""Powers that fp32 cannot tell from 0."""
_FITTED = 4096


@dataclass(frozen=True)
class Powers:
    """exp(n * log decay) for the whole numbers n = start + sum of steps[i] * index[i].

    Attributes:
        head: axis of the heads, -1 if one table serves all.
        steps: of n along every axis; 0 along that of the heads.
        masked: 0 stands where n < 0.
    """

    head: int
    steps: tuple[int, ...]
    start: int
    masked: bool

    def exponents(self, shape: Sequence[int], **options: Any) -> Tensor:
        """n, of the rank of a table of this shape; 1 along the axis of the heads."""
        n = torch.tensor(float(self.start), **options)
        for axis, step in enumerate(self.steps):
            if step:
                at = [1] * len(shape)
                at[axis] = -1
                n = n + step * torch.arange(shape[axis], **options).view(at)
        return n.expand([1 if i == self.head else m for i, m in enumerate(shape)])

    def filled(self, log: Tensor, shape: Sequence[int]) -> Tensor:
        """The exact table; `log` `[heads]`, or `[1]`, of which one that serves all heads takes the first."""
        n = self.exponents(shape, dtype=log.dtype)
        log = log if self.head >= 0 else log[:1]
        g = log.view([-1 if i == self.head else 1 for i in range(len(shape))])
        powers = (g * (n.clamp(min=0) if self.masked else n)).exp()
        return (torch.where(n < 0, 0.0, powers) if self.masked else powers).expand(list(shape)).clone()

    def at(self, shape: Sequence[int], log: Tensor) -> tuple[tuple[int | None, ...], int]:
        """(index, n) of the entry that says most about the decay: the largest n that leaves a normal number."""
        n = self.exponents(shape, dtype=torch.float64)
        reach = float(n.max()) if not log.any() else min(float(n.max()), 60.0 / float(log.abs().max()))
        inside = torch.where((n >= 1) & (n <= max(reach, 1.0)), n, -1.0)
        flat = int(inside.flatten().argmax())
        index: list[int | None] = []
        for axis in reversed(range(len(shape))):
            size = 1 if axis == self.head else shape[axis]
            index.insert(0, None if axis == self.head else flat % size)
            flat //= size
        return tuple(index), int(inside.max())


@dataclass(frozen=True)
class Tables:
    """The leaves of a region that are decided by one decay a head.

    Attributes:
        base, form: the leaf that holds the log decay ("log"), its negative ("slope") or the decay ("decay"); base is
            None if there are nothing but tables.
        log: the log decay, float64 `[heads]` or `[1]`, as the values have it.
        powers: per table. fixed: leaves that hold the same at every call.
    """

    base: fx.Node | None
    form: str
    log: Tensor
    powers: Mapping[fx.Node, Powers]
    fixed: frozenset[fx.Node]

    @property
    def leaves(self) -> list[fx.Node]:
        return [*([] if self.base is None else [self.base]), *self.powers]

    def drawn(
        self, shape_of: Callable[[fx.Node], Sequence[int]], draw: Callable[[Sequence[int]], Tensor]
    ) -> dict[fx.Node, Tensor]:
        """Values of all leaves for one log decay a head; `draw` makes the log decays, unless they are fixed."""
        values: dict[fx.Node, Tensor] = {}
        log = self.log
        if self.unsure() and self.base not in self.fixed:
            heads = [shape_of(n)[p.head] for n, p in self.powers.items() if p.head >= 0]
            if self.base is not None:
                heads.append(math.prod(shape_of(self.base)))
            log = draw([max(heads, default=1)])
            if any(p.head < 0 for p in self.powers.values()):
                log = log[:1].expand(len(log))
            if self.base is not None:
                shape = shape_of(self.base)
                values[self.base] = _from_log(log[: math.prod(shape)], self.form).reshape(list(shape)).clone()
        for node, powers in self.powers.items():
            values[node] = powers.filled(log, shape_of(node))
        return values

    def key(self, number: Mapping[fx.Node, int]) -> str:
        """Equal for the same claim on leaves of the same numbers."""
        powers = [(number.get(n, -1), p, n in self.fixed) for n, p in self.powers.items()]
        return repr((None if self.base is None else number.get(self.base, -1), self.form, powers))

    def unsure(self) -> list[fx.Node]:
        """Tables that another call may fill otherwise."""
        leaves = set(self.leaves)
        return [] if leaves <= self.fixed else list(self.powers)

    def changeable(self) -> list[fx.Node]:
        """Tables that may hold something else one day: the unsure ones, and attributes that are no literals."""
        return self.unsure() or [n for n in self.powers if n.op == "get_attr" and not is_literal(n)]


@dataclass
class ChunkProposal(Proposal):
    """`tables`: frontier nodes (and constants) that are not free, but powers of one decay."""

    tables: Tables | None = field(default=None)


def known_value(node: fx.Node) -> Tensor | None:
    """What a leaf of a region holds, where that is known, is exact enough, and is no parameter.

    What the graph itself writes to holds something else at the next call, and is not known.
    """
    if is_written(node):
        return None
    x = node.meta.get(VALUE) if node.op == "placeholder" else None
    if node.op == "get_attr" or CONSTANT in node.meta:
        x = constant(node)
    if not isinstance(x, Tensor) or isinstance(x, torch._subclasses.FakeTensor) or is_trained(x):
        return None
    if x.dtype not in (torch.float32, torch.float64) or x.is_meta or not 0 < x.numel() <= _ELEMENTS:
        return None
    return x.detach().to("cpu")


def known_buffer(node: fx.Node) -> Tensor | None:
    """What an input of the graph holds that is a module's buffer. In a graph of Dynamo, where it came from says so."""
    if node.op != "placeholder" or ("example_value" in node.meta and not _is_buffer(node)):
        return None
    return known_value(node)


def _is_buffer(placeholder: fx.Node) -> bool:
    """Whether Dynamo took an input out of a module's `_buffers`. Its name does not tell: an argument may have any."""
    owner = getattr(getattr(placeholder.meta.get("grapharg"), "source", None), "base", None)
    return type(owner).__name__ == "UnspecializedParamBufferSource" and getattr(owner, "member", None) == "_buffers"


def find_tables(leaves: Sequence[fx.Node], heads: int) -> Tables | None:
    """Those of `leaves` that are powers of one decay a head. None if none is, as far as their values are known."""
    values = {n: x for n in leaves if (x := known_value(n)) is not None}
    fixed = frozenset(n for n in values if n.op == "get_attr" or CONSTANT in n.meta)
    for candidates in (_bases(values, heads), _fitted(values, heads)):
        best: Tables | None = None
        for base, form, log in candidates:
            powers = {n: p for n, x in values.items() if n is not base and (p := _powers(x, log)) is not None}
            # Numbers that are powers of one another by chance are no table.
            if any(any(p.steps) for p in powers.values()) and (best is None or len(powers) > len(best.powers)):
                best = Tables(base, form, log, powers, fixed)
        if best is not None:
            return best
    return None


def head_axes(shape: Sequence[int], heads: int) -> list[int]:
    """Axes that may be that of the heads; -1 for none."""
    return [*(i for i, n in enumerate(shape) if n == heads and heads > 1), -1]


def _from_log(log: Tensor, form: str) -> Tensor:
    return {"slope": -log, "log": log, "decay": log.exp()}[form]


def _bases(values: Mapping[fx.Node, Tensor], heads: int) -> Iterator[tuple[fx.Node, str, Tensor]]:
    """Leaves with one number a head, or one for all, and what the log decay is if they hold it."""
    for node, x in values.items():
        if x.numel() not in (1, heads):
            continue
        x = x.double().flatten()
        if bool((x > 0).all()):
            yield node, "slope", -x
        if bool((x < 0).all()):
            yield node, "log", x
        if bool((x > 0).all()) and bool((x <= 1).all()) and bool((x < 1).any()):
            yield node, "decay", x.log()


def _fitted(values: Mapping[fx.Node, Tensor], heads: int) -> Iterator[tuple[None, str, Tensor]]:
    """Log decays that a table suggests: its steps along an axis."""
    for x in values.values():
        for head in head_axes(x.shape, heads):
            log = x.double().log()
            log = log.movedim(head, 0) if head >= 0 else log[None]
            for axis in range(1, log.dim()):
                if head < 0 and x.numel() == heads:
                    continue  # one number a head, and no table
                step = log.diff(dim=axis).flatten(1)
                finite = torch.isfinite(step)
                if step.shape[1] and bool(finite.any(1).all()):
                    mean = torch.where(finite, step, 0.0).sum(1) / finite.sum(1)
                    if bool((mean != 0).any()):
                        yield None, "power", -mean.abs()


def _powers(x: Tensor, log: Tensor) -> Powers | None:
    """How a table holds powers of these decays, to its last digits."""
    eps = torch.finfo(x.dtype).eps
    x = x.double()
    for head in head_axes(x.shape, len(log)):
        if head < 0 and (bool((log != log[0]).any()) or x.numel() == len(log) > 1):
            continue
        g = (log if head >= 0 else log[:1]).view([-1 if i == head else 1 for i in range(x.dim())])
        if (found := _affine(x, g, head)) is None:
            continue
        n = found.exponents(x.shape, dtype=torch.float64)
        want = found.filled(log if head >= 0 else log[:1], x.shape)
        allowed = eps * (4 + 2 * (g * n).abs() + n.abs()) * want + TINY
        if bool(((x - want).abs() <= allowed).all()):
            return found
    return None


def _affine(x: Tensor, g: Tensor, head: int) -> Powers | None:
    """Whole exponents that are affine in the indices, if log x / g are such."""
    n, sure = x.log() / g, (x > 1e-30) & (g < -1e-7)
    if head >= 0:
        # Of all heads, the one with the strongest decay says most.
        strongest = torch.where(sure, -g, 0.0).argmax(head, keepdim=True)
        n, sure = n.gather(head, strongest), sure.any(head, keepdim=True)
    at = sure.nonzero()
    if not len(at):
        return None
    seen = at[:: max(1, len(at) // _FITTED)]
    seen = torch.cat([seen, at[-1:]])
    varies = [i for i, m in enumerate(x.shape) if i != head and m > 1]
    columns = torch.cat([torch.ones(len(seen), 1, dtype=torch.float64), seen[:, varies].double()], 1)
    known = n[tuple(seen.T)].expand(len(seen))  # a table without axes is one number
    fit = torch.linalg.lstsq(columns, known[:, None], driver="gelsd").solution[:, 0].round()
    steps = [0] * x.dim()
    for axis, step in zip(varies, fit[1:].tolist(), strict=True):
        steps[axis] = int(step)
    start = int(fit[0])
    if start == 0 and not any(steps):
        return None
    return Powers(head, tuple(steps), start, bool((x == 0).any()))
