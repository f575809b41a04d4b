"""A stored state on its way into registers and back: rows of codes and scales, in pieces (`pieces.py`).

`load_codes` fetches, so that many loads can be on their way before the first is waited for; `decoded` computes; `keep`
of the decode form or `packed_write.store_bytes` writes. Formats, tiles and bits are those of `common/codec.py`.

FAST: on NVIDIA GPUs bytes go four at a time. int8 through a byte permutation: converting takes a multiprocessor 16
values a clock; a permutation puts a byte into the mantissa of 2^23, 64 a clock, and a subtraction makes a number of it.
Packing is the same backwards. fp8 through the conversions of sm_89 and later, which round as the codec does. Triton's
interpreter and other GPUs have the same arithmetic value by value.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import from_bytes as fp8_from_bytes
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, from_nibbles
from lattn_compile.kernels.common.codec import from_bytes
from lattn_compile.kernels.common.packed_nibbles import decoded_nibbles

__all__ = [
    "FP8_NUMBERS",
    "INT8_NUMBERS",
    "INT8_OFFSET",
    "INT8_STEPS",
    "decoded",
    "decoded_words",
    "load_codes",
    "load_steps",
    "load_words",
    "store_plain",
]

_NAN_BYTE = tl.constexpr(0x7F)  # of E4M3

# Four codes of a word, of which a mask keeps all or none, as numbers.
INT8_NUMBERS = tl.constexpr(
    """
    {
    .reg .b32 bytes;
    lop3.b32 bytes, $4, $5, 0x80808080, 0x6a;
    prmt.b32 $0, bytes, 0x4B000000, 0x7650;
    prmt.b32 $1, bytes, 0x4B000000, 0x7651;
    prmt.b32 $2, bytes, 0x4B000000, 0x7652;
    prmt.b32 $3, bytes, 0x4B000000, 0x7653;
    sub.rn.f32 $0, $0, 0f4B000080;
    sub.rn.f32 $1, $1, 0f4B000080;
    sub.rn.f32 $2, $2, 0f4B000080;
    sub.rn.f32 $3, $3, 0f4B000080;
    }
    """
)

# As `INT8_NUMBERS`, times a step: the byte lies in the mantissa of 2^15, which is 2^15 + 128 too much, and $6 is minus
# so many steps. With that product exact, each sum is one code's product with the step, which is exact too.
INT8_STEPS = tl.constexpr(
    """
    {
    .reg .b32 bytes;
    xor.b32 bytes, $4, 0x80808080;
    prmt.b32 $0, bytes, 0x47000000, 0x7504;
    prmt.b32 $1, bytes, 0x47000000, 0x7514;
    prmt.b32 $2, bytes, 0x47000000, 0x7524;
    prmt.b32 $3, bytes, 0x47000000, 0x7534;
    fma.rn.f32 $0, $0, $5, $6;
    fma.rn.f32 $1, $1, $5, $6;
    fma.rn.f32 $2, $2, $5, $6;
    fma.rn.f32 $3, $3, $5, $6;
    }
    """
)
INT8_OFFSET = tl.constexpr(32768.0 + 128.0)

FP8_NUMBERS = tl.constexpr(
    """
    {
    .reg .b32 bytes, even, odd;
    .reg .b16 low, high, a, b, c, d;
    and.b32 bytes, $4, $5;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 even, low;
    cvt.rn.f16x2.e4m3x2 odd, high;
    mov.b32 {a, b}, even;
    mov.b32 {c, d}, odd;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
    }
    """
)


@triton.jit
def load_codes(
    p,
    channel,
    column,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    TURNED: tl.constexpr,
    ODD: tl.constexpr,
):
    """One head's codes at `p` in pieces, as they are stored; 0 beyond its ends and where `inside`, a scalar, is not.

    What `inside` waits for the load waits for: whether a slot holds a state is for `decoded` to ask.

    8-bit formats: uint8 `[K, V]`. nvfp4: uint8 `[ceil(K/2), V]`, each byte in both of its channels' places. TURNED: the
    same the other way round, channels next to each other. ODD: `p` may be anywhere.
    """
    if ODD and VECTOR % 4 == 0 and not TURNED and (FORMAT == "int8" or FORMAT == "fp8_e4m3"):
        return _load_odd_bytes(p, channel, column, inside, K, V, PIECES, STEP)
    else:
        return _load_codes(p, channel, column, inside, K, V, VECTOR, PIECES, STEP, FORMAT, TURNED)


@triton.jit
def _load_codes(
    p,
    channel,
    column,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    TURNED: tl.constexpr,
):
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    if FORMAT == "nvfp4":
        if TURNED:
            at = p + (v * ((K + 1) // 2) + k // 2)
        else:
            at = p + tl.max_contiguous(k // 2 * V + v, (1, 1, 1, VECTOR))
        APART: tl.constexpr = STEP // 2 if TURNED else STEP // 2 * V
    else:
        if TURNED:
            at = p + (v * K + k)
        else:
            at = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
        APART: tl.constexpr = STEP if TURNED else STEP * V
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.load(at + i * APART, mask=(k + i * STEP < K) & (v < V) & inside, other=0),)
    return out


@triton.jit
def _load_odd_bytes(
    p,
    channel,
    column,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
):
    """`load_codes` of bytes that begin anywhere: four loads of every fourth column each. One of neighbouring columns
    would have a thread hold one of them, and sums then run in another order."""
    W: tl.constexpr = column.shape[0]
    C: tl.constexpr = column.shape[1]
    k = channel[:, None, :, None]
    v = tl.min(tl.reshape(column, (W, C // 4, 4)), 2)[None, :, None, :]
    APART: tl.constexpr = STEP * V
    # The hint is for the order of lanes only: bytes that lie anywhere are loaded one by one, whatever is said of them.
    at = p + tl.max_contiguous(k * V + v, (1, 1, 1, 2))
    out = ()
    for i in tl.static_range(PIECES):
        mask = (k + i * STEP < K) & (v < V) & inside
        a = tl.load(at + i * APART, mask=mask, other=0)
        b = tl.load(at + (i * APART + 1), mask=mask, other=0)
        c = tl.load(at + (i * APART + 2), mask=mask, other=0)
        d = tl.load(at + (i * APART + 3), mask=mask, other=0)
        out = out + (_in_columns(a, b, c, d),)
    return out


@triton.jit
def load_words(
    p,
    channel,
    word,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """As `load_codes`, 8-bit codes four columns a number: int32 pieces of a quarter as many columns.

    What a loop carries from one turn to the next should be words: bytes would take a register each.

    Args:
        word: `[WARPS, COLUMNS / 4]`, the words' places in a row. MASKED: pieces go beyond the state's ends; else what
            is not `inside` is anything.
    """
    k = channel[:, None, :, None]
    v = word[None, :, None, :]
    at = p.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(k * (V // 4) + v, (1, 1, 1, VECTOR // 4))
    out = ()
    for i in tl.static_range(PIECES):
        if MASKED:
            x = tl.load(at + i * STEP * (V // 4), mask=(k + i * STEP < K) & (v < V // 4) & inside, other=0)
        else:
            x = tl.load(at + i * STEP * (V // 4), mask=inside)
        out = out + (x,)
    return out


@triton.jit
def _in_columns(a, b, c, d):
    """Four numbers a word to columns."""
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, (a.shape[0], a.shape[1], a.shape[2], 4 * a.shape[3]))


@triton.jit
def _int8_of_words(words, keep):
    a, b, c, d = tl.inline_asm_elementwise(
        INT8_NUMBERS,
        "=&f,=&f,=&f,=&f,r,r",
        [words, tl.broadcast_to(keep, words.shape)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return _in_columns(a, b, c, d)


@triton.jit
def _int8_steps_of_words(words, step, shift):
    """Four codes of each word times a step, a scalar; `shift` as `INT8_STEPS` has it."""
    a, b, c, d = tl.inline_asm_elementwise(
        INT8_STEPS,
        "=&f,=&f,=&f,=&f,r,f,f",
        [words, tl.broadcast_to(step, words.shape), tl.broadcast_to(shift, words.shape)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return _in_columns(a, b, c, d)


@triton.jit
def _fp8_of_words(words, keep):
    a, b, c, d = tl.inline_asm_elementwise(
        FP8_NUMBERS,
        "=&f,=&f,=&f,=&f,r,r",
        [words, tl.broadcast_to(keep, words.shape)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return _in_columns(a, b, c, d)


@triton.jit
def decoded_words(
    words, steps, known, PIECES: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr, SHORT: tl.constexpr
):
    """`decoded` of what `load_words` or `load_nibbles` loaded. SHORT: steps are stored scales, of 16 bits."""
    if FORMAT == "nvfp4":
        return decoded_nibbles(words, steps, known, PIECES, FAST)
    elif SHORT and FORMAT == "int8" and len(steps) == 1 and len(steps[0].shape) == 0:
        step = tl.where(known, steps[0], 0.0)
        shift = step * -INT8_OFFSET
        # All steps but the odd ones of the last 256 in a binade.
        if tl.fma(step, INT8_OFFSET, shift) == 0.0:
            out = ()
            for i in tl.static_range(PIECES):
                out = out + (_int8_steps_of_words(words[i], step, shift),)
        else:
            out = _decoded_words(words, steps, known, PIECES, FORMAT)
        return out
    else:
        return _decoded_words(words, steps, known, PIECES, FORMAT)


@triton.jit
def _decoded_words(words, steps, known, PIECES: tl.constexpr, FORMAT: tl.constexpr):
    keep = tl.where(known, -1, 0)
    out = ()
    for i in tl.static_range(PIECES):
        if FORMAT == "int8":
            x = _int8_of_words(words[i], keep)
        else:
            x = _fp8_of_words(words[i], keep)
        if len(steps) > 0:
            x = x * tl.where(known, steps[i // (PIECES // len(steps))], 0.0)
        out = out + (x,)
    return out


@triton.jit
def store_plain(
    p,
    S,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FULL: tl.constexpr,
    TURNED: tl.constexpr,
):
    """One head's state as numbers of the type that `p` points to, `[K, V]`. FULL: none of it lies beyond the ends."""
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    if TURNED:
        at = p + (v * K + k)
    else:
        at = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
    APART: tl.constexpr = STEP if TURNED else STEP * V
    for i in tl.static_range(PIECES):
        x = S[i].to(p.dtype.element_ty)
        if FULL:
            tl.store(at + i * APART, x)
        else:
            tl.store(at + i * APART, x, mask=(k + i * STEP < K) & (v < V))


