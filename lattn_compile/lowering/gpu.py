"""The ops on a GPU as launches of our Triton kernels in Inductor's own module, instead of calls back into Python.

What a call launches is said once, by the kernels' host sides (`kernels/*_call.py`). Here an op's host side is traced
with its launches written into the graph (`kernels/common/launch.py`), below autograd: outputs and workspaces become
Inductor's buffers, small ATen operations between launches fuse with their surroundings, and the kernels are compiled,
launched and recorded (C++ wrapper, AOTInductor, CUDA graphs) like any that Inductor makes. Which form, which tiles and
which checkpoints follows from shapes and options, as when the op is called: the same kernels get the same arguments.

One token of `lattn::decode` is a kernel of its own (`kernels/decode_step.py`), which writes the state where it found
it, so that a cache that is written in the graph is written by the kernel and never copied. What stands around it is
taken into it behind all passes (`post_grad`, `gpu_fold.py`).

What stays a call of the op: the chunk form of bf16 inputs, where Triton has Gluon; sizes that are not known when the
graph is compiled (the batch of a decode step may be),
long training runs of the token loop, whose backward is hundreds of launches and whose encoded checkpoints a kernel
writes through two views of one buffer; lengths that lie on a CPU, as those of a phase given as a list do, whose values
a call looks at; and everything that the reference computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lattn_compile.kernels.common.launch import recording
from lattn_compile.ops import chunk as chunk_op
from lattn_compile.ops import dispatch
from lattn_compile.ops import replay as replay_op
from lattn_compile.ops.call import plan, prefix_forward
from lattn_compile.ops.decode import DecodeOptions, checkpoint_rows, empty_checkpoints
from lattn_compile.ops.options import Options
from lattn_compile.ops.validate import Geometry, Tensors

__all__ = ["LOWERINGS", "PROVEN", "identity", "joint", "post_grad", "takes_decode", "traced"]

PROVEN = frozenset(
    {"decode", "chunk", "replay", "convolution", "projection", "attention", "attend", "causal", "products", "rotation"}
    | {"sequence"}
)
"""What was seen to be right on a GPU in this form, by which of `tests/gpu/lowering_checks.py`. Of the ops, "decode"
(call, in place, model), "chunk" (call, prefill, training) and "replay" (call): a policy's kernel="auto" gets these so,
"triton" all. Of what stands around them, "convolution" and "projection" (model), "attention" and "attend" (attention),
"products" (few rows) and "rotation" (rotation) are what a decode step may take along (`gpu_fold.py`,
`gpu_attention.py`, `gpu_products.py`, `gpu_rotation.py`).
"causal" (attention causal) is a prefill's mask that is said to be, "sequence" (prefill, training) the convolution of a
whole sequence (`gpu_conv.py`).
"""

_ONE_PIECE = 32
"""Tokens of a `decode` whose backward is one stretch."""

_TENSORS = len(dataclasses.fields(Tensors))


def _is_triton(form: str, t: Tensors, geometry: Geometry, shared: Options) -> bool:
    """Whether the call, its exact prefix included, is launches of Triton kernels and nothing else, of known sizes."""
    if t.q.device.type != "cuda" or not (form in PROVEN or shared.implementation == "triton"):
        return False
    sizes = (geometry.tokens, geometry.heads, geometry.value_heads, geometry.key_dim, geometry.value_dim)
    if not all(isinstance(n, int) for n in (*sizes, *([] if geometry.tokens == 1 else [geometry.sequences]))):
        return False
    if shared.gate is not None:  # Inductor keeps nothing of a cast there and back
        return False
    looked_at = (t.cu_seqlens, t.prefix_lengths, t.sequence_lengths, t.cursor, t.position)
    if any(x is not None and x.device.type == "cpu" for x in looked_at):  # their values are checked in every call
        return False
    if not _chosen(form, shared, shared.work):
        return False
    if t.prefix_lengths is None or shared.quantize is None:
        return shared.prefill is None
    return shared.prefill is None and _chosen("chunk", shared, dataclasses.replace(shared.work, quantize=None))


def _chosen(form: str, shared: Options, work: dispatch.Work) -> bool:
    return dispatch.objection(form, work) is None and dispatch.choose(form, shared.implementation, work) == "triton"


def takes_decode(t: Tensors, options: dict[str, Any]) -> bool:
    """Whether `decode` takes the call."""
    chosen = DecodeOptions(**options)
    geometry, shared = chosen.checked(t)
    if not _is_triton("decode", t, geometry, shared):
        return False
    return shared.quantize is None or not chosen.checkpoint_every or geometry.tokens == 1


def decode(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::decode`, or NotImplemented for what stays a call of the op."""
    return traced(_decode, *tensors, **options) if takes_decode(Tensors(*tensors), options) else NotImplemented


