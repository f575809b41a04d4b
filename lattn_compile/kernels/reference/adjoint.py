"""A run of tokens in blocks, backward: the adjoint of `span.py`.

Spans are taken in reverse; each is computed again from the state at its start, so that neither a state per token nor an
autograd graph is ever kept. Within a span only the gradients of states and updates run from block to block
(`_retreat_states`); all else is for all its blocks at once. Rounding passes gradients on unchanged (semantics §7), so
where updates are rounded, the transposed triangular system is that of the rounded point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lattn_compile.kernels.reference.blocks import Pending
from lattn_compile.kernels.reference.decay import OperandGrads
from lattn_compile.kernels.reference.padding import gather, l2norm_backward, scatter_, split_heads
from lattn_compile.kernels.reference.span import Advance, Blocks, Run, Span, by_group, fold, unfold, weighted
from lattn_compile.kernels.reference.wy import unit_lower_inverse

__all__ = ["RecordGrads", "sweep_back"]


class RecordGrads(NamedTuple):
    """Gradients of what a call returns of its last tokens besides outputs and state.

    Attributes:
        pending: which tokens.
        k, u, g, v, beta: `[N, P, ...]`, by sequence and `Pending.place`: of the normalised keys `[.., H, K]`, the
            updates `[.., HV, V]` (of pairs, those of R), and of g, v and beta as the call gets them. None is zero.
    """

    pending: Pending
    k: Tensor | None
    u: Tensor | None
    g: Tensor | None
    v: Tensor | None
    beta: Tensor | None


def sweep_back(
    run: Run,
    state: Tensor,
    dcurrent: Tensor,
    grad_o: Tensor | None,
    grads: dict[str, Tensor],
    *,
    danchors: Tensor | None = None,
    records: RecordGrads | None = None,
) -> None:
    """Takes the gradient of a run's state from its end to its start.

    Args:
        state: `[N, HV, K, V]`, where the run starts from.
        dcurrent: `[N, H, K, G V]`, of the running state at the end; at the start on return.
        grad_o: `[M, HV, V]`, of the outputs; rows outside the sequences are not read. None is zero.
        grads: as `chunk.backward` takes them.
        danchors: `[N, HV, K, V]`, of the `anchors` of `Run.advance`. records: of the last tokens.
    """
    current = run.load(state)
    kept: list[tuple[Tensor, Advance | None]] = []
    for span in run.spans:
        before, solved = current[: run.active(span)].clone(), None
        if span is not run.spans[-1]:
            solved = run.advance(span, run.prepare(span, reads=False), current, keep=False)
        # Rounded updates are solved for row by row, which is dear; to keep them takes as much as v and again as o.
        kept.append((before, solved if run.rounds_updates else None))
    for span in reversed(run.spans):
        blocks = run.prepare(span, reads=True)
        before, solved = kept.pop()
        advance = run.advance(span, blocks, before, solved=solved)
        if grad_o is None:
            dout = state.new_zeros(*blocks.slots.index.shape, *run.tokens.v.shape[1:])
        else:
            dout = gather(grad_o, blocks.slots, run.dtype)
        pending = None if records is None else records.pending.within(*run.plan.block_rows(span))
        ours = None if records is None or pending is None else records._replace(pending=pending)
        for name, rows in _retreat(run, span, blocks, advance, dout, dcurrent, danchors, ours).items():
            if name in grads:
                scatter_(grads[name], blocks.slots, rows)


def _retreat(
    run: Run,
    span: Span,
    blocks: Blocks,
    advance: Advance,
    dout: Tensor,
    dcurrent: Tensor,
    danchors: Tensor | None,
    records: RecordGrads | None,
) -> dict[str, Tensor]:
    """Adjoint of `prepare`, `advance` and `outputs` together.

    Args:
        dout: `[B, b, HV, V]`, of the outputs.
        dcurrent: `[N, H, K, G V]`, of the running state; taken from the span's end to its start in place.

    Returns:
        Gradients of the span's tokens, `[B, b, ...]`, named as `chunk.backward` names them.
    """
    decay, beta, groups, end_slot = blocks.decay, blocks.beta, run.groups, run.plan.end_slot
    # Under after_write the last token before a grid line reads the next block's state instead of this block's.
    dread = None
    if advance.written is not None:
        dread = split_heads(dout[advance.ends, end_slot], run.key_heads, 1)
        dout = dout.index_put((advance.ends, torch.full_like(advance.ends, end_slot)), dout.new_zeros(()))
    dout = run.values(dout)
    if run.paired:
        dout = pad(dout, (0, dout.shape[-1]))
    dinside = fold(weighted(dout, decay.from_start))
    dupdates = blocks.reads.mT @ dout
    down = None
    if advance.exact is not None:
        down = (dout * advance.exact).sum(-1)
        dupdates += decay.own() * dout
    if records is not None and records.u is not None:
        pending = records.pending
        read_half = dupdates[..., : records.u.shape[-1]]
        read_half[pending.row, :, :, pending.slot] += split_heads(_of(pending, records.u), run.heads, 1)
    dstates, carried, drhs = _retreat_states(run, span, blocks, dinside, dupdates, dread, dcurrent, danchors)

    # `drhs` is the gradient of beta (v - S~^T k): all blocks at once from here on.
    dv = weighted(drhs, beta)
    residual, derased, dsystem = blocks.v, None, None
    if blocks.overlaps is not None:
        seen = unfold(decay.k_in @ advance.states, groups)
        residual = blocks.v - weighted(seen, decay.from_start)
        derased = -weighted(dv, decay.from_start)
        dsystem = -(drhs.double() @ advance.updates.double().mT)
    rows: dict[str, Tensor] = {"dv": (_sum_halves(dv) if run.paired else dv).permute(0, 3, 1, 2, 4).flatten(2, 3)}
    if beta is not None:
        dbeta = (drhs * residual).sum(-1)
        if dsystem is not None and blocks.overlaps is not None:
            dbeta += (dsystem * blocks.overlaps).sum(-1)
            dsystem = dsystem * beta
        rows["dbeta"] = dbeta.permute(0, 3, 1, 2).flatten(2, 3)

    dq_in = dinside @ advance.states.mT
    dk_in = torch.zeros_like(dq_in) if derased is None else fold(derased) @ advance.states.mT
    dk_out = fold(weighted(advance.updates, decay.to_end)) @ dstates.mT
    from_start = to_end = whole = None
    if decay.from_start is not None:
        from_start = (unfold(dinside, groups) * unfold(decay.q_in @ advance.states, groups)).sum(-1)
        if derased is not None:
            from_start += (derased * seen).sum(-1)
        to_end = (advance.updates * carried).sum(-1)
    if decay.whole is not None:
        product = by_group(dstates, groups) * by_group(advance.states, groups) * decay.whole
        whole = product.sum((3, 4)) if run.by_channel else product.sum((2, 4))
    operands = OperandGrads(dq_in, dk_in, dk_out, dout @ advance.updates.mT, dsystem, down, from_start, to_end, whole)
    dq, dk, dg = decay.backward(operands, blocks.reads, blocks.overlaps)
    if dread is not None and advance.written is not None:
        dq[advance.ends, :, end_slot] += torch.einsum("ehrkv,ehrv->ehk", advance.written, dread)
    if records is not None and records.k is not None:
        dk[records.pending.row, :, records.pending.slot] += _of(records.pending, records.k)
    dq = dq * run.scale
    if blocks.q_rstd is not None and blocks.k_rstd is not None:
        dq, dk = l2norm_backward(dq, blocks.q, blocks.q_rstd), l2norm_backward(dk, blocks.k, blocks.k_rstd)
    rows |= {"dq": dq.transpose(1, 2), "dk": dk.transpose(1, 2)}
    if dg is not None:
        rows["dg"] = dg.transpose(1, 2) if run.by_channel else dg.permute(0, 3, 1, 2).flatten(2, 3)
    if records is not None:
        for name, grad in (("dg", records.g), ("dv", records.v), ("dbeta", records.beta)):
            if grad is not None and name in rows:
                rows[name][records.pending.row, records.pending.slot] += _of(records.pending, grad)
    return rows


def _retreat_states(
    run: Run,
    span: Span,
    blocks: Blocks,
    dinside: Tensor,
    dupdates: Tensor,
    dread: Tensor | None,
    dcurrent: Tensor,
    danchors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of `_retreat` that runs from block to block.

    Returns:
        Gradients of the state after each block `[B, H, K, G V]`, what of it reaches each update, and of
        `beta (v - S~^T k)`, both `[B, H, G, b, V]`.
    """
    decay, writes = blocks.decay, run.writes
    inverse = blocks.inverse
    if inverse is None and blocks.system is not None:
        inverse = unit_lower_inverse(blocks.system)
    dqueried = decay.q_in.mT @ dinside
    dstates = torch.empty_like(dqueried)
    carried, drhs = torch.empty_like(dupdates), torch.empty_like(dupdates)
    unread = 0 if dread is None else dread.shape[0]
    for step in reversed(range(*span)):
        rows = run.rows(span, step)
        dstate = dcurrent[: rows.stop - rows.start]
        lines = run.plan.ends[step]
        if dread is not None and lines is not None:
            here = slice(unread - lines.rows.numel(), unread)
            unread = here.start
            read = run.scale * blocks.q[rows][lines.rows, :, run.plan.end_slot]
            dstate[lines.rows] += run.shared(torch.einsum("ehk,ehrv->ehrkv", read, dread[here]).flatten(1, 2))
        if danchors is not None and lines is not None and lines.last is not None:
            ends = lines.rows[lines.last]
            anchor = by_group(dstate, run.groups)[..., -danchors.shape[-1] :]
            anchor[ends] += by_group(run.shared(danchors[lines.owner[lines.last]]), run.groups)
        if lines is not None and writes is not None and run.paired:
            dwritten = by_group(dstate[lines.rows], run.groups)
            dstate[lines.rows] = writes.state_backward(dwritten).flatten(-2)
        dstates[rows] = dstate
        carried[rows] = weighted(unfold(decay.k_out[rows] @ dstate, run.groups), decay.to_end, rows)
        if decay.whole is not None:
            by_group(dstate, run.groups).mul_(decay.whole[rows])
        dstate += dqueried[rows]
        dupdate = dupdates[rows] + carried[rows]
        if inverse is None:
            drhs[rows] = dupdate
        else:
            drhs[rows] = (inverse[rows].mT @ dupdate.double()).to(run.dtype)
            erase = weighted(weighted(drhs[rows], blocks.beta, rows), decay.from_start, rows)
            dstate -= decay.k_in[rows].mT @ fold(erase)
    return dstates, carried, drhs


def _of(pending: Pending, x: Tensor) -> Tensor:
    """`x [N, P, ...]` of some pending tokens, `[tokens, ...]`."""
    return x[pending.sequence, pending.place]


def _sum_halves(x: Tensor) -> Tensor:
    """`[..., 2 V]` of pairs, whose halves come from one thing, to its `[..., V]`."""
    first, second = x.tensor_split(2, -1)
    return first + second
