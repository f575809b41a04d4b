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
from lattn_compile.kernels.chunk_sizes import shared_memory
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.prefill_heads import pairs_of_heads
from lattn_compile.kernels.prefill_operands import state_operands
from lattn_compile.kernels.prefill_pairs import pairs_of_channels, rows
from lattn_compile.kernels.prefill_solve import solve
from lattn_compile.kernels.prefill_walk import walk
from lattn_compile.modes import BlockDoubling, Neumann, NewtonSchulz, Prefill

__all__ = ["ROWS", "Call", "Kept", "Operand", "Span", "launch", "of", "strides"]

LOW = (torch.bfloat16,)
"""Inputs beside which exact pairs, weights and gradients keep 16 bits, not 24, where all sites round their operands.
Not beside an exact site: for one repeated key the state is a small sum of large numbers, and 16 bits put it off by
2e-4."""

PART = torch.bfloat16
"""Of an exact operand."""

CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "nvfp4": torch.float16}
"""Of a rounded operand in memory."""

BUDGET = 3 << 30
"""Bytes between kernels that nobody misses; three times those of the inputs are allowed, too. More chunks are
computed in spans, all but the last twice for a backward, and a span that has no chunk is launched as well, since nobody
knows here how long a sequence is."""

LEAST_SPAN = 8
"""Chunks of a sequence."""

CUT = Cut(MAX_BLOCK, MAX_BLOCK, MAX_BLOCK, 1)
"""64 tokens, however few there are: where a chunk begins is part of the numbers, and a product of codes sums 32."""

LEAST = 128
"""Channels of a head, zeros behind K and V: with fewer, int8's kernels end in misaligned addresses on Hopper (Triton
3.6), whose cause was not found."""

ROWS = 32
"""Of a product in a program of four warps: 64 would be one of Hopper's asynchronous ones, see `chunk.py`."""

PAIR_CHANNELS = 64
"""At a time, of pairs of the same 16 tokens under a decay by channel."""

COLUMNS = 16
"""Of v in a program of `walk`: two of them share a multiprocessor, and one computes while the other waits."""

SLACK = 1 << 13
"""Bytes of shared memory that `walk` wants besides its operands."""

