"""How the in-place kernels spread a step over programs: from sizes, format and number of sequences, by a table.

No autotuner: it would guess anew on every machine, and a graph being recorded cannot wait for it. What sums run over
follows from K, V and the format alone, as in `common/layout.py`; how many heads a program takes and how many columns a
thread holds changes no sum, so a sequence has the same bits in any batch and under every row of the table.
"""

from __future__ import annotations

import dataclasses
import math

import triton

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.common.layout import Layout
from lattn_compile.kernels.decode_call import layout_of, tile_of

__all__ = [
    "CHOSEN",
    "LAUNCHES",
    "Launch",
    "heads_a_program",
    "launch_of",
    "ring_layout",
    "stored_layout",
    "tile_constants",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A way to launch.

    Attributes:
        vector: columns that a thread holds next to each other where codes are bytes, 4 or 8. With 8, a row's part in a
            warp is 32 bytes, what memory moves at a time; with 4, half of that, and half the registers.
        heads: value heads of a program, at most, where there are programs enough: they share a key, and the codes of
            all of them are on their way before the first is computed.
    """

    vector: int
    heads: int


LAUNCHES = {
    "wide": Launch(8, 1),
    "wide 2": Launch(8, 2),
    "narrow": Launch(4, 1),
    "narrow 2": Launch(4, 2),
}
CHOSEN: dict[str, str] = {"int8": "wide", "fp8_e4m3": "wide", "nvfp4": "narrow", "": "narrow 2"}
"""The row of a format's steps; "" of all others."""

_BYTES = ("int8", "fp8_e4m3", "nvfp4")

_RING_COLUMNS = 64

_BUSY = 132 * 8
"""Programs that keep a large GPU busy. With fewer, a program takes one head, so that more of the GPU works."""


def launch_of(quantize: Quantizer | None) -> Launch:
    name = "" if quantize is None else quantize.fmt.name
    return LAUNCHES[CHOSEN.get(name, CHOSEN[""])]


def stored_layout(key_dim: int, value_dim: int, quantize: Quantizer | None) -> Layout:
    """The layout of the emulated kernel, perhaps with twice the columns a thread. Lanes, channels and their order,
    which
    the bits of sums follow from, stay."""
    lay = layout_of(key_dim, value_dim, quantize)
    if quantize is None or quantize.fmt.name not in _BYTES or launch_of(quantize).vector != 8:
        return lay
    columns = 2 * lay.columns
    warps = max(1, lay.width // columns)
    if value_dim % 8 or lay.vector != 4 or lay.width < columns or lay.lanes * lay.step >= 32 * warps:
        return lay
    return dataclasses.replace(lay, vector=8, columns=columns, warps=warps)


def ring_layout(key_dim: int, value_dim: int, quantize: Quantizer | None) -> Layout:
    """`stored_layout` with no fewer than 64 columns in a program, if there are: each reads its window's keys once."""
    lay = stored_layout(key_dim, value_dim, quantize)
    eight = quantize is not None and quantize.fmt.name in _BYTES and lay.vector == 4 and value_dim % 8 == 0
    if eight and launch_of(quantize).vector == 8:
        lay = dataclasses.replace(lay, vector=8, columns=2 * lay.columns)
    least = min(_RING_COLUMNS, triton.next_power_of_2(value_dim))
    return dataclasses.replace(lay, warps=max(lay.warps, least // lay.columns))


def tile_constants(lay: Layout, quantize: Quantizer | None) -> tuple[int, int]:
    """`BLOCK_K, BLOCK_V` as the kernels take them: powers of two, at least the padded axis where it is the whole."""
    block_k, block_v = tile_of(lay.key_dim, lay.value_dim, quantize)
    if block_k >= lay.key_dim:
        block_k = max(block_k, lay.lanes * lay.pieces * lay.step)
    if block_v >= lay.value_dim:
        block_v = max(block_v, lay.width, triton.next_power_of_2(lay.value_dim))
    return block_k, block_v


def heads_a_program(lay: Layout, ratio: int, heads: int, sequences: int, quantize: Quantizer | None) -> int:
    """Value heads that one program computes, of one key head."""
    most = math.gcd(ratio, launch_of(quantize).heads)
    return most if lay.blocks * heads * sequences >= most * _BUSY else 1
