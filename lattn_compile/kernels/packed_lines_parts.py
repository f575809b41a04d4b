"""What the kernels of `packed_lines.py` share: places of numbers in threads, and numbers in parts for matrix units."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "KEY",
    "VALUE",
    "WARPS",
    "apart",
    "axes",
    "barrier",
    "bring",
    "fence",
    "load_rows",
    "multiplied",
    "one",
    "packed_pairs",
    "place_of",
    "since_of",
    "store_rows",
]

KEY = gl.constexpr(128)
VALUE = gl.constexpr(128)
WARPS = gl.constexpr(8)

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # so Triton calls it up to 3.6, and since

# A product of 16 x 8 with 8 x 16 numbers: two of 8 x 8, float32 in two parts of tf32 each, the small products first.
_PRODUCT = gl.constexpr(
    """
    {
    .reg .b32 h0, h1, h2, h3, l0, l1, l2, l3;
    and.b32 h0, $8, 0xFFFFE000;
    and.b32 h1, $9, 0xFFFFE000;
    and.b32 h2, $10, 0xFFFFE000;
    and.b32 h3, $11, 0xFFFFE000;
    sub.rn.f32 l0, $8, h0;
    sub.rn.f32 l1, $9, h1;
    sub.rn.f32 l2, $10, h2;
    sub.rn.f32 l3, $11, h3;
    mov.f32 $0, $20;
    mov.f32 $1, $21;
    mov.f32 $2, $22;
    mov.f32 $3, $23;
    mov.f32 $4, $24;
    mov.f32 $5, $25;
    mov.f32 $6, $26;
    mov.f32 $7, $27;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$0, $1, $2, $3}, {l0, l1, l2, l3}, {$14, $15}, {$0, $1, $2, $3};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$4, $5, $6, $7}, {l0, l1, l2, l3}, {$18, $19}, {$4, $5, $6, $7};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$0, $1, $2, $3}, {l0, l1, l2, l3}, {$12, $13}, {$0, $1, $2, $3};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$4, $5, $6, $7}, {l0, l1, l2, l3}, {$16, $17}, {$4, $5, $6, $7};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$0, $1, $2, $3}, {h0, h1, h2, h3}, {$14, $15}, {$0, $1, $2, $3};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$4, $5, $6, $7}, {h0, h1, h2, h3}, {$18, $19}, {$4, $5, $6, $7};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$0, $1, $2, $3}, {h0, h1, h2, h3}, {$12, $13}, {$0, $1, $2, $3};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {$4, $5, $6, $7}, {h0, h1, h2, h3}, {$16, $17}, {$4, $5, $6, $7};
    }
    """
)
_TRANSPOSED = gl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $4, $5, 0x7362;
    prmt.b32 c, $6, $7, 0x5140;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, c, 0x5410;
    prmt.b32 $1, a, c, 0x7632;
    prmt.b32 $2, b, d, 0x5410;
    prmt.b32 $3, b, d, 0x7632;
    }
    """
)
_PAIR = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_FENCE = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
_BRING = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
_CONSTRAINTS = gl.constexpr("=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f")
_EIGHT = gl.constexpr((gl.float32,) * 8)


