"""A token against a window on the device: the codes of a stored state and the records beside them, one head at a time.

What the codes and what the records add to a sum over key channels lies in the same threads, a group of records over the
lanes that hold the channels, so that one sum over lanes takes both.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, exps, gates_of, log_decays_of, strength_of
from lattn_compile.kernels.common.packed_rows import channels
from lattn_compile.kernels.common.packed_tiles import decoded, decoded_words
from lattn_compile.kernels.common.pieces import lanes, partial_dot

__all__ = ["against", "pair_of", "products", "read"]


@triton.jit
def _times(x, y, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (x[i] * y[i],)
    return out


@triton.jit
def _over_lanes(x, FLIP: tl.constexpr):
    """`[LANES]` as something that broadcasts against a piece whose steps were summed, `partial_dot`."""
    if FLIP:
        return x[None, :, None]
    else:
        return x[:, None, None]


@triton.jit
def pair_of(x_q, x_k, scale, PIECES: tl.constexpr, NORM: tl.constexpr):
    """One token's key and query in pieces, their product, and the factors that were on them: k's and q's.

    x_q, x_k: as they lie in memory, in pieces.
    """
    raw_k = ()
    raw_q = ()
    for i in tl.static_range(PIECES):
        raw_k = raw_k + (x_k[i].to(tl.float32),)
        raw_q = raw_q + (x_q[i].to(tl.float32),)
    by_k = 1.0
    by_q = scale
    if NORM:
        by_k = tl.rsqrt(_product(raw_k, raw_k, PIECES) + 1e-6)
        by_q = tl.rsqrt(_product(raw_q, raw_q, PIECES) + 1e-6) * scale
    b_k = ()
    b_q = ()
    for i in tl.static_range(PIECES):
        b_k = b_k + (raw_k[i] * by_k,)
        b_q = b_q + (raw_q[i] * by_q,)
    return b_k, b_q, _product(b_k, b_q, PIECES), by_k, by_q


@triton.jit
def _product(x, y, PIECES: tl.constexpr):
    total = x[0] * y[0]
    for i in tl.static_range(1, PIECES):
        total = tl.fma(x[i], y[i], total)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def products(
    p_q,
    p_k,
    p_ring,
    c,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Products of the records with the key and the query as they are in memory, `[LANES]` for each group of places.

    Place 0 is the state's, place i + 1 record i's.
    """
    place = tl.arange(0, LANES)[:, None]
    channel = tl.max_contiguous(tl.arange(0, BK)[None, :] + place * 0, (1, 4))
    t_q = tl.load(p_q + channel, mask=channel < K, other=0.0).to(tl.float32)
    t_k = tl.load(p_k + channel, mask=channel < K, other=0.0).to(tl.float32)
    with_k = ()
    with_q = ()
    for n in tl.static_range(GROUPS):
        at = place + (n * LANES - 1)
        t_ring = tl.load(p_ring + at * (H * K) + channel, mask=(at >= 0) & (at < c) & (channel < K), other=0.0)
        with_k = with_k + (tl.sum(t_ring * t_k, 1),)
        with_q = with_q + (tl.sum(t_ring * t_q, 1),)
    return with_k, with_q


