"""`lattn::decode` in Triton: the functions of `kernels.reference.decode`, for CUDA and ROCm devices.

Three kernels of a forward, all sized by shapes, so nothing waits for lengths:

    pair_up  (decays)      norms and decays out of the loop                           common/inputs.py
    advance                the loop over a sequence's tokens, state in registers      decode_forward.py

and for every stretch of C tokens from the last back, these of the backward:

    pair_up  (decays)      of the stretch
    advance                again from the checkpoint, keeping states as they are stored: a byte a value for int8, fp8
    retreat                the adjoint, from those states; it never rounds            decode_backward.py
    deliver                sums over value columns and value heads, gradients of the norms

`advance` computes the same bits whichever warps, programs and calls its tokens are spread over, so the states that the
backward sees are those of the forward. No atomics: every gradient is summed in one order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lattn_compile.formats import Nvfp4, TiledFormat
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.common.inputs import decays, pair_up
from lattn_compile.kernels.common.layout import MAX_WARPS, Layout, layout
from lattn_compile.kernels.decode_backward import deliver, retreat
from lattn_compile.kernels.decode_forward import advance

__all__ = ["backward", "forward", "supports"]

_MAX_DIM = 256
_VECTOR = 4
_ALL = 2**31 - 1
"""More tokens than any sequence has."""

_WHOLE = 32
"""A stretch of no more tokens is kept in one piece, whatever that takes."""

_ROWS = 8
"""Rows of a program that reads whole vectors of channels."""


def supports(
    *, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, quantize: Quantizer | None
) -> str | None:
    """Why these kernels cannot compute such a call, in words, or None if they can.

    Args:
        dtype: of the arithmetic.
    """
    if device.type != "cuda" and not _interpreted():
        return f"Triton kernels run on GPUs, not on {device.type}"
    if dtype is not torch.float32:
        return f"Triton kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
    for name, size in (("K", key_dim), ("V", value_dim)):
        if size > _MAX_DIM:
            return f"{name} = {size} exceeds {_MAX_DIM}"
    if value_dim % _VECTOR and not _interpreted():
        # Wrong gradients on an H200 with Triton 3.6, right in the interpreter: tests/gpu found V = 1, 5 and 33.
        return f"V = {value_dim} is not a multiple of {_VECTOR}: threads that hold less than a float4 compute wrongly"
    if quantize is None:
        return None
    if not quantize.idempotent:
        return f"the Triton decode kernel rounds to nearest, without feedback or rotation, not {quantize}"
    fmt = quantize.fmt
    if isinstance(fmt, TiledFormat):
        for name, block, size in (("block_k", fmt.block_k, key_dim), ("block_v", fmt.block_v, value_dim)):
            if block is not None and block < size and block & (block - 1):
                return f"{name} = {block} is not a power of two"
    if _layout(key_dim, value_dim, quantize).warps > MAX_WARPS:
        return f"a tile of {quantize} with K = {key_dim}, V = {value_dim} does not fit into one program"
    return None


def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return not isinstance(advance, triton.JITFunction)


def _tile(key_dim: int, value_dim: int, quantize: Quantizer | None) -> tuple[int, int]:
    """The tile in powers of two, `(block_k, block_v)`; whole axes are padded to one. (1, 1) where there are none."""
    if quantize is None or not isinstance(quantize.fmt, TiledFormat):
        return (1, 1)
    blocks = (quantize.fmt.block_k, quantize.fmt.block_v)
    sizes = zip(blocks, (key_dim, value_dim), strict=True)
    block_k, block_v = (triton.next_power_of_2(n if b is None else min(b, n)) for b, n in sizes)
    return block_k, block_v


def _layout(key_dim: int, value_dim: int, quantize: Quantizer | None) -> Layout:
    if quantize is None or quantize.fmt.is_plain:
        return layout(key_dim, value_dim)
    if isinstance(quantize.fmt, Nvfp4):
        return layout(key_dim, value_dim, least_run=16, width=64)
    block_k, block_v = _tile(key_dim, value_dim, quantize)
    return layout(key_dim, value_dim, width=block_v, step=block_k)


def _lined_up(x: Any) -> Any:
    """Vectors of channels without gaps; other strides are the kernels' own business."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Call:
    """What the kernels of one call share: its sizes, its inputs made ready, and compile-time options."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        starts: Tensor,
        lengths: Tensor,
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        quantize: Quantizer | None,
        readout: str,
    ) -> None:
        self.tokens, self.key_heads, key_dim = q.shape
        self.value_heads, value_dim = v.shape[1:]
        self.sequences, self.scale, self.norm = starts.shape[0], float(scale), qk_l2norm
        self.q, self.k, self.v, self.g, self.beta = (_lined_up(x) for x in (q, k, v, g, beta))
        self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
        self.layout = _layout(key_dim, value_dim, quantize)
        block_k, block_v = _tile(key_dim, value_dim, quantize)
        whole_keys = block_k >= key_dim
        rounds = quantize is not None and quantize.fmt.name != "fp32"
        name = quantize.fmt.name if quantize is not None and rounds else ""
        self.decay = 0 if g is None else g.dim() - 1
        lay = self.layout
        whole_values = block_v >= value_dim
        self.write: dict[str, Any] = {
            "FORMAT": name,
            "BLOCK_K": max(block_k, lay.lanes * lay.pieces * lay.step) if whole_keys else block_k,
            "BLOCK_V": max(block_v, lay.width) if whole_values else block_v,
        }
        self.step = {
            "DELTA": rule == "delta",
            "DECAY": self.decay,
            "BETA": beta is not None,
            "AFTER": readout == "after_write" and bool(name),
        }
        # A tile that is a whole program has one scale for all that a thread holds: then its bytes and that are kept.
        self.bytes = name in ("int8", "fp8_e4m3") and whole_keys and self.write["BLOCK_V"] >= lay.width
        if self.bytes:
            self.stored = torch.int32
        else:
            self.stored = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)

    def ready(self, first: int | None = None, room: int = 0, into: _Ready | None = None) -> _Ready:
        """Norms and decays of all tokens, or of tokens [first, first + room) of every sequence, over `into`."""
        rows = self.tokens if first is None else self.sequences * room
        if into is None:
            pairs = self.q.new_empty(rows, *self.q.shape[1:], dtype=torch.int64)
            g = self.g
            if self.decay == 2 and g is not None:
                g = g.new_empty(rows, *g.shape[1:], dtype=torch.float32)
            into = _Ready(pairs, self.q.new_empty(rows, self.key_heads, dtype=torch.float32), g, first, room)
        else:
            into = into._replace(first=first)
        where = (0, _ALL, 0) if first is None else (first, room, 1)
        key_dim = self.layout.key_dim
        shape = {"K": key_dim, "BK": triton.next_power_of_2(key_dim), "ROWS": _ROWS, "enable_fp_fusion": False}
        pair_up[(triton.cdiv(rows * self.key_heads, _ROWS),)](
            self.q, self.k, into.pairs, into.dots, self.starts, self.lengths, rows, self.key_heads, self.scale,
            *self.q.stride(), *self.k.stride(), *where, NORM=self.norm, **shape,
        )  # fmt: skip
        if self.decay == 2 and self.g is not None:
            decays[(triton.cdiv(rows * self.value_heads, _ROWS),)](
                self.g, into.g, self.starts, self.lengths, rows, self.value_heads, *self.g.stride(), *where, **shape
            )
        return into

    def advance(
        self,
        ready: _Ready,
        source: _States,
        *,
        o: Tensor | None = None,
        final: Tensor | None = None,
        marks: _States | None = None,
        first: int = 0,
        span: int = _ALL,
        kept: _Kept | None = None,
    ) -> None:
        """Launches `advance` for tokens [first, first + span) of every sequence."""
        lay = self.layout
        saved, scales, errors, room = (None, None, None, 0)
        if kept is not None:
            saved, scales, errors, room = kept.saved, kept.scales, kept.errors, kept.room
        to = _States(None, _ALL, 1, 1) if marks is None else marks
        advance[(lay.blocks * self.value_heads * self.sequences,)](
            ready.pairs, ready.dots, self.v, ready.g, self.beta, source.states, self.starts, self.lengths, o, final,
            to.states, saved, scales, errors, *self.v.stride(), *_strides(self.g), *_strides(self.beta),
            *_strides(o), self.key_heads, self.value_heads, self.tokens, first, span, source.every, source.stride,
            source.slot(first), to.interval, to.every, to.stride, room, ready.room, ready.at(first),
            **lay.constants(), **self.step, **self.write, LOCAL=ready.first is not None, READ=o is not None,
            FINAL=final is not None, MARK=marks is not None, SAVE=kept is not None, BYTES=self.bytes,
            num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


class _Ready(NamedTuple):
    """What `pair_up` and `decays` made: of all tokens, or of `room` tokens of every sequence from `first` on."""

    pairs: Tensor
    dots: Tensor
    g: Tensor | None
    first: int | None
    room: int

    def at(self, token: int) -> int:
        """How far `token` lies behind a sequence's first row."""
        return 0 if self.first is None else token - self.first


