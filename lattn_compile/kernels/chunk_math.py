"""Inside a program of the chunk kernels: products to a wanted precision, sums of gates, loads of a block's rows.

An operand of a product is a tuple of tensors that add up to it. There are two kinds.

fine_parts: two fp16 tensors with 22 bits of an fp32 number that was brought into fp16's range, one of a bf16 number,
which it holds exactly. The way through the state of bf16 inputs is made of these. Two cost as many products as bf16's
16 bits and a third less than bf16's 24. A column of the state is brought there as a whole: what lies below 2^-14 of its
largest channel loses bits, down to 2^-25 of that one, so that an output that reads nothing but a channel of 2^-16 of
the largest is off by 3e-3.

operand: bf16 tensors: of what came as bf16 that tensor, of an fp32 number two that hold 16 of its bits where inputs are
bf16 (`LOW`), else three with all 24. They need no range. One for every operand, as is common, puts the state off by
2e-3, and by 5e-2 for one repeated key with beta = 1.9; two by 4e-6, and there by 4e-5.

The delta rule's matrix `A` and the inverse of `I + A` are float64, and where inputs are not bf16 products with it too:
in fp32 their rounding errors are amplified by the norm of the inverse (`reference/wy.py`). With bf16 inputs and a decay
by channel `A` is a sum in fp32 before it is taken for float64.

No product may have 64 rows in a program of four or more warps, and none takes a transposed product as it is: see
"Hopper" in `chunk.py`.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.common.inputs import exp as exact_exp
from lattn_compile.kernels.common.inputs import no_less, no_more

__all__ = [
    "after_sum",
    "block_place",
    "block_tokens",
    "channel_weight",
    "common_power",
    "exact_operand",
    "exp2",
    "fine_parts",
    "fine_product",
    "fine_weight",
    "flipped",
    "gate_exp",
    "half",
    "held",
    "load_beta",
    "load_matrix",
    "load_operand",
    "load_reads",
    "load_rows",
    "load_solved",
    "operand",
    "power_of_two",
    "product",
    "row_weights",
    "short_parts",
    "short_product",
    "solved_product",
    "split_sum",
    "spread_product",
    "store_operand",
    "summed",
    "weights",
    "wide_parts",
]

_CLEARED = tl.constexpr(-256.0)
_COARSE = tl.constexpr(1.5 * 2.0**15)  # adding it rounds |x| <= 256 to a multiple of 2^-8


@triton.jit
def _pairs(x):
    """fp32 `x` to bf16. On CUDA two numbers an instruction: Triton alone takes one, where it needs them apart too."""
    if is_hip():
        return x.to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def half(x):
    """fp32 `x` to fp16; as `_pairs`."""
    if is_hip():
        return x.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def fine_parts(x):
    """fp32 `x` as two fp16 tensors that hold 24 bits of it, where it is between 2^-14 and 2^15, and 2^-25 below."""
    high = half(x)
    return high, half(x - high.to(tl.float32))


@triton.jit
def _short(x):
    """fp32 `x` to eight bits, fp32."""
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def short_parts(x):
    """fp32 `x` as three fp16 tensors of 8, 8 and 11 bits, in the range of `fine_parts`.

    Products of the first two parts have sixteen bits, so that their sum in fp32 is all but exact. An inverse needs
    that: what it makes of a repeated key is a small sum of large numbers. NaN and infinity come through as the NaN of
    `rest - middle`, whatever `_short` makes of their bits.
    """
    high = _short(x)
    rest = x - high
    middle = _short(rest)
    return half(high), half(middle), half(rest - middle)


@triton.jit
def wide_parts(x):
    """`short_parts` of float64 `x`, all 27 bits."""
    high = _short(x.to(tl.float32))
    rest = (x - high.to(tl.float64)).to(tl.float32)
    middle = _short(rest)
    return half(high), half(middle), half(rest - middle)


@triton.jit
def short_product(a, b):
    """`a @ b` of operands of `short_parts`, fp32, each order of terms summed apart."""
    low = tl.dot(a[2], b[0])
    low = tl.dot(a[0], b[2], low)
    low = tl.dot(a[1], b[1], low)
    middle = tl.dot(a[1], b[0])
    middle = tl.dot(a[0], b[1], middle)
    return tl.dot(a[0], b[0]) + (middle + low)


@triton.jit
def fine_product(a, b, out):
    """`out + a @ b` of operands of one or two fp16 parts, fp32; the smallest terms first."""
    if len(a) == 2:
        out = tl.dot(a[1], b[0], out)
    if len(b) == 2:
        out = tl.dot(a[0], b[1], out)
    return tl.dot(a[0], b[0], out)


@triton.jit
def power_of_two(x):
    """The largest power of two that is not above `x >= 0`, kept within 2^-120 and 2^120, and its reciprocal."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 7 << 23), 247 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def common_power(x):
    """`power_of_two` of what a block's rows have in common, within 2^-60 and 2^60, and 1 of what is all but 0: so the
    state keeps its range over a block whose keys are zero."""
    x = tl.where(x < 2.0**-60, 1.0, tl.minimum(x, 2.0**60))
    return power_of_two(x)