def _decode(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    if t.q.shape[1] != 1:
        return _own(torch.ops.lattn.decode.default, *tensors, **options)
    geometry, shared = chosen.checked(t)
    ragged = t.cu_seqlens is not None or t.sequence_lengths is not None
    handed_over = t.prefix_lengths is None and t.cursor is None
    if not ragged and 0 not in geometry.state_shape and (shared.quantize is None or handed_over):
        return _step(t, geometry, shared, chosen)
    # The op's own host side, but that nobody fills memory which is written whole, and that the state stays in
    # its place.
    from lattn_compile.kernels import decode as kernel

    p = plan(t, geometry, shared, chunk_size=None)
    shape = (geometry.flat_tokens, *t.v.shape[2:])
    o = t.q.new_zeros(shape) if ragged else t.q.new_empty(shape)
    checkpoints = empty_checkpoints(t, geometry, shared.quantize, chosen.checkpoint_every)
    rows, every = checkpoint_rows(checkpoints, geometry, shared.quantize, chosen.checkpoint_every)
    state = prefix_forward(p, shared, o)
    state = kernel.forward(*p.flat, state, p.begin, p.length, o, rows, every, **shared.suffix(), in_place=True)
    return o.view(t.v.shape), state, checkpoints


def _step(t: Tensors, geometry: Geometry, shared: Options, chosen: DecodeOptions) -> tuple[Tensor, ...]:
    """One token of every sequence, which is a suffix."""
    from lattn_compile.kernels import decode_step as kernel

    state = t.initial_state
    state = t.q.new_zeros(geometry.state_shape, dtype=geometry.dtype) if state is None else state.to(geometry.dtype)
    o = t.q.new_empty((geometry.flat_tokens, *t.v.shape[2:]))
    q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))
    g, beta = (None if x is None else x.flatten(0, 1) for x in (t.g, t.beta))
    state = kernel.forward(q, k, v, g, beta, state, o, **shared.suffix(), enter=shared.quantize is not None)
    return o.view(t.v.shape), state, empty_checkpoints(t, geometry, shared.quantize, chosen.checkpoint_every)


def decode_backward(*args: Any, **options: Any) -> Any:
    """Decomposition of `lattn::decode_backward`, of few tokens."""
    t = Tensors(*args[2 : 2 + _TENSORS])
    geometry, shared = DecodeOptions(**options).checked(t)
    if not _is_triton("decode", t, geometry, shared) or geometry.tokens > _ONE_PIECE:
        return NotImplemented
    return traced(_own, torch.ops.lattn.decode_backward.default, *args, **options)


