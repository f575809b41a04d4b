"""Which program of a grid handles which tokens, found out on the device, so that no kernel waits for lengths.

A sequence is cut into blocks of at most BT tokens. With a quantization grid of CHUNK tokens no block crosses one of its
lines: a chunk is PER blocks of TOKENS tokens, the last one maybe shorter, and a sequence that starts `lead` tokens
behind a line begins with a block whose first slots stay empty. Without a grid, CHUNK = TOKENS = BT. Blocks are numbered
through all sequences; there are at most `bound(...)` of them, which shapes alone tell.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.launch import is_recorded, launched

__all__ = ["MAX_BLOCK", "Cut", "Schedule", "cut", "extent", "schedule"]

MAX_BLOCK = 64
"""Tokens of a block. The work inside a block grows with its square, that between blocks shrinks with their number."""

_LEAST = 16  # of a matrix product, and of a block
_SEQUENCES = 64  # read at a time
_PLACES = 64  # blocks placed by one program


class Cut(NamedTuple):
    """How sequences are cut: compile-time constants of the kernels, with their names there.

    Attributes:
        size: BT, slots of a block, a power of two. chunk: CHUNK. tokens: TOKENS. per: PER.
    """

    size: int
    chunk: int
    tokens: int
    per: int

    def constants(self) -> dict[str, int]:
        return {"CHUNK": self.chunk, "TOKENS": self.tokens, "PER": self.per}

    def bound(self, tokens: int, sequences: int, *, on_line: bool) -> int:
        """At least the number of blocks of `sequences` disjoint runs of `tokens` tokens together.

        Args:
            on_line: every run begins on a line.
        """
        # L tokens that begin on a line lie in at most L // CHUNK + 1 chunks, others in one more.
        return (tokens // self.chunk + (1 if on_line else 2) * sequences) * self.per


def cut(tokens: int, grid: int | None) -> Cut:
    """The cut for a call of `tokens` flat tokens; `grid`: tokens between two lines, None without a grid.

    Blocks have 16 slots or 64. With 32, Triton 3.6 makes kernels for Hopper whose outputs are wrong under a decay by
    channel, though they are right in its interpreter.
    """
    if grid is None:
        size = _LEAST if tokens <= _LEAST else MAX_BLOCK
        return Cut(size, size, size, 1)
    per = triton.cdiv(grid, MAX_BLOCK)
    part = triton.cdiv(grid, per)
    # A cut that rounded down leaves the last parts of a chunk without tokens: ceil(chunk / part) of them are enough.
    return Cut(_LEAST if part <= _LEAST else MAX_BLOCK, grid, part, triton.cdiv(grid, part))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Some blocks of all sequences: of each, those with numbers from `skip` on, as many as were asked for.

    Attributes:
        owner: int32 `[NB]`, the sequence of each block, -1 beyond the last. index: int32 `[NB]`, its number in the
            sequence, from `skip`.
        first: int32 `[N]`, each sequence's first block here. count: int32 `[N]`, its blocks here.
    """

    owner: Tensor
    index: Tensor
    first: Tensor
    count: Tensor

    @property
    def blocks(self) -> int:
        """NB."""
        return self.owner.shape[0]


@triton.jit
def extent(index, lead, length, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr):
    """Where a sequence's block `index` lies.

    Args:
        lead: tokens between the grid line at or before the sequence's first token and that token.

    Returns:
        (base, low, high, line): slot s holds token `base + s` of the sequence for low <= s < high; a grid line follows
        the block's last token (never without a grid: ask only where there is one).
    """
    block = index + lead // TOKENS
    inside = block % PER * TOKENS
    base = block // PER * CHUNK + inside - lead
    room = min(TOKENS, CHUNK - inside)
    low = tl.maximum(-base, 0)
    high = tl.minimum(length - base, room)
    line = (block % PER == PER - 1) & (base + room <= length)
    return base, low, high, line


@triton.jit
def _counts(
    lengths, offsets, i, N, skip, span,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    length = tl.load(lengths + i, mask=i < N, other=0)
    lead = tl.load(offsets + i, mask=i < N, other=0) % CHUNK
    last = lead + length - 1
    count = last // CHUNK * PER + last % CHUNK // TOKENS - lead // TOKENS + 1
    count = tl.where(length > 0, count, 0).to(tl.int32)
    return tl.minimum(tl.maximum(count - skip, 0), span)


@triton.jit(do_not_specialize=["N", "blocks", "skip", "span"])
def _place(
    lengths, offsets, owner, index, first, count, N, blocks, skip, span,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    SEQUENCES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Fills a `Schedule`. Grid: (ceil(NB / PLACES),); every program goes through all sequences."""
    here = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    passed = tl.zeros([PLACES], tl.int32)  # sequences that end at or before a block
    begun = tl.zeros([PLACES], tl.int32)  # blocks of those
    total = 0
    for at in range(0, N, SEQUENCES):
        i = at + tl.arange(0, SEQUENCES)
        n = _counts(lengths, offsets, i, N, skip, span, CHUNK, TOKENS, PER)
        end = total + tl.cumsum(n, 0)
        if tl.program_id(0) == 0:
            tl.store(first + i, end - n, mask=i < N)
            tl.store(count + i, n, mask=i < N)
        before = (end[None, :] <= here[:, None]) & (i < N)[None, :]
        passed += tl.sum(before.to(tl.int32), 1)
        begun = tl.maximum(begun, tl.max(tl.where(before, end[None, :], 0), 1))
        total += tl.sum(n, 0)
    tl.store(owner + here, tl.where(here < total, passed, -1), mask=here < blocks)
    tl.store(index + here, here - begun, mask=here < blocks)


def schedule(lengths: Tensor, offsets: Tensor, plan: Cut, bound: int, skip: int, span: int) -> Schedule:
    """Places the blocks `skip <= index < skip + span` of every sequence.

    Args:
        lengths: int64 `[N]`, contiguous.
        offsets: int64 `[N]`, contiguous, tokens between a grid line and each sequence's first token.
        bound: of all blocks, by `plan.bound`.
    """
    count = lengths.shape[0]
    blocks = min(bound, span * count)
    sizes = [blocks, blocks, count, count]
    if is_recorded():  # a graph's tensors are views only where they must be
        parts = tuple(torch.empty(size, dtype=torch.int32, device=lengths.device) for size in sizes)
    else:
        parts = torch.empty(sum(sizes), dtype=torch.int32, device=lengths.device).split(sizes)
    launched(_place)[(triton.cdiv(blocks, _PLACES),)](
        lengths, offsets, *parts, count, blocks, skip, span,
        **plan.constants(), SEQUENCES=_SEQUENCES, PLACES=_PLACES, num_warps=4,
    )  # fmt: skip
    return Schedule(*parts)
