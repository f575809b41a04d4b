"""Chunked reference: a run of tokens by matrix products, forward and explicit backward.

Per block of at most 64 tokens, with `S` the state before it and the decayed products of `decay.py`:

    U  = (I + beta overlaps)^-1 beta (V - k_in S)        rule "delta"      (U = beta V for "additive")
    O  = q_in S + reads U
    S' = whole S + k_out^T U

Everything that does not need `S` is computed for many blocks at once; only `U` and `S'` run from block to block. The
backward walks the blocks in reverse with the adjoint of these three lines, recomputing each span of blocks from the
state at its start, so that neither a state per token nor an autograd graph is ever kept.

(Yang et al. 2024, "Gated Delta Networks", section 3.3, for per-head decay; Kimi Team 2025, "Kimi Linear", section 3,
for per-channel decay.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lattn_compile.kernels.reference.blocks import Schedule, schedule
from lattn_compile.kernels.reference.decay import ChannelDecay, HeadDecay, OperandGrads
from lattn_compile.kernels.reference.padding import Slots, gather, l2norm, l2norm_backward, scatter_, split_heads
from lattn_compile.kernels.reference.wy import unit_lower_inverse

if TYPE_CHECKING:
    from lattn_compile.formats import Format

__all__ = ["backward", "forward"]

SPAN_BUDGET = 1 << 22
"""Elements of the largest intermediates that are alive at a time (16 MB in fp32): bounds memory, and keeps a span's
operands near the cache."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    o: Tensor,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Format | None,
    readout: str,
) -> Tensor:
    """Runs every sequence over its tokens.

    Args:
        q, k: `[M, H, K]`, flat tokens, any float dtype and strides.
        v: `[M, HV, V]`, HV a multiple of H.
        g: log decay of one step, `<= 0`, -inf legal: `[M, HV]`, `[M, HV, K]`, or None.
        beta: write strength `[M, HV]`, or None for 1.
        state: `[N, HV, K, V]`, float32 or float64, which is also the dtype of all arithmetic. Not changed.
        starts, lengths: int64 `[N]`; sequence i is the tokens `starts[i] : starts[i] + lengths[i]`. Disjoint.
        offsets: int64 `[N]`, tokens since the last line of the quantization grid; None is 0.
        o: `[M, HV, V]`, receives the outputs of the sequences' tokens; other rows are left as they are.
        rule: "delta" or "additive". scale: of the queries. qk_l2norm: normalise q and k first.
        chunk_size: tokens between two grid lines, any positive int; read only when `quantize` is given.
        quantize: the state becomes `quantize.qdq(state)` at each grid line; None is exact.
        readout: "before_write" or "after_write": the last token before a grid line reads the rounded state.

    Returns:
        The final state `[N, HV, K, V]`, new memory; of a sequence of length 0, its initial state bit for bit.
    """
    run = _Run(q, k, v, g, beta, state, starts, lengths, offsets, rule, scale, qk_l2norm, chunk_size, quantize, readout)
    current = run.load(state)
    for span in run.spans:
        blocks = run.prepare(span, reads=True)
        sweep = run.sweep(span, blocks, current)
        out = _unfold(blocks.decay.q_in @ sweep.states, run.groups)
        if blocks.decay.from_start is not None:
            out = out * blocks.decay.from_start[..., None]
        out = out + blocks.reads @ sweep.updates
        out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
        if sweep.written is not None:
            read = blocks.q[sweep.ends, :, run.plan.end_slot]
            out[sweep.ends, run.plan.end_slot] = torch.einsum("ehk,ehrkv->ehrv", read, sweep.written).flatten(1, 2)
        scatter_(o, blocks.slots, out)
    return run.unload(current)


def backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    grads: dict[str, Tensor],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Format | None,
    readout: str,
) -> Tensor:
    """Adjoint of `forward`, from the same inputs. Rounding is an identity (straight-through, semantics §7).

    Args:
        grad_o: `[M, HV, V]`, gradient of `o`; rows outside the sequences are not read. None is zero.
        grad_final: `[N, HV, K, V]`, gradient of the final state. None is zero.
        grads: by name (`dq dk dv dg dbeta`), tensors of the inputs' shapes that receive the gradients of the sequences'
            tokens; other rows are left as they are. A missing name is not written.
        Others as in `forward`.

    Returns:
        Gradient of the initial state, `[N, HV, K, V]`, new memory.
    """
    run = _Run(q, k, v, g, beta, state, starts, lengths, offsets, rule, scale, qk_l2norm, chunk_size, quantize, readout)
    current = run.load(state)
    kept = []
    for span in run.spans:
        kept.append(current[: run.active(span)].clone())
        if span is not run.spans[-1]:
            run.sweep(span, run.prepare(span, reads=False), current, keep=False)
    dcurrent = torch.zeros_like(current) if grad_final is None else run.load(grad_final)
    for span in reversed(run.spans):
        blocks = run.prepare(span, reads=True)
        sweep = run.sweep(span, blocks, kept.pop())
        dout = None if grad_o is None else gather(grad_o, blocks.slots, state.dtype)
        rows = run.adjoint(span, blocks, sweep, dout, dcurrent)
        for name, value in rows.items():
            if name in grads and value is not None:
                scatter_(grads[name], blocks.slots, value)
    return run.unload(dcurrent)


@dataclass(slots=True)
class _Blocks:
    """What a span of blocks needs besides the state. B block rows, b slots, H key heads of the products, G groups.

    q, k are normalised, q is scaled, both `[B, b, model's key heads, K]` transposed to heads first.
    """

    slots: Slots
    q: Tensor
    k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    v: Tensor  # [B, H, G, b, V]
    beta: Tensor | None  # [B, H, G, b, 1]
    decay: HeadDecay | ChannelDecay
    overlaps: Tensor | None  # [B, H, G, b, b], delta
    inverse: Tensor | None  # [B, H, G, b, b], delta
    reads: Tensor  # [B, H, G, b, b]; empty when not asked for


@dataclass(slots=True)
class _Sweep:
    """States and updates of a span, block by block."""

    states: Tensor  # [B, H, K, G V], before each block
    updates: Tensor  # [B, H, G, b, V]
    ends: Tensor  # int64 [E], block rows whose last token reads the rounded state
    written: Tensor | None  # [E, model's key heads, R, K, V], the rounded states; None unless after_write


