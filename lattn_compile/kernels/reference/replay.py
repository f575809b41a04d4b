"""Windowed reference: replay and two_precision (semantics §5), forward and explicit backward, by matrix products.

**replay.** A window of W tokens starts from a stored anchor A; its updates are written beside it, rounded to `factors`
or not, and the window's last token flushes them into A, which is rounded. That is the chunk form (`chunk.py`) on a grid
of W with two kinds of key: k reads, the rounded k^ writes,

    u_i = beta_i (v_i - S~^T k_i - sum_{j<i} (k_i . w k^_j) u^_j)         rule "delta"       w: decay between the two
    o_i = S~^T q_i + sum_{j<i} (q_i . w k^_j) u^_j + (q_i . k_i) u_i      S~: the block's first state, decayed
    S'  = whole S + sum_j w k^_j u^_j^T

and, since u^_i is a rounding of u_i, the triangular system is solved row by row instead of by its inverse. With
`factors=None` it is the chunk form itself, block by block.

**two_precision.** Two states run side by side, as one of pairs `[R | A]`: they share keys, gates and write strengths,
so one decay and one inverse serve both. Each has updates of its own; outputs are read from R, and a flush makes R the
rounded copy of A. So A is the recurrence from the raw inputs, and R the anchor's read copy plus the window's updates.

A call that starts inside a window first brings the stored states up to date (`records.py`). With an empty ring nothing
is computed, so a run cut at flushes has the bits of the uncut one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference.adjoint import RecordGrads, sweep_back
from lattn_compile.kernels.reference.padding import scatter_
from lattn_compile.kernels.reference.records import entering, entering_backward, handed_on, left, record_
from lattn_compile.kernels.reference.span import Run, Tokens
from lattn_compile.kernels.reference.writes import Writes
from lattn_compile.ring import Ring

__all__ = ["backward", "forward"]


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
    scale: float,
    qk_l2norm: bool,
    window: int,
    factors: str | None,
    anchor_format: str | None,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None,
    keep: bool,
) -> tuple[Tensor, Ring | None]:
    """Runs every sequence over its tokens.

    Args:
        q, k, v, g, beta, starts, lengths, o: as `chunk.forward` takes them.
        anchor: `[N, HV, K, V]`, the stored states, float32 or float64, which is also the dtype of all arithmetic. read:
            their read copies, which makes this two_precision; None is replay. Neither is changed.
        ring: the records of a window that has begun; may be None if there are none.
        cursor: int64 `[N]`, how many, `0 <= cursor < window`.
        rule, scale, qk_l2norm: as `chunk.forward` takes them.
        window: W, tokens between two flushes. factors: format of k and u as they are written, None: as they are.
        anchor_format: two_precision: the plain format that A is cast to at a flush; None casts nothing.
        quantize: of A at a flush; two_precision: of its read copy. None rounds nothing.
        readout: "before_write" or "after_write": a token reads its update, and the window's last one the anchor, as
            written. two_precision knows "before_write" only.
        identity: as `chunk.forward` takes it.
        keep: whether the ring is wanted.

    Returns:
        The anchors `[N, HV, K, V]`, new memory: what the last flush of the call stored, or the state before that write
        if `quantize` is not idempotent (two_precision: always A as it is stored); without a flush, the anchor bit for
        bit. And the ring, new memory, with `(cursor + lengths) % window` records; None unless `keep`.
    """
    run = Run(
        Tokens(q, k, v, g, beta),
        (starts, lengths, cursor),
        anchor.dtype,
        rule=rule,
        scale=scale,
        qk_l2norm=qk_l2norm,
        writes=_writes(window, factors, anchor_format, quantize, readout, identity, read),
    )
    current = run.load(entering(anchor, read, ring, cursor, rule))
    anchors = anchor.clone(memory_format=torch.contiguous_format)
    records = left(ring, run, raw=read is not None) if keep else None
    pending = run.plan.pending()
    for span in run.spans:
        blocks = run.prepare(span, reads=True)
        advance = run.advance(span, blocks, current, anchors=anchors)
        scatter_(o, blocks.slots, run.outputs(blocks, advance))
        if records is not None:
            record_(records, run, blocks, advance, pending.within(*run.plan.block_rows(span)))
    return anchors, records


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
    scale: float,
    qk_l2norm: bool,
    window: int,
    factors: str | None,
    anchor_format: str | None,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None,
) -> tuple[Tensor, Tensor | None, Ring | None]:
    """Adjoint of `forward`, from the same inputs. Rounding is an identity (straight-through, semantics §7).

    Args:
        grad_o: `[M, HV, V]`, gradient of `o`; rows outside the sequences are not read. None is zero.
        grad_anchor: `[N, HV, K, V]`, of the returned anchors. None is zero.
        grad_ring: of the returned ring; slots at and behind its cursor are not read. None, also of a part, is zero.
        grads: as `chunk.backward` takes them.
        Others as in `forward`.

    Returns:
        Gradients of anchor, read and ring, new memory; None for what was None.
    """
    run = Run(
        Tokens(q, k, v, g, beta),
        (starts, lengths, cursor),
        anchor.dtype,
        rule=rule,
        scale=scale,
        qk_l2norm=qk_l2norm,
        writes=_writes(window, factors, anchor_format, quantize, readout, identity, read),
    )
    state = entering(anchor, read, ring, cursor, rule)
    dcurrent = run.load(torch.zeros_like(state))
    records = None if grad_ring is None else RecordGrads(run.plan.pending(), *grad_ring)
    sweep_back(run, state, dcurrent, grad_o, grads, danchors=grad_anchor, records=records)
    danchor, dread, dring = entering_backward(run.unload(dcurrent), anchor, read, ring, cursor, rule)
    unflushed = cursor + lengths < window
    if grad_anchor is not None:
        danchor += grad_anchor.masked_fill(~unflushed[:, None, None, None], 0)
    if dring is not None and grad_ring is not None:
        for total, grad in zip(dring, handed_on(grad_ring, cursor, unflushed), strict=True):
            if total is not None and grad is not None:
                total += grad
    return danchor, dread, dring


def _writes(
    window: int,
    factors: str | None,
    anchor_format: str | None,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None,
    read: Tensor | None,
) -> Writes:
    assert read is None or readout == "before_write", readout
    anchor = None if anchor_format is None else parse(anchor_format, argument="anchor")
    return Writes(window, quantize, identity, readout == "after_write", factors, read is not None, anchor)
