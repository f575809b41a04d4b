"""`fp32`: the state as it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.base import Encoded, as_state, check_encoded
from lattn_compile.formats.plain import PlainFormat

__all__ = ["Fp32"]


@dataclasses.dataclass(frozen=True)
class Fp32(PlainFormat):
    """fp32, 4 bytes a value: the unquantized state.

    It is the format that rounds nothing, and stays so in float64 computations, where the codes are float64: token mode
    with fp32, and replay with fp32 and no factors, are the exact mode in every dtype (semantics §5).
    """

    name: ClassVar[str] = "fp32"
    summary: ClassVar[str] = "fp32, 4 bytes a value: the unquantized state"
    dtype: ClassVar[torch.dtype] = torch.float32

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        return {"codes": as_state(S).clone(memory_format=torch.contiguous_format)}

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc, None if shape is None else {"codes": tuple(shape[-2:])})
        return enc["codes"].to(dtype or enc["codes"].dtype)

    def qdq(self, S: Tensor, r: Tensor | None = None) -> Tensor:
        return as_state(S).to(S.dtype)
