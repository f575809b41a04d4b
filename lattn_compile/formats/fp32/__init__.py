"""`fp32`: the state cast to `torch.float32`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from lattn_compile.formats.plain import PlainFormat

__all__ = ["Fp32"]


@dataclasses.dataclass(frozen=True)
class Fp32(PlainFormat):
    """fp32, 4 bytes a value: the unquantized state."""

    name: ClassVar[str] = "fp32"
    summary: ClassVar[str] = "fp32, 4 bytes a value: the unquantized state"
    dtype: ClassVar[torch.dtype] = torch.float32
