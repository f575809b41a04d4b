"""`lattn::decode_` on the device for one token of every sequence: what a serving engine's decode step is.

A program takes some tiles of one sequence one after the other, a tile being the columns of a head that are rounded
together, and has the next tile's codes on their way while it computes one: how long memory takes is then hidden by the
arithmetic. The value heads of a key head follow each other, so a key and a query are normalised once for all of them.

Layout, order of sums and rounding are those of `decode_forward.py`, so a stored state has the bits that the emulated
kernel's would have.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, exps, gates_of, log_decays_of, strength_of
from lattn_compile.kernels.common.packed_rows import (
    begin,
    channels,
    has_state,
    normalised,
    row_of,
    slot_of,
    tokens_of,
)
from lattn_compile.kernels.common.packed_tiles import decoded, decoded_words
from lattn_compile.kernels.common.pieces import columns, dot, in_pieces, key_channels, lanes, scaled
from lattn_compile.kernels.decode_codec import quantize
from lattn_compile.kernels.packed_fetch import after, bring, codes_of, inputs_of_tile, issued, likely_slot
from lattn_compile.kernels.packed_write import updated, write_back

__all__ = ["token_step"]


@triton.jit
def _times(x, norm, scale, PIECES: tl.constexpr):
    """A vector in pieces, fp32, times two factors, one after the other."""
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (x[i].to(tl.float32) * norm * scale,)
    return out


@triton.jit(do_not_specialize=["tokens", "sequences", "slots", "padding"])
def token_step(
    q,
    k,
    v,
    g,
    beta,
    codes,
    scales,
    blocks,
    cursor,
    indices,
    fresh,
    ends,
    lengths,
    o,
    a_log,
    bias,
    scale,
    bound,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    v_column,
    g_token,
    g_head,
    beta_token,
    beta_head,
    tokens,
    sequences,
    slots,
    padding,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
    SOONER: tl.constexpr,
    NORM: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
    FAST: tl.constexpr,
    HEAD_CODES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """A step of every sequence, in place; arguments as `packed_decode.step` has them.

    Args:
        KEYS: key heads of a program. TILES: of each of them, a divisor of the tiles of its value heads; all of them
            unless KEYS is 1.
        PDL: the launch may overlap the end of the kernel before it.

    Grid: (tiles of a sequence / (KEYS * TILES) * N,).
    """
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    BETA: tl.constexpr = beta is not None
    COUNT: tl.constexpr = KEYS * TILES
    PROGRAMS: tl.constexpr = HV * BLOCKS // COUNT  # of a sequence
    RATIO: tl.constexpr = HV // H
    WORDS: tl.constexpr = FAST and (VECTOR % 8 == 0 or FORMAT == "nvfp4") and not TURNED
    # Decays by channel: made once in the program and then spread, or by every thread that needs a channel.
    SPREAD: tl.constexpr = DECAY == 2 and not FLIP and not MASKED and PIECES <= 8
    i_seq = i // PROGRAMS
    i_tile = i % PROGRAMS * COUNT
    if SOONER:
        # The kernel before may still write what is read here. That makes for a wrong line in the cache, and no harm.
        guess = likely_slot(i_seq, indices, slots)
        bring(
            codes + (guess * HV + i_tile // BLOCKS) * HEAD_CODES + i_tile % BLOCKS * WIDTH, K, tl.constexpr(128), V,
            WIDTH,
        )  # fmt: skip
        bring(cursor + guess, 1, tl.constexpr(1), 1, tl.constexpr(1))
        if HEAD_SCALES:
            at_scales = scales + (guess * HV + i_tile // BLOCKS) * HEAD_SCALES
            bring(at_scales, 1, tl.constexpr(1), 1, tl.constexpr(HEAD_SCALES))
    if PDL:
        begin()
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    has = has_state(i_seq, fresh)

    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    column = columns(0, WARPS, COLUMNS)
    lane = lanes(LANES, FLIP)
    # One lane group writes what all of them hold. The pointers are those of a state's piece, lest it changes layout.
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
    # A sequence without a token reads another's.
    token = tl.minimum(first, tl.maximum(tokens - 1, 0)) if ends is not None else first
    # What does not depend on the slot is on its way while that is.
    x = inputs_of_tile(
        i_tile, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel, once, K,
        V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, BK if SPREAD else 0,
    )  # fmt: skip
    first_key = i_tile // (RATIO * BLOCKS)
    if KEYS == 1:
        t_q, t_k, r_q, r_k = _rows(
            q + (token * q_token + first_key * q_head), k + (token * k_token + first_key * k_head), channel, K, BK,
            PIECES, STEP, WARPS, MASKED,
        )  # fmt: skip

    used = tl.where(live, count, 0)
    blank = tl.broadcast_to(tl.where(wrong, float("nan"), 0.0), once.shape).to(o.dtype.element_ty)
    for t in range(used, rows):
        for n in range(COUNT):
            at_head, at_column = (i_tile + n) // BLOCKS, once + (i_tile + n) % BLOCKS * WIDTH
            p_o = o + ((first + t) * (HV * V) + at_head * V) + at_column
            tl.store(p_o, blank, mask=(lane == 0) & (at_column < V))
    if used == 0:
        return

    row = slot * HV
    raw, steps = codes_of(
        i_tile, has, row, codes, scales, blocks, channel, column, K, V, WIDTH, BLOCKS, WARPS, COLUMNS, PIECES, STEP,
        VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES, HEAD_SCALES, HEAD_BLOCKS, WORDS, TURNED, ODD,
    )  # fmt: skip
    at = tl.load(cursor + slot)
    stored = has & (at >= 0)
    for i_key in range(first_key, first_key + KEYS):
        if KEYS > 1:
            t_q, t_k, r_q, r_k = _rows(
                q + (token * q_token + i_key * q_head), k + (token * k_token + i_key * k_head), channel, K, BK, PIECES,
                STEP, WARPS, MASKED,
            )  # fmt: skip
        by_q, by_k, dot_kq = normalised(t_q, t_k, scale, WARPS, NORM)
        b_q = _times(r_q, by_q, scale, PIECES)
        b_k = _times(r_k, by_k, 1.0, PIECES)
        for inner in range(TILES):
            if KEYS == 1:
                tile = i_tile + inner
            else:
                tile = i_key * TILES + inner
            head = tile // BLOCKS
            at_column = tile % BLOCKS * WIDTH
            if WORDS:
                S = decoded_words(raw, steps, stored, PIECES, FORMAT, FAST, True)
            else:
                S = decoded(raw, steps, stored, channel, PIECES, FORMAT, FAST)
            if DECAY == 1:
                S = scaled(S, exp(decay_of(x[1], a_log, bias, bound, head, GATE)), False, PIECES)
            if DECAY == 2:
                if SPREAD:
                    log_decay = x[1].to(tl.float32)
                    if GATE:
                        log_decay = gates_of(log_decay, bias, a_log, bound, head, tl.arange(0, BK), K, GATE)
                    by = in_pieces(exp(log_decay), LANES, PIECES, STEP)
                else:
                    by = exps(log_decays_of(x[1], a_log, bias, bound, head, channel, K, PIECES, STEP, GATE), PIECES)
                S = scaled(S, by, True, PIECES)
            u = x[0].to(tl.float32)
            strength = 1.0
            if BETA:
                strength = strength_of(x[2], SIGMOID)
            if COUNT > 1:
                # The next tile, when this one's codes have made room for it.
                more = tile + 1 < i_tile + COUNT
                then = tl.where(more, tile + 1, tile)
                raw, steps = codes_of(
                    then, has & more, row, codes, scales, blocks, channel, column, K, V, WIDTH, BLOCKS, WARPS, COLUMNS,
                    PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES, HEAD_SCALES, HEAD_BLOCKS, WORDS,
                    TURNED, ODD,
                )  # fmt: skip
                x = inputs_of_tile(
                    then, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel,
                    once, K, V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, BK if SPREAD else 0,
                )  # fmt: skip
                if EARLY:
                    threads = issued(tile)
                    b_k = after(threads, b_k)
                    b_q = after(threads, b_q)
            if DELTA:
                u = u - dot(S, b_k, PIECES, FLIP)[None, :, None, :]
            if not AFTER:
                # Of the state before the update, so that both sums run side by side.
                read = dot(S, b_q, PIECES, FLIP)[None, :, None, :]
            if BETA:
                u = strength * u
            if not AFTER:
                read = tl.fma(u, dot_kq, read)
            S = updated(S, b_k, u, PIECES)
            if AFTER:
                S, _, _ = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
                read = tl.broadcast_to(dot(S, b_q, PIECES, FLIP)[None, :, None, :], u.shape)
            write_back(
                codes + (row + head) * HEAD_CODES, scales + (row + head) * HEAD_SCALES if HEAD_SCALES else None,
                blocks + (row + head) * HEAD_BLOCKS if HEAD_BLOCKS else None, S, channel, column + at_column,
                at_column, K, V, WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, FORMAT, BLOCK_K, BLOCK_V, FAST, TURNED,
            )  # fmt: skip
            p_o = o + (token * (HV * V) + head * V + at_column) + once
            tl.store(p_o, read.to(o.dtype.element_ty), mask=(lane == 0) & (once + at_column < V))
    if at < 0:  # noqa: SIM102 - an atomic belongs into one branch only
        # Every program has to find a cursor of a slot without a state before it says that there is one. So each takes
        # one off, and who finds that all others have writes it.
        if tl.atomic_add(cursor + slot, -1, sem="relaxed") == -PROGRAMS:
            tl.store(cursor + slot, 0)


@triton.jit
def _rows(
    p_q,
    p_k,
    channel,
    K: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A query and a key as they lie in memory: as `normalised` takes them, and in pieces."""
    return (
        row_of(p_q, K, BK, WARPS),
        row_of(p_k, K, BK, WARPS),
        channels(p_q, channel, K, PIECES, STEP, MASKED),
        channels(p_k, channel, K, PIECES, STEP, MASKED),
    )