@triton.jit
def _products_by_channel(
    p_q,
    p_k,
    p_ring,
    p_g,
    p_now,
    c,
    a_log,
    bias,
    bound,
    head,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
):
    """`products` of records that decay by channel, for one head: with the decay since each, now included."""
    place = tl.arange(0, LANES)[:, None]
    channel = tl.max_contiguous(tl.arange(0, BK)[None, :] + place * 0, (1, 4))
    inside = channel < K
    t_q = tl.load(p_q + channel, mask=inside, other=0.0).to(tl.float32)
    t_k = tl.load(p_k + channel, mask=inside, other=0.0).to(tl.float32)
    later = tl.load(p_now + channel, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        later = gates_of(later, bias, a_log, bound, head, channel, K, GATE)
    with_k = ()
    with_q = ()
    for back in tl.static_range(GROUPS):  # what comes later first
        at = place + (GROUPS - 1 - back) * LANES
        t_ring = tl.load(p_ring + (at - 1) * (H * K) + channel, mask=(at > 0) & (at <= c) & inside, other=0.0)
        own = tl.load(p_g + at * (HV * K) + channel, mask=(at < c) & inside, other=0.0)
        t_ring = t_ring * exp(tl.cumsum(own, 0, reverse=True) + later)
        with_k = (tl.sum(t_ring * t_k, 1),) + with_k
        with_q = (tl.sum(t_ring * t_q, 1),) + with_q
        if back + 1 < GROUPS:
            later += tl.sum(own, 0)[None, :]
    return with_k, with_q


@triton.jit
def _decays(own, now, GROUPS: tl.constexpr):
    """Decays by head up to now, `[LANES]` of each group of places, from the places' own logarithms.

    Sums of the logarithms, then one exponential.
    """
    later = now
    since = ()
    for back in tl.static_range(GROUPS):
        x = own[GROUPS - 1 - back]
        since = (exp(tl.cumsum(x, 0, reverse=True) + later),) + since
        if back + 1 < GROUPS:
            later += tl.sum(x, 0)
    return since


@triton.jit
def against(
    x,
    own_g,
    with_k,
    with_q,
    by_k,
    by_q,
    b_k,
    b_q,
    p_q,
    p_k,
    p_now,
    ring_k,
    ring_g,
    c,
    stays,
    head,
    a_log,
    bias,
    bound,
    channel,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    GROUPS: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
):
    """What a head's key and query meet: (decay of the state by head, key and query in pieces with a decay by channel,
    weights of the records for key and query, a group of them over the lanes). Keeps the token's own decay, if it stays.

    Args:
        own_g, ring_g: of the head's records; the latter is None if another program keeps the decay.
    """
    on_state = 1.0
    own_k = ()
    own_q = ()
    if DECAY == 1:
        now = decay_of(x[1], a_log, bias, bound, head, GATE)
        since = _decays(own_g, now, GROUPS)
        on_state = tl.sum(tl.where(tl.arange(0, LANES) == 0, since[0], 0.0), 0)
        if stays:
            tl.store(ring_g + c * HV, now)
    if DECAY == 2:
        now = log_decays_of(x[1], a_log, bias, bound, head, channel, K, PIECES, STEP, GATE)
        total = now
        for past in range(c):
            then = channels(ring_g + past * (HV * K), channel, K, PIECES, STEP, LANES * PIECES * STEP != K)
            added = ()
            for piece in tl.static_range(PIECES):
                added = added + (total[piece] + then[piece],)
            total = added
        decay = exps(total, PIECES)
        own_k = _times(b_k, decay, PIECES)
        own_q = _times(b_q, decay, PIECES)
        with_k, with_q = _products_by_channel(
            p_q, p_k, ring_k, ring_g, p_now, c, a_log, bias, bound, head, H, HV, K, BK, LANES, GROUPS, GATE
        )
        if stays:
            for n in tl.static_range(PIECES):
                at_now = channel + n * STEP
                tl.store(ring_g + c * (HV * K) + at_now, now[n], mask=at_now < K)
    weights_k = ()
    weights_q = ()
    for n in tl.static_range(GROUPS):
        weight_k = with_k[n] * by_k
        weight_q = with_q[n] * by_q
        if DECAY == 1:
            weight_k = weight_k * since[n]
            weight_q = weight_q * since[n]
        weights_k = weights_k + (_over_lanes(weight_k, FLIP),)
        weights_q = weights_q + (_over_lanes(weight_q, FLIP),)
    return on_state, own_k, own_q, weights_k, weights_q


@triton.jit
def read(
    raw,
    steps,
    x,
    us,
    on_state,
    own_k,
    own_q,
    weights_k,
    weights_q,
    dot_kq,
    ring_u,
    ring_v,
    ring_beta,
    c,
    known,
    stays,
    channel,
    once,
    HV: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    FLIP: tl.constexpr,
    GROUPS: tl.constexpr,
    DELTA: tl.constexpr,
    BETA: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORMAT: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    WORDS: tl.constexpr,
    TWO: tl.constexpr,
):
    """One tile's token against codes and records: its output; the record is kept while the window lasts.

    Args:
        raw: codes, of `load_words` under WORDS. steps: of `load_steps`. x: v, g and beta as they are in memory. us: of
            `records_of`. on_state .. weights_q: of `against`. ring_u, ring_v, ring_beta: at the head's first record;
            the last is None if another program keeps it. once: the places of v and o, `[LANES, WARPS, 1, COLUMNS]`.
        WHOLE: codes of a column have one step.
    """
    b_v = x[0].to(tl.float32)
    strength = 1.0
    if BETA:
        strength = strength_of(x[2], SIGMOID)
    factor = on_state
    if WHOLE:
        if WORDS:
            S = decoded_words(raw, (), known, PIECES, FORMAT, FAST, False)
        else:
            S = decoded(raw, (), known, channel, PIECES, FORMAT, FAST)
        if FORMAT == "int8" or FORMAT == "fp8_e4m3":
            factor = tl.where(known, steps[0] * on_state, 0.0)
            if len(factor.shape) == 4:
                factor = tl.sum(factor, 0 if FLIP else 2)  # of one
    else:
        if WORDS:
            S = decoded_words(raw, steps, known, PIECES, FORMAT, FAST, False)
        else:
            S = decoded(raw, steps, known, channel, PIECES, FORMAT, FAST)
    # What each lane group has of the sums over channels, and one record of each group of records: one sum for both.
    old = partial_dot(S, own_k, PIECES, FLIP)
    read = partial_dot(S, own_q, PIECES, FLIP)
    old = old * factor
    read = read * factor
    for n in tl.static_range(GROUPS):
        t_u = tl.sum(us[n], 0 if FLIP else 2)  # of one
        old = tl.fma(tl.broadcast_to(weights_k[n], old.shape), t_u, old)
        read = tl.fma(tl.broadcast_to(weights_q[n], read.shape), t_u, read)
    LANE_AXIS: tl.constexpr = 1 if FLIP else 0
    u = b_v
    if DELTA:
        u = b_v - tl.sum(old, LANE_AXIS)[None, :, None, :]
    if BETA:
        u = strength * u
    read = tl.fma(u, dot_kq, tl.sum(read, LANE_AXIS)[None, :, None, :])
    if stays:
        # One lane group writes what all of them hold.
        mine = (lanes(LANES, FLIP) == 0) & (once < V)
        at_own = c * (HV * V) + once
        tl.store(ring_u + at_own, u, mask=mine)
        if TWO:
            tl.store(ring_v + at_own, b_v, mask=mine)
            if BETA:
                tl.store(ring_beta + c * HV, strength)
    return read