@gluon.jit
def _transposed(a, b, c, d):
    """Bytes of four words of four bytes each, as a matrix, transposed."""
    return gl.inline_asm_elementwise(
        _TRANSPOSED, "=&r,=&r,=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def _word(p, at, mask, ODD: gl.constexpr):
    """The word number `at` of bytes at p, which begin anywhere under ODD; 0 where not `mask`."""
    if ODD:
        word = gl.load(p + 4 * at, mask=mask, other=0).to(gl.int32)
        for i in gl.static_range(1, 4):
            word = word | (gl.load(p + (4 * at + i), mask=mask, other=0).to(gl.int32) << (8 * i))
        return word
    else:
        return gl.load(p.to(gl.pointer_type(gl.int32)) + at, mask=mask, other=0)


@gluon.jit
def place_of(row, column, TURNED: gl.constexpr):
    """Where a head's number lies, of a key channel and a value column."""
    if TURNED:
        return column * KEY + row
    else:
        return row * VALUE + column


@gluon.jit
def _at(state, row, word, i: gl.constexpr, TURNED: gl.constexpr):
    """Where a word lies, in words: of column 4 * word + i and rows row to row + 3, or of row + i and four columns."""
    if TURNED:
        return state * (KEY * VALUE // 4) + (4 * word + i) * (KEY // 4) + row // 4
    else:
        return state * (KEY * VALUE // 4) + (row + i) * (VALUE // 4) + word


@gluon.jit
def load_rows(p, state, row, word, mask, TURNED: gl.constexpr, ODD: gl.constexpr):
    """Bytes of four rows, a multiple of 4 and on, of number `state` of the states at p: a word of columns 4 * word to
    4 * word + 3 each."""
    words = ()
    for i in gl.static_range(4):
        words = words + (_word(p, _at(state, row, word, i, TURNED), mask, ODD),)
    if TURNED:
        words = _transposed(words[0], words[1], words[2], words[3])
    return words


@gluon.jit
def store_rows(p, state, row, word, words, TURNED: gl.constexpr, ODD: gl.constexpr):
    """The inverse of `load_rows`."""
    if TURNED:
        words = _transposed(words[0], words[1], words[2], words[3])
    for i in gl.static_range(4):
        at = _at(state, row, word, i, TURNED)
        if ODD:
            for byte in gl.static_range(4):
                gl.store(p + (4 * at + byte), (words[i] >> (8 * byte)).to(gl.uint8))
        else:
            gl.store(p.to(gl.pointer_type(gl.int32)) + at, words[i])


@gluon.jit
def fence(number):
    """Has the loads before begin here, which are put off otherwise until registers are free: none moves over a barrier
    of the warp."""
    gl.inline_asm_elementwise(_FENCE, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bring(p):
    """Has the line of each pointer brought to the L2 cache, and waits for nothing."""
    gl.inline_asm_elementwise(_BRING, "=r,l", [p], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def axes(L: gl.constexpr, N: gl.constexpr):
    """Places (warp, t, g, number) of `[WARPS, 4, 8, N]` in layout L, each broadcasting against the others."""
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    return w, t, g, n


@gluon.jit
def one(x, L: gl.constexpr):
    """A number a warp, `[WARPS]`, as `[WARPS, 1, 1, 1]` in layout L."""
    L1: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    return gl.convert_layout(x, L1, assert_trivial=True)[:, None, None, None]


@gluon.jit
def halves(x):
    """The even and the odd numbers of `[WARPS, 4, 8, 2 n]`."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3] // 2, 2]))


@gluon.jit
def packed_pairs(x, L: gl.constexpr):
    """`[WARPS, 4, 8, 32]` in fp16, neighbours in one int32: 16 tensors `[WARPS, 4, 8, 1]` in layout L."""
    even, odd = halves(x)
    pairs = gl.inline_asm_elementwise(_PAIR, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return apart(pairs, 16, L)


@gluon.jit
def apart(x, N: gl.constexpr, L: gl.constexpr):
    """The N numbers of `[WARPS, 4, 8, N]`, N up to 32, a tensor `[WARPS, 4, 8, 1]` in layout L each."""
    if N == 1:
        return (gl.convert_layout(x, L, assert_trivial=True),)
    else:
        a, b = halves(x)
        even = apart(a, N // 2, L)
        odd = apart(b, N // 2, L)
        out = ()
        for i in gl.static_range(N // 2):
            out = out + (even[i], odd[i])
        return out


@gluon.jit
def _parts(x):
    """A float32 number in two parts of tf32, int32: 11 bits and the next 11 of its 24."""
    bits = x.to(gl.int32, bitcast=True)
    high = bits & -8192
    return high, (x - high.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)


@gluon.jit
def multiplied(a, b, acc):
    """acc and what is added to it by a product of fragments of `mma.m16n8k8`, two of them beside each other.

    a: four tensors of float32, rows g and g + 8 at t, then at t + 4. b: two for each of both products, at t and t + 4.
    acc: four for each, rows g, g, g + 8, g + 8 of columns 2 t, 2 t + 1 each. All of one shape and layout.
    """
    b00, l00 = _parts(b[0])
    b01, l01 = _parts(b[1])
    b10, l10 = _parts(b[2])
    b11, l11 = _parts(b[3])
    return gl.inline_asm_elementwise(
        _PRODUCT,
        _CONSTRAINTS,
        [
            a[0].to(gl.int32, bitcast=True), a[1].to(gl.int32, bitcast=True), a[2].to(gl.int32, bitcast=True),
            a[3].to(gl.int32, bitcast=True), b00, b01, l00, l01, b10, b11, l10, l11,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
        ],
        dtype=_EIGHT,
        is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def since_of(p_g, c, record, place, HV: gl.constexpr, WINDOW: gl.constexpr):
    """Sums of the logarithms of decays after record `record` until record c - 1, `[.., .., 1, ..]`: of numbers at p_g,
    HV apart; place: `[1, 1, 8, 1]`."""
    own = gl.load(p_g + place * HV, mask=(place < c) & (place < WINDOW - 1), other=0.0)
    later = gl.where(place > record, own, 0.0)
    if WINDOW > 8:
        more = gl.load(p_g + (8 + place) * HV, mask=(8 + place < c) & (place < WINDOW - 9), other=0.0)
        later = later + gl.where(8 + place > record, more, 0.0)
    return gl.sum(later, 2)[:, :, None, :]