@dataclass(frozen=True, slots=True)
class _States:
    """Many states of every sequence, `[.., HV, K, V]`: sequence i's from row `starts[i] // every + i * stride` on, one
    for every `interval`-th token from token `origin` on."""

    states: Tensor | None
    every: int
    stride: int
    interval: int
    origin: int = 0

    def slot(self, token: int) -> int:
        """Which of a sequence's states lies before `token`."""
        return (token - self.origin) // self.interval


def _of_sequences(state: Tensor) -> _States:
    """One state a sequence, `[N, HV, K, V]`, contiguous and 16-byte aligned, so that its layout is that of any call."""
    state = state.contiguous()
    return _States(state if state.data_ptr() % 16 == 0 else state.clone(), _ALL, 1, _ALL)


def _checkpoints(states: Tensor, every: int) -> _States:
    """As `lattn::decode` lays them out."""
    return _States(states, every, 1, every)


class _Kept:
    """What one stretch of the backward leaves for its next kernel: `room` rows a sequence."""

    def __init__(self, call: _Call, room: int) -> None:
        lay, self.room = call.layout, room
        rows = call.sequences * room
        pieces = triton.cdiv(lay.pieces, 4) if call.bytes else lay.pieces
        like = call.q
        self.saved = like.new_empty(rows, call.value_heads, lay.groups, pieces * lay.stride, dtype=call.stored)
        scales = (rows, call.value_heads, lay.blocks) if call.bytes else (1,)
        self.scales = like.new_empty(scales, dtype=torch.float32)
        self.errors = like.new_empty(rows, call.value_heads, lay.value_dim, dtype=torch.float32)
        # `retreat` has no tiles, so it needs no warps that wait for each other.
        self.own = layout(lay.key_dim, lay.value_dim, least_run=lay.pieces * lay.step, step=lay.step)
        vectors = lay.pieces * (3 if call.decay == 2 else 2)
        size = triton.cdiv(vectors, lay.columns) * lay.stride
        self.by_channel = like.new_empty(rows, call.value_heads, self.own.groups, size, dtype=torch.float32)
        self.by_head = like.new_empty(rows, call.value_heads, self.own.groups, 4, dtype=torch.float32)


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
    checkpoints: Tensor | None,
    checkpoint_every: int,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
) -> Tensor:
    """As `kernels.reference.decode.forward`, where `supports` has no objection."""
    final = torch.empty_like(state, memory_format=torch.contiguous_format)
    if state.numel() == 0:
        return final
    if q.shape[0] == 0:
        return final.copy_(state)
    with _on(q.device):
        call = _Call(
            q, k, v, g, beta, starts, lengths,
            rule=rule, scale=scale, qk_l2norm=qk_l2norm, quantize=quantize, readout=readout,
        )  # fmt: skip
        out = None if o is None else o.contiguous()
        marks = None if checkpoints is None else _checkpoints(checkpoints, checkpoint_every)
        call.advance(call.ready(), _of_sequences(state), o=out, final=final, marks=marks)
        if o is not None and out is not None and out is not o:
            o.copy_(out)
    return final


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
    checkpoints: Tensor | None,
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
    with _on(q.device):
        call = _Call(
            q, k, v, g, beta, starts, lengths,
            rule=rule, scale=scale, qk_l2norm=qk_l2norm, quantize=quantize, readout=readout,
        )  # fmt: skip
        if checkpoints is not None:
            source = _checkpoints(checkpoints.float().contiguous(), checkpoint_every)
        else:
            source = _made(call, state, longest)
        buffers = _Gradients(call, grads)
        every = source.interval
        stretch = min(every, longest)
        # A stretch is kept in parts where its states are wider than a byte: no more memory than bytes would take.
        parts = call.stored.itemsize if stretch > _WHOLE and not call.bytes else 1
        room = triton.cdiv(stretch, parts)
        kept = _Kept(call, room)
        between = None
        if parts > 1:
            between = state.new_empty(call.sequences * parts, *state.shape[1:])
        ready = None
        for first in reversed(range(0, longest, every)):
            ready = call.ready(first, stretch, ready)
            entering = source
            if between is not None:
                entering = _States(between, _ALL, parts, room, first)
                call.advance(ready, source, marks=entering, first=first, span=every)
            for begin in reversed(range(first, min(first + every, longest), room)):
                span = min(room, first + every - begin)
                call.advance(ready, entering, first=begin, span=span, kept=kept)
                _retreat(call, ready, kept, grad_o, entering, cotangent, buffers, begin, span)
                _deliver(call, kept, buffers, begin, span)
        buffers.hand_over()
    return cotangent


