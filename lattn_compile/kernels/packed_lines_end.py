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
from lattn_compile.kernels.common.inputs import exp, no_less
from lattn_compile.kernels.common.packed_gates import decay_of, strength_of
from lattn_compile.kernels.packed_lines_parts import (
    KEY,
    VALUE,
    WARPS,
    apart,
    axes,
    bring,
    fence,
    load_rows,
    multiplied,
    one,
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
def _keys_of(ring_k, k, k_head, head, channel, record, live, WINDOW: gl.constexpr, H: gl.constexpr):
    """Two channels, `channel` and two after it, of a key head's records and of the last token, `[WARPS, 4, 8, 1]` each:
    for four records after the other, of which `record` is one."""
    out = ()
    for place in gl.static_range((WINDOW + 7) // 8 * 2):
        at = 4 * place + record
        for pair in gl.static_range(2):
            of = channel + 2 * pair
            x = gl.load(ring_k + head * KEY + at * (H * KEY) + of, mask=(at < WINDOW - 1) & live, other=0.0)
            if place == (WINDOW - 1) // 4:
                new = gl.load(k + head * k_head + of + 0 * at, mask=(at == WINDOW - 1) & live, other=0.0)
                x = x + new.to(gl.float32)
            out = out + (x,)
    return out


@gluon.jit
def _advanced(words, us, ks, step, J: gl.constexpr, L: gl.constexpr, FORMAT: gl.constexpr):
    """A word's columns of four rows after the records: `S[4 row + byte]`.

    Args:
        words: of the rows, the J-th of four. us: of eight records each, a fragment for every second column, see
            `end_codes`. ks: of four records each, two channels of their keys, see `_keys_of`.
    """
    zeros = gl.zeros(words[0].shape, gl.float32, L)
    low = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    high = low
    for block in gl.static_range(len(ks) // 4):
        own = (ks[4 * block], ks[4 * block + 2], ks[4 * block + 1], ks[4 * block + 3])
        low = multiplied(_four(us, 32 * block + 8 * J), own, low)
        high = multiplied(_four(us, 32 * block + 8 * J + 4), own, high)
    added = low + high
    # A product's eight: [later rows, column, odd row].
    S = ()
    for r in gl.static_range(4):
        numbers = _numbers(words[r], FORMAT)
        for byte in gl.static_range(4):
            S = S + (gl.fma(numbers[byte], step, added[8 * (byte // 2) + 4 * (r // 2) + 2 * (byte % 2) + r % 2]),)
    return S


@gluon.jit
def _four(x, at: gl.constexpr):
    return x[at], x[at + 1], x[at + 2], x[at + 3]


@gluon.jit
def end_codes(
    codes, scales, ring_k, ring_u, ring_g, k, newest, now, k_head, slot, c, known, stays, i_part, H: gl.constexpr,
    HV: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, DECAY: gl.constexpr, FORMAT: gl.constexpr,
    TURNED: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """Records and the last token into the program's states, which are rounded; zeros instead, if the token `stays`.

    First the records' u of all heads, decayed until now, into shared memory: a warp has the columns that it has in the
    step. Then a head after the other, 16 key channels a warp: a thread has rows 16 w + 4 t to + 3, columns 16 g to
    + 15.

    Args:
        k: at the token. newest: its u times the norm of its key, `[WARPS, 1, 8, 4 J]`. now: its decay's logarithm,
            `[WARPS]`.
    """
    RATIO: gl.constexpr = HV // H
    J: gl.constexpr = HEADS // 2  # words of a row in a thread of the step
    SHARE: gl.constexpr = WARPS // HEADS  # warps of a head there
    BLOCKS: gl.constexpr = (WINDOW + 7) // 8  # eight records each
    LARGEST: gl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    L1: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LU: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4 * J], [1, 4, 8, 1], [WARPS, 1, 1, 1], [3, 1, 2, 0])
    LR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 0]] * 3,
        [],
        [4, 2 * VALUE],
    )
    LG: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L1)))
    LM: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    ALL: gl.constexpr = gl.BlockedLayout([WARPS, 2], [32, 1], [WARPS, 1], [1, 0])  # in every thread
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    live = stays == 0
    at_row = slot * (WINDOW - 1) * HV

    table = gl.allocate_shared_memory(gl.float32, [BLOCKS, HEADS * 4, 2 * VALUE], TABLE)
    steps = gl.allocate_shared_memory(gl.float32, [WARPS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    largest = gl.allocate_shared_memory(gl.int32, [WARPS, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    w_u, t_u, g_u, n_u = axes(LU, 4 * J)
    head_u = i_part * HEADS + w_u // SHARE
    column_u = (w_u % SHARE) * (32 * J) + g_u * (4 * J) + n_u
    for block in gl.static_range(BLOCKS):
        halves_u = ()
        for half in gl.static_range(2):
            record_u = 8 * block + 4 * half + t_u
            before = (record_u < WINDOW - 1) & live
            u = gl.load(ring_u + (at_row + head_u) * VALUE + record_u * (HV * VALUE) + column_u, mask=before, other=0.0)
            if DECAY:
                p_g = ring_g + at_row + head_u
                u = u * exp(since_of(p_g, c, record_u + 0 * w_u, g_u, HV, WINDOW) + one(now, LU))
            halves_u = halves_u + (gl.where(before, u, gl.where((record_u == WINDOW - 1) & live, newest, 0.0)),)
        # Of a thread, two columns of record t, then of t + 4, as a fragment has them.
        both = gl.reshape(gl.join(halves_u[0], halves_u[1]), [HEADS, SHARE, 4, 16 * J, 2, 2])
        both = gl.permute(both, (0, 2, 1, 3, 5, 4))
        table.index(block).store(gl.reshape(both, [HEADS * 4, 2 * VALUE]))
    by_head = table._reinterpret(gl.float32, [BLOCKS * HEADS, 4, 2 * VALUE], TABLE)
    w_1, t_1, g_1, _ = axes(L1, 1)
    row_1 = slot * HV + i_part * HEADS + w_1 // SHARE
    step = gl.load(scales + row_1 * (VALUE // 64) + g_1 // 4, mask=known, other=0.0)
    if DECAY:
        p_g = ring_g + at_row + i_part * HEADS + w_1 // SHARE
        step = step * exp(since_of(p_g, c, -1 + 0 * w_1, g_1, HV, WINDOW) + one(now, L1))
    steps._reinterpret(gl.float32, [WARPS, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(
        gl.reshape(gl.where(known, step, 0.0), [WARPS, 8])
    )

    w, t, group, n = axes(L, 4)
    p_ring = ring_k + slot * (WINDOW - 1) * (H * KEY)
    channel = 16 * w_1 + 4 * (g_1 // 2) + g_1 % 2
    # Of the first head; the next one's are on their way while one is rounded.
    words = load_rows(codes, slot * HV + i_part * HEADS, 16 * w + 4 * t, 4 * group + n, known, TURNED, ODD)
    ks = _keys_of(p_ring, k, k_head, i_part * HEADS // RATIO, channel, t_1, live, WINDOW, H)
    for own in range(HEADS):
        row = slot * HV + i_part * HEADS + own
        then = gl.minimum(own + 1, HEADS - 1)
        step_old = steps.index(own * SHARE).load(LG)[None, None, :, None]
        us = ()
        for block in gl.static_range(BLOCKS):
            of_head = gl.reshape(by_head.index(block * HEADS + own).load(LR), [1, 4, 8, 32])
            us = us + apart(of_head, 32, L1)
        rows = apart(words[0], 4, L1) + apart(words[1], 4, L1) + apart(words[2], 4, L1) + apart(words[3], 4, L1)
        S = ()
        most = gl.zeros([WARPS, 4, 8, 1], gl.float32, L1)
        for j in gl.static_range(4):
            x = _advanced((rows[j], rows[4 + j], rows[8 + j], rows[12 + j]), us, ks, step_old, j, L1, FORMAT)
            own_most = gl.abs(x[0])
            for i in gl.static_range(1, 16):
                own_most = no_less(own_most, gl.abs(x[i]))
            most = no_less(most, own_most)
            S = S + x
        words = load_rows(codes, slot * HV + i_part * HEADS + then, 16 * w + 4 * t, 4 * group + n, known, TURNED, ODD)
        ks = _keys_of(p_ring, k, k_head, (i_part * HEADS + then) // RATIO, channel, t_1, live, WINDOW, H)
        fence(c)
        bits = most.to(gl.int32, bitcast=True)
        left = gl.max(gl.reshape(gl.where(g_1 < 4, bits, 0), [WARPS, 32]), 1)
        right = gl.max(gl.reshape(gl.where(g_1 < 4, 0, bits), [WARPS, 32]), 1)
        left = gl.convert_layout(left, gl.SliceLayout(1, LM), assert_trivial=True)
        right = gl.convert_layout(right, gl.SliceLayout(1, LM), assert_trivial=True)
        largest.store(gl.where(gl.arange(0, 2, gl.SliceLayout(0, LM))[None, :] == 0, left[:, None], right[:, None]))
        most_0, most_1 = gl.split(largest.load(ALL))
        most_0, most_1 = gl.max(most_0, 0), gl.max(most_1, 0)
        bits = gl.where(g_1 < 4, most_0, most_1)
        new, inverse, zero = scales_of(bits, LARGEST, True)
        gl.store(scales + row * (VALUE // 64) + g_1 // 4, new, mask=g_1 % 4 == 0)
        # A tile that is NaN has codes of 0: its scale says so.
        keep = gl.where(bits < _INFINITE, -1, 0)
        rounded = ()
        for i in gl.static_range(16):
            word = _word(
                gl.fma(S[4 * i], inverse, zero), gl.fma(S[4 * i + 1], inverse, zero),
                gl.fma(S[4 * i + 2], inverse, zero), gl.fma(S[4 * i + 3], inverse, zero),
                keep, FORMAT,
            )  # fmt: skip
            rounded = rounded + (word,)
        done = (_beside(rounded, 0, L), _beside(rounded, 1, L), _beside(rounded, 2, L), _beside(rounded, 3, L))
        store_rows(codes, row, 16 * w + 4 * t, 4 * group + n, done, TURNED, ODD)


@gluon.jit
def _beside(x, r: gl.constexpr, L: gl.constexpr):
    """`x[4 j + r]` for each j, `[WARPS, 4, 8, 1]`, as `[WARPS, 4, 8, 4]` in layout L."""
    y = gl.join(gl.join(x[r], x[8 + r]), gl.join(x[4 + r], x[12 + r]))
    return gl.convert_layout(gl.reshape(y, [WARPS, 4, 8, 4]), L, assert_trivial=True)


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
