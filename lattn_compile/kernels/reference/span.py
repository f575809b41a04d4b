"""A span of blocks of the chunked reference: its operands, its forward sweep, and the adjoint of both.

`Run.prepare` computes what does not depend on the state, for all blocks of a span at once. `Run.advance` takes the
state through the blocks one by one, `Run.retreat` takes the gradient of the state back through them. The formulas are
in `chunk.py`, the decayed products in `decay.py`.

Shapes: B block rows, b slots of a block, H key heads of the products and G value heads that share one (`H` is the
model's and `G = HV / H` unless the decay is per channel, then `H = HV, G = 1`; see `decay.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lattn_compile.kernels.reference.blocks import schedule
from lattn_compile.kernels.reference.decay import ChannelDecay, HeadDecay, OperandGrads
from lattn_compile.kernels.reference.padding import Slots, gather, l2norm, l2norm_backward, split_heads
from lattn_compile.kernels.reference.wy import unit_lower_inverse

if TYPE_CHECKING:
    from lattn_compile.formats import Format

__all__ = ["SPAN_BUDGET", "Run", "Tokens"]

SPAN_BUDGET = 1 << 21
"""Elements of the largest intermediates that are alive at a time (8 MB in fp32): bounds memory, and keeps a span's
operands near the cache."""

Span = tuple[int, int]
"""Steps `first <= step < last` of the schedule."""


class Tokens(NamedTuple):
    """Flat inputs as `chunk.forward` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a span's blocks need besides the state.

    Attributes:
        q, k: `[B, model's key heads, b, K]`, normalised if asked for; q not yet scaled.
        q_rstd, k_rstd: reciprocal norms for the backward, None where q and k came as they are.
        v: `[B, H, G, b, V]`. beta: `[B, H, G, b, 1]` or None.
        decay: the decayed operands, of the scaled q.
        overlaps, inverse: float64 `[B, H, G, b, b]`, None for the additive rule; inverse is `(I + beta overlaps)^-1`.
        reads: `[B, H, G, b, b]`; empty when it was not asked for.
    """

    slots: Slots
    q: Tensor
    k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    v: Tensor
    beta: Tensor | None
    decay: HeadDecay | ChannelDecay
    overlaps: Tensor | None
    inverse: Tensor | None
    reads: Tensor


@dataclass(frozen=True, slots=True)
class Advance:
    """A span's forward sweep.

    Attributes:
        states: `[B, H, K, G V]`, the state before each block.
        updates: U of each block, `[B, H, G, b, V]`.
        ends: int64 `[E]`, block rows whose last token reads the rounded state; written: `[E, model's key heads, R, K,
            V]`, those states. Empty unless after_write.
    """

    states: Tensor
    updates: Tensor
    ends: Tensor
    written: Tensor | None


class Run:
    """One call: its options, its schedule, and the steps that forward and backward share.

    The running state is `[N, H, K, G V]` in schedule order, with the value heads of a key head side by side: a product
    with a key-head operand then serves all of them, and its adjoint sums over them, without a repeated q or k.
    """

    def __init__(
        self,
        tokens: Tokens,
        state: Tensor,
        sequences: tuple[Tensor, Tensor, Tensor | None],
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        chunk_size: int,
        quantize: Format | None,
        readout: str,
    ) -> None:
        self.tokens, self.dtype = tokens, state.dtype
        self.delta, self.scale, self.qk_l2norm = rule == "delta", scale, qk_l2norm
        self.quantize, self.after_write = quantize, quantize is not None and readout == "after_write"
        self.key_heads, self.value_heads = tokens.q.shape[1], tokens.v.shape[1]
        self.by_channel = tokens.g is not None and tokens.g.dim() == 3
        self.heads = self.value_heads if self.by_channel else self.key_heads
        self.groups = self.value_heads // self.heads
        self.plan = schedule(*sequences, None if quantize is None else chunk_size)
        size, key, value = self.plan.index.shape[1], tokens.q.shape[2], tokens.v.shape[2]
        block_cost = self.value_heads * (key * value + size * (size + key + value))
        self.spans: list[Span] = self.plan.spans(block_cost, SPAN_BUDGET)

    def load(self, state: Tensor) -> Tensor:
        """`[N, HV, K, V]` to the running layout, new memory."""
        return self._shared(state.to(self.dtype).index_select(0, self.plan.order))

    def unload(self, current: Tensor) -> Tensor:
        """Inverse of `load`."""
        state = self._by_value_head(current)
        return state.new_empty(state.shape).index_copy_(0, self.plan.order, state)

    def active(self, span: Span) -> int:
        """Sequences that still run at the span's first step."""
        return self.plan.steps[span[0] + 1] - self.plan.steps[span[0]]

    def prepare(self, span: Span, *, reads: bool) -> Blocks:
        """Everything that needs no state; `reads=False` leaves out what only the outputs need."""
        slots, tokens, dtype = self.plan.slots(*span), self.tokens, self.dtype
        q, k = (gather(x, slots, dtype).transpose(1, 2).contiguous() for x in (tokens.q, tokens.k))
        v = self._values(gather(tokens.v, slots, dtype))
        q_rstd = k_rstd = None
        if self.qk_l2norm:
            (q, q_rstd), (k, k_rstd) = l2norm(q), l2norm(k)
        beta = None if tokens.beta is None else self._values(gather(tokens.beta, slots, dtype)[..., None])
        decay: HeadDecay | ChannelDecay
        if tokens.g is None:
            decay = HeadDecay(q * self.scale, k, None, self.groups)
        else:
            g = gather(tokens.g, slots, dtype).transpose(1, 2).contiguous()
            if self.by_channel:
                decay = ChannelDecay(q * self.scale, k, g)
            else:
                decay = HeadDecay(q * self.scale, k, split_heads(g, self.heads, 1), self.groups)
        overlaps = inverse = None
        if self.delta:
            overlaps = decay.overlaps()
            inverse = unit_lower_inverse(_weighted(overlaps, beta))
        matrix = decay.reads() if reads else q.new_empty(0)
        return Blocks(slots, q, k, q_rstd, k_rstd, v, beta, decay, overlaps, inverse, matrix)

    def advance(self, span: Span, blocks: Blocks, current: Tensor, *, keep: bool = True) -> Advance:
        """Takes the state through the span's blocks, in place in `current` `[>= active, H, K, G V]`.

        `keep=False` is for the state alone: the result's `states` and `written` are empty.
        """
        decay = blocks.decay
        states = current.new_empty(blocks.v.shape[0] if keep else 0, *current.shape[1:])
        scaled = _weighted(blocks.v, blocks.beta)
        updates = torch.empty_like(scaled) if self.delta else scaled
        ends, written = [], []
        for step in range(*span):
            rows = self._rows(span, step)
            state = current[: rows.stop - rows.start]
            if keep:
                states[rows] = state
            if blocks.inverse is not None:
                erased = _weighted(_unfold(decay.k_in[rows] @ state, self.groups), decay.from_start, rows)
                known = scaled[rows] - _weighted(erased, blocks.beta, rows)
                updates[rows] = (blocks.inverse[rows] @ known.double()).to(self.dtype)
            if decay.whole is not None:
                _by_group(state, self.groups).mul_(decay.whole[rows])
            state += decay.k_out[rows].mT @ _fold(_weighted(updates[rows], decay.to_end, rows))
            at_line = self.plan.ends[step]
            if at_line is not None and self.quantize is not None:
                rounded = self.quantize.qdq(self._by_value_head(state[at_line]))
                state[at_line] = self._shared(rounded)
                if self.after_write and keep:
                    ends.append(at_line + rows.start)
                    written.append(split_heads(rounded, self.key_heads, 1))
        if not written:
            return Advance(states, updates, self.plan.order.new_empty(0), None)
        return Advance(states, updates, torch.cat(ends), torch.cat(written))

    def outputs(self, blocks: Blocks, advance: Advance) -> Tensor:
        """`[B, b, HV, V]`."""
        inside = _unfold(blocks.decay.q_in @ advance.states, self.groups)
        out = _weighted(inside, blocks.decay.from_start) + blocks.reads @ advance.updates
        out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
        if advance.written is not None:
            read = self.scale * blocks.q[advance.ends, :, self.plan.end_slot]
            last = torch.einsum("ehk,ehrkv->ehrv", read, advance.written)
            out[advance.ends, self.plan.end_slot] = last.flatten(1, 2)
        return out

    def retreat(
        self, span: Span, blocks: Blocks, advance: Advance, dout: Tensor, dcurrent: Tensor
    ) -> dict[str, Tensor]:
        """Adjoint of `prepare`, `advance` and `outputs` together.

        Args:
            dout: `[B, b, HV, V]`, of the outputs.
            dcurrent: `[N, H, K, G V]`, of the running state; taken from the span's end to its start in place.

        Returns:
            Gradients of the span's tokens, `[B, b, ...]`, named as `chunk.backward` names them.
        """
        decay, beta, groups = blocks.decay, blocks.beta, self.groups
        # Under after_write the last token before a grid line reads the next block's state instead of this block's.
        dread = None
        if advance.written is not None:
            dread = split_heads(dout[advance.ends, self.plan.end_slot], self.key_heads, 1)
            dout = dout.index_put((advance.ends, torch.full_like(advance.ends, self.plan.end_slot)), dout.new_zeros(()))
        dout = self._values(dout)
        dinside = _fold(_weighted(dout, decay.from_start))
        dupdates = blocks.reads.mT @ dout
        dstates, carried, drhs = self._retreat_states(span, blocks, dinside, dupdates, dread, dcurrent)

        # `drhs` is the gradient of beta (v - S~^T k): all blocks at once from here on.
        dv = _weighted(drhs, beta)
        residual, derased, dsystem = blocks.v, None, None
        if blocks.overlaps is not None:
            seen = _unfold(decay.k_in @ advance.states, groups)
            residual = blocks.v - _weighted(seen, decay.from_start)
            derased = -_weighted(dv, decay.from_start)
            dsystem = -(drhs.double() @ advance.updates.double().mT)
        rows: dict[str, Tensor] = {"dv": dv.permute(0, 3, 1, 2, 4).flatten(2, 3)}
        if beta is not None:
            dbeta = (drhs * residual).sum(-1)
            if dsystem is not None and blocks.overlaps is not None:
                dbeta += (dsystem * blocks.overlaps).sum(-1)
                dsystem = dsystem * beta
            rows["dbeta"] = dbeta.permute(0, 3, 1, 2).flatten(2, 3)

        dq_in = dinside @ advance.states.mT
        dk_in = torch.zeros_like(dq_in) if derased is None else _fold(derased) @ advance.states.mT
        dk_out = _fold(_weighted(advance.updates, decay.to_end)) @ dstates.mT
        from_start = to_end = whole = None
        if decay.from_start is not None:
            from_start = (_unfold(dinside, groups) * _unfold(decay.q_in @ advance.states, groups)).sum(-1)
            if derased is not None:
                from_start += (derased * seen).sum(-1)
            to_end = (advance.updates * carried).sum(-1)
        if decay.whole is not None:
            product = _by_group(dstates, groups) * _by_group(advance.states, groups) * decay.whole
            whole = product.sum((3, 4)) if self.by_channel else product.sum((2, 4))
        operands = OperandGrads(dq_in, dk_in, dk_out, dout @ advance.updates.mT, dsystem, from_start, to_end, whole)
        dq, dk, dg = decay.backward(operands, blocks.reads, blocks.overlaps)
        if dread is not None and advance.written is not None:
            dq[advance.ends, :, self.plan.end_slot] += torch.einsum("ehrkv,ehrv->ehk", advance.written, dread)
        dq = dq * self.scale
        if blocks.q_rstd is not None and blocks.k_rstd is not None:
            dq, dk = l2norm_backward(dq, blocks.q, blocks.q_rstd), l2norm_backward(dk, blocks.k, blocks.k_rstd)
        rows |= {"dq": dq.transpose(1, 2), "dk": dk.transpose(1, 2)}
        if dg is not None:
            rows["dg"] = dg.transpose(1, 2) if self.by_channel else dg.permute(0, 3, 1, 2).flatten(2, 3)
        return rows

    def _retreat_states(
        self,
        span: Span,
        blocks: Blocks,
        dinside: Tensor,
        dupdates: Tensor,
        dread: Tensor | None,
        dcurrent: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `retreat` that runs from block to block.

        Returns:
            Gradients of the state after each block `[B, H, K, G V]`, what of it reaches each update, and of
            `beta (v - S~^T k)`, both `[B, H, G, b, V]`.
        """
        decay = blocks.decay
        dqueried = decay.q_in.mT @ dinside
        dstates = torch.empty_like(dqueried)
        carried, drhs = torch.empty_like(dupdates), torch.empty_like(dupdates)
        unread = 0 if dread is None else dread.shape[0]
        for step in reversed(range(*span)):
            rows = self._rows(span, step)
            dstate = dcurrent[: rows.stop - rows.start]
            at_line = self.plan.ends[step]
            if dread is not None and at_line is not None:
                here = slice(unread - at_line.numel(), unread)
                unread = here.start
                read = self.scale * blocks.q[rows][at_line, :, self.plan.end_slot]
                dstate[at_line] += self._shared(torch.einsum("ehk,ehrv->ehrkv", read, dread[here]).flatten(1, 2))
            dstates[rows] = dstate
            carried[rows] = _weighted(_unfold(decay.k_out[rows] @ dstate, self.groups), decay.to_end, rows)
            if decay.whole is not None:
                _by_group(dstate, self.groups).mul_(decay.whole[rows])
            dstate += dqueried[rows]
            dupdate = dupdates[rows] + carried[rows]
            if blocks.inverse is None:
                drhs[rows] = dupdate
            else:
                drhs[rows] = (blocks.inverse[rows].mT @ dupdate.double()).to(self.dtype)
                erase = _weighted(_weighted(drhs[rows], blocks.beta, rows), decay.from_start, rows)
                dstate -= decay.k_in[rows].mT @ _fold(erase)
        return dstates, carried, drhs

    def _rows(self, span: Span, step: int) -> slice:
        """Block rows of a step within its span."""
        steps = self.plan.steps
        return slice(steps[step] - steps[span[0]], steps[step + 1] - steps[span[0]])

    def _values(self, x: Tensor) -> Tensor:
        """`[B, b, HV, V]` to `[B, H, G, b, V]`."""
        return split_heads(x, self.heads, 2).permute(0, 2, 3, 1, 4).contiguous()

    def _shared(self, state: Tensor) -> Tensor:
        """`[N, HV, K, V]` to `[N, H, K, G V]`."""
        return _fold(split_heads(state, self.heads, 1))

    def _by_value_head(self, state: Tensor) -> Tensor:
        """Inverse of `_shared`."""
        return _unfold(state, self.groups).flatten(1, 2)


def _weighted(x: Tensor, weight: Tensor | None, rows: slice | None = None) -> Tensor:
    """`x * weight`, of some block rows of the weight; None is a weight of 1."""
    if weight is None:
        return x
    return x * (weight if rows is None else weight[rows])


def _fold(x: Tensor) -> Tensor:
    """`[B, H, G, n, V]` to `[B, H, n, G V]`."""
    return x.transpose(2, 3).flatten(3)


def _unfold(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` to `[B, H, G, n, V]`, a view."""
    return _by_group(x, groups).transpose(2, 3)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` viewed as `[B, H, n, G, V]`."""
    return x.unflatten(-1, (groups, x.shape[-1] // groups))
