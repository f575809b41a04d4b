"""`lattn::decode_` on the device for several tokens of a sequence, one after the other on what its slot holds.

The state of a head is spread over lanes as in `decode_forward.py`, sums run in the same order and a write is the same
`quantize`, so a stored state has the bits that the emulated kernel's would have.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, exps, log_decays_of, strength_of
from lattn_compile.kernels.common.packed_rows import (
    has_state,
    inputs_of,
    normalised,
    row_of,
    slot_of,
    tokens_of,
)
from lattn_compile.kernels.common.packed_tiles import decoded, decoded_words
from lattn_compile.kernels.common.pieces import columns, dot, key_channels, lanes, scaled
from lattn_compile.kernels.decode_codec import quantize
from lattn_compile.kernels.packed_fetch import codes_of
from lattn_compile.kernels.packed_write import keys, updated, write_back

__all__ = ["step"]


@triton.jit
def _pair(
    p_q,
    p_k,
    t_q,
    t_k,
    scale,
    channel,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    MASKED: tl.constexpr,
    NORM: tl.constexpr,
):
    """One token's key and query in pieces, and their product; t_q, t_k: as `row_of` loads them."""
    by_q, by_k, dot_kq = normalised(t_q, t_k, scale, WARPS, NORM)
    b_k = keys(p_k, by_k, 1.0, channel, K, PIECES, STEP, MASKED)
    b_q = keys(p_q, by_q, scale, channel, K, PIECES, STEP, MASKED)
    return b_k, b_q, dot_kq


