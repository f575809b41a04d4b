"""The triangular inverse of the delta rule in chunk form: `(I + beta overlaps)^-1` of every block.

Forward substitution in 16-blocks, as `reference/wy.py`: doubling is wrong by up to 1e19 for repeated keys.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import operand, product

__all__ = ["solve"]

_CORNER = tl.constexpr(16)


@triton.jit(do_not_specialize=["HV"])
def solve(
    owner, strengths, overlaps, solved, HV, BT: tl.constexpr
):  # fmt: skip
    """Args:
        owner: of `Schedule`. strengths, overlaps: of `pairs_head`.
        solved: `[NB, HV, BT, BT]` in the dtype of overlaps, the inverse.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    if tl.load(owner + pid // HV) < 0:
        return
    at = pid.to(tl.int64) * (BT * BT)
    A, X, beta = overlaps + at, solved + at, strengths + pid.to(tl.int64) * BT
    # Every thread solves for one column of a corner, and loads the corner's coefficients row by row.
    c = tl.arange(0, BT)
    first = c // _CORNER * _CORNER
    rows = ()
    for i in tl.static_range(_CORNER):
        total = tl.zeros([BT], overlaps.dtype.element_ty)
        for j in tl.static_range(i):
            total += tl.load(A + (first + i) * BT + first + j) * rows[j]
        x = tl.where(c - first == i, 1.0, 0.0).to(total.dtype) - tl.load(beta + first + i).to(total.dtype) * total
        rows = rows + (x,)  # type: ignore[assignment] # noqa: RUF005
    for i in tl.static_range(_CORNER):
        tl.store(X + (first + i) * BT + c, rows[i])
    if BT >= 32:
        tl.debug_barrier()
        for pair in tl.static_range(BT // 32):
            _merge(A, X, beta, pair * 32, 16, BT)
    if BT >= 64:
        tl.debug_barrier()
        _merge(A, X, beta, 0, 32, BT)
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    place = row * BT + column
    zero = tl.zeros([BT, BT], overlaps.dtype.element_ty)
    tl.store(X + place, zero, mask=column // _CORNER > row // _CORNER)


@triton.jit
def _merge(A, X, beta, at, HALF: tl.constexpr, BT: tl.constexpr):
    """From the inverses of two diagonal blocks of HALF rows from row `at` on to that of both: the part below."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    low = j <= i
    early = tl.load(X + (at + i) * BT + at + j, mask=low, other=0.0)
    late = tl.load(X + (at + HALF + i) * BT + at + HALF + j, mask=low, other=0.0)
    between = tl.load(A + (at + HALF + i) * BT + at + j)
    between = between * tl.load(beta + at + HALF + tl.arange(0, HALF)).to(between.dtype)[:, None]
    tl.store(X + (at + HALF + i) * BT + at + j, -_square(late, _square(between, early)))


@triton.jit
def _square(a, b):
    if a.dtype == tl.float64:
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return product(operand(a, False), operand(b, False))
