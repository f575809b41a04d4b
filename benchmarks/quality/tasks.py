"""Sequences of bytes to learn and to be measured on: text, text with an associative memory in it, text with a copy.

    recall      \1 key VALUE   in the first bytes and here and there later;  \2 key -> VALUE   somewhere behind
    copy        \3 and 31 random letters at the beginning;  \4 -> the same letters   somewhere behind

with real text in between. The model's only attention layer comes first and sees single bytes, so a value or the next
letter can only come out of a recurrent state. Keys are letters and digits, values large letters: chance is 1 / 26.

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
PAIRS = 20
FEW = 5
LETTERS = 31
LATE = 4
"""Pairs of a training sequence that are stored in the suffix."""

_STORE, _ASK, _SHOW, _REPEAT = 1, 2, 3, 4
_SMALL, _LARGE = ord("a"), ord("A")
_KEYS = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))
_RECORD = 3
_SLOT = 4
"""Places of records in the suffix are multiples of this, so that no two of them meet."""


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


def _pairs(count: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The keys, all different in a row, and the values, each `[N, pairs]`."""
    keys = _KEYS[_some(count, len(_KEYS), pairs, generator)]
    return keys, torch.randint(26, keys.shape, generator=generator) + _LARGE


def _records(batch: Batch, at: Tensor, mark: int, pairs: tuple[Tensor, Tensor], which: Tensor, kind: int) -> None:
    key, value = (x.gather(1, which) for x in pairs)
    _write(batch, at, [mark, key, value], [0, 0, kind])


def recalling(text: Tensor, count: int, length: int, generator: torch.Generator, spacing: int = 40) -> Batch:
    """Training sequences: pairs in the prefix and a few later ones; a question in about each `spacing` bytes.

    Half of the sequences say `FEW` pairs again and again in their prefix, which is easier, and learnt first.
    """
    batch = reading(text, count, length, generator)
    pairs = _pairs(count, PAIRS + LATE, generator)
    places = torch.arange(PAIRS).expand(count, -1)
    most = torch.where(torch.rand(count, 1, generator=generator) < 0.5, FEW, PAIRS)
    _records(batch, places * _RECORD, _STORE, pairs, places % most, 0)
    slots = (length - PREFIX) // _SLOT
    asked = max(1, min(slots - LATE, (length - PREFIX) // spacing))
    at = _some(count, slots, asked + LATE, generator).sort(1).values * _SLOT + PREFIX
    late = _some(count, asked + LATE, LATE, generator).sort(1).values
    stored = torch.zeros(count, asked + LATE, dtype=torch.bool).scatter_(1, late, True)
    known = most + stored.cumsum(1)
    _records(batch, at.gather(1, late), _STORE, pairs, (torch.arange(LATE) + PAIRS).expand(count, -1), 0)
    ask = (~stored).nonzero()[:, 1].view(count, asked)
    which = (torch.rand(count, asked, generator=generator) * known.gather(1, ask)).long()
    which = torch.where(which < most, which, which - most + PAIRS)
    _records(batch, at.gather(1, ask), _ASK, pairs, which, KINDS["recall"])
    return batch


def _string(batch: Batch, at: Tensor, mark: int, letters: Tensor, kind: int) -> None:
    places = at[:, :, None] + 1 + torch.arange(letters.shape[1])
    _write(batch, at, [mark], [0])
    for i in range(letters.shape[1]):
        _write(batch, places[:, :, i], [letters[:, i : i + 1].expand_as(at)], [kind])


def copying(text: Tensor, count: int, length: int, generator: torch.Generator) -> Batch:
    """Training sequences: the letters of the prefix again, at one place in each 512 bytes or so."""
    batch = reading(text, count, length, generator)
    letters = torch.randint(26, (count, LETTERS), generator=generator) + _SMALL
    _string(batch, torch.zeros(count, 1, dtype=torch.int64), _SHOW, letters, 0)
    slots = (length - PREFIX) // (LETTERS + 1)
    at = _some(count, slots, max(1, min(slots, length // 512)), generator) * (LETTERS + 1) + PREFIX
    _string(batch, at, _REPEAT, letters, KINDS["copy"])
    return batch


def measured(text: Tensor, counts: dict[str, int], longest: int, seed: int) -> dict[str, Batch]:
    """Held-out sequences of PREFIX + `longest` bytes.

    Of a recall sequence each of the twenty pairs is asked for once, five in each bucket of horizons; of a copy sequence
    the letters once, in one of the buckets in turn. Nothing is stored behind the prefix.
    """
    generator = torch.Generator().manual_seed(seed)
    length = PREFIX + longest
    edges = [0, *(b for b in BUCKETS if b <= longest)]
    buckets = list(itertools.pairwise(edges))
    recall = reading(text, counts["recall"], length, generator)
    n = len(recall)
    pairs = _pairs(n, PAIRS, generator)
    every = torch.arange(PAIRS).expand(n, -1)
    _records(recall, every * _RECORD, _STORE, pairs, every, 0)
    order, share = _some(n, PAIRS, PAIRS, generator), PAIRS // len(BUCKETS)
    for i, (low, high) in enumerate(buckets):
        at = PREFIX + low + _some(n, (high - low) // _SLOT, share, generator) * _SLOT
        _records(recall, at, _ASK, pairs, order[:, i * share : (i + 1) * share], KINDS["recall"])
    copy = reading(text, counts["copy"], length, generator)
    m = len(copy)
    letters = torch.randint(26, (m, LETTERS), generator=generator) + _SMALL
    _string(copy, torch.zeros(m, 1, dtype=torch.int64), _SHOW, letters, 0)
    bounds = torch.tensor([buckets[i % len(buckets)] for i in range(m)])
    room = bounds[:, 1] - bounds[:, 0] - LETTERS - 1
    at = PREFIX + bounds[:, 0] + (torch.rand(m, generator=generator) * (room + 1)).long()
    _string(copy, at[:, None], _REPEAT, letters, KINDS["copy"])
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
            copying(text, self.copy, length, generator),
        ]
        return Batch(torch.cat([p.ids for p in parts]), torch.cat([p.kinds for p in parts]))
