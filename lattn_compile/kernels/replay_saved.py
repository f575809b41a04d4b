"""States between two stretches of a backward, kept as the codes that they are.

A state behind a window that is full has been rounded, so in a format whose tiles have all channels its codes and a
number a column are the state, bit for bit, in half the bytes. That is how the memory comes about in which gradients of
one stretch are made while the next one's states are (`replay.py`).
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.replay_rounding import coded

__all__ = ["pack", "unpack"]


@triton.jit
def _places(K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr):
    """Of the values `[BV / 16, 16, BK]` of a program, and of its columns `[BV / 16, 16, 1]`; which there are."""
    BLOCKS: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    column = (pid % BLOCKS) * BV + tl.arange(0, BV // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    channel = tl.arange(0, BK)[None, None, :]
    at = (pid // BLOCKS).to(tl.int64)
    return at * (K * V) + channel * V + column, at * V + column, (column < V) & (channel < K), column < V


@triton.jit
def pack(
    states, codes, sizes, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Codes of states that rounding leaves as they are.

    Args:
        states: fp32 `[S, HV, K, V]`. codes: bf16, likewise; sizes: fp32 `[S, HV, V]`; receive what `coded` makes.

    Grid: (VP / BV * HV * S,).
    """
    place, of_column, mask, m_column = _places(K, V, BK, BV, VP)
    C, size = coded(tl.load(states + place, mask=mask, other=0.0), FORMAT, BLOCK_V, BV, BK)
    tl.store(codes + place, C.to(tl.bfloat16), mask=mask)
    tl.store(sizes + of_column, tl.broadcast_to(size, (BV // 16, 16, 1)), mask=m_column)


@triton.jit
def unpack(
    states, codes, sizes, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr
):
    """The inverse of `pack`."""
    place, of_column, mask, m_column = _places(K, V, BK, BV, VP)
    C = tl.load(codes + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(states + place, C * tl.load(sizes + of_column, mask=m_column, other=0.0), mask=mask)
