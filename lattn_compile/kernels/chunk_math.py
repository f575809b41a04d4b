"""Inside a program of the chunk kernels: products to a wanted precision, sums of gates, the triangular inverse.

An operand of a product is a tuple of tensors that add up to it: of what came as bf16 that tensor, of an fp32 number two
bf16 tensors that hold 16 of its bits, and where inputs are fp32 one fp32 tensor (`LOW` tells which). So a product of
bf16 inputs is exact but for its sum in fp32, and any other one to 2^-16. One bf16 tensor for every operand, as is
common, puts the state off by 2e-3, and by 5e-2 for one repeated key with beta = 1.9.

Where inputs are fp32, the delta rule's matrix `A` and the inverse of `I + A` are float64: in fp32 their rounding errors
are amplified by the norm of the inverse (`reference/wy.py`).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp as exact_exp

__all__ = [
    "after_sum",
    "flipped",
    "gate_exp",
    "held",
    "inverse",
    "load_operand",
    "operand",
    "product",
    "segments",
    "split_sum",
    "store_operand",
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
def operand(x, LOW: tl.constexpr):
    """A tensor as an operand."""
    if LOW:
        if x.dtype == tl.bfloat16:
            return (x,)
        else:
            high = _pairs(x)
            return high, _pairs(x - high.to(tl.float32))
    else:
        return (x.to(tl.float32),)


@triton.jit
def flipped(a):
    """The transpose of an operand."""
    if len(a) == 2:
        return tl.trans(a[0]), tl.trans(a[1])
    else:
        return (tl.trans(a[0]),)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """`a @ b` of operands, fp32; the smallest terms first. PRECISION: of fp32 operands, as in `tl.dot`."""
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
def store_operand(p, x, NEXT: tl.constexpr, LOW: tl.constexpr):
    """Stores fp32 `x` at the pointers `p` as an operand, whose second part lies NEXT further."""
    if LOW:
        high, low = operand(x, LOW)
        tl.store(p, high)
        tl.store(p + NEXT, low)
    else:
        tl.store(p, x)


@triton.jit
def load_operand(p, NEXT: tl.constexpr, LOW: tl.constexpr):
    """What `store_operand` stored."""
    if LOW:
        return tl.load(p), tl.load(p + NEXT)
    else:
        return (tl.load(p),)


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
    """Running sums of held gates `[BT]`, as two numbers whose differences are sums over a segment, to 1e-8.

    A difference of plain running sums would be off by ulp(16384). Here the first are multiples of 2^-8 below 2^14,
    hence exact, and the second at most 1/8.
    """
    coarse = (g + _COARSE) - _COARSE
    return tl.cumsum(coarse, 0, reverse=REVERSE), tl.cumsum(g - coarse, 0, reverse=REVERSE)


@triton.jit
def after_sum(g):
    """Sums of the held gates behind each slot, `[BT]`."""
    coarse, fine = split_sum(g, True)
    g_coarse = (g + _COARSE) - _COARSE
    return (coarse - g_coarse) + (fine - (g - g_coarse))


@triton.jit
def segments(g, BT: tl.constexpr, WIDE: tl.constexpr):
    """`g_{j+1} + ... + g_i` of held gates `[BT]`, `[BT, BT]`, -inf for j > i; float64 if WIDE."""
    i = tl.arange(0, BT)
    if WIDE:
        total = tl.cumsum(g.to(tl.float64), 0)
        out = total[:, None] - total[None, :]
    else:
        coarse, fine = split_sum(g, False)
        out = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.where(i[:, None] >= i[None, :], tl.minimum(out, 0.0), float("-inf"))


@triton.jit
def inverse(A, scratch, BT: tl.constexpr):
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
        rows = rows + (x,)  # type: ignore[assignment] # noqa: RUF005
    tl.debug_barrier()
    for i in tl.static_range(_CORNER):
        tl.store(scratch + (first + i) * BT + c, rows[i])
    tl.debug_barrier()
    X = tl.load(place, mask=row // _CORNER == column // _CORNER, other=0.0)
    # Below the corners A still stands there: loaded again rather than kept in registers.
    A = tl.load(place, mask=row // _CORNER > column // _CORNER, other=0.0)
    tl.debug_barrier()  # the caller may store the result here
    if BT >= 32:
        X = _merged(A, X, 16, BT)
    if BT >= 64:
        X = _merged(A, X, 32, BT)
    return X


@triton.jit
def _merged(A, X, HALF: tl.constexpr, BT: tl.constexpr):
    """From the inverse of the diagonal blocks of HALF rows to that of the blocks of twice as many."""
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    below = (row // HALF > column // HALF) & (row // (2 * HALF) == column // (2 * HALF))
    return X - _square(X, _square(tl.where(below, A, 0.0), X))


@triton.jit
def _square(a, b):
    if a.dtype == tl.float64:
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return product(operand(a, True), operand(b, True), "ieee")
