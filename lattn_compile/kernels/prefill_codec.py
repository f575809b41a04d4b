"""Rounded operands of the prefill's products, inside a program: what `reference/operands.py` says, bit for bit.

An operand in registers is a tuple of tensors that add up to it, and a vector of factors, one for each row of a left and
each column of a right operand. FORMAT tells of what:

    "int8"      one tensor of int8 codes: their products are int8's, summed in int32
    "fp8_e4m3"  one of fp16 that holds E4M3's numbers: on Hopper and Blackwell an fp8 `mma` is that of fp16, and fp8's
                `wgmma` keeps 14 bits of its sums, where fp16's keeps fp32's. In memory a byte.
    "nvfp4"     one of fp16 that holds codes times their blocks' E4M3 scales, 6 bits at most
    ""          exact: the parts of `chunk_math.operand`, and factors that the caller has

so that all products are exact but for their sums, which are fp32 or int32.
"""

# Triton's language, not Python: tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from lattn_compile.formats.nvfp4.triton import LARGEST_GROUP, round_block_scale
from lattn_compile.formats.nvfp4.triton import round_codes as round_nvfp4
from lattn_compile.kernels.chunk_math import operand
from lattn_compile.kernels.common.codec import rn16, round_codes

__all__ = [
    "factors_of",
    "flipped_parts",
    "for_all",
    "lanes",
    "largest",
    "load_site",
    "piece_of",
    "scaled",
    "site",
    "site_again",
    "site_product",
    "store_site",
]

_TINY = tl.constexpr(2.0**-100)
_SIGN = tl.constexpr(-(2**31))
_LARGEST_INT8 = tl.constexpr(127.0)
_LARGEST_FP8 = tl.constexpr(448.0)
_LARGEST_FP4 = tl.constexpr(6.0)
_BLOCK = tl.constexpr(16)


@triton.jit
def reciprocal(x):
    """`1 / x` as IEEE 754 rounds it, of x with 23 significant bits or fewer between 2^-120 and 2^120.

    No branch, where a division has one for each number, and none of them waits for another: an estimate within one unit
    of the last place and one step of Newton's, which Markstein proved to be right for these.
    """
    if is_hip():
        return tl.div_rn(1.0, x)
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
        return tl.fma(tl.fma(-x, y, 1.0), y, y)


@triton.jit
def quotient(x, y, inverse):
    """`x / y` as IEEE 754 rounds it, inverse the reciprocal of y likewise (Markstein)."""
    if is_hip():
        return tl.div_rn(x, y)
    else:
        q = x * inverse
        return tl.fma(tl.fma(-q, y, x), inverse, q)


@triton.jit
def scales(amax, LARGEST: tl.constexpr):
    """`common/codec.py`'s, of magnitudes instead of their bits."""
    finite = amax < float("inf")
    live = (amax >= _TINY) & finite
    scale = tl.where(live, rn16(quotient(amax, LARGEST, 1.0 / LARGEST)), 1.0)
    inverse = tl.where(live, reciprocal(scale), 0.0)
    zero = tl.where(live, _SIGN, 0).to(tl.float32, bitcast=True)
    return tl.where(finite, scale, float("nan")), inverse, zero


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, AXIS: tl.constexpr, KEEP: tl.constexpr):
    """The largest magnitudes along AXIS, NaN where there is one."""
    return tl.reduce(tl.abs(x), AXIS, _larger, keep_dims=KEEP)


@triton.jit
def _along(x, AXIS: tl.constexpr):
    """A vector of what stands across AXIS, as something that broadcasts against the matrix."""
    if AXIS == 0:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _round_int8(x, AXIS: tl.constexpr):
    amax = _amax(x, AXIS, False)
    scale, inverse, zero = scales(amax, _LARGEST_INT8)
    return _int8(tl.fma(x, _along(inverse, AXIS), _along(zero, AXIS))), scale


@triton.jit
def _round_fp8(x, AXIS: tl.constexpr):
    amax = _amax(x, AXIS, False)
    scale, inverse, zero = scales(amax, _LARGEST_FP8)
    return e4m3(tl.fma(x, _along(inverse, AXIS), _along(zero, AXIS))), scale


@triton.jit
def e4m3(y):
    """Scaled values, at most 448 (1 + 2^-16), to the nearest of E4M3's numbers, ties to even, fp16.

    On CUDA in one piece: between two casts Triton would bring the bytes where a product wants them, lane by lane.
    """
    if is_hip():
        return y.to(tl.float8e4nv).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1; cvt.rn.f16x2.e4m3x2 $0, codes; }",
            "=r,r,r", [y], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _round_nvfp4(x, AXIS: tl.constexpr):
    group = _group(_amax(_finite(x), AXIS, False))
    return _nvfp4_codes(x, group, AXIS), group


