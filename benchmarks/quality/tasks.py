"""Sequences of bytes to learn and to be measured on: text, text with an associative memory in it, text with a copy.

    recall      key VALUE key VALUE ...       in the first bytes;     key -> VALUE            somewhere behind
    copy        \\3 and 31 different letters   at the beginning;       \\3 -> the same letters   somewhere behind

with real text in between. The model's only attention layer comes first and sees single bytes, so a value or the next
letter can only come out of a recurrent state. Keys, values and letters are bytes that no text has (`text.load_corpus`),
64 keys and 32 values and letters: chance is 1 / 32.

`kinds` says of every predicted byte what it is: 0 cannot be known (random, not part of any loss), 1 text, 2 a recalled
value, 3 a copied letter.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BUCKETS", "KINDS", "PREFIX", "Batch", "Mixture", "copying", "measured", "reading", "recalling"]

PREFIX = 64
"""Bytes of exact prefill."""

BUCKETS = (64, 256, 1024, 4096)
"""Decode horizons: a bucket is the suffix positions from the end of the one before up to here."""

KINDS = {"text": 1, "recall": 2, "copy": 3}
PAIRS = 24
LETTERS = 31

_MARK = 3
_KEYS, _VALUES, _LETTERS = 128, 192, 224
"""Where the bytes of each begin: 64, 32 and 32 of them, up to 255."""
_RECORD = 2
_SLOT = 4
"""Places of questions in the suffix are multiples of this, so that no two of them meet."""


@dataclass(frozen=True)
class Batch:
    """`ids` uint8 `[N, T + 1]` and `kinds` uint8 `[N, T]` of `ids[:, 1:]`."""

    ids: Tensor
    kinds: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def reading(text: Tensor, count: int, length: int, generator: torch.Generator | None) -> Batch:
    """Windows of `text`, random ones, or without a generator ones spread evenly over it."""
    room = len(text) - length - 1
    if generator is None:
        first = torch.arange(count) * (room // count)
    else:
        first = torch.randint(room, (count,), generator=generator)
    ids = text[first[:, None] + torch.arange(length + 1)]
    return Batch(ids, torch.ones(count, length, dtype=torch.uint8))


def _some(count: int, many: int, few: int, generator: torch.Generator) -> Tensor:
    """`few` different numbers below `many` for each of `count` rows, in random order."""
    return torch.rand(count, many, generator=generator).argsort(1)[:, :few]


def _write(batch: Batch, at: Tensor, parts: list[Tensor | int], kinds: list[int]) -> None:
    """Bytes `parts` from positions `at` `[N, m]` on, and what they are."""
    rows = torch.arange(len(batch))[:, None]
    for offset, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        values = part.to(torch.uint8) if isinstance(part, Tensor) else torch.full_like(at, part, dtype=torch.uint8)
        batch.ids[rows, at + offset] = values
        where = at + offset - 1
        inside = (where >= 0) & (where < batch.kinds.shape[1])
        batch.kinds[rows.expand_as(at)[inside], where[inside]] = kind


def _pairs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The keys, all different in a row, and the values, each `[N, PAIRS]`."""
    keys = _some(count, _VALUES - _KEYS, PAIRS, generator) + _KEYS
    return keys, torch.randint(_VALUES, _LETTERS, keys.shape, generator=generator)


def _records(batch: Batch, at: Tensor, pairs: tuple[Tensor, Tensor], which: Tensor, kind: int) -> None:
    key, value = (x.gather(1, which) for x in pairs)
    _write(batch, at, [key, value], [0, kind])


