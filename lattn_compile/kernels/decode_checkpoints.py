"""Encoded checkpoints on the device: `keep` writes a row of `checkpoints.py` in the token loop, `encode` makes rows of
states that the loop left as they are, `fetch` reads rows."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.fp8_e4m3.triton import from_bytes as fp8_from_bytes
from lattn_compile.formats.fp8_e4m3.triton import to_bytes as fp8_to_bytes
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, LARGEST_GROUP, from_nibbles, to_nibbles
from lattn_compile.kernels.common.codec import block_scales, rn16, round_codes, to_bytes
from lattn_compile.kernels.common.pieces import key_channels
from lattn_compile.kernels.decode_codec import magnitudes_of_groups, quantize

__all__ = ["encode", "fetch", "keep"]

_TINY = tl.constexpr((127 - 100) << 23)  # the bits of 2^-100
_INFINITE = tl.constexpr(0x7F800000)
_NAN_BYTE = tl.constexpr(0x7F)  # of E4M3


@triton.jit
def _over_channels(x):
    return x[:, None, :, None]


@triton.jit
def _over_columns(x):
    return x[None, :, None, :]


@triton.jit
def keep(
    p_codes,
    p_scales,
    p_blocks,
    S,
    channel,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TURNED: tl.constexpr = False,
):
    """Stores a state in pieces that `quantize` would leave as it is: one head's codes, its scales and block scales."""
    _, codes, steps = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
    COUNT: tl.constexpr = PIECES // len(steps)
    k = _over_channels(channel)
    v = _over_columns(column)
    if FORMAT == "nvfp4":
        amax = magnitudes_of_groups(S, PIECES, FLIP)
        group = tl.where(amax >= _TINY, rn16(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST_GROUP)), 1.0)
        mine = (k == 0) & (v % GROUP == 0) & (v < V)
        tl.store(p_scales + (v // GROUP + k * 0), tl.broadcast_to(group, S[0].shape), mask=mine)
        for tile in tl.static_range(PIECES // COUNT):
            # A step is a product without a rounding, so this is the block's scale.
            block = tl.broadcast_to(tl.div_rn(steps[tile], group), S[0].shape)
            byte = tl.where(block == block, fp8_to_bytes(block), _NAN_BYTE)
            row = k + tile * COUNT * STEP
            mine = (row % BLOCK == 0) & (row < K) & (v < V)
            tl.store(p_blocks + (row // BLOCK * V + v), byte.to(tl.uint8), mask=mine)
        pair = _over_channels(key_channels(LANES, PIECES * STEP // 2, STEP // 2, FLIP))
        for i in tl.static_range(PIECES):
            byte = _in_pairs(tl.where(steps[i // COUNT] == steps[i // COUNT], to_nibbles(codes[i]), 0), FLIP)
            row = pair + i * (STEP // 2)
            if TURNED:
                at = v * ((K + 1) // 2) + row
            else:
                at = tl.max_contiguous(row * V + v, (1, 1, 1, VECTOR))
            tl.store(p_codes + at, byte.to(tl.uint8), mask=(row < (K + 1) // 2) & (v < V))
    else:
        tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3")
        for tile in tl.static_range(PIECES // COUNT):
            row = k + tile * COUNT * STEP
            mine = (row % BLOCK_K == 0) & (v % BLOCK_V == 0) & (row < K) & (v < V)
            at = row // BLOCK_K * ((V + BLOCK_V - 1) // BLOCK_V) + v // BLOCK_V
            tl.store(p_scales + at, tl.broadcast_to(steps[tile], S[0].shape), mask=mine)
        for i in tl.static_range(PIECES):
            byte = to_bytes(codes[i], FORMAT)
            if FORMAT == "int8":
                byte -= 128
            byte = tl.where(steps[i // COUNT] == steps[i // COUNT], byte, 0) & 0xFF
            row = k + i * STEP
            if TURNED:
                at = v * K + row
            else:
                at = tl.max_contiguous(row * V + v, (1, 1, 1, VECTOR))
            tl.store(p_codes + at, byte.to(tl.uint8), mask=(row < K) & (v < V))


@triton.jit
def _in_pairs(nibble, FLIP: tl.constexpr):
    """Nibbles of a piece, int32, to bytes of two neighbouring channels, the first in the low half."""
    A: tl.constexpr = nibble.shape[0]
    W: tl.constexpr = nibble.shape[1]
    B: tl.constexpr = nibble.shape[2]
    C: tl.constexpr = nibble.shape[3]
    shift = tl.arange(0, 2) * 4
    if FLIP:  # steps first
        return tl.sum(tl.reshape(nibble, (A // 2, 2, W, B, C)) << shift[None, :, None, None, None], 1)
    else:
        return tl.sum(tl.reshape(nibble, (A, W, B // 2, 2, C)) << shift[None, None, None, :, None], 3)


@triton.jit(do_not_specialize=["every", "slot", "count"])
def encode(
    states, codes, scales, blocks, starts, lengths, heads, row, scale_row, block_row, every, slot, count,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """nvfp4's rows of `count` checkpoints of every sequence, those before tokens `(slot + j) * every` that it has.

    A kernel of its own: in the token loop this encoding takes three times the instructions of a token.

    Args:
        states: fp32 `[N * count, HV, K, V]`. Others as in `fetch`, which reads what this writes.

    Grid: (N * count, HV * ceil(V / 64)).
    """
    i_seq, j = tl.program_id(0) // count, tl.program_id(0) % count
    if (slot + j) * every >= tl.load(lengths + i_seq):
        return
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    HALF: tl.constexpr = BLOCK // 2
    BLOCKS: tl.constexpr = BK // BLOCK
    head, group = tl.program_id(1) // GROUPS, tl.program_id(1) % GROUPS
    at = tl.load(starts + i_seq).to(tl.int64) // every + i_seq + slot + j
    v = group * GROUP + tl.arange(0, GROUP)
    k = tl.arange(0, BK)
    inside = (k < K)[:, None] & (v < V)[None, :]
    p = states + (tl.program_id(0).to(tl.int64) * heads + head) * (K * V)
    S = tl.load(p + k[:, None] * V + v[None, :], mask=inside, other=0.0)
    bits = S.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(tl.where(bits < _INFINITE, bits, 0), 0), 0)
    scale = tl.where(amax >= _TINY, rn16(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST_GROUP)), 1.0)
    tl.store(scales + at * scale_row + head * GROUPS + group, scale)
    step, inverse, zero = block_scales(tl.max(tl.reshape(bits, (BLOCKS, BLOCK, GROUP)), 1), amax)
    block = tl.div_rn(step, scale)  # a step is a product without a rounding, so this is the block's scale
    byte = tl.where(block == block, fp8_to_bytes(block), _NAN_BYTE)
    i = tl.arange(0, BLOCKS)[:, None]
    p_block = blocks + at * block_row + (head * ((K + BLOCK - 1) // BLOCK) + i) * V + v[None, :]
    tl.store(p_block, byte.to(tl.uint8), mask=(i * BLOCK < K) & (v < V)[None, :])
    inverse, zero = inverse[:, None, :], zero[:, None, :]
    code, _ = round_codes(tl.fma(tl.reshape(S, (BLOCKS, BLOCK, GROUP)), inverse, zero), "nvfp4")
    nibble = tl.where((step == step)[:, None, :], to_nibbles(code), 0)
    shift = (tl.arange(0, 2) * 4)[None, None, :, None]
    pair = tl.sum(tl.reshape(nibble, (BLOCKS, HALF, 2, GROUP)) << shift, 2)
    at_k = i[:, :, None] * HALF + tl.arange(0, HALF)[None, :, None]
    p_code = codes + at * row + (head * ((K + 1) // 2) + at_k) * V + v[None, None, :]
    tl.store(p_code, pair.to(tl.uint8), mask=(at_k < (K + 1) // 2) & (v < V)[None, None, :])


@triton.jit(do_not_specialize=["every", "slot"])
def fetch(
    codes,
    scales,
    blocks,
    out,
    starts,
    lengths,
    heads,
    row,
    scale_row,
    block_row,
    every,
    slot,
    K: tl.constexpr,
    V: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The states of one checkpoint of every sequence that has it: token `slot * every` of its suffix.

    Args:
        codes, scales, blocks: where the first row has its codes (uint8, or the plain format's type), its fp32 scales
            and nvfp4's block scales (uint8); the next row is `row`, `scale_row`, `block_row` of their elements further.
        out: fp32 `[N, HV, K, V]`; states of sequences without this checkpoint are left.
        starts, lengths: int64 `[N]`. heads: HV. TILE_K, TILE_V: of a scale.

    Grid: (N, ceil(HV * K * V / SIZE)).
    """
    i_seq = tl.program_id(0)
    if slot * every >= tl.load(lengths + i_seq):
        return
    at = tl.load(starts + i_seq).to(tl.int64) // every + i_seq + slot
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = place < heads * (K * V)
    head = place // (K * V)
    k = place // V % K
    v = place % V
    if FORMAT == "nvfp4":
        byte = tl.load(codes + at * row + ((head * ((K + 1) // 2) + k // 2) * V + v), mask=inside, other=0)
        code = from_nibbles(byte.to(tl.int32) >> (k % 2 * 4))
        block = tl.load(blocks + at * block_row + ((head * ((K + 15) // 16) + k // 16) * V + v), mask=inside, other=0)
        block = block.to(tl.int32)
        block = tl.where(block == _NAN_BYTE, float("nan"), fp8_from_bytes(block))
        group = tl.load(scales + at * scale_row + (head * ((V + 63) // 64) + v // 64), mask=inside, other=0.0)
        value = code * (block * group)
    elif FORMAT == "int8" or FORMAT == "fp8_e4m3":
        byte = tl.load(codes + at * row + place, mask=inside, other=0)
        if FORMAT == "int8":
            code = byte.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            code = fp8_from_bytes(byte.to(tl.int32))
        TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
        tile = (head * ((K + TILE_K - 1) // TILE_K) + k // TILE_K) * TILES + v // TILE_V
        value = code * tl.load(scales + at * scale_row + tile, mask=inside, other=0.0)
    else:
        value = tl.load(codes + at * row + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i_seq.to(tl.int64) * heads * (K * V) + place, value, mask=inside)