@triton.jit
def _finite(x):
    """Magnitudes, 0 for those that are none."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def _group(amax):
    return tl.where(amax >= _TINY, rn16(quotient(amax, LARGEST_GROUP, 1.0 / LARGEST_GROUP)), 1.0)


@triton.jit
def _nvfp4_codes(x, group, AXIS: tl.constexpr):
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if AXIS == 0:
        tiles = tl.reshape(x, (M // _BLOCK, _BLOCK, N))
        codes = _nvfp4_blocks(tiles, 1, group[None, None, :])
    else:
        tiles = tl.reshape(x, (M, N // _BLOCK, _BLOCK))
        codes = _nvfp4_blocks(tiles, 2, group[:, None, None])
    return tl.reshape(codes, (M, N))


@triton.jit
def _nvfp4_blocks(x, AXIS: tl.constexpr, group):
    """Codes times their blocks' scales, fp16."""
    amax = _amax(x, AXIS, True)
    finite = amax < float("inf")
    live = (amax >= _TINY) & finite
    ratio = quotient(quotient(amax, _LARGEST_FP4, 1.0 / _LARGEST_FP4), group, reciprocal(group))
    block = tl.where(live, round_block_scale(ratio), 1.0)
    inverse = tl.where(live, reciprocal(block * group), 0.0)
    zero = tl.where(live, _SIGN, 0).to(tl.float32, bitcast=True)  # as in `common/codec.py`
    code, _ = round_nvfp4(tl.fma(x, inverse, zero))
    return (code * tl.where(finite, block, float("nan"))).to(tl.float16)


@triton.jit
def site(x, AXIS: tl.constexpr, FORMAT: tl.constexpr, LOW: tl.constexpr):
    """fp32 `x` as an operand whose product sums over AXIS (1 of a left, 0 of a right operand), and its factors."""
    if FORMAT == "int8":
        codes, scale = _round_int8(x, AXIS)
        return (codes,), scale
    elif FORMAT == "fp8_e4m3":
        codes, scale = _round_fp8(x, AXIS)
        return (codes,), scale
    elif FORMAT == "nvfp4":
        codes, scale = _round_nvfp4(x, AXIS)
        return (codes,), scale
    else:
        return operand(x, LOW), tl.full([x.shape[1 - AXIS]], 1.0, tl.float32)


@triton.jit
def _int8(y):
    _, shifted = round_codes(y, "int8")
    # The low byte is the code, 128 too high (`formats/int8/triton.py`).
    return (shifted.to(tl.int32, bitcast=True) ^ 0x80).to(tl.int8)


@triton.jit
def largest(pieces, FORMAT: tl.constexpr):
    """The largest magnitudes of left operands `[G, m, n]` in pieces, for `factors_of`, `[G, m, 1]`."""
    found = tl.zeros([pieces[0].shape[0], pieces[0].shape[1], 1], tl.float32)
    if FORMAT != "":
        for i in tl.static_range(len(pieces)):
            x = pieces[i]
            if FORMAT == "nvfp4":
                x = _finite(x)
            found = _larger(found, _amax(x, 2, True))
    return found


@triton.jit
def factors_of(amax, FORMAT: tl.constexpr):
    """Factors of rows with these largest magnitudes, and what makes codes of the rows' values."""
    if FORMAT == "int8":
        return scales(amax, _LARGEST_INT8)
    elif FORMAT == "fp8_e4m3":
        return scales(amax, _LARGEST_FP8)
    else:
        group = tl.full(amax.shape, 1.0, tl.float32)
        if FORMAT == "nvfp4":
            group = _group(amax)
        return group, group, group


@triton.jit
def piece_of(x, scale, inverse, zero, FORMAT: tl.constexpr, LOW: tl.constexpr):
    """One piece `[G, m, n]` of an operand with these factors."""
    if FORMAT == "int8":
        return (_int8(tl.fma(x, inverse, zero)),)
    elif FORMAT == "fp8_e4m3":
        return (e4m3(tl.fma(x, inverse, zero)),)
    elif FORMAT == "nvfp4":
        M: tl.constexpr = x.shape[0] * x.shape[1]
        N: tl.constexpr = x.shape[2]
        codes = _nvfp4_codes(tl.reshape(x, (M, N)), tl.reshape(scale, (M,)), 1)
        return (tl.reshape(codes, x.shape),)
    else:
        return operand(x, LOW)


