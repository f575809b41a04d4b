"""A run of tokens in blocks, forward: the operands of a span of blocks, and the state's way through it.

`Run.prepare` computes what does not depend on the state, for all blocks of a span at once. `Run.advance` takes the
state through the blocks one by one. The formulas are in `chunk.py` and `replay.py`, the decayed products in `decay.py`,
what is rounded in `writes.py`, and the way back in `adjoint.py`.

Shapes: B block rows, b slots of a block, H key heads of the products and G value heads that share one (`H` is the
model's and `G = HV / H` unless the decay is per channel, then `H = HV, G = 1`; see `decay.py`). V is twice the
model's where states are pairs (`writes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lattn_compile.kernels.reference.blocks import Lines, schedule
from lattn_compile.kernels.reference.decay import ChannelDecay, HeadDecay
from lattn_compile.kernels.reference.padding import Slots, gather, l2norm, split_heads
from lattn_compile.kernels.reference.writes import Writes
from lattn_compile.kernels.reference.wy import rounded_substitution, unit_lower_inverse

__all__ = ["SPAN_BUDGET", "Advance", "Blocks", "Run", "Span", "Tokens", "by_group", "fold", "unfold", "weighted"]

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
        written: k as it is written into the state; k itself where factors are not rounded.
        q_rstd, k_rstd: reciprocal norms for the backward, None where q and k came as they are.
        v: `[B, H, G, b, V]`. beta: `[B, H, G, b, 1]` or None.
        decay: the decayed operands, of the scaled q.
        overlaps, system, inverse: float64 `[B, H, G, b, b]`, None for the additive rule; `beta overlaps` and
            `(I + system)^-1`. No inverse where factors are rounded.
        reads: `[B, H, G, b, b]`; empty when it was not asked for.
    """

    slots: Slots
    q: Tensor
    k: Tensor
    written: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    v: Tensor
    beta: Tensor | None
    decay: HeadDecay | ChannelDecay
    overlaps: Tensor | None
    system: Tensor | None
    inverse: Tensor | None
    reads: Tensor


