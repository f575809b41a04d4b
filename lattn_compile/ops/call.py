"""What the ops share: one call = exact prefix (chunk form), hand-over, suffix in its mode (semantics §4).

Below autograd: nothing here is differentiated. `Plan` is a call made ready for the kernels; `prefix_forward` and
`prefix_backward` are the exact part and the hand-over; the op files add their suffix.
"""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lattn_compile import codec
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.ops.arguments import check_transforms
from lattn_compile.ops.options import Options
from lattn_compile.ops.segments import Segments, split
from lattn_compile.ops.validate import Geometry, Tensors, check_gates, check_lengths

__all__ = [
    "GRADS",
    "PREFIX_CHUNK",
    "SAVED_TENSORS",
    "TAGS",
    "TENSORS",
    "Plan",
    "empty_grads",
    "fresh",
    "identity_of",
    "incoming",
    "moved",
    "no_autocast",
    "plan",
    "prefix_backward",
    "prefix_forward",
    "returned",
    "returned_fake",
    "rounded",
]

GATE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

PREFIX_CHUNK = 64
"""Chunk size of the prefix; where it is exact, any other gives the same numbers up to the order of sums."""

_PREFIX: dict[str, Any] = {"chunk_size": PREFIX_CHUNK, "quantize": None, "readout": "before_write", "identity": None}

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? prefix_lengths, Tensor? sequence_lengths, Tensor? cursor, Tensor? position=None, "
    "Tensor? sequence_ids=None"
)
"""The tensor arguments of every op's schema."""

SAVED_TENSORS = TENSORS.replace("=None", "")
"""The same in a backward's schema, where more of them may follow."""

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""The reference reads lengths on the host, which no CUDA graph can record: Inductor cuts its graphs around the ops."""

GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dstate)"
"""What every backward op returns; the gradient of an absent argument is an empty tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One call, ready for kernels.

    Attributes:
        flat: q, k `[M, H, K]`, v `[M, HV, V]`, g, beta `[M, HV(, K)]` or None, M = B * T, as they came.
        state: `[N, HV, K, V]` in the compute dtype; may be the caller's own tensor, so it is never written to.
        begin, length: int64 `[N]`, the run of tokens that the op's own mode processes.
        segments: the whole split; `has_prefix` says whether any prefix may be non-empty.
        handover: bool `[N]`, states that are rounded just before their first suffix token. None: none are.
        offset: int64 `[N]`, position of the first suffix token in the chunk grid.
        identity: of the first suffix token's write, where random bits are needed.
    """

    flat: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    state: Tensor
    begin: Tensor
    length: Tensor
    segments: Segments
    has_prefix: bool
    handover: Tensor | None
    offset: Tensor
    identity: Identity | None
    empty: bool


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The ops see their inputs as they are, and their own products must not be cast either."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _is_recorded() -> bool:
    """Whether the call is being traced into a graph."""
    from lattn_compile.kernels.common.launch import is_recorded  # kernels load when ops are called

    return is_recorded()


def fresh(x: Tensor, *others: Tensor | None) -> Tensor:
    """`x` contiguous and sharing no memory with any of `others`: an op's output never aliases an input."""
    x = x.contiguous()
    if _is_recorded():  # a graph's values have no memory yet, and AOTAutograd sees to aliases
        return x
    ours = x.untyped_storage().data_ptr()
    if any(o is not None and o.untyped_storage().data_ptr() == ours for o in others):
        return x.clone()
    return x


def plan(t: Tensors, geometry: Geometry, options: Options, *, chunk_size: int | None) -> Plan:
    """Checks values, flattens tokens and finds out what happens to whom.

    Args:
        options: `growth` is set where a model's own code decays by exp(g) of a g that nobody says is negative.
        chunk_size: of the grid on which the write mode rounds; None for the token mode.
    """
    check_transforms(t.floats())
    quantize = options.quantize
    cursor_end = chunk_size if chunk_size is not None else 1
    check_lengths(t if quantize is not None else dataclasses.replace(t, cursor=None), geometry, cursor_end=cursor_end)
    device = t.q.device
    # Under exact a prefix differs from a suffix only where its operands are rounded.
    prefix_lengths = t.prefix_lengths if quantize is not None or options.prefill is not None else None
    segments = split(geometry.batch, geometry.tokens, t.cu_seqlens, prefix_lengths, t.sequence_lengths, device)
    if not options.growth:
        check_gates(t.g, lambda: segments.rows(geometry.flat_tokens))

    q, k, v, g, beta = (None if x is None else x.flatten(0, 1) for x in (t.q, t.k, t.v, t.g, t.beta))
    assert q is not None and k is not None and v is not None
    if g is not None and options.gate is not None:
        g = g.to(GATE_DTYPES[options.gate]).to(g.dtype)
    if t.initial_state is None:
        state = t.q.new_zeros(geometry.state_shape, dtype=geometry.dtype)
    else:
        state = t.initial_state.to(geometry.dtype)
    cursor = None if t.cursor is None or quantize is None else t.cursor.to(device=device, dtype=torch.int64)
    before = None if quantize is None else identity_of(t, segments, quantize)

    has_prefix = prefix_lengths is not None and _any(segments.prefix > 0)
    handover: Tensor | None = None
    offset = torch.zeros_like(segments.total)
    if quantize is not None:
        first = segments.prefix > 0
        if cursor is not None:
            first = first | (cursor < 0)
            offset = torch.where(first, 0, cursor)
        else:
            first = torch.ones_like(first)
        handover = first & (segments.suffix > 0)
    return Plan(
        flat=(q, k, v, g, beta),
        state=state,
        begin=segments.suffix_begin,
        length=segments.suffix,
        segments=segments,
        has_prefix=has_prefix,
        handover=handover,
        offset=offset,
        identity=None if before is None else moved(before, segments.prefix),
        empty=geometry.flat_tokens == 0 or geometry.sequences == 0,
    )


