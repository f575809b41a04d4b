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
from lattn_compile.kernels.common.packed_tiles import decoded, load_steps
from lattn_compile.kernels.common.pieces import partial_dot
from lattn_compile.kernels.packed_write import keys

__all__ = ["pair_of", "products", "read"]


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
def pair_of(
    p_q,
    p_k,
    scale,
    channel,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    NORM: tl.constexpr,
):
    """One token's key and query in pieces, their product, and the factors that were on them: k's and q's."""
    raw_k = keys(p_k, 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
    raw_q = keys(p_q, 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
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
def _decays(p_g, now, c, HV: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr):
    """Decays by head up to now: `[LANES]` of each group of places.

    Sums of their own logarithms, then one exponential.
    """
    place = tl.arange(0, LANES)
    later = now
    since = ()
    for back in tl.static_range(GROUPS):
        at = place + (GROUPS - 1 - back) * LANES
        own = tl.load(p_g + at * HV, mask=at < c, other=0.0)
        since = (exp(tl.cumsum(own, 0, reverse=True) + later),) + since
        if back + 1 < GROUPS:
            later += tl.sum(own, 0)
    return since


@triton.jit
def read(
    raw,
    x,
    with_k,
    with_q,
    by_k,
    by_q,
    b_k,
    b_q,
    dot_kq,
    p_q,
    p_k,
    p_now,
    p_scales,
    p_blocks,
    ring_k,
    ring_u,
    ring_g,
    ring_v,
    ring_beta,
    c,
    known,
    stays,
    first_block,
    head,
    i_block,
    a_log,
    bias,
    bound,
    channel,
    column,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    ROWS: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
):
    """One head's token against codes and records: (what is added, output); the record is kept while the window lasts.

    Args:
        raw: codes. x: v, g and beta as they are in memory. The ring's pointers: at the head's first record.
    """
    GROUPS: tl.constexpr = (ROWS + LANES - 1) // LANES
    WHOLE: tl.constexpr = BLOCK_K >= K and FORMAT != "nvfp4"  # codes of a column have one scale
    b_v = x[0].to(tl.float32)
    strength = 1.0
    if BETA:
        strength = strength_of(x[2], SIGMOID)
    own_k = b_k
    own_q = b_q
    on_state = 1.0
    if DECAY == 1:
        now = decay_of(x[1], a_log, bias, bound, head, GATE)
        since = _decays(ring_g, now, c, HV, LANES, GROUPS)
        on_state = tl.sum(tl.where(tl.arange(0, LANES) == 0, since[0], 0.0), 0)
        if stays & first_block:
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
        if stays & first_block:
            for n in tl.static_range(PIECES):
                at_now = channel + n * STEP
                tl.store(ring_g + c * (HV * K) + at_now, now[n], mask=at_now < K)

    # What each lane group has of the sums over channels, and one record of each group of records: one sum for both.
    if WHOLE:
        factor = on_state
        if FORMAT == "int8" or FORMAT == "fp8_e4m3":
            if BLOCK_V >= WIDTH:
                factor = tl.where(known, on_state * tl.load(p_scales + i_block * WIDTH // BLOCK_V), 0.0)
            else:
                by_column = tl.load(p_scales + column // BLOCK_V, mask=(column < V) & known, other=0.0) * on_state
                factor = by_column[:, None, :] if FLIP else by_column[None, :, :]
        S = decoded(raw, (), known, channel, PIECES, FORMAT, FAST)
    else:
        factor = on_state
        steps = load_steps(
            p_scales, p_blocks, channel, column, i_block * WIDTH, known, K, V, WIDTH, PIECES, STEP, FORMAT, BLOCK_K,
            BLOCK_V, VECTOR,
        )  # fmt: skip
        S = decoded(raw, steps, known, channel, PIECES, FORMAT, FAST)
    old = partial_dot(S, own_k, PIECES, FLIP)
    read = partial_dot(S, own_q, PIECES, FLIP)
    old = old * factor
    read = read * factor
    at_lane = _over_lanes(tl.arange(0, LANES), FLIP)
    at_column = column[:, None, :] if FLIP else column[None, :, :]
    for n in tl.static_range(GROUPS):
        at = at_lane + (n * LANES - 1)
        place = tl.max_contiguous(at * (HV * V) + at_column, (1, 1, VECTOR))
        t_u = tl.load(ring_u + place, mask=(at >= 0) & (at < c) & (at_column < V), other=0.0)
        weight_k = with_k[n] * by_k
        weight_q = with_q[n] * by_q
        if DECAY == 1:
            weight_k = weight_k * since[n]
            weight_q = weight_q * since[n]
        old = tl.fma(tl.broadcast_to(_over_lanes(weight_k, FLIP), old.shape), t_u, old)
        read = tl.fma(tl.broadcast_to(_over_lanes(weight_q, FLIP), read.shape), t_u, read)
    LANE_AXIS: tl.constexpr = 1 if FLIP else 0
    u = b_v
    if DELTA:
        u = b_v - tl.sum(old, LANE_AXIS)
    if BETA:
        u = strength * u
    read = tl.fma(u, dot_kq, tl.sum(read, LANE_AXIS))
    if stays:
        at_own = c * (HV * V) + column
        tl.store(ring_u + at_own, u, mask=column < V)
        if TWO:
            tl.store(ring_v + at_own, b_v, mask=column < V)
            if BETA:  # noqa: SIM102 - known when it compiles
                if first_block:
                    tl.store(ring_beta + c * HV, strength)
    return u, read