def recalling(text: Tensor, count: int, length: int, generator: torch.Generator, spacing: int = 40) -> Batch:
    """Training sequences: pairs in the prefix, a question in about each `spacing` bytes, each pair's in turn.

    Half of the sequences have all pairs. The others have fewer, down to two, and say them again and again in their
    prefix, which is easier, and learnt first.
    """
    batch = reading(text, count, length, generator)
    pairs = _pairs(count, generator)
    places = torch.arange(PAIRS).expand(count, -1)
    few = torch.randint(2, PAIRS, (count, 1), generator=generator)
    most = torch.where(torch.rand(count, 1, generator=generator) < 0.5, few, PAIRS)
    _records(batch, places * _RECORD, pairs, places % most, 0)
    again = (places >= most).nonzero()
    batch.kinds[again[:, 0], again[:, 1] * _RECORD] = KINDS["recall"]
    slots = (length - PREFIX) // _SLOT
    asked = max(1, min(slots, (length - PREFIX) // spacing))
    at = _some(count, slots, asked, generator).sort(1).values * _SLOT + PREFIX
    # Any order of all pairs; of fewer, those of them that are there.
    turn = torch.rand(count, PAIRS, generator=generator).masked_fill(places >= most, 2.0).argsort(1)
    _records(batch, at, pairs, turn.gather(1, torch.arange(asked).expand(count, -1) % most), KINDS["recall"])
    return batch


def _string(batch: Batch, at: Tensor, letters: Tensor, kind: int) -> None:
    """The mark and the letters from the positions `at` `[N, m]` on."""
    parts: list[Tensor | int] = [_MARK, *(x[:, None].expand_as(at) for x in letters.unbind(1))]
    _write(batch, at, parts, [0, *[kind] * letters.shape[1]])


def _show(batch: Batch, generator: torch.Generator) -> Tensor:
    letters = _some(len(batch), 256 - _LETTERS, LETTERS, generator) + _LETTERS
    _string(batch, torch.zeros(len(batch), 1, dtype=torch.int64), letters, 0)
    return letters


def copying(text: Tensor, count: int, length: int, generator: torch.Generator, spacing: int = 40) -> Batch:
    """Training sequences: the letters of the prefix again, at one place in about each 16 times `spacing` bytes."""
    batch = reading(text, count, length, generator)
    letters = _show(batch, generator)
    slots = (length - PREFIX) // (LETTERS + 1)
    asked = max(1, min(slots, (length - PREFIX) // (16 * spacing)))
    at = _some(count, slots, asked, generator) * (LETTERS + 1) + PREFIX
    _string(batch, at, letters, KINDS["copy"])
    return batch


def measured(text: Tensor, counts: dict[str, int], longest: int, seed: int) -> dict[str, Batch]:
    """Held-out sequences of PREFIX + `longest` bytes.

    Of a recall sequence each of the pairs is asked for once, as many in each bucket of horizons; of a copy sequence the
    letters once, in one of the buckets in turn. Nothing is stored behind the prefix.
    """
    generator = torch.Generator().manual_seed(seed)
    length = PREFIX + longest
    edges = [0, *(b for b in BUCKETS if b <= longest)]
    buckets = list(itertools.pairwise(edges))
    recall = reading(text, counts["recall"], length, generator)
    n = len(recall)
    pairs = _pairs(n, generator)
    every = torch.arange(PAIRS).expand(n, -1)
    _records(recall, every * _RECORD, pairs, every, 0)
    order, share = _some(n, PAIRS, PAIRS, generator), PAIRS // len(BUCKETS)
    for i, (low, high) in enumerate(buckets):
        at = PREFIX + low + _some(n, (high - low) // _SLOT, share, generator) * _SLOT
        _records(recall, at, pairs, order[:, i * share : (i + 1) * share], KINDS["recall"])
    copy = reading(text, counts["copy"], length, generator)
    m = len(copy)
    letters = _show(copy, generator)
    bounds = torch.tensor([buckets[i % len(buckets)] for i in range(m)])
    room = bounds[:, 1] - bounds[:, 0] - LETTERS - 1
    at = PREFIX + bounds[:, 0] + (torch.rand(m, generator=generator) * (room + 1)).long()
    _string(copy, at[:, None], letters, KINDS["copy"])
    return {"text": reading(text, counts["text"], length, None), "recall": recall, "copy": copy}


class Mixture:
    """Endless training batches, the same for every arm of a seed: text, recall and copy in the shares given."""

    def __init__(
        self, text: Tensor, batch: int, length: int, seed: int, shares: tuple[float, float], spacing: int = 40
    ) -> None:
        self.text, self.length, self.spacing = text, length, spacing
        self.generator = torch.Generator().manual_seed(seed)
        self.recall, self.copy = (round(batch * share) for share in shares)
        self.rest = batch - self.recall - self.copy

    def draw(self) -> Batch:
        text, length, generator = self.text, self.length, self.generator
        parts = [
            reading(text, self.rest, length, generator),
            recalling(text, self.recall, length, generator, self.spacing),
            copying(text, self.copy, length, generator, self.spacing),
        ]
        return Batch(torch.cat([p.ids for p in parts]), torch.cat([p.kinds for p in parts]))
