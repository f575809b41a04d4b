"""Records of a window kept in few bits (`factors`, semantics §5): keys before anything else, updates one by one.

A written key is its code, which bf16 holds exactly, times a size of its own: so it is an operand of one part, and its
size goes where a norm would. An update is known only when those before it have been rounded, so the walk solves for a
window's updates one after the other.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.kernels.common.codec import round_codes, scales
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["encode", "rounded_updates", "solved"]


@triton.jit
def _round_bf16(x):
    """fp32 `x` to bf16's 8 bits, by integers: Triton's interpreter cuts bits off where a GPU's conversion rounds."""
    bits = x.to(tl.uint32, bitcast=True)
    near = ((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)


@triton.jit
def _scales(bits, FACTORS: tl.constexpr):
    """Scale, inverse and zero of vectors, from the bits of their largest magnitudes."""
    tl.static_assert(FACTORS == "int8" or FACTORS == "fp8_e4m3")
    LARGEST: tl.constexpr = INT8_LARGEST if FACTORS == "int8" else FP8_LARGEST
    return scales(bits, LARGEST)


@triton.jit(do_not_specialize=["count", "H", "k_token", "k_head"])
def encode(
    k, codes, sizes, count, k_token, k_head, k_channel, H,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Keys as they are written.

    Args:
        k: `[M, H, K]`. codes: bf16 or fp32 `[M, H, K]`, contiguous, receives what, times `sizes`, fp32 `[M, H]`, is
            written.
        ROWS: tokens of a program.

    Grid: (cdiv(M, ROWS) * H,).
    """
    pid = tl.program_id(0)
    token = (pid // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i_key = pid % H
    channel = tl.arange(0, BK)
    inside = token < count
    mask = inside[:, None] & (channel < K)[None, :]
    p_k = k + token[:, None] * k_token + i_key * k_head + channel[None, :] * k_channel
    x = tl.load(p_k, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * rstd(tl.sum(x * x, 1))[:, None]
    if FACTORS == "bf16":
        code = _round_bf16(x)
        size = tl.full([ROWS], 1.0, tl.float32)
    else:
        # A NaN may come with any sign.
        size, inverse, zero = _scales(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), FACTORS)
        code, _ = round_codes(tl.fma(x, inverse[:, None], zero[:, None]), FACTORS)
    row = token * H + i_key
    tl.store(codes + row[:, None] * K + channel[None, :], code.to(codes.dtype.element_ty), mask=mask)
    tl.store(sizes + row, size, mask=inside)


@triton.jit
def rounded_updates(U, FACTORS: tl.constexpr):
    """Updates `U [columns / 16, 16, tokens]` as they are written; all columns of a token lie in this program."""
    if FACTORS == "bf16":
        return _round_bf16(U)
    else:
        most = tl.max(tl.max(U.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
        step, inverse, zero = _scales(most, FACTORS)
        code, _ = round_codes(tl.fma(U, inverse[None, None, :], zero[None, None, :]), FACTORS)
        return code * step[None, None, :]


@triton.jit
def solved(E, p_overlaps, p_beta, W: tl.constexpr, BT: tl.constexpr, FACTORS: tl.constexpr):
    """Errors of a window's tokens and their updates as written, `[columns / 16, 16, BT]`.

    Args:
        E: their errors against the state alone. p_overlaps: `[BT, BT]`, what of a written update (column) a token
            (row) sees. p_beta: `[BT]`.
    """
    slot = tl.arange(0, BT)
    written = tl.zeros_like(E)
    for s in range(W):
        here = (slot == s)[None, None, :]
        own = tl.sum(tl.where(here, E, 0.0), 2)[:, :, None]
        row = rounded_updates(own * tl.load(p_beta + s), FACTORS)
        seen = tl.load(p_overlaps + slot * BT + s)
        # Selected: an update that is no number is not what tokens before it see.
        E = tl.where((slot > s)[None, None, :], E - row * seen[None, None, :], E)
        written = tl.where(here, row, written)
    return E, written
