"""The triangular inverse of a chunk as a policy asks for it (`reference/inverse.py`), as the operand of `w` and `u`.

Everything is fp32, products keep 24 bits. "exact" is forward substitution in 16-blocks, as in `chunk_solve.py`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import operand, product
from lattn_compile.kernels.prefill_codec import site, store_site

__all__ = ["solve"]

_CORNER = tl.constexpr(16)


@triton.jit(do_not_specialize=["HV"])
def solve(
    owner, strengths, overlaps, inverses, residuals, w_left, w_scale, u_left, u_scale, HV,
    BT: tl.constexpr, METHOD: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Args:
        strengths, overlaps: of `prefill_pairs.py`; A is one times the other. inverses: T, fp32 `[NB, HV, BT, BT]`.
        residuals: fp32 `[NB, HV]`, `‖(I + A) T − I‖`, -1 where there is no chunk; None of an exact T.
        w_left, u_left: `[NB, HV, parts, BT, BT]`, T as the left operand of w and u, in the formats W and U, three parts
            where these are ""; w_scale, u_scale: fp32 `[NB, HV, BT]`. u_left is None where it would be w_left.
        METHOD: "exact", "neumann", "newton_schulz" or "block_doubling", with COUNT as its number.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    if tl.load(owner + pid // HV) < 0:
        if residuals is not None:
            tl.store(residuals + pid, -1.0)
        return
    at = pid.to(tl.int64) * (BT * BT)
    A, X, beta = overlaps + at, inverses + at, strengths + pid.to(tl.int64) * BT
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    place = row * BT + column
    one = (row == column).to(tl.float32)
    if METHOD == "exact" or METHOD == "block_doubling":
        if METHOD == "exact":
            _substituted_corners(A, X, beta, BT)
        else:
            _doubled_corners(A, X, beta, COUNT, BT)
        tl.store(X + place, tl.zeros([BT, BT], tl.float32), mask=column // _CORNER > row // _CORNER)
        tl.debug_barrier()
        for pair in tl.static_range(BT // 32):
            _merge(A, X, beta, pair * 32, 16, BT)
        tl.debug_barrier()
        if BT >= 64:
            _merge(A, X, beta, 0, 32, BT)
            tl.debug_barrier()
        T = tl.load(X + place)
    else:
        b_A = tl.load(A + place) * tl.load(beta + row)
        T = one
        for _ in range(COUNT):
            if METHOD == "neumann":
                T = one - _square(b_A, T)
            else:
                T = _square(T, 2.0 * one - (T + _square(b_A, T)))
        tl.store(X + place, T)
    if residuals is not None:
        off = (T - one) + _square(tl.load(A + place) * tl.load(beta + row), T)
        tl.store(residuals + pid, tl.sqrt(tl.sum(tl.sum(off * off, 1), 0)))
    _deliver(T, w_left, w_scale, pid, place, BT, W)
    if u_left is not None:
        _deliver(T, u_left, u_scale, pid, place, BT, U)


@triton.jit
def _deliver(T, left, scale, pid, place, BT: tl.constexpr, FORMAT: tl.constexpr):
    a, factor = site(T, 1, FORMAT, False)
    store_site(left, pid.to(tl.int64), place, a, BT * BT)
    tl.store(scale + pid.to(tl.int64) * BT + tl.arange(0, BT), factor)


@triton.jit
def _square(a, b):
    return product(operand(a, False), operand(b, False))


@triton.jit
def _doubled_corners(A, X, beta, BLOCK: tl.constexpr, BT: tl.constexpr):
    """T's diagonal 16-blocks at `X`: `(I - A)(I + A^2)(I + A^4)...` in blocks of 8, combined, or 16."""
    row, column = tl.arange(0, _CORNER)[:, None], tl.arange(0, _CORNER)[None, :]
    for corner in range(BT // _CORNER):
        place = corner * (_CORNER * (BT + 1)) + row * BT + column
        b_A = tl.load(A + place) * tl.load(beta + corner * _CORNER + row)
        power = tl.where(row // BLOCK == column // BLOCK, b_A, 0.0)
        T = (row == column).to(tl.float32) - power
        for _ in tl.static_range(2 if BLOCK == 8 else 3):
            power = _square(power, power)
            T = T + _square(T, power)
        if BLOCK == 8:
            T = T - _square(T, _square(tl.where(row // BLOCK > column // BLOCK, b_A, 0.0), T))
        tl.store(X + place, T)


@triton.jit
def _substituted_corners(A, X, beta, BT: tl.constexpr):
    """T's diagonal 16-blocks at `X` by forward substitution."""
    # Every thread solves for one column of a corner, and loads the corner's coefficients row by row.
    c = tl.arange(0, BT)
    first = c // _CORNER * _CORNER
    rows = ()
    for i in tl.static_range(_CORNER):
        total = tl.zeros([BT], tl.float32)
        for j in tl.static_range(i):
            total += tl.load(A + (first + i) * BT + first + j) * rows[j]
        x = tl.where(c - first == i, 1.0, 0.0) - tl.load(beta + first + i) * total
        rows = rows + (x,)  # type: ignore[assignment] # noqa: RUF005
    for i in tl.static_range(_CORNER):
        tl.store(X + (first + i) * BT + c, rows[i])


@triton.jit
def _merge(A, X, beta, at, HALF: tl.constexpr, BT: tl.constexpr):
    """From the inverses of two diagonal blocks of HALF rows from row `at` on to that of both: the part below."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    p_below = (at + HALF + i) * BT + at + j
    early = tl.load(X + (at + i) * BT + at + j, mask=j <= i, other=0.0)
    late = tl.load(X + (at + HALF + i) * BT + at + HALF + j, mask=j <= i, other=0.0)
    between = tl.load(A + p_below) * tl.load(beta + at + HALF + i)
    tl.store(X + p_below, -_square(late, _square(between, early)))