def chunk(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::chunk`."""
    t = Tensors(*tensors)
    if not _is_triton("chunk", t, *chunk_op.ChunkOptions(**options).checked(t)):
        return NotImplemented
    return _chunk_form(torch.ops.lattn.chunk.default, tensors, 0, options)


def chunk_backward(*args: Any, **options: Any) -> Any:
    """Decomposition of `lattn::chunk_backward`."""
    t = Tensors(*args[2 : 2 + _TENSORS])
    if not _is_triton("chunk", t, *chunk_op.ChunkOptions(**options).checked(t)):
        return NotImplemented
    return _chunk_form(torch.ops.lattn.chunk_backward.default, args, 2, options)


def _chunk_form(op: Any, args: tuple[Any, ...], first: int, options: dict[str, Any]) -> Any:
    """The launches of a call whose q, k and v begin at `first`, or, where they are bf16, a call of the op: its loops
    over blocks are in Gluon there, which Inductor cannot write, and faster."""
    from lattn_compile.kernels import chunk_fine

    given = _neighbours(args, first)
    if given[first].dtype is not torch.bfloat16 or not chunk_fine.is_spread(given[first].device):
        return traced(_own, op, *given, **options)
    return NotImplemented if all(x is y for x, y in zip(args, given, strict=True)) else op(*given, **options)


def _neighbours(args: tuple[Any, ...], first: int) -> list[Any]:
    """`args` with q, k and v, from `first` on, so that channels are neighbours, as the kernels read fast. Behind a
    convolution tokens are; what moves them is a part of whatever computes them."""
    own = range(first, first + 3)
    return [x.contiguous() if i in own and x.stride(-1) != 1 else x for i, x in enumerate(args)]


def replay(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::replay`: of replay, not of two precisions, whose read copy is rounded in between."""
    if not _takes_replay(tensors, options):
        return NotImplemented
    return traced(_own, torch.ops.lattn.replay.default, *tensors, **options)


def _takes_replay(tensors: Any, options: dict[str, Any]) -> bool:
    (t, carried), chosen = replay_op.sort_tensors(tensors), replay_op.ReplayOptions(**options)
    if chosen.two_precision:
        return False
    return _is_triton("decode" if chosen.is_token_mode else "replay", t, *chosen.resolved(t, carried))


def _own(op: Any, *args: Any, **options: Any) -> Any:
    """The op's host side, as a call of it runs."""
    from lattn_compile.lowering import _torch_triton as private

    return private.implementation(op)(*args, **options)


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from lattn_compile.lowering import _torch_triton as private

    with recording(private.written):
        return private.functional(function)(*args, **options)


LOWERINGS: tuple[tuple[Any, Callable[..., Any], str, Callable[[Tensors, dict[str, Any]], bool] | None], ...] = (
    (torch.ops.lattn.decode.default, decode, "triton", takes_decode),
    (torch.ops.lattn.decode_backward.default, decode_backward, "triton", None),
    (torch.ops.lattn.chunk.default, chunk, "triton", None),
    (torch.ops.lattn.chunk_backward.default, chunk_backward, "triton", None),
    (torch.ops.lattn.replay.default, replay, "triton", None),
)
"""Op, decomposition, kernel as reports name it, and whether a call is taken."""


def joint(graph: torch.fx.Graph) -> None:
    """What is done to a graph of forward and backward, or of a forward alone, before it is parted."""
    from lattn_compile.lowering import gpu_attention

    if "causal" in PROVEN:
        gpu_attention.say_causal(graph)


def post_grad(graph: torch.fx.Graph) -> None:
    """What the launches in a graph need of it, behind all other passes."""
    from lattn_compile.lowering import _torch_triton as private
    from lattn_compile.lowering import gpu_attention, gpu_fold
    from lattn_compile.lowering.gpu_memory import keep_inputs

    if "attention" in PROVEN:
        gpu_attention.share_keys(graph, launched="attend" in PROVEN)
    if "sequence" in PROVEN and private.launches(graph):
        from lattn_compile.lowering.gpu_conv import fold_sequences

        fold_sequences(graph)
    if _steps(graph):
        gpu_fold.fold_gates(graph)
        gpu_fold.fold_repeats(graph)
        if "convolution" in PROVEN:
            gpu_fold.fold_convolutions(graph, projections="projection" in PROVEN)
        if "rotation" in PROVEN:
            from lattn_compile.lowering.gpu_rotation import fold_rotations

            fold_rotations(graph)
        if "products" in PROVEN:
            from lattn_compile.lowering.gpu_products import fold_products

            fold_products(graph)
    if private.begins_early():
        for node, _ in private.launches(graph):
            private.begin_early(node)
    keep_inputs(graph)


def _steps(graph: torch.fx.Graph) -> bool:
    """Whether it launches one token of a recurrence, or calls the op that does."""
    from lattn_compile.lowering import _torch_triton as private
    from lattn_compile.lowering.gpu_fold import packed_steps

    if packed_steps(graph):
        return True
    if not private.launches(graph):
        return False
    from lattn_compile.kernels import decode_step

    return bool(private.launches(graph, decode_step.step))


def identity() -> str:
    """For the keys of caches: what is lowered here and by which kernels, which a benchmark or a test may change."""
    return ",".join([*sorted(PROVEN), "of", *sorted(dispatch.PROVEN)])
