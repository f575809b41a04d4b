"""A chunk-form call whose inputs are bf16: its own kernels between the inputs and the states, in fp16 parts."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lattn_compile.kernels.chunk_blocks import MAX_BLOCK, Schedule, schedule
from lattn_compile.kernels.chunk_call import Call, strides
from lattn_compile.kernels.chunk_channel import block_fine
from lattn_compile.kernels.chunk_pairs import pairs_rows
from lattn_compile.kernels.chunk_rows import FACTORS, channel_rows, head_rows
from lattn_compile.kernels.chunk_sizes import shared_memory
from lattn_compile.kernels.chunk_solve import solve_fine
from lattn_compile.kernels.chunk_state import carry
from lattn_compile.kernels.chunk_state_back import carry_back
from lattn_compile.kernels.common.launch import is_recorded, launched

__all__ = ["FineCall"]

GROUPS = 2
"""Warps of a program of `carry`, each with 16 columns; more where a tile of the state's format is wider."""

PIECE = 32
"""Channels of a piece of the state in registers."""

_SPREAD_COLUMNS = 32
"""Of a program of `carry_cuda`, by channel and where it rounds, and of `carry_back_cuda`."""

_BLOCK_REGISTERS = 168
"""At most, of a thread of `block_cuda`: three programs of it on a multiprocessor."""


def is_spread(device: torch.device) -> bool:
    """Whether kernels are those of `chunk_cuda.py`, where sizes allow it: on NVIDIA's GPUs, but not in a graph, since
    Inductor writes kernels in Triton's own language only; and where Triton has Gluon as it is used there."""
    return device.type == "cuda" and torch.version.hip is None and not is_recorded() and gluon() is not None


@functools.cache
def gluon() -> Any:
    """The kernels of `chunk_cuda.py`, None where Triton has no Gluon, or another."""
    try:
        return importlib.import_module("lattn_compile.kernels.chunk_cuda")
    except (ImportError, AttributeError):
        return None


@dataclass(slots=True)
class _Span:
    """Some blocks of every sequence, and what the kernels make of them; shapes as in those."""

    schedule: Schedule
    skip: int
    rows: Tensor | None
    factors: Tensor
    whole: Tensor | None
    scales: Tensor | None
    norms: Tensor | None
    pairs: Tensor | None
    reads: Tensor | None
    overlaps: Tensor | None
    solved: Tensor | None
    turned: Tensor | None
    updates: Tensor | None = None

    def let_go(self) -> None:
        """Of what the gradients of keys do not read: a third of the memory."""
        self.rows = self.pairs = self.solved = self.turned = None


