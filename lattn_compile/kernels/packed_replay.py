"""`lattn::replay_` on the device: a window's records beside a stored state, in place.

A token reads the state's codes and does not write them: what it adds is one record. With records i of the window so
far, kept as k_i and u_i, and G the decay since something was written, now included,

    S~^T k = A^T (G k) + sum_i (k_i . G_i k) u_i          and the same with q in the place of k
    u = beta (v - S~^T k)        o = S~^T q + (k . q) u

so the state costs two sums over its codes. The window's last token writes the records to the state, one after the other
as the recurrence has them, and rounds it; in two_precision the recurrence runs from the anchor over the raw records.

A program has some value columns of a few heads. If a call has several tokens it goes over all columns of all heads of
a key head, token by token, so that what it reads of the ring no other program writes.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.packed_rows import (
    begin,
    channels,
    has_state,
    slot_of,
    tokens_of,
)
from lattn_compile.kernels.common.pieces import columns, key_channels, lanes
from lattn_compile.kernels.packed_fetch import bring, codes_of, inputs_of_tile, likely_slot, records_of
from lattn_compile.kernels.packed_flush import cursor_of, end, leave
from lattn_compile.kernels.packed_window import against, pair_of, products, read

__all__ = ["step"]


@triton.jit(do_not_specialize=["tokens", "sequences", "slots", "padding"])
def step(
    q,
    k,
    v,
    g,
    beta,
    codes,
    scales,
    blocks,
    read_codes,
    read_scales,
    read_blocks,
    ring_k,
    ring_u,
    ring_g,
    ring_v,
    ring_beta,
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
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    TILES: tl.constexpr,
    NORM: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
    HEAD_CODES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    SOONER: tl.constexpr,
    PDL: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """A step of every sequence, in place.

    Args:
        Inputs, slots and gates as `packed_decode.step` has them. codes, scales, blocks: the state, or under TWO its
            anchor, plain numbers; read_codes, read_scales, read_blocks: its read copy, under TWO.
        ring_k `[slots, W - 1, H, K]`, ring_u, ring_v `[.., HV, V]`, ring_g `[.., HV(, K)]`, ring_beta `[.., HV]`: fp32.
        ROWS: at least W, a power of 2. SINGLE: no sequence has more than one token. TILES: of a program, which are
            columns of a head that are rounded together; unless SINGLE, all of a key head.
        FORMAT, BLOCK_K, BLOCK_V, HEAD_*: of what is read, the state or the read copy. ANCHOR: "" for fp32.

        SOONER, PDL: as `packed_token.token_step` has them.

    Grid: (tiles of a sequence / TILES * N,).
    """
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    OF_KEY: tl.constexpr = HV // H * BLOCKS
    PARTS: tl.constexpr = OF_KEY // TILES  # programs of a key head
    INNER: tl.constexpr = min(TILES, BLOCKS)  # tiles of one head
    WHOLE: tl.constexpr = BLOCK_K >= K and FORMAT != "nvfp4"
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    GROUPS: tl.constexpr = (ROWS + LANES - 1) // LANES
    BETA: tl.constexpr = beta is not None
    G_SIZE: tl.constexpr = K if DECAY == 2 else 1
    EIGHT: tl.constexpr = FORMAT == "int8" or FORMAT == "fp8_e4m3"
    BRING: tl.constexpr = FAST == 2 and EIGHT and TILES > 1 and not TWO and not TURNED and V % WIDTH == 0
    WORDS: tl.constexpr = FAST and (VECTOR % 8 == 0 or FORMAT == "nvfp4") and not TURNED
    i_seq, i_key, i_part = i // (H * PARTS), i // PARTS % H, i % PARTS
    i_tile = i_key * OF_KEY + i_part * TILES
    if SOONER:
        # The kernel before may still write what is read here. That makes for a wrong line in the cache, and no harm.
        guess = likely_slot(i_seq, indices, slots)
        at_guess = guess * HV + i_tile // BLOCKS
        old_codes = read_codes if TWO else codes
        old_scales = read_scales if TWO else scales
        bring(old_codes + at_guess * HEAD_CODES + i_tile % BLOCKS * WIDTH, K, tl.constexpr(128), V, WIDTH)
        bring(cursor + guess, 1, tl.constexpr(1), 1, tl.constexpr(1))
        if HEAD_SCALES:
            bring(old_scales + at_guess * HEAD_SCALES, 1, tl.constexpr(1), 1, tl.constexpr(HEAD_SCALES))
        if WINDOW > 1:
            at_first = guess * (WINDOW - 1)
            p_first = ring_u + (at_first * HV + i_tile // BLOCKS) * V + i_tile % BLOCKS * WIDTH
            bring(p_first, WINDOW - 1, ROWS, HV * V, WIDTH)
            bring(ring_k + (at_first * H + i_key) * K, WINDOW - 1, ROWS, H * K, K)
            if DECAY == 1:
                bring(ring_g + at_first * HV + i_tile // BLOCKS, WINDOW - 1, ROWS, HV, tl.constexpr(1))
    if PDL:
        begin()
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    has = has_state(i_seq, fresh)

    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    lane = lanes(LANES, FLIP)
    column = columns(0, WARPS, COLUMNS)
    # One lane group writes what all of them hold. The pointers are those of a state's piece, lest it changes layout.
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))

    if SINGLE:
        # What does not depend on the slot is on its way while that is. A sequence without a token reads another's.
        token = tl.minimum(first, tl.maximum(tokens - 1, 0)) if ends is not None else first
        x = inputs_of_tile(
            i_tile, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel, once,
            K, V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, 0,
        )  # fmt: skip
        x_q = channels(q + (token * q_token + i_key * q_head), channel, K, PIECES, STEP, MASKED)
        x_k = channels(k + (token * k_token + i_key * k_head), channel, K, PIECES, STEP, MASKED)

    used = tl.where(live, count, 0)
    blank = tl.broadcast_to(tl.where(wrong, float("nan"), 0.0), once.shape).to(o.dtype.element_ty)
    for t in range(used, rows):
        for n in range(TILES):
            at_head, at_column = (i_tile + n) // BLOCKS, once + (i_tile + n) % BLOCKS * WIDTH
            p_o = o + ((first + t) * (HV * V) + at_head * V) + at_column
            tl.store(p_o, blank, mask=(lane == 0) & (at_column < V))
    if used == 0:
        return

    row = slot * HV
    p_state = read_codes if TWO else codes  # what is read
    p_steps = read_scales if TWO else scales
    p_step_blocks = read_blocks if TWO else blocks
    if SINGLE:
        raw, steps = codes_of(
            i_tile, has, row, p_state, p_steps, p_step_blocks, channel, column, K, V, WIDTH, BLOCKS, WARPS, COLUMNS,
            PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES, HEAD_SCALES, HEAD_BLOCKS, WORDS, TURNED,
            ODD,
        )  # fmt: skip
        # Lest they are put off until what depends on other loads is done.
        tl.debug_barrier()
    # A cursor is read by all programs of a sequence before it changes: each takes a ticket at its end, and who has the
    # last one writes it.
    at = cursor_of(tl.load(cursor + slot))
    known = has & (at >= 0)
    c = tl.where(known, at, 0)
    next_c = (c + used) % WINDOW
    at_k = slot * (WINDOW - 1) * (H * K) + i_key * K
    at_row = slot * (WINDOW - 1) * HV  # of the ring's first record
    for t in range(1 if SINGLE else used):
        stays = c < WINDOW - 1
        # A single token's codes are asked for before the cursor is there. Later ones may be what this call has stored.
        stored = has if SINGLE else known
        if not SINGLE:
            token = first + t
            x = inputs_of_tile(
                i_tile, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel,
                once, K, V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, 0,
            )  # fmt: skip
            x_q = channels(q + (token * q_token + i_key * q_head), channel, K, PIECES, STEP, MASKED)
            x_k = channels(k + (token * k_token + i_key * k_head), channel, K, PIECES, STEP, MASKED)
            raw, steps = codes_of(
                i_tile, known, row, p_state, p_steps, p_step_blocks, channel, column, K, V, WIDTH, BLOCKS, WARPS,
                COLUMNS, PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES, HEAD_SCALES, HEAD_BLOCKS,
                WORDS, TURNED, ODD,
            )  # fmt: skip
        us, gs = records_of(
            i_tile, c > 0, at_row, ring_u, ring_g, c, once, HV, V, WIDTH, BLOCKS, LANES, FLIP, DECAY, GROUPS
        )
        p_q = q + (token * q_token + i_key * q_head)
        p_k = k + (token * k_token + i_key * k_head)
        b_k, b_q, dot_kq, by_k, by_q = pair_of(x_q, x_k, scale, PIECES, NORM)
        with_k = ()
        with_q = ()
        if DECAY != 2:
            with_k, with_q = products(p_q, p_k, ring_k + at_k, c, H, K, BK, LANES, GROUPS)
        if stays & (i_part == 0):
            # As a row: a store of pieces would ask for another layout of them than the sums have.
            place = tl.arange(0, BK)
            row_k = tl.load(p_k + place, mask=place < K, other=0.0).to(tl.float32) * by_k
            tl.store(ring_k + (at_k + c * (H * K)) + place, row_k, mask=place < K)
        for outer in range(i_tile // INNER, (i_tile + TILES) // INNER):
            head = outer * INNER // BLOCKS
            own_row = row + head
            p_ring_u = ring_u + (at_row + head) * V
            p_ring_g = ring_g + (at_row + head) * G_SIZE if DECAY else None
            p_ring_v = ring_v + (at_row + head) * V if TWO else None
            p_ring_beta = ring_beta + (at_row + head) if TWO and BETA else None
            p_scales = scales + own_row * HEAD_SCALES if HEAD_SCALES and not TWO else None
            p_blocks = blocks + own_row * HEAD_BLOCKS if HEAD_BLOCKS and not TWO else None
            p_read_scales = read_scales + own_row * HEAD_SCALES if HEAD_SCALES and TWO else None
            p_read_blocks = read_blocks + own_row * HEAD_BLOCKS if HEAD_BLOCKS and TWO else None
            first_block = outer * INNER % BLOCKS == 0
            on_state, own_k, own_q, weights_k, weights_q = against(
                x, gs, with_k, with_q, by_k, by_q, b_k, b_q, p_q, p_k,
                g + (token * g_token + head * g_head) if DECAY else None, ring_k + at_k, p_ring_g, c,
                stays & first_block, head, a_log, bias, bound, channel, H, HV, K, BK, LANES, PIECES, STEP, FLIP, GROUPS,
                DECAY, GATE,
            )  # fmt: skip
            for tile in range(outer * INNER, (outer + 1) * INNER):
                i_block = tile % BLOCKS
                at_column = i_block * WIDTH
                own, own_steps, own_x, own_us = raw, steps, x, us
                if TILES > 1:
                    # Not before a window's end, which needs the registers.
                    more = tile + 1 < i_tile + TILES
                    then = tl.where(more, tile + 1, tile)
                    raw, steps = codes_of(
                        then, stored & more & stays, row, p_state, p_steps, p_step_blocks, channel, column, K, V, WIDTH,
                        BLOCKS, WARPS, COLUMNS, PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES,
                        HEAD_SCALES, HEAD_BLOCKS, WORDS, TURNED, ODD,
                    )  # fmt: skip
                    us, gs = records_of(
                        then,
                        more & stays,
                        at_row,
                        ring_u,
                        ring_g,
                        c,
                        once,
                        HV,
                        V,
                        WIDTH,
                        BLOCKS,
                        LANES,
                        FLIP,
                        DECAY,
                        GROUPS,
                    )
                    x = inputs_of_tile(
                        then, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head,
                        channel, once, K, V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, 0,
                    )  # fmt: skip
                if BRING and stays == 0:
                    # A window's end leaves no registers for the next tile's codes.
                    bring(p_state + ((row + then // BLOCKS) * HEAD_CODES + then % BLOCKS * WIDTH), K, BK, V, WIDTH)
                p_o = o + (token * (HV * V) + head * V + at_column) + once
                mine = (lane == 0) & (once + at_column < V)
                if TWO:
                    out = read(
                        own, own_steps, own_x, own_us, on_state, own_k if DECAY == 2 else b_k, own_q if DECAY == 2 else
                        b_q, weights_k, weights_q, dot_kq, p_ring_u, p_ring_v, p_ring_beta, c, known, stays, channel,
                        once + at_column, HV, V, LANES, PIECES, FLIP, GROUPS, DELTA, BETA, SIGMOID, FORMAT, WHOLE, FAST,
                        WORDS, TWO,
                    )  # fmt: skip
                    tl.store(p_o, out.to(o.dtype.element_ty), mask=mine)
                else:
                    if stays:
                        out = read(
                            own, own_steps, own_x, own_us, on_state, own_k if DECAY == 2 else b_k, own_q if DECAY == 2
                            else b_q, weights_k, weights_q, dot_kq, p_ring_u, p_ring_v, p_ring_beta, c, known, stays,
                            channel, once + at_column, HV, V, LANES, PIECES, FLIP, GROUPS, DELTA, BETA, SIGMOID, FORMAT,
                            WHOLE, FAST, WORDS, TWO,
                        )  # fmt: skip
                        tl.store(p_o, out.to(o.dtype.element_ty), mask=mine)
                if (stays == 0) | (known == 0):
                    # The window's end; or a state that nobody has stored yet, and starts at zero.
                    final = end(
                        own, own_steps, own_x, on_state, dot_kq, p_q, p_k, by_q, by_k,
                        codes + own_row * (K * V if TWO else HEAD_CODES), p_scales, p_blocks,
                        read_codes + own_row * HEAD_CODES if TWO else None, p_read_scales, p_read_blocks, ring_k + at_k,
                        p_ring_u, p_ring_g, p_ring_v, p_ring_beta, c, known, stays, head, i_block, a_log, bias, bound,
                        channel, column + at_column, once + at_column, H, HV, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
                        FLIP, DELTA, DECAY, BETA, GATE, SIGMOID, ANCHOR, FORMAT, BLOCK_K, BLOCK_V, AFTER, FAST, WORDS,
                        TWO, TURNED,
                    )  # fmt: skip
                    if AFTER or not TWO:
                        tl.store(p_o, final.to(o.dtype.element_ty), mask=mine & (stays == 0))
                    if TILES > 1:
                        raw, steps = codes_of(
                            then, stored & more, row, p_state, p_steps, p_step_blocks, channel, column, K, V, WIDTH,
                            BLOCKS, WARPS, COLUMNS, PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES,
                            HEAD_SCALES, HEAD_BLOCKS, WORDS, TURNED, ODD,
                        )  # fmt: skip
                        us, gs = records_of(
                            then,
                            more,
                            at_row,
                            ring_u,
                            ring_g,
                            c,
                            once,
                            HV,
                            V,
                            WIDTH,
                            BLOCKS,
                            LANES,
                            FLIP,
                            DECAY,
                            GROUPS,
                        )
                        x = inputs_of_tile(
                            then, token, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head,
                            channel, once, K, V, WIDTH, BLOCKS, PIECES, STEP, MASKED, DECAY, 0,
                        )  # fmt: skip
        if not SINGLE:
            # What a token has written the next one's threads read.
            tl.debug_barrier()
            c = tl.where(stays, c + 1, 0)
            known = known | (c >= 0)
    leave(cursor + slot, next_c, H * PARTS)
