"""The ring of `replay.py`: records of a window that has begun, written to the stored states, and left behind.

A call that starts inside a window first writes the records to the states it got: an additive run (no system to solve)
over at most W - 1 tokens. The anchor of two_precision advances over the raw records instead, by the recurrence itself.
Records are runs of tokens like any other, so both are `span.Run`s, and `adjoint.sweep_back` is their way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lattn_compile.kernels.reference.adjoint import sweep_back
from lattn_compile.kernels.reference.blocks import Pending
from lattn_compile.kernels.reference.span import Advance, Blocks, Run, Tokens
from lattn_compile.ring import Ring

__all__ = ["entering", "entering_backward", "handed_on", "left", "record_"]


def entering(anchor: Tensor, read: Tensor | None, ring: Ring | None, cursor: Tensor, rule: str) -> Tensor:
    """The states that the first tokens find, `[N, HV, K, V]`; of two_precision the pairs `[N, HV, K, 2 V]`.

    Args as `replay.forward` takes them. May return `anchor` itself; a state with a cursor of 0 keeps its bits.
    """
    if ring is not None and bool((cursor > 0).any()):
        if read is None:
            return _written(ring, cursor, anchor.dtype).through(anchor)
        read = _written(ring, cursor, anchor.dtype).through(read)
        anchor = _recomputed(ring, cursor, anchor.dtype, rule).through(anchor)
    return anchor if read is None else torch.cat((read, anchor), -1)


def entering_backward(
    grad: Tensor, anchor: Tensor, read: Tensor | None, ring: Ring | None, cursor: Tensor, rule: str
) -> tuple[Tensor, Tensor | None, Ring | None]:
    """Adjoint of `entering`: gradients of anchor, read and ring, None for what is None. May overwrite `grad`."""
    danchor, dread = (grad, None) if read is None else (x.contiguous() for x in reversed(grad.tensor_split(2, -1)))
    if ring is None:
        return danchor, dread, None
    dring = Ring(*(None if x is None else torch.zeros_like(x) for x in ring))  # type: ignore[arg-type]
    if bool((cursor > 0).any()):
        run = _written(ring, cursor, anchor.dtype)
        if read is None:
            danchor = _swept(run, anchor, danchor, {"dk": dring.k, "dv": dring.u, "dg": dring.g})
        else:
            assert dread is not None
            dread = _swept(run, read, dread, {"dk": dring.k, "dv": dring.u, "dg": dring.g})
            run = _recomputed(ring, cursor, anchor.dtype, rule)
            into = {"dk": dring.k, "dv": dring.v, "dg": dring.g, "dbeta": dring.beta}
            danchor = _swept(run, anchor, danchor, into)
    return danchor, dread, dring


def left(ring: Ring | None, run: Run, *, raw: bool) -> Ring:
    """The ring that a call hands back, before its own tokens are recorded: old records where nothing was flushed.

    Args:
        run: the call's; its grid is the window. raw: whether v and beta are recorded too.
    """
    plan, tokens = run.plan, run.tokens
    count, slots = plan.lead.shape[0], plan.chunk - 1
    like = (tokens.k, tokens.v, tokens.g, tokens.v if raw else None, tokens.beta if raw else None)
    if ring is None:
        return Ring(*(None if x is None else x.new_zeros(count, slots, *x.shape[1:], dtype=run.dtype) for x in like))  # type: ignore[arg-type]
    return handed_on(ring, plan.lead, plan.stop < plan.chunk)


def handed_on(ring: Ring, cursor: Tensor, unflushed: Tensor) -> Ring:
    """`ring` with zeros for whatever is no record of a window that goes on; its parts may be None."""

    def masked(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        stays = unflushed[:, None] & (torch.arange(x.shape[1], device=x.device) < cursor[:, None])
        # Selected, not multiplied: whatever lies in a slot that holds no record must not come through.
        return x.masked_fill(~stays.view(*stays.shape, *(1,) * (x.dim() - 2)), 0)

    return Ring(*(masked(x) for x in ring))  # type: ignore[arg-type]


def record_(ring: Ring, run: Run, blocks: Blocks, advance: Advance, pending: Pending | None) -> None:
    """Writes the tokens `pending` of a span to their slots of `ring`."""
    if pending is None:
        return
    row, slot, where = pending.row, pending.slot, (pending.sequence, pending.place)
    ring.k[where] = blocks.written[row, :, slot]
    ring.u[where] = advance.updates[row, :, :, slot][..., : ring.u.shape[-1]].flatten(1, 2)
    tokens = blocks.slots.index[row, slot]
    for into, x in ((ring.g, run.tokens.g), (ring.v, run.tokens.v), (ring.beta, run.tokens.beta)):
        if into is not None and x is not None:
            into[where] = x[tokens].to(run.dtype)


def _written(ring: Ring, cursor: Tensor, dtype: torch.dtype) -> Run:
    """The run that writes the records to a state as they were written before."""
    return _run(ring, cursor, dtype, ring.u, None, "additive")


def _recomputed(ring: Ring, cursor: Tensor, dtype: torch.dtype, rule: str) -> Run:
    """The run that advances a state over the raw records."""
    assert ring.v is not None
    return _run(ring, cursor, dtype, ring.v, ring.beta, rule)


def _run(ring: Ring, cursor: Tensor, dtype: torch.dtype, values: Tensor, beta: Tensor | None, rule: str) -> Run:
    starts = ring.k.shape[1] * torch.arange(cursor.shape[0], device=cursor.device)
    k, v, g, beta = (None if x is None else x.flatten(0, 1) for x in (ring.k, values, ring.g, beta))
    assert k is not None and v is not None
    # Nothing is read: any query will do.
    return Run(Tokens(k, k, v, g, beta), (starts, cursor, None), dtype, rule=rule, scale=1.0, qk_l2norm=False)


def _swept(run: Run, state: Tensor, dfinal: Tensor, into: dict[str, Tensor | None]) -> Tensor:
    """Gradient of `run.through(state)` with respect to `state`; those of the tokens are added to `into`."""
    dcurrent = run.load(dfinal)
    found = {name: torch.zeros_like(x.flatten(0, 1)) for name, x in into.items() if x is not None}
    sweep_back(run, state, dcurrent, None, found)
    for name, grad in found.items():
        total = into[name]
        if total is not None:
            total += grad.view(total.shape)
    return run.unload(dcurrent)
