"""A call's q, k and g made ready for a token loop: normalised keys and scaled queries in fp32, and decays.

Out of the loop, because a norm is a sum over a warp and the loop waits for every one of those.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decays", "exp", "no_less", "no_more", "pair_up", "rstd", "unpack"]

_EPS = tl.constexpr(1e-6)  # inside the root, semantics §1
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # 16 bits of ln 2, so that n times it is exact
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)
_ROUND = tl.constexpr(12582912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)  # of 12582912


@triton.jit
def no_less(x, bound):
    """The larger of both, NaN if x is: a GPU's own maximum would give the bound."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def no_more(x, bound):
    """The smaller of both, NaN if x is."""
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """`e**x` within one unit of the last place, 0.6 units near 0; -inf gives 0.

    The hardware's exp2 is off by up to two units, always to the same side for the same x. A constant decay near 1 is
    multiplied up thousands of times, which would exceed semantics §8's bound for exact mode.
    """
    held = tl.minimum(tl.maximum(x, -104.0), 89.0)
    shifted = held * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, held))
    # e^r - 1 on |r| <= ln 2 / 2, Taylor to r^7.
    p = r * (1.0 / 5040) + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    y = 1.0 + tl.fma(r * r, p, r)
    # In two factors: the power of two alone may lie outside fp32.
    whole = shifted.to(tl.int32, bitcast=True) - _ROUND_BITS  # no conversion: the mantissa's low bits are n
    half = whole >> 1
    y = y * ((half + 127) << 23).to(tl.float32, bitcast=True)
    y = y * ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x == x, tl.where(x > -104.0, y, 0.0), x)


@triton.jit
def rstd(total):
    """The reciprocal norm of a vector, from its sum of squares."""
    return tl.div_rn(1.0, tl.sqrt_rn(total + _EPS))


@triton.jit
def unpack(x):
    """The key and the query of what `pair_up` stored."""
    return x.to(tl.int32).to(tl.float32, bitcast=True), (x >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _token(row, starts, lengths, first, room, local):
    """The flat token of a row of `pair_up`, int64, and whether it belongs to a sequence."""
    i_seq, j = row // room, row % room
    start = tl.load(starts + i_seq, mask=local != 0, other=0).to(tl.int64)
    length = tl.load(lengths + i_seq, mask=local != 0, other=room).to(tl.int64)
    return start + first + j, first + j < length


@triton.jit(do_not_specialize=["rows", "first", "room", "local"])
def pair_up(
    q,
    k,
    pairs,
    dots,
    starts,
    lengths,
    rows,
    heads,
    scale,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    first,
    room,
    local,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    """For tokens and key heads: key and query of a channel side by side, and their product.

    Args:
        q, k: `[M, H, K]` with their strides. scale: of the query, after its norm.
        pairs: int64 `[rows, H, K]`, the key's bits below the query's. dots: `[rows, H]`, `k . q`.
        local: 0 for all tokens, rows = M, first = 0 and room > M; else for tokens `[first, first + room)` of the N
            sequences, rows = N * room, sequence i from row `i * room` on; rows of tokens that it has not are left.
            One kernel for both, so that a token's numbers are the same in forward and backward.

    Grid: (ceil(rows * H / ROWS),).
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.minimum(i, rows.to(tl.int64) * heads - 1)  # the last row again, instead of a mask for the lengths too
    channel = tl.arange(0, BK)
    token, mine = _token(i // heads, starts, lengths, first, room, local)
    head = i % heads
    inside = mine[:, None] & (channel < K)[None, :]
    p_q = q + (token * q_token + head * q_head)[:, None] + channel[None, :] * q_channel
    p_k = k + (token * k_token + head * k_head)[:, None] + channel[None, :] * k_channel
    b_q = tl.load(p_q, mask=inside, other=0.0).to(tl.float32)
    b_k = tl.load(p_k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        b_q = b_q * rstd(tl.sum(b_q * b_q, 1))[:, None]
        b_k = b_k * rstd(tl.sum(b_k * b_k, 1))[:, None]
    b_q = b_q * scale
    low = b_k.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    pair = (b_q.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    tl.store(pairs + i[:, None] * K + channel[None, :], pair, mask=inside)
    tl.store(dots + i, tl.sum(b_k * b_q, 1), mask=mine)


@triton.jit(do_not_specialize=["rows", "first", "room", "local"])
def decays(
    g,
    out,
    starts,
    lengths,
    rows,
    heads,
    g_token,
    g_head,
    g_channel,
    first,
    room,
    local,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`exp(g)` of a decay by channel, `g [M, HV, K]`, to fp32 `[rows, HV, K]`; rows and the rest as in `pair_up`.

    Grid: (ceil(rows * HV / ROWS),).
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.minimum(i, rows.to(tl.int64) * heads - 1)
    channel = tl.arange(0, BK)
    token, mine = _token(i // heads, starts, lengths, first, room, local)
    inside = mine[:, None] & (channel < K)[None, :]
    p_g = g + (token * g_token + i % heads * g_head)[:, None] + channel[None, :] * g_channel
    b_g = tl.load(p_g, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i[:, None] * K + channel[None, :], exp(b_g), mask=inside)
