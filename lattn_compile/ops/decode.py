"""`lattn::decode`: the recurrence token by token, exact or rounding its state after every token (token mode).

    decode(q, k, v, g, beta, initial_state, cu_seqlens, prefix_lengths, sequence_lengths, cursor, *, ...)
        -> (o, final_state, checkpoints)

Tensors as in `lattn::chunk`; any T >= 0, so it is a decode step, a verify call and the suffix of a training sequence.
final_state is raw: the decoded stored value, or exact where no suffix token has come yet (write="token"); of a
quantizer that is not idempotent, the value before its last write.

checkpoints: the state before every C-th suffix token, what the backward recomputes from instead of keeping one state a
token. The j-th of sequence i, whose suffix begins at flat token s_i, lies in row `s_i // C + i + j` of
(B * T) // C + N; the other rows are zero. A row is the state's codes and scales, uint8 `[rows, bytes]`, where the op
rounds to nearest in a format of less than 32 bits and computes in float32; else the state itself, `[rows, HV, K, V]`
(`formats.checkpoints`). C is checkpoint_every times the bytes of a value: 1 for 8-bit and 4-bit codes, 2 for bf16 and
fp16, 4 for float32, so that checkpoints take about the same memory in every mode (float64: 1). Empty for one token, and
where checkpoint_every is 0: the backward makes its own.

A first checkpoint may be lossy: of a state handed in as stored that the format cannot store. The backward takes that
state from the call's own argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.errors import surfacing
from lattn_compile.formats.checkpoints import Checkpoints, row_format, row_interval, row_shape
from lattn_compile.formats.quantizer import Quantizer
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

__all__ = [
    "CHECKPOINT_EVERY",
    "DecodeOptions",
    "checkpoint_interval",
    "checkpoint_rows",
    "empty_checkpoints",
    "run",
    "run_backward",
]

CHECKPOINT_EVERY = 64
"""`checkpoint_every` of a graph that serves any T: at T = 4,096 it is the best one, and a longer sequence still keeps
far less than its inputs and their gradients (an 8-bit state is as large as q, k, v and o of about K / 8 tokens)."""


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
class DecodeOptions(OpOptions):
    """Options of `lattn::decode` and its backward, spelled as the op's schema does.

    `checkpoint_every`: tokens between states that are kept for the backward, 0 for none.
    """

    checkpoint_every: int = 0

    FORM: ClassVar[str] = "decode"
    WRITES: ClassVar[tuple[str, ...]] = ("exact", "token")

    def interval(self) -> tuple[str, int, int, int | None]:
        return "checkpoint_every", self.checkpoint_every, 0, None


def empty_checkpoints(t: Tensors, geometry: Geometry, quantize: Quantizer | None, every: int) -> Tensor:
    """The `checkpoints` output of a call, not yet written."""
    dtype = geometry.dtype
    if not every or (isinstance(geometry.tokens, int) and geometry.tokens <= 1):
        return t.q.new_empty(0, dtype=dtype)
    rows = geometry.flat_tokens // row_interval(every, quantize, dtype) + geometry.sequences
    shape = (rows, *row_shape(geometry.state_shape, quantize, dtype))
    return t.q.new_empty(shape, dtype=dtype if row_format(quantize, dtype) is None else torch.uint8)


def checkpoint_rows(
    buffer: Tensor, geometry: Geometry, quantize: Quantizer | None, every: int
) -> tuple[Checkpoints | None, int]:
    """What kernels take of it, and C; (None, 0) where it is empty."""
    if buffer.dim() == 1:
        return None, 0
    fmt = row_format(quantize, geometry.dtype)
    rows = Checkpoints(buffer, fmt, *geometry.state_shape[1:], longest=geometry.tokens)
    return rows, row_interval(every, quantize, geometry.dtype)


@torch.library.register_fake("lattn::decode")
def run_fake(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    with surfacing():
        geometry, shared = chosen.checked(t)
    return (
        t.q.new_empty(t.v.shape),
        t.q.new_empty(geometry.state_shape, dtype=geometry.dtype),
        empty_checkpoints(t, geometry, shared.quantize, chosen.checkpoint_every),
    )


def run(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    geometry, shared = chosen.checked(t)
    every = chosen.checkpoint_every
    p = plan(t, geometry, shared, chunk_size=None)
    o = t.q.new_zeros(geometry.flat_tokens, *t.v.shape[2:])
    checkpoints = empty_checkpoints(t, geometry, shared.quantize, every).zero_()
    state = p.state
    if not p.empty:
        with no_autocast(t.q.device):
            state = prefix_forward(p, shared, o)
            state = _forward(p, shared, state, o, *checkpoint_rows(checkpoints, geometry, shared.quantize, every))
    return o.view(t.v.shape), fresh(state, t.initial_state, checkpoints), checkpoints


def _forward(p: Plan, shared: Options, state: Tensor, o: Tensor, checkpoints: Checkpoints | None, every: int) -> Tensor:
    return shared.kernel("decode").forward(
        *p.flat,
        state,
        p.begin,
        p.length,
        o,
        checkpoints,
        every,
        **shared.suffix(),
        identity=p.identity,
    )


@torch.library.register_fake("lattn::decode_backward")
def run_backward_fake(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any
) -> tuple[Tensor, ...]:
    t = Tensors(*tensors[:-1])
    DecodeOptions(**options).checked(t)
    return returned_fake(t)


def run_backward(grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    t, checkpoints, chosen = Tensors(*tensors[:-1]), tensors[-1], DecodeOptions(**options)
    geometry, shared = chosen.checked(t)
    p = plan(t, geometry, shared, chunk_size=None)
    grad_o, grad_state = incoming(grad_o, grad_state, t, geometry)
    grads = empty_grads(p)
    if not p.empty:
        with no_autocast(t.q.device):
            rows, every = checkpoint_rows(checkpoints, geometry, shared.quantize, chosen.checkpoint_every)
            if rows is None:
                state = prefix_forward(p, shared, torch.empty_like(grad_o) if p.has_prefix else grad_o)
            elif p.handover is None:
                state = p.state
            else:
                # A state that was handed over is its own first checkpoint: no need to run the prefix again. One that
                # was not has no prefix.
                slot = p.begin // every + torch.arange(geometry.sequences, device=p.begin.device)
                state = torch.where(p.handover.view(-1, 1, 1, 1), rows.index_select(0, slot), p.state)
            grad_state = shared.kernel("decode").backward(
                grad_o,
                grad_state,
                *p.flat,
                state,
                p.begin,
                p.length,
                rows,
                every,
                grads,
                **shared.suffix(),
                identity=p.identity,
                longest=geometry.tokens,
            )
            grad_state = prefix_backward(p, shared, grad_o, grad_state, grads)
    return returned(grads, grad_state, t)


torch.library.impl("lattn::decode", "default", run)
torch.library.impl("lattn::decode_backward", "default", run_backward)
register_first_order("lattn::decode")
