"""The prefix in chunk form with rounded operands or an approximate inverse, forward and explicit backward.

Per chunk of 64 tokens, counted from the sequence's first one, with the state S before it:

    A  = tril(beta (K K^T) o D, -1)        T = (I + A)^-1                                        kk
    W  = T (beta K e^G)                    U = T (beta V)                                        w, u
    V' = U - W S                                                                                 ws
    O  = scale ((Q e^G) S + (tril(Q K^T) o D) V')                                                qs, qk, av
    S' = e^G_C S + (K e^(G_C - G))^T V'                                                          kv

A site names the product whose two factors, as they are written here, are rounded (`operands.py`); decays by channel are
inside `kk` and `qk` as `prefill_pairs.py` says. The additive rule is `V' = beta V`. Everything else is exact: decays,
gates, sums. Queries are rounded before their scale.

Rounding passes gradients on unchanged, and everything else is differentiated at the rounded point (semantics §7).
Operands need memory, so spans of chunks are computed again in the backward from the state at their start. Every value
head is computed by itself here, which costs time and no accuracy. Without `Prefill`, `chunk.py` has its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lattn_compile.kernels.reference.blocks import schedule
from lattn_compile.kernels.reference.decay import prefix_sum_exclusive, suffix_sum, suffix_sum_exclusive
from lattn_compile.kernels.reference.inverse import inverse_backward, inverse_of, residual
from lattn_compile.kernels.reference.operands import Operands
from lattn_compile.kernels.reference.padding import Slots, gather, l2norm, l2norm_backward, scatter_, split_heads
from lattn_compile.kernels.reference.prefill_pairs import ChannelPairs, HeadPairs, Pairs
from lattn_compile.kernels.reference.span import SPAN_BUDGET, Span, Tokens
from lattn_compile.modes import Prefill

__all__ = ["Prefix"]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What a span's chunks are before a state is seen. B chunks, b slots each; names as above.

    Attributes:
        q, k: `[B, H, b, K]`, normalised; q_rstd, k_rstd: for the backward, None where they came so.
        v: `[B, HV, b, V]`. beta: `[B, HV, b, 1]` or None. g: `[B, HV, b(, K)]` or None.
        q_in, k_in, k_out: Q e^G, K e^G and K e^(G_C - G), `[B, HV, b, K]`. from_start, to_end: their weights, 1 or
            `[B, HV, b, 1 | K]`. whole: e^G_C, 1 or `[B, HV, 1 | K, 1]`.
        system, inverse: A and T, None for the additive rule; the exact T is float64. overlaps: A without beta, float64.
        w, u: `[B, HV, b, K]`, `[B, HV, b, V]`; w None for the additive rule.
        reads: tril(Q K^T) o D.
    """

    slots: Slots
    q: Tensor
    k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    v: Tensor
    beta: Tensor | None
    g: Tensor | None
    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    from_start: Tensor | float
    to_end: Tensor | float
    whole: Tensor | float
    pairs: Pairs
    overlaps: Tensor | None
    system: Tensor | None
    inverse: Tensor | None
    w: Tensor | None
    u: Tensor
    reads: Tensor


