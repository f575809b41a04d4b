"""The triangular inverse of the delta rule in chunk form: `(I + beta overlaps)^-1` of every block.

Forward substitution in 16-blocks, as `reference/wy.py`: doubling is wrong by up to 1e19 for repeated keys.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import common_power, fine_parts, power_of_two, wide_parts
from lattn_compile.kernels.chunk_rows import BETA_ROW, KEY_ROW, LIFT_ROW, MOST_ROW

__all__ = ["solve", "solve_fine"]

_CORNER = tl.constexpr(16)
_DOWN = tl.constexpr(2.0**-8)  # rows of the inverse come up to 2^9, so that their last part keeps its bits in fp16


@triton.jit(do_not_specialize=["HV"])
def solve_fine(
    owner, factors, overlaps, inverse, solved, turned, HV, BT: tl.constexpr, PARTS: tl.constexpr, TURN: tl.constexpr
):  # fmt: skip
    """Args:
        owner: of `Schedule`. factors: of `chunk_rows.py`; gets LIFT, and KEY and MOST with it.
        overlaps: float64 `[NB, HV, BT, BT]`, strictly lower. inverse: likewise, maybe the same, for this kernel alone.
        solved: fp16 `[NB, HV, PARTS, BT, BT]`, the inverse in `fine_parts`, or in three, its rows divided by LIFT.
        turned: under TURN, that transposed.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    if tl.load(owner + pid // HV) < 0:
        return
    X, p = inverse + pid.to(tl.int64) * (BT * BT), factors + pid.to(tl.int64) * (10 * BT)
    _inverted(overlaps + pid.to(tl.int64) * (BT * BT), X, p + BETA_ROW * BT, BT)
    tl.debug_barrier()
    c = tl.arange(0, BT)
    largest = 0.0
    for tile in tl.static_range(BT // _CORNER):  # in float64, all rows at once would leave the registers
        i = tile * _CORNER + tl.arange(0, _CORNER)
        place = i[:, None] * BT + c[None, :]
        T = tl.load(X + place, mask=c[None, :] <= i[:, None], other=0.0)
        lift, down = power_of_two(tl.max(tl.abs(T.to(tl.float32)), 1) * _DOWN)
        T = T * down.to(tl.float64)[:, None]
        if PARTS == 3:
            parts = wide_parts(T)
        else:
            parts = fine_parts(T.to(tl.float32))
        for part in tl.static_range(PARTS):
            at = (pid.to(tl.int64) * PARTS + part) * (BT * BT)
            tl.store(solved + at + place, parts[part])
            if TURN:
                tl.store(turned + at + c[:, None] * BT + i[None, :], tl.trans(parts[part]))
        key = tl.load(p + KEY_ROW * BT + i) * lift
        tl.store(p + LIFT_ROW * BT + i, lift)
        tl.store(p + KEY_ROW * BT + i, key)
        largest = tl.maximum(largest, tl.max(key, 0))
    tl.debug_barrier()
    most, less = common_power(largest)
    tl.store(p + KEY_ROW * BT + c, tl.load(p + KEY_ROW * BT + c) * less)
    tl.store(p + MOST_ROW * BT + c, tl.load(p + MOST_ROW * BT + c) * most)


@triton.jit(do_not_specialize=["HV"])
def solve(owner, strengths, overlaps, solved, HV, BT: tl.constexpr):
    """Args:
        owner: of `Schedule`. strengths, overlaps: of `pairs_head`.
        solved: the inverse, float64 `[NB, HV, BT, BT]`.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    if tl.load(owner + pid // HV) < 0:
        return
    at = pid.to(tl.int64) * (BT * BT)
    _inverted(overlaps + at, solved + at, strengths + pid.to(tl.int64) * BT, BT)
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    zero = tl.zeros([BT, BT], tl.float64)
    tl.store(solved + at + row * BT + column, zero, mask=column // _CORNER > row // _CORNER)


@triton.jit
def _inverted(A, X, beta, BT: tl.constexpr):
    """Writes `(I + beta A)^-1` to X, which may be A, but for what lies above the diagonal's corners; all float64."""
    # Every thread solves for one column of a corner, and loads the corner's coefficients row by row.
    c = tl.arange(0, BT)
    first = c // _CORNER * _CORNER
    rows = ()
    for i in tl.static_range(_CORNER):
        total = tl.zeros([BT], tl.float64)
        for j in tl.static_range(i):
            total += tl.load(A + (first + i) * BT + first + j) * rows[j]
        x = tl.where(c - first == i, 1.0, 0.0).to(tl.float64) - tl.load(beta + first + i).to(tl.float64) * total
        rows = rows + (x,)  # type: ignore[assignment] # noqa: RUF005
    tl.debug_barrier()
    for i in tl.static_range(_CORNER):
        tl.store(X + (first + i) * BT + c, rows[i])
    if BT >= 32:
        tl.debug_barrier()
        for pair in tl.static_range(BT // 32):
            _merge(A, X, beta, pair * 32, 16, BT)
    if BT >= 64:
        tl.debug_barrier()
        _merge(A, X, beta, 0, 32, BT)


@triton.jit
def _merge(A, X, beta, at, HALF: tl.constexpr, BT: tl.constexpr):
    """From the inverses of two diagonal blocks of HALF rows from row `at` on to that of both: the part below."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    p_early, p_late = X + (at + i) * BT + at + j, X + (at + HALF + i) * BT + at + HALF + j
    p_below = (at + HALF + i) * BT + at + j
    between = tl.load(A + p_below)
    between = between * tl.load(beta + at + HALF + tl.arange(0, HALF)).to(between.dtype)[:, None]
    early, late = tl.load(p_early, mask=j <= i, other=0.0), tl.load(p_late, mask=j <= i, other=0.0)
    below = tl.dot(late, tl.dot(between, early, out_dtype=tl.float64), out_dtype=tl.float64)
    tl.debug_barrier()
    tl.store(X + p_below, -below)
