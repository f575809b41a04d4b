"""A stored state on its way into registers and back: rows of codes and scales, in pieces (`pieces.py`).

`load_codes` fetches, so that many loads can be on their way before the first is waited for; `decoded` computes; `keep`
of the decode form or `store_int8` writes. Formats, tiles and bits are those of `common/codec.py`.

FAST: on NVIDIA GPUs int8 goes four values at a time through a byte permutation. Converting takes a multiprocessor 16
values a clock; a permutation puts a byte into the mantissa of 2^23, 64 a clock, and a subtraction makes a number of it.
Packing is the same backwards. Triton's interpreter and other GPUs have the same arithmetic value by value.
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

__all__ = ["decoded", "load_codes", "load_steps", "store_int8", "store_plain"]

_NAN_BYTE = tl.constexpr(0x7F)  # of E4M3


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
):
    """One head's codes at `p` in pieces, as they are stored; 0 beyond its ends and where `inside`, a scalar, is not.

    8-bit formats: uint8 `[K, V]`. nvfp4: uint8 `[ceil(K/2), V]`, each byte in both of its channels' places.
    """
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    if FORMAT == "nvfp4":
        at = p + tl.max_contiguous(k // 2 * V + v, (1, 1, 1, VECTOR))
        APART: tl.constexpr = STEP // 2 * V
    else:
        at = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
        APART: tl.constexpr = STEP * V
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (tl.load(at + i * APART, mask=(k + i * STEP < K) & (v < V) & inside, other=0),)
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
):
    """One head's state as numbers of the type that `p` points to, `[K, V]`."""
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    at = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
    for i in tl.static_range(PIECES):
        tl.store(at + i * STEP * V, S[i].to(p.dtype.element_ty), mask=(k + i * STEP < K) & (v < V))


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
def _int8_values(raw, FAST: tl.constexpr):
    """int8 codes, as bytes, in fp32."""
    if FAST:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7650;
            prmt.b32 $1, bytes, 0x4B000000, 0x7651;
            prmt.b32 $2, bytes, 0x4B000000, 0x7652;
            prmt.b32 $3, bytes, 0x4B000000, 0x7653;
            sub.rn.f32 $0, $0, 0f4B000080;
            sub.rn.f32 $1, $1, 0f4B000080;
            sub.rn.f32 $2, $2, 0f4B000080;
            sub.rn.f32 $3, $3, 0f4B000080;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [raw],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        ).to(tl.float32, bitcast=True)
    else:
        return from_bytes(raw.to(tl.int32) ^ 0x80, "int8")


@triton.jit
def decoded(raw, steps, channel, PIECES: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """The state that `raw` codes and `steps` stand for, fp32, exactly."""
    out = ()
    for i in tl.static_range(PIECES):
        if FORMAT == "int8":
            out = out + (_int8_values(raw[i], FAST) * steps[i // (PIECES // len(steps))],)
        elif FORMAT == "fp8_e4m3":
            out = out + (from_bytes(raw[i].to(tl.int32), FORMAT) * steps[i // (PIECES // len(steps))],)
        elif FORMAT == "nvfp4":
            # Pieces begin at even channels, so the place's own parity says which half of the byte is its.
            nibble = (raw[i].to(tl.int32) >> ((channel % 2) * 4)[:, None, :, None]) & 15
            out = out + (from_nibbles(nibble) * steps[i // (PIECES // len(steps))],)
        else:
            out = out + (raw[i].to(tl.float32),)
    return out


@triton.jit
def store_int8(
    p,
    p_scales,
    codes,
    steps,
    channel,
    column,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Stores what `quantize` made of one head's state, on NVIDIA GPUs. VECTOR, BLOCK_V and V are multiples of 4."""
    COUNT: tl.constexpr = PIECES // len(steps)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    k = channel[:, None, :, None]
    v = column[None, :, None, :]
    place = p + tl.max_contiguous(k * V + v, (1, 1, 1, VECTOR))
    for tile in tl.static_range(len(steps)):
        if BLOCK_K >= K and BLOCK_V >= WIDTH:
            tl.store(p_scales + first // BLOCK_V, steps[tile])
        else:
            row = k + tile * COUNT * STEP
            mine = (row % BLOCK_K == 0) & (v % BLOCK_V == 0) & (row < K) & (v < V)
            at = row // BLOCK_K * TILES + v // BLOCK_V
            tl.store(p_scales + at, tl.broadcast_to(steps[tile], codes[0].shape), mask=mine)
        step = tl.broadcast_to(steps[tile], codes[0].shape)
        # A tile that is NaN has codes of 0: its scale says so.
        keep = tl.where(step == step, -1, 0)
        for i in tl.static_range(tile * COUNT, (tile + 1) * COUNT):
            bytes4 = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 low, high;
                prmt.b32 low, $1, $2, 0x0040;
                prmt.b32 high, $3, $4, 0x0040;
                prmt.b32 low, low, high, 0x5410;
                lop3.b32 $0, low, 0x80808080, $5, 0x28;
                }
                """,
                "=r,r,r,r,r,r,r,r,r",
                [codes[i].to(tl.int32, bitcast=True), keep],
                dtype=tl.uint8,
                is_pure=True,
                pack=4,
            )
            tl.store(place + i * STEP * V, bytes4, mask=(k + i * STEP < K) & (v < V))
