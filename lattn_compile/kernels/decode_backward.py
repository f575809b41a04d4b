"""The adjoint of the token loop of `lattn::decode` on the device."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp, unpack
from lattn_compile.kernels.common.pieces import (
    columns,
    key_channels,
    lanes,
    load_channels,
    load_state,
    over_channels,
    places,
    scaled,
    store_state,
    sum_channels,
)
from lattn_compile.kernels.decode_codec import from_words, places_of_steps

__all__ = ["retreat"]


@triton.jit
def _load_words(p, COUNT: tl.constexpr, STRIDE: tl.constexpr):
    """What `_save` of the forward stored at `p`."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.load(p + i * STRIDE),)
    return out


@triton.jit
def _load_steps(p, BYTES: tl.constexpr, STEPS: tl.constexpr, STRIDE: tl.constexpr):
    """What the codes of groups of pieces are multiplied with: one number for all, or a tensor for each."""
    if BYTES == 1:
        return (tl.load(p),)
    else:
        out = ()
        for i in tl.static_range(STEPS):
            out = out + (tl.load(p + i * STRIDE),)
        return out


@triton.jit
def _state(words, steps, factor, FORMAT: tl.constexpr, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """`factor`, a scalar, times the state that `words` hold, in pieces."""
    if BYTES:
        COUNT: tl.constexpr = PIECES // len(steps)
        factors = ()
        for i in tl.static_range(len(steps)):
            factors = factors + (steps[i] * factor,)
        out = ()
        for i in tl.static_range(PIECES):
            out = out + (from_words(words, i, FORMAT) * factors[i // COUNT],)
        return out
    else:
        out = ()
        for i in tl.static_range(PIECES):
            out = out + (words[i].to(tl.float32) * factor,)
        return out


@triton.jit
def _within_thread(x, VECTOR: tl.constexpr):
    """The sum of a piece over the columns that one thread holds, `[LANES, WARPS, STEP, COLUMNS / VECTOR]`."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3] // VECTOR, VECTOR)), 4)


@triton.jit
def _put(tiles, j: tl.constexpr, x, at_column, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """`tiles` with vector j, `x [LANES, WARPS, STEP]`, at its column."""
    out = ()
    for tile in tl.static_range(TILES):
        if tile == j // COLUMNS:
            out = out + (tl.where(at_column == j % COLUMNS, x[:, :, :, None], tiles[tile]),)
        else:
            out = out + (tiles[tile],)
    return out


@triton.jit
def _over_warp(x, FLIP: tl.constexpr):
    """The sum of a piece over all that a warp holds, `[WARPS]`."""
    # Axis by axis, see `decode_codec.py`: columns while threads hold some of them, then lanes.
    if FLIP:
        return tl.sum(tl.sum(tl.sum(x, 0), 2), 1)
    else:
        return tl.sum(tl.sum(tl.sum(x, 2), 2), 0)


@triton.jit
def _written_again(
    T,
    p_pair,
    p_error,
    p_g,
    p_beta,
    count,
    pair_token,
    error_token,
    g_token,
    beta_token,
    channel,
    inside,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASK_K: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
):
    """The state after `count` more tokens, whose errors are known, so that nothing has to be summed."""
    for s in range(count):
        k = load_channels(p_pair + s * pair_token, channel, K, PIECES, STEP, MASK_K)
        u = tl.load(p_error + s * error_token, mask=inside, other=0.0)
        if BETA:
            u = tl.load(p_beta + tl.cast(s, tl.int64) * beta_token).to(tl.float32) * u
        if DECAY == 1:
            T = scaled(T, exp(tl.load(p_g + tl.cast(s, tl.int64) * g_token).to(tl.float32)), False, PIECES)
        if DECAY == 2:
            T = scaled(T, load_channels(p_g + s * g_token, channel, K, PIECES, STEP, MASK_K), True, PIECES)
        out = ()
        for i in tl.static_range(PIECES):
            b_k, _ = unpack(k[i])
            out = out + (tl.fma(over_channels(b_k), u[None, :, None, :], T[i]),)
        T = out
    return T


@triton.jit(do_not_specialize=["first", "span", "slot_every", "slot_stride", "slot", "room", "ready_room", "ready"])
def retreat(
    pairs,
    g,
    beta,
    grad_o,
    source,
    starts,
    lengths,
    saved,
    scales,
    errors,
    cotangent,
    dv,
    by_channel,
    by_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    grad_token,
    grad_head,
    grad_column,
    dv_token,
    dv_head,
    key_heads,
    value_heads,
    first,
    span,
    slot_every,
    slot_stride,
    slot,
    room,
    ready_room,
    ready,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    FORMAT: tl.constexpr,
    AFTER: tl.constexpr,
    BYTES: tl.constexpr,
    STEPS: tl.constexpr,
    SAVE_EVERY: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Tokens `[first, first + span)` of every sequence, as far as it has them, from the last to the first.

    With dS the cotangent of S_t and dS~ that of S~_t = Γ_t S_{t-1}:

        dS  += q do^T (q scaled)      du = dS^T k        dk = dS u + S~ dw      dq = S do = S~ do + k (u . do)
        dw   = -beta du  (delta)      dS~ = dS + k dw^T  dg = sum(dS~ * S~)     dS_{t-1} = Γ dS~

    Sums over value columns stay within a warp's columns here; `deliver` adds them up, in one order.

    Args:
        pairs ... lengths, saved, scales, errors, slots, ready, strides, FORMAT, BYTES, STEPS: as `advance` has them
            under LOCAL. grad_o: `[M, HV, V]`, strided.
        SAVE_EVERY: 1, or, where states are kept as they are and read before the write, how many tokens lie between two
            of those in `saved`; the ones between are written again.
        TILE: columns that one scale is for, under BYTES = 1. GROUPS: groups of COLUMNS columns in a row of `saved`.
        cotangent: `[N, HV, K, V]`, of the state after these tokens; of the state before them on return.
        dv: `[M, HV, V]`.
        by_channel: `[rows, HV, G, tiles * LANES * STEP * COLUMNS]` for G groups of columns, rows as in `saved`: tile
            j // COLUMNS holds vector j at column j % COLUMNS: dq's pieces, then dk's, then dg's of a decay by channel.
        by_head: `[rows, HV, G, 4]`: dbeta, and dg of a decay by head.

    Grid: (column blocks * HV * N,).
    """
    i = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + WARPS * COLUMNS - 1) // (WARPS * COLUMNS)
    i_block, i_head, i_seq = i % BLOCKS, (i // BLOCKS) % value_heads, i // (BLOCKS * value_heads)
    i_key = i_head // (value_heads // key_heads)
    start = tl.load(starts + i_seq).to(tl.int64)
    count = tl.maximum(tl.minimum(tl.load(lengths + i_seq) - first, span), 0).to(tl.int32)
    if count == 0:
        return

    RUN: tl.constexpr = PIECES * STEP
    MASK_K: tl.constexpr = LANES * RUN != K
    STRIDE: tl.constexpr = LANES * STEP * COLUMNS
    IN_WORD: tl.constexpr = 1 if BYTES == 0 else (8 if FORMAT == "nvfp4" else 4)
    STORED: tl.constexpr = (PIECES + IN_WORD - 1) // IN_WORD
    VECTORS: tl.constexpr = PIECES * (3 if DECAY == 2 else 2)
    TILES: tl.constexpr = (VECTORS + COLUMNS - 1) // COLUMNS
    channel = key_channels(LANES, RUN, STEP, FLIP)
    column = columns(i_block * (WARPS * COLUMNS), WARPS, COLUMNS)
    inside = column < V
    lane = lanes(LANES, FLIP)
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
    write_once = (lane == 0) & (column[None, :, None, :] < V)
    group = i_block * WARPS + tl.arange(0, WARPS)
    at_column = tl.arange(0, COLUMNS)[None, None, None, :]

    head = i_seq.to(tl.int64) * value_heads + i_head
    p_state = cotangent + head * (K * V)
    dS = load_state(p_state, channel, column, K, V, VECTOR, PIECES, STEP)
    at = start // slot_every + i_seq * slot_stride + slot
    p_source = source + (at * value_heads + i_head) * (K * V)

    row = start + first + count - 1
    at = i_seq.to(tl.int64) * ready_room + ready + count - 1
    p_pair = pairs + (at * key_heads + i_key) * K
    p_grad = grad_o + (row * grad_token + i_head * grad_head) + column * grad_column
    p_dv = dv + (row * dv_token + i_head * dv_head)
    p_beta = beta
    if BETA:
        p_beta = beta + (row * beta_token + i_head * beta_head)
    p_g = g
    if DECAY == 1:
        p_g = g + (row * g_token + i_head * g_head)
    if DECAY == 2:
        p_g = g + (at * value_heads + i_head) * K
    at_row = (i_seq.to(tl.int64) * room + count - 1) * value_heads + i_head
    place = places(group, channel, STORED * STRIDE, RUN, STEP, COLUMNS, VECTOR)
    SAVED: tl.constexpr = GROUPS * STORED * STRIDE
    p_saved = saved + place
    if SAVE_EVERY == 1:
        p_saved += at_row * SAVED
    else:
        p_saved += (i_seq.to(tl.int64) * (room // SAVE_EVERY) * value_heads + i_head) * SAVED
    STEP_STRIDE: tl.constexpr = LANES * COLUMNS
    SCALES: tl.constexpr = GROUPS * STEPS * STEP_STRIDE if BYTES == 2 else (V + TILE - 1) // TILE
    p_scale = scales
    if BYTES == 1:
        p_scale = scales + at_row * SCALES + i_block * (WARPS * COLUMNS) // TILE
    if BYTES == 2:
        p_scale = scales + at_row * SCALES + places_of_steps(group, channel, lane, STEPS, COLUMNS, VECTOR)
    p_error = errors + (at * value_heads + i_head) * V + column
    OWN: tl.constexpr = BLOCKS * WARPS
    into = places(group, channel, TILES * STRIDE, RUN, STEP, COLUMNS, VECTOR)
    p_channel = by_channel + at_row * (OWN * TILES * STRIDE) + into
    heads_at = (group * 4)[None, :, None, None] + at_column + lane * 0
    p_head = by_head + at_row * (OWN * 4) + tl.max_contiguous(heads_at, (1, 1, 1, VECTOR))
    write_head = (lane == 0) & (at_column < 4)

    # A state is on its way while the token after it is computed. What else a token needs is loaded when it begins: it
    # is not used before the state is unpacked, which takes longer than a load.
    n_g = 0.0
    if DECAY == 1:
        n_g = tl.load(p_g).to(tl.float32)
    AHEAD: tl.constexpr = BYTES and not AFTER
    if AHEAD:
        step = tl.where(count > 1, 1, 0).to(tl.int64) * value_heads
        p_saved -= step * SAVED
        p_scale -= step * SCALES
        n_words = _load_words(p_saved, STORED, STRIDE)
        n_steps = _load_steps(p_scale, BYTES, STEPS, STEP_STRIDE)

    for j in range(count):
        t = count - 1 - j
        more = tl.where(t > 0, 1, 0).to(tl.int64)
        b_pair = load_channels(p_pair, channel, K, PIECES, STEP, MASK_K)
        b_grad = tl.load(p_grad, mask=inside, other=0.0).to(tl.float32)
        b_error = tl.load(p_error, mask=inside, other=0.0)
        b_beta = 1.0
        if BETA:
            b_beta = tl.load(p_beta).to(tl.float32)
        gamma = 1.0
        if DECAY == 1:
            gamma = exp(n_g)
            n_g = tl.load(p_g - more * g_token).to(tl.float32)
        if DECAY == 2:
            gamma = load_channels(p_g, channel, K, PIECES, STEP, MASK_K)

        # The state before the token, decayed.
        if AFTER:
            words = _load_words(p_saved, STORED, STRIDE)
            steps = (1.0,)
            if BYTES:
                steps = _load_steps(p_scale, BYTES, STEPS, STEP_STRIDE)
            read = _state(words, steps, 1.0, FORMAT, BYTES, PIECES)
        if SAVE_EVERY == 1:
            if AHEAD:
                words, steps = n_words, n_steps
            else:
                p_saved -= more * value_heads * SAVED
                words = _load_words(p_saved, STORED, STRIDE)
                if BYTES:
                    p_scale -= more * value_heads * SCALES
                    steps = _load_steps(p_scale, BYTES, STEPS, STEP_STRIDE)
                else:
                    steps = (1.0,)
            if t > 0:
                T = _state(words, steps, gamma if DECAY == 1 else 1.0, FORMAT, BYTES, PIECES)
            else:
                T = load_state(p_source, channel, column, K, V, VECTOR, PIECES, STEP)
                if DECAY == 1:
                    T = scaled(T, gamma, False, PIECES)
        else:
            again = t % SAVE_EVERY
            if t >= SAVE_EVERY:
                at = tl.cast(t // SAVE_EVERY - 1, tl.int64) * value_heads
                T = _load_words(p_saved + at * SAVED, STORED, STRIDE)
            else:
                T = load_state(p_source, channel, column, K, V, VECTOR, PIECES, STEP)
            back = tl.cast(again, tl.int64)
            g_step = value_heads * K if DECAY == 2 else g_token
            a_g = p_g
            if DECAY:
                a_g = p_g - back * g_step
            a_beta = p_beta
            if BETA:
                a_beta = p_beta - back * beta_token
            T = _written_again(
                T, p_pair - back * (key_heads * K), p_error - back * (value_heads * V), a_g, a_beta, again,
                key_heads * K, value_heads * V, g_step, beta_token, channel, inside, K, PIECES, STEP, MASK_K, DECAY,
                BETA,
            )  # fmt: skip
            if DECAY == 1:
                T = scaled(T, gamma, False, PIECES)
        if DECAY == 2:
            T = scaled(T, gamma, True, PIECES)
        if AHEAD:
            step = tl.where(t > 1, 1, 0).to(tl.int64) * value_heads
            p_saved -= step * SAVED
            p_scale -= step * SCALES
            n_words = _load_words(p_saved, STORED, STRIDE)
            n_steps = _load_steps(p_scale, BYTES, STEPS, STEP_STRIDE)

        u = b_error
        if BETA:
            u = b_beta * b_error
        do = b_grad[None, :, None, :]
        vectors = ()
        for _ in tl.static_range(TILES):
            vectors = vectors + (tl.zeros(dS[0].shape, tl.float32),)
        X = ()
        du = tl.zeros(dS[0].shape, tl.float32)
        for p in tl.static_range(PIECES):
            b_k, b_q = unpack(b_pair[p])
            if AFTER:
                dq = tl.sum(read[p] * do, 3)
            else:
                dq = tl.sum(T[p] * do, 3) + b_k[:, None, :] * tl.sum(u * b_grad, 1)[None, :, None]
            vectors = _put(vectors, p, dq, at_column, TILES, COLUMNS)
            X = X + (tl.fma(over_channels(b_q), do, dS[p]),)
            du = tl.fma(X[p], over_channels(b_k), du)
        du = sum_channels(du, FLIP)
        dw = du * (-b_beta)
        Y = ()
        dg = tl.zeros(dS[0].shape, tl.float32)
        for p in tl.static_range(PIECES):
            b_k, b_q = unpack(b_pair[p])
            y = X[p]
            dk = _within_thread(y * u[None, :, None, :], VECTOR)
            if DELTA:
                dk += _within_thread(T[p] * dw[None, :, None, :], VECTOR)
                y = tl.fma(over_channels(b_k), dw[None, :, None, :], y)
            vectors = _put(vectors, PIECES + p, tl.sum(dk, 3), at_column, TILES, COLUMNS)
            if DECAY == 1:
                dg = tl.fma(y, T[p], dg)
                y = y * gamma
            if DECAY == 2:
                vectors = _put(vectors, 2 * PIECES + p, tl.sum(y * T[p], 3), at_column, TILES, COLUMNS)
                y = y * over_channels(gamma[p])
            Y = Y + (y,)
        dS = Y

        for tile in tl.static_range(TILES):
            tl.store(p_channel + tile * STRIDE, vectors[tile])
        heads = tl.where(at_column == 0, tl.sum(du * b_error, 1)[None, :, None, None], 0.0)
        if DECAY == 1:
            heads = tl.where(at_column == 1, _over_warp(dg, FLIP)[None, :, None, None], heads)
        tl.store(p_head, heads + lane * 0.0, mask=write_head)
        value = tl.broadcast_to((b_beta * du)[None, :, None, :], once.shape).to(dv.dtype.element_ty)
        tl.store(p_dv + once, value, mask=write_once)
        p_pair -= key_heads * K
        p_grad -= grad_token
        p_error -= value_heads * V
        if BETA:
            p_beta -= beta_token
        if DECAY == 1:
            p_g -= more * g_token
        if DECAY == 2:
            p_g -= more * (value_heads * K)
        p_dv -= dv_token
        p_channel -= tl.cast(value_heads, tl.int64) * (OWN * TILES * STRIDE)
        p_head -= tl.cast(value_heads, tl.int64) * (OWN * 4)

    store_state(p_state, dS, channel, column, K, V, VECTOR, PIECES, STEP)