def _made(call: _Call, state: Tensor, longest: int) -> _States:
    """Checkpoints that nobody kept: one more forward, unless all is one stretch."""
    start = _of_sequences(state)
    if longest <= _WHOLE:
        return dataclasses.replace(start, interval=_WHOLE)
    every = max(_WHOLE, math.isqrt(longest - 1) + 1)
    marks = _checkpoints(state.new_empty(call.tokens // every + call.sequences, *state.shape[1:]), every)
    call.advance(call.ready(), start, marks=marks)
    return marks


class _Gradients:
    """Where gradients are written: the caller's tensors, contiguous stand-ins for others, or scratch."""

    def __init__(self, call: _Call, grads: dict[str, Tensor]) -> None:
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
    call: _Call,
    ready: _Ready,
    kept: _Kept,
    grad_o: Tensor,
    source: _States,
    cotangent: Tensor,
    buffers: _Gradients,
    first: int,
    span: int,
) -> None:
    own, dv = kept.own, buffers["dv"]
    assert dv is not None
    retreat[(own.blocks * call.value_heads * call.sequences,)](
        ready.pairs, ready.g, call.beta, grad_o, source.states, call.starts, call.lengths, kept.saved, kept.scales,
        kept.errors, cotangent, dv, kept.by_channel, kept.by_head, *_strides(call.g), *_strides(call.beta),
        *grad_o.stride(), *_strides(dv), call.key_heads, call.value_heads, first, span,
        source.every, source.stride, source.slot(first), kept.room, ready.room, ready.at(first),
        **own.constants(), **call.step, FORMAT=call.write["FORMAT"], BYTES=call.bytes, TILE=call.layout.width,
        GROUPS=call.layout.groups, num_warps=own.warps, num_stages=1,
    )  # fmt: skip


def _deliver(call: _Call, kept: _Kept, buffers: _Gradients, first: int, span: int) -> None:
    own, rows = kept.own, call.sequences * kept.room
    dq, dk, dg, dbeta = buffers["dq"], buffers["dk"], buffers["dg"], buffers["dbeta"]
    deliver[(triton.cdiv(rows, _ROWS // 2), call.key_heads)](
        call.q, call.k, kept.by_channel, kept.by_head, call.starts, call.lengths, dq, dk, dg, dbeta, call.scale,
        *call.q.stride(), *call.k.stride(), *_strides(dq), *_strides(dk), *_strides(dg), *_strides(dbeta),
        call.value_heads, first, span, kept.room, rows,
        K=own.key_dim, RATIO=call.value_heads // call.key_heads, LANES=own.lanes, PIECES=own.pieces, STEP=own.step,
        COLUMNS=own.columns, OWN=own.groups, ROWS=_ROWS // 2, NORM=call.norm, DECAY=call.decay,
        BETA=call.beta is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Of tokens and heads."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
