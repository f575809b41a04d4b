"""`lattn::decode`: the recurrence token by token, exact or rounding its state after every token (token mode).

    decode(q, k, v, g, beta, initial_state, cu_seqlens, prefix_lengths, sequence_lengths, cursor, *, ...)
        -> (o, final_state, checkpoints)

Tensors as in `lattn::chunk`; any T >= 0, so it is a decode step, a verify call and the suffix of a training sequence.
final_state is raw: the decoded stored value, or exact where no suffix token has come yet (write="token"); of a
quantizer that is not idempotent, the value before its last write.

checkpoints `[(B * T) // C + N, HV, K, V]`, C = checkpoint_every: the state before every C-th suffix token, what the
backward recomputes from instead of keeping one state a token. The j-th of sequence i, whose suffix begins at flat token
s_i, lies in slot `s_i // C + i + j`; the other slots are zero. C = 0: empty, and the backward makes its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.errors import surfacing
from lattn_compile.ops.autograd import register_first_order
from lattn_compile.ops.call import (
    GRADS,
    SAVED_TENSORS,
    TAGS,
    TENSORS,
    Plan,
    empty_grads,
    fresh,
    incoming,
    no_autocast,
    plan,
    prefix_backward,
    prefix_forward,
    returned,
    returned_fake,
)
from lattn_compile.ops.options import OpOptions, Options, schema
from lattn_compile.ops.validate import Geometry, Tensors

__all__ = ["CHECKPOINT_EVERY", "checkpoint_interval"]

CHECKPOINT_EVERY = 64
"""The interval of a graph that serves any T: at T = 4,096 it is the best one, and a longer sequence still keeps far
less than its inputs and their gradients (a state is as large as q, k, v and o of about K / 4 tokens)."""


def checkpoint_interval(tokens: int | torch.SymInt) -> int:
    """About sqrt(T), which minimises T / C checkpoints plus C recomputed states; 64 for a symbolic T."""
    if isinstance(tokens, torch.SymInt):
        return CHECKPOINT_EVERY
    return max(16, math.isqrt(max(tokens - 1, 0)) + 1)


_OPTIONS = schema("int checkpoint_every=0")

torch.library.define(
    "lattn::decode", f"({TENSORS}, *, {_OPTIONS}) -> (Tensor o, Tensor final_state, Tensor checkpoints)", tags=TAGS
)
torch.library.define(
    "lattn::decode_backward",
    f"(Tensor? grad_o, Tensor? grad_final_state, {SAVED_TENSORS}, Tensor checkpoints, *, {_OPTIONS}) -> {GRADS}",
    tags=TAGS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode(OpOptions):
    checkpoint_every: int = 0

    FORM: ClassVar[str] = "decode"
    WRITES: ClassVar[tuple[str, ...]] = ("exact", "token")

    def interval(self) -> tuple[str, int, int, int | None]:
        return "checkpoint_every", self.checkpoint_every, 0, None


def _checkpoint_shape(geometry: Geometry, every: int) -> tuple[int, ...]:
    if every == 0:
        return (0,)
    return (geometry.flat_tokens // every + geometry.sequences, *geometry.state_shape[1:])


@torch.library.register_fake("lattn::decode")
def _decode_fake(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, chosen = Tensors(*tensors), _Decode(**options)
    with surfacing():
        geometry, _ = chosen.checked(t)
    shape = _checkpoint_shape(geometry, chosen.checkpoint_every)
    return (
        t.q.new_empty(t.v.shape),
        t.q.new_empty(geometry.state_shape, dtype=geometry.dtype),
        t.q.new_empty(shape, dtype=geometry.dtype),
    )


@torch.library.impl("lattn::decode", "default")
def _decode(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, chosen = Tensors(*tensors), _Decode(**options)
    geometry, shared = chosen.checked(t)
    every = chosen.checkpoint_every
    p = plan(t, geometry, shared, chunk_size=None)
    o = t.q.new_zeros(geometry.flat_tokens, *t.v.shape[2:])
    checkpoints = t.q.new_zeros(_checkpoint_shape(geometry, every), dtype=geometry.dtype)
    state = p.state
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, o)
            state = _forward(p, shared, state, o, checkpoints, every)
    return o.view(t.v.shape), fresh(state, t.initial_state, checkpoints), checkpoints


def _forward(p: Plan, shared: Options, state: Tensor, o: Tensor, checkpoints: Tensor, every: int) -> Tensor:
    return shared.kernel("decode").forward(
        *p.flat,
        state,
        p.begin,
        p.length,
        o,
        checkpoints if every else None,
        every,
        **shared.suffix(),
        identity=p.identity,
    )


@torch.library.register_fake("lattn::decode_backward")
def _decode_backward_fake(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t = Tensors(*tensors[:-1])
    _Decode(**options).checked(t)
    return returned_fake(t)


@torch.library.impl("lattn::decode_backward", "default")
def _decode_backward(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t, checkpoints, chosen = Tensors(*tensors[:-1]), tensors[-1], _Decode(**options)
    geometry, shared = chosen.checked(t)
    p = plan(t, geometry, shared, chunk_size=None)
    grad_o, grad_state = incoming(grad_o, grad_state, t, geometry)
    grads = empty_grads(p)
    if not p.empty:
        with no_autocast(t.q.device):
            every = chosen.checkpoint_every
            if every:
                # The state that the suffix starts from is its own first checkpoint: no need to run the prefix again.
                slot = p.begin // every + torch.arange(geometry.sequences, device=p.begin.device)
                state = checkpoints.index_select(0, slot)
            else:
                state = prefix_forward(p, shared, torch.empty_like(grad_o) if p.has_prefix else grad_o)
            grad_state = shared.kernel("decode").backward(
                grad_o,
                grad_state,
                *p.flat,
                state,
                p.begin,
                p.length,
                checkpoints if every else None,
                every,
                grads,
                **shared.suffix(),
                identity=p.identity,
                longest=geometry.tokens,
            )
            grad_state = prefix_backward(p, shared, grad_o, grad_state, grads)
    return returned(grads, grad_state, t)


register_first_order("lattn::decode")