@triton.jit
def _gates(
    x,
    head,
    a_log,
    bias,
    bound,
    channel,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """A head's decay, a number or pieces, and its write strength, of what `inputs_of` loaded."""
    decay = 1.0
    if DECAY == 1:
        decay = exp(decay_of(x[1], a_log, bias, bound, head, GATE))
    if DECAY == 2:
        decay = exps(log_decays_of(x[1], a_log, bias, bound, head, channel, K, PIECES, STEP, GATE), PIECES)
    strength = 1.0
    if BETA:
        strength = strength_of(x[2], SIGMOID)
    return decay, strength


@triton.jit
def _advanced(
    S,
    b_k,
    b_q,
    dot_kq,
    b_v,
    decay,
    strength,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
):
    """The state after a token, rounded, and the token's output."""
    if DECAY:
        S = scaled(S, decay, DECAY == 2, PIECES)
    u = b_v
    if DELTA:
        u = b_v - dot(S, b_k, PIECES, FLIP)[None, :, None, :]
    if BETA:
        u = strength * u
    if not AFTER:
        # Of the state before the update, so that both sums run side by side.
        read = tl.fma(u, dot_kq, dot(S, b_q, PIECES, FLIP)[None, :, None, :])
    S = updated(S, b_k, u, PIECES)
    if FORMAT != "":
        S, _, _ = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
    if AFTER:
        read = tl.broadcast_to(dot(S, b_q, PIECES, FLIP)[None, :, None, :], u.shape)
    return S, read


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
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """A step of every sequence, in place.

    Args:
        q, k: `[M, H, K]`, v: `[M, HV, V]`, g: `[M, HV]` or `[M, HV, K]` or None, beta: `[M, HV]` or None, strided,
            their
            channels contiguous but for v's. M flat tokens, sequence by sequence.
        codes, scales, blocks: `[slots, HV, ..]`, written. HEAD_CODES, HEAD_SCALES, HEAD_BLOCKS: elements of one head.
            scales, blocks may be None.
        cursor: int32 `[slots]`, written. indices: int `[N]` or None. fresh: uint8 `[N]`, `has_initial_state`, or None.
        ends, lengths, tokens, sequences: as `tokens_of` takes them. o: `[M, HV, V]`, all of it written.
        a_log, bias, bound: of the raw gate, GATE; SIGMOID: beta is raw (`packed_gates.py`).
        slots, padding: number of slots, and the slot that is none.
        DECAY: 0 none, 1 by head, 2 by channel. FORMAT: "" for fp32. AFTER: outputs are read after the rounding.

    Grid: (column blocks * HV * N,).
    """
    i = tl.program_id(0)
    WIDTH: tl.constexpr = WARPS * COLUMNS
    BLOCKS: tl.constexpr = (V + WIDTH - 1) // WIDTH
    MASKED: tl.constexpr = LANES * PIECES * STEP != K
    WORDS: tl.constexpr = FAST and (VECTOR % 8 == 0 or FORMAT == "nvfp4") and not TURNED
    BETA: tl.constexpr = beta is not None
    PROGRAMS: tl.constexpr = BLOCKS * HV  # of a sequence
    i_block, i_seq = i % BLOCKS, i // PROGRAMS
    i_head = i // BLOCKS % HV
    i_key = i_head // (HV // H)
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    has = has_state(i_seq, fresh)

    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    column = columns(i_block * WIDTH, WARPS, COLUMNS)
    lane = lanes(LANES, FLIP)
    # One lane group writes what all of them hold. The pointers are those of a state's piece, lest it changes layout.
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
    write_once = (lane == 0) & (column[None, :, None, :] < V)
    o_token = HV * V
    p_o = o + i_head * V + once

    used = tl.where(live, count, 0)
    blank = tl.broadcast_to(tl.where(wrong, float("nan"), 0.0), once.shape).to(o.dtype.element_ty)
    for t in range(used, rows):
        tl.store(p_o + (first + t) * o_token, blank, mask=write_once)
    if used == 0:
        return

    row = slot * HV + i_head
    p_codes = codes + row * HEAD_CODES
    p_scales = scales + row * HEAD_SCALES if HEAD_SCALES else None
    p_blocks = blocks + row * HEAD_BLOCKS if HEAD_BLOCKS else None
    raw, steps = codes_of(
        i_head * BLOCKS + i_block, has, row - i_head, codes, scales, blocks, channel, columns(0, WARPS, COLUMNS), K, V,
        WIDTH, BLOCKS, WARPS, COLUMNS, PIECES, STEP, VECTOR, MASKED, FORMAT, BLOCK_K, BLOCK_V, HEAD_CODES, HEAD_SCALES,
        HEAD_BLOCKS, WORDS, TURNED, ODD,
    )  # fmt: skip
    at = tl.load(cursor + slot)
    if WORDS:
        S = decoded_words(raw, steps, has & (at >= 0), PIECES, FORMAT, FAST, True)
    else:
        S = decoded(raw, steps, has & (at >= 0), channel, PIECES, FORMAT, FAST)
    for t in range(used):
        token = first + t
        p_q = q + (token * q_token + i_key * q_head)
        p_k = k + (token * k_token + i_key * k_head)
        b_k, b_q, dot_kq = _pair(
            p_q, p_k, row_of(p_q, K, BK, WARPS), row_of(p_k, K, BK, WARPS), scale, channel, K, PIECES, STEP, WARPS,
            MASKED, NORM,
        )  # fmt: skip
        x = inputs_of(
            token, i_head, v, g, beta, v_token, v_head, v_column, g_token, g_head, beta_token, beta_head, channel, once,
            K, V, PIECES, STEP, MASKED, DECAY,
        )  # fmt: skip
        decay, strength = _gates(x, i_head, a_log, bias, bound, channel, K, PIECES, STEP, DECAY, GATE, BETA, SIGMOID)
        S, read = _advanced(
            S, b_k, b_q, dot_kq, x[0].to(tl.float32), decay, strength, PIECES, STEP, FLIP, DELTA, DECAY, BETA, FORMAT,
            BLOCK_K, BLOCK_V, AFTER,
        )  # fmt: skip
        tl.store(p_o + token * o_token, read.to(o.dtype.element_ty), mask=write_once)

    # Rounding what was rounded changes nothing, so codes are made once, here.
    write_back(
        p_codes, p_scales, p_blocks, S, channel, column, i_block * WIDTH, K, V, WIDTH, LANES, PIECES, STEP, VECTOR,
        FLIP, FORMAT, BLOCK_K, BLOCK_V, FAST, TURNED,
    )  # fmt: skip
    if at < 0:  # noqa: SIM102 - an atomic belongs into one branch only
        # Every program has to find a cursor of a slot without a state before it says that there is one. So each takes
        # one off, and who finds that all others have writes it.
        if tl.atomic_add(cursor + slot, -1) == -PROGRAMS:
            tl.store(cursor + slot, 0)
