"""A few rows times a large matrix of weights: the products of a decode step, bound by reading the weights once.

A library's product cuts so small a result into tiles of columns and of the sum, and adds up the latter in a second
kernel. Here a program has few columns of the result and all of their sum, of which each warp adds up a part: enough
programs to keep every unit reading, and one launch. Two matrices of one input may be taken together, `silu` of the one
times the other: then neither is written.
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

__all__ = ["MOST_ROWS", "forward", "multiply", "supports"]

MOST_ROWS = 16

_FEW, _MANY = 4096, 8192
"""Columns up to which a multiprocessor has about one program of 16, and beyond which a library is as good for more
rows."""


@triton.jit
def multiply(
    x,
    first,
    second,
    out,
    x_row,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIR: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out = x @ first.T`, or with PAIR `silu(x @ first.T) * (x @ second.T)`, each rounded to out's type.

    Args:
        x: `[rows, K]`, x_row apart, columns neighbours. first, second: `[N, K]`, contiguous. out: `[rows, N]`,
            contiguous. PARTS * BLOCK_K divides K.
        ROWS, LINES: powers of two, at least `rows` and K / 64, lines of a cache in a row of weights.
        EARLY: launched while the kernel before may still run: weights are on their way while it does.

    Grid: (ceil(N / BLOCK_N),).
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    if EARLY:
        line = tl.arange(0, LINES) * 64
        ahead = (column < N)[:, None] & (line < K)[None, :]
        place = column[:, None].to(tl.int64) * K + line[None, :]
        fetch(first + tl.where(ahead, place, 0))
        if PAIR:
            fetch(second + tl.where(ahead, place, 0))
        wait_for_before()
    # Axes: parts of the sum, rows or columns, neighbours of the sum.
    k = tl.arange(0, PARTS)[:, None, None] * (K // PARTS) + tl.arange(0, BLOCK_K)[None, None, :]
    p_x = x + row[None, :, None] * x_row + k
    p_first = first + column[None, :, None].to(tl.int64) * K + k
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
    p_out = out + row[None, :] * N + column[:, None]
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
    sizes = {"PARTS": parts, "ROWS": max(8, triton.next_power_of_2(rows)), "BLOCK_N": 16, "BLOCK_K": block_k}
    return sizes | {"num_warps": warps, "num_stages": stages}


def forward(x: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """`x @ first.T`, or `silu(x @ first.T) * (x @ second.T)`: `[rows, N]` of x `[rows, K]`, first and second `[N, K]`,
    contiguous, bf16; sums in fp32, each product and `silu` rounded to bf16, as the operations apart have them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, depth), columns = x.shape, first.shape[0]
    out = x.new_empty(rows, columns)
    chosen = tile(rows, columns, second is not None)
    launched(multiply)[(triton.cdiv(columns, chosen["BLOCK_N"]),)](
        x, first, second, out, x.stride(0), rows, N=columns, K=depth, PAIR=second is not None,
        LINES=triton.next_power_of_2(depth // 64), EARLY=False, **chosen,
    )  # fmt: skip
    return out