@triton.jit
def load_steps(
    p_scales,
    p_blocks,
    channel,
    column,
    first,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """What one head's codes are multiplied with, one for every group of pieces of the same tiles, as `quantize` has it.

    Args:
        first: the program's first column. WIDTH: its columns. inside: as `load_codes` has it; 0 where it is not.
    """
    if FORMAT == "int8" or FORMAT == "fp8_e4m3":
        TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        if BLOCK_K >= K and BLOCK_V >= WIDTH:
            steps = (tl.load(p_scales + first // BLOCK_V, mask=inside, other=0.0),)
        else:
            if BLOCK_K >= K:
                # As a vector of columns: of four axes, it would bring a layout of its own.
                x = tl.load(p_scales + column // BLOCK_V, mask=(column < V) & inside, other=0.0)
                steps = (x[None, :, None, :],)
            else:
                v = column[None, :, None, :]
                COUNT: tl.constexpr = min(BLOCK_K // STEP, PIECES)
                steps = ()
                for tile in tl.static_range(PIECES // COUNT):
                    row = channel[:, None, :, None] + tile * COUNT * STEP
                    at = row // BLOCK_K * TILES + v // BLOCK_V
                    steps = steps + (tl.load(p_scales + at, mask=(row < K) & (v < V) & inside, other=0.0),)
    elif FORMAT == "nvfp4":
        v = column[None, :, None, :]
        x = tl.load(p_scales + column // GROUP, mask=(column < V) & inside, other=0.0)
        group = x[None, :, None, :]
        IN_BLOCK: tl.constexpr = min(BLOCK // STEP, PIECES)
        steps = ()
        for tile in tl.static_range(PIECES // IN_BLOCK):
            row = channel[:, None, :, None] + tile * IN_BLOCK * STEP
            at = tl.max_contiguous(row // BLOCK * V + v, (1, 1, 1, VECTOR))
            byte = tl.load(p_blocks + at, mask=(row < K) & (v < V) & inside, other=0).to(tl.int32)
            block = tl.where(byte == _NAN_BYTE, float("nan"), fp8_from_bytes(byte))
            steps = steps + (block * group,)
    else:
        steps = (1.0,)
    return steps


@triton.jit
def _int8_values(raw, keep, FAST: tl.constexpr):
    """int8 codes, as bytes, in fp32; `keep` all ones, or 0 for zeros instead."""
    if FAST:
        return tl.inline_asm_elementwise(
            INT8_NUMBERS,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [raw, tl.broadcast_to(keep, raw.shape)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        ).to(tl.float32, bitcast=True)
    else:
        return from_bytes((raw.to(tl.int32) & keep) ^ 0x80, "int8")


@triton.jit
def _fp8_values(raw, keep, FAST: tl.constexpr):
    """E4M3 codes, as bytes, in fp32; `keep` as in `_int8_values`. Half precision has all of their values."""
    if FAST:
        return tl.inline_asm_elementwise(
            FP8_NUMBERS,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [raw, tl.broadcast_to(keep, raw.shape)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        ).to(tl.float32, bitcast=True)
    else:
        return from_bytes(raw.to(tl.int32) & keep, "fp8_e4m3")


@triton.jit
def decoded(raw, steps, known, channel, PIECES: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """The state that `raw` codes and `steps` stand for, fp32, exactly; zeros where `known`, a scalar, is not.

    No steps, `()`: the numbers that codes are.
    """
    keep = tl.where(known, -1, 0)
    out = ()
    for i in tl.static_range(PIECES):
        if FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4":
            if FORMAT == "int8":
                x = _int8_values(raw[i], keep, FAST)
            elif FORMAT == "fp8_e4m3":
                x = _fp8_values(raw[i], keep, FAST)
            else:
                # Pieces begin at even channels, so the place's own parity says which half of the byte is its.
                nibble = (raw[i].to(tl.int32) >> ((channel % 2) * 4)[:, None, :, None]) & (15 & keep)
                x = from_nibbles(nibble)
            if len(steps) > 0:
                x = x * tl.where(known, steps[i // (PIECES // len(steps))], 0.0)
            out = out + (x,)
        else:
            out = out + (tl.where(known, raw[i].to(tl.float32), 0.0),)
    return out
