"""One token of `lattn::decode_packed` on a CPU, in ATen: one set of loops reads codes, steps, and writes codes.

The step is the one of `lowering/step.py`, the rounding the format's own codec, traced functionally.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.lowering import _torch_private as private
from lattn_compile.lowering.step import token
from lattn_compile.ops.decode import DecodeOptions
from lattn_compile.ops.validate import Tensors
from lattn_compile.packed import ops
from lattn_compile.packed.step import FORMATS

__all__ = ["packed_step", "takes_packed_step"]


def takes_packed_step(t: Tensors, options: dict[str, Any]) -> bool:
    """Whether `packed_step` takes such a call; `packed.step.is_one_step` has seen to the rest."""
    name = parse(options.get("state_format", "fp32")).name
    return t.q.device.type == "cpu" and t.q.shape[1] == 1 and name in FORMATS


def packed_step(*tensors: Any, **options: Any) -> Any:
    """Decomposition: (o, state, cursor), or NotImplemented for what stays the op."""
    q, k, v, g, beta, _, cursor = tensors
    if not takes_packed_step(Tensors(q, k, v, g, beta, *[None] * 5), options):
        return NotImplemented
    geometry, heads, stored = ops.checked(*tensors, **options)
    if any(x.dtype is torch.float64 for x in stored.values()):
        return NotImplemented
    dtype, size = geometry.dtype, (heads.K, heads.V)
    own = {name: options[name] for name in ("scale", "rule", "qk_l2norm") if name in options}
    _, exact = DecodeOptions(**own).checked(Tensors(q, k, v, g, beta, *[None] * 5))
    quantizer = Quantizer(parse(options.get("state_format", "fp32")))  # an option with its default is left out
    held = stored["codes"]
    if options["write"] != "exact":
        held = private.without_mutation(lambda codes: quantizer.decode(codes, shape=size, dtype=dtype))(stored)
    first = torch.where(cursor[:, None, None, None] >= 0, held.to(dtype), 0)  # nothing is stored: whatever lies there
    decay, strength = (None if x is None else x[:, 0].to(dtype) for x in (g, beta))
    o, final = token(first, q[:, 0].to(dtype), k[:, 0].to(dtype), v[:, 0].to(dtype), decay, strength, exact)
    if options["write"] == "exact":
        new = {"codes": final}
    else:
        new = private.without_mutation(quantizer.encode)(final)
    return (
        o.to(q.dtype)[:, None].contiguous(),
        [_as(new[name], x) for name, x in stored.items()],
        torch.zeros_like(cursor),
    )


def _as(new: Tensor, old: Tensor) -> Tensor:
    """In the strides that the op's result has."""
    return new if new.stride() == old.stride() else torch.empty_like(old).copy_(new)
