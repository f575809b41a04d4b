"""`fp16`: the state cast to `torch.float16`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from lattn_compile.formats.plain import PlainFormat

__all__ = ["Fp16"]


@dataclasses.dataclass(frozen=True)
class Fp16(PlainFormat):
    """IEEE half, 2 bytes a value: 11 significant bits, overflows at 65,520."""

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "IEEE half, 2 bytes a value: 11 significant bits, overflows at 65,520"
    dtype: ClassVar[torch.dtype] = torch.float16
