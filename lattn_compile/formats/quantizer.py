"""`Quantizer`: all that happens to a state when it is written (semantics §3): format, rounding, rotation, feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import FormatError, PolicyError, ShapeError, nearest
from lattn_compile.formats import Encoded, Format, Fp32
from lattn_compile.formats.base import as_state, check_encoded
from lattn_compile.formats.philox import MAX_CHANNELS, Identity, uniform
from lattn_compile.formats.residual import FEEDBACKS, Residual
from lattn_compile.formats.rotation import ROTATIONS, check_rotation, rotate

__all__ = ["ROUNDINGS", "Identity", "Quantizer"]

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantizer:
    """How a state `[n, HV, K, V]` is rounded when it is written, and read back:

        code = round(H S)        stored(S) = H⁻¹ decode(code) + decode(residual)        residual = S − H⁻¹ decode(code)

    H is the rotation, `round` the format's, to nearest or stochastic. The residual is of the state itself, not of the
    rotated one: §3 stores it unrotated, and so it also makes up for the rounding of the rotation there and back.

    Stochastic rounding draws numbers that depend on `seed`, `site_id`, the write's `Identity` and the value's own head
    and channels, and on nothing else. A value that its scale takes to a code exactly stays there. Values of a stored
    state that is written again come out of the product with the inverse scale at their codes or within 2^-23 of them
    (relatively); in that case they leave them with odds of at most 2^-16, for int8.

    Attributes:
        fmt: the format of the codes. rounding: "nearest" | "stochastic". feedback: None | "int4" | "int8" | "bf16".
        rotation: None | "hadamard_k" | "hadamard_v". seed, site_id: key of the stochastic rounding.

    Raises:
        PolicyError: a word that an option does not have, or options without a meaning: feedback on a plain format,
            stochastic rounding to fp32.
    """

    fmt: Format
    rounding: str = "nearest"
    feedback: str | None = None
    rotation: str | None = None
    seed: int = 0
    site_id: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("rounding", ROUNDINGS), ("feedback", FEEDBACKS), ("rotation", ROTATIONS)):
            _check_word(name, getattr(self, name), allowed)
        if self.rounding == "stochastic" and isinstance(self.fmt, Fp32):
            raise PolicyError(
                "rounding",
                got="'stochastic' on fp32",
                want="'nearest': an fp32 state is stored as it is and nothing is rounded",
                remedy="Drop rounding, or choose a narrower format.",
            )
        # Made once, beside the fields: it is a function of them.
        residual = None if self.feedback is None else Residual(self.fmt, self.feedback)
        object.__setattr__(self, "_residual", residual)

    def __str__(self) -> str:
        """The format and what differs from rounding it to nearest: `int8/*x64 rotation='hadamard_k'`."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default
        ]
        return " ".join([str(self.fmt), *changed])

    @property
    def residual(self) -> Residual | None:
        found: Residual | None = self.__dict__["_residual"]
        return found

    @property
    def idempotent(self) -> bool:
        """Whether writing a written state again changes nothing."""
        return self.rounding == "nearest" and self.feedback is None and self.rotation is None

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors of an encoded state, in order: the format's, then "residual" and "residual_scale"."""
        return self.fmt.keys if self.residual is None else self.fmt.keys + self.residual.keys

    def encode(self, S: Tensor, identity: Identity | None = None) -> Encoded:
        """Codes, scales and residual of `S`, in new contiguous tensors.

        Args:
            S: `[n, HV, K, V]`, fp32 or fp64 (bf16 and fp16 are computed in fp32); to nearest, any leading dimensions.
            identity: of this write; needed by stochastic rounding only.

        Raises:
            DtypeError, ShapeError: not such a state, or more channels than random numbers are made for.
            PolicyError: stochastic without an identity, or a rotated axis that is not a power of two.
        """
        if self.idempotent:
            return self.fmt.encode(S)
        x = as_state(S)
        enc = self.fmt.encode(rotate(x, self.rotation), self._random(x, identity))
        if self.residual is None:
            return enc
        error = x.sub(rotate(self.fmt.decode(enc, shape=x.shape, dtype=x.dtype), self.rotation))
        return {**enc, **self.residual.encode(error)}

    def decode(
        self, enc: Mapping[str, Tensor], *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """What the next token starts from, `[..., K, V]`.

        Args:
            enc: what `encode` returned. shape: as for `Format.decode`; ends in (K, V).
            dtype: of the result; by default that of the scales, and for a plain format that of `Format.decode`.
                Decoding computes in the dtype of the scales; bf16 and fp16 have none: in fp32, unless the result is
                fp64.

        Raises:
            FormatError: not the tensors of such a state. PolicyError: a rotated axis that is not a power of two.
        """
        if self.residual is None and self.rotation is None:
            return self.fmt.decode(enc, shape=shape, dtype=dtype)
        check_encoded(self, enc)
        codes = {key: enc[key] for key in self.fmt.keys}
        compute = None
        if self.fmt.is_plain and codes["codes"].dtype.itemsize < 4:
            compute = torch.float64 if dtype == torch.float64 else torch.float32
        stored = rotate(self.fmt.decode(codes, shape=shape, dtype=compute), self.rotation)
        if self.residual is not None:
            stored = stored + self.residual.decode(enc, (stored.shape[-2], stored.shape[-1]), stored.dtype)
        return stored if dtype is None else stored.to(dtype)

    def qdq(self, S: Tensor, identity: Identity | None = None) -> Tensor:
        """What the next token starts from: `decode(encode(S))` in the dtype of `S`, bit for bit.

        `Fp32` without rotation returns an fp32 `S` itself. Raises as `encode` does.
        """
        if self.idempotent:
            return self.fmt.qdq(S)
        x = as_state(S)
        stored = rotate(self.fmt.qdq(rotate(x, self.rotation), self._random(x, identity)), self.rotation)
        if self.residual is not None:
            stored = stored + self.residual.qdq(x - stored)
        return stored.to(S.dtype)

    def nbytes(self, K: int, V: int) -> int:
        """Bytes that one head's `[K, V]` state takes, scales and residual included (scales in fp32)."""
        return self.fmt.nbytes(K, V) + (0 if self.residual is None else self.residual.fmt.nbytes(K, V))

    def check(self, K: int, V: int) -> None:
        """Refuse a head size that cannot be stored.

        Raises:
            FormatError: K or V is not positive, or too large for random numbers.
            PolicyError: the rotated axis is not a power of two.
        """
        self.fmt.check(K, V)
        check_rotation(self.rotation, K, V)
        if self.rounding == "stochastic":
            for name, size in (("K", K), ("V", V)):
                if size > MAX_CHANNELS:
                    raise FormatError(
                        name,
                        got=size,
                        want=f"at most {MAX_CHANNELS} with stochastic rounding",
                        remedy="Round to nearest, which has no limit.",
                    )

    def check_state(self, S: Tensor, identity: Identity | None = None) -> None:
        """Refuse what `encode` and `qdq` would refuse, without computing anything.

        Raises:
            As `encode` does.
        """
        as_state(S)
        check_rotation(self.rotation, S.shape[-2], S.shape[-1])
        if self.rounding == "stochastic":
            self._check_identity(S, identity)

    def _check_identity(self, S: Tensor, identity: Identity | None) -> Identity:
        if identity is None:
            raise PolicyError(
                "identity",
                got="None with stochastic rounding",
                want="Identity(position, sequence), int64 [n] each",
                remedy="Say whose write this is: its random numbers must not depend on anything else.",
            )
        if S.dim() != 4 or identity.position.shape != S.shape[:1]:
            raise ShapeError(
                "S",
                got=f"{list(S.shape)} with {list(identity.position.shape)} positions",
                want="[n, HV, K, V] with [n] positions under stochastic rounding",
                remedy="Random numbers are keyed by sequence and head, so these axes have to be told apart.",
            )
        return identity

    def _random(self, x: Tensor, identity: Identity | None) -> Tensor | None:
        """The numbers that decide the roundings of the state `x`; None to nearest."""
        if self.rounding == "nearest":
            return None
        checked = self._check_identity(x, identity)
        heads, K, V = x.shape[1:]
        return uniform(checked, heads, K, V, self.seed, self.site_id)


def _check_word(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value is not None and not isinstance(value, str):
        hint = ""
    elif value in allowed:
        return
    else:
        hint = nearest(value, [word for word in allowed if word is not None]) if value is not None else ""
    raise PolicyError(
        name,
        got=repr(value),
        want=" or ".join(repr(word) for word in allowed),
        remedy=f"Choose one of these.{hint}",
    )
