"""Which window of which sequence lies where, found out on the device, so that no kernel waits for lengths.

A window is W tokens between two lines of a sequence's grid; the first may begin `cursor` tokens behind its line, the
last may end before the next one. Sequences are taken in groups, longest first, and the windows of a group ranked step
by step: every sequence's first, then every sequence's second, and so on. A stretch is a run of ranks that are worked on
together: however ragged a batch is, it is full, a group's sequences run side by side, and hardly more than a group's
are cut by its ends, so that few states are kept between stretches.

    rank(sequence i, window j) = begin[origin[i] + j] + place[i]
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Windows", "rows", "runs", "windows"]


_GROUPS = 256
"""At most. A table has a number for each and each window that a sequence may have."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a call.

    Attributes:
        starts, lengths, leads: int64 `[N]`, the sequences' tokens, and their first one's place in its window.
        owner: int32 `[R]`, whose window it is, -1 beyond the last. step: int32 `[R]`, its number in the sequence.
        at: int32 `[R + 1]`, the place in `begin` of each rank's step. begin: int32 `[groups * J + 1]`.
        origin: int32 `[N]`, the place in `begin` of a sequence's first step. place: int32 `[N]`, in the group.
        count: int32 `[N]`, windows of each sequence.
        ranks: R, at least the number of windows, as far as shapes tell. together: sequences of a group.
    """

    starts: Tensor
    lengths: Tensor
    leads: Tensor
    owner: Tensor
    step: Tensor
    at: Tensor
    begin: Tensor
    origin: Tensor
    place: Tensor
    count: Tensor
    ranks: int
    together: int

    def tables(self) -> tuple[Tensor, ...]:
        """As `rows` takes them."""
        return self.owner, self.step, self.starts, self.lengths, self.leads

    def order(self) -> tuple[Tensor, ...]:
        """As `runs` takes them."""
        return self.at, self.begin, self.origin, self.place, self.count


def windows(starts: Tensor, lengths: Tensor, leads: Tensor, window: int, tokens: int, *, together: int) -> Windows:
    """Ranks the windows of sequences that have no more than `tokens` tokens together.

    Args:
        together: sequences that run side by side, if there are as many.
    """
    device, sequences = starts.device, starts.shape[0]
    starts, lengths, leads = (x.contiguous() for x in (starts, lengths, leads))
    together = max(1, min(sequences, max(together, -(-sequences // _GROUPS))))
    groups = -(-sequences // together)
    most = max(1, -(-(tokens + window - 1) // window))  # of one sequence
    ranks = (tokens + sequences * 2 * (window - 1)) // window
    count = torch.where(lengths > 0, (leads + lengths + (window - 1)) // window, 0)
    order = torch.argsort(count, descending=True, stable=True)
    spread = torch.arange(sequences, device=device)
    position = torch.empty_like(order).index_copy_(0, order, spread)
    # Sequences of a group with more than j windows, for every j.
    padded = torch.nn.functional.pad(count[order], (0, groups * together - sequences)).view(groups, together)
    alive = (padded[:, :, None] > torch.arange(most, device=device)).sum(1)
    ends = alive.flatten().cumsum(0)
    begin = torch.nn.functional.pad(ends, (1, 0))
    rank = torch.arange(ranks + 1, device=device)
    at = torch.searchsorted(ends, rank, right=True)
    here = at[:-1].clamp(max=groups * most - 1)
    member = torch.div(here, most, rounding_mode="floor") * together + (rank[:-1] - begin[here])
    owner = torch.where(rank[:-1] < ends[-1], order[member.clamp_(min=0, max=max(sequences - 1, 0))], -1)
    return Windows(
        starts,
        lengths,
        leads,
        owner.int(),
        (here % most).int(),
        at.int(),
        begin.int(),
        (torch.div(position, together, rounding_mode="floor") * most).int(),
        (position % together).int(),
        count.int(),
        ranks,
        together,
    )


@triton.jit
def rows(owner, step, starts, lengths, leads, rank, W: tl.constexpr, BT: tl.constexpr):
    """Tokens of a window's slots, int64 `[BT]`, and which slots have one; slot s is the window's s-th token."""
    i_seq = tl.load(owner + rank)
    base = tl.load(step + rank).to(tl.int64) * W - tl.load(leads + i_seq)
    slot = tl.arange(0, BT)
    inside = (slot < W) & (base + slot >= 0) & (base + slot < tl.load(lengths + i_seq))
    return tl.load(starts + i_seq) + base + slot, inside


@triton.jit
def runs(at, begin, origin, place, count, i_seq, first, last):
    """The windows `low <= j < high` of a sequence that have ranks `first <= rank < last`, int32; its origin and
    place."""
    i_origin, i_place, most = tl.load(origin + i_seq), tl.load(place + i_seq), tl.load(count + i_seq)
    first_at, last_at = tl.load(at + first), tl.load(at + last)
    low = first_at - i_origin + (tl.load(begin + first_at) + i_place < first).to(tl.int32)
    high = last_at - i_origin + (tl.load(begin + last_at) + i_place < last).to(tl.int32)
    return tl.minimum(tl.maximum(low, 0), most), tl.minimum(tl.maximum(high, 0), most), i_origin, i_place
