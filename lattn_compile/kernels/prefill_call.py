"""A prefill's call on the device: its sizes, the memory between its kernels, and their launches, span by span.

Spans and schedules are those of `chunk_call.py`: a span is as many chunks of every sequence as `BUDGET` bytes between
the kernels hold, and nothing waits for lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor

from lattn_compile.kernels.chunk_blocks import MAX_BLOCK, Cut, Schedule, schedule
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.prefill_operands import erase_operands, out_operands, value_operands
from lattn_compile.kernels.prefill_pairs import overlaps_of_heads, pairs_of_channels, rows
from lattn_compile.kernels.prefill_solve import solve
from lattn_compile.kernels.prefill_walk import outputs, walk
from lattn_compile.modes import BlockDoubling, Neumann, NewtonSchulz, Prefill

__all__ = ["ROWS", "Call", "Kept", "Operand", "Span", "launch", "of", "strides"]

LOW = (torch.bfloat16,)
"""Inputs beside which the exact operands of a product keep 16 bits, not 24 (`chunk_call.py`)."""

PART = torch.bfloat16
"""Of an exact operand."""

CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "nvfp4": torch.float16}
"""Of a rounded operand in memory."""

BUDGET = 1 << 31
"""Bytes between kernels that nobody misses; twice those of the inputs are allowed, too. More chunks are computed
in spans, and all spans but the last twice for a backward."""

LEAST_SPAN = 8
"""Chunks of a sequence."""

CUT = Cut(MAX_BLOCK, MAX_BLOCK, MAX_BLOCK, 1)
"""64 tokens, however few there are: where a chunk begins is part of the numbers, and a product of codes sums 32."""

LEAST = 128
"""Channels of a head, zeros behind K and V: with fewer, int8's kernels end in misaligned addresses on Hopper (Triton
3.6), whose cause was not found."""

ROWS = 32
"""Of a product in a program of four warps: 64 would be one of Hopper's asynchronous ones, see `chunk.py`."""

COLUMNS = 16
"""Of v in a program of `walk`: two of them share a multiprocessor, and one computes while the other waits."""

