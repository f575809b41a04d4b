"""What the in-place kernels of both forms do to a state in pieces: update it, and write it back into its slot."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.packed_tiles import store_int8, store_plain
from lattn_compile.kernels.common.pieces import over_channels
from lattn_compile.kernels.decode_checkpoints import keep
from lattn_compile.kernels.decode_codec import quantize

__all__ = ["keys", "updated", "write_back"]


@triton.jit
def keys(p, norm, scale, channel, K: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """A vector of key channels in pieces, fp32, times two factors, one after the other."""
    at = p + channel
    out = ()
    for i in tl.static_range(PIECES):
        if MASKED:
            x = tl.load(at + i * STEP, mask=channel + i * STEP < K, other=0.0)
        else:
            x = tl.load(at + i * STEP)
        out = out + (x.to(tl.float32) * norm * scale,)
    return out


@triton.jit
def updated(S, k, u, PIECES: tl.constexpr):
    """`S + k u^T`."""
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.fma(over_channels(k[i]), u[None, :, None, :], S[i]),)
    return out


@triton.jit
def write_back(
    p_codes,
    p_scales,
    p_blocks,
    S,
    channel,
    column,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAST: tl.constexpr,
):
    """Rounds one head's state and stores its codes and scales. `first`: the program's first column, of WIDTH."""
    if FORMAT == "" or FORMAT == "bf16" or FORMAT == "fp16":
        store_plain(p_codes, S, channel, column, K, V, VECTOR, PIECES, STEP)
    elif FORMAT == "int8" and FAST:
        _, codes, steps = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
        store_int8(
            p_codes, p_scales, codes, steps, channel, column, first, K, V, WIDTH, VECTOR, PIECES, STEP, BLOCK_K, BLOCK_V
        )  # fmt: skip
    else:
        keep(
            p_codes, p_scales, p_blocks, S, channel, column, K, V, LANES, PIECES, STEP, VECTOR, FLIP, FORMAT, BLOCK_K,
            BLOCK_V,
        )  # fmt: skip
