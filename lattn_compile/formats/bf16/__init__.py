"""`bf16`: the state cast to `torch.bfloat16`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from lattn_compile.formats.plain import PlainFormat

__all__ = ["Bf16"]


@dataclasses.dataclass(frozen=True)
class Bf16(PlainFormat):
    """bfloat16, 2 bytes a value: fp32's range, 8 significant bits."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "bfloat16, 2 bytes a value: fp32's range, 8 significant bits"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
