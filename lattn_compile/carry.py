"""From a carried state to an op's arguments, and from an op's results to a carried state (semantics §3-5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import StateError
from lattn_compile.modes import PREFILL_OPTIONS
from lattn_compile.ops.segments import Segments, next_cursor
from lattn_compile.replay_state import ReplayState
from lattn_compile.ring import Ring
from lattn_compile.state import EncodedState, Written, from_raw

__all__ = ["Call", "Start", "carried", "to_carry"]


class Call(NamedTuple):
    """A policy as constants of a call; the names are those of the ops' arguments. None: the op has no such option."""

    write: str = "exact"
    state_format: str = "fp32"
    readout: str = "before_write"
    implementation: str = "auto"
    chunk_size: int | None = None
    window: int | None = None
    factors: str | None = None
    anchor: str | None = None
    rounding: str = "nearest"
    seed: int = 0
    feedback: str | None = None
    rotation: str | None = None
    gate: str | None = None
    prefill_operands: str | None = None
    prefill_inverse: str | None = None
    prefill_residual: float | None = None
    prefill_gradient: str | None = None

    @property
    def rounds_prefill(self) -> bool:
        """Whether operands or the inverse of the prefix are others than exact."""
        return self.prefill_operands is not None or self.prefill_inverse is not None

    def op_options(self) -> dict[str, Any]:
        """Arguments of the op, those left out that are off."""
        options: dict[str, Any] = {
            "write": self.write,
            "state_format": self.state_format,
            "readout": self.readout,
            "implementation": self.implementation,
        }
        optional = {
            "chunk_size": self.chunk_size,
            "window": self.window,
            "factors": self.factors,
            "anchor": self.anchor,
            "gate": self.gate,
            **{name: getattr(self, name) for name in PREFILL_OPTIONS},
        }
        return {**options, **{name: x for name, x in optional.items() if x is not None}, **self.rounding_options()}

    def rounding_options(self) -> dict[str, Any]:
        """Those of the codec's ops, likewise."""
        options: dict[str, Any] = {"feedback": self.feedback, "rotation": self.rotation}
        if self.rounding != "nearest":
            options |= {"rounding": self.rounding, "seed": self.seed}
        return {name: x for name, x in options.items() if x is not None}

    @property
    def idempotent(self) -> bool:
        """Whether writing a written state again changes nothing, bit for bit."""
        return self.rounding == "nearest" and self.feedback is None and self.rotation is None

    def __str__(self) -> str:
        said = ("chunk_size", "window", "factors", "anchor", "feedback", "rotation")
        rest = [f"{name} {getattr(self, name)}" for name in said if getattr(self, name) is not None]
        return ", ".join([f"{self.write} {self.state_format}", *rest])


class Start(NamedTuple):
    """What an op continues from: the tensors, the cursors that say what they are, and where they came from."""

    state: Tensor | None = None
    cursor: Tensor | None = None
    read: Tensor | None = None
    ring: tuple[Tensor | None, ...] = (None,) * len(Ring._fields)
    position: Tensor | None = None
    before: EncodedState | ReplayState | None = None


def carried(state: Tensor | EncodedState | ReplayState | None, call: Call) -> Start:
    """What `call` starts from.

    Raises:
        StateError: not a state, or one of another mode, format, feedback or rotation.
    """
    if state is None or isinstance(state, Tensor):
        return Start(state)
    if not isinstance(state, (EncodedState, ReplayState)):
        raise StateError(
            "initial_state",
            got=type(state).__name__,
            want="a Tensor [N, HV, K, V], an EncodedState, a ReplayState or None",
            remedy="Pass what an earlier call returned.",
        )
    if call.write == "exact":
        return Start(state.dense())
    if not _continues(state, call):
        raise StateError(
            "initial_state",
            got=repr(state),
            want=f"a state of the policy's own mode, {call}",
            remedy="Continue under the policy that made it, or pass initial_state.dense() to round it anew.",
        )
    if isinstance(state, EncodedState):
        return Start(state.raw(), state.cursor, position=state.position, before=state)
    read = None if state.read is None else state.read.decoded()
    ring: tuple[Tensor | None, ...] = (None,) * len(Ring._fields) if state.window == 1 else tuple(state.ring)
    return Start(state.anchor.raw(), state.cursor, read, ring, state.position, state)


