"""How a head's state is spread over programs, warps and lanes, from its sizes alone (`pieces.py` says what it means).

Never from the number of sequences or tokens: the order of every sum follows from the layout, so a sequence gets the
same bits in any batch and however its tokens are cut into calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton

__all__ = ["FLIP", "MAX_WARPS", "Layout", "layout"]

FLIP = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 7)
"""Which axis of a piece this Triton's layouts fill with lanes."""

MAX_WARPS = 16
"""Of a program: the registers of more would not hold their share of a state."""

_WARP = 32
_PLACES = 8
"""Of a piece in one thread: two float4."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a program's pieces, named as in `pieces.py`; `vector` is the number of columns that a thread holds."""

    key_dim: int
    value_dim: int
    lanes: int
    pieces: int
    step: int
    warps: int
    columns: int
    vector: int

    @property
    def width(self) -> int:
        """Value columns of a program."""
        return self.warps * self.columns

    @property
    def blocks(self) -> int:
        """Programs of a head."""
        return -(-self.value_dim // self.width)

    @property
    def groups(self) -> int:
        """Groups of `columns` columns of a head, those of its last program that lie beyond V included."""
        return self.blocks * self.warps

    @property
    def stride(self) -> int:
        """Places of one piece of one warp."""
        return self.lanes * self.step * self.columns

    def constants(self) -> dict[str, Any]:
        """The kernels' compile-time arguments."""
        return {
            "K": self.key_dim,
            "V": self.value_dim,
            "LANES": self.lanes,
            "PIECES": self.pieces,
            "STEP": self.step,
            "WARPS": self.warps,
            "COLUMNS": self.columns,
            "VECTOR": self.vector,
            "FLIP": FLIP,
        }


def layout(key_dim: int, value_dim: int, *, least_run: int = 1, width: int = 1, step: int | None = None) -> Layout:
    """The layout of a head's `[K, V]` state.

    Args:
        least_run: key channels that one lane must hold together, a power of two.
        width: value columns that one program must hold together, a power of two.
        step: bounds the channels of a piece in one lane, a power of two.
    """
    vector = math.gcd(value_dim, 4)
    keys = max(16, triton.next_power_of_2(key_dim))
    # 64 places a thread for K <= 128: as much as leaves room for two tokens' inputs.
    columns = 16 if keys <= 128 else 8
    lanes = _WARP * vector // columns
    run = max(keys // lanes, least_run)
    step = min(_PLACES // vector, run) if step is None else min(_PLACES // vector, run, step)
    # A vector of channels must have fewer elements than the program has threads, see `pieces.py`.
    warps = max(triton.next_power_of_2(lanes * step // _WARP + 1), width // columns)
    return Layout(key_dim, value_dim, lanes, run // step, step, warps, columns, vector)
