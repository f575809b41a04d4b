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

from lattn_compile.kernels.common.inputs import exp, rstd
from lattn_compile.kernels.common.packed_gates import decay_of, exps, gates_of, log_decays_of, strength_of
from lattn_compile.kernels.common.packed_rows import has_state, slot_of, tokens_of
from lattn_compile.kernels.common.packed_tiles import decoded, load_codes, load_steps
from lattn_compile.kernels.common.pieces import columns, dot, key_channels, lanes, scaled
from lattn_compile.kernels.decode_codec import quantize
from lattn_compile.kernels.packed_flush import start, store, ticket, walked
from lattn_compile.kernels.packed_write import keys, updated

__all__ = ["step"]


@triton.jit
def _larger(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def _times(x, y, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (x[i] * y[i],)
    return out


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
            W - 1, a power of 2.
        FORMAT, BLOCK_K, BLOCK_V, HEAD_*: of what is read, the state or the read copy. ANCHOR: "" for fp32.

    Grid: ((HV / HEADS) * N,), times column blocks if SINGLE.
    """
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    APART: tl.constexpr = BLOCKS if SINGLE else 1  # programs that share a head
    PROGRAMS: tl.constexpr = APART * (HV // HEADS)
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    WHOLE: tl.constexpr = BLOCK_K >= K and FORMAT != "nvfp4"  # codes of a column have one scale
    i_seq = i // PROGRAMS
    i_head = i // APART % (HV // HEADS) * HEADS
    i_key = i_head // (HV // H)
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)

    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    lane = lanes(LANES, FLIP)
    used = tl.where(live, count, 0)
    for t in range(used, rows):
        for part in range(HEADS * BLOCKS // APART):
            i_block = i % APART + part % (BLOCKS // APART)
            head = i_head + part // (BLOCKS // APART)
            column = columns(i_block * WIDTH, WARPS, COLUMNS)
            once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
            write_once = (lane == 0) & (column[None, :, None, :] < V)
            blank = tl.broadcast_to(tl.where(wrong, float("nan"), 0.0), once.shape).to(o.dtype.element_ty)
            tl.store(o + ((first + t) * (HV * V) + head * V) + once, blank, mask=write_once)
    if used == 0:
        return

    at, last = ticket(cursor + slot, PROGRAMS)
    known = has_state(i_seq, fresh) & (at >= 0)
    c = tl.where(known, at, 0)
    if last:
        tl.store(cursor + slot, (c + used) % WINDOW)

    record = tl.arange(0, ROWS)
    at_tile = tl.arange(0, BK)[None, :] + record[:, None] * 0
    at_k = slot * (WINDOW - 1) * (H * K) + i_key * K
    for t in range(1 if SINGLE else used):
        token = first + t
        # A window's key products are those of all of a key head's value heads.
        p_q = q + (token * q_token + i_key * q_head)
        p_k = k + (token * k_token + i_key * k_head)
        t_q = tl.load(p_q + at_tile, mask=at_tile < K, other=0.0).to(tl.float32)
        t_k = tl.load(p_k + at_tile, mask=at_tile < K, other=0.0).to(tl.float32)
        mine = (record[:, None] < c) & (at_tile < K)
        t_ring = tl.load(ring_k + at_k + record[:, None] * (H * K) + at_tile, mask=mine, other=0.0)
        if NORM:
            norm_q = rstd(tl.sum(t_q * t_q, 1))
            norm_k = rstd(tl.sum(t_k * t_k, 1))
            t_q = t_q * norm_q[:, None]
            t_k = t_k * norm_k[:, None]
        else:
            norm_q = tl.full((ROWS,), 1.0, tl.float32)
            norm_k = norm_q
        t_q = t_q * scale
        by_q, by_k, dot_kq = tl.reduce((norm_q, norm_k, tl.sum(t_k * t_q, 1)), 0, _larger)
        b_k = keys(p_k, by_k, 1.0, channel, K, PIECES, STEP, MASKED)
        b_q = keys(p_q, by_q, scale, channel, K, PIECES, STEP, MASKED)
        with_k = tl.sum(t_ring * t_k, 1)
        with_q = tl.sum(t_ring * t_q, 1)
        stays = c < WINDOW - 1
        if stays & (i_head % (HV // H) == 0) & (i % APART == 0):
            for n in tl.static_range(PIECES):
                place = channel + n * STEP
                tl.store(ring_k + (at_k + c * (H * K)) + place, b_k[n], mask=place < K)

        for part in range(HEADS * BLOCKS // APART):
            i_block = i % APART + part % (BLOCKS // APART)
            head = i_head + part // (BLOCKS // APART)
            column = columns(i_block * WIDTH, WARPS, COLUMNS)
            inside = column < V
            # One lane group writes what all of them hold, through the pointers of a state's piece.
            once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
            write_once = (lane == 0) & (column[None, :, None, :] < V)
            row = slot * HV + head
            at_head = slot * (WINDOW - 1) * HV + head  # of the ring's first record
            p_codes = codes + row * (K * V if TWO else HEAD_CODES)
            p_scales = scales
            p_blocks = blocks
            p_read = read_codes
            p_read_scales = read_scales
            p_read_blocks = read_blocks
            if TWO:
                p_read = read_codes + row * HEAD_CODES
                if HEAD_SCALES:
                    p_read_scales = read_scales + row * HEAD_SCALES
                if HEAD_BLOCKS:
                    p_read_blocks = read_blocks + row * HEAD_BLOCKS
                raw = load_codes(p_read, channel, column, known, K, V, VECTOR, PIECES, STEP, FORMAT)
            else:
                if HEAD_SCALES:
                    p_scales = scales + row * HEAD_SCALES
                if HEAD_BLOCKS:
                    p_blocks = blocks + row * HEAD_BLOCKS
                raw = load_codes(p_codes, channel, column, known, K, V, VECTOR, PIECES, STEP, FORMAT)
            s_scales = p_read_scales if TWO else p_scales
            s_blocks = p_read_blocks if TWO else p_blocks
            at_u = (at_head + record[:, None, None] * HV) * V + column[None, :, :]
            t_u = tl.load(ring_u + at_u, mask=(record[:, None, None] < c) & inside[None, :, :], other=0.0)
            p_v = v + (token * v_token + head * v_head) + column * v_column
            b_v = tl.load(p_v, mask=inside, other=0.0).to(tl.float32)
            strength = 1.0
            if beta is not None:
                strength = strength_of(beta + (token * beta_token + head * beta_head), SIGMOID)

            # Decays of the state and of each record up to now: sums of their own logarithms, then one exponential.
            own_k = b_k
            own_q = b_q
            on_state = 1.0
            weight_k = with_k
            weight_q = with_q
            now = 0.0
            if DECAY == 1:
                now = decay_of(g + (token * g_token + head * g_head), a_log, bias, bound, head, GATE)
                later = tl.load(ring_g + at_head + (record + 1) * HV, mask=record + 1 < c, other=0.0)
                each = tl.load(ring_g + at_head + record * HV, mask=record < c, other=0.0)
                on_state = exp(tl.sum(each, 0) + now)
                since = exp(tl.cumsum(later, 0, reverse=True) + now)
                weight_k = with_k * since
                weight_q = with_q * since
                if stays & (i_block == 0):
                    tl.store(ring_g + (at_head + c * HV), now)
            if DECAY == 2:
                p_g = g + (token * g_token + head * g_head)
                now = log_decays_of(p_g, a_log, bias, bound, head, channel, K, PIECES, STEP, MASKED, GATE)
                total = now
                for n in tl.static_range(WINDOW - 1):
                    p_then = ring_g + (at_head + n * HV) * K
                    added = ()
                    for piece in tl.static_range(PIECES):
                        at_then = channel + piece * STEP
                        then = tl.load(p_then + at_then, mask=(at_then < K) & (n < c), other=0.0)
                        added = added + (total[piece] + then,)
                    total = added
                decay = exps(total, PIECES)
                own_k = _times(b_k, decay, PIECES)
                own_q = _times(b_q, decay, PIECES)
                at_g = (at_head + (record[:, None] + 1) * HV) * K + at_tile
                later = tl.load(ring_g + at_g, mask=(record[:, None] + 1 < c) & (at_tile < K), other=0.0)
                t_now = tl.load(p_g + at_tile, mask=at_tile < K, other=0.0).to(tl.float32)
                if GATE:
                    t_now = gates_of(t_now, bias, a_log, bound, head, at_tile, K, GATE)
                t_ringed = t_ring * exp(tl.cumsum(later, 0, reverse=True) + t_now)
                weight_k = tl.sum(t_ringed * t_k, 1)
                weight_q = tl.sum(t_ringed * t_q, 1)
                if stays & (i_block == 0):
                    for n in tl.static_range(PIECES):
                        at_now = channel + n * STEP
                        tl.store(ring_g + (at_head + c * HV) * K + at_now, now[n], mask=at_now < K)

            if WHOLE:
                if FORMAT == "int8" or FORMAT == "fp8_e4m3":
                    step_of = tl.load(s_scales + column // BLOCK_V, mask=inside & known, other=0.0) * on_state
                else:
                    step_of = on_state
                S = decoded(raw, (1.0,), channel, PIECES, FORMAT, FAST)
                read = dot(S, own_q, PIECES, FLIP) * step_of
                old = dot(S, own_k, PIECES, FLIP) * step_of
            else:
                steps = load_steps(
                    s_scales, s_blocks, channel, column, i_block * WIDTH, known, K, V, WIDTH, PIECES, STEP,
                    FORMAT, BLOCK_K, BLOCK_V,
                    VECTOR,
                )  # fmt: skip
                S = decoded(raw, steps, channel, PIECES, FORMAT, FAST)
                read = dot(S, own_q, PIECES, FLIP) * on_state
                old = dot(S, own_k, PIECES, FLIP) * on_state
            u = b_v
            if DELTA:
                u = b_v - (old + tl.sum(weight_k[:, None, None] * t_u, 0))
            if beta is not None:
                u = strength * u
            read = tl.fma(u, dot_kq, read + tl.sum(weight_q[:, None, None] * t_u, 0))
            if stays:
                at_own = (at_head + c * HV) * V + column
                tl.store(ring_u + at_own, u, mask=inside)
                if TWO:
                    tl.store(ring_v + at_own, b_v, mask=inside)
                    if beta is not None:  # noqa: SIM102 - known when it compiles
                        if i_block == 0:
                            tl.store(ring_beta + (at_head + c * HV), strength)
            if (stays == 0) | (known == 0):
                # The window's end; or a state that nobody has stored yet, and starts at zero.
                if TWO:
                    S = start(
                        p_codes, None, None, channel, column, 0, known, K, V, WIDTH, VECTOR, PIECES, STEP, ANCHOR, 1, 1,
                        False,
                    )  # fmt: skip
                else:
                    S = start(
                        p_codes, p_scales, p_blocks, channel, column, i_block * WIDTH, known, K, V, WIDTH, VECTOR,
                        PIECES,
                        STEP, FORMAT, BLOCK_K, BLOCK_V, FAST,
                    )  # fmt: skip
                S = walked(
                    S, tl.where(stays, 0, c), ring_k + at_k, ring_u + at_head * V,
                    ring_g + at_head * (K if DECAY == 2 else 1) if DECAY else None,
                    ring_v + at_head * V if TWO else None,
                    ring_beta + at_head if TWO and beta is not None else None, channel, column, H, HV, K, V, PIECES,
                    STEP, FLIP, MASKED, DELTA, DECAY, TWO,
                )  # fmt: skip
                if DECAY == 1:
                    S = scaled(S, exp(now), False, PIECES)
                if DECAY == 2:
                    S = scaled(S, exps(now, PIECES), True, PIECES)
                if TWO:
                    u = b_v
                    if DELTA:
                        u = b_v - dot(S, b_k, PIECES, FLIP)
                    if beta is not None:
                        u = strength * u
                S = updated(S, b_k, tl.where(stays, 0.0, u), PIECES)
                store(
                    p_codes, p_scales, p_blocks, p_read, p_read_scales, p_read_blocks, S, channel, column,
                    i_block * WIDTH, K, V, WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ANCHOR, FORMAT, BLOCK_K, BLOCK_V,
                    FAST, TWO,
                )  # fmt: skip
                if AFTER:
                    S, _, _ = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
                    read = tl.where(stays, read, dot(S, b_q, PIECES, FLIP))
            read = tl.broadcast_to(read[None, :, None, :], once.shape).to(o.dtype.element_ty)
            tl.store(o + (token * (HV * V) + head * V) + once, read, mask=write_once)
        if not SINGLE:
            # What a token has written the next one's threads read.
            tl.debug_barrier()
            c = tl.where(stays, c + 1, 0)
            known = known | (c >= 0)