class _Run:
    """One call: the options, the schedule, and the steps that forward and backward share.

    The running state is `[N, H, K, G V]` in schedule order, with the value heads of a key head side by side: a product
    with a key-head operand then serves all of them, and its adjoint sums over them, without a repeated q or k.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        starts: Tensor,
        lengths: Tensor,
        offsets: Tensor | None,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        chunk_size: int,
        quantize: Format | None,
        readout: str,
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.dtype = state.dtype
        self.delta, self.scale, self.qk_l2norm = rule == "delta", scale, qk_l2norm
        self.quantize, self.after_write = quantize, quantize is not None and readout == "after_write"
        self.key_heads, self.value_heads = q.shape[1], v.shape[1]
        self.by_channel = g is not None and g.dim() == 3
        self.heads = self.value_heads if self.by_channel else self.key_heads
        self.groups = self.value_heads // self.heads
        self.plan: Schedule = schedule(starts, lengths, offsets, None if quantize is None else chunk_size)
        size, key, value = self.plan.index.shape[1], q.shape[2], v.shape[2]
        self.spans = self.plan.spans(self.value_heads * (key * value + size * (size + key + value)), SPAN_BUDGET)

    def load(self, state: Tensor) -> Tensor:
        """`[N, HV, K, V]` to the running layout, new memory."""
        rows = state.to(self.dtype).index_select(0, self.plan.order)
        return _fold(split_heads(rows, self.heads, 1))

    def unload(self, current: Tensor) -> Tensor:
        """Inverse of `load`."""
        state = _unfold(current, self.groups).flatten(1, 2)
        return torch.empty_like(state).index_copy_(0, self.plan.order, state)

    def active(self, span: tuple[int, int]) -> int:
        """Sequences that still run at the span's first step."""
        return self.plan.steps[span[0] + 1] - self.plan.steps[span[0]]

    def prepare(self, span: tuple[int, int], *, reads: bool) -> _Blocks:
        slots = self.plan.slots(*span)
        q, k = (gather(x, slots, self.dtype).transpose(1, 2).contiguous() for x in (self.q, self.k))
        v = split_heads(gather(self.v, slots, self.dtype), self.heads, 2).permute(0, 2, 3, 1, 4).contiguous()
        q_rstd = k_rstd = None
        if self.qk_l2norm:
            (q, q_rstd), (k, k_rstd) = l2norm(q), l2norm(k)
        q = q * self.scale
        beta = None
        if self.beta is not None:
            rows = split_heads(gather(self.beta, slots, self.dtype), self.heads, 2)
            beta = rows.permute(0, 2, 3, 1)[..., None].contiguous()
        gate = None if self.g is None else gather(self.g, slots, self.dtype).transpose(1, 2).contiguous()
        decay: HeadDecay | ChannelDecay
        if gate is not None and self.by_channel:
            decay = ChannelDecay(q, k, gate)
        else:
            decay = HeadDecay(q, k, None if gate is None else split_heads(gate, self.heads, 1), self.groups)
        overlaps = inverse = None
        if self.delta:
            overlaps = decay.overlaps()
            inverse = unit_lower_inverse(overlaps if beta is None else overlaps * beta)
        matrix = decay.reads() if reads else q.new_empty(0)
        return _Blocks(slots, q, k, q_rstd, k_rstd, v, beta, decay, overlaps, inverse, matrix)

    def sweep(self, span: tuple[int, int], blocks: _Blocks, current: Tensor, *, keep: bool = True) -> _Sweep:
        """Runs the state through the span's blocks, in place in `current [>= active, H, K, G V]`."""
        decay, steps = blocks.decay, self.plan.steps
        count = blocks.v.shape[0]
        states = current.new_empty(count if keep else 0, *current.shape[1:])
        scaled = blocks.v if blocks.beta is None else blocks.v * blocks.beta
        # In place of beta v_i for the additive rule, filled block by block for the delta rule.
        updates = torch.empty_like(scaled) if self.delta else scaled
        ends, written = [], []
        for step in range(*span):
            rows = slice(steps[step] - steps[span[0]], steps[step + 1] - steps[span[0]])
            state = current[: rows.stop - rows.start]
            if keep:
                states[rows] = state
            if blocks.inverse is not None:
                erased = _unfold(decay.k_in[rows] @ state, self.groups)
                if decay.from_start is not None:
                    erased = erased * decay.from_start[rows][..., None]
                if blocks.beta is not None:
                    erased = erased * blocks.beta[rows]
                updates[rows] = blocks.inverse[rows] @ (scaled[rows] - erased)
            write = updates[rows] if decay.to_end is None else updates[rows] * decay.to_end[rows][..., None]
            if decay.whole is not None:
                _by_group(state, self.groups).mul_(decay.whole[rows])
            state += decay.k_out[rows].mT @ _fold(write)
            at_line = self.plan.ends[step]
            if at_line is not None and self.quantize is not None:
                rounded = self.quantize.qdq(_unfold(state[at_line], self.groups).flatten(1, 2))
                state[at_line] = _fold(split_heads(rounded, self.heads, 1))
                if self.after_write and keep:
                    ends.append(at_line + rows.start)
                    written.append(split_heads(rounded, self.key_heads, 1))
        if not written:
            return _Sweep(states, updates, self.plan.order.new_empty(0), None)
        return _Sweep(states, updates, torch.cat(ends), torch.cat(written))

    def adjoint(
        self, span: tuple[int, int], blocks: _Blocks, sweep: _Sweep, dout: Tensor | None, dcurrent: Tensor
    ) -> dict[str, Tensor | None]:
        """Gradients of the span's tokens `[B, b, ...]`; takes `dcurrent` from the span's end to its start in place."""
        decay, steps, groups, beta = blocks.decay, self.plan.steps, self.groups, blocks.beta
        if dout is None:
            dout = blocks.v.new_zeros(*blocks.slots.index.shape, self.value_heads, blocks.v.shape[-1])
        # What the last token before a grid line reads under after_write is the next block's state, not this block's.
        dread = None
        if sweep.written is not None:
            dout = dout.clone()
            dread = split_heads(dout[sweep.ends, self.plan.end_slot], self.key_heads, 1)
            dout[sweep.ends, self.plan.end_slot] = 0
        dout = split_heads(dout, self.heads, 2).permute(0, 2, 3, 1, 4).contiguous()
        dinside = dout if decay.from_start is None else dout * decay.from_start[..., None]

        # Run backwards: everything that needs the gradient of the state after the block.
        dupdates = blocks.reads.mT @ dout
        dinside = _fold(dinside)
        dqueried = decay.q_in.mT @ dinside
        dstates = torch.empty_like(sweep.states)
        carried = torch.empty_like(dupdates)
        erase = torch.empty_like(dupdates) if self.delta else dupdates
        line = 0 if dread is None else dread.shape[0]
        for step in reversed(range(*span)):
            rows = slice(steps[step] - steps[span[0]], steps[step + 1] - steps[span[0]])
            dstate = dcurrent[: rows.stop - rows.start]
            at_line = self.plan.ends[step]
            if dread is not None and at_line is not None:
                here = slice(line - at_line.numel(), line)
                line = here.start
                read = blocks.q[rows][at_line, :, self.plan.end_slot]
                seen = torch.einsum("ehk,ehrv->ehrkv", read, dread[here]).flatten(1, 2)
                dstate[at_line] += _fold(split_heads(seen, self.heads, 1))
            dstates[rows] = dstate
            through = _unfold(decay.k_out[rows] @ dstate, groups)
            carried[rows] = through if decay.to_end is None else through * decay.to_end[rows][..., None]
            if decay.whole is not None:
                _by_group(dstate, groups).mul_(decay.whole[rows])
            dstate += dqueried[rows]
            if blocks.inverse is not None:
                drhs = blocks.inverse[rows].mT @ (dupdates[rows] + carried[rows])
                erase[rows] = drhs
                if beta is not None:
                    drhs = drhs * beta[rows]
                if decay.from_start is not None:
                    drhs = drhs * decay.from_start[rows][..., None]
                dstate -= decay.k_in[rows].mT @ _fold(drhs)
        if blocks.inverse is None:
            erase = dupdates + carried

        # All blocks at once: `erase` is the gradient of beta (v - S~^T k), per token.
        dv = erase if beta is None else erase * beta
        dinverse = None
        residual = blocks.v
        derased = None
        if blocks.overlaps is not None:
            derased = -dv if decay.from_start is None else -dv * decay.from_start[..., None]
            seen_states = _unfold(decay.k_in @ sweep.states, groups)
            dinverse = -(erase @ sweep.updates.mT)
            residual = blocks.v - (
                seen_states if decay.from_start is None else seen_states * decay.from_start[..., None]
            )
        dbeta = None
        if beta is not None:
            dbeta = (erase * residual).sum(-1)
            if dinverse is not None and blocks.overlaps is not None:
                dbeta += (dinverse * blocks.overlaps).sum(-1)
                dinverse = dinverse * beta
            dbeta = dbeta.permute(0, 3, 1, 2).flatten(2, 3)
        write = sweep.updates if decay.to_end is None else sweep.updates * decay.to_end[..., None]
        dq_in = dinside @ sweep.states.mT
        dk_in = torch.zeros_like(dq_in) if derased is None else _fold(derased) @ sweep.states.mT
        from_start = to_end = whole = None
        if decay.whole is not None:
            product = _by_group(dstates, groups) * _by_group(sweep.states, groups) * decay.whole
            whole = product.sum((3, 4)) if self.by_channel else product.sum((2, 4))
        if decay.from_start is not None:
            from_start = (_unfold(dinside, groups) * _unfold(decay.q_in @ sweep.states, groups)).sum(-1)
            if derased is not None:
                from_start += (derased * seen_states).sum(-1)
            to_end = (sweep.updates * carried).sum(-1)
        dq, dk, dg = decay.backward(
            OperandGrads(
                q_in=dq_in,
                k_in=dk_in,
                k_out=_fold(write) @ dstates.mT,
                reads=dout @ sweep.updates.mT,
                overlaps=dinverse,
                from_start=from_start,
                to_end=to_end,
                whole=whole,
            ),
            blocks.reads,
            blocks.overlaps,
        )
        if dread is not None and sweep.written is not None:
            dq[sweep.ends, :, self.plan.end_slot] += torch.einsum("ehrkv,ehrv->ehk", sweep.written, dread)
        dq = dq * self.scale
        if blocks.q_rstd is not None and blocks.k_rstd is not None:
            dq = l2norm_backward(dq, blocks.q / self.scale, blocks.q_rstd)
            dk = l2norm_backward(dk, blocks.k, blocks.k_rstd)
        if dg is not None:
            dg = dg.transpose(1, 2) if self.by_channel else dg.permute(0, 3, 1, 2).flatten(2, 3)
        dv = dv.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return {"dq": dq.transpose(1, 2), "dk": dk.transpose(1, 2), "dv": dv, "dg": dg, "dbeta": dbeta}


def _fold(x: Tensor) -> Tensor:
    """`[B, H, G, n, V]` to `[B, H, n, G V]`."""
    return x.transpose(2, 3).flatten(3)


def _unfold(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` to `[B, H, G, n, V]`, a view."""
    return _by_group(x, groups).transpose(2, 3)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` viewed as `[B, H, n, G, V]`."""
    return x.unflatten(-1, (groups, x.shape[-1] // groups))
