"""Products of a block's tiles of 16 tokens, all at once: tensors `[tiles, rows, columns]`, a warp for each tile.

A warp that has its tile for itself waits for no other, and hands what one product made to the next in its registers.
"""

# Triton's language, not Python: tuples grow.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import exact_operand, exp2, fine_parts, fine_product, gate_exp, held, operand
from lattn_compile.kernels.common.inputs import no_more

__all__ = [
    "from_tile",
    "past_tiles",
    "spread",
    "tile_channels",
    "tile_gate_rows",
    "tile_gates",
    "tile_product",
    "tile_rows",
    "tile_sums",
    "tile_weights",
    "turned",
]

UP = tl.constexpr(1.4426950408889634 * 2.0**7)  # to powers of two, and away from fp16's subnormal numbers
DOWN = tl.constexpr(2.0**-7)


@triton.jit
def spread(x, TILES: tl.constexpr):
    """A matrix for every tile, `[TILES, m, n]`."""
    return tl.broadcast_to(x[None, :, :], (TILES, x.shape[0], x.shape[1]))


@triton.jit
def tile_rows(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """As `load_rows`, of rows `[tiles, rows]`: `[tiles, rows, WIDTH]`."""
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, :, None] & (channel < SIZE)[None, None, :]
    return tl.load(p + row[:, :, None] + channel[None, None, :] * stride, mask=mask, other=0.0)


@triton.jit
def tile_channels(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """As `load_rows`, of rows `[tiles, rows]`, with channels before rows: `[tiles, WIDTH, rows]`."""
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None, :] & (channel < SIZE)[None, :, None]
    return tl.load(p + row[:, None, :] + channel[None, :, None] * stride, mask=mask, other=0.0)


@triton.jit
def turned(a, TILES: tl.constexpr):
    """An operand of symmetric matrices `[TILES, n, n]`, the same numbers, where the right side of a product comes from
    without another way through shared memory: from a product's result, transposed."""
    n = tl.arange(0, a[0].shape[1])
    one = spread((n[:, None] == n[None, :]).to(a[0].dtype), TILES)
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.dot(a[i], one).to(a[i].dtype),)
    return out


@triton.jit
def tile_product(a, b):
    """As `product`, tile by tile."""
    MOST: tl.constexpr = max(len(a), len(b))
    out = tl.zeros([a[0].shape[0], a[0].shape[1], b[0].shape[2]], tl.float32)
    for back in tl.static_range(MOST):
        for i in tl.static_range(MOST - back):
            if i < len(a) and MOST - 1 - back - i < len(b):
                out = tl.dot(a[i], b[MOST - 1 - back - i], out)
    return out


@triton.jit
def tile_gates(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr):
    """Held gates of `tile_channels` for `tile_weights`."""
    g = held(tile_channels(p, row, inside, first, stride, SIZE, WIDTH))
    return g * UP if LOW else g


@triton.jit
def tile_gate_rows(p, row, inside, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """`tile_gates` of bf16 inputs, `[tiles, rows, WIDTH]`."""
    return held(tile_rows(p, row, inside, first, stride, SIZE, WIDTH)) * UP


@triton.jit
def past_tiles(gates, WHICH: tl.constexpr, TILES: tl.constexpr):
    """Sums of the gates of whole tiles, `[tiles, channels]`, as `[tiles, 1, channels]`: of those before a tile (0),
    behind it (1), or between it and the middle of four (2)."""
    tile, other = tl.arange(0, TILES)[:, None], tl.arange(0, TILES)[None, :]
    if WHICH == 0:
        counts = other < tile
    elif WHICH == 1:
        counts = other > tile
    else:
        counts = ((tile ^ other) == 1) & ((tile == 0) | (tile == 3))
    return tl.sum(tl.where(counts[:, :, None], gates[None, :, :], 0.0), 1)[:, None, :]


@triton.jit
def tile_sums(g, which, LOW: tl.constexpr):
    """`g @ which`, tile by tile, of `tile_gates` and zeros and ones: exponents for `tile_weights`."""
    if LOW:
        zero = tl.zeros([g.shape[0], g.shape[1], which.shape[2]], tl.float32)
        return fine_product(fine_parts(g), ((which * DOWN).to(tl.float16),), zero)
    else:
        return tile_product(operand(g, False), exact_operand(which))


@triton.jit
def tile_weights(x, LOW: tl.constexpr):
    """The weights that `tile_sums` are the exponents of."""
    if LOW:
        return exp2(x)
    else:
        return gate_exp(no_more(x, 0.0), False)


@triton.jit
def _exchanged(x):
    """`[m, n, 2]` with the two of the last axis in each other's place."""
    a, b = tl.split(x)
    return tl.join(b, a)


@triton.jit
def from_tile(x, AWAY: tl.constexpr):
    """Of four tiles, tile t gets what tile `t ^ AWAY` has."""
    M: tl.constexpr = x.shape[1]
    N: tl.constexpr = x.shape[2]
    x = tl.reshape(x, (2, 2, M, N))
    if AWAY & 1:
        x = tl.trans(_exchanged(tl.trans(x, (0, 2, 3, 1))), (0, 3, 1, 2))
    if AWAY & 2:
        x = tl.trans(_exchanged(tl.trans(x, (1, 2, 3, 0))), (3, 0, 1, 2))
    return tl.reshape(x, (4, M, N))
