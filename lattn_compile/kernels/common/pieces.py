"""A head's state in registers: pieces of key channels, spread over the lanes of a warp.

A decode kernel is bound by the latency of one token, so nothing of a token may wait for other warps. A warp owns
`COLUMNS` value columns of a head and all its key channels. `LANES` groups of lanes split the channels, each holding
`RUN` neighbouring ones, so that a sum over the channels is a sum within threads and then over few lanes. The state is
a tuple of `PIECES` tensors `[LANES, WARPS, STEP, COLUMNS]`; place `(lane, warp, step, column)` of piece i holds

    key channel  lane * RUN + i * STEP + step            RUN = PIECES * STEP
    value column warp * COLUMNS + column                 from the program's first column on

Pieces, and not one tensor, for three reasons. A sum over channels is then an explicit chain of fused multiply-adds,
whose bits do not depend on what a compiler contracts. A piece's vector of channels has fewer elements than the program
has threads, and such loads Triton leaves in the layout that the arithmetic wants; larger ones it would take through
shared memory, with a barrier. And tiles of the codec can be groups of pieces.

Triton chooses layouts from the order of axes. Among axes without contiguous memory, 3.6 fills lanes from the first
axis on, later versions from the last but one back; `FLIP` exchanges the axes of lanes and steps for these. A wrong
guess costs speed, never a result. Everything here is inlined; `FLIP`, sizes and counts are constants.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "columns",
    "dot",
    "key_channels",
    "lanes",
    "load_channels",
    "load_state",
    "over_channels",
    "partial_dot",
    "places",
    "scaled",
    "store_state",
    "sum_channels",
]


@triton.jit
def key_channels(LANES: tl.constexpr, RUN: tl.constexpr, STEP: tl.constexpr, FLIP: tl.constexpr):
    """The key channels of piece 0, int32 `[LANES, STEP]` (`[STEP, LANES]` flipped); piece i is `i * STEP` further."""
    lane, step = tl.arange(0, LANES), tl.arange(0, STEP)
    if FLIP:
        return lane[None, :] * RUN + step[:, None]
    else:
        return lane[:, None] * RUN + step[None, :]


@triton.jit
def lanes(LANES: tl.constexpr, FLIP: tl.constexpr):
    """The lane group of a place, int32, broadcasting against a piece."""
    lane = tl.arange(0, LANES)
    if FLIP:
        return lane[None, None, :, None]
    else:
        return lane[:, None, None, None]


@triton.jit
def columns(first, WARPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The value columns of a program, int32 `[WARPS, COLUMNS]`."""
    return first + tl.arange(0, WARPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def over_channels(x):
    """`[LANES, STEP]` as something that broadcasts against a piece."""
    return x[:, None, :, None]


@triton.jit
def places(
    group,
    channel,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Where a piece lies in scratch memory of `[.., groups of COLUMNS columns, SIZE]`, in the order of its places.

    `group` `[WARPS]`: the program's groups. Pieces of one group follow each other, LANES * STEP * COLUMNS further each.
    """
    place = (group[:, None] * SIZE + tl.arange(0, COLUMNS)[None, :])[None, :, None, :]
    place = place + ((channel // RUN * STEP + channel % RUN) * COLUMNS)[:, None, :, None]
    # Said of the sum itself: a hint on what a function returns is lost when the function is inlined.
    return tl.max_contiguous(place, (1, 1, 1, VECTOR))


@triton.jit
def load_channels(p, channel, K: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """A vector of K channels at `p`, contiguous, as pieces `[LANES, STEP]`, zero beyond K."""
    out = ()
    for i in tl.static_range(PIECES):
        if MASKED:
            x = tl.load(p + (channel + i * STEP), mask=channel + i * STEP < K, other=0)
        else:
            x = tl.load(p + (channel + i * STEP))
        out = out + (x,)
    return out


@triton.jit
def load_state(
    p,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
):
    """A head's state `[K, V]` at `p`, contiguous, zero beyond its ends. `VECTOR` divides V: columns of one load."""
    channel, column = channel[:, None, :, None], column[None, :, None, :]
    out = ()
    for i in tl.static_range(PIECES):
        # The hint also bounds how many columns a thread gets, so every access of a state has one and the same layout.
        at = tl.max_contiguous((channel + i * STEP) * V + column, (1, 1, 1, VECTOR))
        inside = (channel + i * STEP < K) & (column < V)
        out = out + (tl.load(p + at, mask=inside, other=0.0).to(tl.float32),)
    return out


@triton.jit
def store_state(
    p,
    S,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
):
    """The inverse of `load_state`."""
    channel, column = channel[:, None, :, None], column[None, :, None, :]
    for i in tl.static_range(PIECES):
        at = tl.max_contiguous((channel + i * STEP) * V + column, (1, 1, 1, VECTOR))
        inside = (channel + i * STEP < K) & (column < V)
        tl.store(p + at, S[i], mask=inside)


@triton.jit
def in_pieces(x, LANES: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr):
    """A vector of LANES * PIECES * STEP channels as pieces `[LANES, STEP]`, not flipped; PIECES is 8 at most."""
    x = tl.permute(tl.reshape(x, (LANES, PIECES, STEP)), (0, 2, 1))
    if PIECES == 1:
        out = (tl.reshape(x, (LANES, STEP)),)
    elif PIECES == 2:
        out = tl.split(x)
    elif PIECES == 4:
        a, b = tl.split(tl.reshape(x, (LANES, STEP, 2, 2)))
        a0, a1 = tl.split(a)
        b0, b1 = tl.split(b)
        out = (a0, b0, a1, b1)
    else:
        tl.static_assert(PIECES == 8)
        a, b = tl.split(tl.reshape(x, (LANES, STEP, 4, 2)))
        c, d = tl.split(tl.reshape(a, (LANES, STEP, 2, 2)))
        e, f = tl.split(tl.reshape(b, (LANES, STEP, 2, 2)))
        c0, c1 = tl.split(c)
        d0, d1 = tl.split(d)
        e0, e1 = tl.split(e)
        f0, f1 = tl.split(f)
        out = (c0, e0, d0, f0, c1, e1, d1, f1)
    return out


@triton.jit
def scaled(S, factor, BY_CHANNEL: tl.constexpr, PIECES: tl.constexpr):
    """`factor * S`: a scalar, or pieces of a vector of channels."""
    out = ()
    for i in tl.static_range(PIECES):
        if BY_CHANNEL:
            out = out + (S[i] * over_channels(factor[i]),)
        else:
            out = out + (S[i] * factor,)
    return out


@triton.jit
def sum_channels(x, FLIP: tl.constexpr):
    """The sum of one piece over its channels, `[WARPS, COLUMNS]`: within threads first, then over lanes."""
    if FLIP:
        return tl.sum(tl.sum(x, 0), 1)
    else:
        return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def partial_dot(S, x, PIECES: tl.constexpr, FLIP: tl.constexpr):
    """`dot` before its sum over lanes, `[LANES, WARPS, COLUMNS]`, flipped `[WARPS, LANES, COLUMNS]`."""
    total = S[0] * over_channels(x[0])
    for i in tl.static_range(1, PIECES):
        total = tl.fma(S[i], over_channels(x[i]), total)
    if FLIP:
        return tl.sum(total, 0)
    else:
        return tl.sum(total, 2)


@triton.jit
def dot(S, x, PIECES: tl.constexpr, FLIP: tl.constexpr):
    """`S^T x`, `[WARPS, COLUMNS]`, of a vector of channels in pieces."""
    total = S[0] * over_channels(x[0])
    for i in tl.static_range(1, PIECES):
        total = tl.fma(S[i], over_channels(x[i]), total)
    return sum_channels(total, FLIP)
