"""One run of windows: its sizes and compile-time constants, its workspace, and the launches of the replay kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lattn_compile.formats import Format, Nvfp4, TiledFormat
from lattn_compile.kernels.common.host import interpreted
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.reference.span import Tokens
from lattn_compile.kernels.replay_factors import encode
from lattn_compile.kernels.replay_gradients import contract, deliver, settle, tally
from lattn_compile.kernels.replay_launch import launch
from lattn_compile.kernels.replay_prepare import prepare, relate
from lattn_compile.kernels.replay_prepare import tiles as operand_tiles
from lattn_compile.kernels.replay_retreat import retreat
from lattn_compile.kernels.replay_walk import walk
from lattn_compile.kernels.replay_windows import Windows, windows

__all__ = ["GRADS", "Run", "States", "Stretch", "padded", "tiles"]

GRADS = ("dq", "dk", "dv", "dg", "dbeta")

PRECISION = "bf16x6"
"""Of fp32 operands: in three parts of 8 bits each, which is all of them. "ieee" is no product of the tensor cores, and
takes more registers than there are; "tf32x3" loses what semantics §8 wants of a repeated key."""

_LEAST = 16  # rows and columns of a product
_SHARE = 0.6
"""Bytes of a workspace beside those of the tokens that a call gets and returns."""
_SMALL = 1 << 26
"""A workspace of so many bytes is fine whatever a call gets."""
_PROGRAMS = 256


def padded(size: int) -> int:
    """Rows or columns of a product that holds `size` of them."""
    return max(_LEAST, triton.next_power_of_2(size))


def tiles(fmt: Format | None, key_dim: int, value_dim: int) -> dict[str, Any]:
    """What `walk` rounds to: its constants FORMAT, BLOCK_K and BLOCK_V; tiles in powers of two, whole axes padded."""
    if fmt is None or fmt.name == "fp32":
        return {"FORMAT": "", "BLOCK_K": 1, "BLOCK_V": 1}
    if isinstance(fmt, Nvfp4) or not isinstance(fmt, TiledFormat):
        return {"FORMAT": fmt.name, "BLOCK_K": 1, "BLOCK_V": 64 if isinstance(fmt, Nvfp4) else 1}
    block_k = padded(key_dim) if fmt.block_k is None or fmt.block_k >= key_dim else fmt.block_k
    block_v = padded(value_dim) if fmt.block_v is None or fmt.block_v >= value_dim else fmt.block_v
    return {"FORMAT": fmt.name, "BLOCK_K": block_k, "BLOCK_V": block_v}


def _part(*tensors: Tensor) -> str:
    """Of what type operands are (`common/products.py`)."""
    if not all(x.dtype is torch.bfloat16 for x in tensors):
        return "fp32"
    return "emulated" if interpreted() else "bf16"


class Written(NamedTuple):
    """Keys as they are written: codes `[M, H, K]` in the type of operands, times sizes, fp32 `[M, H]`."""

    codes: Tensor | None = None
    sizes: Tensor | None = None


class States(NamedTuple):
    """States `[.., HV, K, V]`, fp32, and read copies of them, where there are any."""

    states: Tensor | None
    copies: Tensor | None = None


class Run:
    """Some sequences' tokens in windows."""

    def __init__(
        self,
        tokens: Tokens,
        sequences: tuple[Tensor, Tensor, Tensor],
        window: int,
        *,
        rule: str,
        scale: float = 1.0,
        qk_l2norm: bool = False,
        fmt: Format | None = None,
        after: bool = False,
        paired: bool = False,
        cast: str = "",
        factors: str | None = None,
    ) -> None:
        """Finds out which windows there are.

        Args:
            tokens: as `kernels.reference.replay.forward` takes them. sequences: starts, lengths and leads, int64 `[N]`.
            fmt: of the state at the end of a window; paired: of its read copy. None rounds nothing.
            after: tokens read their updates, and a window's last one the state, as written. cast: paired: what states
            are cast to. factors: format of keys and updates as they are written.
        """
        self.tokens = tokens
        q, k, v, g, _ = tokens
        self.count, self.key_heads, self.key_dim = q.shape
        self.value_heads, self.value_dim = v.shape[1:]
        self.sequences, self.scale, self.norm = sequences[0].shape[0], float(scale), qk_l2norm
        self.decay = 0 if g is None else g.dim() - 1
        self.launch = launch()
        self.keys, self.size = padded(self.key_dim), padded(window)
        part = _part(q, k, v)
        self.parts = 1 if part == "fp32" else 3
        self.stored = torch.bfloat16 if part == "bf16" else torch.float32
        self.rows = self.decay != 2
        self.write = tiles(fmt, self.key_dim, self.value_dim) | {"PAIR": paired, "CAST": cast}
        self.paired, self.after = paired, after and bool(self.write["FORMAT"])
        self.factors = factors or ""
        most = padded(self.value_dim)
        self.walk_columns = max(_LEAST, self.write["BLOCK_V"], min(self.launch.walk_columns, most))
        if self.factors not in ("", "bf16"):
            self.walk_columns = most  # a token's update has one scale
        self.columns = min(most, self.launch.slab_columns)
        self.retreat_columns = min(most, self.launch.retreat_columns)
        width = max(self.walk_columns, self.columns, self.retreat_columns)
        self.width = triton.cdiv(self.value_dim, width) * width
        # Enough sequences side by side to give every multiprocessor two programs.
        programs = self.width // self.walk_columns * self.value_heads
        self.windows: Windows = windows(*sequences, window, self.count, together=-(-_PROGRAMS // programs))
        # More than two warps and 64 rows are wgmma, see `chunk.py`.
        self.slab_warps = self.launch.slab_warps if self.size < 64 else 2
        self.pair_warps = self.launch.pair_warps if self.size < 32 else 2
        self.stages = (self.launch.walk_stages, self.launch.retreat_stages) if self.size < 64 else (1, 1)
        # Channels at a time of what is as wide as K: what registers hold.
        self.slab = min(self.keys, 1024 * self.slab_warps // self.size)
        self.inside: dict[str, Any] = {
            "W": window,
            "BT": self.size,
            "DELTA": rule == "delta",
            "PART": part,
            "PRECISION": "ieee" if interpreted() else PRECISION,
            "ASSEMBLY": torch.version.hip is None,
        }
        self.rounding = {"FACTORS": self.factors, "APART": bool(self.factors) and not after}
        self.pairs = {**self.inside, "BK": self.keys}
        self.common = {**self.pairs, "V": self.value_dim, "VP": self.width, "K": self.key_dim, "NORM": self.norm}
        self.written = self._encoded()

    def _encoded(self) -> Written:
        k = self.tokens.k
        if not self.factors or not self.count:
            return Written()
        found = Written(
            k.new_empty(k.shape, dtype=torch.bfloat16 if self.parts > 1 else torch.float32),
            self.new(self.count, self.key_heads),
        )
        rows = max(1, 2048 // self.keys)
        launched(encode)[(triton.cdiv(self.count, rows) * self.key_heads,)](
            k, *found, self.count, *k.stride(), self.key_heads, K=self.key_dim, BK=self.keys, ROWS=rows,
            NORM=self.norm, FACTORS=self.factors, num_warps=4,
        )  # fmt: skip
        return found

    def tiles(self, *, backward: bool) -> int:
        """Operand tiles of a window."""
        return operand_tiles(self.parts, self.rows, backward)

    def slots(self, *, backward: bool) -> int:
        """Windows of a stretch: as many as the workspace may take."""
        size, keys, width, item = self.size, self.keys, self.width, self.stored.itemsize
        one = (self.tiles(backward=backward) * size * keys + self.parts * size * size) * item
        one += 4 * (2 * size * size + size * width + keys + 4 * size)
        if backward:
            states, errors = 2 + self.paired, 2 + self.paired + bool(self.factors)
            one += 4 * (states * width * keys + errors * size * width + 3 * size * keys + 2 * size * size + keys)
        given = sum(x.nbytes for x in (*self.tokens, self.tokens.v) if x is not None)
        most = max(int(_SHARE * given), _SMALL) // (one * self.value_heads)
        return max(1, min(most, self.windows.ranks))

    def stretches(self, slots: int) -> range:
        """First ranks of all stretches."""
        return range(0, self.windows.ranks, slots)

    def between(self, copies: bool) -> States:
        """Room for the states of a group between two stretches, and for their read copies."""
        shape = (self.windows.together, self.value_heads, self.key_dim, self.value_dim)
        return States(self.new(*shape), self.new(*shape) if copies else None)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a workspace."""
        return self.tokens.q.new_empty(shape, dtype=dtype)


class Stretch:
    """The workspace of a stretch of a run, and what fills it."""

    def __init__(self, run: Run, *, backward: bool = False, multiple: int = 1) -> None:
        """Takes the memory. multiple: of windows that there are, if there can be so many."""
        self.run, self.slots = run, run.slots(backward=backward)
        self.slots = max(multiple, self.slots // multiple * multiple)
        slots, heads, size, keys, width, new = self.slots, run.value_heads, run.size, run.keys, run.width, run.new
        self.system = new(slots, heads, size, size, dtype=torch.float64) if run.inside["DELTA"] else None
        self.backward, self.tiles = backward, run.tiles(backward=backward)
        self.operands = new(slots, heads, self.tiles, size * keys, dtype=run.stored)
        self.reads = new(slots, heads, run.parts, size, size, dtype=run.stored)
        self.overlaps = new(slots, heads, size, size) if run.inside["DELTA"] else None
        self.errors = new(slots, heads, width, size)
        self.whole, self.strengths = new(slots, heads, keys), new(slots, heads, size)
        self.weights = new(slots, heads, 2, size) if run.rows else None
        self.owns = new(slots, heads, size) if run.rounding["APART"] else None
        self.written: Tensor | None = None
        self.downs: Tensor | None = None
        self.kept: Tensor | None = None
        self.copies: Tensor | None = None
        self.anchored: Tensor | None = None
        self.danchored: Tensor | None = None
        self.late: Tensor | None = None
        if not backward:
            return
        self.kept, self.dkept = (new(slots, heads, width, keys) for _ in range(2))
        self.derrors = new(slots, heads, width, size)
        if run.paired:
            self.copies = new(*self.kept.shape)
            self.anchored, self.danchored = (new(slots, heads, width, size) for _ in range(2))
        if run.factors:
            self.written = new(slots, heads, width, size)
        if run.rounding["APART"]:
            self.downs = new(slots, heads, size)
        self.by_channel, self.by_pair = new(slots, heads, 3, size, keys), new(slots, heads, 2, size, size)
        self.by_slot = new(slots, heads, keys // run.slab, 3, size)
        self.of_record, self.dwhole = new(slots, heads, size), new(slots, heads, keys)
        if run.after:
            self.late = new(slots, heads, width // run.walk_columns, keys)

    def prepare(self, first: int) -> None:
        """What the windows of ranks `first` on need besides the state."""
        run, way, (q, k, v, g, beta) = self.run, self.run.launch, self.run.tokens
        slots = min(self.slots, run.windows.ranks - first)
        launched(relate)[(slots * run.value_heads,)](
            q, k, g, beta, *run.written, *run.windows.tables(), self.system, self.reads, self.overlaps,
            self.strengths, self.owns, run.scale, first, *q.stride(), *k.stride(), *_three(g), *_two(beta),
            run.key_heads, run.value_heads, K=run.key_dim, BS=min(run.keys, way.pair_channels),
            DECAY=run.decay, BETA=beta is not None, NORM=run.norm, **run.pairs,
            **run.rounding, SOLVE=self.backward or not run.factors, num_warps=run.pair_warps, num_stages=1,
        )  # fmt: skip
        launched(prepare)[(slots * run.value_heads,)](
            q, k, v, g, *run.written, *run.windows.tables(), self.system, self.operands, self.weights, self.errors,
            self.whole, run.scale, first, *q.stride(), *k.stride(), *v.stride(), *_three(g), run.key_heads,
            run.value_heads, BS=run.slab, BV=run.columns, DECAY=run.decay, **run.common, FACTORS=run.factors,
            TILES=self.tiles, BACK=self.backward, num_warps=run.slab_warps, num_stages=1,
        )  # fmt: skip

    def walk(
        self,
        first: int,
        start: States,
        source: States,
        target: States | None,
        *,
        at: int | None = None,
        span: int | None = None,
        final: Tensor | None = None,
        anchors: Tensor | None = None,
        o: Tensor | None = None,
        record: Tensor | None = None,
        keep: bool = False,
    ) -> None:
        """Takes states through the windows of ranks `at` to `at + span`, of those that were prepared from `first` on.

        Args:
            start: `[N, ..]`, where sequences start from. source, target: `[together, ..]`, states of those that the
                windows before have left and that go on behind these; no target: nobody wants them.
            o: outputs, or with `keep` their gradient. Others as the kernel takes them.
        """
        run, table = self.run, self.run.windows
        at, span = first if at is None else at, self.slots if span is None else span
        programs = run.width // run.walk_columns * run.value_heads * run.sequences
        kept = (self.kept, self.copies, self.anchored, self.written, self.late) if keep else (None,) * 5
        to = States(None) if target is None else target
        launched(walk)[(programs,)](
            run.tokens.q, self.operands, self.reads, self.weights, self.errors, self.overlaps, self.owns, self.whole,
            self.strengths, table.starts, table.lengths, table.leads, *table.order(), start.states, source.states,
            to.states, start.copies, source.copies, to.copies, final, anchors, o, *kept, record, run.scale, first, at,
            min(at + span, table.ranks), *run.tokens.q.stride(), *_three(o), run.key_heads, run.value_heads,
            BV=run.walk_columns, **run.common, **run.write, AFTER=run.after and o is not None, ON=target is not None,
            FINAL=final is not None, ANCHORS=anchors is not None, READ=o is not None and not keep, KEEP=keep,
            RECORD=record is not None, TILES=self.tiles, ROWS=run.rows, **run.rounding,
            num_warps=_warps(run.walk_columns, run.keys), num_stages=run.stages[0],
        )  # fmt: skip

    def retreat(
        self,
        first: int,
        grad_o: Tensor | None,
        grad_anchor: Tensor | None,
        drecord: Tensor | None,
        dstates: Tensor,
        dcopies: Tensor | None,
    ) -> None:
        """Takes the gradient of states back through the windows, in place."""
        run, table = self.run, self.run.windows
        programs = run.width // run.retreat_columns * run.value_heads * run.sequences
        launched(retreat)[(programs,)](
            run.tokens.q, self.operands, self.reads, self.weights, self.owns, self.whole, self.strengths, table.starts,
            table.lengths, table.leads, *table.order(), grad_o, grad_anchor, drecord, dstates, dcopies, self.derrors,
            self.danchored, self.dkept, run.scale, first, min(first + self.slots, table.ranks),
            *run.tokens.q.stride(), *_three(grad_o), run.key_heads, run.value_heads, BV=run.retreat_columns,
            **run.common, AFTER=run.after, PAIR=run.paired, ANCHORS=grad_anchor is not None,
            READ=grad_o is not None, RECORD=drecord is not None, TILES=self.tiles, ROWS=run.rows,
            **run.rounding, num_warps=_warps(run.retreat_columns, run.keys), num_stages=run.stages[1],
        )  # fmt: skip

    def deliver(
        self,
        first: int,
        grad_o: Tensor | None,
        drecord: tuple[Tensor, Tensor] | None,
        into: Mapping[str, Tensor],
    ) -> None:
        """Gradients of the windows' tokens. `drecord`: of recorded keys and updates."""
        run, way, table, (q, k, _, g, beta) = self.run, self.run.launch, self.run.windows, self.run.tokens
        slots = min(self.slots, table.ranks - first)
        channels = min(run.slab, way.slab_channels)
        dkeys, dupdates = (None, None) if drecord is None else drecord
        values: dict[str, Any] = {
            **run.inside, "V": run.value_dim, "VP": run.width, "AFTER": run.after, "PAIR": run.paired,
            "READ": grad_o is not None,
        }  # fmt: skip
        launched(settle)[(slots * run.value_heads,)](
            *table.tables(), self.system, self.errors, self.anchored, self.written, self.derrors, self.danchored,
            self.overlaps, self.strengths, grad_o, dupdates, into["dv"], self.by_pair, self.of_record, self.downs,
            first, *_three(grad_o), *_two(into["dv"]), run.value_heads,
            BV=min(run.columns, way.pair_columns), **values, RECORD=drecord is not None,
            **run.rounding, num_warps=run.pair_warps, num_stages=1,
        )  # fmt: skip
        launched(contract)[(run.keys // channels, slots * run.value_heads)](
            *table.tables(), self.errors if self.written is None else self.written, self.anchored, self.derrors,
            self.danchored, self.kept, self.copies, self.dkept, grad_o, self.by_channel, self.dwhole, first,
            *_three(grad_o), run.value_heads, BK=run.keys, BV=run.columns, BS=channels, **values,
            num_warps=run.slab_warps, num_stages=way.contract_stages,
        )  # fmt: skip
        late = 0 if self.late is None or grad_o is None else self.late.shape[2]
        dq, dk, dg, dbeta = (into.get(name) for name in ("dq", "dk", "dg", "dbeta"))
        launched(deliver)[(slots * run.key_heads,)](
            q, k, g, *run.written, *table.tables(), self.strengths, self.whole, self.by_channel, self.by_pair,
            self.by_slot, self.downs, self.dwhole, self.late, dkeys, dq, dk, dg, run.scale, first, *q.stride(),
            *k.stride(), *_three(g), *_two(dq), *_two(dk), *_two(dg), run.key_heads, run.value_heads,
            K=run.key_dim, BS=run.slab, RATIO=run.value_heads // run.key_heads, DECAY=run.decay, NORM=run.norm,
            LATE=late,
            RECORD=drecord is not None, **run.rounding, **run.pairs, num_warps=run.slab_warps, num_stages=1,
        )  # fmt: skip
        if beta is None and run.decay != 1:
            return
        launched(tally)[(slots * run.value_heads,)](
            *table.tables(), self.reads, self.overlaps, self.strengths, self.by_pair, self.by_slot, self.of_record,
            dg, dbeta, first, *_two(dg), *_two(dbeta), run.value_heads, W=run.inside["W"], BT=run.size,
            SLABS=run.keys // run.slab, DELTA=run.inside["DELTA"], DECAY=run.decay, BETA=beta is not None,
            PART=run.inside["PART"], RECORD=drecord is not None, FACTORS=run.factors, num_warps=run.pair_warps,
            num_stages=1,
        )  # fmt: skip


def _warps(columns: int, keys: int) -> int:
    """Warps of a walk: one for 16 value columns, two for long ones."""
    return min(8, max(1, columns // 16) * max(1, keys // 128))


def _two(x: Tensor | None) -> tuple[int, int]:
    """Strides of tokens and heads."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _three(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of tokens, heads and channels, where there are any."""
    return (*_two(x), x.stride(2) if x is not None and x.dim() == 3 else 0)
