"""`lattn::decode` in Triton: the functions of `kernels.reference.decode`, for CUDA and ROCm devices.

Three kernels of a forward, all sized by shapes, so nothing waits for lengths:

    pair_up  (decays)      norms and decays out of the loop                           common/inputs.py
    advance                the loop over a sequence's tokens, state in registers      decode_forward.py

and for every stretch of C tokens from the last back, these of the backward:

    fetch                  the states before the stretch, out of their bytes          decode_checkpoints.py
    pair_up  (decays)      of the stretch
    advance                again from there, keeping states as they are stored: as codes where there are some, every
                           fourth one in exact mode; a long stretch in parts, after a pass for the states before them
                           and for every token's error, with which the parts have nothing to sum
    retreat                the adjoint, from those states; it never rounds            decode_backward.py
    deliver                sums over value columns and value heads, gradients of the norms   decode_deliver.py

`advance` computes the same bits whichever warps, programs and calls its tokens are spread over, so the states that the
backward sees are those of the forward. No atomics: every gradient is summed in one order.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
from torch import Tensor

from lattn_compile.formats.checkpoints import Checkpoints, row_format, row_interval, row_shape
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.common.host import on, refused, refused_rounding
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.common.layout import MAX_WARPS
from lattn_compile.kernels.decode_backward import retreat
from lattn_compile.kernels.decode_call import (
    ALL,
    ROWS,
    Call,
    Kept,
    Ready,
    States,
    checkpoints_of,
    layout_of,
    of_sequences,
    strides,
)
from lattn_compile.kernels.decode_deliver import deliver

__all__ = ["backward", "forward", "supports"]

_WHOLE = 32
"""A stretch of no more tokens is kept in one piece, whatever that takes."""

_SEGMENTS = 4
"""Pieces of a training forward over sequences of one length: what `pair_up` makes is then small beside the inputs."""


def supports(
    *, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, quantize: Quantizer | None
) -> str | None:
    """Why these kernels cannot compute such a call, in words, or None if they can.

    Args:
        dtype: of the arithmetic.
    """
    if (why := refused(device, dtype, key_dim, value_dim)) is not None:
        return why
    if quantize is None:
        return None
    if (why := refused_rounding("decode", quantize, key_dim, value_dim)) is not None:
        return why
    if layout_of(key_dim, value_dim, quantize).warps > MAX_WARPS:
        return f"a tile of {quantize} with K = {key_dim}, V = {value_dim} does not fit into one program"
    return None


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    o: Tensor | None,
    checkpoints: Tensor | Checkpoints | None,
    checkpoint_every: int,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
    in_place: bool = False,
) -> Tensor:
    """As `kernels.reference.decode.forward`, where `supports` has no objection.

    Args:
        checkpoints: states, or rows that they are encoded in.
        in_place: `state` may be written over, and is what is returned, if it is contiguous and aligned.
    """
    if state.numel() == 0 or q.shape[0] == 0:
        return state.clone(memory_format=torch.contiguous_format)
    with on(q.device):
        call = Call(
            q, k, v, g, beta, starts, lengths,
            rule=rule, scale=scale, qk_l2norm=qk_l2norm, quantize=quantize, readout=readout,
        )  # fmt: skip
        out = None if o is None else o.contiguous()
        marks = None if checkpoints is None else checkpoints_of(checkpoints, checkpoint_every)
        longest = checkpoints.longest if isinstance(checkpoints, Checkpoints) else None
        source = of_sequences(state)
        # A program reads all that it writes of a state, and before.
        final = source.states if in_place else None
        if final is None:
            final = torch.empty_like(state, memory_format=torch.contiguous_format)
        _through(call, source, final, marks, longest, checkpoint_every, out)
        if o is not None and out is not None and out is not o:
            o.copy_(out)
    return final


def _through(
    call: Call, source: States, final: Tensor, marks: States | None, longest: int | None, every: int,
    o: Tensor | None = None,
) -> None:  # fmt: skip
    """All tokens, from the states `source` to `final`, with checkpoints in `marks`.

    nvfp4's are encoded by a kernel of their own, out of a segment's states.
    """
    apart = marks is not None and marks.encoded is not None and call.write["FORMAT"] == "nvfp4"
    ready, states = None, None
    for first, span in _segments(call, longest, every, 2 * _SEGMENTS if apart else _SEGMENTS):
        ready = call.ready() if span == ALL else call.ready(first, span, ready)
        if marks is None or not apart or span == ALL:
            call.advance(ready, source, o=o, final=final, marks=marks, first=first, span=span)
        else:
            count = span // every
            if states is None:
                states = final.new_empty(call.sequences * count, *final.shape[1:])
            to = States(states, ALL, count, every, first)
            call.advance(ready, source, o=o, final=final, marks=to, first=first, span=span)
            call.encode(states, marks, first, count)
        source = of_sequences(final)


def _segments(call: Call, longest: int | None, every: int, count: int) -> list[tuple[int, int]]:
    """First token and number of tokens of every launch of a forward, at most `count` of them; ALL: of any sequence.

    Only sequences that fill the tokens are cut: of others, the longest is not known without looking.
    """
    if longest is None or call.sequences * longest > call.tokens or longest < count * every:
        return [(0, ALL)]
    span = triton.cdiv(triton.cdiv(longest, count), every) * every
    return [(first, span) for first in range(0, longest, span)]


@torch.no_grad()
def backward(
    grad_o: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    checkpoints: Tensor | Checkpoints | None,
    checkpoint_every: int,
    grads: dict[str, Tensor],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
    longest: int | None = None,
) -> Tensor:
    """As `kernels.reference.decode.backward`, where `supports` has no objection.

    Args:
        longest: no sequence has more tokens than this, as far as shapes tell (None: M). It bounds the number of
            launches, which the lengths themselves may not.
    """
    cotangent = torch.zeros_like(state, memory_format=torch.contiguous_format)
    if grad_final is not None:
        cotangent.copy_(grad_final)
    tokens = q.shape[0]
    if state.numel() == 0 or tokens == 0:
        return cotangent
    longest = tokens if longest is None else min(longest, tokens)
    with on(q.device):
        call = Call(
            q, k, v, g, beta, starts, lengths,
            rule=rule, scale=scale, qk_l2norm=qk_l2norm, quantize=quantize, readout=readout,
        )  # fmt: skip
        start = of_sequences(state)
        if checkpoints is None:
            marks = _made(call, start, state, longest)
        else:
            given = checkpoints.float().contiguous() if isinstance(checkpoints, Tensor) else checkpoints
            marks = checkpoints_of(given, checkpoint_every)
        buffers = _Gradients(call, grads)
        every = marks.interval
        stretch = min(every, longest)
        parts = call.parts(stretch, _WHOLE)
        room = triton.cdiv(triton.cdiv(stretch, parts), call.save_every) * call.save_every
        kept = Kept(call, stretch, room)
        between = state.new_empty(call.sequences * parts, *state.shape[1:]) if parts > 1 else None
        fetched = torch.empty_like(cotangent) if marks.encoded is not None and longest > every else None
        ready = None
        for first in reversed(range(0, longest, every)):
            ready = call.ready(first, stretch, ready)
            # The first states come as they were given: they may be none that the format stores.
            source = start if first == 0 else marks
            if first and fetched is not None:
                source = call.fetch(marks, first, fetched)
            entering = source
            if between is not None:
                entering = States(between, ALL, parts, room, first)
                call.advance(ready, source, marks=entering, first=first, span=every, errors=kept.errors)
            for begin in reversed(range(first, min(first + every, longest), room)):
                span = min(room, first + every - begin)
                if between is None:
                    call.advance(ready, entering, first=begin, span=span, save=kept, errors=kept.errors)
                else:
                    call.advance(ready, entering, first=begin, span=span, save=kept, known=kept.errors)
                _retreat(call, ready, kept, grad_o, entering, cotangent, buffers, begin, span)
                _deliver(call, kept, buffers, begin, span)
        buffers.hand_over()
    return cotangent


def _made(call: Call, start: States, state: Tensor, longest: int) -> States:
    """Checkpoints that nobody kept: one more forward, unless all is one stretch."""
    if longest <= _WHOLE:
        return dataclasses.replace(start, interval=_WHOLE)
    every = row_interval(max(_WHOLE, math.isqrt(longest - 1) + 1), call.quantize, torch.float32)
    fmt = row_format(call.quantize, torch.float32)
    shape = (call.tokens // every + call.sequences, *row_shape(state.shape, call.quantize, torch.float32))
    buffer = state.new_empty(shape, dtype=torch.float32 if fmt is None else torch.uint8)
    heads, key_dim, value_dim = state.shape[1:]
    marks = checkpoints_of(Checkpoints(buffer, fmt, heads, key_dim, value_dim, longest), every)
    final = torch.empty_like(state, memory_format=torch.contiguous_format)
    _through(call, start, final, marks, longest, every)
    return marks


class _Gradients:
    """Where gradients are written: the caller's tensors, contiguous stand-ins for others, or scratch."""

    def __init__(self, call: Call, grads: dict[str, Tensor]) -> None:
        self._grads = grads
        inputs = {"dq": call.q, "dk": call.k, "dv": call.v, "dg": call.g, "dbeta": call.beta}
        self._own: dict[str, Tensor] = {}
        for name, x in inputs.items():
            if x is not None:
                given = grads.get(name)
                given = torch.empty_like(x) if given is None else given
                self._own[name] = given.contiguous()

    def __getitem__(self, name: str) -> Tensor | None:
        return self._own.get(name)

    def hand_over(self) -> None:
        """Copies stand-ins to the caller's tensors."""
        for name, x in self._grads.items():
            if name in self._own and self._own[name] is not x:
                x.copy_(self._own[name])


