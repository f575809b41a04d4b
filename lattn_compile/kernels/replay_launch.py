"""How the kernels of replay are launched: blocks, warps and pipeline stages, in one table.

A window's products have 16 rows, and a walk's state gets a warp for 16 value columns, so that a row of it, all key
channels, is one warp's; more columns a warp cost registers.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAUNCHES", "Launch", "launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to launch.

    Attributes:
        walk_columns: value columns of a program of `walk`, if the format's tiles are no wider; a warp for 16.
        walk_stages: of its pipeline.
        retreat_columns, retreat_stages: of `retreat`, likewise.
        pair_warps: of `relate` and `settle`, whose products are windows' own squares; 1 or 2.
        pair_channels: channels, pair_columns: value columns at a time of them.
        slab_warps: of `prepare`, `contract` and `deliver`, whose products are as wide as K.
        slab_columns: value columns at a time. slab_channels: of a program of `contract`. contract_stages: of it.
    """

    walk_columns: int = 64
    walk_stages: int = 2
    retreat_columns: int = 64
    retreat_stages: int = 2
    pair_warps: int = 1
    pair_channels: int = 32
    pair_columns: int = 32
    slab_warps: int = 4
    slab_columns: int = 32
    slab_channels: int = 128
    contract_stages: int = 1


LAUNCHES = {
    "pipelined": Launch(),
    "plain": Launch(walk_stages=1, retreat_stages=1),
    "deep": Launch(walk_stages=3, retreat_stages=3, contract_stages=2),
    "narrow": Launch(walk_columns=32, retreat_columns=32, slab_channels=64),
}

CHOSEN = "pipelined"


def launch() -> Launch:
    """The way that is taken."""
    return LAUNCHES[CHOSEN]
