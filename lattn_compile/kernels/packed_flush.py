"""The end of a window on the device: records written to a stored state; and `lattn::flush_`, which is nothing else."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, exps, log_decays_of, strength_of
from lattn_compile.kernels.common.packed_nibbles import decoded_nibbles, load_nibbles, nibble_steps
from lattn_compile.kernels.common.packed_rows import slot_of
from lattn_compile.kernels.common.packed_tiles import decoded, decoded_words, load_codes, load_steps
from lattn_compile.kernels.common.pieces import columns, dot, key_channels, lanes, scaled
from lattn_compile.kernels.decode_codec import quantize
from lattn_compile.kernels.packed_write import keys, updated, write_back

__all__ = ["cursor_of", "end", "flush", "leave"]


@triton.jit
def cursor_of(number):
    """A slot's cursor, from what stands there: 16 bits, below a count of the programs that are done with it."""
    low = number & 0xFFFF
    return tl.where(low == 0xFFFF, -1, low)


@triton.jit
def leave(cursor, value, PROGRAMS: tl.constexpr):
    """The last of a sequence's programs to come here sets its slot's cursor.

    All have read it before, as they need it for what they do. The count lies in the upper half of the number, and goes
    when the cursor is written.
    """
    if PROGRAMS == 1:
        tl.store(cursor, value)
    else:
        old = tl.atomic_add(cursor, 1 << 16, sem="relaxed")
        if (((old - cursor_of(old)) >> 16) & 0xFFFF) == PROGRAMS - 1:
            tl.store(cursor, value)


