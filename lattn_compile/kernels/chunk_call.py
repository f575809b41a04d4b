"""A chunk-form call on the device: its sizes, the memory between its kernels, and their launches, span by span.

A span is as many blocks of every sequence as `budget` bytes between the kernels hold. Which blocks there are is known
on the device only, so spans are counted from shapes, and those beyond a sequence's end find nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.chunk_backward import grad_pairs, grad_updates, retreat
from lattn_compile.kernels.chunk_blocks import Schedule, cut, schedule
from lattn_compile.kernels.chunk_forward import advance
from lattn_compile.kernels.chunk_gradients import deliver, grad_keys, grad_lines
from lattn_compile.kernels.chunk_levels import grad_levels
from lattn_compile.kernels.chunk_operands import key_operands, value_operands
from lattn_compile.kernels.chunk_pairs import pairs_across, pairs_channel, pairs_head
from lattn_compile.kernels.chunk_sizes import write
from lattn_compile.kernels.chunk_solve import solve
from lattn_compile.kernels.common.launch import launched

__all__ = ["LOW", "Call", "Span", "strides"]

LOW = (torch.bfloat16,)
"""Inputs that go into products as they are, see `chunk_fine.py`. fp16 is finer than that."""

_ROWS = 32
"""Of a product: 64 would be one of Hopper's asynchronous ones, see `chunk.py`."""

_CORNER = 16
"""Tokens of the smallest tile."""

PART = torch.bfloat16
"""Of an operand."""

LEAST_BUDGET = 1 << 28
"""Bytes between kernels that nobody misses; below it, a call is one span."""

GIVEN = 2
"""Bytes between kernels, for each byte of the inputs: in a backward as many as inputs, outputs and gradients have."""

LEAST_SPAN = 8
"""Blocks of a sequence: a state is kept for every span."""


@dataclass(slots=True)
class Span:
    """Some blocks of every sequence, and what the forward's kernels make of them; shapes as in those."""

    schedule: Schedule
    skip: int
    norms: Tensor
    reads: Tensor
    overlaps: Tensor | None
    solved: Tensor | None
    operands: Tensor | None
    whole: Tensor | None
    updates: Tensor | None
    outputs: Tensor | None