class Prefix:
    """One call; its running state is `[N, HV, K, V]` in the schedule's order."""

    def __init__(
        self,
        tokens: Tokens,
        sequences: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        prefill: Prefill,
    ) -> None:
        """Cuts the sequences (starts, lengths) into chunks; nothing is computed yet."""
        self.tokens, self.dtype, self.prefill = tokens, dtype, prefill
        self.delta, self.scale, self.qk_l2norm = rule == "delta", scale, qk_l2norm
        self.operands = Operands(prefill)
        self.plan = schedule(*sequences, None, None)
        size, key, value = self.plan.index.shape[1], tokens.q.shape[2], tokens.v.shape[2]
        block_cost = tokens.v.shape[1] * (key * value + size * (2 * size + 2 * key + value))
        self.spans = self.plan.spans(block_cost, SPAN_BUDGET)
        self.groups = tokens.v.shape[1] // tokens.q.shape[1]

    def forward(self, state: Tensor, o: Tensor, measured: Callable[[Tensor], None] | None) -> Tensor:
        """As `chunk.forward`. measured: gets the residuals of an approximate inverse, float64 `[B, HV]`."""
        current = state.to(self.dtype).index_select(0, self.plan.order)
        for span in self.spans:
            chunks = self._prepare(span, reads=True)
            if measured is not None and chunks.system is not None and chunks.inverse is not None:
                measured(residual(chunks.system, chunks.inverse))
            states, updates = self._advance(span, chunks, current)
            scatter_(o, chunks.slots, self._outputs(chunks, states, updates).transpose(1, 2))
        return self._unload(current)

    def backward(
        self, grad_o: Tensor | None, grad_final: Tensor | None, state: Tensor, grads: dict[str, Tensor]
    ) -> Tensor:
        """As `chunk.backward`."""
        current = state.to(self.dtype).index_select(0, self.plan.order)
        starts = []
        for span in self.spans:
            starts.append(current[: self._active(span)].clone())
            if span is not self.spans[-1]:
                self._advance(span, self._prepare(span, reads=False), current)
        dstate = torch.zeros_like(state) if grad_final is None else grad_final
        dcurrent = dstate.to(self.dtype).index_select(0, self.plan.order)
        for span in reversed(self.spans):
            chunks = self._prepare(span, reads=True)
            states, updates = self._advance(span, chunks, starts.pop())
            if grad_o is None:
                dout = torch.zeros_like(chunks.v)
            else:
                dout = gather(grad_o, chunks.slots, self.dtype).transpose(1, 2) * self.scale
            for name, rows in self._retreat(span, chunks, states, updates, dout, dcurrent).items():
                if name in grads:
                    scatter_(grads[name], chunks.slots, rows.transpose(1, 2))
        return self._unload(dcurrent)

    def _unload(self, current: Tensor) -> Tensor:
        return current.new_empty(current.shape).index_copy_(0, self.plan.order, current)

    def _active(self, span: Span) -> int:
        return self.plan.steps[span[0] + 1] - self.plan.steps[span[0]]

    def _rows(self, span: Span, step: int) -> slice:
        steps = self.plan.steps
        return slice(steps[step] - steps[span[0]], steps[step + 1] - steps[span[0]])

    def _prepare(self, span: Span, *, reads: bool) -> _Chunks:
        slots, tokens, dtype = self.plan.slots(*span), self.tokens, self.dtype
        q, k, v = (gather(x, slots, dtype).transpose(1, 2).contiguous() for x in (tokens.q, tokens.k, tokens.v))
        g = None if tokens.g is None else gather(tokens.g, slots, dtype).transpose(1, 2).contiguous()
        beta = None if tokens.beta is None else gather(tokens.beta, slots, dtype).transpose(1, 2)[..., None]
        q_rstd = k_rstd = None
        if self.qk_l2norm:
            (q, q_rstd), (k, k_rstd) = l2norm(q), l2norm(k)
        wide_q, wide_k = self._spread(q), self._spread(k)
        from_start: Tensor | float = 1.0
        to_end: Tensor | float = 1.0
        whole: Tensor | float = 1.0
        if g is not None:
            by_channel = g if g.dim() == 4 else g[..., None]
            from_start, to_end = by_channel.cumsum(-2).exp(), suffix_sum_exclusive(by_channel, -2).exp()
            whole = from_start[..., -1, :, None]
        q_in, k_in, k_out = wide_q * from_start, wide_k * from_start, wide_k * to_end
        pairs: Pairs
        if g is not None and g.dim() == 4:
            pairs = ChannelPairs(wide_q, wide_k, g, self.operands)
        else:
            pairs = HeadPairs(wide_q, wide_k, g, self.operands)
        overlaps = system = inverse = w = None
        u = _times(v, beta)
        if self.delta:
            overlaps = pairs.overlaps()
            system = _times(overlaps, beta)
            if self.prefill.inverse != "exact":
                system = system.to(dtype)
            inverse = inverse_of(system, self.prefill.inverse)
            w, u = self._solved("w", inverse, _times(k_in, beta)), self._solved("u", inverse, u)
        matrix = pairs.reads() if reads else q.new_empty(0)
        return _Chunks(
            slots, q, k, q_rstd, k_rstd, v, beta, g, q_in, k_in, k_out, from_start, to_end, whole,
            pairs, overlaps, system, inverse, w, u, matrix,
        )  # fmt: skip

    def _solved(self, site: str, inverse: Tensor, known: Tensor) -> Tensor:
        """The product of T with what is known. An exact T is large and cancels (`wy.py`): summed in float64."""
        left, right = self._solution_operands(site, inverse, known)
        return (left.double() @ right.double()).to(self.dtype)

    def _solution_operands(self, site: str, inverse: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        if self.operands.rounds(site):
            inverse = inverse.to(self.dtype)
        return self.operands.left(site, inverse), self.operands.right(site, known)

    def _advance(self, span: Span, chunks: _Chunks, current: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the state through the span, in place; returns S before each chunk and V'."""
        operands = self.operands
        states = current.new_empty(chunks.v.shape[0], *current.shape[1:])
        updates = chunks.u.clone()
        w = None if chunks.w is None else operands.left("ws", chunks.w)
        k_out = operands.left("kv", chunks.k_out.mT)
        for step in range(*span):
            rows = self._rows(span, step)
            state = current[: rows.stop - rows.start]
            states[rows] = state
            if w is not None:
                updates[rows] -= w[rows] @ operands.right("ws", state)
            state *= _of(chunks.whole, rows)
            state += k_out[rows] @ operands.right("kv", updates[rows])
        return states, updates

    def _outputs(self, chunks: _Chunks, states: Tensor, updates: Tensor) -> Tensor:
        """`[B, HV, b, V]`."""
        inside = self.operands.left("qs", chunks.q_in) @ self.operands.right("qs", states)
        return self.scale * (inside + self.operands.left("av", chunks.reads) @ self.operands.right("av", updates))

    def _retreat(
        self, span: Span, chunks: _Chunks, states: Tensor, updates: Tensor, dout: Tensor, dcurrent: Tensor
    ) -> dict[str, Tensor]:
        """Adjoint of a span. dout: `[B, HV, b, V]`, scaled; dcurrent: of the running state, taken back in place.

        Returns:
            Gradients by name, `[B, heads, b, ...]`.
        """
        operands, beta = self.operands, chunks.beta
        q_in, k_out = operands.left("qs", chunks.q_in), operands.left("kv", chunks.k_out.mT)
        w = None if chunks.w is None else operands.left("ws", chunks.w)
        dupdates = operands.left("av", chunks.reads).mT @ dout
        dqueried = q_in.mT @ dout
        dstates = torch.empty_like(states)  # of the state after each chunk
        for step in reversed(range(*span)):
            rows = self._rows(span, step)
            dstate = dcurrent[: rows.stop - rows.start]
            dstates[rows] = dstate
            dupdates[rows] += k_out[rows].mT @ dstate
            dstate *= _of(chunks.whole, rows)
            dstate += dqueried[rows]
            if w is not None:
                dstate -= w[rows].mT @ dupdates[rows]

        dreads = dout @ operands.right("av", updates).mT
        dq_in = dout @ operands.right("qs", states).mT
        dk_out = operands.right("kv", updates) @ dstates.mT
        dk_in, dknown, doverlaps, dbeta = torch.zeros_like(dq_in), dupdates, None, None
        if chunks.inverse is not None and chunks.system is not None and chunks.overlaps is not None:
            dw = -(dupdates @ operands.right("ws", states).mT)
            dsystem, dkeys, dknown = self._solved_backward(chunks, dw, dupdates)
            doverlaps = dsystem if beta is None else dsystem * beta
            dk_in = _times(dkeys, beta)
            if beta is not None:
                dbeta = ((dsystem * chunks.overlaps).sum(-1) + (dkeys * chunks.k_in).sum(-1)).to(self.dtype)
        found = {"dv": _times(dknown, beta)}
        if beta is not None:
            own = (dknown * chunks.v).sum(-1)
            found["dbeta"] = own if dbeta is None else own + dbeta

        dq, dk, dg = chunks.pairs.backward(dreads, chunks.reads, doverlaps, chunks.overlaps)
        dq = dq + dq_in * chunks.from_start
        dk = dk + dk_in * chunks.from_start + dk_out * chunks.to_end
        if dg is not None and chunks.g is not None:
            before, behind = dq_in * chunks.q_in + dk_in * chunks.k_in, dk_out * chunks.k_out
            across = (dstates * states * chunks.whole).sum(-1)
            if chunks.g.dim() == 3:
                before, behind, across = before.sum(-1)[..., None], behind.sum(-1)[..., None], across.sum(-1)[..., None]
            gate = suffix_sum(before, -2) + prefix_sum_exclusive(behind, -2) + across[..., None, :]
            found["dg"] = dg + (gate if chunks.g.dim() == 4 else gate[..., 0])
        dq, dk = self._gathered(dq), self._gathered(dk)
        if chunks.q_rstd is not None and chunks.k_rstd is not None:
            dq, dk = l2norm_backward(dq, chunks.q, chunks.q_rstd), l2norm_backward(dk, chunks.k, chunks.k_rstd)
        return {**found, "dq": dq, "dk": dk}

    def _solved_backward(self, chunks: _Chunks, dw: Tensor, du: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of A, of beta K e^G and of beta V, from those of W and U."""
        assert chunks.inverse is not None and chunks.system is not None
        dinverse = torch.zeros_like(chunks.inverse, dtype=torch.float64)
        dknown = []
        for site, x, grad in (("w", chunks.k_in, dw), ("u", chunks.v, du)):
            left, right = self._solution_operands(site, chunks.inverse, _times(x, chunks.beta))
            dinverse += grad.double() @ right.double().mT
            dknown.append((left.double().mT @ grad.double()).to(self.dtype))
        series = self.prefill.gradient == "series"
        dsystem = inverse_backward(chunks.system, chunks.inverse, dinverse, self.prefill.inverse, series=series)
        return dsystem, dknown[0], dknown[1]

    def _spread(self, x: Tensor) -> Tensor:
        """`[B, H, b, K]` of key heads to `[B, HV, b, K]`."""
        return x if self.groups == 1 else x.repeat_interleave(self.groups, 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """Adjoint of `_spread`."""
        return x if self.groups == 1 else split_heads(x, x.shape[1] // self.groups, 1).sum(2)


def _times(x: Tensor, beta: Tensor | None) -> Tensor:
    return x if beta is None else x * beta


def _of(weight: Tensor | float, rows: slice) -> Tensor | float:
    return weight[rows] if isinstance(weight, Tensor) else weight
