"""Rounded operands of the prefix's matrix products: which product rounds to what, and along which axis.

A product sums over the last axis of its left and the last but one of its right operand. A rounded operand has one fp32
scale a row of the left, a column of the right (nvfp4: and an E4M3 scale for every 16 values along it): one vector along
the sum is one tile of the state format's own codec, which does all rounding. Scales are dynamic, codes are nearest.
"""

from __future__ import annotations

from torch import Tensor

from lattn_compile.formats import Format, Fp8, Int8, Nvfp4
from lattn_compile.modes import Prefill

__all__ = ["Operands"]

_FORMATS: dict[str, Format] = {"int8": Int8(1), "fp8_e4m3": Fp8(1), "nvfp4": Nvfp4()}


class Operands:
    """The operands of one call; sites as `modes.SITES` names them."""

    def __init__(self, prefill: Prefill) -> None:
        self._formats = {site: _FORMATS[name] for site, name in prefill.formats.items()}

    def rounds(self, site: str) -> bool:
        return site in self._formats

    def right(self, site: str, x: Tensor) -> Tensor:
        """`x [..., sum, columns]` as the right operand of a site's product, in its dtype; `x` itself if exact."""
        fmt = self._formats.get(site)
        if fmt is None:
            return x
        if isinstance(fmt, Nvfp4):
            # 64 columns of a state share an fp32 scale. Each vector as a state of one column has its own.
            return fmt.qdq(x.mT.unsqueeze(-1)).squeeze(-1).mT
        return fmt.qdq(x)

    def left(self, site: str, x: Tensor) -> Tensor:
        """`x [..., rows, sum]` as the left operand, likewise."""
        return self.right(site, x.mT).mT if site in self._formats else x
