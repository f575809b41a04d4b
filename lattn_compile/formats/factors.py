"""Rounding of vectors: the key and update factors that the replay mode keeps (semantics §5).

One vector is one tile of §3's rule: it has one scale, its edge rules are the tile's, and it is rounded to nearest.
Rounding twice is rounding once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lattn_compile.errors import FormatError, nearest
from lattn_compile.formats.base import Encoded, Format, as_state
from lattn_compile.formats.bf16 import Bf16
from lattn_compile.formats.fp8_e4m3 import Fp8
from lattn_compile.formats.int8 import Int8

__all__ = ["FACTORS", "decode", "encode", "nbytes", "qdq"]

_CODECS: dict[str | None, Format | None] = {"bf16": Bf16(), "fp8_e4m3": Fp8(None), "int8": Int8(None)}

FACTORS: tuple[str | None, ...] = (None, *_CODECS)

_NAMES = {"codes": "codes", "state_scale": "scale"}


def _codec(factors: str | None) -> Format | None:
    if factors is None:
        return None
    fmt = _CODECS.get(factors) if isinstance(factors, str) else None
    if fmt is None:
        raise FormatError(
            "factors",
            got=repr(factors),
            want=" or ".join(map(repr, FACTORS)),
            remedy=f"Choose one of these.{nearest(str(factors), [name for name in FACTORS if name is not None])}",
        )
    return fmt


def qdq(x: Tensor, factors: str | None) -> Tensor:
    """`decode(encode(x))` of vectors `x [..., D]`, in the dtype of `x`; `x` itself for None.

    Raises:
        FormatError: unknown `factors`. DtypeError: not floating-point numbers.
    """
    fmt = _codec(factors)
    return x if fmt is None else fmt.qdq(x.unsqueeze(-2)).squeeze(-2)


def encode(x: Tensor, factors: str | None) -> Encoded:
    """ "codes" `[..., D]` and, for fp8_e4m3 and int8, "scale" `[...]` of vectors `x [..., D]`, in new tensors.

    For None the codes are the numbers themselves, in fp32, or fp64 if `x` is fp64. Raises as `qdq` does.
    """
    fmt = _codec(factors)
    if fmt is None:
        return {"codes": as_state(x.unsqueeze(-2)).squeeze(-2).clone(memory_format=torch.contiguous_format)}
    enc = fmt.encode(x.unsqueeze(-2))
    return {_NAMES[key]: t.squeeze(-2) if key == "codes" else t[..., 0, 0] for key, t in enc.items()}


def decode(enc: Mapping[str, Tensor], factors: str | None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The vectors `[..., D]`; by default in the dtype of the scale, and in fp32 for bf16.

    Raises:
        FormatError: unknown `factors`, or tensors that are not theirs.
    """
    fmt = _codec(factors)
    want = ["codes"] if fmt is None else [_NAMES[key] for key in fmt.keys]
    if sorted(enc) != sorted(want):
        raise FormatError(
            "enc", got=f"tensors {sorted(enc)}", want=str(sorted(want)), remedy="Pass what encode returned."
        )
    if fmt is None:
        return enc["codes"] if dtype is None else enc["codes"].to(dtype)
    tile = {"codes": enc["codes"].unsqueeze(-2)}
    if "scale" in enc:
        tile["state_scale"] = enc["scale"].unsqueeze(-1).unsqueeze(-1)
    return fmt.decode(tile, dtype=dtype).squeeze(-2)


def nbytes(D: int, factors: str | None) -> int:
    """Bytes of one vector of D numbers, its scale included; without rounding, in fp32."""
    fmt = _codec(factors)
    return 4 * D if fmt is None else fmt.nbytes(1, D)