def identity_of(t: Tensors, segments: Segments, quantize: Quantizer) -> Identity | None:
    """Position and sequence id of every sequence's first token; None where rounding needs no random bits."""
    if quantize.rounding == "nearest":
        return None
    zero = torch.zeros_like(segments.total)
    position, sequence = (zero if x is None else x.to(zero).expand_as(zero) for x in (t.position, t.sequence_ids))
    return Identity(position, sequence)


def moved(identity: Identity | None, tokens: Tensor | int) -> Identity | None:
    """The identity of a write `tokens` later."""
    return None if identity is None else identity._replace(position=identity.position + tokens)


def _any(mask: Tensor) -> bool:
    """Whether any is set; off the CPU, where looking would wait for the device, whether any might be."""
    return bool(mask.any()) if mask.device.type == "cpu" else True


def rounded(state: Tensor, rows: Tensor, quantize: Quantizer, identity: Identity | None) -> Tensor:
    """QDQ of the states in `rows` (bool `[N]`), the others bit for bit. Its gradient is the identity."""
    if not _any(rows):
        return state
    if _is_recorded() and quantize.rounding == "nearest":
        # In a graph the codec stays an op, which no compiler contracts.
        written = codec.qdq(state, str(quantize.fmt), feedback=quantize.feedback, rotation=quantize.rotation)
    else:
        written = quantize.qdq(state, identity)
    return torch.where(rows.view(-1, 1, 1, 1), written, state)


def prefix_forward(p: Plan, options: Options, o: Tensor) -> Tensor:
    """Runs the exact prefix, writes its rows of `o`, and returns the state that the suffix starts from."""
    state = p.state
    if p.has_prefix:
        kernel, own = options.prefix_kernel(forward=True)
        state = kernel.forward(
            *p.flat,
            state,
            p.segments.begin,
            p.segments.prefix,
            None,
            o,
            **_PREFIX,
            **options.step(),
            **own,
        )
    if p.handover is not None and options.quantize is not None:
        state = rounded(state, p.handover, options.quantize, moved(p.identity, -1))
    return state


def prefix_backward(p: Plan, options: Options, grad_o: Tensor, grad_state: Tensor, grads: dict[str, Tensor]) -> Tensor:
    """Adjoint of `prefix_forward`: writes the prefix's rows of `grads`, returns the gradient of the initial state."""
    if not p.has_prefix:
        return grad_state
    kernel, own = options.prefix_kernel(forward=False)
    return kernel.backward(
        grad_o,
        grad_state,
        *p.flat,
        p.state,
        p.segments.begin,
        p.segments.prefix,
        None,
        grads,
        **_PREFIX,
        **options.step(),
        **own,
    )


_GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")


def incoming(grad_o: Tensor | None, grad_state: Tensor | None, t: Tensors, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The two incoming gradients, `[M, HV, V]` and `[N, HV, K, V]`; absent ones are zeros."""
    if grad_o is None:
        grad_o = t.q.new_zeros(t.v.shape)
    if grad_state is None:
        grad_state = t.q.new_zeros(geometry.state_shape, dtype=geometry.dtype)
    return grad_o.flatten(0, 1), grad_state


def empty_grads(p: Plan) -> dict[str, Tensor]:
    """Zeroed gradient buffers of the flat inputs that are present: a token outside every sequence keeps its exact 0."""
    return {name: x.new_zeros(x.shape) for name, x in zip(_GRADIENTS, p.flat, strict=True) if x is not None}


def returned(grads: dict[str, Tensor], grad_state: Tensor, t: Tensors) -> tuple[Tensor, ...]:
    """Gradients in the shapes and dtypes of their inputs, in schema order, an empty tensor for an absent input."""
    out = []
    for name, x in zip(_GRADIENTS, (t.q, t.k, t.v, t.g, t.beta), strict=True):
        out.append(t.q.new_empty(0) if x is None else grads[name].view(x.shape))
    state = t.initial_state
    out.append(t.q.new_empty(0) if state is None else fresh(grad_state.to(state.dtype)))
    return tuple(out)


def returned_fake(t: Tensors) -> tuple[Tensor, ...]:
    """The shapes of `returned`."""
    inputs = (t.q, t.k, t.v, t.g, t.beta, t.initial_state)
    return tuple(t.q.new_empty(0 if x is None else x.shape, dtype=(t.q if x is None else x).dtype) for x in inputs)
