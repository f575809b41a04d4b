"""The end of a window for `packed_lines.py`: records into states, as products of matrices."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.kernels.common.codec import scales as scales_of
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.packed_gates import decay_of, strength_of
from lattn_compile.kernels.packed_lines_parts import (
    KEY,
    VALUE,
    WARPS,
    apart,
    axes,
    bring,
    fence,
    halves,
    load_rows,
    multiplied,
    place_of,
    since_of,
    store_rows,
)
from lattn_compile.kernels.packed_write import FP8_BYTES

__all__ = ["end_anchor", "end_codes"]

_INFINITE = gl.constexpr(0x7F800000)

_INT8_NUMBERS = gl.constexpr(
    """
    {
    .reg .b32 bytes;
    xor.b32 bytes, $4, 0x80808080;
    prmt.b32 $0, bytes, 0x4B000000, 0x7650;
    prmt.b32 $1, bytes, 0x4B000000, 0x7651;
    prmt.b32 $2, bytes, 0x4B000000, 0x7652;
    prmt.b32 $3, bytes, 0x4B000000, 0x7653;
    sub.rn.f32 $0, $0, 0f4B000080;
    sub.rn.f32 $1, $1, 0f4B000080;
    sub.rn.f32 $2, $2, 0f4B000080;
    sub.rn.f32 $3, $3, 0f4B000080;
    }
    """
)
_FP8_NUMBERS = gl.constexpr(
    """
    {
    .reg .b32 even, odd;
    .reg .b16 low, high, a, b, c, d;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 even, low;
    cvt.rn.f16x2.e4m3x2 odd, high;
    mov.b32 {a, b}, even;
    mov.b32 {c, d}, odd;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
    }
    """
)
_INT8_WORD = gl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    add.rn.f32 a, $1, 0f4B400000;
    add.rn.f32 b, $2, 0f4B400000;
    add.rn.f32 c, $3, 0f4B400000;
    add.rn.f32 d, $4, 0f4B400000;
    prmt.b32 a, a, b, 0x0040;
    prmt.b32 c, c, d, 0x0040;
    prmt.b32 a, a, c, 0x5410;
    and.b32 $0, a, $5;
    }
    """
)
_FP8_PAIR = gl.constexpr("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")


