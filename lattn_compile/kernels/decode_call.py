"""One call of the Triton decode kernel: its sizes, inputs made ready, and launches that forward and backward share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lattn_compile.formats import Nvfp4, TiledFormat
from lattn_compile.formats.checkpoints import Checkpoints
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.common.inputs import decays, pair_up
from lattn_compile.kernels.common.launch import aligned, launched
from lattn_compile.kernels.common.layout import Layout, layout
from lattn_compile.kernels.decode_checkpoints import encode, fetch
from lattn_compile.kernels.decode_forward import advance

__all__ = [
    "ALL",
    "ROWS",
    "Call",
    "Kept",
    "Ready",
    "States",
    "checkpoints_of",
    "layout_of",
    "of_sequences",
    "strides",
    "tile_constants",
    "tile_of",
]

ALL = 2**31 - 1
"""More tokens than any sequence has."""

ROWS = 8
"""Rows of a program that reads whole vectors of channels."""

SAVE_EVERY = 4
"""Tokens between two states that the backward of exact mode keeps. What lies between costs no sums to write again, and
the memory that states of every token pass through is what that backward is bound by."""

_FETCH = 1024


def tile_of(key_dim: int, value_dim: int, quantize: Quantizer | None) -> tuple[int, int]:
    """The tile in powers of two, `(block_k, block_v)`; whole axes are padded to one. (1, 1) where there are none."""
    if quantize is None or not isinstance(quantize.fmt, TiledFormat):
        return (1, 1)
    blocks = (quantize.fmt.block_k, quantize.fmt.block_v)
    sizes = zip(blocks, (key_dim, value_dim), strict=True)
    block_k, block_v = (triton.next_power_of_2(n if b is None else min(b, n)) for b, n in sizes)
    return block_k, block_v


def layout_of(key_dim: int, value_dim: int, quantize: Quantizer | None) -> Layout:
    """How a head's state is spread over programs."""
    if quantize is None or quantize.fmt.is_plain:
        return layout(key_dim, value_dim)
    if isinstance(quantize.fmt, Nvfp4):
        return layout(key_dim, value_dim, least_run=16, width=64)
    block_k, block_v = tile_of(key_dim, value_dim, quantize)
    return layout(key_dim, value_dim, width=block_v, step=block_k)


def tile_constants(lay: Layout, quantize: Quantizer | None) -> tuple[int, int]:
    """`BLOCK_K, BLOCK_V` as the kernels take them: a tile that is a whole axis covers what the layout covers of it."""
    block_k, block_v = tile_of(lay.key_dim, lay.value_dim, quantize)
    if block_k >= lay.key_dim:
        block_k = max(block_k, lay.lanes * lay.pieces * lay.step)
    if block_v >= lay.value_dim:
        block_v = max(block_v, lay.width)
    return block_k, block_v


def _lined_up(x: Any) -> Any:
    """Vectors of channels without gaps; other strides are the kernels' own business."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Ready(NamedTuple):
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
class States:
    """Many states of every sequence, `[.., HV, K, V]`: sequence i's from row `starts[i] // every + i * stride` on, one
    for every `interval`-th token from token `origin` on; or rows of bytes, of a plain format's numbers, that `encoded`
    knows how to read.
    """

    states: Tensor | None
    every: int
    stride: int
    interval: int
    origin: int = 0
    encoded: Checkpoints | None = None

    def slot(self, token: int) -> int:
        """Which of a sequence's states lies before `token`."""
        return (token - self.origin) // self.interval


def of_sequences(state: Tensor) -> States:
    """One state a sequence, `[N, HV, K, V]`, contiguous and 16-byte aligned, so that its layout is that of any call."""
    state = state.contiguous()
    return States(state if aligned(state) else state.clone(), ALL, 1, ALL)