def _continues(state: EncodedState | ReplayState, call: Call) -> bool:
    if isinstance(state, EncodedState):
        kept = (state.feedback, state.rotation) == (call.feedback, call.rotation)
        grid = state.chunk_size is None or state.chunk_size == call.chunk_size
        return call.window is None and kept and grid and state.state_format == call.state_format
    rounded = state.anchor if state.read is None else state.read
    same = (state.mode, state.window, state.factors) == (call.write, call.window, call.factors)
    stored = state.read is None or state.anchor.state_format == call.anchor
    kept = (rounded.state_format, rounded.feedback, rounded.rotation) == (
        call.state_format,
        call.feedback,
        call.rotation,
    )
    return same and stored and kept


def to_carry(
    final: Tensor,
    ring: list[Tensor],
    call: Call,
    start: Start,
    segments: Segments,
    *,
    rule: str,
    site_id: int,
    keep_exact: bool,
    position: Tensor | None,
    sequence_ids: Tensor | None,
    has_decay: bool,
    has_beta: bool,
) -> EncodedState | ReplayState:
    """The carried state of one call.

    Args:
        final, ring: what the op returned. keep_exact: whether any sequence may be exact.
        position, sequence_ids: those of the call, where the rounding is stochastic.
    """
    grid = call.chunk_size if call.window is None else call.window
    cursor = next_cursor(segments, start.cursor, grid)
    written, seen = None, None
    if not call.idempotent:
        written, seen = _written(call, start, segments, grid, site_id, position, sequence_ids)
    if call.window is None:
        before = start.before if isinstance(start.before, EncodedState) else None
        return from_raw(
            final,
            cursor,
            call.state_format,
            chunk_size=call.chunk_size,
            keep_exact=keep_exact,
            written=written,
            before=before,
            seen=seen,
        )
    was = start.before if isinstance(start.before, ReplayState) else None
    plain = call.write == "two_precision"
    anchor = from_raw(
        final,
        cursor,
        call.anchor if plain and call.anchor is not None else call.state_format,
        chunk_size=None,
        keep_exact=keep_exact,
        written=None if plain else written,
        before=None if was is None else was.anchor,
        seen=seen,
    )
    read = None
    if plain:
        read = from_raw(
            anchor.decoded(),
            cursor,
            call.state_format,
            chunk_size=None,
            keep_exact=False,
            # The anchor is not the read copy: its values are rounded here, not merely named.
            written=written or Written({}, False, torch.ones_like(cursor, dtype=torch.bool)),
            before=None if was is None else was.read,
        )
    k, u, g, v, beta = ring
    pending = Ring(k, u, g if has_decay else None, v if plain else None, beta if plain and has_beta else None)
    return ReplayState(call.write, call.window, anchor, pending, cursor, read, call.factors, rule)


def _written(
    call: Call,
    start: Start,
    segments: Segments,
    grid: int | None,
    site_id: int,
    position: Tensor | None,
    sequence_ids: Tensor | None,
) -> tuple[Written, Tensor | None]:
    """Which states this call wrote and when, and how many tokens each sequence has seen."""
    suffix = segments.suffix
    changed, since = suffix > 0, torch.zeros_like(suffix)
    if call.window is not None and grid is not None:
        # Written at the last flush; without one, at hand-over, just before the first suffix token.
        before = torch.full_like(suffix, -1) if start.cursor is None else start.cursor.to(suffix)
        first = (segments.prefix > 0) | (before < 0)
        offset = torch.where(first, 0, before)
        flushes = (offset + suffix) // grid
        changed = changed & (first | (flushes > 0))
        since = (offset + suffix) % grid
    options = call.rounding_options()
    if call.rounding == "nearest":
        return Written(options, False, changed), None
    if site_id:
        options["site_id"] = site_id
    first_token = torch.zeros_like(suffix) if position is None else position.to(suffix).expand_as(suffix)
    seen = first_token + segments.total
    ids = None if sequence_ids is None else sequence_ids.to(suffix).expand_as(suffix)
    return Written(options, False, changed, seen - 1 - since, ids), seen
