"""Writing and reading a state as ops, so that a compiler sees one node and cannot change a rounding.

Semantics §3 fixes every intermediate rounding (one true division, a product rounded before it becomes a code). Traced
into its parts, a codec is open to contraction and reassociation; as an op it gives the same codes in eager and in
compiled code.

    lattn::encode_state(Tensor state, Tensor? position=None, Tensor? sequence_ids=None, *, str state_format,
                        str rounding, str? feedback, str? rotation, int seed, int site_id) -> Tensor[]
                        the tensors of the encoded state, in the order of `keys`
    lattn::decode_state(Tensor[] tensors, *, str state_format, SymInt[] shape, ScalarType dtype, str? feedback,
                        str? rotation) -> Tensor
    lattn::qdq_state(as encode_state) -> Tensor        gradient: the identity (straight through)

The options are those of `formats.quantizer.Quantizer`, to nearest by default. `position` and `sequence_ids`, int `[]`
or `[n]`, are the `Identity` of the write, 0 where absent; to nearest they do nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, ShapeError, surfacing
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity, Quantizer

__all__ = ["decode_tensors", "encode_tensors", "keys", "qdq"]

_WRITE = (
    "(Tensor state, Tensor? position=None, Tensor? sequence_ids=None, *, str state_format, "
    'str rounding="nearest", str? feedback=None, str? rotation=None, int seed=0, int site_id=0)'
)
_READ = (
    "(Tensor[] tensors, *, str state_format, SymInt[] shape, ScalarType dtype, str? feedback=None, str? rotation=None)"
)

for _name, _signature in (
    ("encode_state", f"{_WRITE} -> Tensor[]"),
    ("decode_state", f"{_READ} -> Tensor"),
    ("qdq_state", f"{_WRITE} -> Tensor"),
):
    torch.library.define(f"lattn::{_name}", _signature, tags=(torch.Tag.pt2_compliant_tag,))


@functools.lru_cache(maxsize=256)
def _quantizer(
    state_format: str,
    rounding: str = "nearest",
    feedback: str | None = None,
    rotation: str | None = None,
    seed: int = 0,
    site_id: int = 0,
) -> Quantizer:
    return Quantizer(parse(state_format), rounding, feedback, rotation, seed, site_id)


def keys(state_format: str, *, feedback: str | None = None) -> tuple[str, ...]:
    """Names of the tensors of an encoded state, from its spec."""
    return _quantizer(state_format, feedback=feedback).keys


def encode_tensors(
    state: Tensor,
    state_format: str,
    *,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    rounding: str = "nearest",
    feedback: str | None = None,
    rotation: str | None = None,
    seed: int = 0,
    site_id: int = 0,
) -> dict[str, Tensor]:
    """What is stored of `state`, by name; not differentiable, codes have no gradient."""
    tensors = torch.ops.lattn.encode_state(
        state.detach(),
        position,
        sequence_ids,
        state_format=state_format,
        rounding=rounding,
        feedback=feedback,
        rotation=rotation,
        seed=seed,
        site_id=site_id,
    )
    return dict(zip(keys(state_format, feedback=feedback), tensors, strict=True))


def decode_tensors(
    tensors: dict[str, Tensor],
    state_format: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    feedback: str | None = None,
    rotation: str | None = None,
) -> Tensor:
    """The state `[..., K, V]` of what `encode_tensors` returned; `shape` is (K, V)."""
    ordered = [tensors[key] for key in keys(state_format, feedback=feedback)]
    return torch.ops.lattn.decode_state(
        ordered, state_format=state_format, shape=shape, dtype=dtype, feedback=feedback, rotation=rotation
    )


def qdq(
    state: Tensor,
    state_format: str,
    *,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    rounding: str = "nearest",
    feedback: str | None = None,
    rotation: str | None = None,
    seed: int = 0,
    site_id: int = 0,
) -> Tensor:
    """What would be read back if `state` were stored; differentiated as the identity (semantics §7)."""
    return torch.ops.lattn.qdq_state(
        state,
        position,
        sequence_ids,
        state_format=state_format,
        rounding=rounding,
        feedback=feedback,
        rotation=rotation,
        seed=seed,
        site_id=site_id,
    )


def _identity(q: Quantizer, state: Tensor, position: Tensor | None, sequence_ids: Tensor | None) -> Identity | None:
    """The identity of a write, checked; None where it is not needed."""
    if q.rounding == "nearest":
        return None
    count = state.shape[0] if state.dim() else 0
    parts = []
    for name, x in (("position", position), ("sequence_ids", sequence_ids)):
        if x is None:
            parts.append(torch.zeros(count, dtype=torch.int64, device=state.device))
            continue
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise DtypeError(name, got=x.dtype, want="an integer tensor", remedy="It numbers tokens or sequences.")
        if x.dim() > 1 or (x.dim() == 1 and x.shape[0] != count):
            raise ShapeError(
                name,
                got=list(x.shape),
                want=f"[] or [{count}], one for each state",
                remedy="Give one number for all states, or one for each.",
            )
        parts.append(x.to(device=state.device, dtype=torch.int64).expand(count))
    return Identity(*parts)


def _encode(
    state: Tensor,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    state_format: str,
    **options: Any,
) -> list[Tensor]:
    q = _quantizer(state_format, **options)
    encoded = q.encode(state, _identity(q, state, position, sequence_ids))
    return [encoded[key] for key in q.keys]


torch.library.impl("lattn::encode_state", "default", _encode)


@torch.library.register_fake("lattn::encode_state")
def _encode_fake(
    state: Tensor,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    state_format: str,
    **options: Any,
) -> list[Tensor]:
    # The codecs are plain torch without data-dependent control flow: on fakes they give the shapes themselves. Neither
    # the random numbers, which are hundreds of operations, nor the rotation change these.
    q = _checked(state, position, sequence_ids, state_format, options)
    encoded = q.fmt.encode(state)
    if q.residual is not None:
        encoded |= q.residual.encode(state)
    return [encoded[key] for key in q.keys]


@torch.library.impl("lattn::decode_state", "default")
def _decode(
    tensors: list[Tensor], *, state_format: str, shape: list[int], dtype: torch.dtype, **options: Any
) -> Tensor:
    q = _quantizer(state_format, **options)
    state = q.decode(dict(zip(q.keys, tensors, strict=True)), shape=tuple(shape), dtype=dtype)
    return _own(state, tensors[0])


@torch.library.register_fake("lattn::decode_state")
def _decode_fake(
    tensors: list[Tensor], *, state_format: str, shape: list[int], dtype: torch.dtype, **options: Any
) -> Tensor:
    lead = tensors[0].shape[:-2]
    return tensors[0].new_empty((*lead, *shape), dtype=dtype)


@torch.library.impl("lattn::qdq_state", "default")
def _qdq(
    state: Tensor,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    state_format: str,
    **options: Any,
) -> Tensor:
    q = _quantizer(state_format, **options)
    return _own(q.qdq(state, _identity(q, state, position, sequence_ids)), state)


@torch.library.register_fake("lattn::qdq_state")
def _qdq_fake(
    state: Tensor,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    state_format: str,
    **options: Any,
) -> Tensor:
    _checked(state, position, sequence_ids, state_format, options)
    return state.new_empty(state.shape)


def _checked(
    state: Tensor, position: Tensor | None, sequence_ids: Tensor | None, state_format: str, options: dict[str, Any]
) -> Quantizer:
    """The quantizer of a call that is traced; misuse is refused then, in the words of the run time."""
    with surfacing():
        q = _quantizer(state_format, **options)
        q.check_state(state, _identity(q, state, position, sequence_ids))
    return q


def _own(out: Tensor, source: Tensor) -> Tensor:
    """`out` contiguous and in its own memory; a plain format may hand its input back."""
    out = out.contiguous()
    return out.clone() if out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() else out


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


torch.library.register_autograd("lattn::qdq_state", _straight_through)
