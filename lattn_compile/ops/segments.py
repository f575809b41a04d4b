"""From `cu_seqlens`, prefix and sequence lengths to runs of flat tokens, without a device sync.

Flat token `b * T + t` is token t of batch row b (packed: B = 1, the position in the buffer). Sequence i owns
`begin[i] : begin[i] + total[i]`; the first `prefix[i]` of them are exact, the rest are in the write mode.
Out-of-range lengths are clamped here: on a CPU `ops.validate` has refused them already, elsewhere their values were not
looked at and must not reach outside the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Segments", "next_cursor", "split"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of flat tokens, all int64 `[N]` on one device.

    Attributes:
        begin: first token of each sequence.
        prefix: number of exact tokens, `0 <= prefix <= total`.
        total: number of tokens that count; tokens behind them vanish.
    """

    begin: Tensor
    prefix: Tensor
    total: Tensor

    @property
    def suffix_begin(self) -> Tensor:
        return self.begin + self.prefix

    @property
    def suffix(self) -> Tensor:
        return self.total - self.prefix

    def rows(self, flat_tokens: int) -> Tensor:
        """Bool `[flat_tokens]`: the tokens that belong to a sequence."""
        edges = torch.zeros(flat_tokens + 1, dtype=torch.int64, device=self.begin.device)
        ones = torch.ones_like(self.begin)
        edges.index_add_(0, self.begin, ones)
        edges.index_add_(0, self.begin + self.total, -ones)
        return edges[:-1].cumsum(0) > 0


def split(
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    prefix_lengths: Tensor | None,
    sequence_lengths: Tensor | None,
    device: torch.device,
) -> Segments:
    """Segments of a call. Lengths are int tensors, `[]` for all sequences or `[N]`; None is p = 0 and n = T."""
    if cu_seqlens is None:
        begin = torch.arange(batch, dtype=torch.int64, device=device) * tokens
        size = torch.full_like(begin, tokens)
    else:
        ends = cu_seqlens.to(device=device, dtype=torch.int64).clamp(0, tokens)
        begin = ends[:-1]
        size = ends.diff().clamp(min=0)
    total = _clamped(sequence_lengths, size) if sequence_lengths is not None else size
    prefix = _clamped(prefix_lengths, total) if prefix_lengths is not None else torch.zeros_like(size)
    return Segments(begin, prefix, total)


def _clamped(lengths: Tensor, most: Tensor) -> Tensor:
    return torch.minimum(lengths.to(device=most.device, dtype=torch.int64).clamp(min=0), most)


def next_cursor(segments: Segments, cursor: Tensor | None, chunk_size: int | None) -> Tensor:
    """The cursor after a call, int32 `[N]`.

    -1: the state is exact and not handed over yet. Otherwise token mode (`chunk_size=None`): 0; chunk mode: how many
    tokens of the current chunk have passed, 0 on the grid. A call without tokens changes nothing; one that ends inside
    its prefix leaves an exact state; a prefix, or a state not handed over, starts a new grid (semantics §4, 5).
    """
    before = torch.full_like(segments.total, -1) if cursor is None else cursor.to(segments.total)
    if chunk_size is None:
        after = torch.zeros_like(segments.total)
    else:
        start = torch.where((segments.prefix > 0) | (before < 0), 0, before)
        after = (start + segments.suffix) % chunk_size
    after = torch.where(segments.suffix > 0, after, -1)
    return torch.where(segments.total > 0, after, before).to(torch.int32)
