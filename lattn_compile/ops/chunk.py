"""`lattn::chunk`: the recurrence in chunk form, exact or rounding its state every `chunk_size` tokens.

    chunk(q, k, v, g, beta, initial_state, cu_seqlens, prefix_lengths, sequence_lengths, cursor, *, ...)
        -> (o, final_state)

q, k `[B, T, H, K]`; v, o `[B, T, HV, V]`; g `[B, T, HV]` or `[B, T, HV, K]`; beta `[B, T, HV]`; states `[N, HV, K, V]`;
lengths int `[]` or `[N]`; cursor int `[N]`. o has q's dtype. final_state is float32 (float64 if any input is) and raw:
exact, or rounded where the call ends on the chunk grid (a quantizer that is not idempotent: about to be rounded there,
so that the caller can encode it, once). In write="exact" cursor and state_format say nothing, and prefix lengths say
only where the operands of a prefill are rounded, if they are; None means all tokens there. position and sequence_ids,
int `[]` or `[N]`, key the stochastic rounding: the absolute position of a sequence's first token, and the caller's name
for the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.errors import surfacing
from lattn_compile.ops.autograd import register_first_order
from lattn_compile.ops.call import (
    GRADS,
    TAGS,
    TENSORS,
    Plan,
    empty_grads,
    fresh,
    incoming,
    moved,
    no_autocast,
    plan,
    prefix_backward,
    prefix_forward,
    returned,
    returned_fake,
    rounded,
)
from lattn_compile.ops.options import OpOptions, Options, schema
from lattn_compile.ops.validate import Geometry, Tensors

__all__ = ["ChunkOptions"]

_OPTIONS = schema("int chunk_size=64")

torch.library.define("lattn::chunk", f"({TENSORS}, *, {_OPTIONS}) -> (Tensor o, Tensor final_state)", tags=TAGS)
torch.library.define(
    "lattn::chunk_backward",
    f"(Tensor? grad_o, Tensor? grad_final_state, {TENSORS}, *, {_OPTIONS}) -> {GRADS}",
    tags=TAGS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions(OpOptions):
    """Options of `lattn::chunk` and its backward, spelled as the op's schema does. `chunk_size`: tokens."""

    chunk_size: int = 64

    FORM: ClassVar[str] = "chunk"
    WRITES: ClassVar[tuple[str, ...]] = ("exact", "chunk")

    def interval(self) -> tuple[str, int, int, int | None]:
        return "chunk_size", self.chunk_size, 1, None


def _planned(t: Tensors, geometry: Geometry, options: Options, chunk_size: int) -> Plan:
    if options.quantize is None and options.prefill is not None and t.prefix_lengths is None:
        # A library's chunk-form call outside a phase is all prefix.
        t = replace(t, prefix_lengths=t.q.new_full((), geometry.tokens, dtype=torch.int64))
    p = plan(t, geometry, options, chunk_size=chunk_size)
    if options.quantize is None or t.cursor is None or not p.has_prefix:
        return p
    # A state carried off its grid is exact; a prefix starts from its rounded value, `.dense()`.
    off_grid = (p.segments.prefix > 0) & (t.cursor.to(p.begin) > 0)
    last = moved(p.identity, -1 - p.segments.prefix)
    return replace(p, state=rounded(p.state, off_grid, options.quantize, last))


@torch.library.register_fake("lattn::chunk")
def _chunk_fake(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    t = Tensors(*tensors)
    with surfacing():
        geometry, _ = ChunkOptions(**options).checked(t)
    return t.q.new_empty(t.v.shape), t.q.new_empty(geometry.state_shape, dtype=geometry.dtype)


@torch.library.impl("lattn::chunk", "default")
def _chunk(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    t, chosen = Tensors(*tensors), ChunkOptions(**options)
    geometry, shared = chosen.checked(t)
    p = _planned(t, geometry, shared, chosen.chunk_size)
    o = t.q.new_zeros(geometry.flat_tokens, *t.v.shape[2:])
    state = p.state
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, o)
            state = shared.kernel("chunk").forward(
                *_suffix(p, state), o, chunk_size=chosen.chunk_size, **shared.suffix(), identity=p.identity
            )
    return o.view(t.v.shape), fresh(state, t.initial_state)


def _suffix(p: Plan, state: Tensor) -> tuple[Any, ...]:
    return (*p.flat, state, p.begin, p.length, p.offset)


@torch.library.register_fake("lattn::chunk_backward")
def _chunk_backward_fake(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t = Tensors(*tensors)
    ChunkOptions(**options).checked(t)
    return returned_fake(t)


@torch.library.impl("lattn::chunk_backward", "default")
def _chunk_backward(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t, chosen = Tensors(*tensors), ChunkOptions(**options)
    geometry, shared = chosen.checked(t)
    p = _planned(t, geometry, shared, chosen.chunk_size)
    grad_o, grad_state = incoming(grad_o, grad_state, t, geometry)
    grads = empty_grads(p)
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, torch.empty_like(grad_o) if p.has_prefix else grad_o)
            grad_state = shared.kernel("chunk").backward(
                grad_o,
                grad_state,
                *_suffix(p, state),
                grads,
                chunk_size=chosen.chunk_size,
                **shared.suffix(),
                identity=p.identity,
            )
            grad_state = prefix_backward(p, shared, grad_o, grad_state, grads)
    return returned(grads, grad_state, t)


register_first_order("lattn::chunk")
