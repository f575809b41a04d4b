"""What the plain formats share: a cast, no scale, no edge rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.base import Encoded, Format, as_state, check_encoded
from lattn_compile.formats.rounding import round_to_minifloat_

__all__ = ["PlainFormat"]


@dataclasses.dataclass(frozen=True)
class PlainFormat(Format):
    """Stores each value in `dtype`, as torch casts it; NaN and Inf, and overflow to Inf, included.

    With random numbers, values up to the largest finite one are rounded to one of their two neighbours. Those beyond
    it are cast: infinity is at no distance, so what overflows is what overflows to nearest, and nothing else does.
    """

    is_plain: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def _rounded(self, S: Tensor, r: Tensor | None) -> Tensor:
        """`S` in its compute dtype; with `r`, rounded to numbers of `dtype` already, but for overflows."""
        x = as_state(S)
        if r is None:
            return x
        target = torch.finfo(self.dtype)
        # fp32 has no inverse of the spacing of bf16's subnormals. The odds are the same in both: they have 16 bits.
        compute = x.dtype if self.dtype == torch.float16 else torch.float64
        y = round_to_minifloat_(
            x.to(compute, copy=True),
            mantissa=-int(math.log2(target.eps)),
            min_exponent=int(math.log2(target.smallest_normal)),
            r=r,
        )
        return torch.where(x.abs() <= target.max, y.to(x.dtype), x)

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        # A copy even where nothing is to be cast: an encoded state must not change with the caller's tensor.
        return {"codes": self._rounded(S, r).to(self.dtype, copy=True, memory_format=torch.contiguous_format)}

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc, None if shape is None else {"codes": tuple(shape[-2:])})
        return enc["codes"].to(dtype or torch.float32)

    def qdq(self, S: Tensor, r: Tensor | None = None) -> Tensor:
        return self._rounded(S, r).to(self.dtype).to(S.dtype)

    def nbytes(self, K: int, V: int) -> int:
        return K * V * self.dtype.itemsize