def checkpoints_of(kept: Tensor | Checkpoints, every: int) -> States:
    """As `lattn::decode` lays them out."""
    if isinstance(kept, Checkpoints) and kept.fmt is not None:
        codes = kept.buffer.view(kept.fields["codes"].dtype) if kept.fmt.is_plain else kept.buffer
        return States(codes, every, 1, every, encoded=kept)
    return States(kept.buffer if isinstance(kept, Checkpoints) else kept, every, 1, every)


class Call:
    """What the kernels of one call share: its sizes, its inputs made ready, and compile-time options.

    Attributes:
        bytes: how `advance` keeps states for `retreat`: 1, codes and one step a program; 2, codes and `steps` groups of
            steps; 0, as they are, in the type `stored`.
        save_every: of how many tokens' states one is kept.
    """

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
        self.quantize = quantize
        lay = self.layout = layout_of(key_dim, value_dim, quantize)
        block_k, block_v = tile_constants(lay, quantize)
        whole_keys = block_k >= key_dim
        rounds = quantize is not None and quantize.fmt.name != "fp32"
        name = quantize.fmt.name if quantize is not None and rounds else ""
        self.decay = 0 if g is None else g.dim() - 1
        self.write: dict[str, Any] = {"FORMAT": name, "BLOCK_K": block_k, "BLOCK_V": block_v}
        self.step = {
            "DELTA": rule == "delta",
            "DECAY": self.decay,
            "BETA": beta is not None,
            "AFTER": readout == "after_write" and bool(name),
        }
        self.bytes, self.steps = self._kept_as(name, whole_keys)
        self.save_every = SAVE_EVERY if not name else 1
        plain = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
        self.stored = torch.int32 if self.bytes else plain

    def _kept_as(self, name: str, whole_keys: bool) -> tuple[int, int]:
        """`bytes` and `steps`."""
        lay = self.layout
        if name in ("int8", "fp8_e4m3", "nvfp4"):
            if name != "nvfp4" and whole_keys and self.write["BLOCK_V"] >= lay.width:
                return 1, 1
            rows = 16 if name == "nvfp4" else self.write["BLOCK_K"]
            steps = lay.pieces // min(rows // lay.step, lay.pieces)
            if 4 * steps <= lay.pieces * lay.step:  # no more bytes for steps than for codes
                return 2, steps
        return 0, 1

    @property
    def words(self) -> int:
        """Elements of `stored` that one place of all pieces is kept in."""
        if not self.bytes:
            return self.layout.pieces
        return -(-self.layout.pieces // (8 if self.write["FORMAT"] == "nvfp4" else 4))

    def parts(self, stretch: int, whole: int) -> int:
        """Into how many parts a stretch of tokens is cut, each with a state before it that is kept as it is, so that
        what is kept of one part takes little beside the call's tensors. `whole` tokens are not cut.

        Stretches of exact mode are four times as long as those of bytes, of 16-bit formats twice (`row_interval`).
        """
        lay = self.layout
        if self.bytes:
            size = (0.5 if self.write["FORMAT"] == "nvfp4" else 1) + 4 * self.steps / (lay.pieces * lay.step)
            most = 1 if self.bytes == 1 or size <= 1 else 2
        else:
            most = 4 if self.save_every == 1 else 8
        return max(1, min(most, -(-stretch // whole)))

    def ready(self, first: int | None = None, room: int = 0, into: Ready | None = None) -> Ready:
        """Norms and decays of all tokens, or of tokens [first, first + room) of every sequence, over `into`."""
        rows = self.tokens if first is None else self.sequences * room
        if into is None:
            pairs = self.q.new_empty(rows, *self.q.shape[1:], dtype=torch.int64)
            g = self.g
            if self.decay == 2 and g is not None:
                g = g.new_empty(rows, *g.shape[1:], dtype=torch.float32)
            into = Ready(pairs, self.q.new_empty(rows, self.key_heads, dtype=torch.float32), g, first, room)
        else:
            into = into._replace(first=first)
        where = (0, ALL, 0) if first is None else (first, room, 1)
        key_dim = self.layout.key_dim
        shape = {"K": key_dim, "BK": triton.next_power_of_2(key_dim), "ROWS": ROWS, "enable_fp_fusion": False}
        launched(pair_up)[(triton.cdiv(rows * self.key_heads, ROWS),)](
            self.q, self.k, into.pairs, into.dots, self.starts, self.lengths, rows, self.key_heads, self.scale,
            *self.q.stride(), *self.k.stride(), *where, NORM=self.norm, **shape,
        )  # fmt: skip
        if self.decay == 2 and self.g is not None:
            launched(decays)[(triton.cdiv(rows * self.value_heads, ROWS),)](
                self.g, into.g, self.starts, self.lengths, rows, self.value_heads, *self.g.stride(), *where, **shape
            )
        return into

    def advance(
        self,
        ready: Ready,
        source: States,
        *,
        o: Tensor | None = None,
        final: Tensor | None = None,
        marks: States | None = None,
        first: int = 0,
        span: int = ALL,
        save: Kept | None = None,
        errors: Tensor | None = None,
        known: Tensor | None = None,
    ) -> None:
        """Launches `advance` for tokens [first, first + span) of every sequence.

        Args:
            save: where states are kept for `retreat`. errors: where the tokens' errors are. known: `errors` of before.
        """
        lay, v = self.layout, self.v if known is None else known
        saved, scales, room = (None, None, 0) if save is None else (save.saved, save.scales, save.room)
        to = States(None, ALL, 1, 1) if marks is None else marks
        rows = _Rows.of(to, self.value_heads * lay.key_dim * lay.value_dim, lay.key_dim * lay.value_dim)
        launched(advance)[(lay.blocks * self.value_heads * self.sequences,)](
            ready.pairs, ready.dots, v, ready.g, self.beta, source.states, self.starts, self.lengths, o, final,
            to.states, rows.scales, saved, scales, errors, *v.stride(), *strides(self.g), *strides(self.beta),
            *strides(o), self.key_heads, self.value_heads, self.tokens, first, span, source.every, source.stride,
            source.slot(first), to.interval, to.every, to.stride, to.slot(first), rows.row, rows.scales_at,
            rows.blocks_at, room, ready.room, ready.at(first),
            **lay.constants(), **self.step, **self.write, LOCAL=ready.first is not None, READ=o is not None,
            FINAL=final is not None, MARK=0 if marks is None else 1 if rows.scales is None else 2,
            SAVE=save is not None, ERRORS=errors is not None, KNOWN=known is not None, BYTES=self.bytes,
            STEPS=self.steps, SAVE_EVERY=self.save_every, **rows.heads(),
            num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip

    def encode(self, states: Tensor, marks: States, first: int, count: int) -> None:
        """Writes `count` checkpoints a sequence, from token `first` on, out of fp32 states `[N * count, HV, K, V]`."""
        assert marks.states is not None
        lay, rows, codes = self.layout, _Rows.of(marks, 0, 0), marks.states
        assert rows.scales is not None
        launched(encode)[(states.shape[0], self.value_heads * triton.cdiv(lay.value_dim, 64))](
            states, codes, rows.scales[:, rows.scales_at :], codes[:, rows.blocks_at :], self.starts, self.lengths,
            self.value_heads, codes.stride(0), rows.scales.stride(0), codes.stride(0), marks.interval,
            marks.slot(first), count, K=lay.key_dim, V=lay.value_dim,
            BK=max(16, triton.next_power_of_2(lay.key_dim)), num_warps=4,
        )  # fmt: skip

    def fetch(self, marks: States, first: int, into: Tensor) -> States:
        """The encoded states before token `first` of every sequence, decoded `into` `[N, HV, K, V]`, fp32."""
        assert marks.encoded is not None and marks.states is not None and self.quantize is not None
        lay, fmt, rows, codes = self.layout, self.quantize.fmt, _Rows.of(marks, 0, 0), marks.states
        blocks = codes[:, rows.blocks_at :] if rows.blocks_at else codes
        scales = None if rows.scales is None else rows.scales[:, rows.scales_at :]
        size = self.value_heads * lay.key_dim * lay.value_dim
        launched(fetch)[(self.sequences, triton.cdiv(size, _FETCH))](
            codes, scales, blocks, into, self.starts, self.lengths, self.value_heads, codes.stride(0),
            0 if scales is None else scales.stride(0), blocks.stride(0), marks.interval, marks.slot(first),
            K=lay.key_dim, V=lay.value_dim, FORMAT=fmt.name, TILE_K=self.write["BLOCK_K"],
            TILE_V=self.write["BLOCK_V"], SIZE=_FETCH, num_warps=4,
        )  # fmt: skip
        return of_sequences(into)


class _Rows(NamedTuple):
    """How `advance` writes rows of checkpoints: elements of a row, where a row has its scales, elements of one head."""

    row: int
    scales: Tensor | None
    scales_at: int
    blocks_at: int
    codes: int
    scales_head: int
    blocks_head: int

    @staticmethod
    def of(states: States, row: int, head: int) -> _Rows:
        """Of encoded states, or of states of `row` values, `head` each."""
        if states.encoded is None:
            return _Rows(row, None, 0, 0, head, 0, 0)
        fields, buffer = dict(states.encoded.fields), states.encoded.buffer
        codes = fields.pop("codes")
        assert codes.offset == 0
        block = fields.pop("block_scale", None)
        heads = codes.shape[0]
        row, scales_at, scales_head = buffer.shape[1], 0, 0
        if not fields:  # a plain format: rows of its own type
            return _Rows(row // codes.dtype.itemsize, None, 0, 0, codes.nbytes // codes.dtype.itemsize // heads, 0, 0)
        (scale,) = fields.values()
        scales_at, scales_head = scale.offset // 4, scale.nbytes // 4 // heads
        blocks = (0, 0) if block is None else (block.offset, block.nbytes // heads)
        return _Rows(
            row, buffer.view(torch.float32), scales_at, blocks[0], codes.nbytes // heads, scales_head, blocks[1]
        )

    def heads(self) -> dict[str, int]:
        return {"MARK_CODES": self.codes, "MARK_SCALES": self.scales_head, "MARK_BLOCKS": self.blocks_head}


class Kept:
    """What the kernels of one stretch of the backward leave for the next: rows of all its tokens, `stretch` a sequence,
    and of those of one part, `room`."""

    def __init__(self, call: Call, stretch: int, room: int) -> None:
        lay, self.room = call.layout, room
        rows, heads, like = call.sequences * room, call.value_heads, call.q
        self.saved = like.new_empty(
            call.sequences * (room // call.save_every), heads, lay.groups, call.words * lay.stride, dtype=call.stored
        )
        sizes = {1: (rows, heads, lay.blocks), 2: (rows, heads, lay.groups, call.steps * lay.lanes * lay.columns)}
        self.scales = like.new_empty(sizes.get(call.bytes, (1,)), dtype=torch.float32)
        self.errors = like.new_empty(call.sequences * stretch, heads, lay.value_dim, dtype=torch.float32)
        # `retreat` has no tiles, so it needs no warps that wait for each other.
        self.own = layout(lay.key_dim, lay.value_dim, least_run=lay.pieces * lay.step, step=lay.step)
        vectors = lay.pieces * (3 if call.decay == 2 else 2)
        size = triton.cdiv(vectors, lay.columns) * lay.stride
        self.by_channel = like.new_empty(rows, heads, self.own.groups, size, dtype=torch.float32)
        self.by_head = like.new_empty(rows, heads, self.own.groups, 4, dtype=torch.float32)


def strides(x: Tensor | None) -> tuple[int, int]:
    """Of tokens and heads."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))
