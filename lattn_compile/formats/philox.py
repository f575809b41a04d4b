"""Random bits of a write that depend on nothing but what is written: Philox4x32-10 in int64 arithmetic.

Philox is a function of a counter of four 32-bit words and a key of two (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). There is no state to advance, so a recomputed forward, a replayed graph and any batching
draw the same numbers. A word is held in an int64, whose value is the word; everything is elementwise and exact.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lattn_compile.errors import ShapeError

__all__ = ["MAX_CHANNELS", "MAX_HEADS", "Identity", "Word", "philox", "stream_key", "uniform"]

Word: TypeAlias = int | Tensor
"""A number from 0 to 2^32 - 1: an int, or int64 elements."""

MAX_HEADS, MAX_CHANNELS = 1 << 16, 1 << 8
"""What has room in a counter word: value heads, and the channels of K and of V."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # of the golden ratio and of sqrt(3) - 1, as in the paper
_SITE_STEP = 0x9E3779B97F4A7C15


class Identity(NamedTuple):
    """What keys the random bits of a write besides the value's own place: int64 `[n]` each, one a state.

    `position` is the absolute position, in its sequence, of the token whose write this is (hand-over: of the token
    before the first suffix token); `sequence` is the caller's name for the sequence.
    """

    position: Tensor
    sequence: Tensor


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product.

    The factor is taken less 2^32, which makes it a small negative number: so nothing leaves int64's range, where it
    would be up to the compiler what happens, and the high word is short of `word` itself.
    """
    product = word * (factor - (1 << 32))
    low = product & _MASK
    return product.bitwise_right_shift_(32).add_(word), low


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Word, Word]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10. The counter's words (int64) and the key's broadcast with one another.

    Words that are the same for many counters should be passed unexpanded: they stay small for the first rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _FACTORS[0])
        high2, low2 = _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high2 ^ (c1 ^ k0), low2, high0 ^ (c3 ^ k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def stream_key(seed: int, site_id: int) -> tuple[int, int]:
    """Key words of one site's random numbers: the halves, low first, of `seed + 0x9E3779B97F4A7C15 · site_id`.

    A multiple of an odd number mod 2^64, so that two sites share a key only where their seeds were chosen for it.
    """
    key = seed + _SITE_STEP * site_id
    return key & _MASK, (key >> 32) & _MASK


def uniform(identity: Identity, heads: int, K: int, V: int, seed: int, site_id: int) -> Tensor:
    """`r [n, heads, K, V]`, fp32: multiples of 2^-24 in [0, 1) for the values of n states.

    Counter words: position mod 2^32; sequence mod 2^32; head · 2^16 + (k // 4) · 2^8 + v; sequence // 2^32. The four
    words that come out serve the key channels k = 0, 1, 2, 3 mod 4, by their upper 24 bits.

    Args:
        identity: any integer dtype; its device is the result's.

    Raises:
        ShapeError: the two parts of `identity` are not of one shape `[n]`, or the state has more heads or channels
            than the counter has room for.
    """
    position, sequence = identity
    if position.dim() != 1 or position.shape != sequence.shape:
        raise ShapeError(
            "identity",
            got=f"position {list(position.shape)}, sequence {list(sequence.shape)}",
            want="both [n], n states",
            remedy="Give every state its token's position and its sequence's id.",
        )
    for name, size, most in (("heads", heads, MAX_HEADS), ("K", K, MAX_CHANNELS), ("V", V, MAX_CHANNELS)):
        if size > most:
            raise ShapeError(
                name, got=size, want=f"at most {most}", remedy="Stochastic rounding numbers no more: round to nearest."
            )
    head, block, column = (
        torch.arange(size, dtype=torch.int64, device=position.device) for size in (heads, -(-K // 4), V)
    )
    place = ((head << 16).view(-1, 1, 1) | (block << 8).view(-1, 1)) | column
    position, sequence = (x.to(torch.int64).view(-1, 1, 1, 1) for x in identity)
    counter = (position & _MASK, sequence & _MASK, place, (sequence >> 32) & _MASK)
    words = [(word >> 8).to(torch.float32) for word in philox(counter, stream_key(seed, site_id))]
    return torch.stack(words, -2).flatten(-3, -2)[..., :K, :].mul_(2.0**-24)
