"""`Format`: how a recurrent state is stored, as an immutable value with a codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, FormatError, ShapeError, nearest

__all__ = ["Encoded", "Format", "as_state", "check_encoded"]

Encoded = dict[str, Tensor]
"""An encoded state: "codes" and the format's scales. Every tensor's leading dimensions are those of the state."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store the state `S`, `[..., K, V]`, K before V.

    The codec works on any strides and leading dimensions, in fp32, or wholly in fp64 for an fp64 state; it is made of
    plain torch operations without data-dependent control flow. Nothing in it is differentiable: the straight-through
    estimator belongs to the ops. Compiled code should call the codec through the ops of `lattn_compile.codec`: traced
    into its parts, Inductor drops the round trip of a plain cast.

    Codes are rounded to nearest, ties to even, or with random numbers `r`, fp32 in [0, 1) and of the shape of `S`, to
    one of the two neighbouring codes by distance (`rounding.round_at_random`). Scales are always rounded to nearest;
    clamps and edge rules are the same. Where the numbers come from is `quantizer.Quantizer`'s business.

    Attributes:
        name: the format's name in specs and JSON.
        summary: one line for people.
        options: the fields that a format is constructed with; the first may be positional.
        keys: the tensors of an encoded state.
        is_plain: True if storing is a plain cast, with neither tiles nor scales.
        residual_tile: (block_k, block_v) of an error-feedback residual beside the codes; None on plain formats.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ("codes",)
    is_plain: ClassVar[bool] = False

    @property
    def residual_tile(self) -> tuple[int | None, int | None] | None:
        return None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Before the generated __init__ sees them: its TypeError names neither the remedy nor the nearest key.
        known = list(cls.options)  # not dataclasses.fields: Dynamo cannot trace it here
        for key in kwargs:
            if key not in known:
                raise _unknown_key(cls.__name__, key, known)
        if len(args) > 1 or (args and not known):
            raise FormatError(
                cls.__name__,
                got=f"the positional arguments {args}",
                want=f"at most {min(len(known), 1)}",
                remedy=f"Spell {known[1]}=... out." if len(known) > 1 else "Drop it: this format has no options.",
            )
        return super().__new__(cls)

    def __str__(self) -> str:
        """The canonical spec, which `parse` reads back: `"int8/*x64"` is int8 with `block_k=None, block_v=64`."""
        return self.name

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        """Codes and scales of the state `S` `[..., K, V]`, in new contiguous tensors; to nearest without `r`.

        Raises:
            DtypeError: `S` is not fp32, fp64, bf16 or fp16 (the latter two are computed in fp32).
            ShapeError: `S` has fewer than two dimensions.
        """
        raise NotImplementedError

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The state `[..., K, V]` of an encoded one, exact in the dtype of its scales.

        `Fp32` may return its codes themselves, not a copy.

        Args:
            enc: what `encode` returned.
            shape: `(K, V)`, or a shape that ends so. Needed only where the codes do not tell: nvfp4 with an odd K.
            dtype: of the result; by default that of the scales, and fp32 for a plain format.

        Raises:
            FormatError: `enc` lacks a tensor, has one too many, or its shapes do not fit.
        """
        raise NotImplementedError

    def qdq(self, S: Tensor, r: Tensor | None = None) -> Tensor:
        """`decode(encode(S, r))` in the dtype of `S`, bit for bit, without the detour over codes.

        `Fp32` returns an fp32 `S` itself. Raises as `encode` does.
        """
        raise NotImplementedError

    def nbytes(self, K: int, V: int) -> int:
        """Bytes that one head's `[K, V]` state takes, scales included (scales in fp32)."""
        raise NotImplementedError

    def check(self, K: int, V: int) -> None:
        """Refuse a head size that this format cannot store.

        Raises:
            FormatError: K or V is not a positive int. A tile that does not divide the state is legal.
        """
        for name, size in (("K", K), ("V", V)):
            if size < 1:
                raise FormatError(name, got=size, want="at least 1", remedy=f"{self} cannot store an empty head.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: `{"format": "int8", "block_v": 64, "block_k": None}`."""
        return {"format": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Format:
        """The format that `to_dict` wrote; see `lattn_compile.formats.from_dict`."""
        from lattn_compile.formats import from_dict

        return from_dict(data)


def _unknown_key(owner: str, key: str, known: list[str]) -> FormatError:
    return FormatError(
        f"{owner}.{key}",
        got="an unknown key",
        want=" or ".join(known) if known else "no keys",
        remedy=f"Correct or drop it.{nearest(key, known)}",
    )


def as_state(S: Tensor) -> Tensor:
    """`S` detached and in its compute dtype: fp32, or fp64 if it is fp64."""
    if S.dim() < 2:
        raise ShapeError("S", got=list(S.shape), want="[..., K, V]", remedy="Pass a state with its head dimensions.")
    if S.dtype in (torch.float32, torch.float64):
        return S.detach()
    if S.dtype in (torch.bfloat16, torch.float16):
        return S.detach().float()
    raise DtypeError(
        "S", got=S.dtype, want="a float32, float64, bfloat16 or float16 state", remedy="Decode or convert it first."
    )


def check_encoded(fmt: Any, enc: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Refuse an encoded state whose tensors, or their trailing `shapes`, are not those of `fmt`: a format, or whatever
    else has `keys` and is printed."""
    if set(enc) != set(fmt.keys):
        raise FormatError(
            "enc", got=f"tensors {sorted(enc)}", want=f"{sorted(fmt.keys)}", remedy=f"Pass what {fmt}.encode returned."
        )
    for key, want in (shapes or {}).items():
        if tuple(enc[key].shape[-len(want) :]) != want:
            raise FormatError(
                f"enc[{key!r}]",
                got=f"shape {list(enc[key].shape)}",
                want=f"[..., {', '.join(map(str, want))}]",
                remedy=f"These are not tensors of {fmt} for this shape: decode as they were encoded.",
            )
