"""`lattn::replay_` on NVIDIA GPUs for heads of 128 x 128 in 8 bits: whole lines of codes, sums by matrix units.

What `packed_replay.py` computes. A step that only reads needs two sums over a head's codes for each column. There a
warp asks for 32 bytes of a row; here it asks for whole rows, 16 columns a thread, and gives their codes, as fp16
numbers, which they are exactly, to the matrix unit beside the query and the key. These are scaled by a power of two
and are fp16 too, in one part if the inputs have 16 bits, else in three: as precise as float32. Records are sums of
float32 numbers, a quarter of them in each lane of four.

Threads: warp w has a head, or a part of its columns; lane = 4 g + t has columns of group g and key channels 32 t to
32 t + 31, as the fragments of `mma.m16n8k16` lie: rows of that product are columns of the state, its columns are what
the state is multiplied with. So tensors here are `[warp, t, g, number]`.

The window's end: `packed_lines_end.py`.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, strength_of
from lattn_compile.kernels.common.packed_rows import begin, has_state, slot_of, tokens_of
from lattn_compile.kernels.packed_flush import cursor_of, leave
from lattn_compile.kernels.packed_lines_end import end_anchor, end_codes
from lattn_compile.kernels.packed_lines_parts import (
    KEY,
    VALUE,
    WARPS,
    axes,
    barrier,
    fence,
    load_rows,
    one,
    packed_pairs,
)

__all__ = ["step"]

# Four rows of a word each, as fp16 pairs of rows, times two columns of q's and k's parts; four columns of the state.
_INT8 = gl.constexpr(
    """
    {
    .reg .b32 a, b, c, d, e, f, g, h;
    .reg .b32 p0, p1, p2, p3, p4, p5, p6, p7;
    xor.b32 a, $8, 0x80808080;
    xor.b32 b, $9, 0x80808080;
    xor.b32 c, $10, 0x80808080;
    xor.b32 d, $11, 0x80808080;
    prmt.b32 e, a, b, 0x5140;
    prmt.b32 f, a, b, 0x7362;
    prmt.b32 g, c, d, 0x5140;
    prmt.b32 h, c, d, 0x7362;
    prmt.b32 p0, e, 0x64646464, 0x4140;
    prmt.b32 p1, e, 0x64646464, 0x4342;
    prmt.b32 p2, g, 0x64646464, 0x4140;
    prmt.b32 p3, g, 0x64646464, 0x4342;
    prmt.b32 p4, f, 0x64646464, 0x4140;
    prmt.b32 p5, f, 0x64646464, 0x4342;
    prmt.b32 p6, h, 0x64646464, 0x4140;
    prmt.b32 p7, h, 0x64646464, 0x4342;
    mov.b32 a, 0x64806480;
    sub.rn.f16x2 p0, p0, a;
    sub.rn.f16x2 p1, p1, a;
    sub.rn.f16x2 p2, p2, a;
    sub.rn.f16x2 p3, p3, a;
    sub.rn.f16x2 p4, p4, a;
    sub.rn.f16x2 p5, p5, a;
    sub.rn.f16x2 p6, p6, a;
    sub.rn.f16x2 p7, p7, a;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {$0, $1, $2, $3}, {p0, p1, p2, p3}, {$12, $13}, {$14, $15, $16, $17};
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {$4, $5, $6, $7}, {p4, p5, p6, p7}, {$12, $13}, {$18, $19, $20, $21};
    }
    """
)

_FP8 = gl.constexpr(
    """
    {
    .reg .b32 e, f, g, h;
    .reg .b32 p0, p1, p2, p3, p4, p5, p6, p7;
    .reg .b16 x, y;
    prmt.b32 e, $8, $9, 0x5140;
    prmt.b32 f, $8, $9, 0x7362;
    prmt.b32 g, $10, $11, 0x5140;
    prmt.b32 h, $10, $11, 0x7362;
    mov.b32 {x, y}, e;
    cvt.rn.f16x2.e4m3x2 p0, x;
    cvt.rn.f16x2.e4m3x2 p1, y;
    mov.b32 {x, y}, g;
    cvt.rn.f16x2.e4m3x2 p2, x;
    cvt.rn.f16x2.e4m3x2 p3, y;
    mov.b32 {x, y}, f;
    cvt.rn.f16x2.e4m3x2 p4, x;
    cvt.rn.f16x2.e4m3x2 p5, y;
    mov.b32 {x, y}, h;
    cvt.rn.f16x2.e4m3x2 p6, x;
    cvt.rn.f16x2.e4m3x2 p7, y;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {$0, $1, $2, $3}, {p0, p1, p2, p3}, {$12, $13}, {$14, $15, $16, $17};
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {$4, $5, $6, $7}, {p4, p5, p6, p7}, {$12, $13}, {$18, $19, $20, $21};
    }
    """
)
_CONSTRAINTS = gl.constexpr("=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,f,f,f,f,f,f,f,f")
_AHEAD = gl.constexpr(2)  # how many times four rows are on their way before they are needed
_EIGHT = gl.constexpr((gl.float32,) * 8)


@gluon.jit
def _met(words, x, acc, FORMAT: gl.constexpr):
    """Sums so far and what four rows add: words of the rows; x: parts of q and k of their two pairs of channels."""
    ASM: gl.constexpr = _INT8 if FORMAT == "int8" else _FP8
    return gl.inline_asm_elementwise(
        ASM,
        _CONSTRAINTS,
        [
            words[0], words[1], words[2], words[3], x[0], x[1],
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
        ],
        dtype=_EIGHT,
        is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _fragments(p_q, p_k, by_q, by_k, LX: gl.constexpr, LW: gl.constexpr, PARTS: gl.constexpr):
    """q and k as the matrix unit takes them: 16 pairs of fp16 numbers, `[WARPS, 4, 8, 1]` int32. by_q, by_k: powers of
    two `[WARPS]`."""
    _, t, g, n = axes(LX, 32)
    at = (32 * t + n) + 0 * g
    x_q = gl.load(p_q + at).to(gl.float32) * one(by_q, LX)
    x_k = gl.load(p_k + at).to(gl.float32) * one(by_k, LX)
    x = gl.where(g < 4, x_q, x_k)
    part = g & 3
    if PARTS == 1:
        x = gl.where(part == 0, x, 0.0)
    else:
        high = x.to(gl.float16).to(gl.float32)
        middle = (x - high).to(gl.float16).to(gl.float32)
        x = gl.where(part == 0, high, gl.where(part == 1, middle, gl.where(part == 2, x - high - middle, 0.0)))
    return packed_pairs(x, LW)


@gluon.jit
def _power(most):
    """(the power of two that takes magnitudes up to `most` into [2^14, 2^15), its inverse), of the magnitude's bits."""
    e = gl.maximum(most >> 23, 15)
    return ((268 - e) << 23).to(gl.float32, bitcast=True), ((e - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _largest(x):
    bits = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.max(gl.max(gl.max(bits, 3), 2), 1)


@gluon.jit
def _total(x):
    return gl.sum(gl.sum(gl.sum(x, 3), 2), 1)


@gluon.jit(do_not_specialize=["tokens", "sequences", "slots", "padding"])
def step(
    q, k, v, g, beta, codes, scales, read_codes, read_scales, ring_k, ring_u, ring_g, ring_v, ring_beta, cursor,
    indices, fresh, ends, lengths, o, a_log, bias, scale, bound, q_token, q_head, k_token, k_head, v_token, v_head,
    v_column, g_token, g_head, beta_token, beta_head, tokens, sequences, slots, padding,
    H: gl.constexpr, HV: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, PARTS: gl.constexpr,
    SINGLE: gl.constexpr, NORM: gl.constexpr, DELTA: gl.constexpr, DECAY: gl.constexpr, GATE: gl.constexpr,
    SIGMOID: gl.constexpr, FORMAT: gl.constexpr, TWO: gl.constexpr, PDL: gl.constexpr, TURNED: gl.constexpr,
    ODD: gl.constexpr,
):  # fmt: skip
    """A step of every sequence, in place; arguments as `packed_replay.step` has them.

    Args:
        HEADS: of a program, 8, 4 or 2: a warp has a head, half of one or a quarter. PARTS: of q and k in fp16.
        FORMAT: "int8" or "fp8_e4m3", in tiles of all channels by 64 columns, under TWO the read copy's by one; the
            anchor is float32 then. TURNED: codes, anchors too, lie as `[slots, HV, V, K]`. ODD: codes begin anywhere.

    Grid: (HV / HEADS * N,).
    """
    if PDL:
        begin()
    BETA: gl.constexpr = beta is not None
    RATIO: gl.constexpr = HV // H
    PROGRAMS: gl.constexpr = HV // HEADS
    J: gl.constexpr = HEADS // 2  # words of a row in a thread
    SHARE: gl.constexpr = WARPS // HEADS  # warps of a head
    LW: gl.constexpr = gl.BlockedLayout([1, 1, 1, J], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LV: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4 * J], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 1, 32], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LC: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    TALL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LC)))
    i = gl.program_id(0)
    i_seq, i_part = i // PROGRAMS, i % PROGRAMS
    first, count, rows = tokens_of(i_seq, ends, lengths, tokens, sequences)
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    has = has_state(i_seq, fresh)
    used = gl.where(live, count, 0)

    warp = gl.arange(0, WARPS, TALL)
    head = i_part * HEADS + warp // SHARE
    i_key = head // RATIO
    whole = warp % SHARE == 0  # one warp of a head writes what all of them have
    w, t, group, n = axes(LV, 4 * J)
    v_at = (w % SHARE) * (32 * J) + group * (4 * J) + n
    v_head_at = i_part * HEADS + w // SHARE
    p_out = o + v_head_at * VALUE + v_at
    blank = gl.where(wrong, float("nan"), 0.0).to(o.dtype.element_ty)
    for missing in range(used, rows):
        gl.store(p_out + (first + missing) * (HV * VALUE), gl.zeros(v_at.shape, o.dtype.element_ty, LV) + blank)
    if used == 0:
        return

    p_state = read_codes if TWO else codes
    p_steps = read_scales if TWO else scales
    at = cursor_of(gl.load(cursor + slot))
    known = has & (at >= 0)
    c = gl.where(known, at, 0)
    next_c = (c + used) % WINDOW
    row = slot * HV
    at_row = slot * (WINDOW - 1) * HV
    w_w, t_w, g_w, j_w = axes(LW, J)
    state_w = row + i_part * HEADS + w_w // SHARE
    word_w = (w_w % SHARE) * (8 * J) + g_w * J + j_w
    _, t_c, g_c, n_c = axes(LC, 16)
    at_c = 16 * g_c + n_c
    for step_token in range(1 if SINGLE else used):
        token = first + step_token
        stays = c < WINDOW - 1
        # The first codes, and the warps' keys and queries.
        stored = has if SINGLE else known
        words = ()
        for chunk in gl.static_range(_AHEAD):
            words = words + load_rows(p_state, state_w, 32 * t_w + 4 * chunk, word_w, stored, TURNED, ODD)
        key_c = one(i_key, LC)
        p_q = q + (token * q_token + key_c * q_head)
        p_k = k + (token * k_token + key_c * k_head)
        x_q = gl.load(p_q + at_c).to(gl.float32)
        x_k = gl.load(p_k + at_c).to(gl.float32)
        fence(c)
        strength = 1.0
        if BETA:
            strength = strength_of(gl.load(beta + (token * beta_token + head * beta_head)), SIGMOID)
        up_q, down_q = _power(_largest(x_q))
        up_k, down_k = _power(_largest(x_k))
        by_k = gl.full([WARPS], 1.0, gl.float32, TALL)
        by_q = by_k * scale
        if NORM:
            by_k = gl.rsqrt(_total(x_k * x_k) + 1e-6)
            by_q = gl.rsqrt(_total(x_q * x_q) + 1e-6) * scale
        dot_kq = _total((x_k * one(by_k, LC)) * (x_q * one(by_q, LC)))
        key_x = one(i_key, LX)
        x = _fragments(
            q + (token * q_token + key_x * q_head), k + (token * k_token + key_x * k_head), up_q, up_k, LX, LW, PARTS
        )

        # The state's codes against both.
        acc = ()
        for _i in gl.static_range(8):
            acc = acc + (gl.zeros([WARPS, 4, 8, J], gl.float32, LW),)
        for chunk in gl.static_range(8):
            if chunk + _AHEAD < 8:
                words = words + load_rows(
                    p_state, state_w, 32 * t_w + 4 * (chunk + _AHEAD), word_w, stored, TURNED, ODD
                )
                fence(c)
            acc = _met(
                (words[4 * chunk], words[4 * chunk + 1], words[4 * chunk + 2], words[4 * chunk + 3]),
                (x[2 * chunk], x[2 * chunk + 1]), acc, FORMAT,
            )  # fmt: skip
        y = gl.join(gl.join(acc[0] + acc[1], acc[4] + acc[5]), gl.join(acc[2] + acc[3], acc[6] + acc[7]))
        y = gl.convert_layout(gl.reshape(y, [WARPS, 4, 8, 4 * J]), LV, assert_trivial=True)
        if TWO:
            steps = gl.load(p_steps + (row + v_head_at) * VALUE + v_at, mask=stored, other=0.0)
        else:
            v_word = (w % SHARE) * (32 * J) + group * (4 * J)
            steps = gl.load(p_steps + (row + v_head_at) * (VALUE // 64) + v_word // 64, mask=stored, other=0.0)
        own = g_w * 0.0  # of records, by place: see `later_of`
        now = gl.zeros([WARPS], gl.float32, TALL)
        on_state = now + 1.0
        decays_0, decays_1 = own, own
        p_g = ring_g
        if DECAY:
            now = now + decay_of(gl.load(g + (token * g_token + head * g_head)), a_log, bias, bound, head, GATE)
            p_g = ring_g + at_row + one(head, LC)
            decays_0 = gl.load(p_g + g_c * HV, mask=(g_c < c) & (g_c < WINDOW - 1), other=0.0)
            total = decays_0
            if WINDOW > 8:
                decays_1 = gl.load(p_g + (8 + g_c) * HV, mask=(8 + g_c < c) & (g_c < WINDOW - 9), other=0.0)
                total = total + decays_1
            on_state = exp(gl.sum(gl.sum(gl.sum(total, 3), 2), 1) + now)
        factor_q = one(by_q * down_q * on_state, LV)
        factor_k = one(by_k * down_k * on_state, LV)
        y = y * steps
        y_q = gl.where((t < 2) & known, y * factor_q, 0.0)
        y_k = gl.where((t >= 2) & known, y * factor_k, 0.0)

        # The window's records, a quarter of them in each of four lanes.
        p_ring = ring_k + (slot * (WINDOW - 1) * H + key_c) * KEY + at_c
        p_u = ring_u + (at_row + v_head_at) * VALUE + v_at
        for m in range((c + 3) // 4):
            record_c = 4 * m + t_c
            # Once more, lest they occupy registers meanwhile.
            x_q = gl.load(p_q + at_c).to(gl.float32)
            x_k = gl.load(p_k + at_c).to(gl.float32)
            r_k = gl.load(p_ring + record_c * (H * KEY), mask=record_c < c, other=0.0)
            with_k = gl.sum(gl.sum(r_k * x_k, 3), 2)[:, :, None, None] * one(by_k, LC)
            with_q = gl.sum(gl.sum(r_k * x_q, 3), 2)[:, :, None, None] * one(by_q, LC)
            if DECAY:
                later = gl.where(g_c > record_c, decays_0, 0.0)
                if WINDOW > 8:
                    later = later + gl.where(8 + g_c > record_c, decays_1, 0.0)
                since = exp(gl.sum(later, 2)[:, :, None, :] + one(now, LC))
                with_k = with_k * since
                with_q = with_q * since
            record = 4 * m + t
            u = gl.load(p_u + record * (HV * VALUE), mask=record < c, other=0.0)
            # A record that there is not adds nothing, whatever its decay.
            with_k = gl.where(record < c, gl.convert_layout(with_k, LV, assert_trivial=True), 0.0)
            with_q = gl.where(record < c, gl.convert_layout(with_q, LV, assert_trivial=True), 0.0)
            y_k = gl.fma(with_k, u, y_k)
            y_q = gl.fma(with_q, u, y_q)
        value = gl.load(v + (token * v_token + v_head_at * v_head) + v_at * v_column).to(gl.float32)
        u = value
        if DELTA:
            u = value - gl.sum(y_k, 1)[:, None, :, :]
        if BETA:
            u = u * one(strength, LV)
        out = u * one(dot_kq, LV) + gl.sum(y_q, 1)[:, None, :, :]
        gl.store(p_out + token * (HV * VALUE), out.to(o.dtype.element_ty))

        if stays:
            p_own = ring_u + (at_row + c * HV + v_head_at) * VALUE + v_at
            gl.store(p_own, u)
            if TWO:
                gl.store(ring_v + (at_row + c * HV + v_head_at) * VALUE + v_at, value)
                if BETA:
                    gl.store(ring_beta + (at_row + c * HV + head), strength, mask=whole)
            if DECAY:
                gl.store(ring_g + (at_row + c * HV + head), now, mask=whole)
            mine = one(whole & (head % RATIO == 0), LC)
            x_k = gl.load(p_k + at_c).to(gl.float32)
            gl.store(p_ring + c * (H * KEY) + 0 * t_c, x_k * one(by_k, LC), mask=mine & (t_c == 0))
        if (stays == 0) | (known == 0):
            # The window's end; or a state that nobody has stored yet, and starts at zero.
            if TWO:
                end_anchor(
                    codes, read_codes, read_scales, ring_k, ring_g, ring_v, ring_beta, k + token * k_token,
                    v + token * v_token, g + token * g_token if DECAY else None,
                    beta + token * beta_token if BETA else None, k_head, v_head, v_column, g_head, beta_head, a_log,
                    bias, bound, slot, c, known, stays, i_part, H, HV, WINDOW, HEADS, NORM, DELTA, DECAY,
                    GATE, SIGMOID, TURNED, ODD,
                )  # fmt: skip
            else:
                end_codes(
                    codes, scales, ring_k, ring_u, ring_g, k + token * k_token, u * one(by_k, LV), now, k_head, slot, c,
                    known, stays, i_part, H, HV, WINDOW, HEADS, DECAY, FORMAT, TURNED, ODD,
                )  # fmt: skip
        if not SINGLE:
            # What a token has written the next one's threads read.
            barrier()
            c = gl.where(stays, c + 1, 0)
            known = known | (c >= 0)
    barrier()  # all warps have the cursor
    leave(cursor + slot, next_c, PROGRAMS)