@triton.jit
def _added(
    S,
    records,
    factor,
    now,
    p_k,
    p_u,
    p_g,
    channel,
    once,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    DECAY: tl.constexpr,
):
    """A state that decays up to now, with what `records` records of a slot's ring have added and what is left of it.

    `now`: the logarithm of the decay after the last record, a number or pieces. factor: the state's own decay by head,
    None if it has decayed already. The last record first: what decays is then a record and not the state, by one
    exponential of a sum.
    """
    if DECAY == 1:
        if factor is not None:
            S = scaled(S, factor, False, PIECES)
        later = now
        n = tl.maximum(records - 1, 0)
        n_k = keys(p_k + n * (H * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
        n_u = tl.load(p_u + n * (HV * V) + once, mask=once < V, other=0.0)
        n_g = tl.load(p_g + n * HV)
        for i in range(records):
            b_k = n_k
            u = n_u * exp(later)
            later += n_g
            # The next one is on its way while this one is added; after the last it is loaded again.
            n = tl.maximum(records - 2 - i, 0)
            n_k = keys(p_k + n * (H * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
            n_u = tl.load(p_u + n * (HV * V) + once, mask=once < V, other=0.0)
            n_g = tl.load(p_g + n * HV)
            S = updated(S, b_k, u, PIECES)
    else:
        for i in range(records):
            b_k = keys(p_k + i * (H * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
            if DECAY == 2:
                g = keys(p_g + i * (HV * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
                S = scaled(S, exps(g, PIECES), True, PIECES)
            u = tl.load(p_u + i * (HV * V) + once, mask=once < V, other=0.0)
            S = updated(S, b_k, u, PIECES)
        if DECAY == 2:
            S = scaled(S, exps(now, PIECES), True, PIECES)
    return S


@triton.jit
def _recurred(
    S,
    records,
    now,
    p_k,
    p_g,
    p_v,
    p_beta,
    channel,
    once,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    MASKED: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
):
    """As `_added`, by the recurrence from the raw v and beta."""
    n_k = keys(p_k, 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
    n_v = tl.load(p_v + once, mask=once < V, other=0.0)
    n_g = 0.0
    if DECAY == 1:
        n_g = tl.load(p_g)
    n_beta = 1.0
    if p_beta is not None:
        n_beta = tl.load(p_beta)
    for i in range(records):
        b_k = n_k
        u = n_v
        strength = n_beta
        if DECAY == 1:
            S = scaled(S, exp(n_g), False, PIECES)
        if DECAY == 2:
            g = keys(p_g + i * (HV * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
            S = scaled(S, exps(g, PIECES), True, PIECES)
        # The next one is on its way while this one is added; after the last it is loaded again.
        n = tl.minimum(i + 1, records - 1)
        n_k = keys(p_k + n * (H * K), 1.0, 1.0, channel, K, PIECES, STEP, MASKED)
        n_v = tl.load(p_v + n * (HV * V) + once, mask=once < V, other=0.0)
        if DECAY == 1:
            n_g = tl.load(p_g + n * HV)
        if p_beta is not None:
            n_beta = tl.load(p_beta + n * HV)
        if DELTA:
            u = u - dot(S, b_k, PIECES, FLIP)[None, :, None, :]
        if p_beta is not None:
            u = strength * u
        S = updated(S, b_k, u, PIECES)
    if DECAY == 1:
        S = scaled(S, exp(now), False, PIECES)
    if DECAY == 2:
        S = scaled(S, exps(now, PIECES), True, PIECES)
    return S


@triton.jit
def _walked(
    S,
    records,
    factor,
    now,
    p_k,
    p_u,
    p_g,
    p_v,
    p_beta,
    channel,
    once,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    MASKED: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    TWO: tl.constexpr,
):
    if TWO:
        return _recurred(
            S, records, now, p_k, p_g, p_v, p_beta, channel, once, H, HV, K, V, PIECES, STEP, FLIP, MASKED, DELTA,
            DECAY,
        )  # fmt: skip
    else:
        return _added(
            S, records, factor, now, p_k, p_u, p_g, channel, once, H, HV, K, V, PIECES, STEP, MASKED, DECAY
        )  # fmt: skip


@triton.jit
def start(
    codes,
    scales,
    blocks,
    channel,
    column,
    first,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """A stored state, fp32; zeros where `inside` is not."""
    if FORMAT == "nvfp4" and FAST:
        word = columns(first // 4, column.shape[0], column.shape[1] // 4)
        words = load_nibbles(codes, channel, word, inside, K, V, VECTOR, PIECES, ODD)
        steps = nibble_steps(scales, blocks, channel, column, inside, K, V, VECTOR)
        return decoded_nibbles(words, steps, inside, PIECES, FAST)
    else:
        raw = load_codes(codes, channel, column, inside, K, V, VECTOR, PIECES, STEP, FORMAT, TURNED, ODD)
        steps = load_steps(
            scales, blocks, channel, column, first, inside, K, V, WIDTH, PIECES, STEP, FORMAT, BLOCK_K, BLOCK_V, VECTOR
        )
        return decoded(raw, steps, inside, channel, PIECES, FORMAT, FAST)


@triton.jit
def store(
    codes,
    scales,
    blocks,
    read_codes,
    read_scales,
    read_blocks,
    S,
    channel,
    column,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Writes a state as a window's end does: rounded; in two_precision as the anchor, and rounded as its read copy."""
    if TWO:
        if ANCHOR != "":
            S, _, _ = quantize(S, ANCHOR, 1, 1, PIECES, STEP, FLIP)
        write_back(
            codes, None, None, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
            FLIP, ANCHOR, 1, 1,
            False, TURNED,
        )  # fmt: skip
        write_back(
            read_codes, read_scales, read_blocks, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
            FLIP, FORMAT, BLOCK_K, BLOCK_V, FAST, TURNED,
        )  # fmt: skip
    else:
        write_back(
            codes, scales, blocks, S, channel, column, first, K, V, WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, FORMAT,
            BLOCK_K, BLOCK_V, FAST, TURNED,
        )  # fmt: skip


@triton.jit
def end(
    raw,
    steps,
    x,
    on_state,
    dot_kq,
    p_q,
    p_k,
    by_q,
    by_k,
    p_codes,
    p_scales,
    p_blocks,
    p_read,
    p_read_scales,
    p_read_blocks,
    ring_k,
    ring_u,
    ring_g,
    ring_v,
    ring_beta,
    c,
    known,
    stays,
    head,
    i_block,
    a_log,
    bias,
    bound,
    channel,
    column,
    once,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
    FAST: tl.constexpr,
    WORDS: tl.constexpr,
    TWO: tl.constexpr,
    TURNED: tl.constexpr,
):
    """The window's end, for one tile: its records and this token into the state; or zeros under the first record of a
    state that nobody has stored. Returns the token's output: in two_precision of a readout after the write, else 0, for
    the others come from the read copy.

    Args:
        raw, steps: the state's, but in two_precision, whose anchor is fetched here. on_state: what is left of it, of a
            decay by head.
    """
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    PLAIN: tl.constexpr = FORMAT == "" or FORMAT == "bf16" or FORMAT == "fp16"  # no steps
    # Keys and queries anew: nothing that happens seldom occupies registers before.
    b_k = keys(p_k, by_k, 1.0, channel, K, PIECES, STEP, MASKED)
    if TWO:
        S = start(
            p_codes,
            None,
            None,
            channel,
            column,
            0,
            known,
            K,
            V,
            WIDTH,
            VECTOR,
            PIECES,
            STEP,
            ANCHOR,
            1,
            1,
            False,
            TURNED,
            False,
        )
    else:
        own_steps = steps
        if DECAY == 1 and len(steps) == 1 and PLAIN == 0:
            own_steps = (steps[0] * on_state,)
        if WORDS:
            S = decoded_words(raw, own_steps, known, PIECES, FORMAT, FAST, False)
        else:
            S = decoded(raw, own_steps, known, channel, PIECES, FORMAT, FAST)
    now = 0.0
    if DECAY == 1:
        now = decay_of(x[1], a_log, bias, bound, head, GATE)
    if DECAY == 2:
        now = log_decays_of(x[1], a_log, bias, bound, head, channel, K, PIECES, STEP, GATE)
    S = _walked(
        S, tl.where(stays, 0, c), None if len(steps) == 1 and PLAIN == 0 else on_state, now, ring_k, ring_u, ring_g,
        ring_v, ring_beta, channel, once, H, HV, K, V, PIECES, STEP, FLIP, MASKED, DELTA, DECAY, TWO,
    )  # fmt: skip
    u = x[0].to(tl.float32)
    if DELTA:
        u = u - dot(S, b_k, PIECES, FLIP)[None, :, None, :]
    if BETA:
        u = strength_of(x[2], SIGMOID) * u
    out = tl.zeros_like(u)
    if not TWO and not AFTER:
        b_q = keys(p_q, by_q, 1.0, channel, K, PIECES, STEP, MASKED)
        out = tl.fma(u, dot_kq, dot(S, b_q, PIECES, FLIP)[None, :, None, :])
    S = updated(S, b_k, tl.where(stays, 0.0, u), PIECES)
    store(
        p_codes, p_scales, p_blocks, p_read, p_read_scales, p_read_blocks, S, channel, column, i_block * WIDTH, K, V,
        WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ANCHOR, FORMAT, BLOCK_K, BLOCK_V, FAST, TWO, TURNED,
    )  # fmt: skip
    if AFTER:
        S, _, _ = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
        b_q = keys(p_q, by_q, 1.0, channel, K, PIECES, STEP, MASKED)
        out = tl.broadcast_to(dot(S, b_q, PIECES, FLIP)[None, :, None, :], u.shape)
    return out


@triton.jit(do_not_specialize=["sequences", "slots", "padding"])
def flush(
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
    slots,
    padding,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    WINDOW: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    ANCHOR: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
    TWO: tl.constexpr,
    HEAD_CODES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """Pending records of slots into their states, as `step` takes them all. Grid: (column blocks * HV * N,)."""
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    i_block, head, i_seq = i % BLOCKS, i // BLOCKS % HV, i // (BLOCKS * HV)
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    slot, live, _ = slot_of(i_seq, indices, padding, slots)
    if live == 0:
        return
    at = cursor_of(tl.load(cursor + slot))
    leave(cursor + slot, tl.minimum(at, 0), BLOCKS * HV)
    if at <= 0:
        return
    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    column = columns(i_block * WIDTH, WARPS, COLUMNS)
    once = tl.max_contiguous(column[None, :, None, :] + lanes(LANES, FLIP) * 0, (1, 1, 1, VECTOR))
    row = slot * HV + head
    at_head = slot * (WINDOW - 1) * HV + head
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
        S = start(
            p_codes, None, None, channel, column, 0, live, K, V, WIDTH, VECTOR, PIECES, STEP, ANCHOR, 1, 1, False,
            TURNED, False,
        )  # fmt: skip
    else:
        if HEAD_SCALES:
            p_scales = scales + row * HEAD_SCALES
        if HEAD_BLOCKS:
            p_blocks = blocks + row * HEAD_BLOCKS
        S = start(
            p_codes, p_scales, p_blocks, channel, column, i_block * WIDTH, live, K, V, WIDTH, VECTOR, PIECES, STEP,
            FORMAT,
            BLOCK_K, BLOCK_V, FAST, TURNED, ODD,
        )  # fmt: skip
    now = 0.0
    if DECAY == 2:
        now = ()
        for _piece in tl.static_range(PIECES):
            now = now + (tl.zeros(channel.shape, tl.float32),)
    factor = 0.0
    if DECAY == 1 and not TWO:
        total = 0.0
        for i in range(at):
            total += tl.load(ring_g + at_head + i * HV)
        factor = exp(total)
    S = _walked(
        S, at, factor, now, ring_k + slot * (WINDOW - 1) * (H * K) + head // (HV // H) * K, ring_u + at_head * V,
        ring_g + at_head * (K if DECAY == 2 else 1) if DECAY else None, ring_v + at_head * V if TWO else None,
        ring_beta + at_head if ring_beta is not None else None, channel, once, H, HV, K, V, PIECES, STEP, FLIP,
        MASKED, DELTA, DECAY, TWO,
    )  # fmt: skip
    store(
        p_codes, p_scales, p_blocks, p_read, p_read_scales, p_read_blocks, S, channel, column, i_block * WIDTH, K, V,
        WIDTH, LANES, PIECES, STEP, VECTOR, FLIP, ANCHOR, FORMAT, BLOCK_K, BLOCK_V, FAST, TWO, TURNED,
    )  # fmt: skip