@gluon.jit
def _numbers(words, FORMAT: gl.constexpr):
    return gl.inline_asm_elementwise(
        _INT8_NUMBERS if FORMAT == "int8" else _FP8_NUMBERS,
        "=&f,=&f,=&f,=&f,r",
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _word(a, b, c, d, keep, FORMAT: gl.constexpr):
    return gl.inline_asm_elementwise(
        _INT8_WORD if FORMAT == "int8" else FP8_BYTES,
        "=r,f,f,f,f,r",
        [a, b, c, d, keep],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _by_byte(x, L: gl.constexpr):
    """`[WARPS, 4, 8, 16]` as four of each fourth number, in layout L."""
    even, odd = halves(x)
    a, c = halves(even)
    b, d = halves(odd)
    return (
        gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True),
        gl.convert_layout(c, L, assert_trivial=True), gl.convert_layout(d, L, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def _both(a, b, x, y):
    return gl.maximum(a, x), gl.maximum(b, y)


@gluon.jit
def end_codes(
    codes, scales, ring_k, ring_u, ring_g, k, g, last, k_head, g_head, a_log, bias, bound, slot, c, known, stays,
    i_part, H: gl.constexpr, HV: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, DECAY: gl.constexpr,
    GATE: gl.constexpr, FORMAT: gl.constexpr, TURNED: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """Records and the last token into the program's states, which are rounded; zeros instead, if the token `stays`.

    A head after the other, 16 key channels a warp: a thread has rows 16 w + 4 t to + 3, columns 16 g to + 15.

    Args:
        k, g: at the token. last: in shared memory, its u times the norm of its key, `[HEADS, 8, 16]`.
    """
    RATIO: gl.constexpr = HV // H
    BLOCKS: gl.constexpr = (WINDOW + 7) // 8
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LU: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    w, t, group, n = axes(L, 4)
    w_u, t_u, g_u, n_u = axes(LU, 16)
    at_row = slot * (WINDOW - 1) * HV
    # Of the first head; the next one's are on their way while one is rounded.
    words = load_rows(codes, slot * HV + i_part * HEADS, 16 * w + 4 * t, 4 * group + n, known, TURNED, ODD)
    for own in range(HEADS):
        head = i_part * HEADS + own
        i_key = head // RATIO
        row = slot * HV + head
        then = slot * HV + i_part * HEADS + gl.minimum(own + 1, HEADS - 1)
        step = gl.load(scales + row * (VALUE // 64) + group // 4, mask=known, other=0.0)
        now = 0.0
        p_g = ring_g
        if DECAY:
            now = decay_of(gl.load(g + head * g_head), a_log, bias, bound, head, GATE)
            p_g = ring_g + at_row + head
            on_state = exp(since_of(p_g, c, -1 + 0 * (t + w), group, HV, WINDOW) + now)
            step = step * on_state
        step = gl.where(known, step, 0.0)
        newest = last.index(own).load(gl.SliceLayout(0, gl.SliceLayout(1, LU)))[None, None, :, :]
        D = ()
        for _i in gl.static_range(16):
            D = D + (gl.zeros([WARPS, 4, 8, 4], gl.float32, L),)
        for block in gl.static_range(BLOCKS):
            us = ()
            ks = ()
            for half in gl.static_range(2):
                record_u = 8 * block + 4 * half + t_u
                before = (record_u < c) & (stays == 0)
                u = gl.load(
                    ring_u + (at_row + head) * VALUE + record_u * (HV * VALUE) + 16 * g_u + n_u, mask=before, other=0.0
                )
                if DECAY:
                    u = u * exp(since_of(p_g, c, record_u + 0 * w_u, g_u, HV, WINDOW) + now)
                u = gl.where(before, u, gl.where((record_u == c) & (stays == 0), newest, 0.0))
                us = us + (_by_byte(u, L),)
                record = 8 * block + 4 * half + t
                for pair in gl.static_range(2):
                    channel = 16 * w + 4 * (group // 2) + 2 * pair + group % 2
                    at_k = slot * (WINDOW - 1) * (H * KEY) + i_key * KEY
                    x = gl.load(
                        ring_k + at_k + record * (H * KEY) + channel, mask=(record < c) & (stays == 0), other=0.0
                    )
                    new = gl.load(k + i_key * k_head + channel, mask=(record == c) & (stays == 0), other=0.0)
                    ks = ks + (x + new.to(gl.float32),)
            more = ()
            for pair in gl.static_range(2):
                d = multiplied(
                    (us[0][2 * pair], us[0][2 * pair + 1], us[1][2 * pair], us[1][2 * pair + 1]),
                    (ks[0], ks[2], ks[1], ks[3]),
                    (
                        D[8 * pair], D[8 * pair + 1], D[8 * pair + 2], D[8 * pair + 3], D[8 * pair + 4],
                        D[8 * pair + 5], D[8 * pair + 6], D[8 * pair + 7],
                    ),
                )  # fmt: skip
                for i_d in gl.static_range(8):
                    more = more + (d[i_d],)
            D = more
        # D[8 pair + 4 chunk + 2 odd column + odd row]: of row 2 chunk + odd row, byte 2 pair + odd column.
        S = ()
        bits = gl.zeros([WARPS, 4, 8, 4], gl.int32, L)
        for r in gl.static_range(4):
            numbers = _numbers(words[r], FORMAT)
            for byte in gl.static_range(4):
                added = D[8 * (byte // 2) + 4 * (r // 2) + 2 * (byte % 2) + r % 2]
                s = gl.fma(numbers[byte], step, added)
                bits = gl.maximum(bits, s.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
                S = S + (s,)
        words = load_rows(codes, then, 16 * w + 4 * t, 4 * group + n, known, TURNED, ODD)
        fence(c)
        most = gl.max(gl.max(bits, 3), 1)
        place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, :]
        most = gl.reduce((gl.where(place < 4, most, 0), gl.where(place < 4, 0, most)), 1, _both)
        most = gl.reduce(most, 0, _both)
        LARGEST: gl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        step_0, inverse_0, zero_0 = scales_of(most[0], LARGEST)
        step_1, inverse_1, zero_1 = scales_of(most[1], LARGEST)
        gl.store(scales + row * (VALUE // 64), step_0)
        gl.store(scales + row * (VALUE // 64) + 1, step_1)
        inverse = gl.where(group < 4, inverse_0, inverse_1)
        zero = gl.where(group < 4, zero_0, zero_1)
        # A tile that is NaN has codes of 0: its scale says so.
        keep = gl.where(gl.where(group < 4, most[0], most[1]) < _INFINITE, -1, 0)
        rounded = ()
        for r in gl.static_range(4):
            word = _word(
                gl.fma(S[4 * r], inverse, zero), gl.fma(S[4 * r + 1], inverse, zero),
                gl.fma(S[4 * r + 2], inverse, zero), gl.fma(S[4 * r + 3], inverse, zero),
                keep, FORMAT,
            )  # fmt: skip
            rounded = rounded + (word,)
        store_rows(codes, row, 16 * w + 4 * t, 4 * group + n, rounded, TURNED, ODD)


@gluon.jit
def _rows_of(x, N: gl.constexpr, L: gl.constexpr):
    """The N numbers along the last axis of `[M, N]` or `[N]`, a tensor `[M]` or `[1]` in layout L each."""
    if N == 1:
        flat: gl.constexpr = [x.shape[0]]
        return (gl.convert_layout(gl.reshape(x, flat), L, assert_trivial=True),)
    else:
        if len(x.shape) == 1:
            a, b = gl.split(gl.reshape(x, [N // 2, 2]))
        else:
            a, b = gl.split(gl.reshape(x, [x.shape[0], N // 2, 2]))
        even = _rows_of(a, N // 2, L)
        odd = _rows_of(b, N // 2, L)
        out = ()
        for i in gl.static_range(N // 2):
            out = out + (even[i], odd[i])
        return out


@gluon.jit
def _joined(x, N: gl.constexpr):
    """The inverse of `_rows_of` for `[M, N]`."""
    if N == 1:
        return x[0][:, None]
    else:
        even = ()
        odd = ()
        for i in gl.static_range(N // 2):
            even = even + (x[2 * i],)
            odd = odd + (x[2 * i + 1],)
        return gl.reshape(gl.join(_joined(even, N // 2), _joined(odd, N // 2)), [x[0].shape[0], N])


@gluon.jit
def _pair_of_codes(low, high):
    """Bytes of the E4M3 numbers next to two scaled values, int16."""
    return gl.inline_asm_elementwise(_FP8_PAIR, "=h,f,f", [low, high], dtype=gl.int16, is_pure=True, pack=1)


@gluon.jit
def _logs(p_g, now, c, records, at, DECAY: gl.constexpr, HV: gl.constexpr):
    """Logarithms of the records' own decays at places `at`, 0 beyond them."""
    x = gl.where(at == c, now, 0.0)
    if DECAY:
        x = x + gl.load(p_g + at * HV, mask=at < c, other=0.0)
    return gl.where(at < records, x, 0.0)


@gluon.jit
def _operands(keys, part: gl.constexpr, L1: gl.constexpr, ALONG: gl.constexpr):
    """Keys of 16 channels as operands of products: 8 tensors `[1, 4, 8, 1]` in layout L1. ALONG: sums run over
    channels, (step, record / 8, channel / 4); else over records, (step, record / 4)."""
    if ALONG:
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 4], [8, 0], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[0, 0]] * 3, [], [16, 16]
        )
        x = gl.permute(gl.reshape(keys.index(part).load(L), [2, 8, 2, 2, 4]), (4, 1, 2, 0, 3))
    else:
        LR: gl.constexpr = gl.DistributedLinearLayout(
            [[4, 0], [8, 0], [0, 8]], [[1, 0], [2, 0], [0, 4], [0, 1], [0, 2]], [[0, 0]] * 3, [], [16, 16]
        )
        # g's lowest bit is bit 2 of the channel.
        x = gl.permute(gl.reshape(keys.index(part).load(LR), [4, 4, 2, 2, 4]), (1, 4, 3, 2, 0))
    return apart(gl.reshape(x, [1, 4, 8, 8]), 8, L1)


@gluon.jit
def end_anchor(
    codes, read_codes, read_scales, ring_k, ring_g, ring_v, ring_beta, k, v, g, beta, k_head, v_head, v_column, g_head,
    beta_head, a_log, bias, bound, slot, c, known, stays, i_part, H: gl.constexpr, HV: gl.constexpr,
    WINDOW: gl.constexpr, HEADS: gl.constexpr, NORM: gl.constexpr, DELTA: gl.constexpr, DECAY: gl.constexpr,
    GATE: gl.constexpr, SIGMOID: gl.constexpr, TURNED: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """Raw records and the last token into the program's anchors, and these into their read copies; zeros instead, if
    the token `stays`.

    With the records' keys in K, the decay G_i from the anchor to record i and D(j, i) between two of them,

        u_i = beta_i (v_i - G_i A^T k_i - sum_(j < i) D(j, i) (k_j . k_i) u_j)        A <- G A + sum_i D(i, n) k_i u_i^T

    so a window is two products with the anchor's size and a triangle of 16 by 16. A head after the other, 16 columns a
    warp: a thread has columns 16 w + 2 g and the one after it, rows 4 i + t.

    Args:
        k, v, g, beta: at the token.
    """
    RATIO: gl.constexpr = HV // H
    OF_KEY: gl.constexpr = RATIO if RATIO < HEADS else HEADS
    L1: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    L2: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LK: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    LN: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])  # all of 128 in each warp
    LT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])  # of 16 x 16
    LT3: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [WARPS, 1, 1], [2, 1, 0])
    LV: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])  # a column a thread
    LC: gl.constexpr = gl.SliceLayout(1, LV)
    LALL: gl.constexpr = gl.BlockedLayout([16], [32], [WARPS], [0])
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LU: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [4, 0], [8, 0]], [[1, 0], [2, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [0, 64]], [], [16, 128]
    )
    keys = gl.allocate_shared_memory(gl.float32, [8, 16, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    table = gl.allocate_shared_memory(gl.float32, [16, VALUE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gram = gl.allocate_shared_memory(gl.float32, [16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    triangle = gl.allocate_shared_memory(gl.float32, [16, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    triangle_2 = triangle._reinterpret(gl.float32, [16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    records = gl.where(stays, 0, c + 1)
    at_row = slot * (WINDOW - 1) * HV
    w, t, group, n = axes(L2, 2)
    none = gl.zeros([WARPS, 4, 8, 1], gl.float32, L1)
    alike = gl.zeros([1, 4, 8, 1], gl.float32, L1)  # in all warps
    i_record = gl.arange(0, 16, gl.SliceLayout(1, LK))[:, None]
    i_channel = gl.arange(0, 16, gl.SliceLayout(0, LK))[None, :]
    for own_key in range(HEADS // OF_KEY):
        i_key = (i_part * HEADS + own_key * OF_KEY) // RATIO
        p_k = k + i_key * k_head
        by_k = 1.0
        if NORM:
            x_k = gl.load(p_k + gl.arange(0, KEY, LN)).to(gl.float32)
            by_k = gl.rsqrt(gl.sum(x_k * x_k, 0) + 1e-6)
        p_ring = ring_k + slot * (WINDOW - 1) * (H * KEY) + i_key * KEY
        for part in gl.static_range(8):
            channel = part * 16 + i_channel
            old_k = gl.load(p_ring + i_record * (H * KEY) + channel, mask=i_record < gl.minimum(c, records), other=0.0)
            new_k = gl.load(p_k + channel + 0 * i_record, mask=(i_record == c) & (i_record < records), other=0.0)
            keys.index(part).store(old_k + new_k.to(gl.float32) * by_k)
        if DELTA:
            G = (alike, alike, alike, alike, alike, alike, alike, alike)
            for part in gl.static_range(8):
                k_x = _operands(keys, part, L1, True)
                for s in gl.static_range(2):
                    # Of (record / 8, channel / 4): 00 01 10 11.
                    G = multiplied(
                        (k_x[4 * s], k_x[4 * s + 2], k_x[4 * s + 1], k_x[4 * s + 3]),
                        (k_x[4 * s], k_x[4 * s + 1], k_x[4 * s + 2], k_x[4 * s + 3]),
                        G,
                    )
            gram.store(_as_table(G, False))
        for own in range(OF_KEY):
            head = i_part * HEADS + own_key * OF_KEY + own
            row = slot * HV + head
            now = 0.0
            p_g = ring_g
            if DECAY:
                now = decay_of(gl.load(g + head * g_head), a_log, bias, bound, head, GATE)
                p_g = ring_g + at_row + head
            strength = 1.0
            if beta is not None:
                strength = strength_of(gl.load(beta + head * beta_head), SIGMOID)
            p_codes = codes + row * (KEY * VALUE) + place_of(t, 16 * w + 2 * group + n, TURNED)
            S = ()
            for i in gl.static_range(32):
                x = gl.load(p_codes + place_of(4 * i, 0, TURNED), mask=known & (stays == 0), other=0.0)
                S = S + apart(x, 2, L1)
            fence(c)
            if DELTA:
                # Sums over the anchor's channels, before what else needs registers.
                w_1, t_1, g_1, _ = axes(L1, 1)
                line = gl.minimum(32 * w_1 + 8 * t_1 + g_1, gl.maximum(4 * c - 1, 0))
                bring(ring_v + (at_row + head) * VALUE + line // 4 * (HV * VALUE) + line % 4 * 32)
                P = (none, none, none, none, none, none, none, none)
                for part in gl.static_range(8):
                    x = _operands(keys, part, L1, True)
                    for s in gl.static_range(2):
                        P = multiplied(
                            (
                                S[8 * part + 4 * s],
                                S[8 * part + 4 * s + 1],
                                S[8 * part + 4 * s + 2],
                                S[8 * part + 4 * s + 3],
                            ),
                            (x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3]),
                            P,
                        )
                table.store(_as_table(P, True))
            fence(c)
            logs = _logs(p_g, now, c, records, gl.arange(0, 16, gl.SliceLayout(0, LT)), DECAY, HV)
            i_t = gl.arange(0, 16, gl.SliceLayout(1, LT))
            j_t = gl.arange(0, 16, gl.SliceLayout(0, LT))[None, :]
            by = gl.where(i_t == c, strength, 1.0)
            if beta is not None:
                by = gl.where(i_t < c, gl.load(ring_beta + at_row + head + i_t * HV, mask=i_t < c, other=0.0), by)
            # The values as the recurrence has them, eight columns of a record a thread.
            i_q = gl.arange(0, 16, gl.SliceLayout(1, LQ))[:, None]
            column_q = gl.arange(0, VALUE, gl.SliceLayout(0, LQ))[None, :]
            value = gl.load(
                ring_v + (at_row + head) * VALUE + i_q * (HV * VALUE) + column_q, mask=i_q < gl.minimum(c, records),
                other=0.0,
            )  # fmt: skip
            newest = gl.load(
                v + head * v_head + column_q * v_column + 0 * i_q, mask=(i_q == c) & (i_q < records), other=0.0
            )
            value = value + newest.to(gl.float32)
            if DELTA:
                # Decays between two records: a sum of what lies between, one exponential.
                between = gl.full([16, 16], 1.0, gl.float32, LT)
                if DECAY:
                    i_3 = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, LT3)))[:, None, None]
                    j_3 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LT3)))[None, :, None]
                    l_3 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LT3)))
                    logs_3 = _logs(p_g, now, c, records, l_3, DECAY, HV)[None, None, :]
                    l_3 = l_3[None, None, :]
                    total = gl.sum(gl.where((l_3 > j_3) & (l_3 <= i_3), logs_3, 0.0), 2)
                    between = exp(gl.convert_layout(total, LT, assert_trivial=True))
                triangle_2.store(gl.where(j_t < i_t[:, None], by[:, None] * (between * gram.load(LT)), 0.0))
                seen = table.load(LQ)
                if DECAY:
                    so_far = exp(gl.sum(gl.where(j_t <= i_t[:, None], logs[None, :], 0.0), 1))
                    seen = seen * gl.convert_layout(so_far, gl.SliceLayout(1, LQ))[:, None]
                value = value - seen
            # A record that there is not has none, whatever its gates are.
            value = gl.where(i_q < records, value * gl.convert_layout(by, gl.SliceLayout(1, LQ))[:, None], 0.0)
            table.store(value)
            if DELTA:
                u = _rows_of(table.permute((1, 0)).load(LV), 16, LC)
                found = ()
                for i in gl.static_range(16):
                    x = u[i]
                    factors = _rows_of(triangle.index(i).load(LALL), 16, LC)
                    for j in gl.static_range(i):
                        x = gl.fma(-factors[j], found[j], x)
                    found = found + (x,)
                table.permute((1, 0)).store(gl.convert_layout(_joined(found, 16), LV, assert_trivial=True))
            us = table.load(LU)
            on_state = 1.0
            if DECAY:
                later = exp(gl.sum(gl.where(j_t > i_t[:, None], logs[None, :], 0.0), 1))
                later = gl.convert_layout(later, gl.SliceLayout(1, LU))[:, None]
                us = gl.where(gl.arange(0, 16, gl.SliceLayout(1, LU))[:, None] < records, us * later, 0.0)
                on_state = exp(gl.sum(logs, 0))
            us = gl.permute(gl.reshape(us, [4, 4, 8, 8, 2]), (2, 1, 3, 0, 4))
            us = apart(gl.reshape(us, [WARPS, 4, 8, 8]), 8, L1)  # (record / 4, column)
            T = ()
            for part in gl.static_range(8):
                x = _operands(keys, part, L1, False)
                d = (none, none, none, none, none, none, none, none)
                if WINDOW > 8:
                    d = multiplied((us[4], us[5], us[6], us[7]), (x[2], x[3], x[6], x[7]), d)
                d = multiplied((us[0], us[1], us[2], us[3]), (x[0], x[1], x[4], x[5]), d)
                for step in gl.static_range(2):
                    for odd in gl.static_range(2):
                        for column in gl.static_range(2):
                            T = T + (
                                gl.fma(
                                    S[8 * part + 4 * step + 2 * odd + column], on_state,
                                    d[4 * step + 2 * column + odd],
                                ),
                            )  # fmt: skip
            bits_0 = gl.zeros([WARPS, 4, 8, 1], gl.int32, L1)
            bits_1 = bits_0
            for i in gl.static_range(32):
                bits_0 = gl.maximum(bits_0, T[2 * i].to(gl.int32, bitcast=True) & 0x7FFFFFFF)
                bits_1 = gl.maximum(bits_1, T[2 * i + 1].to(gl.int32, bitcast=True) & 0x7FFFFFFF)
                gl.store(
                    p_codes + place_of(4 * i, 0, TURNED),
                    gl.convert_layout(
                        gl.reshape(gl.join(T[2 * i], T[2 * i + 1]), [WARPS, 4, 8, 2]), L2, assert_trivial=True
                    ),
                )
            w_2, t_2, g_2, n_2 = axes(L1, 1)
            bits_0 = gl.max(bits_0, 1)[:, None, :, :]
            bits_1 = gl.max(bits_1, 1)[:, None, :, :]
            step_0, inverse_0, zero_0 = scales_of(bits_0, FP8_LARGEST)
            step_1, inverse_1, zero_1 = scales_of(bits_1, FP8_LARGEST)
            p_column = 16 * w_2 + 2 * g_2 + n_2
            gl.store(read_scales + row * VALUE + p_column, step_0)
            gl.store(read_scales + row * VALUE + p_column + 1, step_1)
            keep = gl.where(bits_0 < _INFINITE, 0xFF, 0) | gl.where(bits_1 < _INFINITE, 0xFF00, 0)
            p_read = read_codes + row * (KEY * VALUE) + place_of(t_2, p_column, TURNED)
            for i in gl.static_range(32):
                pair = _pair_of_codes(gl.fma(T[2 * i], inverse_0, zero_0), gl.fma(T[2 * i + 1], inverse_1, zero_1))
                pair = pair.to(gl.int32) & keep
                p_pair = p_read + place_of(4 * i, 0, TURNED)
                if TURNED or ODD:
                    gl.store(p_pair, pair.to(gl.uint8))
                    gl.store(p_pair + place_of(0, 1, TURNED), (pair >> 8).to(gl.uint8))
                else:
                    gl.store(p_pair.to(gl.pointer_type(gl.int16)), pair.to(gl.int16))


@gluon.jit
def _as_table(x, BY_COLUMN: gl.constexpr):
    """A product's eight tensors `[1, 4, 8, 1]`, of two times 8 columns, as `[16, 16]`, rows by columns; BY_COLUMN: of
    `[WARPS, 4, 8, 1]` as `[16, 128]`, columns by rows of all warps, rows 2 g and 2 g + 1 of the product's g, g + 8."""
    y = gl.join(gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])), gl.join(gl.join(x[4], x[6]), gl.join(x[5], x[7])))
    # [warp, t, g, 1, row / 8, odd column, column / 8]
    if BY_COLUMN:
        return gl.reshape(gl.permute(y, (3, 6, 1, 5, 0, 2, 4)), [16, 128])
    else:
        return gl.reshape(gl.permute(y, (3, 0, 4, 2, 6, 1, 5)), [16, 16])
