"""`lattn::chunk`: the recurrence in chunk form, exact or rounding its state every `chunk_size` tokens.

    chunk(q, k, v, g, beta, initial_state, cu_seqlens, prefix_lengths, sequence_lengths, cursor, *, ...)
        -> (o, final_state)

q, k `[B, T, H, K]`; v, o `[B, T, HV, V]`; g `[B, T, HV]` or `[B, T, HV, K]`; beta `[B, T, HV]`; states `[N, HV, K, V]`;
lengths int `[]` or `[N]`; cursor int `[N]`. o has q's dtype. final_state is float32 (float64 if any input is) and raw:
exact, or rounded where the call ends on the chunk grid. In write="exact" prefix lengths, cursor and state_format say
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import surfacing
from lattn_compile.ops import dispatch
from lattn_compile.ops.autograd import register_first_order
from lattn_compile.ops.call import (
    GRADS,
    TAGS,
    TENSORS,
    Options,
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
from lattn_compile.ops.validate import Geometry, Tensors, check_call, check_options

__all__: list[str] = []

WRITES = ("exact", "chunk")

_OPTIONS = (
    'str rule="delta", float scale, bool qk_l2norm=False, str write="exact", str state_format="fp32", '
    'str readout="before_write", int chunk_size=64, str implementation="auto", int site_id=0, bool growth=False'
)

torch.library.define("lattn::chunk", f"({TENSORS}, *, {_OPTIONS}) -> (Tensor o, Tensor final_state)", tags=TAGS)
torch.library.define(
    "lattn::chunk_backward",
    f"(Tensor? grad_o, Tensor? grad_final_state, {TENSORS}, *, {_OPTIONS}) -> {GRADS}",
    tags=TAGS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """The schema's options; the dispatcher leaves out those that have their default."""

    scale: float
    rule: str = "delta"
    qk_l2norm: bool = False
    write: str = "exact"
    state_format: str = "fp32"
    readout: str = "before_write"
    chunk_size: int = 64
    implementation: str = "auto"
    site_id: int = 0
    growth: bool = False

    def checked(self, t: Tensors) -> tuple[Geometry, Options]:
        geometry = check_call(t)
        fmt = check_options(
            geometry,
            rule=self.rule,
            write=self.write,
            writes=WRITES,
            state_format=self.state_format,
            readout=self.readout,
            implementation=self.implementation,
            interval=("chunk_size", self.chunk_size, 1),
        )
        return geometry, Options(
            self.rule, self.scale, self.qk_l2norm, self.readout, self.implementation, fmt, self.growth
        )


@torch.library.register_fake("lattn::chunk")
def _chunk_fake(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    t = Tensors(*tensors)
    with surfacing():
        geometry, _ = _Chunk(**options).checked(t)
    return t.q.new_empty(t.v.shape), t.q.new_empty(geometry.state_shape, dtype=geometry.dtype)


@torch.library.impl("lattn::chunk", "default")
def _chunk(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    t, chosen = Tensors(*tensors), _Chunk(**options)
    geometry, shared = chosen.checked(t)
    p = plan(t, geometry, shared, chunk_size=chosen.chunk_size)
    o = t.q.new_zeros(geometry.flat_tokens, *t.v.shape[2:])
    state = p.state
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, o)
            state = dispatch.load("chunk", chosen.implementation).forward(
                *_suffix(p, state), o, chunk_size=chosen.chunk_size, **shared.suffix()
            )
    return o.view(t.v.shape), fresh(state, t.initial_state)


def _suffix(p: Plan, state: Tensor) -> tuple[Any, ...]:
    return (*p.flat, state, p.begin, p.length, p.offset)


@torch.library.register_fake("lattn::chunk_backward")
def _chunk_backward_fake(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t = Tensors(*tensors)
    _Chunk(**options).checked(t)
    return returned_fake(t)


@torch.library.impl("lattn::chunk_backward", "default")
def _chunk_backward(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t, chosen = Tensors(*tensors), _Chunk(**options)
    geometry, shared = chosen.checked(t)
    p = plan(t, geometry, shared, chunk_size=chosen.chunk_size)
    grad_o, grad_state = incoming(grad_o, grad_state, t, geometry)
    grads = empty_grads(p)
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, torch.empty_like(grad_o) if p.has_prefix else grad_o)
            grad_state = dispatch.load("chunk", chosen.implementation).backward(
                grad_o, grad_state, *_suffix(p, state), grads, chunk_size=chosen.chunk_size, **shared.suffix()
            )
            grad_state = prefix_backward(p, shared, grad_o, grad_state, grads)
    return returned(grads, grad_state, t)


register_first_order("lattn::chunk")
