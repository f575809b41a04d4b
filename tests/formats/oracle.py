"""The codecs of semantics §3 once more, slowly: exact rationals, one explicit rounding at a time, one value at a time.

Shares nothing with the package but the specification. States are lists of rows, numbers are Python floats (which hold
fp32 exactly); results carry the sign of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

Rows = list[list[float]]
FP32, FP64, RN16, E4M3, E2M1 = (24, -149), (53, -1074), (16, None), (4, -9), (2, -1)
TINY = 2.0**-100


def rounded(x: Fraction, grid: tuple[int, int | None]) -> Fraction:
    """`x` to `grid` = (significant bits, exponent of the smallest spacing), nearest, ties to even."""
    if x == 0:
        return x
    digits, lowest = grid
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    spacing = exponent - digits + 1 if lowest is None else max(exponent - digits + 1, lowest)
    unit = Fraction(2) ** spacing
    return round(x / unit) * unit  # Fraction's round is half-even


def clamped(x: Fraction, limit: int) -> Fraction:
    return max(min(x, Fraction(limit)), Fraction(-limit))


def int8_code(y: Fraction, x: float) -> float:
    return float(round(clamped(y, 127)))


def fp8_code(y: Fraction, x: float) -> float:
    return math.copysign(float(rounded(clamped(y, 448), E4M3)), x)


def fp4_code(y: Fraction, x: float) -> float:
    return math.copysign(float(rounded(clamped(y, 6), E2M1)), x)


def ranges(size: int, block: int | None) -> list[range]:
    block = block or size
    return [range(i, min(i + block, size)) for i in range(0, size, block)]


def tiled(
    S: Rows,
    block_k: int | None,
    block_v: int | None,
    largest: int,
    code: Callable[[Fraction, float], float],
    grid: tuple[int, int | None],
) -> tuple[Rows, Rows, Rows]:
    """(code values, scales, decoded values) of int8 and fp8."""
    codes = [[0.0] * len(S[0]) for _ in S]
    values = [[0.0] * len(S[0]) for _ in S]
    scales = []
    for rows in ranges(len(S), block_k):
        scales.append([])
        for cols in ranges(len(S[0]), block_v):
            tile = [S[k][v] for k in rows for v in cols]
            if not all(map(math.isfinite, tile)):
                scale = math.nan
            elif max(map(abs, tile)) < TINY:
                scale = 1.0
            else:
                step = rounded(rounded(Fraction(max(map(abs, tile))) / largest, grid), RN16)
                inv = rounded(1 / step, grid)
                scale = float(step)
                for k in rows:
                    for v in cols:
                        codes[k][v] = code(rounded(Fraction(S[k][v]) * inv, grid), S[k][v])
            scales[-1].append(scale)
            for k in rows:
                for v in cols:
                    values[k][v] = codes[k][v] * scale
    return codes, scales, values


def nvfp4(S: Rows, grid: tuple[int, int | None]) -> tuple[Rows, Rows, list[float], Rows]:
    """(code values, block scales, group scales, decoded values)."""
    codes = [[0.0] * len(S[0]) for _ in S]
    values = [[0.0] * len(S[0]) for _ in S]
    blocks = [[0.0] * len(S[0]) for _ in ranges(len(S), 16)]
    groups = []
    for cols in ranges(len(S[0]), 64):
        amax = max((abs(row[v]) for row in S for v in cols if math.isfinite(row[v])), default=0.0)
        group = Fraction(1) if amax < TINY else rounded(rounded(Fraction(amax) / 2688, grid), RN16)
        groups.append(float(group))
        for i, rows in enumerate(ranges(len(S), 16)):
            for v in cols:
                column = [S[k][v] for k in rows]
                if not all(map(math.isfinite, column)):
                    block = math.nan
                elif max(map(abs, column)) < TINY:
                    block = 1.0
                else:
                    sixth = rounded(Fraction(max(map(abs, column))) / 6, grid)
                    ratio = rounded(sixth / group, grid)
                    scale = rounded(min(max(ratio, Fraction(1, 64)), Fraction(448)), E4M3)
                    inv = rounded(1 / (scale * group), grid)
                    block = float(scale)
                    for k in rows:
                        codes[k][v] = fp4_code(rounded(Fraction(S[k][v]) * inv, grid), S[k][v])
                blocks[i][v] = block
                for k in rows:
                    values[k][v] = codes[k][v] * (block * float(group))
    return codes, blocks, groups, values
