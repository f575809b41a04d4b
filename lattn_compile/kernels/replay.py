"""`lattn::replay` in Triton: the functions of `kernels.reference.replay`, for CUDA devices.

Nothing waits for lengths; grids follow from shapes. Windows are worked on in stretches (`replay_windows.py`), as many
at a time as the workspace holds. Of a stretch, the forward is

    encode      keys as they are written, all at once; under `factors`                  replay_factors.py
    relate      what tokens of a window are to each other, all windows at once         replay_prepare.py
    prepare     what windows need besides the state
    walk        the state from window to window, rounded at their ends, and outputs    replay_walk.py

and the backward, which first walks once without reading to find the state before every stretch, from the last back:

    relate, prepare, walk    again, keeping each window's state and errors
    retreat                  the gradient of the state from window to window           replay_retreat.py
    settle, contract         sums over value columns, all windows at once              replay_gradients.py
    deliver                  weights and norms undone, summed over the value heads of a key head

`walk` computes the same bits in all of these, so the states that gradients are taken at are those of the forward. No
atomics: every gradient is summed in one order. A ring is runs of the same kernels (`replay_ring.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats.factors import FACTORS
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.common.host import on, refused, refused_rounding
from lattn_compile.kernels.reference.records import handed_on
from lattn_compile.kernels.reference.span import Tokens
from lattn_compile.kernels.replay_ring import (
    before_stretches,
    left,
    recomputed,
    spread_,
    through,
    through_backward,
    written,
)
from lattn_compile.kernels.replay_run import GRADS, Run, States, Stretch, padded, tiles
from lattn_compile.ring import Ring

__all__ = ["backward", "forward", "supports"]

_MAX_TILE = 128 * 128


def supports(
    *,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    quantize: Quantizer | None,
    factors: str | None = None,
) -> str | None:
    """Why these kernels cannot compute such a call, in words, or None if they can.

    Args:
        dtype: of the arithmetic. factors: of the records.
    """
    if (why := refused(device, dtype, key_dim, value_dim)) is not None:
        return why
    if factors not in FACTORS:
        return f"the Triton replay kernel knows no records in {factors}"
    if factors not in (None, "bf16") and padded(value_dim) * padded(key_dim) > _MAX_TILE:
        state = f"a state of K = {key_dim}, V = {value_dim}"
        return f"an update in {factors} has one scale, and {state} does not fit into one program"
    if quantize is None:
        return None
    if (why := refused_rounding("replay", quantize, key_dim, value_dim)) is not None:
        return why
    if tiles(quantize.fmt, key_dim, value_dim)["BLOCK_V"] * padded(key_dim) > _MAX_TILE:
        return f"a tile of {quantize} with K = {key_dim}, V = {value_dim} does not fit into one program"
    return None


def _run(
    tokens: Tokens,
    sequences: tuple[Tensor, Tensor, Tensor],
    read: Tensor | None,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    window: int,
    factors: str | None,
    anchor_format: str | None,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None,
) -> Run:
    assert identity is None and (factors is None or read is None)
    return Run(
        tokens,
        sequences,
        window,
        rule=rule,
        scale=scale,
        qk_l2norm=qk_l2norm,
        fmt=None if quantize is None else quantize.fmt,
        after=readout == "after_write",
        paired=read is not None,
        factors=factors,
        cast="" if read is None or anchor_format in (None, "fp32") else str(anchor_format),
    )


def _tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Tokens:
    if not all(x.dtype is torch.bfloat16 for x in (q, k, v)):
        # Triton's products of float64 refuse what was loaded in 16 bits.
        q, k = q.float(), k.float()
    return Tokens(_joined(q), _joined(k), _joined(v), None if g is None else _joined(g), beta)


def _joined(x: Tensor) -> Tensor:
    """`x`, channels or heads side by side: of others loads have another layout, sums its order, and bits differ."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _entering(anchor: Tensor, read: Tensor | None, ring: Ring | None, cursor: Tensor, rule: str) -> States:
    """The states, and read copies, that the first tokens find; with a cursor of 0 they keep their bits."""
    states, copies = anchor.contiguous(), None if read is None else read.contiguous()
    if ring is None:
        return States(states, copies)
    if copies is None:
        return States(through(written(ring, cursor), states))
    return States(through(recomputed(ring, cursor, rule), states), through(written(ring, cursor), copies))


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    anchor: Tensor,
    read: Tensor | None,
    ring: Ring | None,
    starts: Tensor,
    lengths: Tensor,
    cursor: Tensor,
    o: Tensor,
    *,
    rule: str,
    window: int,
    keep: bool,
    **options: Any,
) -> tuple[Tensor, Ring | None]:
    """As `kernels.reference.replay.forward`, where `supports` has no objection."""
    anchors = anchor.clone(memory_format=torch.contiguous_format)
    with on(q.device):
        ring = None if window == 1 else ring
        run = _run(_tokens(q, k, v, g, beta), (starts, lengths, cursor), read, rule=rule, window=window, **options)
        record = run.new(run.sequences, window - 1, run.value_heads, run.value_dim) if keep else None
        if run.count and anchor.numel():
            start, work = _entering(anchor, read, ring, cursor, rule), Stretch(run)
            source, target = (run.between(read is not None) for _ in range(2))
            for first in run.stretches(work.slots):
                work.prepare(first)
                work.walk(first, start, source, target, anchors=anchors, o=o, record=record)
                source, target = target, source
        if record is None:
            return anchors, None
        return anchors, left(ring, run, window, record, raw=read is not None)


