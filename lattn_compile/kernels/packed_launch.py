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
from lattn_compile.kernels import decode_call
from lattn_compile.kernels.common.layout import MAX_WARPS, Layout
from lattn_compile.kernels.decode_call import layout_of

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
        vector: columns that a thread holds next to each other, 4 or, where a code has one or two bytes, 8. With more,
            memory moves longer parts of a row at a time; with fewer there are more threads for the same state.
        heads: value heads of a program, at most: they share a key, and the codes of all of them are on their way before
            the first is computed.
    """

    vector: int
    heads: int


LAUNCHES = {
    "narrow": Launch(4, 1),
    "narrow 2": Launch(4, 2),
    "wide": Launch(8, 1),
    "wide 2": Launch(8, 2),
}
CHOSEN: dict[str, tuple[str, str, str]] = {
    "int8": ("narrow", "wide", "wide 2"),
    "fp8_e4m3": ("narrow", "wide", "wide 2"),
    "bf16": ("narrow", "wide", "wide"),
    "": ("narrow", "narrow", "narrow"),
    "channel": ("narrow", "narrow", "narrow"),
    "window": ("narrow", "narrow", "narrow"),
}
"""Rows of a format's steps: for few, some and many states. "": all other formats; "channel": of any format, where
states decay by channel; "window": with records. Of what was right on an H200, the fastest there
(`benchmarks/results/decode_nvidia_h200.md`). With records "narrow 2" was 4 to 6 % faster at B = 256, with a flush that
was rewritten since; no check has run the new one with two heads, so it is not chosen."""

_FEW, _MANY = 128, 1056
"""Up to how many states are few, and from how many on they are many: more than a large GPU works on at a time."""

_RING_COLUMNS = 64


def launch_of(quantize: Quantizer | None, states: int, *, by_channel: bool = False, window: bool = False) -> Launch:
    """How a step of so many states, a head and sequence each, is launched."""
    name = "" if quantize is None else quantize.fmt.name
    form = "window" if window else "channel" if by_channel else name
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
    warps = max(triton.next_power_of_2(lay.lanes * lay.step // 32 + 1), -(-_tile_width(lay, quantize) // columns))
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


def heads_a_program(launch: Launch, ratio: int) -> int:
    """Value heads that one program computes, of one key head."""
    return math.gcd(ratio, launch.heads)
