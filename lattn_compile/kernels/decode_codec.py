"""QDQ of a state in pieces (`common/pieces.py`): finds its tiles in the layout, and packs codes for the backward.

The arithmetic of one tile and one value is `common/codec.py`.

Sums and maxima over a warp go axis by axis. Triton (3.6, 3.7) shuffles wrong lanes in a reduction over axes that a
reshape has joined, where lanes of other axes lie between theirs: with one column a thread they do. Joined only where
threads hold vectors of columns and `layout.FLIP` is known to be right, so that all lanes of a warp are of these axes.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.formats.bf16.triton import round_codes as round_bf16
from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.fp16.triton import round_codes as round_fp16
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.formats.nvfp4.triton import BLOCK, GROUP, from_nibbles, to_nibbles
from lattn_compile.kernels.common.codec import block_scales, from_bytes, round_codes, scales, to_bytes

__all__ = [
    "from_words",
    "magnitudes_of_blocks",
    "magnitudes_of_groups",
    "over_groups",
    "places_of_steps",
    "quantize",
    "tile_scales",
    "to_words",
]

_INFINITE = tl.constexpr(0x7F800000)
_KNOWN = tl.constexpr(triton.__version__.startswith(("3.6.", "3.7.")))


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _over_tiles(bits, RUNS: tl.constexpr, BLOCK_V: tl.constexpr, FLIP: tl.constexpr):
    """Maxima of tiles of RUNS lane groups by BLOCK_V columns, from one number a place.

    `bits` int32, one piece; returns something that broadcasts against a piece (a scalar where all is one tile).
    """
    if FLIP:
        m = tl.max(bits, 0)  # [WARPS, LANES, COLUMNS]
    else:
        m = tl.permute(tl.max(bits, 2), (1, 0, 2))
    WARPS: tl.constexpr = m.shape[0]
    LANES: tl.constexpr = m.shape[1]
    COLUMNS: tl.constexpr = m.shape[2]
    if RUNS == LANES and BLOCK_V >= WARPS * COLUMNS:
        if _KNOWN and LANES * COLUMNS > 32:
            # All lanes of a warp at once, for which there is one instruction; then the warps.
            return tl.max(tl.max(tl.reshape(m, (WARPS, LANES * COLUMNS)), 1), 0)
        else:
            return tl.max(tl.max(tl.max(m, 2), 1), 0)
    else:
        if RUNS > 1:
            runs = tl.max(tl.reshape(m, (WARPS, LANES // RUNS, RUNS, COLUMNS)), 2)
            runs = tl.broadcast_to(runs[:, :, None, :], (WARPS, LANES // RUNS, RUNS, COLUMNS))
            m = tl.reshape(runs, (WARPS, LANES, COLUMNS))
        if BLOCK_V > 1 and BLOCK_V < COLUMNS:
            tiles = tl.max(tl.reshape(m, (WARPS, LANES, COLUMNS // BLOCK_V, BLOCK_V)), 3)
            tiles = tl.broadcast_to(tiles[:, :, :, None], (WARPS, LANES, COLUMNS // BLOCK_V, BLOCK_V))
            m = tl.reshape(tiles, (WARPS, LANES, COLUMNS))
        elif BLOCK_V >= COLUMNS:
            SPAN: tl.constexpr = min(BLOCK_V // COLUMNS, WARPS)
            tiles = tl.max(tl.reshape(tl.max(m, 2), (WARPS // SPAN, SPAN, LANES)), 1)
            tiles = tl.broadcast_to(tiles[:, None, :], (WARPS // SPAN, SPAN, LANES))
            m = tl.broadcast_to(tl.reshape(tiles, (WARPS, LANES))[:, :, None], (WARPS, LANES, COLUMNS))
        if FLIP:
            return m[None, :, :, :]
        else:
            return tl.permute(m, (1, 0, 2))[:, :, None, :]


@triton.jit
def _magnitude_bits(S, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Bits of the largest magnitude of COUNT pieces from FIRST on, at each place."""
    m = tl.abs(S[FIRST])
    for i in tl.static_range(FIRST + 1, FIRST + COUNT):
        m = _largest(m, tl.abs(S[i]))
    bits = m.to(tl.int32, bitcast=True)
    if COUNT == 1:
        bits = bits & 0x7FFFFFFF  # a NaN may have any sign; of a maximum it is positive
    return bits


@triton.jit
def magnitudes_of_groups(S, PIECES: tl.constexpr, FLIP: tl.constexpr):
    """Bits of the largest finite magnitude of nvfp4's groups of columns; 0 where a group has none."""
    m = tl.zeros(S[0].shape, tl.int32)
    for i in tl.static_range(PIECES):
        bits = tl.abs(S[i]).to(tl.int32, bitcast=True)
        m = tl.maximum(m, tl.where(bits < _INFINITE, bits, 0))
    return over_groups(m, FLIP)


@triton.jit
def magnitudes_of_blocks(S, PIECES: tl.constexpr, FLIP: tl.constexpr):
    """Bits of the largest magnitudes of nvfp4's blocks, where each is a lane's run, NaN and infinity on top; of one
    step, so that it broadcasts against a piece."""
    return _over_tiles(_magnitude_bits(S, 0, PIECES), 1, 1, FLIP)


@triton.jit
def over_groups(bits, FLIP: tl.constexpr):
    """Maxima over nvfp4's groups of columns, from one number a place."""
    LANES: tl.constexpr = bits.shape[2] if FLIP else bits.shape[0]
    return _over_tiles(bits, LANES, GROUP, FLIP)