class Call:
    """One call: inputs as `kernels.reference.chunk` takes them, and the kernels' compile-time options."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        starts: Tensor,
        lengths: Tensor,
        offsets: Tensor | None,
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        chunk_size: int,
        quantize: Quantizer | None,
        readout: str,
        backward: bool = False,
    ) -> None:
        tokens, self.key_heads, key_dim = q.shape
        self.value_heads, value_dim = v.shape[1:]
        self.sequences, self.scale = starts.shape[0], float(scale)
        self.low, self.g, self.backward = all(x.dtype in LOW for x in (q, k, v)), g, backward
        # Products in float64 are made of float32 only: Triton 3.6 does not compile them of fp16.
        self.q, self.k, self.v = (x if self.low else x.float() for x in (q, k, v))
        self.beta = beta if self.low or beta is None else beta.float()
        self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
        grid = chunk_size if quantize is not None else None
        on_line = grid is None or offsets is None
        self.offsets = torch.zeros_like(self.starts)
        if grid is not None and offsets is not None:
            self.offsets = offsets.contiguous()
        self.decay = 0 if g is None else g.dim() - 1
        self.delta = rule == "delta"
        self.cut = cut(tokens, grid)
        # By channel not 16, a tile's tokens: of square tiles Triton 3.6 made wrong code, see docs/kernels.md.
        self.keys = max(32 if self.decay == 2 else 16, triton.next_power_of_2(key_dim))
        self.write = write(quantize, key_dim, value_dim, self.keys)
        self.after = readout == "after_write" and bool(self.write["FORMAT"])
        self._sizes(value_dim)
        self.tile = min(_ROWS, self.cut.size)
        self.tiles = 1 if self.tile == self.cut.size else 3
        self.slice, self.value_slice = min(32, self.keys), min(32, self.width)
        self.blocks = {"BT": self.cut.size, **self.cut.constants()}
        self.kind = {"DELTA": self.delta, **self.blocks}
        self.parts = {"LOW": self.low}
        self.norm = {"NORM": qk_l2norm}
        self.key = {"K": key_dim, "BK": self.keys}
        self.value = {"V": value_dim, "VP": self.width}
        self.strength = {"BETA": beta is not None}
        self.bound = self.cut.bound(tokens, self.sequences, on_line=on_line)
        longest = self.cut.bound(tokens, 1, on_line=on_line)
        self.span = self._span(backward, longest)
        self.skips = list(range(0, longest, self.span))

    def _sizes(self, value_dim: int) -> None:
        """Columns of v: of a program of `advance`, in how many pieces, and of all."""
        self.columns = max(16, min(_ROWS, triton.next_power_of_2(value_dim)))
        self.pieces = max(1, self.write["BLOCK_V"] // self.columns)
        # A multiple of what other programs take at a time, too.
        unit = max(self.pieces * self.columns, min(_ROWS, max(16, triton.next_power_of_2(value_dim))))
        self.width = triton.cdiv(value_dim, unit) * unit

    def _needs(self, backward: bool) -> int:
        """Bytes between kernels of a block and value head."""
        size = self.cut.size
        values, states, pairs = 4 * size * self.width, 4 * self.keys * self.width, 4 * size * size
        operands, keys = 18 * size * self.keys, 4 * size * self.keys
        matrices = pairs
        if self.delta:
            matrices += 16 * size * size
        if backward:
            # Operands are let go when the gradients of keys are made.
            later = 2 * keys + 2 * pairs + (keys if self.decay == 2 else 0)
            return matrices + 2 * values + 2 * states + max(operands, later)
        return matrices + 2 * values + operands

    def _span(self, backward: bool, longest: int) -> int:
        """Blocks of a sequence in a span. longest: of a sequence that had all tokens."""
        needs = self._needs(backward)
        given = sum(x.nbytes for x in (self.q, self.k, self.v, self.v, self.g, self.beta) if x is not None)
        budget = max(LEAST_BUDGET if backward else 4 * LEAST_BUDGET, GIVEN * given)
        least = budget // (needs * self.value_heads)
        if least >= self.bound:
            return self.bound
        span = max(LEAST_SPAN, least // max(self.sequences, 1))
        if self.sequences == 1:  # all alike
            span = triton.cdiv(longest, triton.cdiv(longest, span))
        return span

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or torch.float32)

    def prepare(self, skip: int, *, read: bool, back: bool = False) -> Any:
        """What a span's blocks need besides the state; `read`: for outputs too, `back`: for gradients."""
        placed = schedule(self.lengths, self.offsets, self.cut, self.bound, skip, self.span)
        size, blocks, heads = self.cut.size, placed.blocks, self.value_heads
        norms, strengths = self.new(blocks, self.key_heads, 2, size), self.new(blocks, heads, size)
        reads = self.new(blocks, heads, size, size)
        overlaps = self.new(blocks, heads, size, size, dtype=torch.float64) if self.delta else None
        solved = None
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        qk = (*self.q.stride(), *self.k.stride())
        if self.decay == 2 and self.g is not None:
            of_g = self.g.stride()
            # Small tiles of one warp each: a level costs what its rows squared cost, a tile below the diagonal less.
            tile = min(_CORNER, size)
            launched(pairs_channel)[(blocks * heads * (size // tile),)](
                self.q, self.k, self.g, self.beta, *where, norms, strengths, reads, overlaps, self.scale, skip, *qk,
                *of_g, *strides(self.beta, 2), self.key_heads, heads, BS=self.slice, TILE=tile,
                **self.key, **self.kind, **self.norm, **self.strength, num_warps=1, num_stages=1,
            )  # fmt: skip
            while tile < size:
                launched(pairs_across)[(blocks * heads * (size // (2 * tile)),)](
                    self.q, self.k, self.g, *where, norms, reads, overlaps, skip, *qk, *of_g, self.key_heads, heads,
                    BS=self.slice, HALF=tile, **self.key, **self.kind, num_warps=tile // 16, num_stages=1,
                )  # fmt: skip
                tile *= 2
        else:
            launched(pairs_head)[(blocks * self.key_heads * self.tiles,)](
                self.q, self.k, self.g, self.beta, *where, norms, strengths, reads, overlaps, self.scale, skip, *qk,
                *strides(self.g, 2), *strides(self.beta, 2), self.key_heads, heads, BS=self.slice, TILE=self.tile,
                DECAY=self.decay, **self.key, **self.kind, **self.norm, **self.strength, num_warps=4, num_stages=1,
            )  # fmt: skip
        if overlaps is not None:
            solved = self.new(*overlaps.shape, dtype=torch.float64)
            launched(solve)[(blocks * heads,)](
                placed.owner, strengths, overlaps, solved, heads, BT=size, num_warps=2, num_stages=1
            )  # fmt: skip
        operands = self.new(blocks, heads, 3, 3, size, self.keys, dtype=PART)
        whole = self.new(blocks, heads, self.keys)
        updates = self.new(blocks, heads, size, self.width)
        launched(key_operands)[(blocks * heads * (self.keys // self.slice),)](
            self.q, self.k, self.g, self.beta, *where, norms, reads, solved, operands, whole, skip, *qk,
            *strides(self.g, 3), *strides(self.beta, 2), self.key_heads, heads, BS=self.slice, DECAY=self.decay,
            **self.key, **self.kind, **self.strength, num_warps=2, num_stages=1,
        )  # fmt: skip
        outputs = self.new(*updates.shape) if read else None
        launched(value_operands)[(blocks * heads * (self.width // self.value_slice),)](
            self.v, self.beta, *where, reads, solved, updates, outputs, skip, *self.v.stride(),
            *strides(self.beta, 2), heads, BS=self.value_slice, READ=read, **self.value, **self.kind,
            **self.strength, num_warps=2, num_stages=1,
        )  # fmt: skip
        return Span(placed, skip, norms, reads, overlaps, solved, operands, whole, updates, outputs)

    def advance(
        self, span: Any, source: Tensor, final: Tensor, *, o: Tensor | None = None, states: Tensor | None = None
    ) -> None:
        """Takes the states `source` through a span to `final`, maybe itself."""
        placed = span.schedule
        grid = (self.width // (self.pieces * self.columns) * self.value_heads * self.sequences,)
        where = (source, self.starts, self.lengths, self.offsets, placed.first, placed.count, o, final, states)
        options = {
            "BV": self.columns, "PIECES": self.pieces, "AFTER": self.after, "READ": o is not None,
            "KEEP": states is not None, **self.key, **self.value, **self.blocks, **self.norm, **self.write,
        }  # fmt: skip
        launched(advance)[grid](
            self.q, span.operands, span.updates, span.outputs, span.whole, *where, self.scale, span.skip,
            *self.q.stride(), *strides(o, 3), self.key_heads, self.value_heads, DELTA=self.delta,
            **options, **self._sequential(),
        )  # fmt: skip

    def _sequential(self) -> dict[str, int]:
        """Of the loops over blocks."""
        return {"num_warps": 8 if self.keys >= 64 and self.columns > 16 else 4, "num_stages": 1}

    def retreat(self, span: Any, grad_o: Tensor, dstate: Tensor, kept: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the gradient of the states back through a span, in place, and writes its tokens' of v.

        Args:
            kept: the states before every block.

        Returns:
            Gradients of the states after every block, and of `beta (v - k_in S)`, as `grad_updates` has them.
        """
        placed, heads, skip = span.schedule, self.value_heads, span.skip
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        cotangents = self.new(*kept.shape)
        drhs = self.new(placed.blocks, heads, self.cut.size, self.width)
        launched(retreat)[(self.width // self.columns * heads * self.sequences,)](
            self.q, grad_o, span.operands, span.whole, dstate, self.starts, self.lengths, self.offsets, placed.first,
            placed.count, dstate, cotangents, self.scale, skip, *self.q.stride(), *grad_o.stride(), self.key_heads,
            heads, BV=self.columns, AFTER=self.after, **self.key, **self.value, **self.kind, **self.norm,
            **self._sequential(),
        )  # fmt: skip
        launched(grad_updates)[(placed.blocks * heads * (self.width // self.value_slice),)](
            grad_o, self.beta, *where, span.reads, span.solved, span.operands, cotangents, dv, drhs, skip,
            *grad_o.stride(), *strides(self.beta, 2), *dv.stride(), heads, BS=self.value_slice, AFTER=self.after,
            **self.key, **self.value, **self.kind, **self.strength, num_warps=2, num_stages=1,
        )  # fmt: skip
        span.operands = None  # a quarter of the memory
        return cotangents, drhs

    def gradients(
        self,
        span: Any,
        grad_o: Tensor,
        states: tuple[Tensor, Tensor],
        passed: tuple[Tensor, Tensor],
        grads: dict[str, Tensor],
    ) -> None:
        """Writes a span's gradients of q, k, g and beta.

        Args:
            span: its operands are gone. states: those before every block, and those behind the span.
            passed: of `retreat`.
        """
        (kept, final), (cotangents, drhs) = states, passed
        placed, size, heads, skip = span.schedule, self.cut.size, self.value_heads, span.skip
        blocks = placed.blocks
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        qk, of_beta, of_g = (*self.q.stride(), *self.k.stride()), strides(self.beta, 2), strides(self.g, 3)
        after = {"AFTER": self.after}
        dreads = self.new(blocks, heads, size, size)
        doverlaps = self.new(blocks, heads, size, size) if self.delta else None
        strengths, gates = (self.new(blocks, heads, 2, size) for _ in range(2))
        launched(grad_pairs)[(blocks * heads * self.tiles,)](
            grad_o, self.v, self.g, self.beta, *where, span.reads, span.overlaps, span.updates, drhs, dreads,
            doverlaps, strengths, gates, skip, *grad_o.stride(), *self.v.stride(), *of_g[:2], *of_beta, heads,
            BS=self.value_slice, TILE=self.tile, DECAY=self.decay, **after, **self.value, **self.kind, **self.parts,
            **self.strength, num_warps=2, num_stages=1 if self.decay == 2 else 2,
        )  # fmt: skip
        dkeys = self.new(blocks, heads, 2, size, self.keys)
        dgates = self.new(blocks, heads, size, self.keys) if self.decay == 2 else None
        rows = self._keys(span, grad_o, kept, cotangents, drhs, dreads, doverlaps, dkeys, dgates)
        dg, dbeta = grads.get("dg"), grads.get("dbeta")
        if self.decay == 2 and self.g is not None and dg is not None:
            self._levels(span, dreads, doverlaps, dkeys, dgates, dg)
        if self.after:
            launched(grad_lines)[(blocks * heads,)](
                grad_o, *where, kept, final, dkeys, skip, *grad_o.stride(), heads, blocks, BS=self.slice, VS=16,
                **self.key, **self.value, BT=size, **self.cut.constants(), num_warps=4, num_stages=1,
            )  # fmt: skip
        dq, dk = grads["dq"], grads["dk"]
        launched(deliver)[(blocks * self.key_heads,)](
            self.q, self.k, *where, span.norms, dkeys, rows, strengths, gates, dq, dk, dg, dbeta, skip, *qk,
            *dq.stride(), *dk.stride(), *strides(dg, 3)[:2], *strides(dbeta, 2), self.key_heads, heads,
            BS=self.slice, TILE=self.tile, SLICES=rows.shape[2], DELTA=self.delta, DECAY=self.decay, **self.key,
            **self.strength, **self.norm, **self.blocks, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _keys(
        self, span: Any, grad_o: Tensor, kept: Tensor, cotangents: Tensor, drhs: Tensor, dreads: Tensor,
        doverlaps: Tensor | None, dkeys: Tensor, dgates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Gradients of keys, queries and, by channel, of gates, but for what `_levels` adds. Returns `rows`."""
        slices = self.keys // self.slice
        rows = self.new(span.schedule.blocks, self.value_heads, slices, 4, self.cut.size)
        launched(grad_keys)[(span.schedule.blocks * self.value_heads * slices,)](
            *self._key_arguments(span, grad_o, kept, cotangents, span.updates, drhs, dreads, doverlaps, span.whole,
            dkeys, dgates, rows), BS=self.slice, VS=16, DECAY=self.decay, AFTER=self.after, **self.key, **self.value,
            **self.kind, **self.parts, **self.strength, num_warps=2, num_stages=3,
        )  # fmt: skip
        return rows

    def _key_arguments(self, span: Any, grad_o: Tensor, *given: Any) -> tuple[Any, ...]:
        placed = span.schedule
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        return (
            self.q, self.k, self.g, self.beta, grad_o, *where, span.norms, *given, span.skip, *self.q.stride(),
            *self.k.stride(), *strides(self.g, 3), *strides(self.beta, 2), *grad_o.stride(), self.key_heads,
            self.value_heads,
        )  # fmt: skip

    def _levels(
        self, span: Any, dreads: Tensor, doverlaps: Tensor | None, dkeys: Tensor, dgates: Tensor | None, dg: Tensor
    ) -> None:
        """What pairs of tokens add under a decay by channel."""
        launched(grad_levels)[(span.schedule.blocks * self.value_heads * (self.keys // self.slice),)](
            *self._level_arguments(span, dreads, doverlaps, dkeys, dgates, dg), BS=self.slice, TILE=_CORNER,
            **self.key, **self.kind, **self.parts, num_warps=self.cut.size // _CORNER, num_stages=1,
        )  # fmt: skip

    def _level_arguments(self, span: Any, *given: Any) -> tuple[Any, ...]:
        placed, dg = span.schedule, given[-1]
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        return (
            self.q, self.k, self.g, *where, span.norms, *given, span.skip, *self.q.stride(), *self.k.stride(),
            *strides(self.g, 3), *dg.stride(), self.key_heads, self.value_heads,
        )  # fmt: skip


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides: zeros for what is not there, or has fewer."""
    strides = () if x is None else x.stride()
    return (*strides, *(0,) * count)[:count]
