"""Which tokens form which block, and in which order the blocks run.

The chunk reference cuts every sequence into blocks of at most 64 tokens. A block never crosses a line of the
quantization grid, so that a state is rounded only between blocks. Blocks are listed step-major: first every sequence's
block 0, then every sequence's block 1, ..., sequences with more blocks first. The sequences that still run at a step
are then the first rows of the state, their blocks are neighbouring rows of every tensor, and packed sequences of very
different lengths cost what their tokens cost, not `N * max(length)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lattn_compile.kernels.reference.padding import Slots

__all__ = ["MAX_BLOCK", "Lines", "Pending", "Schedule", "schedule"]

MAX_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Lines:
    """The blocks of a step that end at a grid line, int64 `[E]` each.

    Attributes:
        rows: within the step.
        owner: the sequence of each. done: its tokens up to the line.
        last: which of these are the last line of their sequence; None where none is.
    """

    rows: Tensor
    owner: Tensor
    done: Tensor
    last: Tensor | None


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens behind the last grid line of their sequence, int64 `[P]` each.

    Attributes:
        row, slot: where the token is in the blocks; rows ascend.
        sequence, place: whose it is, and how many tokens lie between that line and it.
    """

    row: Tensor
    slot: Tensor
    sequence: Tensor
    place: Tensor

    def within(self, first: int, last: int) -> Pending | None:
        """Those in block rows `first <= row < last`, counted from `first`; None if there are none."""
        lo, hi = torch.searchsorted(self.row, self.row.new_tensor([first, last])).tolist()
        if lo == hi:
            return None
        return Pending(self.row[lo:hi] - first, self.slot[lo:hi], self.sequence[lo:hi], self.place[lo:hi])


