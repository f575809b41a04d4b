"""The codecs of semantics §3 once more, slowly: exact rationals, one explicit rounding at a time, one value at a time.

Shares nothing with the package but the specification. States are lists of rows, numbers are Python floats (which hold
fp32 exactly); results carry the sign of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

Rows = list[list[float]]
Pick = Callable[[Fraction], int]
"""How a number becomes one of the two integers around it. `round` is half-even on fractions."""

FP32, FP64, RN16, E4M3, E2M1 = (24, -149), (53, -1074), (16, None), (4, -9), (2, -1)
BF16, FP16 = (8, -133), (11, -24)
TINY = 2.0**-100


def at_random(r: float, grid: tuple[int, int | None]) -> Pick:
    """Up where the random number `r` is below the distance from the lower integer, computed in `grid`."""
    return lambda y: math.floor(y) + (Fraction(r) < rounded(y - math.floor(y), grid))


def rounded(x: Fraction, grid: tuple[int, int | None], pick: Pick = round) -> Fraction:
    """`x` to `grid` = (significant bits, exponent of the smallest spacing), to nearest unless `pick` says otherwise."""
    if x == 0:
        return x
    digits, lowest = grid
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    spacing = exponent - digits + 1 if lowest is None else max(exponent - digits + 1, lowest)
    unit = Fraction(2) ** spacing
    return pick(x / unit) * unit


def clamped(x: Fraction, limit: int) -> Fraction:
    return max(min(x, Fraction(limit)), Fraction(-limit))


def int8_code(y: Fraction, x: float, pick: Pick = round) -> float:
    return float(pick(clamped(y, 127)))


def int4_code(y: Fraction, x: float, pick: Pick = round) -> float:
    return float(pick(clamped(y, 7)))


def fp8_code(y: Fraction, x: float, pick: Pick = round) -> float:
    return math.copysign(float(rounded(clamped(y, 448), E4M3, pick)), x)


def fp4_code(y: Fraction, x: float, pick: Pick = round) -> float:
    return math.copysign(float(rounded(clamped(y, 6), E2M1, pick)), x)


def plain(x: float, kind: tuple[int, int | None], largest: float, pick: Pick) -> float:
    """A finite number, no larger than the `largest`, as bf16 or fp16 stores it."""
    assert abs(x) <= largest
    return math.copysign(float(rounded(Fraction(x), kind, pick)), x)


def ranges(size: int, block: int | None) -> list[range]:
    block = block or size
    return [range(i, min(i + block, size)) for i in range(0, size, block)]


def tiled(
    S: Rows,
    block_k: int | None,
    block_v: int | None,
    largest: int,
    code: Callable[[Fraction, float, Pick], float],
    grid: tuple[int, int | None],
    r: Rows | None = None,
) -> tuple[Rows, Rows, Rows]:
    """(code values, scales, decoded values) of int8 and fp8; with random numbers `r`, stochastic."""
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
                        pick = round if r is None else at_random(r[k][v], grid)
                        codes[k][v] = code(rounded(Fraction(S[k][v]) * inv, grid), S[k][v], pick)
            scales[-1].append(scale)
            for k in rows:
                for v in cols:
                    values[k][v] = codes[k][v] * scale
    return codes, scales, values


def nvfp4(S: Rows, grid: tuple[int, int | None], r: Rows | None = None) -> tuple[Rows, Rows, list[float], Rows]:
    """(code values, block scales, group scales, decoded values); with random numbers `r`, stochastic."""
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
                        pick = round if r is None else at_random(r[k][v], grid)
                        codes[k][v] = fp4_code(rounded(Fraction(S[k][v]) * inv, grid), S[k][v], pick)
                blocks[i][v] = block
                for k in rows:
                    values[k][v] = codes[k][v] * (block * float(group))
    return codes, blocks, groups, values


def added(a: float, b: float, grid: tuple[int, int | None]) -> float:
    """`a + b`; a zero sum keeps the sign that both terms have."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    total = float(rounded(Fraction(a) + Fraction(b), grid))
    return total if total else a + b


def fed_back(
    S: Rows, stored: Rows, tile: tuple[int | None, int | None], bits: int, grid: tuple[int, int | None]
) -> Rows:
    """`stored` and its residual in `bits` = 4 or 8, decoded and added."""
    error = [[added(s, -d, grid) for s, d in zip(*rows, strict=True)] for rows in zip(S, stored, strict=True)]
    largest, code = (7, int4_code) if bits == 4 else (127, int8_code)
    _, _, residual = tiled(error, *tile, largest, code, grid)
    return [[added(d, e, grid) for d, e in zip(*rows, strict=True)] for rows in zip(stored, residual, strict=True)]
