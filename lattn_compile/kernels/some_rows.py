"""Some dozens of rows times a large matrix of weights: the products of a decode step of 17 to 64 sequences.

As with a few rows (`few_rows.py`) reading the weights once is what takes the time, but the rows are no longer nothing
beside them: every program reads all of its rows' numbers, so it has more columns of the result, 64 and more, and their
products are made by the matrix units. What a program has too few columns for is cut along the sum, each piece's result
is written, and they are added up behind it, as a part of what follows. Two matrices of one input may be taken together,
`silu` of the one times the other: then neither is written. Or up to three, each with a result of its own.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels import few_rows
from lattn_compile.kernels.common.early import fetch, wait_for_before
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.few_rows import LINE, ahead, three

__all__ = ["COLUMNS", "MOST_MATRICES", "MOST_ROWS", "forward", "multiply_some", "supports"]

MOST_ROWS, MOST_MATRICES, COLUMNS = 64, 3, 128

_FEW, _MANY = 4096, 9216
"""Columns up to which a sum is cut, and beyond which products are a library's."""

_UNITS = 132
"""Multiprocessors, about."""


@triton.jit
def multiply_some(
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
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out = x @ first.T`, or with PAIR `silu(x @ first.T) * (x @ second.T)`, each rounded to out's type.

    Args:
        x: `[rows, K]`, x_row apart, columns neighbours. first, second: `[N, K]`, contiguous. out: `[rows, N]`,
            contiguous, or with SPLITS > 1 `[SPLITS, rows, N]`, fp32, to be added up. SPLITS * BLOCK_K divides K,
            BLOCK_N divides N.
        FIRST, SECOND: without PAIR, where of all N columns, one matrix's behind the other's, those of `second` and of
            `third` begin, multiples of BLOCK_N; out_second, out_third: their results. None, where there are no such
            columns.
        ROWS: a power of two, at least `rows`.
        EARLY: launched while the kernel before may still run: of every piece of a row of weights the first AHEAD lines
            of a cache, a power of two or none, are on their way while it does.

    Grid: (N / BLOCK_N, SPLITS).
    """
    begin = tl.program_id(0) * BLOCK_N
    i_split = tl.program_id(1)
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
    column = own + tl.arange(0, BLOCK_N)
    if EARLY:
        if AHEAD:
            place = i_split * (K // SPLITS) + tl.arange(0, AHEAD) * LINE
            place = column[:, None].to(tl.int64) * K + place[None, :]
            fetch(matrix + place)
            if PAIR:
                fetch(second + place)
        wait_for_before()
    row = tl.arange(0, ROWS)
    k = i_split * (K // SPLITS) + tl.arange(0, BLOCK_K)
    is_row = (row < rows)[:, None]
    p_x = x + row[:, None] * x_row + k[None, :]
    p_first = matrix + column[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if PAIR:
        p_second = second + column[:, None].to(tl.int64) * K + k[None, :]
        other = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for at in range(0, K // SPLITS, BLOCK_K):
        b_x = tl.load(p_x + at, mask=is_row, other=0.0)
        total = tl.dot(b_x, tl.trans(tl.load(p_first + at)), total)
        if PAIR:
            other = tl.dot(b_x, tl.trans(tl.load(p_second + at)), other)
    value = total.to(result.dtype.element_ty)
    if PAIR:
        gate = value.to(tl.float32)
        value = tl.div_rn(gate, 1.0 + exp(-gate)).to(out.dtype.element_ty)
        value = value * other.to(out.dtype.element_ty)
    p_out = result + (i_split * rows + row[:, None]).to(tl.int64) * width + column[None, :]
    tl.store(p_out, value, mask=is_row)


def tile(columns: int, pair: bool) -> dict[str, int]:
    """Constants of a launch: about a program a multiprocessor, with as much on its way as its memory holds."""
    splits = 4 if columns <= _FEW and not pair else 1
    block_n = 64 if pair or columns <= 64 * _UNITS else 128
    stages = 4 if columns > block_n * _UNITS else 6 if splits > 1 else 8
    return {"SPLITS": splits, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 4, "num_stages": stages}


def supports(rows: int, columns: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether `forward` multiplies `[rows, depth]` by `[columns, depth]` transposed, and better than a library."""
    fits = few_rows.MOST_ROWS < rows <= MOST_ROWS and columns % COLUMNS == 0 and columns <= _MANY
    return fits and depth % 512 == 0 and dtype is torch.bfloat16


def forward(x: Tensor, *matrices: Tensor, pair: bool = False) -> tuple[Tensor, ...]:
    """`x @ matrix.T` of each of up to three matrices; with `pair` one result, `silu(x @ first.T) * (x @ second.T)`.

    Args:
        x: `[rows, K]`, rows at most MOST_ROWS. matrices: `[N, K]`, contiguous, bf16; of a pair of one size.

    Returns:
        `[rows, N]` each. Sums in fp32, each product and `silu` rounded to bf16, as the operations apart have them.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, depth = x.shape
    widths = [matrix.shape[0] for matrix in matrices][: 1 if pair else 3]
    columns = sum(widths)
    chosen = tile(columns, pair)
    splits = chosen["SPLITS"]
    if splits == 1:
        results = tuple(x.new_empty(rows, width) for width in widths)
    else:
        results = tuple(x.new_empty(splits, rows, width, dtype=torch.float32) for width in widths)
    launched(multiply_some)[(columns // chosen["BLOCK_N"], splits)](
        x, *three(matrices), *three(results), x.stride(0), rows, N=columns, FIRST=widths[0], SECOND=sum(widths[:2]),
        K=depth, PAIR=pair, AHEAD=ahead(columns * (1 + pair), depth, splits), ROWS=MOST_ROWS, EARLY=False, **chosen,
    )  # fmt: skip
    return results if splits == 1 else tuple(y.sum(0).to(x.dtype) for y in results)
