"""The triangular inverse of the delta rule in chunk form: `(I + beta overlaps)^-1` of every block.

Forward substitution in 16-blocks, as `reference/wy.py`: doubling is wrong by up to 1e19 for repeated keys.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import operand, product, store_parts

__all__ = ["solve"]

_CORNER = tl.constexpr(16)


@triton.jit(do_not_specialize=["HV"])
def solve(
    owner, strengths, overlaps, solved, HV, BT: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Args:
        owner: of `Schedule`. strengths, overlaps: of `pairs_head`.
        solved: the inverse: under LOW bf16 `[NB, HV, 3, BT, BT]`, an operand with 24 bits; else float64
            `[NB, HV, BT, BT]`.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    if tl.load(owner + pid // HV) < 0:
        return
    at = pid.to(tl.int64) * (BT * BT)
    A, X, beta = overlaps + at, solved + at * (3 if LOW else 1), strengths + pid.to(tl.int64) * BT
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
        _store(X + (first + i) * BT + c, rows[i], None, BT, LOW)
    if BT >= 32:
        tl.debug_barrier()
        for pair in tl.static_range(BT // 32):
            _merge(A, X, beta, pair * 32, 16, BT, LOW)
    if BT >= 64:
        tl.debug_barrier()
        _merge(A, X, beta, 0, 32, BT, LOW)
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    zero = tl.zeros([BT, BT], overlaps.dtype.element_ty)
    _store(X + row * BT + column, zero, column // _CORNER > row // _CORNER, BT, LOW)


@triton.jit
def _store(p, x, mask, BT: tl.constexpr, LOW: tl.constexpr):
    if LOW:
        store_parts(p, x, mask, BT, False)
    else:
        tl.store(p, x, mask=mask)


@triton.jit
def _merge(A, X, beta, at, HALF: tl.constexpr, BT: tl.constexpr, LOW: tl.constexpr):
    """From the inverses of two diagonal blocks of HALF rows from row `at` on to that of both: the part below."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    p_early, p_late = X + (at + i) * BT + at + j, X + (at + HALF + i) * BT + at + HALF + j
    p_below = (at + HALF + i) * BT + at + j
    between = tl.load(A + p_below)
    between = between * tl.load(beta + at + HALF + tl.arange(0, HALF)).to(between.dtype)[:, None]
    if LOW:
        early, late = _load(p_early, j <= i, BT), _load(p_late, j <= i, BT)
        below = product(late, operand(product(operand(between, False), early), False))
    else:
        early, late = tl.load(p_early, mask=j <= i, other=0.0), tl.load(p_late, mask=j <= i, other=0.0)
        below = tl.dot(late, tl.dot(between, early, out_dtype=tl.float64), out_dtype=tl.float64)
    _store(X + p_below, -below, None, BT, LOW)


@triton.jit
def _load(p, mask, BT: tl.constexpr):
    return (
        tl.load(p, mask=mask, other=0.0),
        tl.load(p + BT * BT, mask=mask, other=0.0),
        tl.load(p + 2 * BT * BT, mask=mask, other=0.0),
    )