class FineCall(Call):
    """`Call` of bf16 inputs."""

    def _sizes(self, value_dim: int) -> None:
        groups = min(GROUPS, max(1, triton.next_power_of_2(value_dim) // 16))
        self.groups = max(groups, self.write["BLOCK_V"] // 16)
        self.width = triton.cdiv(value_dim, 16 * self.groups) * 16 * self.groups

        self.spread = is_spread(self.q.device) and self._fits_spread()
        # Gates' gradients are sums that cancel where a key repeats: 22 bits of the inverse put them off by 2e-5, and
        # the state by 9e-6. All three parts put it off by 8e-7 by head, where a forward's loop has no registers left.
        self.solved_parts = 3 if self.backward or self.decay == 2 else 2

    def _needs(self, backward: bool) -> int:
        size, keys = self.cut.size, self.keys
        square, values, states = size * size, 4 * size * self.width, 4 * keys * self.width
        rows = 12 * size * keys
        if self.decay != 2:
            rows = (4 if self.spread else 6) * size * keys * self.key_heads // self.value_heads
        kept = 4 * (FACTORS * size + keys)
        if not backward:
            return rows + kept + 16 * square
        # On the way back, the inverse and what its kernel leaves, or both states and updates; then what the gradients
        # of keys are made of, when rows, the inverse and its like are let go.
        made = rows + (10 if self.spread else 16) * square + max(8 * square, 2 * values + 2 * states)
        later = 2 * values + 2 * states + 8 * square + (12 if self.decay == 2 else 8) * size * keys + size * keys
        return kept + (12 if self.decay == 1 else 8) * square + max(made, later)

    def prepare(self, skip: int, *, read: bool, back: bool = False) -> Any:
        placed = schedule(self.lengths, self.offsets, self.cut, self.bound, skip, self.span)
        size, blocks, heads, key_heads = self.cut.size, placed.blocks, self.value_heads, self.key_heads
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        qk, half = (*self.q.stride(), *self.k.stride()), {"dtype": torch.float16}
        turn = back and not self.spread
        factors = self.new(blocks, heads, FACTORS, size)
        norms = self.new(blocks, key_heads, 2, size) if back else None
        read = read or back
        pairs = self.new(blocks, heads, 2 if back else 1, size, size, **half) if read else None
        overlaps = self.new(blocks, heads, size, size, dtype=torch.float64) if self.delta else None
        if self.decay == 2 and self.g is not None:
            of_g, of_beta = self.g.stride(), strides(self.beta, 2)
            whole = self.new(blocks, heads, self.keys)
            span = _Span(placed, skip, None, factors, whole, None, norms, pairs, None, overlaps, None, None)
            queries = (2 if back and self.spread else 1) if read else 0
            span.rows = self.new(blocks, heads, 4 + queries, size, self.keys, **half)
            options = {
                "DELTA": self.delta, "READ": read, "BACK": back, **self.key, **self.norm, **self.strength,
                **self.blocks, "num_warps": size // 16, "num_stages": 1,
            }  # fmt: skip
            if self.spread:
                launched(gluon().block_cuda)[(blocks * heads,)](
                    self.q, self.k, self.g, self.beta, *where, norms, span.rows, whole, factors, pairs, overlaps,
                    self.scale, skip, *qk, *of_g, *of_beta, key_heads, heads, maxnreg=_BLOCK_REGISTERS, **options,
                )  # fmt: skip
            else:
                span.scales, exact = self.new(blocks, key_heads, 4, size), self._exact(placed)
                launched(block_fine)[(blocks * heads,)](
                    self.q, self.k, self.g, self.beta, *where, span.scales, exact, norms, span.rows, whole, factors,
                    pairs, overlaps, self.scale, skip, *qk, *of_g, *of_beta, key_heads, heads, BS=self.slice, TURN=turn,
                    **options,
                )  # fmt: skip
        else:
            span = _Span(placed, skip, None, factors, None, None, norms, pairs, None, overlaps, None, None)
            exact = self._exact(placed)
            span.rows = self.new(blocks, key_heads, (1 if self.spread else 2) + read, size, self.keys, **half)
            launched(head_rows)[(blocks * key_heads,)](
                self.q, self.k, self.g, self.beta, *where, span.rows, factors, exact, norms, self.scale, skip, *qk,
                *strides(self.g, 2), *strides(self.beta, 2), key_heads, heads, DECAY=self.decay, READ=read,
                BACK=back, WIDE=self.spread, TURN=turn, **self.key, **self.strength, **self.norm, **self.blocks,
                num_warps=4, num_stages=1,
            )  # fmt: skip
            if back and self.decay == 1:
                span.reads = self.new(blocks, heads, size, size)
            launched(pairs_rows)[(blocks * key_heads * self.tiles,)](
                placed.owner, span.rows, factors, exact, pairs, overlaps, span.reads, key_heads, heads, BK=self.keys,
                BT=size, TILE=self.tile, DELTA=self.delta, DECAY=self.decay, READ=read, BACK=back, WIDE=self.spread,
                TURN=turn, num_warps=4, num_stages=1,
            )  # fmt: skip
        if overlaps is not None:
            parts = self.solved_parts
            span.solved = self.new(blocks, heads, parts, size, size, **half)
            span.turned = self.new(blocks, heads, parts, size, size, **half) if turn else None
            inverse = torch.empty_like(overlaps) if back else overlaps
            launched(solve_fine)[(blocks * heads,)](
                placed.owner, factors, overlaps, inverse, span.solved, span.turned, heads, BT=size, PARTS=parts,
                TURN=turn, num_warps=2 if turn else 1, num_stages=1,
            )  # fmt: skip
        return span

    def _exact(self, placed: Schedule) -> Tensor:
        return self.new(placed.blocks, self.key_heads, self.cut.size, dtype=torch.float64)

    def _keys(
        self, span: Any, grad_o: Tensor, kept: Tensor, cotangents: Tensor, drhs: Tensor, dreads: Tensor,
        doverlaps: Tensor | None, dkeys: Tensor, dgates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if not self.spread or self.decay != 2:
            return super()._keys(span, grad_o, kept, cotangents, drhs, dreads, doverlaps, dkeys, dgates)
        blocks, heads = span.schedule.blocks, self.value_heads
        rows = self.new(blocks, heads, self.keys // 16, 4, self.cut.size)
        launched(gluon().keys_cuda)[(blocks * heads * (self.keys // 64),)](
            *self._key_arguments(span, grad_o, kept, cotangents, span.updates, drhs, span.whole, dkeys, dgates, rows),
            AFTER=self.after, **self.key, **self.value, **self.kind, **self.strength, num_warps=4, num_stages=1,
        )  # fmt: skip
        return rows

    def _levels(
        self, span: Any, dreads: Tensor, doverlaps: Tensor | None, dkeys: Tensor, dgates: Tensor | None, dg: Tensor
    ) -> None:
        if not self.spread:
            super()._levels(span, dreads, doverlaps, dkeys, dgates, dg)
            return
        launched(gluon().levels_cuda)[(span.schedule.blocks * self.value_heads * (self.keys // 32),)](
            *self._level_arguments(span, dreads, doverlaps, dkeys, dgates, dg), **self.key, **self.kind,
            num_warps=4, num_stages=1,
        )  # fmt: skip

    def _turned_rows(self, span: _Span) -> Tensor:
        """Of a decay by channel, for `carry_back`."""
        placed, size, heads = span.schedule, self.cut.size, self.value_heads
        rows = self.new(placed.blocks, heads, 6, size, self.keys, dtype=torch.float16)
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        launched(channel_rows)[(placed.blocks * heads * (self.keys // self.slice),)](
            self.q, self.k, self.g, *where, span.scales, rows, span.skip, *self.q.stride(), *self.k.stride(),
            *strides(self.g, 3), self.key_heads, heads, BS=self.slice, **self.key, **self.blocks, num_warps=2,
            num_stages=1,
        )  # fmt: skip
        return rows

    def _loop(self, parts: int, squares: int) -> dict[str, Any]:
        """Options of the loops over blocks, which load so many matrices of keys and of tokens."""
        size = self.cut.size
        loaded = 2 * (parts * size * self.keys + squares * size * size)
        room = shared_memory(self.q.device) - (6 * self.groups + 1) * 1024
        # One: nothing is loaded ahead, as with K = 256 by channel on the way back.
        stages = max(1, min(3, 1 + room // loaded))
        return {
            "W": min(PIECE, self.keys), "G": self.groups, "DELTA": self.delta, "CHANNEL": self.decay == 2,
            "STAGES": stages, "AFTER": self.after, **self.key, **self.value, **self.norm,
            **self.blocks, "num_warps": self.groups, "num_stages": 1,
        }  # fmt: skip

    def advance(
        self, span: Any, source: Tensor, final: Tensor, *, o: Tensor | None = None, states: Tensor | None = None
    ) -> None:
        placed = span.schedule
        if states is not None:
            span.updates = self.new(placed.blocks, self.value_heads, self.cut.size, self.width)
        read = o is not None
        rows = span.rows.shape[2]
        if self.spread:
            # By head two programs of 16 columns fit on a multiprocessor, of which one waits while the other works.
            columns = 16 if self.decay != 2 and not self.write["FORMAT"] else _SPREAD_COLUMNS
            launched(gluon().carry_cuda)[(self.width // columns * self.value_heads * self.sequences,)](
                self.v, span.rows, span.factors, span.whole, span.solved, span.pairs, source, self.starts, self.lengths,
                self.offsets, placed.first, placed.count, o, final, states, span.updates, span.skip, *self.v.stride(),
                *strides(o, 3), self.key_heads, self.value_heads, DELTA=self.delta, CHANNEL=self.decay == 2,
                FORMAT=self.write["FORMAT"], BV=columns, READ=read, KEEP=states is not None, ROWS=rows,
                SOLVED=self.solved_parts, **self.key, **self.value, **self.blocks, num_warps=columns // 4,
            )  # fmt: skip
            return
        parts = (4 if self.decay == 2 else 2) + read
        launched(carry)[(self.width // (16 * self.groups) * self.value_heads * self.sequences,)](
            self.q, self.v, span.rows, span.factors, span.whole, span.solved, span.pairs, source, self.starts,
            self.lengths, self.offsets, placed.first, placed.count, o, final, states, span.updates, self.scale,
            span.skip, *self.q.stride(), *self.v.stride(), *strides(o, 3), self.key_heads, self.value_heads,
            READ=read, KEEP=states is not None, ROWS=rows, SOLVED=self.solved_parts, **self.write,
            **self._loop(parts, self.solved_parts + read),
        )  # fmt: skip

    def _fits_spread(self) -> bool:
        """Whether `chunk_state_cuda.py` has a loop for these sizes, and shared memory room for it, forward and back."""
        size, keys = self.cut.size, self.keys
        if not self._spread_tile() or size != MAX_BLOCK or not 64 <= keys <= 128 or self.width % _SPREAD_COLUMNS:
            return False
        # On the way back, matrices of keys and of tokens, and what its warps hand to each other.
        of_keys, of_tokens = (6, 5) if self.decay == 2 else (4, 10)
        handed = _SPREAD_COLUMNS * (4 * keys + 18 * size + 16)
        return 2 * size * (of_keys * keys + of_tokens * size) + handed + 1024 <= shared_memory(self.q.device)

    def _spread_tile(self) -> bool:
        """Whether `carry_cuda` can round as the call wants: its program has a tile's 32 columns."""
        tiled = self.write["FORMAT"] in ("int8", "fp8_e4m3") and self.write["BLOCK_K"] == self.keys
        return not self.write["FORMAT"] or (tiled and self.write["BLOCK_V"] == _SPREAD_COLUMNS and not self.after)

    def retreat(self, span: Any, grad_o: Tensor, dstate: Tensor, kept: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        placed, heads = span.schedule, self.value_heads
        if self.decay == 2 and not self.spread:
            span.rows = None
            span.rows = self._turned_rows(span)
        cotangents = self.new(*kept.shape)
        drhs = self.new(placed.blocks, heads, self.cut.size, self.width)
        if self.spread:
            launched(gluon().carry_back_cuda)[(self.width // _SPREAD_COLUMNS * heads * self.sequences,)](
                self.q, grad_o, span.rows, span.factors, span.whole, span.solved, span.pairs, dstate, self.starts,
                self.lengths, self.offsets, placed.first, placed.count, dstate, cotangents, drhs, dv, self.scale,
                span.skip, *self.q.stride(), *grad_o.stride(), *dv.stride(), self.key_heads, heads, DELTA=self.delta,
                CHANNEL=self.decay == 2, AFTER=self.after, STAGES=1 if self.decay == 2 else 2, **self.key, **self.value,
                **self.norm, **self.blocks, num_warps=8,
            )  # fmt: skip
            span.let_go()
            return cotangents, drhs
        parts = 6 if self.decay == 2 else 3
        launched(carry_back)[(self.width // (16 * self.groups) * heads * self.sequences,)](
            self.q, grad_o, span.rows, span.factors, span.whole, span.turned, span.pairs, dstate, self.starts,
            self.lengths, self.offsets, placed.first, placed.count, dstate, cotangents, drhs, dv, self.scale,
            span.skip, *self.q.stride(), *grad_o.stride(), *dv.stride(), self.key_heads, heads,
            **self._loop(parts, 5),
        )  # fmt: skip
        span.let_go()
        return cotangents, drhs
