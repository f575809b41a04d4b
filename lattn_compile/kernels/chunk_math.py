"""Inside a program of the chunk kernels: products to a wanted precision, sums of gates, loads of a block's rows.

An operand of a product is a tuple of bf16 tensors that add up to it: of what came as bf16 that tensor, of an fp32
number two that hold 16 of its bits where inputs are bf16 (`LOW`), else three with all 24. So a product of bf16 inputs
is exact but for its sum in fp32, and any other one to 2^-16 or 2^-24. One bf16 tensor for every operand, as is common,
puts the state off by 2e-3, and by 5e-2 for one repeated key with beta = 1.9; two by 4e-6, and there by 4e-5, since
what alternates in sign, and so cancels, keeps 24 bits: the inverse, updates and their gradients.

Where inputs are not bf16, the delta rule's matrix `A`, the inverse of `I + A` and products with it are float64: in fp32
their rounding errors are amplified by the norm of the inverse (`reference/wy.py`).

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

__all__ = [
    "after_sum",
    "block_tokens",
    "channel_weight",
    "exact_operand",
    "flipped",
    "gate_exp",
    "held",
    "load_beta",
    "load_matrix",
    "load_operand",
    "load_parts",
    "load_reads",
    "load_rows",
    "load_solved",
    "operand",
    "product",
    "row_weights",
    "solved_product",
    "split_sum",
    "spread_product",
    "store_operand",
    "store_parts",
    "summed",
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
def solved_product(X, b, LOW: tl.constexpr):
    """`X @ b`, fp32, of an inverse: in its dtype, or with all its bits. Rows of an inverse cancel in a product."""
    if X.dtype == tl.float64:
        return tl.dot(X, b.to(tl.float32).to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        return product(operand(X, False), operand(b, LOW))


@triton.jit
def store_operand(p, x, NEXT: tl.constexpr, LOW: tl.constexpr):
    """Stores fp32 `x` at the pointers `p` as an operand, whose parts lie NEXT apart."""
    parts = operand(x, LOW)
    for i in tl.static_range(len(parts)):
        tl.store(p + i * NEXT, parts[i])


@triton.jit
def load_operand(p, NEXT: tl.constexpr, LOW: tl.constexpr):
    """What `store_operand` stored."""
    if LOW:
        return tl.load(p), tl.load(p + NEXT)
    else:
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
def load_parts(p, BT: tl.constexpr, PARTS: tl.constexpr, FLIP: tl.constexpr):
    """A `[BT, BT]` operand of PARTS parts at `p`, or its transpose."""
    out = ()
    for i in tl.static_range(PARTS):
        out = out + (load_matrix(p + i * (BT * BT), BT, FLIP),)
    return out


@triton.jit
def store_parts(p, x, mask, BT: tl.constexpr, LOW: tl.constexpr):
    """Stores `x` at pointers `p` into a `[BT, BT]` operand, in two parts if LOW, else three."""
    parts = operand(x, LOW)
    for i in tl.static_range(len(parts)):
        tl.store(p + i * (BT * BT), parts[i], mask=mask)


@triton.jit
def load_reads(p, block, BT: tl.constexpr, FLIP: tl.constexpr, LOW: tl.constexpr):
    """`reads` of a block and head, of a decay by channel if LOW, or their transpose, as an operand."""
    if LOW:
        return load_parts(p + block * (2 * BT * BT), BT, 2, FLIP)
    else:
        return operand(load_matrix(p + block * (BT * BT), BT, FLIP), False)


@triton.jit
def load_solved(p, block, BT: tl.constexpr, FLIP: tl.constexpr, LOW: tl.constexpr):
    """An inverse of `chunk_solve.py`, or its transpose: fp32 if LOW, else float64."""
    if LOW:
        high, middle, low = load_parts(p + block * (3 * BT * BT), BT, 3, FLIP)
        return (high.to(tl.float32) + middle.to(tl.float32)) + low.to(tl.float32)
    else:
        return load_matrix(p + block * (BT * BT), BT, FLIP)


@triton.jit
def block_tokens(
    owner, index, starts, lengths, offsets, block, skip, slot,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Tokens of some slots of a block, int64, and which of these slots have one."""
    i_seq = tl.load(owner + block)
    lead = tl.load(offsets + i_seq) % CHUNK
    base, low, high, _ = extent(tl.load(index + block) + skip, lead, tl.load(lengths + i_seq), CHUNK, TOKENS, PER)
    return tl.load(starts + i_seq) + base + slot, (slot >= low) & (slot < high)


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
    """Gates above -256: `exp` of that, and of any sum with it, is 0 in fp32, and no sum of a block is infinite."""
    return tl.maximum(g.to(tl.float32), _CLEARED)


@triton.jit
def gate_exp(x, LOW: tl.constexpr):
    """`exp(x)` of `x <= 0`."""
    if LOW or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return exact_exp(x)


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
        from_start = gate_exp(tl.minimum(coarse + fine, 0.0), LOW)
        to_end = gate_exp(tl.minimum(after_sum(b_g), 0.0), LOW)
    return from_start, to_end


@triton.jit
def summed(which, g, LOW: tl.constexpr, WIDE: tl.constexpr):
    """`which @ g`: sums of gates `[.., channels]`, each of its own segment; float64 if WIDE.

    On tensor cores with 16 bits of each gate: off by x 2^-17 at most, and `exp` of it by 2^-18, for `x exp(x) < 1 / 2`.
    """
    if WIDE:
        return tl.dot(which.to(tl.float64), g.to(tl.float64), out_dtype=tl.float64)
    else:
        return tl.minimum(product(exact_operand(which), operand(g, LOW)), 0.0)


@triton.jit
def channel_weight(g, BT: tl.constexpr, END: tl.constexpr, LOW: tl.constexpr):
    """Of a decay by channel, held gates `[BT, ..]`: weights from the block's start, or to its end."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    if END:
        return gate_exp(summed((j > i).to(tl.float32), g, LOW, False), LOW)
    else:
        return gate_exp(summed((j <= i).to(tl.float32), g, LOW, False), LOW)
