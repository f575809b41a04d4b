"""`int8`: symmetric integers from -127 to 127 with one scale a tile."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.tiled import TiledFormat, round_to_int

__all__ = ["Int8"]


@dataclasses.dataclass(frozen=True)
class Int8(TiledFormat):
    """int8 codes, ties to even, zero point 0; scale `RN16(amax / 127)` for each `block_k × block_v` tile."""

    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = "int8, 1 byte a value and an fp32 scale a tile: uniform steps of amax/127"
    code_dtype: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = 127.0

    def _round(self, y: Tensor, r: Tensor | None) -> Tensor:
        return round_to_int(y, r)