@dataclass(frozen=True, slots=True)
class Schedule:
    """Blocks of all sequences, step-major.

    Attributes:
        order: int64 `[N]`, the sequences sorted by falling number of blocks; rows of the running state.
        steps: block rows of step j are `steps[j] : steps[j + 1]`; they belong to the first sequences of `order`.
        index, valid: `[blocks, size]`, the token in each slot of each block (`padding.Slots`); `size` a power of two.
        ends: per step, the blocks after which a grid line lies; None where there is none.
        end_slot: slot of the last token before a grid line.
        tokens: tokens a full block holds (`<= size`).
        chunk: tokens between two grid lines; without a grid, of a block.
        owner: int64 `[blocks]`, the sequence of each block. base: int64 `[blocks]`, position of each block's slot 0,
            counted from the grid line at or before the sequence's first token.
        lead, stop: int64 `[N]`, where the sequence begins and ends, counted likewise.
    """

    order: Tensor
    steps: list[int]
    index: Tensor
    valid: Tensor
    ends: list[Lines | None]
    end_slot: int
    tokens: int
    chunk: int
    owner: Tensor
    base: Tensor
    lead: Tensor
    stop: Tensor

    def block_rows(self, span: tuple[int, int]) -> tuple[int, int]:
        """Block rows `first <= row < last` of steps `span[0] <= step < span[1]`."""
        return self.steps[span[0]], self.steps[span[1]]

    def slots(self, first: int, last: int) -> Slots:
        """The slots of steps `first <= step < last`."""
        rows = slice(self.steps[first], self.steps[last])
        index, valid = self.index[rows], self.valid[rows]
        if not bool(valid.all()):
            return Slots(index, valid)
        run = self.order.shape[0] == 1 and index.numel() > 0
        return Slots(index, None, int(index[0, 0]) if run else None)

    def taken(self, step: int) -> list[int]:
        """Slots that hold a token in any block of a step."""
        valid: list[bool] = self.valid[self.steps[step] : self.steps[step + 1]].any(0).tolist()
        return [slot for slot, taken in enumerate(valid) if taken]

    def pending(self) -> Pending:
        """The tokens behind the last grid line of each sequence, or all of it; there must be a grid."""
        last = (self.stop - self.stop % self.chunk)[self.owner]
        place = (self.base - last)[:, None] + torch.arange(self.index.shape[1], device=self.index.device)
        row, slot = (self.valid & (place >= 0)).nonzero().unbind(1)
        return Pending(row, slot, self.owner[row], place[row, slot])

    def spans(self, block_cost: int, budget: int) -> list[tuple[int, int]]:
        """Runs of steps `(first, last)` whose blocks are processed together, at least 64 tokens of a sequence each.

        A span is what lives in memory at a time, and one state a span is kept for the backward: below 64 tokens that
        would be a state every few tokens.
        """
        spans, first, least = [], 0, -(-MAX_BLOCK // self.tokens)
        while first < len(self.steps) - 1:
            last = min(first + least, len(self.steps) - 1)
            while last < len(self.steps) - 1 and (self.steps[last + 1] - self.steps[first]) * block_cost <= budget:
                last += 1
            spans.append((first, last))
            first = last
        return spans


def schedule(starts: Tensor, lengths: Tensor, offsets: Tensor | None, grid: int | None) -> Schedule:
    """Cuts sequences into blocks.

    Args:
        starts, lengths: int64 `[N]`, sequences as runs of flat tokens.
        offsets: int64 `[N]`, tokens between the last grid line and a sequence's first token; None is 0.
        grid: tokens between two grid lines; None when nothing is quantized, then blocks depend on the lengths only.
            With a grid they depend on the grid only, so that cutting a sequence on it changes no block.

    Reads the lengths on the host (a device sync off the CPU).
    """
    device, count = starts.device, starts.shape[0]
    if grid is None:
        longest = int(lengths.max()) if count else 0
        chunk = tokens = min(MAX_BLOCK, _power_of_two(longest))
    else:
        chunk, tokens = grid, -(-grid // -(-grid // MAX_BLOCK))
    size, per_chunk = _power_of_two(tokens), -(-chunk // tokens)
    lead = torch.zeros_like(starts) if offsets is None else offsets % chunk

    def block_of(position: Tensor) -> Tensor:
        return position // chunk * per_chunk + position % chunk // tokens

    first = block_of(lead)
    blocks = torch.where(lengths > 0, block_of(lead + lengths - 1) - first + 1, 0)
    order = torch.argsort(blocks, descending=True, stable=True)
    sizes = blocks[order].tolist()
    running, steps = count, [0]
    for j in range(sizes[0] if sizes else 0):
        while sizes[running - 1] <= j:
            running -= 1
        steps.append(steps[-1] + running)

    bounds = torch.tensor(steps, device=device)
    step = torch.repeat_interleave(bounds.diff())
    sequence = order[torch.arange(steps[-1], device=device) - bounds[step]]
    block = first[sequence] + step
    inside = block % per_chunk * tokens
    slot = torch.arange(size, device=device)
    base = block // per_chunk * chunk + inside
    # The token of the sequence that stands in every slot.
    token = (base - lead[sequence])[:, None] + slot
    valid = (slot < tokens) & (inside[:, None] + slot < chunk) & (token >= 0) & (token < lengths[sequence][:, None])
    index = torch.where(valid, starts[sequence][:, None] + token, 0)

    end_slot = chunk - 1 - (per_chunk - 1) * tokens
    ends: list[Lines | None] = [None] * (len(steps) - 1)
    if grid is not None:
        rows = (valid[:, end_slot] & (block % per_chunk == per_chunk - 1)).nonzero()[:, 0]
        ends = _lines(rows, bounds, sequence, base + end_slot + 1, lead, lengths, chunk)
    return Schedule(order, steps, index, valid, ends, end_slot, tokens, chunk, sequence, base, lead, lead + lengths)


def _lines(
    rows: Tensor, bounds: Tensor, sequence: Tensor, line: Tensor, lead: Tensor, lengths: Tensor, chunk: int
) -> list[Lines | None]:
    """`Schedule.ends` of the blocks `rows`, which end at the positions `line`; steps begin at `bounds`."""
    owner, cuts = sequence[rows], torch.searchsorted(rows, bounds)
    done = line[rows] - lead[owner]
    inside = rows - bounds[torch.repeat_interleave(cuts.diff())]
    final = (done + chunk > lengths[owner]).nonzero()[:, 0]
    edges, final_edges = cuts.tolist(), torch.searchsorted(final, cuts).tolist()
    ends: list[Lines | None] = []
    for (lo, hi), (first, last) in zip(pairwise(edges), pairwise(final_edges), strict=True):
        line_ends = Lines(inside[lo:hi], owner[lo:hi], done[lo:hi], final[first:last] - lo if last > first else None)
        ends.append(line_ends if hi > lo else None)
    return ends


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