@torch.no_grad()
def backward(
    grad_o: Tensor | None,
    grad_anchor: Tensor | None,
    grad_ring: Ring | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    anchor: Tensor,
    read: Tensor | None,
    ring: Ring | None,
    starts: Tensor,
    lengths: Tensor,
    cursor: Tensor,
    grads: dict[str, Tensor],
    *,
    rule: str,
    window: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Ring | None]:
    """As `kernels.reference.replay.backward`, where `supports` has no objection."""
    dstates = torch.zeros_like(anchor, memory_format=torch.contiguous_format)
    dcopies = None if read is None else torch.zeros_like(dstates)
    unflushed = cursor + lengths < window
    dring: Ring | None = None
    with on(q.device):
        carried = None if window == 1 else ring
        run = _run(_tokens(q, k, v, g, beta), (starts, lengths, cursor), read, rule=rule, window=window, **options)
        if run.count and anchor.numel():
            start = _entering(anchor, read, carried, cursor, rule)
            grad_o = None if grad_o is None else _joined(grad_o)
            _backward(run, start, grad_o, grad_anchor, grad_ring, dstates, dcopies, grads, window)
        if ring is not None:
            dring = Ring(*(None if x is None else torch.zeros_like(x) for x in ring))  # type: ignore[arg-type]
        if carried is not None and dring is not None and anchor.numel():
            _entering_backward(anchor, read, carried, cursor, rule, dstates, dcopies, dring)
    if grad_anchor is not None:
        dstates += torch.where(unflushed[:, None, None, None], grad_anchor, 0)
    if dring is not None and grad_ring is not None:
        for total, grad in zip(dring, handed_on(grad_ring, cursor, unflushed), strict=True):
            if total is not None and grad is not None:
                total += grad
    return dstates, dcopies, dring


def _backward(
    run: Run,
    start: States,
    grad_o: Tensor | None,
    grad_anchor: Tensor | None,
    grad_ring: Ring | None,
    dstates: Tensor,
    dcopies: Tensor | None,
    grads: dict[str, Tensor],
    window: int,
) -> None:
    """Gradients of the tokens to `grads`, of what they start from to `dstates` and `dcopies`."""
    drecord: tuple[Tensor, Tensor] | None = None
    if grad_ring is not None and window > 1:
        shapes = ((run.key_heads, run.key_dim), (run.value_heads, run.value_dim))
        dk, du = (
            run.new(run.sequences, window - 1, *shape).zero_() if x is None else x.contiguous()
            for x, shape in zip((grad_ring.k, grad_ring.u), shapes, strict=True)
        )
        drecord = (dk, du)
    into = _targets(run, grads)
    sources = before_stretches(run, start)
    work = Stretch(run, backward=True)
    given_anchor = None if grad_anchor is None else grad_anchor.contiguous()
    for first in reversed(run.stretches(work.slots)):
        work.prepare(first)
        work.walk(first, start, sources.pop(), None, o=grad_o, keep=True)
        work.retreat(first, grad_o, given_anchor, None if drecord is None else drecord[1], dstates, dcopies)
        work.deliver(first, grad_o, drecord, into)
    if grad_ring is not None:
        spread_(into, run, window, {"dg": grad_ring.g, "dv": grad_ring.v, "dbeta": grad_ring.beta})
    for name, total in grads.items():
        if name in into and into[name] is not total:
            total.copy_(into[name])


def _targets(run: Run, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where gradients are written: the caller's tensors, stand-ins for those with gaps between channels, or scratch."""
    found: dict[str, Tensor] = {}
    for name, x in zip(GRADS, run.tokens, strict=True):
        if x is None:
            continue
        given = grads.get(name)
        if given is None:
            given = torch.empty_like(x, memory_format=torch.contiguous_format)
        elif name != "dbeta" and given.stride(-1) != 1:
            # Rows of no sequence are never written, and keep what they have.
            given = given.clone(memory_format=torch.contiguous_format)
        found[name] = given
    return found


def _entering_backward(
    anchor: Tensor,
    read: Tensor | None,
    ring: Ring,
    cursor: Tensor,
    rule: str,
    dstates: Tensor,
    dcopies: Tensor | None,
    dring: Ring,
) -> None:
    """Adjoint of `_entering`, in place in `dstates`, `dcopies` and `dring`."""
    runs: list[tuple[Run, Tensor, Tensor, tuple[Tensor | None, ...]]]
    runs = [(written(ring, cursor), anchor, dstates, (dring.k, dring.u, dring.g, None))]
    if read is not None and dcopies is not None:
        runs = [
            (written(ring, cursor), read, dcopies, (dring.k, dring.u, dring.g, None)),
            (recomputed(ring, cursor, rule), anchor, dstates, (dring.k, dring.v, dring.g, dring.beta)),
        ]
    for run, states, dthrough, totals in runs:
        found = through_backward(run, states, dthrough)
        for name, total in zip(("dk", "dv", "dg", "dbeta"), totals, strict=True):
            if total is not None and name in found:
                total += found[name].view(total.shape)
