"""The ring of `replay.py`, around its kernels: records of a window that has begun, written to the stored states, and
left.

What `kernels/reference/records.py` does, without looking at a cursor on the host: a record without a token is selected
away, never multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lattn_compile.kernels.reference.records import handed_on
from lattn_compile.kernels.reference.span import Tokens
from lattn_compile.kernels.replay_run import GRADS, Run, States, Stretch
from lattn_compile.ring import Ring

__all__ = ["before_stretches", "left", "pending", "recomputed", "spread_", "through", "through_backward", "written"]


def written(ring: Ring, cursor: Tensor) -> Run:
    """The run that writes the records to a state as they were written before."""
    return _run(ring, cursor, ring.u, None, "additive")


def recomputed(ring: Ring, cursor: Tensor, rule: str) -> Run:
    """The run that advances a state over the raw records of two_precision."""
    assert ring.v is not None
    return _run(ring, cursor, ring.v, ring.beta, rule)


def _run(ring: Ring, cursor: Tensor, values: Tensor, beta: Tensor | None, rule: str) -> Run:
    slots = ring.k.shape[1]
    starts = slots * torch.arange(cursor.shape[0], device=cursor.device)
    k, v, g, beta = (None if x is None else x.flatten(0, 1) for x in (ring.k, values, ring.g, beta))
    assert k is not None and v is not None
    # One window holds them all, and nothing is read: any query will do.
    return Run(Tokens(k, k, v, g, beta), (starts, cursor, torch.zeros_like(cursor)), slots + 1, rule=rule)


def through(run: Run, states: Tensor) -> Tensor:
    """The states `[N, HV, K, V]` behind all of a run's tokens, in new memory; nothing is read or rounded."""
    final = states.clone(memory_format=torch.contiguous_format)
    start, work = States(states.contiguous()), Stretch(run)
    source, target = run.between(False), run.between(False)
    for first in run.stretches(work.slots):
        work.prepare(first)
        work.walk(first, start, source, target, final=final)
        source, target = target, source
    return final


def through_backward(run: Run, states: Tensor, dstates: Tensor) -> dict[str, Tensor]:
    """Adjoint of `through`: takes the gradient of states to before the run in place, and returns those of its
    tokens."""
    into = {name: torch.zeros_like(x) for name, x in zip(GRADS, run.tokens, strict=True) if x is not None}
    start = States(states.contiguous())
    sources = before_stretches(run, start)
    work = Stretch(run, backward=True)
    for first in reversed(run.stretches(work.slots)):
        work.prepare(first)
        work.walk(first, start, sources.pop(), None, keep=True)
        work.retreat(first, None, None, None, dstates, None)
        work.deliver(first, None, None, into)
    return into


def before_stretches(run: Run, start: States) -> list[States]:
    """The states that are found by each stretch of a backward."""
    inner = run.slots(backward=True)
    last = run.stretches(inner)[-1]
    sources = [run.between(start.copies is not None)]
    if last == 0:
        return sources
    work = Stretch(run, multiple=inner)
    for first in range(0, last, work.slots):
        work.prepare(first)
        for at in range(first, min(first + work.slots, last), inner):
            sources.append(run.between(start.copies is not None))
            work.walk(first, start, sources[-2], sources[-1], at=at, span=inner)
    return sources


def pending(run: Run, window: int) -> tuple[Tensor, Tensor]:
    """The tokens that wait for a flush when a run has ended.

    Returns:
        int64 `[N, W - 1]`, the flat token of every slot, and bool, whether it has one.
    """
    table = run.windows
    slot = torch.arange(window - 1, device=table.starts.device)
    stop = table.leads + table.lengths
    base = torch.div(stop, window, rounding_mode="floor") * window - table.leads
    at = base[:, None] + slot
    mine = (slot < (stop % window)[:, None]) & (at >= 0)
    return torch.where(mine, table.starts[:, None] + at, 0), mine


def left(ring: Ring | None, run: Run, window: int, updates: Tensor, *, raw: bool) -> Ring:
    """The ring that a call hands back.

    Args:
        ring: what it got. updates: fp32 `[N, W - 1, HV, V]`, as `walk` recorded them. raw: v and beta are recorded too.
    """
    _, k, v, g, beta = run.tokens
    table = run.windows
    index, mine = pending(run, window)

    def taken(x: Tensor) -> Tensor:
        rows = x[index] if run.count else x.new_zeros(*index.shape, *x.shape[1:])
        return _masked(rows.float(), mine)

    codes, sizes = run.written
    if codes is not None and sizes is not None:
        keys = taken(codes) * taken(sizes)[..., None]
    else:
        keys = taken(k)
    if codes is None and run.norm:
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + 1e-6)
    parts = (g, v if raw else None, beta if raw else None)
    new = Ring(keys, _masked(updates, mine), *(None if x is None else taken(x) for x in parts))
    if ring is None:
        return new
    old = handed_on(ring, table.leads, table.leads + table.lengths < window)
    return Ring(*(None if x is None or y is None else x + y for x, y in zip(new, old, strict=True)))  # type: ignore[arg-type]


def spread_(grads: Mapping[str, Tensor], run: Run, window: int, given: Mapping[str, Tensor | None]) -> None:
    """Adds gradients of what was recorded as it came, `[N, W - 1, ..]`, to those of its tokens."""
    index, mine = pending(run, window)
    for name, x in given.items():
        if x is not None and name in grads:
            total = grads[name]
            rows = torch.where(_over(mine, x), x, 0).flatten(0, 1).to(total.dtype)
            total.index_add_(0, index.flatten(), rows)


def _masked(x: Tensor, mine: Tensor) -> Tensor:
    return torch.where(_over(mine, x), x, 0)


def _over(mine: Tensor, x: Tensor) -> Tensor:
    return mine.view(*mine.shape, *(1,) * (x.dim() - 2))
