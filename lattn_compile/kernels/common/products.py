"""Matrix products to a wanted precision, sums of gates, and the triangular inverse, inside a program.

An operand is a tuple of tensors that add up to it. PART tells of what type:

    "fp32"      one fp32 tensor, of a float64 number two; products are as precise as PRECISION (of `tl.dot`) says
    "bf16"      of what came as bf16 that tensor, of an fp32 number three bf16 tensors, which hold all its bits;
                `coarse` leaves the first two, 16 bits. So a product of bf16 inputs is exact but for its sum in fp32.
                Of a float64 number four, with 32 of its bits
    "emulated"  the same numbers in fp32 tensors, for Triton's interpreter, whose bf16 products are wrong
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
    "coarse",
    "fixed",
    "fixed_product",
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
_STEPS_8 = tl.constexpr(1.5 * 2.0**15)  # adding it rounds |x| <= 1 to a multiple of 2^-8
_STEPS_16 = tl.constexpr(1.5 * 2.0**7)  # likewise |x| <= 2^-9 of 2^-16


@triton.jit
def _pairs(x):
    """fp32 `x` to bf16, two numbers an instruction, as the compiler does not do where it also needs them one by one."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _half(x, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp32 `x` rounded to bf16's 8 bits."""
    if PART == "emulated":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    elif ASSEMBLY:
        return _pairs(x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def operand(x, PART: tl.constexpr, ASSEMBLY: tl.constexpr = True):
    """A tensor as an operand. ASSEMBLY: by PTX, which other than NVIDIA's devices have not."""
    tl.static_assert(PART == "fp32" or PART == "bf16" or PART == "emulated")
    if x.dtype == tl.float64:
        high = x.to(tl.float32)
        low = (x - high.to(tl.float64)).to(tl.float32)
        if PART == "fp32":
            return high, low
        else:
            return operand(high, PART, ASSEMBLY) + (_half(low, PART, ASSEMBLY),)
    elif PART == "fp32":
        return (x.to(tl.float32),)
    elif x.dtype == tl.bfloat16:
        if PART == "emulated":
            return (x.to(tl.float32),)
        else:
            return (x,)
    else:
        x = x.to(tl.float32)
        high = _half(x, PART, ASSEMBLY)
        rest = x - high.to(tl.float32)
        middle = _half(rest, PART, ASSEMBLY)
        return high, middle, _half(rest - middle.to(tl.float32), PART, ASSEMBLY)


@triton.jit
def coarse(a):
    """An operand to 16 bits, where no more are wanted."""
    if len(a) == 3:
        return a[0], a[1]
    else:
        return a


@triton.jit
def joined(a):
    """What an operand stands for, fp32."""
    total = a[len(a) - 1].to(tl.float32)
    for i in tl.static_range(1, len(a)):
        total = a[len(a) - 1 - i].to(tl.float32) + total
    return total


@triton.jit
def flipped(a):
    """The transpose of an operand."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.trans(a[i]),)
    return out


@triton.jit
def shared(a, G: tl.constexpr):
    """An operand `[m, n]` for G products at once, `[G, m, n]`."""
    M: tl.constexpr = a[0].shape[0]
    N: tl.constexpr = a[0].shape[1]
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.broadcast_to(a[i][None, :, :], (G, M, N)),)
    return out


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WAY: tl.constexpr = 0):
    """`a @ b` of operands, fp32; the smallest terms first. PRECISION: of fp32 operands, as in `tl.dot`.

    Terms below the last bits of the result are left out: those of parts whose places add up to more than that of the
    last part of either.

    Triton 3.6 names what it has compiled by the tensors of all arguments in a row: in one kernel, operands of one and
    three parts, of three and one and of two and two must not have the same shapes, or else another WAY, which does
    nothing but be part of the name. Tests of the compiled kernels look for that.
    """
    A: tl.constexpr = len(a)
    B: tl.constexpr = len(b)
    LAST: tl.constexpr = (A if A > B else B) - 1
    out = tl.dot(a[A - 1], b[LAST - A + 1], input_precision=PRECISION)
    for place in tl.static_range(LAST + 1):
        for i in tl.static_range(A):
            # The first of all stands above.
            if (LAST - place - i >= 0) and (LAST - place - i < B) and (place > 0 or i != A - 1):
                out = tl.dot(a[i], b[LAST - place - i], out, input_precision=PRECISION)
    return out


@triton.jit
def fixed(x, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp32 `|x| <= 1` as three tensors of an operand's type: a multiple of 2^-8, of 2^-16, and the rest to 2^-26."""
    first = (x + _STEPS_8) - _STEPS_8
    rest = x - first
    second = (rest + _STEPS_16) - _STEPS_16
    return _half(first, PART, ASSEMBLY), _half(second, PART, ASSEMBLY), _half(rest - second, PART, ASSEMBLY)


@triton.jit
def fixed_product(a, b):
    """`a @ b` of what `fixed` made, as three fp32 numbers whose sum in float64 is right to 2^-30 or so: the first two
    are sums of products of few bits, hence exact where vectors have norms up to 1."""
    second = tl.dot(a[0], b[1], tl.dot(a[1], b[0]))
    third = tl.dot(a[0], b[2], tl.dot(a[2], b[0], tl.dot(a[1], b[1])))
    return tl.dot(a[0], b[0]), second, third


@triton.jit
def store_operand(p, a, NEXT):
    """Stores an operand at the pointers `p`, every further part NEXT behind the last."""
    for i in tl.static_range(len(a)):
        tl.store(p + i * NEXT, a[i])


@triton.jit
def load_operand(p, NEXT, PARTS: tl.constexpr):
    """What `store_operand` stored, or its first PARTS."""
    out = ()
    for i in tl.static_range(PARTS):
        out = out + (tl.load(p + i * NEXT),)
    return out


@triton.jit
def held(g):
    """Gates above -256: `exp` of that, and of any sum with it, is 0 in fp32, and no sum of a block is infinite."""
    return no_less(g.to(tl.float32), _CLEARED)


@triton.jit
def gate_exp(x, FAST: tl.constexpr = False):
    """`exp(x)` of `x <= 0`. FAST: the hardware's, off by up to two units of the last place, for what no state is
    multiplied with."""
    if FAST or x.dtype == tl.float64:
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

    In as many parts as there are: `exp` of a gate that is off by x 2^-17 would be off by 2^-18.
    """
    if WIDE:
        return tl.dot(which.to(tl.float64), x.to(tl.float64), out_dtype=tl.float64)
    elif PART == "fp32":
        return tl.dot(which, x, input_precision=PRECISION)
    else:
        # Not by `product`, whose other products here have the shapes of these.
        parts = operand(x, PART, ASSEMBLY)
        one = which.to(parts[0].dtype)
        out = tl.dot(one, parts[len(parts) - 1])
        for i in tl.static_range(1, len(parts)):
            out = tl.dot(one, parts[len(parts) - 1 - i], out)
        return out


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
