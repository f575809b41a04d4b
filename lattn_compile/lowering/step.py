"""One token of `lattn::decode` on a CPU, in ATen: what Inductor fuses instead of calling the op.

A decode step is little arithmetic, and as an op it would be a call into Python and some thirty kernels.
As ATen it joins its surroundings: gates, sigmoid of beta, casts, l2norm, update, rounding, read-out and the copy into
a cache become a few vectorised loops, and the state is written where it lies. The op stands in the graph until then, so
that captured, exported and differentiated graphs look the same on every device.

More than one token, ragged lengths and random bits stay the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lattn_compile import codec
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.reference.padding import l2norm
from lattn_compile.lowering import _torch_private as private
from lattn_compile.ops.decode import DecodeOptions, empty_checkpoints
from lattn_compile.ops.validate import Tensors

__all__ = ["decode_step", "is_one_token"]


def is_one_token(t: Tensors, options: DecodeOptions) -> bool:
    """Whether the call is one token of each sequence, all of them suffix, rounded to nearest or not at all."""
    lengths = [t.cu_seqlens, t.sequence_lengths]
    if options.write != "exact":  # where a prefix ends decides nothing but what is rounded
        lengths += [t.prefix_lengths, t.cursor]
    random = options.rounding != "nearest" or options.feedback is not None or options.rotation is not None
    return (
        t.q.device.type == "cpu"
        and isinstance(t.q.shape[1], int)
        and t.q.shape[1] == 1
        and all(x is None for x in lengths)
        and options.implementation == "auto"
        and options.gate is None  # a cast there and back, see _rounding
        and not (random and options.write != "exact")
    )


def decode_step(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::decode`: (o, final_state, checkpoints), or NotImplemented for what stays the op.

    The equations are semantics §2 with the read-out taken before the write is: `q S = q S~ + (q k) u`, so that the old
    state is read in one pass. Rounding is the codec of the format itself, never a second spelling of it. As on a GPU,
    nobody looks whether g is positive.
    """
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    if not is_one_token(t, chosen):
        return NotImplemented
    geometry, shared = chosen.checked(t)
    dtype = geometry.dtype
    rounded = _as_it_is if shared.quantize is None else _rounding(shared.quantize)

    q, k = (x[:, 0].to(dtype) for x in (t.q, t.k))
    if chosen.qk_l2norm:
        q, k = l2norm(q)[0], l2norm(k)[0]
    heads = t.v.shape[2] // t.q.shape[2]
    q, k = (_shared(x, heads) for x in (q * chosen.scale, k))
    u = t.v[:, 0].to(dtype)

    shape = (t.q.shape[0], t.v.shape[2], t.q.shape[3], t.v.shape[3])
    before = t.q.new_zeros(shape, dtype=dtype) if t.initial_state is None else t.initial_state.to(dtype)
    state = rounded(before)
    if t.g is not None:
        decay = t.g[:, 0].to(dtype).exp()
        state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    if chosen.rule == "delta":
        u = u - (k[..., None] * state).sum(-2)
    if t.beta is not None:
        u = u * t.beta[:, 0, :, None].to(dtype)
    written = state + k[..., None] * u[..., None, :]
    final = rounded(written)
    if chosen.readout == "after_write":
        o = (q[..., None] * final).sum(-2)
    else:
        o = (q[..., None] * state).sum(-2) + (q * k).sum(-1, keepdim=True) * u
    kept = empty_checkpoints(t, geometry, shared.quantize, chosen.checkpoint_every)  # one token has none
    # Strides as the op has them: what follows was traced with those.
    return o.to(t.q.dtype)[:, None].contiguous(), final.contiguous(), kept


def _rounding(quantize: Quantizer) -> Callable[[Tensor], Tensor]:
    """QDQ that Inductor may take apart, or the op of it for a format that rounds by a cast alone: Inductor's C++ keeps
    narrow floats in fp32 and drops a cast there and back."""
    if quantize.fmt.is_plain:
        return functools.partial(codec.qdq, state_format=str(quantize.fmt))
    return private.without_mutation(quantize.qdq)


def _as_it_is(state: Tensor) -> Tensor:
    return state


def _shared(x: Tensor, heads: int) -> Tensor:
    """`[B, H, K]` of key heads as `[B, HV, K]` of the value heads that share them."""
    if heads == 1:
        return x
    return x[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)
