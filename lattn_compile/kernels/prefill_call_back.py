"""A prefill's backward on the device: the memory between its kernels, and their launches for one span."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lattn_compile.kernels.chunk_gradients import deliver
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.prefill_backward import walk_back
from lattn_compile.kernels.prefill_call import Call, Kept, Operand, Span, launch, of, strides
from lattn_compile.kernels.prefill_channels import grad_channels
from lattn_compile.kernels.prefill_gradients import grad_keys, grad_reads, grad_system

__all__ = ["BackwardCall"]

_SLICE = 32
"""Channels, or columns of v, at a time."""


class BackwardCall(Call):
    """A call that keeps what its gradients need. Its products of codes and gradients are bf16's."""

    wide: ClassVar[bool] = True

    def kept(self, span: Span) -> Kept:
        """Memory for what `advance` leaves."""
        blocks, heads = span.schedule.blocks, self.value_heads
        return Kept(
            self.new(blocks, heads, self.width, self.keys),
            self.new(blocks, heads, 2, self.width),
            self.new(blocks, heads, self.width, self.size),
        )

    def retreat(self, span: Span, grad_o: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the gradient of the states back through a span, in place.

        Returns:
            Gradients of the states behind every chunk, and of V'.
        """
        placed, heads, size, f = span.schedule, self.value_heads, self.size, self.formats
        blocks = placed.blocks
        query, seen = span.pairs.query, span.pairs.seen
        cotangents = self.new(blocks, heads, self.width, self.keys)
        dnews = self.new(blocks, heads, self.width, size)
        launched(walk_back)[(self.width // self.columns * heads * self.sequences,)](
            grad_o, self.starts, self.lengths, *of(query), *of(seen), *of(span.erase), *of(span.out), span.whole,
            dstate, placed.first, placed.count, dstate, cotangents, dnews, self.scale, span.skip, *grad_o.stride(),
            heads, BV=self.columns, DELTA=self.delta, LOW=self.low, WS=f["ws"], KV=f["kv"], AV=f["av"],
            QP=query.x.shape[2], **(self.key | self.value), **launch("walk_back"),
        )  # fmt: skip
        return cotangents, dnews

    def gradients(
        self, span: Span, grad_o: Tensor, kept: Kept, passed: tuple[Tensor, Tensor], grads: dict[str, Tensor]
    ) -> None:
        """Writes a span's gradients. passed: of `retreat`."""
        (cotangents, dnews), pairs = passed, span.pairs
        reads = pairs.reads
        assert reads is not None
        blocks, heads, size, f = span.schedule.blocks, self.value_heads, self.size, self.formats
        where, skip, programs = self._where(span), span.skip, blocks * heads
        q, k, g = self.q.stride(), self.k.stride(), strides(self.g, 3)
        dreads, gates, strengths = self.new(*reads.shape), *(self.new(blocks, heads, 2, size) for _ in range(2))
        launched(grad_reads)[(programs,)](
            grad_o, *where, pairs.factors, reads, kept.news, dreads, gates, self.scale, skip, *grad_o.stride(), heads,
            BS=_SLICE, DECAY=self.decay, LOW=self.low, AV=f["av"], **self.value, **launch("grad_reads"),
        )  # fmt: skip
        doverlaps = dsolved = None
        if self.delta:
            doverlaps, dsolved = self.new(*reads.shape), self.new(blocks, heads, size, self.keys)
        dv = grads["dv"]
        launched(grad_system)[(programs,)](
            self.k, self.v, *where, pairs.norms, pairs.strengths, pairs.factors, pairs.from_start, pairs.overlaps,
            span.inverses, *of(span.left.get("w")), *of(span.left.get("u")), kept.states, kept.scales, dnews, dv,
            dsolved, doverlaps, strengths, gates, skip, *k, *self.v.stride(), *dv.stride(), self.key_heads, heads,
            BS=_SLICE, DELTA=self.delta, DECAY=self.decay, LOW=self.low, W=f["w"], U=f["u"], WS=f["ws"],
            **(self.key | self.value), **launch("grad_system"),
        )  # fmt: skip
        slices = self.keys // _SLICE
        dkeys, rows = self.new(blocks, heads, 2, size, self.keys), self.new(blocks, heads, slices, 4, size)
        dgates = self.new(blocks, heads, size, self.keys) if self.decay == 2 else None
        read: Operand | None = pairs.rounded["qk"]
        launched(grad_keys)[(programs * slices,)](
            self.q, self.k, self.g, grad_o, *where, pairs.norms, pairs.strengths, pairs.factors,
            *of(pairs.rounded["q"]), *of(pairs.rounded["kk"]), *of(read), kept.states, kept.scales, kept.news,
            cotangents, dsolved, dreads, doverlaps, span.whole, dkeys, dgates, rows, self.scale, skip, *q, *k, *g,
            *grad_o.stride(), self.key_heads, heads, BS=_SLICE, DELTA=self.delta, DECAY=self.decay, LOW=self.low,
            KK=f["kk"], QK=f["qk"], QS=f["qs"], KV=f["kv"], **(self.key | self.value), **launch("grad_keys"),
        )  # fmt: skip
        dq, dk, dg, dbeta = grads["dq"], grads["dk"], grads.get("dg"), grads.get("dbeta")
        if self.decay == 2 and dg is not None:
            tiles = size // 16
            between = self.new(blocks, heads, tiles, tiles, self.keys)
            launched(grad_channels)[(programs * slices,)](
                self.q, self.k, self.g, *where, pairs.norms, pairs.to_end, pairs.ends, *pairs.scales, dreads, doverlaps,
                dkeys, dgates, pairs.from_start, between, dg, skip, *q, *k, *g, *dg.stride(), self.key_heads, heads,
                BS=_SLICE, DELTA=self.delta, LOW=self.low, KK=f["kk"], QK=f["qk"], **self.key,
                **launch("grad_channels"),
            )  # fmt: skip
        launched(deliver)[(blocks * self.key_heads,)](
            self.q, self.k, *where, pairs.norms, dkeys, rows, strengths, gates, dq, dk, dg, dbeta, skip, *q, *k,
            *dq.stride(), *dk.stride(), *strides(dg, 3)[:2], *strides(dbeta, 2), self.key_heads, heads, BS=_SLICE,
            TILE=size // 2, SLICES=slices, DELTA=self.delta, DECAY=self.decay, BETA=self.beta is not None,
            NORM=self.norm, CHUNK=size, TOKENS=size, PER=1, **self.key, **launch("deliver"),
        )  # fmt: skip

    def _where(self, span: Span) -> tuple[Tensor, ...]:
        return (self.starts, self.lengths, self.offsets, span.schedule.owner, span.schedule.index)
