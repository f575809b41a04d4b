"""Whose tokens and whose slot: what a program of the in-place kernels asks the device before it computes.

Nothing of it is known on the host, so that a CUDA graph may record a step once and replay it for any batch.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lattn_compile.kernels.common.inputs import rstd

__all__ = [
    "begin",
    "channels",
    "has_state",
    "inputs_of",
    "normalised",
    "row_of",
    "slot_of",
    "tokens_of",
]


@triton.jit
def begin():
    """First of all, where a launch may overlap the end of the kernel before it (programmatic dependent launch): waits
    for that one, and lets the next one in, which waits in turn. Setting up a launch then takes no time of its own."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def tokens_of(i_seq, ends, lengths, tokens, sequences):
    """A sequence's flat tokens: (the first, int64; how many count; of how many rows it writes the outputs).

    Args:
        ends: `cu_seqlens`, int `[N + 1]`, or None: `tokens` are each sequence's own. lengths: int `[N]` or None.
        tokens: T, or under `ends` all of the call's. The last sequence also writes the rows that are nobody's.
    """
    if ends is None:
        first = i_seq.to(tl.int64) * tokens
        count = tokens
        rows = tokens
    else:
        first = tl.minimum(tl.maximum(tl.load(ends + i_seq).to(tl.int64), 0), tokens)
        last = tl.minimum(tl.maximum(tl.load(ends + i_seq + 1).to(tl.int64), 0), tokens)
        count = tl.maximum(last - first, 0).to(tl.int32)
        rows = tl.where(i_seq == sequences - 1, tokens - first, count).to(tl.int32)
    if lengths is not None:
        given = tl.load(lengths + i_seq).to(tl.int64)
        count = tl.minimum(tl.maximum(given, 0), count).to(tl.int32)
    return first, count, rows


@triton.jit
def slot_of(i_seq, indices, padding, slots):
    """(slot, int64, 0 where there is none; whether the sequence has one; whether it names one that there is not)."""
    if indices is None:
        slot = i_seq.to(tl.int64)
        live = slot >= 0
        wrong = slot < 0
    else:
        given = tl.load(indices + i_seq).to(tl.int64)
        live = (given >= 0) & (given < slots) & (given != padding)
        wrong = (live == 0) & (given != padding) & (given != -1)
        slot = tl.where(live, given, 0)
    return slot, live, wrong


@triton.jit
def has_state(i_seq, fresh):
    """Whether the engine says that a sequence goes on: `has_initial_state`, uint8 `[N]`, or None for all."""
    if fresh is None:
        has = i_seq >= 0
    else:
        has = tl.load(fresh + i_seq) != 0
    return has


@triton.jit
def _larger(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def channels(p, channel, K: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """A vector of key channels in pieces, of the type that `p` points to."""
    at = p + channel
    out = ()
    for i in tl.static_range(PIECES):
        if MASKED:
            x = tl.load(at + i * STEP, mask=channel + i * STEP < K, other=0.0)
        else:
            x = tl.load(at + i * STEP)
        out = out + (x,)
    return out


@triton.jit
def inputs_of(
    token,
    head,
    v,
    g,
    beta,
    v_token,
    v_head,
    v_column,
    g_token,
    g_head,
    beta_token,
    beta_head,
    channel,
    once,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    DECAY: tl.constexpr,
):
    """One token's v, g and beta of one head, as they lie in memory.

    once: the columns, `[LANES, WARPS, 1, COLUMNS]`: a vector in the layout of a state's pieces needs no exchange
    between warps when it meets one.
    """
    b_v = tl.load(v + (token * v_token + head * v_head) + once * v_column, mask=once < V, other=0.0)
    b_g = 0.0
    if DECAY == 1:
        b_g = tl.load(g + (token * g_token + head * g_head))
    if DECAY == 2:
        b_g = channels(g + (token * g_token + head * g_head), channel, K, PIECES, STEP, MASKED)
    b_beta = 1.0
    if beta is not None:
        b_beta = tl.load(beta + (token * beta_token + head * beta_head))
    return b_v, b_g, b_beta


@triton.jit
def row_of(p, K: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr):
    """The K numbers at `p`, `[2 * WARPS, BK]` with equal rows, for `normalised`."""
    channel = tl.arange(0, BK)[None, :] + tl.arange(0, 2 * WARPS)[:, None] * 0
    return tl.load(p + channel, mask=channel < K, other=0.0)


@triton.jit
def normalised(b_q, b_k, scale, WARPS: tl.constexpr, NORM: tl.constexpr):
    """What `common.inputs.pair_up` makes of one token and key head: (factor of q, factor of k, `k . q` of both).

    The factors are the reciprocal norms, 1 without NORM; the query's product with `scale` comes after its own. q and k
    are of `row_of`: each warp sums two rows of the same numbers, so that a row lies in a thread and its neighbours as
    one of `pair_up` does and sums run in the same order: the offline tests compare these layouts. The rows' maximum is
    any of them.
    """
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    if NORM:
        by_q = rstd(tl.sum(b_q * b_q, 1))
        by_k = rstd(tl.sum(b_k * b_k, 1))
        b_q = b_q * by_q[:, None]
        b_k = b_k * by_k[:, None]
    else:
        by_q = tl.full((2 * WARPS,), 1.0, tl.float32)
        by_k = by_q
    dot = tl.sum(b_k * (b_q * scale), 1)
    # All three with one exchange between the warps.
    return tl.reduce((by_q, by_k, dot), 0, _larger)
