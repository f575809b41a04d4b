"""The token loop of `lattn::decode` on the device: forward, and the same again for the backward."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp, unpack
from lattn_compile.kernels.common.pieces import (
    columns,
    dot,
    key_channels,
    lanes,
    load_channels,
    load_state,
    over_channels,
    places,
    scaled,
    store_state,
)
from lattn_compile.kernels.decode_checkpoints import keep
from lattn_compile.kernels.decode_codec import places_of_steps, quantize, to_words

__all__ = ["advance"]


@triton.jit
def _unpacked(pairs, PIECES: tl.constexpr):
    """Keys and queries of one token, in pieces."""
    k = ()
    q = ()
    for i in tl.static_range(PIECES):
        b_k, b_q = unpack(pairs[i])
        k = k + (b_k,)
        q = q + (b_q,)
    return k, q


@triton.jit
def _updated(S, k, u, PIECES: tl.constexpr):
    """`S + k u^T`."""
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.fma(over_channels(k[i]), u[None, :, None, :], S[i]),)
    return out


@triton.jit
def _save(p, values, FORMAT: tl.constexpr, BYTES: tl.constexpr, PIECES: tl.constexpr, STRIDE: tl.constexpr):
    """Stores a state for `retreat`, whose lanes find at `p` what these hold: codes in words, or the state as it is."""
    if BYTES:
        IN_WORD: tl.constexpr = 8 if FORMAT == "nvfp4" else 4
        for word in tl.static_range((PIECES + IN_WORD - 1) // IN_WORD):
            tl.store(p + word * STRIDE, to_words(values, word, FORMAT, BYTES == 2, PIECES))
    else:
        for i in tl.static_range(PIECES):
            tl.store(p + i * STRIDE, values[i].to(p.dtype.element_ty))


@triton.jit(
    do_not_specialize=[
        "tokens",
        "first",
        "span",
        "slot_every",
        "slot_stride",
        "slot",
        "every",
        "mark_every",
        "mark_stride",
        "mark_slot",
        "room",
        "ready_room",
        "ready",
    ]
)
def advance(
    pairs,
    dots,
    v,
    g,
    beta,
    source,
    starts,
    lengths,
    o,
    final,
    marks,
    mark_scales,
    saved,
    scales,
    errors,
    v_token,
    v_head,
    v_column,
    g_token,
    g_head,
    beta_token,
    beta_head,
    o_token,
    o_head,
    key_heads,
    value_heads,
    tokens,
    first,
    span,
    slot_every,
    slot_stride,
    slot,
    every,
    mark_every,
    mark_stride,
    mark_slot,
    mark_row,
    scales_at,
    blocks_at,
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
    LOCAL: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
    READ: tl.constexpr,
    FINAL: tl.constexpr,
    MARK: tl.constexpr,
    SAVE: tl.constexpr,
    ERRORS: tl.constexpr,
    KNOWN: tl.constexpr,
    BYTES: tl.constexpr,
    STEPS: tl.constexpr,
    SAVE_EVERY: tl.constexpr,
    MARK_CODES: tl.constexpr,
    MARK_SCALES: tl.constexpr,
    MARK_BLOCKS: tl.constexpr,
):
    """Tokens `[first, first + span)` of every sequence, as far as it has them, one after another.

    Args:
        pairs, dots: of `pair_up`, and g of a decay by channel: of `decays`; LOCAL: token `first` of sequence i is in
            their row `i * ready_room + ready`. v: `[M, HV, V]`, beta and g of a decay by head: `[M, HV]`, strided.
        source: states `[.., HV, K, V]` that sequences start from, sequence i from row
            `starts[i] // slot_every + i * slot_stride + slot`.
        starts, lengths: int64 `[N]`. tokens: M > 0.
        o: `[M, HV, V]`, written if READ. final: `[N, HV, K, V]`, written if FINAL.
        marks: under MARK, the state before each `every`-th of these tokens, the j-th of sequence i in row
            `starts[i] // mark_every + i * mark_stride + mark_slot + j` of `mark_row` elements: itself (1), or encoded
            (2), its fp32 scales in `mark_scales`, the same buffer, from element `scales_at` of a row on, and nvfp4's
            block scales from byte `blocks_at` on; MARK_CODES, MARK_SCALES, MARK_BLOCKS: elements of one head.
        errors: written under ERRORS, `v - S~^T k` (`v` for the additive rule), `[.., HV, V]`, rows as in `pairs` under
            LOCAL. KNOWN: they are what `v` is, so that nothing has to be summed; not with READ.
        saved: under SAVE, the state after each SAVE_EVERY-th of these tokens (`_save`), that after token `first + j` of
            sequence i in row `(i * room + j) // SAVE_EVERY`.
        scales: what its codes are multiplied with: one number a program, `[.., HV, programs]` (BYTES = 1), or one for
            every lane group, column and group of pieces, `[.., HV, groups, STEPS * LANES * COLUMNS]` (BYTES = 2).
        DECAY: 0 none, 1 by head, 2 by channel. FORMAT: "" rounds nothing. AFTER: outputs are read after the rounding.

    Grid: (column blocks * HV * N,).
    """
    i = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + WARPS * COLUMNS - 1) // (WARPS * COLUMNS)
    i_block, i_head, i_seq = i % BLOCKS, (i // BLOCKS) % value_heads, i // (BLOCKS * value_heads)
    i_key = i_head // (value_heads // key_heads)
    start = tl.load(starts + i_seq).to(tl.int64)
    count = tl.maximum(tl.minimum(tl.load(lengths + i_seq) - first, span), 0).to(tl.int32)
    if not FINAL:
        if count == 0:
            return

    RUN: tl.constexpr = PIECES * STEP
    MASK_K: tl.constexpr = LANES * RUN != K
    channel = key_channels(LANES, RUN, STEP, FLIP)
    column = columns(i_block * (WARPS * COLUMNS), WARPS, COLUMNS)
    lane = lanes(LANES, FLIP)
    # One lane group writes what all of them hold. The pointers are those of a state's piece, lest it changes layout.
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
    write_once = (lane == 0) & (column[None, :, None, :] < V)
    inside = column < V

    head = i_seq.to(tl.int64) * value_heads + i_head
    at = start // slot_every + i_seq * slot_stride + slot
    S = load_state(source + (at * value_heads + i_head) * (K * V), channel, column, K, V, VECTOR, PIECES, STEP)

    row = tl.minimum(start + first, tokens - 1)
    at = row
    if LOCAL:
        at = i_seq.to(tl.int64) * ready_room + ready
    p_pair = pairs + (at * key_heads + i_key) * K
    p_dot = dots + at * key_heads + i_key
    p_v = v + ((at if KNOWN else row) * v_token + i_head * v_head) + column * v_column
    p_o = o
    if READ:
        p_o = o + (row * o_token + i_head * o_head)
    p_beta = beta
    if BETA:
        p_beta = beta + (row * beta_token + i_head * beta_head)
    p_g = g
    if DECAY == 1:
        p_g = g + (row * g_token + i_head * g_head)
    if DECAY == 2:
        p_g = g + (at * value_heads + i_head) * K
    if MARK:
        at_mark = start // mark_every + i_seq * mark_stride + mark_slot
        p_mark = marks + at_mark * mark_row + i_head * MARK_CODES
        mark = 0
    if MARK == 2:
        p_mark_scale = mark_scales + at_mark * (mark_row // 4) + scales_at + i_head * MARK_SCALES
        p_mark_block = marks + at_mark * mark_row + blocks_at + i_head * MARK_BLOCKS
    if SAVE:
        STRIDE: tl.constexpr = LANES * STEP * COLUMNS
        IN_WORD: tl.constexpr = 1 if BYTES == 0 else (8 if FORMAT == "nvfp4" else 4)
        STORED: tl.constexpr = (PIECES + IN_WORD - 1) // IN_WORD
        GROUPS: tl.constexpr = BLOCKS * WARPS
        at_row = i_seq.to(tl.int64) * room * value_heads + i_head
        group = i_block * WARPS + tl.arange(0, WARPS)
        place = places(group, channel, STORED * STRIDE, RUN, STEP, COLUMNS, VECTOR)
        at_saved = i_seq.to(tl.int64) * (room // SAVE_EVERY) * value_heads + i_head
        p_saved = saved + at_saved * (GROUPS * STORED * STRIDE) + place
        if BYTES == 1:
            p_scale = scales + at_row * BLOCKS + i_block
        if BYTES == 2:
            SCALES: tl.constexpr = GROUPS * STEPS * (LANES * COLUMNS)
            p_scale = scales + at_row * SCALES + places_of_steps(group, channel, lane, STEPS, COLUMNS, VECTOR)
            first_of_run = over_channels(channel % RUN == 0)

    if ERRORS:
        p_error = errors + (at * value_heads + i_head) * V

    # The next token's inputs are on their way while one is computed. After the last one it is loaded again.
    n_pair = load_channels(p_pair, channel, K, PIECES, STEP, MASK_K)
    n_dot = tl.load(p_dot)
    n_v = tl.load(p_v, mask=inside, other=0.0)
    n_beta = 1.0
    if BETA:
        n_beta = tl.load(p_beta).to(tl.float32)
    n_g = 0.0
    if DECAY == 1:
        n_g = tl.load(p_g).to(tl.float32)
    if DECAY == 2:
        n_g = load_channels(p_g, channel, K, PIECES, STEP, MASK_K)

    for t in range(count):
        b_k, b_q = _unpacked(n_pair, PIECES)
        b_dot, b_v, b_beta, b_g = n_dot, n_v.to(tl.float32), n_beta, n_g
        more = tl.where(t + 1 < count, 1, 0).to(tl.int64)
        p_pair += more * (key_heads * K)
        p_dot += more * key_heads
        p_v += more * v_token
        n_pair = load_channels(p_pair, channel, K, PIECES, STEP, MASK_K)
        n_dot = tl.load(p_dot)
        n_v = tl.load(p_v, mask=inside, other=0.0)
        if BETA:
            p_beta += more * beta_token
            n_beta = tl.load(p_beta).to(tl.float32)
        if DECAY == 1:
            p_g += more * g_token
            n_g = tl.load(p_g).to(tl.float32)
        if DECAY == 2:
            p_g += more * (value_heads * K)
            n_g = load_channels(p_g, channel, K, PIECES, STEP, MASK_K)

        if MARK:
            if t == mark:
                if MARK == 1:
                    store_state(p_mark, S, channel, column, K, V, VECTOR, PIECES, STEP)
                else:
                    keep(
                        p_mark, p_mark_scale, p_mark_block, S, channel, column, K, V, LANES, PIECES, STEP, VECTOR, FLIP,
                        FORMAT, BLOCK_K, BLOCK_V,
                    )  # fmt: skip
                    p_mark_scale += mark_row // 4
                    p_mark_block += mark_row
                p_mark += mark_row
                mark += every

        if DECAY == 1:
            S = scaled(S, exp(b_g), False, PIECES)
        if DECAY == 2:
            S = scaled(S, b_g, True, PIECES)
        error = b_v
        if DELTA and not KNOWN:
            error = b_v - dot(S, b_k, PIECES, FLIP)
        u = error
        if BETA:
            u = b_beta * error
        if READ:
            if not AFTER:
                # Of the state before the update, so that both sums run side by side.
                read = tl.fma(u, b_dot, dot(S, b_q, PIECES, FLIP))
        S = _updated(S, b_k, u, PIECES)
        codes = S
        if FORMAT != "":
            S, codes, steps = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
        if READ:
            if AFTER:
                read = dot(S, b_q, PIECES, FLIP)
            value = tl.broadcast_to(read[None, :, None, :], once.shape).to(o.dtype.element_ty)
            tl.store(p_o + once, value, mask=write_once)
            p_o += o_token
        if SAVE:
            if SAVE_EVERY == 1:
                _save(p_saved, codes if BYTES else S, FORMAT, BYTES, PIECES, STRIDE)
                p_saved += tl.cast(value_heads, tl.int64) * (GROUPS * STORED * STRIDE)
            else:
                if (t + 1) % SAVE_EVERY == 0:
                    _save(p_saved, S, FORMAT, BYTES, PIECES, STRIDE)
                    p_saved += tl.cast(value_heads, tl.int64) * (GROUPS * STORED * STRIDE)
            if BYTES == 1:
                tl.store(p_scale, steps[0])
                p_scale += value_heads * BLOCKS
            if BYTES == 2:
                for n in tl.static_range(STEPS):
                    step = tl.broadcast_to(steps[n], S[0].shape)
                    tl.store(p_scale + n * (LANES * COLUMNS), step, mask=first_of_run)
                p_scale += tl.cast(value_heads, tl.int64) * SCALES
        if ERRORS:
            value = tl.broadcast_to(error[None, :, None, :], once.shape)
            tl.store(p_error + once, value, mask=write_once)
            p_error += tl.cast(value_heads, tl.int64) * V

    if FINAL:
        store_state(final + head * (K * V), S, channel, column, K, V, VECTOR, PIECES, STEP)
