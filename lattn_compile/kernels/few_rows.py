"""A few rows times a large matrix of weights: the products of a decode step, bound by reading the weights once.

A library's product cuts so small a result into tiles of columns and of the sum, and adds up the latter in a second
kernel. Here a program has few columns of the result and all of their sum, of which each warp adds up a part: enough
programs to keep every unit reading, and one launch. Two matrices of one input may be taken together, `silu` of the one
times the other: then neither is written. Or up to three, each with a result of its own.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.early import fetch, wait_for_before
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.launch import launched

__all__ = [
    "COLUMNS",
    "LINE",
    "MOST_MATRICES",
    "MOST_ROWS",
    "ahead",
    "forward",
    "multiply",
    "supports",
    "three",
]

MOST_ROWS, MOST_MATRICES = 16, 3

COLUMNS = 16
"""Of a program."""

LINE = tl.constexpr(64)
"""Numbers in a line of a cache."""

AHEAD_BYTES = 3 << 20
"""Of weights that are sent for before the kernel in front has ended: what memory brings in the meantime, and what stays
in a cache that others read through."""

_FEW, _MANY = 4096, 8192
"""Columns up to which a multiprocessor has about one program of 16, and beyond which a library is as good for more
rows."""


@triton.jit
def multiply(
    x,
    first,
    second,
    third,
    out,
    out_second,
    out_third,
    x_row,
    rows,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    K: tl.constexpr,
    PAIR: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out = x @ first.T`, or with PAIR `silu(x @ first.T) * (x @ second.T)`, each rounded to out's type.

    Args:
        x: `[rows, K]`, x_row apart, columns neighbours. first, second: `[N, K]`, contiguous. out: `[rows, N]`,
            contiguous. PARTS * BLOCK_K divides K.
        FIRST, SECOND: without PAIR, where of all N columns, one matrix's behind the other's, those of `second` and of
            `third` begin, multiples of BLOCK_N; out_second, out_third: their results, as contiguous. None, where there
            are no such columns.
        ROWS: a power of two, at least `rows`.
        EARLY: launched while the kernel before may still run: of every part of a row of weights the first AHEAD lines
            of a cache, a power of two or none, are on their way while it does.

    Grid: (ceil(N / BLOCK_N),).
    """
    begin = tl.program_id(0) * BLOCK_N
    # Not a function for this kernel and the other one of products: from what it returns torch would take every tensor
    # for written to, and copy it.
    matrix, result = first, out
    own, width = begin, N
    if not PAIR:
        if second is not None:
            width = tl.where(begin >= FIRST, SECOND - FIRST, FIRST)
            own = tl.where(begin >= FIRST, begin - FIRST, own)
            matrix = tl.where(begin >= FIRST, second, matrix)
            result = tl.where(begin >= FIRST, out_second, result)
        if third is not None:
            width = tl.where(begin >= SECOND, N - SECOND, width)
            own = tl.where(begin >= SECOND, begin - SECOND, own)
            matrix = tl.where(begin >= SECOND, third, matrix)
            result = tl.where(begin >= SECOND, out_third, result)
    column = begin + tl.arange(0, BLOCK_N)
    in_matrix = own + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    if EARLY:
        if AHEAD:
            line = tl.arange(0, PARTS * AHEAD)
            line = line // AHEAD * (K // PARTS) + line % AHEAD * LINE
            place = tl.where(column < N, in_matrix, 0)[:, None].to(tl.int64) * K + line[None, :]
            fetch(matrix + place)
            if PAIR:
                fetch(second + place)
        wait_for_before()
    # Axes: parts of the sum, rows or columns, neighbours of the sum.
    k = tl.arange(0, PARTS)[:, None, None] * (K // PARTS) + tl.arange(0, BLOCK_K)[None, None, :]
    p_x = x + row[None, :, None] * x_row + k
    p_first = matrix + in_matrix[None, :, None].to(tl.int64) * K + k
    is_row = (row < rows)[None, :, None]
    is_column = (column < N)[None, :, None]
    total = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    other = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    if PAIR:
        p_second = second + column[None, :, None].to(tl.int64) * K + k
    for at in range(0, K // PARTS, BLOCK_K):
        b_x = tl.trans(tl.load(p_x + at, mask=is_row, other=0.0), 0, 2, 1)
        total = tl.dot(tl.load(p_first + at, mask=is_column, other=0.0), b_x, total)
        if PAIR:
            other = tl.dot(tl.load(p_second + at, mask=is_column, other=0.0), b_x, other)
    value = tl.sum(total, 0).to(out.dtype.element_ty)
    if PAIR:
        gate = value.to(tl.float32)
        value = tl.div_rn(gate, 1.0 + exp(-gate)).to(out.dtype.element_ty)
        value = value * tl.sum(other, 0).to(out.dtype.element_ty)
    p_out = result + row[None, :] * width + in_matrix[:, None]
    tl.store(p_out, value, mask=(row < rows)[None, :] & (column < N)[:, None])


def supports(rows: int, columns: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether `forward` multiplies `[rows, depth]` by `[columns, depth]` transposed, and better than a library: of more
    than 8 rows, many columns are the library's."""
    fits = 0 < rows <= (8 if columns > _MANY else MOST_ROWS) and columns >= 512
    return fits and depth % 512 == 0 and dtype is torch.bfloat16


def tile(rows: int, columns: int, pair: bool) -> dict[str, int]:
    """Constants of a launch, as measured best on an H200 (`benchmarks/few_rows.py --tiles`)."""
    if pair:
        parts, block_k, warps, stages = 1, 256, 1, 4
    elif columns > _FEW:
        parts, block_k, warps, stages = 2, 128, 2, 5
    else:
        parts, block_k, warps, stages = 4, 64, 4, 6
    sizes = {"PARTS": parts, "ROWS": max(8, triton.next_power_of_2(rows)), "BLOCK_N": COLUMNS, "BLOCK_K": block_k}
    return sizes | {"num_warps": warps, "num_stages": stages}


def ahead(columns: int, depth: int, parts: int) -> int:
    """Lines of each part of a row of weights that come to `AHEAD_BYTES`, a power of two, or none."""
    lines = AHEAD_BYTES // (128 * columns * parts)
    return 0 if lines == 0 else min(1 << (lines.bit_length() - 1), 1 << ((depth // parts // 64).bit_length() - 1))


def forward(x: Tensor, *matrices: Tensor, pair: bool = False) -> tuple[Tensor, ...]:
    """`x @ matrix.T` of each of up to three matrices; with `pair` one result, `silu(x @ first.T) * (x @ second.T)`.

    Args:
        x: `[rows, K]`. matrices: `[N, K]`, contiguous, bf16; of a pair of one size, else of multiples of COLUMNS rows
            but the last.

    Returns:
        `[rows, N]` each. Sums in fp32, each product and `silu` rounded to bf16, as the operations apart have them.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, depth = x.shape
    widths = [matrix.shape[0] for matrix in matrices][: 1 if pair else MOST_MATRICES]
    columns = sum(widths)
    results = tuple(x.new_empty(rows, width) for width in widths)
    chosen = tile(rows, columns, pair)
    launched(multiply)[(triton.cdiv(columns, chosen["BLOCK_N"]),)](
        x, *three(matrices), *three(results), x.stride(0), rows, N=columns, FIRST=widths[0], SECOND=sum(widths[:2]),
        K=depth, PAIR=pair, AHEAD=ahead(columns * (1 + pair), depth, chosen["PARTS"]), EARLY=False, **chosen,
    )  # fmt: skip
    return results


def three(given: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (*given, None, None)[:3]
