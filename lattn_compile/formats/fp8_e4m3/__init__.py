"""`fp8_e4m3`: `torch.float8_e4m3fn` codes with one scale a tile."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.rounding import round_to_minifloat_
from lattn_compile.formats.tiled import TiledFormat

__all__ = ["Fp8"]


@dataclasses.dataclass(frozen=True)
class Fp8(TiledFormat):
    """FP8 E4M3 codes, ties to even, clamped to ±448; scale `RN16(amax / 448)` for each `block_k × block_v` tile.

    The sign of zero is kept in live tiles.
    """

    name: ClassVar[str] = "fp8_e4m3"
    summary: ClassVar[str] = "FP8 E4M3, 1 byte a value and an fp32 scale a tile: 4 significant bits over 2^-15 of amax"
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = 448.0

    def _round(self, y: Tensor, r: Tensor | None) -> Tensor:
        return round_to_minifloat_(y, mantissa=3, min_exponent=-6, r=r)