@triton.jit
def tile_scales(
    S,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
    FAST: tl.constexpr = False,
):
    """Tiled formats' (steps, inverses, zeros) of `common.codec.scales`, one for every group of pieces that lies in the
    same tiles, scalars or tensors that broadcast against a piece; arguments as `quantize` has them, FAST as
    `common.codec.scales`."""
    tl.static_assert(FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "nvfp4")
    NVFP4: tl.constexpr = FORMAT == "nvfp4"
    LARGEST_CODE: tl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
    RUN: tl.constexpr = PIECES * STEP
    LANES: tl.constexpr = S[0].shape[2] if FLIP else S[0].shape[0]
    ROWS: tl.constexpr = BLOCK if NVFP4 else BLOCK_K
    # A tile is some lanes' whole runs, or a group of pieces in a lane's run.
    COUNT: tl.constexpr = min(ROWS // STEP, PIECES)
    RUNS: tl.constexpr = min((ROWS + RUN - 1) // RUN, LANES)
    if NVFP4:
        group = magnitudes_of_groups(S, PIECES, FLIP)
    steps = ()
    inverses = ()
    zeros = ()
    for tile in tl.static_range(PIECES // COUNT):
        amax = _over_tiles(_magnitude_bits(S, tile * COUNT, COUNT), RUNS, 1 if NVFP4 else BLOCK_V, FLIP)
        if NVFP4:
            step, inverse, zero = block_scales(amax, group)
        else:
            step, inverse, zero = scales(amax, LARGEST_CODE, FAST)
        steps = steps + (step,)
        inverses = inverses + (inverse,)
        zeros = zeros + (zero,)
    return steps, inverses, zeros


@triton.jit
def quantize(
    S,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    FLIP: tl.constexpr,
):
    """QDQ of a state in pieces, every tile of which lies in this program.

    Args:
        BLOCK_K, BLOCK_V: the tile, powers of two; at least all channels, or columns, where it is the whole axis.
            Ignored for nvfp4, whose runs must hold whole blocks of 16 channels. STEP divides BLOCK_K.

    Returns:
        (written, codes, steps): the state that is read back; what `to_words` takes; and what codes are multiplied with,
        one for every group of pieces that lies in the same tiles, a scalar or a tensor that broadcasts against a piece.
        Plain formats return the written state, again, and a step of 1.
    """
    if FORMAT == "bf16" or FORMAT == "fp16":
        out = ()
        for i in tl.static_range(PIECES):
            out = out + (round_bf16(S[i]) if FORMAT == "bf16" else round_fp16(S[i]),)
        return out, out, (1.0,)
    else:
        steps, inverses, zeros = tile_scales(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
        COUNT: tl.constexpr = PIECES // len(steps)
        written = ()
        codes = ()
        for i in tl.static_range(PIECES):
            code, rounded = round_codes(tl.fma(S[i], inverses[i // COUNT], zeros[i // COUNT]), FORMAT)
            codes = codes + (rounded,)
            written = written + (code * steps[i // COUNT],)
        return written, codes, steps


@triton.jit
def places_of_steps(group, channel, lane, STEPS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Where the first step of a piece's places lies in scratch memory `[.., groups of COLUMNS columns, STEPS, LANES,
    COLUMNS]`; the channels of one lane share theirs. The other steps follow LANES * COLUMNS further each."""
    LANES: tl.constexpr = lane.shape[0] * lane.shape[2]
    at = (group[:, None] * (STEPS * LANES * COLUMNS) + tl.arange(0, COLUMNS)[None, :])[None, :, None, :]
    at = at + lane * COLUMNS + channel[:, None, :, None] * 0
    return tl.max_contiguous(at, (1, 1, 1, VECTOR))


@triton.jit
def to_words(codes, word: tl.constexpr, FORMAT: tl.constexpr, MASK: tl.constexpr, PIECES: tl.constexpr):
    """Word number `word` of a thread's codes, int32: four bytes, or eight halves for nvfp4, a piece each.

    MASK: pieces of one word may lie in different tiles, so that the rubbish which a NaN is stored as must not spread.
    """
    IN_WORD: tl.constexpr = 8 if FORMAT == "nvfp4" else 4
    BITS: tl.constexpr = 32 // IN_WORD
    FIRST: tl.constexpr = IN_WORD * word
    packed = _code_bits(codes[FIRST], FORMAT, MASK)
    for i in tl.static_range(1, min(IN_WORD, PIECES - FIRST)):
        packed += _code_bits(codes[FIRST + i], FORMAT, MASK) << (BITS * i)
    return packed


@triton.jit
def _code_bits(code, FORMAT: tl.constexpr, MASK: tl.constexpr):
    if FORMAT == "nvfp4":
        return to_nibbles(code)
    elif MASK:
        return to_bytes(code, FORMAT) & 0xFF
    else:
        return to_bytes(code, FORMAT)


@triton.jit
def from_words(words, piece: tl.constexpr, FORMAT: tl.constexpr):
    """The codes of one piece, fp32, before their step."""
    if FORMAT == "nvfp4":
        return from_nibbles((words[piece // 8] >> (4 * (piece % 8))) & 15)
    else:
        return from_bytes((words[piece // 4] >> (8 * (piece % 4))) & 0xFF, FORMAT)
