"""The codecs of `formats` as ops, so that a compiler sees one node and cannot change a rounding.

Semantics §3 fixes every intermediate rounding (one true division, a product rounded before it becomes a code). Traced
into its parts, a codec is open to contraction and reassociation; as an op it gives the same codes in eager and in
compiled code.

    lattn::encode_state(Tensor state, *, str state_format) -> Tensor[]        codes and scales, in the order of `keys`
    lattn::decode_state(Tensor[] tensors, *, str state_format, SymInt[] shape, ScalarType dtype) -> Tensor
    lattn::qdq_state(Tensor state, *, str state_format) -> Tensor             gradient: the identity (straight through)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import REGISTRY, parse

__all__ = ["decode_tensors", "encode_tensors", "qdq"]

_KEYS = {fmt.name: fmt.keys for fmt in REGISTRY}

for _schema in (
    "encode_state(Tensor state, *, str state_format) -> Tensor[]",
    "decode_state(Tensor[] tensors, *, str state_format, SymInt[] shape, ScalarType dtype) -> Tensor",
    "qdq_state(Tensor state, *, str state_format) -> Tensor",
):
    _name, _signature = _schema.split("(", 1)
    torch.library.define(f"lattn::{_name}", f"({_signature}", tags=(torch.Tag.pt2_compliant_tag,))


def keys(state_format: str) -> tuple[str, ...]:
    """Names of the tensors of an encoded state, from its spec."""
    return _KEYS[state_format.partition("/")[0]]


def encode_tensors(state: Tensor, state_format: str) -> dict[str, Tensor]:
    """`parse(state_format).encode(state)`; not differentiable, codes have no gradient."""
    tensors = torch.ops.lattn.encode_state(state.detach(), state_format=state_format)
    return dict(zip(keys(state_format), tensors, strict=True))


def decode_tensors(tensors: dict[str, Tensor], state_format: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The state `[..., K, V]` of codes and scales; `shape` is (K, V)."""
    ordered = [tensors[key] for key in keys(state_format)]
    return torch.ops.lattn.decode_state(ordered, state_format=state_format, shape=shape, dtype=dtype)


def qdq(state: Tensor, state_format: str) -> Tensor:
    """What would be read back if `state` were stored; differentiated as the identity (semantics §7)."""
    return torch.ops.lattn.qdq_state(state, state_format=state_format)


def _encode(state: Tensor, *, state_format: str) -> list[Tensor]:
    encoded = parse(state_format).encode(state)
    return [encoded[key] for key in keys(state_format)]


# The codecs are plain torch without data-dependent control flow: on fakes they give the shapes themselves.
torch.library.impl("lattn::encode_state", "default", _encode)
torch.library.register_fake("lattn::encode_state", _encode)


@torch.library.impl("lattn::decode_state", "default")
def _decode(tensors: list[Tensor], *, state_format: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    encoded = dict(zip(keys(state_format), tensors, strict=True))
    state = parse(state_format).decode(encoded, shape=tuple(shape), dtype=dtype)
    return _own(state, tensors[0])


@torch.library.register_fake("lattn::decode_state")
def _decode_fake(tensors: list[Tensor], *, state_format: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    lead = tensors[0].shape[:-2]
    return tensors[0].new_empty((*lead, *shape), dtype=dtype)


@torch.library.impl("lattn::qdq_state", "default")
def _qdq(state: Tensor, *, state_format: str) -> Tensor:
    return _own(parse(state_format).qdq(state), state)


@torch.library.register_fake("lattn::qdq_state")
def _qdq_fake(state: Tensor, *, state_format: str) -> Tensor:
    parse(state_format)
    return state.new_empty(state.shape)


def _own(out: Tensor, source: Tensor) -> Tensor:
    """`out` contiguous and in its own memory; a plain format may hand its input back."""
    out = out.contiguous()
    return out.clone() if out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() else out


def _straight_through(ctx: Any, grad: Tensor) -> Tensor:
    return grad


torch.library.register_autograd("lattn::qdq_state", _straight_through)
