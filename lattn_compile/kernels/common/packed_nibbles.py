"""nvfp4 states of the in-place kernels, a word of four columns and two neighbouring channels at a time.

For layouts whose pieces are two channels high and whose lanes hold one block of 16 channels each: every sensible size
has such a one, if 4 divides V. Each byte in memory is then one piece's, and each block one lane's. What has no place
here goes value by value, in `common/packed_tiles.py` and `decode_checkpoints.py`, to the same bits.

FAST 2: by NVIDIA's instructions; 1: in Triton's own operations, which any GPU and Triton's interpreter have.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import from_bytes as fp8_from_bytes
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, from_nibbles
from lattn_compile.kernels.common.pieces import key_channels

__all__ = ["decoded_nibbles", "load_nibbles", "nibble_steps", "one_step"]

_NAN_BYTE = tl.constexpr(0x7F)  # of E4M3

_EIGHT = tl.constexpr((tl.float32,) * 8)

# A word's eight numbers: those of the bytes' low halves, then of the high ones. Sign, exponent and mantissa bit of each
# go where a half-precision number's upper byte has them, which is 2^-14 of the number.
_NUMBERS = tl.constexpr(
    """
    {
    .reg .b32 word, high, low, more, a, b, c, d;
    .reg .b16 x, y;
    and.b32 word, $8, $9;
    shr.u32 more, word, 3;
    and.b32 more, more, 0x0E0E0E0E;
    lop3.b32 high, word, 0x80808080, more, 0xEA;
    shl.b32 more, word, 1;
    and.b32 more, more, 0x0E0E0E0E;
    shl.b32 low, word, 4;
    lop3.b32 low, low, 0x80808080, more, 0xEA;
    prmt.b32 a, low, 0, 0x1404;
    prmt.b32 b, low, 0, 0x3424;
    prmt.b32 c, high, 0, 0x1404;
    prmt.b32 d, high, 0, 0x3424;
    mov.b32 more, 0x74007400;
    mul.rn.f16x2 a, a, more;
    mul.rn.f16x2 b, b, more;
    mul.rn.f16x2 c, c, more;
    mul.rn.f16x2 d, d, more;
    mov.b32 {x, y}, a;
    cvt.f32.f16 $0, x;
    cvt.f32.f16 $1, y;
    mov.b32 {x, y}, b;
    cvt.f32.f16 $2, x;
    cvt.f32.f16 $3, y;
    mov.b32 {x, y}, c;
    cvt.f32.f16 $4, x;
    cvt.f32.f16 $5, y;
    mov.b32 {x, y}, d;
    cvt.f32.f16 $6, x;
    cvt.f32.f16 $7, y;
    }
    """
)


@triton.jit
def one_step(channel, RUN: tl.constexpr):
    """Lanes, `[LANES, 1]`, flipped as `channel` is, times RUN. Two steps are fewer than any layout has lanes."""
    if channel.shape[0] == 2:
        return key_channels(channel.shape[1], RUN, 1, True)
    else:
        return key_channels(channel.shape[0], RUN, 1, False)


@triton.jit
def load_nibbles(
    p,
    channel,
    word,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    ODD: tl.constexpr,
):
    """One head's codes at `p`, uint8 `[ceil(K / 2), V]`, as int32 pieces of one step and a quarter of the columns; 0
    beyond the ends and where `inside` is not.

    Args:
        word: `[WARPS, COLUMNS / 4]`, the words' places in a row. ODD: `p` may be anywhere, so bytes are loaded.
    """
    row = one_step(channel, PIECES)[:, None, :, None]
    v = word[None, :, None, :]
    # Of two words at least, or one a thread would lie in an order of its own.
    if ODD:
        at = p + tl.max_contiguous(row * V + 4 * v, (1, 1, 1, 2))
    else:
        at = p.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(row * (V // 4) + v, (1, 1, 1, max(VECTOR // 4, 2)))
    out = ()
    for i in tl.static_range(PIECES):
        mask = (row + i < (K + 1) // 2) & (v < V // 4) & inside
        if ODD:
            a = tl.load(at + i * V, mask=mask, other=0).to(tl.int32)
            b = tl.load(at + (i * V + 1), mask=mask, other=0).to(tl.int32)
            c = tl.load(at + (i * V + 2), mask=mask, other=0).to(tl.int32)
            d = tl.load(at + (i * V + 3), mask=mask, other=0).to(tl.int32)
            out = out + (a | (b << 8) | (c << 16) | (d << 24),)
        else:
            out = out + (tl.load(at + i * (V // 4), mask=mask, other=0),)
    return out


@triton.jit
def nibble_steps(
    p_scales,
    p_blocks,
    channel,
    column,
    inside,
    K: tl.constexpr,
    V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """What one head's codes are multiplied with, of one step."""
    group = tl.load(p_scales + column // GROUP, mask=(column < V) & inside, other=0.0)
    row = one_step(channel, 1)[:, None, :, None]
    v = column[None, :, None, :]
    at = tl.max_contiguous(row * V + v, (1, 1, 1, VECTOR))
    byte = tl.load(p_blocks + at, mask=(row * BLOCK < K) & (v < V) & inside, other=0).to(tl.int32)
    block = tl.where(byte == _NAN_BYTE, float("nan"), fp8_from_bytes(byte))
    return (block * group[None, :, None, :],)


@triton.jit
def _in_columns(a, b, c, d):
    """Four numbers a word to columns."""
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, (a.shape[0], a.shape[1], a.shape[2], 4 * a.shape[3]))


@triton.jit
def _nibble(word, at: tl.constexpr):
    return from_nibbles((word >> (4 * at)) & 15)


@triton.jit
def decoded_nibbles(words, steps, known, PIECES: tl.constexpr, FAST: tl.constexpr):
    """`packed_tiles.decoded` of what `load_nibbles` loaded."""
    FLIP: tl.constexpr = words[0].shape[0] == 1
    keep = tl.where(known, -1, 0)
    out = ()
    for i in tl.static_range(PIECES):
        if FAST == 2:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                _NUMBERS,
                "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r",
                [words[i], tl.broadcast_to(keep, words[i].shape)],
                dtype=_EIGHT,
                is_pure=True,
                pack=1,
            )
        else:
            word = words[i] & keep
            a, b, c, d = _nibble(word, 0), _nibble(word, 2), _nibble(word, 4), _nibble(word, 6)
            e, f, g, h = _nibble(word, 1), _nibble(word, 3), _nibble(word, 5), _nibble(word, 7)
        x = tl.join(_in_columns(a, b, c, d), _in_columns(e, f, g, h))
        if FLIP:
            x = tl.reshape(tl.permute(x, (0, 4, 1, 2, 3)), (2, x.shape[1], x.shape[2], x.shape[3]))
        else:
            x = tl.reshape(tl.permute(x, (0, 1, 2, 4, 3)), (x.shape[0], x.shape[1], 2, x.shape[3]))
        if len(steps) > 0:
            x = x * tl.where(known, steps[0], 0.0)
        out = out + (x,)
    return out
