"""Matrix products to a wanted precision, sums of gates, and the triangular inverse, inside a program.

An operand is a tuple of tensors that add up to it. PART tells of what type:

    "fp32"  one fp32 tensor; products are as precise as PRECISION (of `tl.dot`) says
    "bf16"  of what came as bf16 that tensor, of an fp32 number two bf16 tensors that hold 16 of its bits: so a product
    of
            bf16 inputs is exact but for its sum in fp32, and any other one to 2^-16
    "fp16"  the same with fp16, for Triton's interpreter, whose bf16 products are wrong; it has not the range for more
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp as exact_exp
from lattn_compile.kernels.common.inputs import no_less, no_more

__all__ = [
    "after_sum",
    "flipped",
    "gate_exp",
    "halves",
    "held",
    "inverse",
    "joined",
    "load_operand",
    "operand",
    "product",
    "segments",
    "shared",
    "store_operand",
    "summed",
    "until_sum",
]

_CLEARED = tl.constexpr(-256.0)
_COARSE = tl.constexpr(1.5 * 2.0**15)  # adding it rounds |x| <= 256 to a multiple of 2^-8
_CORNER = tl.constexpr(16)


@triton.jit
def _pairs(x):
    """fp32 `x` to bf16, two numbers an instruction, as the compiler does not do where it also needs them one by one."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _half(x, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    if PART == "fp16":
        return x.to(tl.float16)
    elif ASSEMBLY:
        return _pairs(x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def operand(x, PART: tl.constexpr, ASSEMBLY: tl.constexpr = True):
    """A tensor as an operand. ASSEMBLY: by PTX, which other than NVIDIA's devices have not."""
    tl.static_assert(PART == "fp32" or PART == "bf16" or PART == "fp16")
    if PART == "fp32":
        return (x.to(tl.float32),)
    elif x.dtype == (tl.bfloat16 if PART == "bf16" else tl.float16):
        return (x,)
    else:
        x = x.to(tl.float32)
        high = _half(x, PART, ASSEMBLY)
        return high, _half(x - high.to(tl.float32), PART, ASSEMBLY)


@triton.jit
def joined(a):
    """What an operand stands for, fp32."""
    if len(a) == 2:
        return a[0].to(tl.float32) + a[1].to(tl.float32)
    else:
        return a[0].to(tl.float32)


@triton.jit
def flipped(a):
    """The transpose of an operand."""
    if len(a) == 2:
        return tl.trans(a[0]), tl.trans(a[1])
    else:
        return (tl.trans(a[0]),)


@triton.jit
def shared(a, G: tl.constexpr):
    """An operand `[m, n]` for G products at once, `[G, m, n]`."""
    if len(a) == 2:
        M: tl.constexpr = a[0].shape[0]
        N: tl.constexpr = a[0].shape[1]
        return tl.broadcast_to(a[0][None, :, :], (G, M, N)), tl.broadcast_to(a[1][None, :, :], (G, M, N))
    else:
        M1: tl.constexpr = a[0].shape[0]
        N1: tl.constexpr = a[0].shape[1]
        return (tl.broadcast_to(a[0][None, :, :], (G, M1, N1)),)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """`a @ b` of operands, fp32; the smallest terms first. PRECISION: of fp32 operands, as in `tl.dot`.

    Triton 3.6 names what it has compiled by the tensors of all arguments in a row: in one kernel, operands of one and
    two parts and of two and one must not have the same shapes. Tests of the compiled kernels look for that.
    """
    if len(a) == 2 and len(b) == 2:
        out = tl.dot(a[1], b[0])
        out = tl.dot(a[0], b[1], out)
        return tl.dot(a[0], b[0], out)
    elif len(a) == 2:
        out = tl.dot(a[1], b[0])
        return tl.dot(a[0], b[0], out)
    elif len(b) == 2:
        out = tl.dot(a[0], b[1])
        return tl.dot(a[0], b[0], out)
    else:
        return tl.dot(a[0], b[0], input_precision=PRECISION)


@triton.jit
def store_operand(p, a, NEXT):
    """Stores an operand of as many parts as PART has at the pointers `p`, the second part NEXT further."""
    tl.store(p, a[0])
    if len(a) == 2:
        tl.store(p + NEXT, a[1])


@triton.jit
def load_operand(p, NEXT, PARTS: tl.constexpr):
    """What `store_operand` stored."""
    if PARTS == 2:
        return tl.load(p), tl.load(p + NEXT)
    else:
        return (tl.load(p),)


@triton.jit
def held(g):
    """Gates above -256: `exp` of that, and of any sum with it, is 0 in fp32, and no sum of a block is infinite."""
    return no_less(g.to(tl.float32), _CLEARED)


@triton.jit
def gate_exp(x, PART: tl.constexpr):
    """`exp(x)` of `x <= 0`."""
    if PART != "fp32" or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return exact_exp(x)


@triton.jit
def _split_sum(g, REVERSE: tl.constexpr):
    """Running sums of held gates `[BT]`, as two numbers whose differences are sums over a segment, to 1e-8.

    A difference of plain running sums would be off by ulp(16384). Here the first are multiples of 2^-8 below 2^14,
    hence exact, and the second at most 1/8.
    """
    coarse = (g + _COARSE) - _COARSE
    return tl.cumsum(coarse, 0, reverse=REVERSE), tl.cumsum(g - coarse, 0, reverse=REVERSE)


@triton.jit
def until_sum(g):
    """Sums of the held gates up to each slot and its own, `[BT]`."""
    coarse, fine = _split_sum(g, False)
    return no_more(coarse + fine, 0.0)


@triton.jit
def after_sum(g):
    """Sums of the held gates behind each slot, `[BT]`."""
    coarse, fine = _split_sum(g, True)
    own = (g + _COARSE) - _COARSE
    return no_more((coarse - own) + (fine - (g - own)), 0.0)


@triton.jit
def segments(g, BT: tl.constexpr, WIDE: tl.constexpr):
    """`g_{j+1} + ... + g_i` of held gates `[BT]`, `[BT, BT]`, -inf for j > i; float64 if WIDE."""
    i = tl.arange(0, BT)
    if WIDE:
        total = tl.cumsum(g.to(tl.float64), 0)
        out = total[:, None] - total[None, :]
    else:
        coarse, fine = _split_sum(g, False)
        out = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.where(i[:, None] >= i[None, :], no_more(out, 0.0), float("-inf"))


@triton.jit
def halves(half, BT: tl.constexpr):
    """0-1 matrix `[BT, BT]`, fp32: the gates between a token and the middle of its 2 `half` tokens."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    later = i // half % 2 == 1
    return ((i // half == j // half) & (later == (j <= i))).to(tl.float32)


@triton.jit
def summed(which, x, PART: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, WIDE: tl.constexpr):
    """`which @ x`, `which` of zeros and ones: sums over slots `[BT, channels]`, each of its own ones; float64 if WIDE.

    In parts with 16 bits of each number: a gate is off by x 2^-17 at most, `exp` of it by 2^-18 (`x exp(x) < 1 / 2`).
    """
    if WIDE:
        return tl.dot(which.to(tl.float64), x.to(tl.float64), out_dtype=tl.float64)
    elif PART == "fp32":
        return tl.dot(which, x, input_precision=PRECISION)
    else:
        # Not by `product`: Triton 3.6 takes its one and two parts for two and one, see `product`.
        one = which.to(tl.bfloat16 if PART == "bf16" else tl.float16)
        parts = operand(x, PART, ASSEMBLY)
        if len(parts) == 2:
            return tl.dot(one, parts[0], tl.dot(one, parts[1]))
        else:
            return tl.dot(one, parts[0])


@triton.jit
def inverse(A, scratch, BT: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """`(I + A)^-1` by forward substitution in 16-blocks, in the dtype of `A`, strictly lower `[BT, BT]`.

    Args:
        scratch: BT * BT numbers of that dtype, of this program alone. Every thread solves for one column of a corner
            and needs all of its rows' coefficients, which come from here, in one load each.
    """
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    place = scratch + row * BT + column
    tl.store(place, A)
    tl.debug_barrier()
    c = tl.arange(0, BT)
    first = c // _CORNER * _CORNER
    corner = scratch + first * BT + first
    rows = ()
    for i in tl.static_range(_CORNER):
        x = tl.where(c - first == i, 1.0, 0.0).to(A.dtype)
        for j in tl.static_range(i):
            x -= tl.load(corner + (i * BT + j)) * rows[j]
        rows = rows + (x,)
    tl.debug_barrier()
    for i in tl.static_range(_CORNER):
        tl.store(scratch + (first + i) * BT + c, rows[i])
    tl.debug_barrier()
    X = tl.load(place, mask=row // _CORNER == column // _CORNER, other=0.0)
    if BT >= 32:
        # Below the corners A still stands there: loaded again rather than kept in registers.
        A = tl.load(place, mask=row // _CORNER > column // _CORNER, other=0.0)
        X = _merged(A, X, 16, BT, PART, ASSEMBLY)
        if BT >= 64:
            X = _merged(A, X, 32, BT, PART, ASSEMBLY)
        tl.debug_barrier()
        tl.store(place, X)
    return X


@triton.jit
def _merged(A, X, HALF: tl.constexpr, BT: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """From the inverse of the diagonal blocks of HALF rows to that of the blocks of twice as many."""
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    below = (row // HALF > column // HALF) & (row // (2 * HALF) == column // (2 * HALF))
    return X - _square(X, _square(tl.where(below, A, 0.0), X, PART, ASSEMBLY), PART, ASSEMBLY)


@triton.jit
def _square(a, b, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    if a.dtype == tl.float64:
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return product(operand(a, PART, ASSEMBLY), operand(b, PART, ASSEMBLY), "ieee")
