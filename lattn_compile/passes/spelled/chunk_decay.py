"""Decays that no token chooses: one number a head, measured on the region and then found among its own constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.chunk_ops import sizes_of, sources
from lattn_compile.passes.spelled.chunk_tables import Tables
from lattn_compile.passes.spelled.scaled import real
from lattn_compile.passes.spelled.subgraph import clean_state, extract, run
from lattn_compile.passes.spelled.writer import value

__all__ = ["FixedDecay", "decay_of", "find_decay", "is_fixed", "measured"]

_ELEMENTS = 1 << 16
_CLOSE = 1e-11


@dataclass(frozen=True)
class FixedDecay:
    """A log decay `[HV]` that is the same for every token.

    Attributes:
        log: its value in the trial, float64 `[HV]`.
        node, index, form: where the graph has it: `node` at `index` (None: the axis of the heads) is the log decay
            ("log"), its negative ("slope"), the decay ("decay"), or the decay to the power of `exponent` ("power").
            node is None where the graph has only its powers, and no input decides it.
    """

    log: Tensor
    node: fx.Node | None = None
    index: tuple[int | None, ...] = ()
    form: str = "log"
    exponent: int = 1


def decay_of(tables: Tables, decay: Tensor, values: Mapping[fx.Node, Tensor]) -> FixedDecay | None:
    """Where the leaves that hold powers of `decay` `[HV]` have it. None if they hold those of another one.

    values: of the leaves. A table without a base is read where its rounding matters least.
    """
    log = decay.log()
    if tables.leaves and tables.base is not None:
        x = values.get(tables.base)
        if x is None:  # a constant
            own = tables.log
        else:
            flat = x.flatten()
            own = {"slope": -flat, "log": flat, "decay": flat.log()}[tables.form]
        if not _same_logs(own, log):
            return None
        shape = sizes_of(tables.base) or ()
        index = tuple(None if n == own.numel() and n > 1 else 0 for n in shape)
        return FixedDecay(log, tables.base, index, tables.form)
    if not tables.unsure():
        return FixedDecay(log)
    node, powers = next(iter(tables.powers.items()))
    shape = sizes_of(node) or ()
    index, n = powers.at(shape, tables.log)
    own = values[node][tuple(slice(None) if i is None else i for i in index)].log() / n
    return FixedDecay(log, node, index, "power", n) if _same_logs(own.flatten(), log) else None


def _same_logs(own: Tensor, log: Tensor) -> bool:
    return own.numel() in (1, log.numel()) and float((own - log).abs().max()) <= 1e-9


def is_fixed(o: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether what a second token keeps of the first depends on the head alone: no token chooses it."""
    if o.shape[1] < 2:
        return False
    overlap = (q * k[:, :1]).sum(-1, keepdim=True)
    ratio = (o[:, 1] * overlap[:, 0]) / (o[:, 0] * overlap[:, 1])
    return bool(torch.isfinite(ratio).all()) and float((ratio - ratio.mean((0, 2), keepdim=True)).abs().max()) <= 1e-9


def measured(o: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """The decay per head of a recurrence into which only the first token was written.

    o `[B, T, HV, V]`; q, k `[B, T, HV, K]`. None where o is not what one decay a head, in (0, 1) or 1 for some heads,
    makes of it.
    """
    if o.shape[1] < 2:
        return None
    overlap = (q * k[:, :1]).sum(-1, keepdim=True)
    ratio = (o[:, 1] * overlap[:, 0]) / (o[:, 0] * overlap[:, 1])
    decay = ratio.mean((0, 2))
    if not torch.isfinite(ratio).all() or float((ratio - decay[:, None]).abs().max()) > 1e-9:
        return None
    decay = torch.where((decay - 1).abs() <= _CLOSE, 1.0, decay)
    return decay if 0.0 < float(decay.min()) < 1.0 and float(decay.max()) <= 1.0 else None


def find_decay(
    decay: Tensor, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], statics: dict[fx.Node, Tensor]
) -> FixedDecay | None:
    """Where among `nodes` of a region the decay `[HV]` stands.

    inputs: everything else the region is made from; `statics`: its inputs that no token reaches, with their values.
    None where it stands nowhere and an input decides it.
    """
    log = decay.log()
    reached = set(inputs) - set(statics)
    candidates = list(statics)
    for node in nodes:
        if node in statics:
            continue
        if node in reached or any(n in reached for n in sources(node)):
            reached.add(node)
            continue
        v, shape = value(node), sizes_of(node)
        if shape is not None and v.is_floating_point() and _numel(shape) <= _ELEMENTS:
            candidates.append(node)
    candidates = [n for n in candidates if _head_axis(sizes_of(n) or (), len(decay)) is not None]
    if candidates:
        region = extract(candidates, list(statics))
        with clean_state(), torch.no_grad():
            values = run(region, list(statics.values()), real, {})
        for form, want in (("slope", -log), ("log", log), ("decay", decay)):
            for node, x in zip(candidates, values, strict=True):
                if (index := _index(x, want)) is not None:
                    return FixedDecay(log, node, index, form)
    return None if statics else FixedDecay(log)


def _numel(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _head_axis(shape: Sequence[int], heads: int) -> int | None:
    """The first axis as long as there are heads; -1 where one number may stand for all of them."""
    if heads == 1 or _numel(shape) == 1:
        return -1
    return next((i for i, n in enumerate(shape) if n == heads), None)


def _index(x: Tensor, want: Tensor) -> tuple[int | None, ...] | None:
    """Where in `x` the numbers `want` `[HV]` stand."""
    axis = _head_axis(x.shape, len(want))
    if axis is None:
        return None
    if axis < 0:
        if float((want - want[0]).abs().max()) > _CLOSE:
            return None
        flat, rest, want = x.reshape(1, -1), list(x.shape), want[:1]
    else:
        moved = x.movedim(axis, 0)
        flat, rest = moved.reshape(len(want), -1), list(moved.shape[1:])
    hit = ((flat - want[:, None]).abs() <= _CLOSE * want.abs()[:, None]).all(0).nonzero()
    if not len(hit):
        return None
    at = int(hit[0])
    index: list[int | None] = []
    for n in reversed(rest):
        index.insert(0, at % n)
        at //= n
    if axis >= 0:
        index.insert(axis, None)
    return tuple(index)