@dataclass(frozen=True, slots=True)
class Advance:
    """A span's forward sweep.

    Attributes:
        states: `[B, H, K, G V]`, the state before each block.
        updates: U of each block as it is written, `[B, H, G, b, V]`. exact: before it is rounded; None where tokens
            do not read that.
        ends: int64 `[E]`, block rows whose last token reads the rounded state; written: `[E, model's key heads, R, K,
            V]`, those states. Empty unless after_write.
    """

    states: Tensor
    updates: Tensor
    exact: Tensor | None
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
        sequences: tuple[Tensor, Tensor, Tensor | None],
        dtype: torch.dtype,
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        writes: Writes | None = None,
    ) -> None:
        """Cuts the sequences into blocks; nothing is computed yet.

        Args:
            sequences: starts, lengths and offsets from the grid, as `chunk.forward` takes them.
            dtype: of all arithmetic and of the states.
            writes: what is rounded; None: nothing, and there is no grid.
        """
        self.tokens, self.dtype, self.writes = tokens, dtype, writes
        self.delta, self.scale, self.qk_l2norm = rule == "delta", scale, qk_l2norm
        self.after_write = writes is not None and writes.after
        self.paired, self.apart = writes is not None and writes.paired, writes is not None and writes.apart
        self.rounds_updates = writes is not None and writes.factors is not None
        self.key_heads, self.value_heads = tokens.q.shape[1], tokens.v.shape[1]
        self.by_channel = tokens.g is not None and tokens.g.dim() == 3
        self.heads = self.value_heads if self.by_channel else self.key_heads
        self.groups = self.value_heads // self.heads
        self.plan = schedule(*sequences, None if writes is None else writes.every)
        size, key, value = self.plan.index.shape[1], tokens.q.shape[2], tokens.v.shape[2] * (1 + self.paired)
        block_cost = self.value_heads * (key * value + size * (size + key + value))
        self.spans: list[Span] = self.plan.spans(block_cost, SPAN_BUDGET)

    def load(self, state: Tensor) -> Tensor:
        """`[N, HV, K, V]` to the running layout, new memory."""
        return self.shared(state.to(self.dtype).index_select(0, self.plan.order))

    def unload(self, current: Tensor) -> Tensor:
        """Inverse of `load`."""
        state = self._by_value_head(current)
        return state.new_empty(state.shape).index_copy_(0, self.plan.order, state)

    def active(self, span: Span) -> int:
        """Sequences that still run at the span's first step."""
        return self.plan.steps[span[0] + 1] - self.plan.steps[span[0]]

    def through(self, state: Tensor) -> Tensor:
        """The states `[N, HV, K, V]` behind all tokens, from those before; new memory, nothing is read."""
        current = self.load(state)
        for span in self.spans:
            self.advance(span, self.prepare(span, reads=False), current, keep=False)
        return self.unload(current)

    def prepare(self, span: Span, *, reads: bool) -> Blocks:
        """Everything that needs no state; `reads=False` leaves out what only the outputs need."""
        slots, tokens, dtype = self.plan.slots(*span), self.tokens, self.dtype
        q, k = (gather(x, slots, dtype).transpose(1, 2).contiguous() for x in (tokens.q, tokens.k))
        v = self.values(gather(tokens.v, slots, dtype))
        if self.paired:
            v = torch.cat((v, v), -1)
        q_rstd = k_rstd = None
        if self.qk_l2norm:
            (q, q_rstd), (k, k_rstd) = l2norm(q), l2norm(k)
        beta = None if tokens.beta is None else self.values(gather(tokens.beta, slots, dtype)[..., None])
        written = k if self.writes is None else self.writes.update(k)
        decay: HeadDecay | ChannelDecay
        if tokens.g is None:
            decay = HeadDecay(q * self.scale, k, written, None, self.groups, apart=self.apart)
        else:
            g = gather(tokens.g, slots, dtype).transpose(1, 2).contiguous()
            if self.by_channel:
                decay = ChannelDecay(q * self.scale, k, written, g, apart=self.apart)
            else:
                g = split_heads(g, self.heads, 1)
                decay = HeadDecay(q * self.scale, k, written, g, self.groups, apart=self.apart)
        overlaps = system = inverse = None
        if self.delta:
            overlaps = decay.overlaps()
            system = weighted(overlaps, beta)
            inverse = unit_lower_inverse(system) if not self.rounds_updates else None
        matrix = decay.reads() if reads else q.new_empty(0)
        return Blocks(slots, q, k, written, q_rstd, k_rstd, v, beta, decay, overlaps, system, inverse, matrix)

    def advance(
        self,
        span: Span,
        blocks: Blocks,
        current: Tensor,
        *,
        keep: bool = True,
        anchors: Tensor | None = None,
        solved: Advance | None = None,
    ) -> Advance:
        """Takes the state through the span's blocks, in place in `current` `[>= active, H, K, G V]`.

        Args:
            keep: False is for the state alone: the result's `states` and `written` are empty.
            anchors: `[N, HV, K, V]`, receives what `Writes.returned` makes of a sequence's last write.
            solved: of an earlier way through the same span, whose updates are taken over.
        """
        decay, writes = blocks.decay, self.writes
        states = current.new_empty(blocks.v.shape[0] if keep else 0, *current.shape[1:])
        scaled = weighted(blocks.v, blocks.beta)
        if solved is not None:
            updates, exact = solved.updates, solved.exact
        elif self.delta:
            updates, exact = torch.empty_like(scaled), torch.empty_like(scaled) if self.apart else None
        else:
            updates = scaled if writes is None else writes.update(scaled)
            exact = scaled if self.apart else None
        ends, written = [], []
        for step in range(*span):
            rows = self.rows(span, step)
            state = current[: rows.stop - rows.start]
            if keep:
                states[rows] = state
            if blocks.system is not None and solved is None:
                erased = weighted(unfold(decay.k_in[rows] @ state, self.groups), decay.from_start, rows)
                known = scaled[rows] - weighted(erased, blocks.beta, rows)
                if blocks.inverse is not None:
                    updates[rows] = (blocks.inverse[rows] @ known.double()).to(self.dtype)
                elif writes is not None:
                    taken = self.plan.taken(step)
                    own, updates[rows] = rounded_substitution(blocks.system[rows], known, taken, writes.update)
                    if exact is not None:
                        exact[rows] = own
            if decay.whole is not None:
                by_group(state, self.groups).mul_(decay.whole[rows])
            state += decay.k_out[rows].mT @ fold(weighted(updates[rows], decay.to_end, rows))
            lines = self.plan.ends[step]
            if lines is not None and writes is not None:
                read = self._write(writes, state, lines, anchors)
                if self.after_write and keep:
                    ends.append(lines.rows + rows.start)
                    written.append(split_heads(read, self.key_heads, 1))
        if not written:
            return Advance(states, updates, exact, self.plan.order.new_empty(0), None)
        return Advance(states, updates, exact, torch.cat(ends), torch.cat(written))

    def _write(self, writes: Writes, state: Tensor, lines: Lines, anchors: Tensor | None) -> Tensor:
        """Rounds the states of a step that are at a line, in place, and returns them as written, `[E, HV, K, V]`."""
        exact = self._by_value_head(state[lines.rows])
        written = writes.state(exact, lines.owner, lines.done)
        state[lines.rows] = self.shared(written)
        if lines.last is not None:
            returned, owner = writes.returned(exact, written), lines.owner[lines.last]
            if anchors is not None:
                anchors[owner] = returned[lines.last]
            elif returned is exact:
                # The state of a call that ends here is what it hands back.
                ended = lines.last[self.plan.stop[owner] % self.plan.chunk == 0]
                state[lines.rows[ended]] = self.shared(exact[ended])
        return written

    def outputs(self, blocks: Blocks, advance: Advance) -> Tensor:
        """`[B, b, HV, V]`; of pairs, what R gives."""
        states, updates = advance.states, advance.updates
        if self.paired:
            states = by_group(states, self.groups).tensor_split(2, -1)[0].flatten(-2)
            updates = updates.tensor_split(2, -1)[0]
        inside = unfold(blocks.decay.q_in @ states, self.groups)
        out = weighted(inside, blocks.decay.from_start) + blocks.reads @ updates
        if advance.exact is not None:
            out += blocks.decay.own() * advance.exact
        out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
        if advance.written is not None:
            read = self.scale * blocks.q[advance.ends, :, self.plan.end_slot]
            last = torch.einsum("ehk,ehrkv->ehrv", read, advance.written)
            out[advance.ends, self.plan.end_slot] = last.flatten(1, 2)
        return out

    def rows(self, span: Span, step: int) -> slice:
        """Block rows of a step within its span."""
        steps = self.plan.steps
        return slice(steps[step] - steps[span[0]], steps[step + 1] - steps[span[0]])

    def values(self, x: Tensor) -> Tensor:
        """`[B, b, HV, V]` to `[B, H, G, b, V]`."""
        return split_heads(x, self.heads, 2).permute(0, 2, 3, 1, 4).contiguous()

    def shared(self, state: Tensor) -> Tensor:
        """`[N, HV, K, V]` to `[N, H, K, G V]`."""
        return fold(split_heads(state, self.heads, 1))

    def _by_value_head(self, state: Tensor) -> Tensor:
        """Inverse of `shared`."""
        return unfold(state, self.groups).flatten(1, 2)


def weighted(x: Tensor, weight: Tensor | None, rows: slice | None = None) -> Tensor:
    """`x * weight`, of some block rows of the weight; None is a weight of 1."""
    if weight is None:
        return x
    return x * (weight if rows is None else weight[rows])


def fold(x: Tensor) -> Tensor:
    """`[B, H, G, n, V]` to `[B, H, n, G V]`."""
    return x.transpose(2, 3).flatten(3)


def unfold(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` to `[B, H, G, n, V]`, a view."""
    return by_group(x, groups).transpose(2, 3)


def by_group(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, G V]` viewed as `[B, H, n, G, V]`."""
    return x.unflatten(-1, (groups, x.shape[-1] // groups))