@triton.jit
def fine_weight(which, g):
    """`exp(which @ g)`, which of zeros and ones, held gates `[slots, channels]`: gates keep 22 bits, down to 2^-32."""
    zero = tl.zeros([which.shape[0], g.shape[1]], tl.float32)
    total = fine_product(((which * 2.0**-7).to(tl.float16),), fine_parts(g * 2.0**7), zero)
    return tl.exp(no_more(total, 0.0))


@triton.jit
def exact_operand(x):
    """Numbers that bf16 holds as an operand."""
    return (x.to(tl.bfloat16),)


@triton.jit
def operand(x, LOW: tl.constexpr):
    """A tensor as an operand."""
    if x.dtype == tl.bfloat16:
        return (x,)
    else:
        rest = x.to(tl.float32)
        high = _pairs(rest)
        rest -= high.to(tl.float32)
        middle = _pairs(rest)
        if LOW:
            return high, middle
        else:
            return high, middle, _pairs(rest - middle.to(tl.float32))


@triton.jit
def flipped(a):
    """The transpose of an operand."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.trans(a[i]),)
    return out


@triton.jit
def product(a, b):
    """`a @ b` of operands, fp32; the smallest terms first, and none below what the parts leave out."""
    MOST: tl.constexpr = max(len(a), len(b))
    out = tl.zeros([a[0].shape[0], b[0].shape[1]], tl.float32)
    for back in tl.static_range(MOST):
        for i in tl.static_range(MOST - back):
            if i < len(a) and MOST - 1 - back - i < len(b):
                out = tl.dot(a[i], b[MOST - 1 - back - i], out)
    return out


@triton.jit
def spread_product(a, b):
    """`product`, each order of terms summed apart: a chain of products that wait for each other is a third as long."""
    MOST: tl.constexpr = max(len(a), len(b))
    sums = ()
    for order in tl.static_range(MOST):
        out = tl.zeros([a[0].shape[0], b[0].shape[1]], tl.float32)
        for i in tl.static_range(order + 1):
            if i < len(a) and order - i < len(b):
                out = tl.dot(a[i], b[order - i], out)
        sums = sums + (out,)
    out = sums[MOST - 1]
    for back in tl.static_range(1, MOST):
        out += sums[MOST - 1 - back]
    return out


@triton.jit
def solved_product(X, b):
    """`X @ b` in float64, fp32, of an inverse. Its rows cancel in a product."""
    return tl.dot(X, b.to(tl.float32).to(tl.float64), out_dtype=tl.float64).to(tl.float32)


@triton.jit
def store_operand(p, x, NEXT: tl.constexpr):
    """Stores fp32 `x` at the pointers `p` as an operand of three parts, which lie NEXT apart."""
    parts = operand(x, False)
    for i in tl.static_range(3):
        tl.store(p + i * NEXT, parts[i])


@triton.jit
def load_operand(p, NEXT: tl.constexpr):
    """What `store_operand` stored."""
    return tl.load(p), tl.load(p + NEXT), tl.load(p + 2 * NEXT)


@triton.jit
def load_matrix(p, BT: tl.constexpr, FLIP: tl.constexpr):
    """`[BT, BT]` at `p`, or its transpose: read as such, since no product takes what `tl.trans` makes of a product."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    if FLIP:
        return tl.load(p + j * BT + i)
    else:
        return tl.load(p + i * BT + j)


@triton.jit
def load_reads(p, block, BT: tl.constexpr, FLIP: tl.constexpr):
    """`reads` of a block and head, or their transpose, as an operand of three parts."""
    return operand(load_matrix(p + block * (BT * BT), BT, FLIP), False)


@triton.jit
def load_solved(p, block, BT: tl.constexpr, FLIP: tl.constexpr):
    """An inverse of `chunk_solve.py`, or its transpose, float64."""
    return load_matrix(p + block * (BT * BT), BT, FLIP)


