"""What the plain formats share: a cast, no scale, no edge rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.base import Encoded, Format, as_state, check_encoded

__all__ = ["PlainFormat"]


@dataclasses.dataclass(frozen=True)
class PlainFormat(Format):
    """Stores each value in `dtype`, as torch casts it; NaN and Inf, and overflow to Inf, included."""

    is_plain: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def encode(self, S: Tensor) -> Encoded:
        # A copy even where nothing is to be cast: an encoded state must not change with the caller's tensor.
        return {"codes": as_state(S).to(self.dtype, copy=True, memory_format=torch.contiguous_format)}

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc, None if shape is None else {"codes": tuple(shape[-2:])})
        return enc["codes"].to(dtype or torch.float32)

    def qdq(self, S: Tensor) -> Tensor:
        return as_state(S).to(self.dtype).to(S.dtype)

    def nbytes(self, K: int, V: int) -> int:
        return K * V * self.dtype.itemsize
