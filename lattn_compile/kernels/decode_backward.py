"""The adjoint of the token loop of `lattn::decode` on the device."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.codec import from_bytes
from lattn_compile.kernels.common.inputs import exp, rstd, unpack
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

__all__ = ["deliver", "retreat"]


@triton.jit
def _load_words(p, BYTES: tl.constexpr, PIECES: tl.constexpr, STRIDE: tl.constexpr):
    """What `_save` of the forward stored at `p`."""
    out = ()
    for i in tl.static_range((PIECES + 3) // 4 if BYTES else PIECES):
        out = out + (tl.load(p + i * STRIDE),)
    return out


@triton.jit
def _state(words, FORMAT: tl.constexpr, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """The state that `words` hold, in pieces; where they are bytes, before its scale."""
    out = ()
    for i in tl.static_range(PIECES):
        if BYTES:
            out = out + (from_bytes((words[i // 4] >> (8 * (i % 4))) & 0xFF, FORMAT),)
        else:
            out = out + (words[i].to(tl.float32),)
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
    if FLIP:
        x = tl.sum(x, 0)
    else:
        x = tl.permute(tl.sum(x, 2), (1, 0, 2))
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2])), 1)


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
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Tokens `[first, first + span)` of every sequence, as far as it has them, from the last to the first.

    With dS the cotangent of S_t and dS~ that of S~_t = Γ_t S_{t-1}:

        dS  += q do^T (q scaled)      du = dS^T k        dk = dS u + S~ dw      dq = S do = S~ do + k (u . do)
        dw   = -beta du  (delta)      dS~ = dS + k dw^T  dg = sum(dS~ * S~)     dS_{t-1} = Γ dS~

    Sums over value columns stay within a warp's columns here; `deliver` adds them up, in one order.

    Args:
        pairs ... lengths, saved, scales, errors, slots, ready, strides, FORMAT: as `advance` has them under LOCAL.
            grad_o: `[M, HV, V]`, strided.
        TILE: columns that one scale is for. GROUPS: groups of COLUMNS columns in a row of `saved`.
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
    STORED: tl.constexpr = (PIECES + 3) // 4 if BYTES else PIECES
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
    p_saved = saved + at_row * SAVED + place
    SCALES: tl.constexpr = (V + TILE - 1) // TILE
    p_scale = scales
    if BYTES:
        p_scale = scales + at_row * SCALES + i_block * (WARPS * COLUMNS) // TILE
    p_error = errors + at_row * V + column
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
    n_scale = 1.0
    if BYTES:
        if not AFTER:
            step = tl.where(count > 1, 1, 0).to(tl.int64) * value_heads
            p_saved -= step * SAVED
            p_scale -= step * SCALES
            n_words = _load_words(p_saved, BYTES, PIECES, STRIDE)
            n_scale = tl.load(p_scale)

    for j in range(count):
        t = count - 1 - j
        more = tl.where(t > 0, 1, 0).to(tl.int64)
        b_pair = load_channels(p_pair, channel, K, PIECES, STEP, MASK_K)
        b_grad = tl.load(p_grad, mask=inside, other=0.0).to(tl.float32)
        b_error = tl.load(p_error, mask=inside, other=0.0)
        b_beta = 1.0
        if BETA:
            b_beta = tl.load(p_beta).to(tl.float32)
            p_beta -= beta_token
        gamma = 1.0
        if DECAY == 1:
            gamma = exp(n_g)
            p_g -= more * g_token
            n_g = tl.load(p_g).to(tl.float32)
        if DECAY == 2:
            gamma = load_channels(p_g, channel, K, PIECES, STEP, MASK_K)
            p_g -= more * (value_heads * K)
        p_pair -= key_heads * K
        p_grad -= grad_token
        p_error -= value_heads * V

        # The state before the token, decayed.
        if AFTER:
            read = _state(_load_words(p_saved, BYTES, PIECES, STRIDE), FORMAT, BYTES, PIECES)
            if BYTES:
                read = scaled(read, tl.load(p_scale), False, PIECES)
        if AFTER or not BYTES:
            p_saved -= more * value_heads * SAVED
            n_words = _load_words(p_saved, BYTES, PIECES, STRIDE)
            if BYTES:
                p_scale -= more * value_heads * SCALES
                n_scale = tl.load(p_scale)
        factor = n_scale
        if DECAY == 1:
            factor = gamma * n_scale
        if t > 0:
            T = scaled(_state(n_words, FORMAT, BYTES, PIECES), factor, False, PIECES)
        else:
            T = load_state(p_source, channel, column, K, V, VECTOR, PIECES, STEP)
            if DECAY == 1:
                T = scaled(T, gamma, False, PIECES)
        if DECAY == 2:
            T = scaled(T, gamma, True, PIECES)
        if BYTES:
            if not AFTER:
                step = tl.where(t > 1, 1, 0).to(tl.int64) * value_heads
                p_saved -= step * SAVED
                p_scale -= step * SCALES
                n_words = _load_words(p_saved, BYTES, PIECES, STRIDE)
                n_scale = tl.load(p_scale)

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
        p_dv -= dv_token
        p_channel -= tl.cast(value_heads, tl.int64) * (OWN * TILES * STRIDE)
        p_head -= tl.cast(value_heads, tl.int64) * (OWN * 4)

    store_state(p_state, dS, channel, column, K, V, VECTOR, PIECES, STEP)


@triton.jit(do_not_specialize=["first", "span", "room", "rows"])
def deliver(
    q,
    k,
    by_channel,
    by_head,
    starts,
    lengths,
    dq,
    dk,
    dg,
    dbeta,
    scale,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dg_token,
    dg_head,
    dbeta_token,
    dbeta_head,
    value_heads,
    first,
    span,
    room,
    rows,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
):
    """Adds up what `retreat` left, over groups of columns and the value heads of a key head, and writes gradients.

    Args:
        q, k, scale: as the call got them. by_channel, by_head, starts, lengths, first, span, room: of `retreat`.
        dq, dk: `[M, H, K]`, dg: `[M, HV(, K)]`, dbeta: `[M, HV]`, contiguous in K; only these tokens' rows are written.
        rows: N * room. RATIO: HV / H. OWN: groups of columns.

    Grid: (ceil(rows / ROWS), H).
    """
    RUN: tl.constexpr = PIECES * STEP
    STRIDE: tl.constexpr = LANES * STEP * COLUMNS
    VECTORS: tl.constexpr = PIECES * (3 if DECAY == 2 else 2)
    SIZE: tl.constexpr = (VECTORS + COLUMNS - 1) // COLUMNS * STRIDE
    i_key = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_seq, j = row // room, row % room
    mine = row < rows
    start = tl.load(starts + i_seq, mask=mine, other=0).to(tl.int64)
    length = tl.load(lengths + i_seq, mask=mine, other=0)
    mine = mine & (j < span) & (j + first < length)
    token = start + first + j

    # In the order of memory: `[rows, lane and step, vector]`.
    place = tl.arange(0, LANES * STEP)
    vector = tl.arange(0, 2 * PIECES)
    offset = (vector // COLUMNS * STRIDE + vector % COLUMNS)[None, :] + place[:, None] * COLUMNS
    base = by_channel + row.to(tl.int64)[:, None, None] * (value_heads * OWN * SIZE)
    total = tl.zeros((ROWS, LANES * STEP, 2 * PIECES), tl.float32)
    for group in range(RATIO * OWN):
        p = base + (i_key * (RATIO * OWN) + group) * SIZE + offset[None, :, :]
        total += tl.load(p, mask=mine[:, None, None], other=0.0)

    at = (place // STEP * RUN + place % STEP)[:, None] + (vector % PIECES * STEP)[None, :]
    query = (vector < PIECES)[None, None, :]
    inside = mine[:, None, None] & (at < K)[None, :, :]
    total = tl.where(query, total * scale, total)
    if NORM:
        p_q = q + (token * q_token + i_key * q_head)[:, None, None] + at[None, :, :] * q_channel
        p_k = k + (token * k_token + i_key * k_head)[:, None, None] + at[None, :, :] * k_channel
        x = tl.load(p_q, mask=inside & query, other=0.0).to(tl.float32)
        x += tl.load(p_k, mask=inside & (vector >= PIECES)[None, None, :], other=0.0).to(tl.float32)
        SPLIT: tl.constexpr = (ROWS, LANES * STEP, 2, PIECES)
        x = tl.reshape(x, SPLIT)
        y = tl.reshape(total, SPLIT)
        r = rstd(tl.sum(tl.sum(x * x, 3), 1))[:, None, :, None]
        x = x * r
        y = (y - x * tl.sum(tl.sum(x * y, 3), 1)[:, None, :, None]) * r
        total = tl.reshape(y, (ROWS, LANES * STEP, 2 * PIECES))
    p_dq = dq + (token * dq_token + i_key * dq_head)[:, None, None] + at[None, :, :]
    p_dk = dk + (token * dk_token + i_key * dk_head)[:, None, None] + at[None, :, :]
    tl.store(p_dq, total.to(dq.dtype.element_ty), mask=inside & query)
    tl.store(p_dk, total.to(dk.dtype.element_ty), mask=inside & (vector >= PIECES)[None, None, :])

    if DECAY == 2:
        vector = tl.arange(0, PIECES)
        offset = ((vector + 2 * PIECES) // COLUMNS * STRIDE + (vector + 2 * PIECES) % COLUMNS)[None, :]
        offset = offset + place[:, None] * COLUMNS
        at = (place // STEP * RUN + place % STEP)[:, None] + (vector * STEP)[None, :]
        for ratio in range(RATIO):
            i_head = i_key * RATIO + ratio
            gates = tl.zeros((ROWS, LANES * STEP, PIECES), tl.float32)
            for group in range(OWN):
                p = base + (i_head * OWN + group) * SIZE + offset[None, :, :]
                gates += tl.load(p, mask=mine[:, None, None], other=0.0)
            p_dg = dg + (token * dg_token + i_head * dg_head)[:, None, None] + at[None, :, :]
            tl.store(p_dg, gates.to(dg.dtype.element_ty), mask=mine[:, None, None] & (at < K)[None, :, :])
    if BETA or DECAY == 1:
        for ratio in range(RATIO):
            i_head = i_key * RATIO + ratio
            p = by_head + (row.to(tl.int64) * value_heads + i_head) * (OWN * 4)
            strength = tl.zeros((ROWS,), tl.float32)
            gate = tl.zeros((ROWS,), tl.float32)
            for group in range(OWN):
                if BETA:
                    strength += tl.load(p + group * 4, mask=mine, other=0.0)
                if DECAY == 1:
                    gate += tl.load(p + group * 4 + 1, mask=mine, other=0.0)
            if BETA:
                p_dbeta = dbeta + token * dbeta_token + i_head * dbeta_head
                tl.store(p_dbeta, strength.to(dbeta.dtype.element_ty), mask=mine)
            if DECAY == 1:
                p_dg = dg + token * dg_token + i_head * dg_head
                tl.store(p_dg, gate.to(dg.dtype.element_ty), mask=mine)
