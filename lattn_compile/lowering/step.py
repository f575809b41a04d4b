"""One token of `lattn::decode` on a CPU, in ATen: what Inductor fuses instead of calling the op.

A decode step is little arithmetic, and as an op it would be a call into Python and some thirty kernels.
As ATen it joins its surroundings: gates, sigmoid of beta, casts, l2norm, update, rounding, read-out and the copy into
a cache become a few vectorised loops, and the state is written where it lies. The op stands in the graph until then, so
that captured, exported and differentiated graphs look the same on every device.

More than one token, ragged lengths and random bits stay the op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats.plain import PlainFormat
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.reference.padding import l2norm
from lattn_compile.lowering import _torch_private as private
from lattn_compile.ops.decode import DecodeOptions, empty_checkpoints
from lattn_compile.ops.options import Options
from lattn_compile.ops.validate import Geometry, Tensors

__all__ = [
    "decay_of",
    "decode_step",
    "first_state",
    "head_shared",
    "is_one_token",
    "is_plain_call",
    "rounding",
    "token",
]


def is_one_token(t: Tensors, options: DecodeOptions) -> bool:
    """Whether the call is one token of each sequence, all of them suffix, rounded to nearest or not at all."""
    tokens = t.q.shape[1]
    return isinstance(tokens, int) and tokens == 1 and is_plain_call(t, options)


def is_plain_call(t: Tensors, options: DecodeOptions) -> bool:
    """Whether all sequences of a call on a CPU are of one length, all suffix, and rounded to nearest if at all."""
    lengths = [t.cu_seqlens, t.sequence_lengths]
    if options.write != "exact" or options.rounds_prefill:  # where a prefix ends decides nothing but what is rounded
        lengths += [t.prefix_lengths, t.cursor]
    random = options.rounding != "nearest" or options.feedback is not None or options.rotation is not None
    return (
        t.q.device.type == "cpu"
        and all(x is None for x in lengths)
        and options.implementation == "auto"
        and options.gate is None  # a cast there and back, see _cast
        and not (random and options.write != "exact")
    )


def decode_step(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::decode`: (o, final_state, checkpoints), or NotImplemented for what stays the op."""
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    if not is_one_token(t, chosen):
        return NotImplemented
    geometry, shared = chosen.checked(t)
    dtype = geometry.dtype
    q, k, v = (x[:, 0].to(dtype) for x in (t.q, t.k, t.v))
    g, beta = (None if x is None else x[:, 0].to(dtype) for x in (t.g, t.beta))
    state = rounding(shared.quantize)(first_state(t, geometry))
    o, final = token(state, q, k, v, g, beta, shared)
    kept = empty_checkpoints(t, geometry, shared.quantize, chosen.checkpoint_every)  # one token has none
    # Strides as the op has them: what follows was traced with those.
    return o.to(t.q.dtype)[:, None].contiguous(), final.contiguous(), kept


def first_state(t: Tensors, geometry: Geometry) -> Tensor:
    """The state that a call starts from, in the dtype of the arithmetic, not yet handed over."""
    if t.initial_state is None:
        return t.q.new_zeros(geometry.state_shape, dtype=geometry.dtype)
    return t.initial_state.to(geometry.dtype)


def token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """(o, next state) of one token: q, k `[B, H, K]`, v `[B, HV, V]`, gates `[B, HV]` or `[B, HV, K]`.

    The equations are semantics §2 with the read-out taken before the write is: `q S = q S~ + (q k) u`, so that the old
    state is read in one pass. Rounding is the codec of the format itself, never a second spelling of it.
    """
    if options.qk_l2norm:
        q, k = l2norm(q)[0], l2norm(k)[0]
    heads = v.shape[1] // q.shape[1]
    q, k = (head_shared(x, heads) for x in (q * options.scale, k))
    u = v
    if g is not None:
        decay = decay_of(g, options.growth)
        state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    if options.rule == "delta":
        u = u - (k[..., None] * state).sum(-2)
    if beta is not None:
        u = u * beta[..., None]
    final = rounding(options.quantize)(state + k[..., None] * u[..., None, :])
    if options.readout == "after_write":
        return (q[..., None] * final).sum(-2), final
    return (q[..., None] * state).sum(-2) + (q * k).sum(-1, keepdim=True) * u, final


def decay_of(g: Tensor, growth: bool) -> Tensor:
    """exp(g); NaN where a g is positive that must not be.

    The op looks at every g and raises. Generated code cannot: what it throws inside a parallel loop ends the process,
    and a flag that is read behind the loops costs a call a layer. NaN costs nothing beside the exponential, and stays
    in the head's output and state until someone sees it.
    """
    return (g if growth else g.masked_fill(g > 0, math.nan)).exp()


def rounding(quantize: Quantizer | None) -> Callable[[Tensor], Tensor]:
    """QDQ of a state in operations that Inductor may take apart and does not change."""
    if quantize is None:
        return _as_it_is
    if isinstance(quantize.fmt, PlainFormat) and quantize.fmt.dtype.itemsize == 2:
        return _cast(quantize.fmt.dtype)
    return private.without_mutation(quantize.qdq)


def _as_it_is(state: Tensor) -> Tensor:
    return state


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A cast to 16 bits and back. Inductor's C++ keeps narrow floats in fp32 and drops such a pair, so something has to
    be done to the bits in between; a pair of views alone would be dropped as well."""

    def cast(state: Tensor) -> Tensor:
        bits = state.to(dtype).view(torch.int16)
        return (bits | 0).view(dtype).to(state.dtype)

    return cast


def head_shared(x: Tensor, heads: int) -> Tensor:
    """`[B, H, K]` of key heads as `[B, HV, K]` of the value heads that share them."""
    if heads == 1:
        return x
    return x[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)
