"""How the in-place kernels spread a step over programs: from sizes, format and number of sequences, by a table.

No autotuner: it would guess anew on every machine, and a graph being recorded cannot wait for it. What sums run over
follows from K, V and the format alone, as in `common/layout.py`; how many tiles a program takes and how many columns a
thread holds changes no sum, so a sequence has the same bits in any batch and under every row of the table.
"""

from __future__ import annotations

import dataclasses

import triton

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import decode_call
from lattn_compile.kernels.common.layout import MAX_WARPS, Layout
from lattn_compile.kernels.decode_call import layout_of

__all__ = [
    "CHOSEN",
    "FULL",
    "LAUNCHES",
    "MOST_HEADS",
    "PROGRAMS",
    "Launch",
    "keys_a_program",
    "launch_of",
    "ring_layout",
    "stored_layout",
    "tile_constants",
    "tiles_a_program",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A way to launch.

    Attributes:
        vector: columns that a thread holds next to each other, 4 or, where a code has one or two bytes, 8. With
            more, memory moves longer parts of a row at a time; with fewer there are more threads for the same state.
        tiles: how many tiles a program of one-token steps takes one after the other, at most. A tile is the columns of
            a head that a program holds; the next one's codes are on their way while it computes one.
        columns: how many columns of a head a program holds, at least.
        early: of one-token steps without records: whether the next tile's loads begin before this one's sums, which a
            barrier sees to; else when registers are free, and that is later.
        sooner: of 8-bit codes: whether what is read first, records included, is brought to the cache before the kernel
            before has ended.
        heads: how `packed_token_cuda.py`, where it can, has heads of 8-bit codes in a program: "whole" ones, over four
            warps, or "half" ones, over two; "": it does not.
    """

    vector: int
    tiles: int = 1
    columns: int = 1
    early: bool = False
    sooner: bool = False
    heads: str = ""


LAUNCHES = {
    "narrow": Launch(4),
    "broad": Launch(4, columns=64),
    "wide": Launch(8, columns=64),
    "wide 2": Launch(8, 2, 64),
    "wide 2 early": Launch(8, 2, 64, early=True),
    "wide 4": Launch(8, 4, 64),
    "wide 8": Launch(8, 8, 64),
    "wide 8 early": Launch(8, 8, 64, early=True),
    "narrow sooner": Launch(4, sooner=True),
    "heads": Launch(8, columns=64, heads="whole"),
    "half heads": Launch(8, 2, 64, early=True, heads="half"),
}
CHOSEN: dict[str, tuple[str, str, str]] = {
    "int8": ("narrow sooner", "heads", "half heads"),
    "fp8_e4m3": ("narrow sooner", "heads", "half heads"),
    "nvfp4": ("narrow", "wide", "wide 2"),
    "bf16": ("narrow", "wide", "wide"),
    "": ("narrow", "broad", "broad"),
    "window": ("narrow sooner", "wide", "wide 4"),
}
"""Rows of a format's steps: for few, some and many states. "": all other formats; "window": with records. Of what was
right on an H200, the fastest there (`benchmarks/results/decode_nvidia_h200.md`)."""

_FEW, _MANY = 128, 1056
"""Up to how many states are few, and from how many on they are many: more than a large GPU works on at a time."""

PROGRAMS = 528
"""How many programs run at a time on a large GPU: 4 on each of 132 multiprocessors, by their registers."""

_RING_COLUMNS = 64


def launch_of(quantize: Quantizer | None, states: int, *, window: bool = False) -> Launch:
    """How a step of so many states, a head and sequence each, is launched."""
    name = "" if quantize is None else quantize.fmt.name
    form = "window" if window else name
    rows = CHOSEN.get(form, CHOSEN[""])
    return LAUNCHES[rows[0 if states <= _FEW else 1 if states < _MANY else 2]]


def stored_layout(key_dim: int, value_dim: int, quantize: Quantizer | None, launch: Launch) -> Layout:
    """The layout of the emulated kernel, perhaps with other columns a thread. Lanes, channels and their order, which
    the bits of sums follow from, stay."""
    lay = layout_of(key_dim, value_dim, quantize)
    size = 4 if quantize is None or quantize.fmt.name == "fp32" else 2 if quantize.fmt.is_plain else 1
    vector = min(launch.vector, 16 // size)
    columns = lay.columns * vector // 4
    # A program holds whole tiles, and more threads than a vector of channels has elements (`pieces.py`).
    least = max(_tile_width(lay, quantize), min(launch.columns, triton.next_power_of_2(value_dim)))
    warps = max(triton.next_power_of_2(lay.lanes * lay.step // 32 + 1), -(-least // columns))
    fits = warps <= MAX_WARPS and columns <= triton.next_power_of_2(value_dim)
    if lay.vector != 4 or value_dim % vector or not fits:
        return lay
    return dataclasses.replace(lay, vector=vector, columns=columns, warps=warps)


def _tile_width(lay: Layout, quantize: Quantizer | None) -> int:
    """Columns that a program must hold together."""
    return 1 if quantize is None or quantize.fmt.is_plain else lay.width


def ring_layout(key_dim: int, value_dim: int, quantize: Quantizer | None, launch: Launch) -> Layout:
    """`stored_layout` with no fewer than 64 columns in a program, if there are: each reads its window's keys once."""
    lay = stored_layout(key_dim, value_dim, quantize, launch)
    least = min(_RING_COLUMNS, triton.next_power_of_2(value_dim))
    return dataclasses.replace(lay, warps=max(lay.warps, least // lay.columns))


def tile_constants(lay: Layout, quantize: Quantizer | None) -> tuple[int, int]:
    """As `decode_call.tile_constants`; a tile of all columns covers the axis, which several programs may share."""
    block_k, block_v = decode_call.tile_constants(lay, quantize)
    if block_v >= lay.value_dim:
        block_v = max(block_v, triton.next_power_of_2(lay.value_dim))
    return block_k, block_v


def tiles_a_program(
    launch: Launch, lay: Layout, key_heads: int, value_heads: int, sequences: int, *, keys: bool = True
) -> tuple[int, int]:
    """Key heads, and tiles of each, that a program of a one-token step takes; several key heads with all their tiles.

    As many as the row has, and as leave programs for a whole GPU.

    Args:
        keys: whether it may be several key heads.
    """
    of_key = value_heads // key_heads * lay.blocks
    found = (1, 1)
    for own in _divisors(key_heads) if keys else [1]:
        for tiles in _divisors(of_key) if own == 1 else [of_key]:
            of_heads = tiles % lay.blocks == 0 or lay.blocks % tiles == 0
            programs = sequences * key_heads * of_key // (own * tiles)
            if of_heads and own * tiles <= launch.tiles and programs >= PROGRAMS // 2:
                found = (own, tiles)
    return found


FULL = {"whole": 256, "half": 512}
"""How many programs of heads run at a time on a large GPU, but for a few: 2 or 4 on each of 132 multiprocessors."""

_MOST_KEYS = 8
MOST_HEADS = 32
"""Of a program: what it keeps of each takes shared memory."""


def keys_a_program(launch: Launch, key_heads: int, value_heads: int, sequences: int) -> int:
    """Key heads of a program of `packed_token_cuda.py`: a power of two, as many as leave programs for a whole GPU."""
    most = min(_MOST_KEYS, MOST_HEADS * key_heads // value_heads)
    keys, programs = 1, sequences * key_heads
    while 2 * keys <= most and key_heads % (2 * keys) == 0 and programs >= 2 * keys * FULL[launch.heads]:
        keys *= 2
    return keys


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