LAUNCH: dict[str, dict[str, int]] = {
    "pairs_of_heads": {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    "rows": {"num_warps": 4, "num_stages": 1},
    "pairs_of_channels": {"num_warps": 1, "num_stages": 1},
    "solve": {"num_warps": 2, "num_stages": 1},
    "state_operands": {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    "state_operands of channels": {"num_warps": 4, "num_stages": 1},
    "walk": {"num_warps": 2, "num_stages": 3},
    "walk of a backward": {"num_warps": 2, "num_stages": 2},
    "walk_back": {"num_warps": 4, "num_stages": 2},
    "grad_reads": {"num_warps": 2, "num_stages": 1, "maxnreg": 168},
    "grad_system": {"num_warps": 2, "num_stages": 1},
    "grad_keys": {"num_warps": 2, "num_stages": 1},
    "grad_channels": {"num_warps": 1, "num_stages": 1},
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


class Pairs(NamedTuple):
    """What tokens of a chunk see of each other.

    Attributes:
        norms, strengths: of `prefill_pairs.rows`. factors: of `prefill_heads.py`, as is what it rounds: rounded, by
            site, and "q".
        overlaps: A without beta, and reads, fp32 `[NB, HV, BT, BT]`, or None.
        query, seen: of `prefill_heads.py` or `prefill_pairs.py`. whole: of `prefill_operands.py`. from_start, to_end,
            ends, scales (late, read, key): of `prefill_pairs.py`, or None.
    """

    norms: Tensor
    strengths: Tensor
    factors: Tensor | None
    rounded: dict[str, Operand | None]
    overlaps: Tensor | None
    reads: Tensor | None
    query: Operand
    seen: Operand
    whole: Tensor
    from_start: Tensor | None
    to_end: Tensor | None
    ends: Tensor | None
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Span:
    """Some chunks of every sequence, and what their kernels make of them before a state is seen.

    Attributes:
        inverses: T, fp32 `[NB, HV, BT, BT]`. left: T as the left operand of w and of u.
        residuals: fp32 `[NB, HV]` or None.
        erase, out, whole, updates: of `prefill_operands.py`.
    """

    schedule: Schedule
    skip: int
    pairs: Pairs
    inverses: Tensor | None
    left: dict[str, Operand]
    residuals: Tensor | None
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
        short = all(x.dtype in LOW for x in (q, k, v))
        self.q, self.k, self.v = (x if short else x.float() for x in (q, k, v))
        self.g, self.beta = g, beta
        self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
        self.offsets = torch.zeros_like(self.starts)
        self.decay = 0 if g is None else g.dim() - 1
        self.delta, self.norm = rule == "delta", qk_l2norm
        self.formats = {site: prefill.formats.get(site, "") for site in ("kk", "qk", "w", "u", "ws", "qs", "av", "kv")}
        used = self.formats if self.delta else {site: self.formats[site] for site in ("qk", "qs", "av", "kv")}
        self.low = short and all(used.values())
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
        least = max(BUDGET, 3 * given) // (self._bytes() * self.value_heads)
        self.span = self.bound if least >= self.bound else max(LEAST_SPAN, least // max(self.sequences, 1))
        self.skips = list(range(0, longest, self.span))

    def _bytes(self) -> int:
        """Of one chunk and head between the kernels."""
        size, keys, width = self.size, self.keys, self.width
        square, long, wide = size * size, size * keys, size * width
        each = 2 if all(self.formats.values()) else 6
        needs = (8 + 2 * each) * square + 2 * each * long + 4 * wide + (4 * square + 8 * long if self.decay == 2 else 0)
        if not self.wide:
            return needs + each * (square + long)
        channels = 4 * long if self.decay == 2 else 0
        return needs + (12 + each) * square + (12 + each) * long + 8 * wide + 8 * keys * width + channels

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype)

    def operand(self, site: str, blocks: int, rows: int, length: int, *, parts: int = 0, heads: int = 0) -> Operand:
        """Memory of a site's operand.

        Args:
            parts: of an exact one, where it is not what inputs ask for. heads: if not HV.
        """
        name, heads = self.formats[site], heads or self.value_heads
        parts = 1 if name else parts or 3
        dtype = PART if self.wide else CODES.get(name, PART)
        x = self.new(blocks, heads, parts, rows, length, dtype=dtype)
        return Operand(x, self.new(blocks, heads, rows))

    def prepare(self, skip: int) -> Span:
        """What a span's chunks need besides the state."""
        placed = schedule(self.lengths, self.offsets, CUT, self.bound, skip, self.span)
        blocks, heads, size, f = placed.blocks, self.value_heads, self.size, self.formats
        programs = blocks * heads
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        square = (blocks, heads, size, size)
        k, v = self.k.stride(), self.v.stride()
        pairs = self._pairs_of_channels(placed, skip) if self.decay == 2 else self._pairs_of_heads(placed, skip)
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
                placed.owner, pairs.strengths, pairs.overlaps, inverses, residuals, left["w"].x, left["w"].scale,
                *other, heads, BT=size, METHOD=self.method[0], COUNT=self.method[1], W=f["w"], U=f["u"],
                **launch("solve"),
            )  # fmt: skip
            erase = self.operand("ws", blocks, size, self.keys)
        out, whole = self.operand("kv", blocks, self.keys, size), pairs.whole
        updates = self.new(blocks, heads, self.width, size)
        launched(state_operands)[(programs,)](
            self.k, self.v, *where, pairs.norms, pairs.strengths, pairs.factors, pairs.from_start, pairs.to_end,
            pairs.ends, *of(left.get("w")), *of(left.get("u")), *of(erase), *of(out), whole, updates, skip, *k, *v,
            self.key_heads, heads, BV=self.slice, ROWS=ROWS, DECAY=self.decay, DELTA=self.delta, LOW=self.low, W=f["w"],
            U=f["u"], WS=f["ws"], KV=f["kv"], **(self.key | self.value),
            **launch("state_operands" if self.decay < 2 else "state_operands of channels"),
        )  # fmt: skip
        return Span(placed, skip, pairs, inverses, left, residuals, erase, out, whole, updates)

    def _pairs_of_heads(self, placed: Schedule, skip: int) -> Pairs:
        blocks, heads, size, f = placed.blocks, self.key_heads, self.size, self.formats
        rounded: dict[str, Operand | None] = {"q": None, "kk": None, "qk": None}
        if f["kk"] and self.delta:
            rounded["kk"] = self.operand("kk", blocks, size, self.keys, heads=heads)
        if f["qk"]:
            rounded["q"] = self.operand("qk", blocks, size, self.keys, heads=heads)
            same = rounded["kk"] is not None and f["kk"] == f["qk"]
            rounded["qk"] = rounded["kk"] if same else self.operand("qk", blocks, size, self.keys, heads=heads)
        pairs = self._pairs(placed, rounded, self.new(blocks, self.value_heads, 4, size), reads=self.wide)
        launched(pairs_of_heads)[(blocks * heads,)](
            self.q, self.k, self.g, self.beta, self.starts, self.lengths, self.offsets, placed.owner, placed.index,
            pairs.norms, pairs.strengths, pairs.factors, *of(rounded["q"]), *of(rounded["kk"]), *of(rounded["qk"]),
            pairs.overlaps, pairs.reads, *of(pairs.query), *of(pairs.seen), skip, *self.q.stride(), *self.k.stride(),
            *strides(self.g, 2), *strides(self.beta, 2), heads, self.value_heads, ROWS=ROWS, DECAY=self.decay,
            DELTA=self.delta, BETA=self.beta is not None, NORM=self.norm, LOW=self.low, KK=f["kk"], QK=f["qk"],
            QS=f["qs"], AV=f["av"], QP=pairs.query.x.shape[2], **self.key, **launch("pairs_of_heads"),
        )  # fmt: skip
        return pairs

    def _pairs_of_channels(self, placed: Schedule, skip: int) -> Pairs:
        blocks, heads, f = placed.blocks, self.value_heads, self.formats
        where = (self.starts, self.lengths, self.offsets, placed.owner, placed.index)
        q, k, g = self.q.stride(), self.k.stride(), strides(self.g, 3)
        pairs = self._pairs(placed, {"q": None, "kk": None, "qk": None}, None, reads=True)
        launched(rows)[(blocks * self.key_heads,)](
            self.q, self.k, self.beta, *where, pairs.norms, pairs.strengths, skip, *q, *k, *strides(self.beta, 2),
            self.key_heads, heads, BETA=self.beta is not None, NORM=self.norm, **self.key, **launch("rows"),
        )  # fmt: skip
        launched(pairs_of_channels)[(blocks * heads,)](
            self.q, self.k, self.g, *where, pairs.norms, pairs.overlaps, pairs.reads, pairs.from_start, pairs.to_end,
            pairs.ends, pairs.whole, *of(pairs.query), *of(pairs.seen), *pairs.scales, skip, *q, *k, *g,
            self.key_heads, heads, BS=PAIR_CHANNELS, DELTA=self.delta, LOW=self.low, KK=f["kk"], QK=f["qk"],
            QS=f["qs"], AV=f["av"], **self.key, **launch("pairs_of_channels"),
        )  # fmt: skip
        return pairs

    def _pairs(
        self, placed: Schedule, rounded: dict[str, Operand | None], factors: Tensor | None, *, reads: bool
    ) -> Pairs:
        """Memory for what tokens of a chunk see of each other."""
        blocks, heads, size = placed.blocks, self.value_heads, self.size
        square = (blocks, heads, size, size)
        # bf16 queries are exact in one part where a decay stays outside of them.
        parts = 1 if self.decay < 2 and self.q.dtype is torch.bfloat16 else 0
        query, tiles = self.operand("qs", blocks, size, self.keys, parts=parts), size // 16
        scales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if self.decay == 2 and self.wide:
            read = self.new(blocks, heads, tiles, size)
            key = read if self.formats["kk"] == self.formats["qk"] else self.new(blocks, heads, tiles, size)
            scales = self.new(blocks, heads, 2, size), read, key
        start, end, ends = (
            self.new(blocks, heads, n, self.keys) if self.decay == 2 else None for n in (size, size, 2 * tiles)
        )
        return Pairs(
            self.new(blocks, self.key_heads, 2, size), self.new(blocks, heads, size), factors, rounded,
            self.new(*square) if self.delta else None, self.new(*square) if reads else None, query,
            self.operand("av", blocks, size, size), self.new(blocks, heads, self.keys), start, end, ends,
            scales,
        )  # fmt: skip

    def advance(
        self, span: Span, source: Tensor, final: Tensor, *, o: Tensor | None = None, kept: Kept | None = None
    ) -> None:
        """Takes the states `source` through a span to `final`, maybe itself; writes its rows of `o`, and `kept`."""
        placed, heads, f = span.schedule, self.value_heads, self.formats
        query, seen = (span.pairs.query, span.pairs.seen) if o is not None else (None, None)
        options = dict(launch("walk" if kept is None else "walk of a backward"))
        warps = options["num_warps"]
        # Of what does not fit into shared memory as often, fewer chunks are under way at once.
        chunk = sum(x.x[0, 0].nbytes for x in (span.erase, span.out, query, seen) if x is not None)
        room = (shared_memory(self.q.device) - SLACK) // (chunk + 16 * warps * self.size * 4)
        options["num_stages"] = min(options["num_stages"], 1 + room)
        launched(walk)[(self.width // (16 * warps) * heads * self.sequences,)](
            *of(span.erase), *of(span.out), span.whole, span.updates, source, self.starts, self.lengths, placed.first,
            placed.count, final, *of(query), *of(seen), o, *((None,) * 3 if kept is None else kept), self.scale,
            span.skip, *strides(o, 3), heads, W=min(64, self.keys), G=warps, DELTA=self.delta, LOW=self.low,
            KEEP=kept is not None, WS=f["ws"], QS=f["qs"], KV=f["kv"], AV=f["av"], QP=span.pairs.query.x.shape[2],
            STAGES=options["num_stages"], **(self.key | self.value), **options,
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
