"""Error feedback: the error of a rounding, stored beside the codes in few bits of its own (semantics §3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.errors import PolicyError
from lattn_compile.formats.base import Encoded, Format, check_encoded
from lattn_compile.formats.bf16 import Bf16
from lattn_compile.formats.int8 import Int8
from lattn_compile.formats.tiled import TiledFormat, pack_rows, round_to_int, unpack_rows

__all__ = ["FEEDBACKS", "Int4", "Residual"]

FEEDBACKS: tuple[str | None, ...] = (None, "int4", "int8", "bf16")


@dataclasses.dataclass(frozen=True)
class Int4(TiledFormat):
    """Integers from -7 to 7 with scale `RN16(amax / 7)`, two a byte: of residuals only, too coarse for a state.

    Encoded: "codes" uint8 `[..., ceil(K/2), V]`, two's complement in four bits, packed as `pack_rows` does.
    """

    name: ClassVar[str] = "int4"
    summary: ClassVar[str] = "int4, half a byte a value and an fp32 scale a tile: uniform steps of amax/7"
    code_dtype: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = 7.0

    def _round(self, y: Tensor, r: Tensor | None) -> Tensor:
        return round_to_int(y, r)

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        enc = super().encode(S, r)
        return {**enc, "codes": pack_rows(enc["codes"].view(torch.uint8) & 15)}

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc)
        packed = enc["codes"]
        K, V = (2 * packed.shape[-2], packed.shape[-1]) if shape is None else shape[-2:]
        check_encoded(self, enc, {"codes": (-(-K // 2), V)})
        # Their fourth bit is the sign: move it to where int8 has it, and back with the sign following.
        codes = (unpack_rows(packed, K) << 4).view(torch.int8) >> 4
        return super().decode({**enc, "codes": codes}, shape=(K, V), dtype=dtype)

    def nbytes(self, K: int, V: int) -> int:
        return super().nbytes(K, V) - K // 2 * V


class Residual:
    """The codec of the residuals of one format: its own tile, always to nearest, never rotated.

    int4 and int8 follow §3's rule with 7 and 127, edge rules included: a tile below 2^-100 is zeros, a tile with a NaN
    or an infinity (that of every state that is not finite) is NaN. nvfp4's tile is its 64-column group, so a block that
    is NaN makes its whole group NaN. bf16 is a plain cast.

    Encoded: "residual" (int8 or bf16 `[..., K, V]`, int4 as `Int4`) and, but for bf16, "residual_scale".
    """

    def __init__(self, fmt: Format, feedback: str) -> None:
        """
        Raises:
            PolicyError: `fmt` is plain.
        """
        if fmt.residual_tile is None:
            raise PolicyError(
                "feedback",
                got=f"{feedback!r} on the plain format {fmt}",
                want="None on fp32, bf16 and fp16: they have no scale for a residual",
                remedy="Drop feedback, or choose Int8, Fp8 or Nvfp4.",
            )
        block_k, block_v = fmt.residual_tile
        self.fmt: Format
        if feedback == "bf16":
            self.fmt = Bf16()
        else:
            self.fmt = (Int4 if feedback == "int4" else Int8)(block_v, block_k=block_k)
        self._names = {"codes": "residual", "state_scale": "residual_scale"}
        self.keys = tuple(self._names[key] for key in self.fmt.keys)

    def encode(self, error: Tensor) -> Encoded:
        return {self._names[key]: tensor for key, tensor in self.fmt.encode(error).items()}

    def decode(self, enc: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        own = {key: enc[name] for key, name in self._names.items() if name in enc}
        return self.fmt.decode(own, shape=shape, dtype=dtype)

    def qdq(self, error: Tensor) -> Tensor:
        return self.fmt.qdq(error)