@triton.jit
def block_place(
    owner, index, starts, lengths, offsets, block, skip, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr
):  # fmt: skip
    """Of a block: the flat token of slot 0, int64, and the first slot that has one, and the first behind it that has
    none."""
    i_seq = tl.load(owner + block)
    lead = tl.load(offsets + i_seq) % CHUNK
    base, low, high, _ = extent(tl.load(index + block) + skip, lead, tl.load(lengths + i_seq), CHUNK, TOKENS, PER)
    return tl.load(starts + i_seq) + base, low, high


@triton.jit
def block_tokens(
    owner, index, starts, lengths, offsets, block, skip, slot,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Tokens of some slots of a block, int64, and which of these slots have one."""
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)
    return base + slot, (slot >= low) & (slot < high)


@triton.jit
def load_rows(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Channels `first` to `first + WIDTH` of rows at `p + row`, as they are, zeros beyond SIZE and outside."""
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None] & (channel < SIZE)[None, :]
    return tl.load(p + row[:, None] + channel[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA: tl.constexpr):
    """beta of slots, 0 where there is no token."""
    if BETA:
        return tl.load(beta + token * beta_token + i_head * beta_head, mask=inside, other=0.0).to(tl.float32)
    else:
        return inside.to(tl.float32)


@triton.jit
def held(g):
    """Gates above -256: `exp` of that, and of any sum with it, is 0 in fp32, and no sum of a block is infinite.

    One above 0, which a device cannot refuse, is NaN: these kernels cut off sums that are.
    """
    g = g.to(tl.float32)
    return tl.where(g > 0.0, float("nan"), no_less(g, _CLEARED))


@triton.jit
def gate_exp(x, LOW: tl.constexpr):
    """`exp(x)` of `x <= 0`."""
    if LOW or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return exact_exp(x)


@triton.jit
def exp2(x):
    """`2**x`, to two units of the last place; on CUDA 0 where it is below 2^-126, which saves four instructions."""
    if is_hip():
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def split_sum(g, REVERSE: tl.constexpr):
    """Running sums of held gates, as two numbers whose differences are sums over a segment, to 1e-8.

    A difference of plain running sums would be off by ulp(16384). Here the first are multiples of 2^-8 below 2^14,
    hence exact, and the second at most 1/8.
    """
    coarse = (g + _COARSE) - _COARSE
    return tl.cumsum(coarse, 0, reverse=REVERSE), tl.cumsum(g - coarse, 0, reverse=REVERSE)


@triton.jit
def after_sum(g):
    """Sums of the held gates behind each slot."""
    coarse, fine = split_sum(g, True)
    g_coarse = (g + _COARSE) - _COARSE
    return (coarse - g_coarse) + (fine - (g - g_coarse))


@triton.jit
def row_weights(g, token, inside, g_token, i_head, g_head, BT: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr):
    """Of a decay by head: each slot's weight from the block's start, and to its end, `[BT]` both."""
    from_start = tl.full([BT], 1.0, tl.float32)
    to_end = tl.full([BT], 1.0, tl.float32)
    if DECAY == 1:
        b_g = held(tl.load(g + token * g_token + i_head * g_head, mask=inside, other=0.0))
        coarse, fine = split_sum(b_g, False)
        from_start = gate_exp(no_more(coarse + fine, 0.0), LOW)
        to_end = gate_exp(no_more(after_sum(b_g), 0.0), LOW)
    return from_start, to_end


@triton.jit
def summed(which, g, LOW: tl.constexpr, WIDE: tl.constexpr):
    """`which @ g`: sums of gates `[.., channels]`, each of its own segment; float64 if WIDE, of 16 bits of each if LOW:
    off by x 2^-17 at most, and `exp` of it by 2^-18, for `x exp(x) < 1 / 2`."""
    if WIDE:
        return tl.dot(which.to(tl.float64), g.to(tl.float64), out_dtype=tl.float64)
    else:
        return no_more(product(exact_operand(which), operand(g, LOW)), 0.0)


@triton.jit
def weights(which, g, LOW: tl.constexpr):
    """`exp(which @ g)`, which of zeros and ones, held gates `[slots, channels]`."""
    if LOW:
        return fine_weight(which, g)
    else:
        return gate_exp(summed(which, g, False, False), False)


@triton.jit
def channel_weight(g, BT: tl.constexpr, END: tl.constexpr, LOW: tl.constexpr):
    """Of a decay by channel, held gates `[BT, ..]`: weights from the block's start, or to its end."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    if END:
        return weights((j > i).to(tl.float32), g, LOW)
    else:
        return weights((j <= i).to(tl.float32), g, LOW)
