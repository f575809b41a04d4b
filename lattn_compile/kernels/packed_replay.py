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
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.packed_rows import has_state, inputs_of, slot_of, tokens_of
from lattn_compile.kernels.common.packed_tiles import load_codes
from lattn_compile.kernels.common.pieces import columns, key_channels, lanes
from lattn_compile.kernels.packed_flush import end, ticket
from lattn_compile.kernels.packed_window import pair_of, products, read

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
    HEADS: tl.constexpr,
    SINGLE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
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
):
    """A step of every sequence, in place.

    Args:
        Inputs, slots and gates as `packed_decode.step` has them. codes, scales, blocks: the state, or under TWO its
            anchor, plain numbers; read_codes, read_scales, read_blocks: its read copy, under TWO.
        ring_k `[slots, W - 1, H, K]`, ring_u, ring_v `[.., HV, V]`, ring_g `[.., HV(, K)]`, ring_beta `[.., HV]`: fp32.
        HEADS: value heads of a program, of one key head: unless SINGLE all of them, and all columns. ROWS: at least
            W, a power of 2.
        FORMAT, BLOCK_K, BLOCK_V, HEAD_*: of what is read, the state or the read copy. ANCHOR: "" for fp32.

    Grid: ((HV / HEADS) * N,), times column blocks if SINGLE.
    """
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    APART: tl.constexpr = BLOCKS if SINGLE else 1  # programs that share a head
    PROGRAMS: tl.constexpr = APART * (HV // HEADS)
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    GROUPS: tl.constexpr = (ROWS + LANES - 1) // LANES
    BETA: tl.constexpr = beta is not None
    G_SIZE: tl.constexpr = K if DECAY == 2 else 1
    i_seq = i // PROGRAMS
    i_head = i // APART % (HV // HEADS) * HEADS
    i_key = i_head // (HV // H)
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    has = has_state(i_seq, fresh)

    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    lane = lanes(LANES, FLIP)
    if SINGLE:
        # On their way while the slot is. A sequence without a token reads another's.
        token = tl.minimum(first, tl.maximum(tokens - 1, 0)) if ends is not None else first
        i_block = i % APART
        column = columns(i_block * WIDTH, WARPS, COLUMNS)
        p_q = q + (token * q_token + i_key * q_head)
        p_k = k + (token * k_token + i_key * k_head)
        inputs = ()
        for h in tl.static_range(HEADS):
            inputs = inputs + (
                inputs_of(
                    token, i_head + h, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head,
                    channel, column, K, V, PIECES, STEP, MASKED, DECAY,
                ),
            )  # fmt: skip

    used = tl.where(live, count, 0)
    for t in range(used, rows):
        for part in range(HEADS * BLOCKS // APART):
            at_block = i % APART + part % (BLOCKS // APART)
            at_head = i_head + part // (BLOCKS // APART)
            at_column = columns(at_block * WIDTH, WARPS, COLUMNS)
            once = tl.max_contiguous(at_column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
            write_once = (lane == 0) & (at_column[None, :, None, :] < V)
            blank = tl.broadcast_to(tl.where(wrong, float("nan"), 0.0), once.shape).to(o.dtype.element_ty)
            tl.store(o + ((first + t) * (HV * V) + at_head * V) + once, blank, mask=write_once)
    if used == 0:
        return

    p_state = read_codes if TWO else codes  # what is read
    p_steps = read_scales if TWO else scales
    p_step_blocks = read_blocks if TWO else blocks
    row = slot * HV + i_head
    if SINGLE:
        # All loads of the states before the first is waited for, and before it is known whether there is a state.
        raw = ()
        for h in tl.static_range(HEADS):
            p_codes = p_state + (row + h) * HEAD_CODES
            raw = raw + (load_codes(p_codes, channel, column, has, K, V, VECTOR, PIECES, STEP, FORMAT),)
    at, last = ticket(cursor + slot, PROGRAMS)
    known = has & (at >= 0)
    c = tl.where(known, at, 0)
    if last:
        tl.store(cursor + slot, (c + used) % WINDOW)

    at_k = slot * (WINDOW - 1) * (H * K) + i_key * K
    at_row = slot * (WINDOW - 1) * HV  # of the ring's first record
    if SINGLE:
        stays = c < WINDOW - 1
        b_k, b_q, dot_kq, by_k, by_q = pair_of(p_q, p_k, scale, channel, K, PIECES, STEP, MASKED, NORM)
        with_k = ()
        with_q = ()
        if DECAY != 2:
            with_k, with_q = products(p_q, p_k, ring_k + at_k, c, H, K, BK, LANES, GROUPS)
        if stays & (i_head % (HV // H) == 0) & (i_block == 0):
            for n in tl.static_range(PIECES):
                place = channel + n * STEP
                tl.store(ring_k + (at_k + c * (H * K)) + place, b_k[n], mask=place < K)
        once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
        write_once = (lane == 0) & (column[None, :, None, :] < V)
        p_o = o + (token * (HV * V) + i_head * V) + once
        added = ()
        for h in tl.static_range(HEADS):
            head = i_head + h
            u, out = read(
                raw[h], inputs[h], with_k, with_q, by_k, by_q, b_k, b_q, dot_kq, p_q, p_k,
                g + (token * g_token + head * g_head) if DECAY else None,
                p_steps + (row + h) * HEAD_SCALES if HEAD_SCALES else None,
                p_step_blocks + (row + h) * HEAD_BLOCKS if HEAD_BLOCKS else None,
                ring_k + at_k, ring_u + (at_row + head) * V, ring_g + (at_row + head) * G_SIZE if DECAY else None,
                ring_v + (at_row + head) * V if TWO else None, ring_beta + (at_row + head) if TWO and BETA else None,
                c, known, stays, i_block == 0, head, i_block, a_log, bias, bound, channel, column, H, HV, K, V, BK,
                WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ROWS, DELTA, DECAY, BETA, GATE, SIGMOID, FORMAT, BLOCK_K,
                BLOCK_V, FAST,
                TWO,
            )  # fmt: skip
            added = added + (u,)
            shown = tl.broadcast_to(out[None, :, None, :], once.shape).to(o.dtype.element_ty)
            tl.store(p_o + h * V, shown, mask=write_once)
        if (stays == 0) | (known == 0):
            # The window's end; or a state that nobody has stored yet, and starts at zero.
            for part in range(HEADS):
                own_head = i_head + part
                own = added[0]
                for n in tl.static_range(1, HEADS):
                    own = tl.where(part == n, added[n], own)
                x = inputs_of(
                    token, own_head, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head,
                    channel, column, K, V, PIECES, STEP, MASKED, DECAY,
                )  # fmt: skip
                final = end(
                    own, x, p_q, p_k, by_q, by_k, codes + (row + part) * (K * V if TWO else HEAD_CODES),
                    scales + (row + part) * HEAD_SCALES if HEAD_SCALES and not TWO else None,
                    blocks + (row + part) * HEAD_BLOCKS if HEAD_BLOCKS and not TWO else None,
                    read_codes + (row + part) * HEAD_CODES if TWO else None,
                    read_scales + (row + part) * HEAD_SCALES if HEAD_SCALES and TWO else None,
                    read_blocks + (row + part) * HEAD_BLOCKS if HEAD_BLOCKS and TWO else None,
                    ring_k + at_k, ring_u + (at_row + own_head) * V,
                    ring_g + (at_row + own_head) * G_SIZE if DECAY else None,
                    ring_v + (at_row + own_head) * V if TWO else None,
                    ring_beta + (at_row + own_head) if TWO and BETA else None,
                    c, known, stays, own_head, i_block, a_log, bias, bound, channel, column, H, HV, K, V, WIDTH, LANES,
                    PIECES, STEP, VECTOR, FLIP, DELTA, DECAY, BETA, GATE, SIGMOID, ANCHOR, FORMAT, BLOCK_K, BLOCK_V,
                    AFTER, FAST, TWO,
                )  # fmt: skip
                if AFTER:
                    last_shown = tl.broadcast_to(final[None, :, None, :], once.shape).to(o.dtype.element_ty)
                    tl.store(p_o + part * V, last_shown, mask=write_once & (stays == 0))
    else:
        for t in range(used):
            token = first + t
            stays = c < WINDOW - 1
            p_q = q + (token * q_token + i_key * q_head)
            p_k = k + (token * k_token + i_key * k_head)
            b_k, b_q, dot_kq, by_k, by_q = pair_of(p_q, p_k, scale, channel, K, PIECES, STEP, MASKED, NORM)
            with_k = ()
            with_q = ()
            if DECAY != 2:
                with_k, with_q = products(p_q, p_k, ring_k + at_k, c, H, K, BK, LANES, GROUPS)
            if stays:
                for n in tl.static_range(PIECES):
                    place = channel + n * STEP
                    tl.store(ring_k + (at_k + c * (H * K)) + place, b_k[n], mask=place < K)
            for part in range(HEADS * BLOCKS):
                i_block = part % BLOCKS
                h = part // BLOCKS
                head = i_head + h
                column = columns(i_block * WIDTH, WARPS, COLUMNS)
                once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
                write_once = (lane == 0) & (column[None, :, None, :] < V)
                p_o = o + (token * (HV * V) + head * V) + once
                x = inputs_of(
                    token, head, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel,
                    column, K, V, PIECES, STEP, MASKED, DECAY,
                )  # fmt: skip
                own = load_codes(
                    p_state + (row + h) * HEAD_CODES, channel, column, known, K, V, VECTOR, PIECES, STEP, FORMAT
                )
                u, out = read(
                    own, x, with_k, with_q, by_k, by_q, b_k, b_q, dot_kq, p_q, p_k,
                    g + (token * g_token + head * g_head) if DECAY else None,
                    p_steps + (row + h) * HEAD_SCALES if HEAD_SCALES else None,
                    p_step_blocks + (row + h) * HEAD_BLOCKS if HEAD_BLOCKS else None,
                    ring_k + at_k, ring_u + (at_row + head) * V, ring_g + (at_row + head) * G_SIZE if DECAY else None,
                    ring_v + (at_row + head) * V if TWO else None,
                    ring_beta + (at_row + head) if TWO and BETA else None,
                    c, known, stays, i_block == 0, head, i_block, a_log, bias, bound, channel, column, H, HV, K, V, BK,
                    WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ROWS, DELTA, DECAY, BETA, GATE, SIGMOID, FORMAT, BLOCK_K,
                    BLOCK_V,
                    FAST, TWO,
                )  # fmt: skip
                shown = tl.broadcast_to(out[None, :, None, :], once.shape).to(o.dtype.element_ty)
                tl.store(p_o, shown, mask=write_once)
                if (stays == 0) | (known == 0):
                    final = end(
                        u, x, p_q, p_k, by_q, by_k, codes + (row + h) * (K * V if TWO else HEAD_CODES),
                        scales + (row + h) * HEAD_SCALES if HEAD_SCALES and not TWO else None,
                        blocks + (row + h) * HEAD_BLOCKS if HEAD_BLOCKS and not TWO else None,
                        read_codes + (row + h) * HEAD_CODES if TWO else None,
                        read_scales + (row + h) * HEAD_SCALES if HEAD_SCALES and TWO else None,
                        read_blocks + (row + h) * HEAD_BLOCKS if HEAD_BLOCKS and TWO else None,
                        ring_k + at_k, ring_u + (at_row + head) * V,
                        ring_g + (at_row + head) * G_SIZE if DECAY else None,
                        ring_v + (at_row + head) * V if TWO else None,
                        ring_beta + (at_row + head) if TWO and BETA else None,
                        c, known, stays, head, i_block, a_log, bias, bound, channel, column, H, HV, K, V, WIDTH, LANES,
                        PIECES, STEP, VECTOR, FLIP, DELTA, DECAY, BETA, GATE, SIGMOID, ANCHOR, FORMAT, BLOCK_K, BLOCK_V,
                        AFTER, FAST, TWO,
                    )  # fmt: skip
                    if AFTER:
                        shown = tl.broadcast_to(final[None, :, None, :], once.shape).to(o.dtype.element_ty)
                        tl.store(p_o, shown, mask=write_once & (stays == 0))
            # What a token has written the next one's threads read.
            tl.debug_barrier()
            c = tl.where(stays, c + 1, 0)
            known = known | (c >= 0)