def _retreat(
    call: Call,
    ready: Ready,
    kept: Kept,
    grad_o: Tensor,
    source: States,
    cotangent: Tensor,
    buffers: _Gradients,
    first: int,
    span: int,
) -> None:
    own, dv = kept.own, buffers["dv"]
    assert dv is not None
    launched(retreat)[(own.blocks * call.value_heads * call.sequences,)](
        ready.pairs, ready.g, call.beta, grad_o, source.states, call.starts, call.lengths, kept.saved, kept.scales,
        kept.errors, cotangent, dv, kept.by_channel, kept.by_head, *strides(call.g), *strides(call.beta),
        *grad_o.stride(), *strides(dv), call.key_heads, call.value_heads, first, span,
        source.every, source.stride, source.slot(first), kept.room, ready.room, ready.at(first),
        **own.constants(), **call.step, FORMAT=call.write["FORMAT"], BYTES=call.bytes, STEPS=call.steps,
        SAVE_EVERY=call.save_every, TILE=call.layout.width, GROUPS=call.layout.groups, num_warps=own.warps,
        num_stages=1,
    )  # fmt: skip


def _deliver(call: Call, kept: Kept, buffers: _Gradients, first: int, span: int) -> None:
    own, rows = kept.own, call.sequences * kept.room
    dq, dk, dg, dbeta = buffers["dq"], buffers["dk"], buffers["dg"], buffers["dbeta"]
    launched(deliver)[(triton.cdiv(rows, ROWS // 2), call.key_heads)](
        call.q, call.k, kept.by_channel, kept.by_head, call.starts, call.lengths, dq, dk, dg, dbeta, call.scale,
        *call.q.stride(), *call.k.stride(), *strides(dq), *strides(dk), *strides(dg), *strides(dbeta),
        call.value_heads, first, span, kept.room, rows,
        K=own.key_dim, RATIO=call.value_heads // call.key_heads, LANES=own.lanes, PIECES=own.pieces, STEP=own.step,
        COLUMNS=own.columns, OWN=own.groups, ROWS=ROWS // 2, NORM=call.norm, DECAY=call.decay,
        BETA=call.beta is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