@triton.jit
def for_all(a, G: tl.constexpr):
    """The transpose of an operand that was loaded, for each of G warps, `[G, n, m]`."""
    M: tl.constexpr = a[0].shape[0]
    N: tl.constexpr = a[0].shape[1]
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.broadcast_to(tl.trans(_half(a[i]))[None, :, :], (G, N, M)),)
    return out


@triton.jit
def site_again(x, scale, AXIS: tl.constexpr, FORMAT: tl.constexpr, LOW: tl.constexpr):
    """The operand that `site` made of a tensor of which `x` is some channels, given its factors."""
    if FORMAT == "int8" or FORMAT == "fp8_e4m3":
        # A tile without codes has scale 1, far above its values.
        y = x * _along(reciprocal(scale), AXIS)
        if FORMAT == "int8":
            return (_int8(y),)
        else:
            return (e4m3(y),)
    elif FORMAT == "nvfp4":
        return (_nvfp4_codes(x, scale, AXIS),)
    else:
        return operand(x, LOW)


@triton.jit
def scaled(x, factor, FORMAT: tl.constexpr, LOW: tl.constexpr):
    """Rows `x`, as they came, times one factor each, as a left operand: exact rows keep their factor outside."""
    if FORMAT == "":
        return operand(x, LOW), factor
    else:
        return site(x.to(tl.float32) * factor[:, None], 1, FORMAT, LOW)


@triton.jit
def flipped_parts(a):
    """The transpose of an operand that was loaded, or made elementwise; not of a product."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.trans(a[i]),)
    return out


@triton.jit
def site_product(a, b):
    """`a @ b` of operands, fp32, without their factors. Codes beside what are none take its dtype, which holds them."""
    if a[0].dtype == tl.int8 and b[0].dtype == tl.int8:
        return tl.dot(a[0], b[0], out_dtype=tl.int32).to(tl.float32)
    elif len(a) == 1 and len(b) == 1:
        x, y = _half(a[0]), _half(b[0])
        return tl.dot(_beside(x, y), _beside(y, x))
    else:
        return _of_parts(_all_beside(a, b[0]), _all_beside(b, a[0]))


@triton.jit
def _of_parts(a, b):
    """`a @ b`: the first parts', and apart from it all that is smaller, none below what the parts leave out."""
    MOST: tl.constexpr = max(len(a), len(b))
    out = tl.dot(a[0], b[0])
    small = tl.zeros_like(out)
    for back in tl.static_range(MOST - 1):
        for i in tl.static_range(MOST - back):
            if i < len(a) and MOST - 1 - back - i < len(b):
                small = tl.dot(a[i], b[MOST - 1 - back - i], small)
    return out + small


@triton.jit
def _beside(x, other):
    if x.dtype == tl.int8 or x.dtype == tl.float16:
        return x.to(other.dtype)
    else:
        return x


@triton.jit
def _all_beside(a, other):
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (_beside(_half(a[i]), other),)
    return out


@triton.jit
def _half(x):
    """Of an operand in memory, where E4M3 has one byte."""
    if x.dtype == tl.float8e4nv:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def in_lanes(x, p):
    """`x`, whose last axis is summed over, in the order in which a product of operands at `p` sums it.

    Of 16 numbers a lane has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of what a product left in registers, and a product of
    bytes wants four in a row there: so these are in a row, and no lane gives any to another.
    """
    if p.dtype.element_ty.primitive_bitwidth == 8:
        if len(x.shape) == 2:
            parts = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
            return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), x.shape)
        else:
            parts = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 16, 2, 4, 2))
            return tl.reshape(tl.permute(parts, (0, 1, 2, 4, 3, 5)), x.shape)
    else:
        return x


@triton.jit
def lanes(a, p):
    """An operand in that order."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (in_lanes(a[i], p),)
    return out


@triton.jit
def store_site(p, at, place, a, SIZE: tl.constexpr):
    """Stores an operand as the one with number `at` at `p`, in its dtype: SIZE numbers each part, at `place`."""
    for i in tl.static_range(len(a)):
        tl.store(p + (at * len(a) + i) * SIZE + place, a[i].to(p.dtype.element_ty))


@triton.jit
def load_site(p, at, place, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """What `store_site` stored."""
    out = ()
    for i in tl.static_range(PARTS):
        out = out + (tl.load(p + (at * PARTS + i) * SIZE + place),)
    return out