LAUNCH: dict[str, dict[str, int]] = {
    "rows": {"num_warps": 4, "num_stages": 1, "maxnreg": 96},
    "overlaps_of_heads": {"num_warps": 4, "num_stages": 1},
    "pairs_of_channels": {"num_warps": 2, "num_stages": 1},
    "solve": {"num_warps": 2, "num_stages": 1},
    "out_operands": {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    "out_operands of channels": {"num_warps": 8, "num_stages": 1},
    "erase_operands": {"num_warps": 4, "num_stages": 1, "maxnreg": 96},
    "erase_operands of channels": {"num_warps": 8, "num_stages": 1},
    "value_operands": {"num_warps": 4, "num_stages": 1},
    "walk": {"num_warps": 2, "num_stages": 3},
    "walk of a backward": {"num_warps": 2, "num_stages": 2},
    "outputs": {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    "read_operands": {"num_warps": 4, "num_stages": 1},
    "walk_back": {"num_warps": 4, "num_stages": 2},
    "grad_reads": {"num_warps": 2, "num_stages": 1, "maxnreg": 168},
    "grad_system": {"num_warps": 2, "num_stages": 1},
    "grad_keys": {"num_warps": 2, "num_stages": 1},
    "grad_channels": {"num_warps": 2, "num_stages": 1},
    "grad_gates": {"num_warps": 1, "num_stages": 1},
    "deliver": {"num_warps": 4, "num_stages": 1},
}
"""Of each kernel. `walk` loads a chunk's operands while it computes with those before. maxnreg: registers of a thread,
where more threads on a multiprocessor gained more than spills cost."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One in memory. x: `[NB, HV, parts, rows, sum]`. scale: fp32 `[NB, HV, rows]`."""

    x: Tensor
    scale: Tensor


class Kept(NamedTuple):
    """What a backward wants of `walk`: S before each chunk, its factors, and V'."""

    states: Tensor
    scales: Tensor
    news: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Some chunks of every sequence, and what their kernels make of them before a state is seen.

    Attributes:
        norms, strengths, factors: of `rows`; rows: what it rounds, by site, and "q".
        overlaps, inverses: A without beta, and T, fp32 `[NB, HV, BT, BT]`. left: T as the left operand of w and of u.
        residuals: fp32 `[NB, HV]` or None. reads: of a decay by channel.
        erase, out, whole, updates: of `prefill_operands.py`.
    """

    schedule: Schedule
    skip: int
    norms: Tensor
    strengths: Tensor
    factors: Tensor | None
    rows: dict[str, Operand | None]
    overlaps: Tensor | None
    inverses: Tensor | None
    left: dict[str, Operand]
    residuals: Tensor | None
    reads: Tensor | None
    erase: Operand | None
    out: Operand
    whole: Tensor
    updates: Tensor


class Call:
    """One call: inputs as `kernels.reference.chunk` takes them, and the kernels' compile-time options.

    wide: codes in memory are bf16, for products with what is none.
    """

    wide: ClassVar[bool] = False

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
        prefill: Prefill,
    ) -> None:
        tokens, self.key_heads, key_dim = q.shape
        self.value_heads, value_dim = v.shape[1:]
        self.sequences, self.scale = starts.shape[0], float(scale)
        self.low = all(x.dtype in LOW for x in (q, k, v))
        self.q, self.k, self.v = (x if self.low else x.float() for x in (q, k, v))
        self.g, self.beta = g, beta
        self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
        self.offsets = torch.zeros_like(self.starts)
        self.decay = 0 if g is None else g.dim() - 1
        self.delta, self.norm = rule == "delta", qk_l2norm
        self.formats = {site: prefill.formats.get(site, "") for site in ("kk", "qk", "w", "u", "ws", "qs", "av", "kv")}
        self.method = _method(prefill)
        self.size = CUT.size
        self.keys = max(LEAST, triton.next_power_of_2(key_dim))
        self.width = max(LEAST, triton.next_power_of_2(value_dim))
        self.columns = min(COLUMNS, self.width)
        self.slice = min(128, self.width)
        self.key = {"K": key_dim, "BK": self.keys, "BT": self.size}
        self.value = {"V": value_dim, "VP": self.width, "BT": self.size}
        self.bound = CUT.bound(tokens, self.sequences, on_line=True)
        longest = CUT.bound(tokens, 1, on_line=True)
        given = sum(x.nbytes for x in (self.q, self.k, self.v, self.v, g, beta) if x is not None)
        least = max(BUDGET, 2 * given) // (self._bytes() * self.value_heads)
        self.span = self.bound if least >= self.bound else max(LEAST_SPAN, least // max(self.sequences, 1))
        self.skips = list(range(0, longest, self.span))

    def _bytes(self) -> int:
        """Of one chunk and head between the kernels."""
        size, keys, width = self.size, self.keys, self.width
        square, long, wide, state = size * size, size * keys, size * width, keys * width
        each = 2 if all(self.formats.values()) else 4 if self.low else 6
        needs = (8 + 2 * each) * square + 2 * each * long + 4 * wide + (4 * square if self.decay == 2 else 0)
        if not self.wide:
            return needs + each * (state + wide)
        channels = 4 * long if self.decay == 2 else 0
        return needs + (12 + each) * square + (12 + each) * long + 8 * wide + 8 * state + channels

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype)

    def operand(
        self, site: str, blocks: int, rows: int, length: int, *, parts: int = 0, heads: int = 0, once: bool = False
    ) -> Operand:
        """Memory of a site's operand.

        Args:
            parts: of an exact one, where it is not what inputs ask for. heads: if not HV. once: it is read once, so
                that E4M3's numbers are no bytes that take longer to make fp16 of than two bytes to load.
        """
        name, heads = self.formats[site], heads or self.value_heads
        parts = (parts or (2 if self.low else 3)) if not name else 1
        dtype = PART if self.wide else CODES.get(name, PART)
        dtype = torch.float16 if once and name == "fp8_e4m3" else dtype
        x = self.new(blocks, heads, parts, rows, length, dtype=dtype)
        return Operand(x, self.new(blocks, heads, rows))

    def prepare(self, skip: int) -> Span:
        """What a span's chunks need besides the state."""
        placed = schedule(self.lengths, self.offsets, CUT, self.bound, skip, self.span)
        blocks, heads, size, f = placed.blocks, self.value_heads, self.size, self.formats
        programs = blocks * heads
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        square = (blocks, heads, size, size)
        q, k, g = self.q.stride(), self.k.stride(), strides(self.g, 3)
        norms, strengths, factors, rounded = self._rows(placed, skip)
        overlaps = self.new(*square) if self.delta else None
        reads = self.new(*square) if self.decay == 2 else None
        if self.decay == 2:
            launched(pairs_of_channels)[(programs * (size // 16),)](
                self.q, self.k, self.g, *where, norms, overlaps, reads, skip, *q, *k, *g, self.key_heads, heads, BS=32,
                DELTA=self.delta, LOW=self.low, KK=f["kk"], QK=f["qk"], **self.key, **launch("pairs_of_channels"),
            )  # fmt: skip
        elif self.delta:
            launched(overlaps_of_heads)[(blocks * self.key_heads * (size // ROWS),)](
                self.k, *where, norms, factors, *of(rounded["kk"]), overlaps, skip, *k, self.key_heads, heads,
                TILE=ROWS, LOW=self.low, KK=f["kk"], **self.key, **launch("overlaps_of_heads"),
            )  # fmt: skip
        inverses = residuals = erase = None
        left: dict[str, Operand] = {}
        if self.delta:
            inverses = self.new(*square)
            residuals = None if self.method[0] == "exact" else self.new(blocks, heads)
            left["w"] = left["u"] = self.operand("w", blocks, size, size, parts=3)
            if f["u"] != f["w"]:
                left["u"] = self.operand("u", blocks, size, size, parts=3)
            other = (left["u"].x, left["u"].scale) if f["u"] != f["w"] else (None, None)
            launched(solve)[(programs,)](
                placed.owner, strengths, overlaps, inverses, residuals, left["w"].x, left["w"].scale, *other, heads,
                BT=size, METHOD=self.method[0], COUNT=self.method[1], W=f["w"], U=f["u"], **launch("solve"),
            )  # fmt: skip
            erase = self.operand("ws", blocks, size, self.keys)
            launched(erase_operands)[(programs,)](
                self.k, self.g, *where, norms, strengths, factors, *of(left["w"]), *of(erase), skip, *k, *g,
                self.key_heads, heads, ROWS=ROWS, DECAY=self.decay, LOW=self.low, W=f["w"], WS=f["ws"], **self.key,
                **launch("erase_operands" if self.decay < 2 else "erase_operands of channels"),
            )  # fmt: skip
        out, whole = self.operand("kv", blocks, self.keys, size), self.new(blocks, heads, self.keys)
        launched(out_operands)[(programs,)](
            self.k, self.g, *where, norms, factors, *of(out), whole, skip, *k, *g, self.key_heads, heads,
            DECAY=self.decay, LOW=self.low, KV=f["kv"], **self.key,
            **launch("out_operands" if self.decay < 2 else "out_operands of channels"),
        )  # fmt: skip
        updates = self.new(blocks, heads, self.width, size)
        launched(value_operands)[(programs * (self.width // self.slice),)](
            self.v, *where, strengths, *of(left.get("u")), updates, skip, *self.v.stride(), heads, BV=self.slice,
            ROWS=ROWS, DELTA=self.delta, LOW=self.low, U=f["u"], **self.value, **launch("value_operands"),
        )  # fmt: skip
        return Span(
            placed, skip, norms, strengths, factors, rounded, overlaps, inverses, left, residuals, reads, erase, out,
            whole, updates,
        )  # fmt: skip

    def _rows(self, placed: Schedule, skip: int) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Operand | None]]:
        """What `rows` makes: norms, strengths, factors, and rounded rows of k for kk and qk, and of q."""
        blocks, heads, size, f = placed.blocks, self.key_heads, self.size, self.formats
        norms, strengths = self.new(blocks, heads, 2, size), self.new(blocks, self.value_heads, size)
        factors = self.new(blocks, self.value_heads, 4, size) if self.decay < 2 else None
        found: dict[str, Operand | None] = {"q": None, "kk": None, "qk": None}
        if self.decay < 2:
            if f["kk"] and self.delta:
                found["kk"] = self.operand("kk", blocks, size, self.keys, heads=heads)
            if f["qk"]:
                found["q"] = self.operand("qk", blocks, size, self.keys, heads=heads)
                same = found["kk"] is not None and f["kk"] == f["qk"]
                found["qk"] = found["kk"] if same else self.operand("qk", blocks, size, self.keys, heads=heads)
        read = None if found["qk"] is found["kk"] else found["qk"]
        launched(rows)[(blocks * heads,)](
            self.q, self.k, self.g, self.beta, self.starts, self.lengths, self.offsets, placed.owner, placed.index,
            norms, strengths, factors, *of(found["q"]), *of(found["kk"]), *of(read), skip, *self.q.stride(),
            *self.k.stride(), *strides(self.g, 2), *strides(self.beta, 2), heads, self.value_heads, DECAY=self.decay,
            BETA=self.beta is not None, NORM=self.norm, LOW=self.low, KK=f["kk"], QK=f["qk"], **self.key,
            **launch("rows"),
        )  # fmt: skip
        return norms, strengths, factors, found

    def advance(
        self, span: Span, source: Tensor, final: Tensor, *, o: Tensor | None = None, kept: Kept | None = None
    ) -> None:
        """Takes the states `source` through a span to `final`, maybe itself; writes its rows of `o`, and `kept`."""
        placed, heads, size, f = span.schedule, self.value_heads, self.size, self.formats
        states = values = None
        if o is not None:
            states = self.operand("qs", placed.blocks, self.width, self.keys, once=True)
            values = self.operand("av", placed.blocks, self.width, size, once=True)
        options = launch("walk" if kept is None else "walk of a backward")
        warps = options["num_warps"]
        launched(walk)[(self.width // (16 * warps) * heads * self.sequences,)](
            *of(span.erase), *of(span.out), span.whole, span.updates, source, placed.first, placed.count, final,
            *of(states), *of(values), *((None,) * 3 if kept is None else kept), heads, W=min(64, self.keys),
            G=warps, DELTA=self.delta, LOW=self.low, READ=o is not None, KEEP=kept is not None, WS=f["ws"], QS=f["qs"],
            KV=f["kv"], AV=f["av"], STAGES=options["num_stages"], **(self.key | self.value), **options,
        )  # fmt: skip
        if o is None:
            return
        launched(outputs)[(placed.blocks * heads * (size // ROWS) * (self.width // self.slice),)](
            self.q, self.k, self.g, self.starts, self.lengths, self.offsets, placed.owner, placed.index, span.norms,
            span.factors, *of(span.rows["q"]), *of(span.rows["qk"]), span.reads, *of(states), *of(values), o,
            self.scale, span.skip, *self.q.stride(), *self.k.stride(), *strides(self.g, 3), *o.stride(),
            self.key_heads, heads, BV=self.slice, ROWS=ROWS, DECAY=self.decay, LOW=self.low, QK=f["qk"], QS=f["qs"],
            AV=f["av"], **(self.key | self.value), **launch("outputs"),
        )  # fmt: skip


def launch(kernel: str) -> dict[str, int]:
    """Options of a kernel's launch; registers are NVIDIA's to count."""
    options = LAUNCH[kernel]
    return {n: x for n, x in options.items() if n != "maxnreg"} if torch.version.hip else options


def _method(prefill: Prefill) -> tuple[str, int]:
    """The inverse's name and its number."""
    inverse: Any = prefill.inverse
    if isinstance(inverse, Neumann):
        return "neumann", min(inverse.order, CUT.size - 1)
    if isinstance(inverse, NewtonSchulz):
        return "newton_schulz", inverse.iterations
    if isinstance(inverse, BlockDoubling):
        return "block_doubling", inverse.block
    return "exact", 0


def of(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.x, operand.scale)


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides: zeros for what is not there, or has fewer."""
    strides = () if x is None else x.stride()
    return (*strides, *(0,) * count)[:count]
