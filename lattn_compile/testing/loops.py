"""The write modes of semantics §5, written out for one sequence: a class a mode, one call a token.

Plain differentiable torch in float64. Nothing is shared with ops and kernels but the codec (`formats`), and nothing is
clever: a state is a tensor `[HV, K, V]` that is decayed, updated, read and rounded in the order of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.formats import Format, parse
from lattn_compile.formats.quantizer import Identity, Quantizer

__all__ = ["SUFFIXES", "Given", "Record", "Rule", "Suffix", "Token", "Writes", "straight_through"]


class _StraightThrough(torch.autograd.Function):
    """Forward QDQ(x), backward the identity; not `x + (Q(x) - x)`, which is NaN for an infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Any, identity: tuple[Any, ...]) -> Tensor:
        return fmt.qdq(x, *identity).clone()  # type: ignore[no-any-return] # a plain format may hand its input back

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Given(torch.autograd.Function):
    """Forward a value from elsewhere, backward the identity on the value that it stands for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.to(x.dtype).reshape(x.shape).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, fmt: Format | Quantizer, identity: Identity | None = None) -> Tensor:
    """`fmt.qdq(x)`, differentiated as the identity. `x [..., K, V]`; identity: what keys a quantizer's random bits."""
    rest = () if identity is None else (identity,)
    return _StraightThrough.apply(x, fmt, rest)  # type: ignore[no-any-return, no-untyped-call]


Given = Callable[[int, int, str, Tensor, Tensor], Tensor | None]
"""Asked at every rounding, `(sequence, position, what, value, rounded)`, for a tensor to take instead of the rounded
one (None: take that). `what` is "state", of two_precision also "anchor", or "k" or "u", a factor."""


class Token(NamedTuple):
    """One token of one sequence: q, k `[H, K]` normalised, v `[HV, V]`, g `[HV(, K)]` rounded, beta `[HV]`.

    `position` is its absolute position in its sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    position: int


class Record(NamedTuple):
    """One slot of the ring: k `[H, K]` and u `[HV, V]`, in replay as they are read back; v, beta: two_precision only.

    Of a whole call, as it is returned: the same with `[N, W - 1]` in front, zero behind the cursor.
    """

    k: Tensor
    u: Tensor
    g: Tensor | None
    v: Tensor | None
    beta: Tensor | None


@dataclass(frozen=True)
class Rule:
    """The four lines of semantics §2; value head j uses key head j // group."""

    rule: str
    scale: float
    group: int

    def decay(self, state: Tensor, g: Tensor | None) -> Tensor:
        if g is None:
            return state
        gamma = g.exp()
        return state * (gamma[:, None, None] if gamma.dim() == 1 else gamma[:, :, None])

    def update(self, decayed: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        u = v - torch.einsum("hkv,hk->hv", decayed, self._repeat(k)) if self.rule == "delta" else v
        return u if beta is None else beta[:, None] * u

    def add(self, decayed: Tensor, k: Tensor, u: Tensor) -> Tensor:
        return decayed + self._repeat(k)[:, :, None] * u[:, None, :]

    def read(self, state: Tensor, q: Tensor) -> Tensor:
        return self.scale * torch.einsum("hkv,hk->hv", state, self._repeat(q))

    def step(self, state: Tensor, x: Any) -> Tensor:
        """The state after the token (or the raw record) `x`, without any rounding."""
        decayed = self.decay(state, x.g)
        return self.add(decayed, x.k, self.update(decayed, x.k, x.v, x.beta))

    def _repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, dim=0)


@dataclass(frozen=True)
class Writes:
    """What a mode does with the states of one sequence.

    Attributes:
        sequence, identifier: its place in the call, and the caller's name for it, which keys random bits.
        given: may replace what a rounding gives.
    """

    quantizer: Quantizer
    readout: str
    sequence: int
    identifier: int
    chunk_size: int = 64
    window: int = 8
    factors: str | None = None
    anchor: str = "fp32"
    given: Given | None = None

    def state(self, state: Tensor, position: int) -> Tensor:
        """QDQ of a state `[HV, K, V]` whose write belongs to the token at `position`."""
        one = [torch.tensor([x], dtype=torch.int64, device=state.device) for x in (position, self.identifier)]
        return self._taken(position, "state", state, straight_through(state[None], self.quantizer, Identity(*one))[0])

    def cast(self, state: Tensor, position: int) -> Tensor:
        """A state in the anchor's precision."""
        return self._taken(position, "anchor", state, straight_through(state, parse(self.anchor)))

    def factor(self, x: Tensor, position: int, name: str) -> Tensor:
        """A key or update factor `[heads, D]` as the ring gives it back: one scale a vector."""
        if self.factors is None:
            return x
        whole = self.factors if parse(self.factors).is_plain else f"{self.factors}/*x*"
        return self._taken(position, name, x, straight_through(x[:, None, :], parse(whole))[:, 0, :])

    def _taken(self, position: int, name: str, x: Tensor, rounded: Tensor) -> Tensor:
        if self.given is None:
            return rounded
        value = self.given(self.sequence, position, name, x.detach(), rounded.detach())
        return rounded if value is None else _Given.apply(x, value)  # type: ignore[no-any-return, no-untyped-call]


class Suffix:
    """One sequence in its write mode.

    Attributes:
        state: what the next token starts from; of replay the stored anchor, of two_precision the recurrence anchor.
        raw: the same as an op returns it: if its write was made here, and writing it again would change it, the value
            before that write.
        written: position of the token whose write made `state`.
        records: the ring.
    """

    state: Tensor
    raw: Tensor

    def __init__(self, rule: Rule, writes: Writes, position: int) -> None:
        """`position`: of the last token before this call or, after a hand-over, before the suffix."""
        self.rule, self.writes = rule, writes
        self.written = self.last = position
        self.cursor = 0
        self.records: list[Record] = []

    def hand_over(self, state: Tensor) -> None:
        """An exact state is stored, just before the first suffix token."""
        self._store(state, self.last)

    def resume(self, state: Tensor, read: Tensor | None, cursor: int, records: list[Record]) -> None:
        """A stored state is taken up again."""
        self.state = self.raw = state
        self.cursor, self.records = cursor, records
        self.written = self.last - len(records)

    def token(self, x: Token) -> Tensor:
        """One token; its output `[HV, V]`."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The state as a reader sees it."""
        return self.state

    def read_copy(self) -> Tensor:
        """Two_precision's read copy as it is stored; of the other modes the state itself."""
        return self.state

    def _store(self, state: Tensor, position: int) -> None:
        self.state = self.writes.state(state, position)
        self.raw = self.state if self.writes.quantizer.idempotent else state
        self.written = position


class TokenWrites(Suffix):
    """token: `S_t ← QDQ(S_t)` after every token."""

    def token(self, x: Token) -> Tensor:
        exact = self.rule.step(self.state, x)
        self._store(exact, x.position)
        return self.rule.read(exact if self.writes.readout == "before_write" else self.state, x.q)


class ChunkWrites(Suffix):
    """chunk: `S ← QDQ(S)` after every `chunk_size` tokens; inside a chunk everything is exact."""

    def token(self, x: Token) -> Tensor:
        exact = self.rule.step(self.state, x)
        self.cursor = (self.cursor + 1) % self.writes.chunk_size
        if self.cursor == 0:
            self._store(exact, x.position)
        else:
            self.state = self.raw = exact
            self.written = x.position
        return self.rule.read(exact if self.writes.readout == "before_write" else self.state, x.q)

    def dense(self) -> Tensor:
        return self.writes.state(self.state, self.written) if self.cursor else self.state


class ReplayWrites(Suffix):
    """replay: an anchor is stored; the updates since are kept, encoded, and the state is rebuilt from both."""

    running: Tensor  # S_{j-1}

    def hand_over(self, state: Tensor) -> None:
        super().hand_over(state)
        self.running = self.state

    def resume(self, state: Tensor, read: Tensor | None, cursor: int, records: list[Record]) -> None:
        super().resume(state, read, cursor, records)
        self.running = state
        for record in records:
            self.running = self.rule.add(self.rule.decay(self.running, record.g), record.k, record.u)

    def token(self, x: Token) -> Tensor:
        decayed = self.rule.decay(self.running, x.g)
        u = self.rule.update(decayed, x.k, x.v, x.beta)
        kept = Record(self.writes.factor(x.k, x.position, "k"), self.writes.factor(u, x.position, "u"), x.g, None, None)
        own = self.rule.add(decayed, x.k, u)
        self.running = self.rule.add(decayed, kept.k, kept.u)
        self.records = [*self.records, kept]
        if len(self.records) == self.writes.window:
            self._store(self.running, x.position)
            self.running, self.records = self.state, []
        self.cursor = len(self.records)
        return self.rule.read(own if self.writes.readout == "before_write" else self.running, x.q)

    def dense(self) -> Tensor:
        return self.running


class TwoPrecisionWrites(Suffix):
    """two_precision: outputs come from a rounded read copy, the recurrence runs on an anchor that never sees it."""

    stored_read: Tensor  # R
    running: Tensor  # R and the window's updates

    def hand_over(self, state: Tensor) -> None:
        self._store(state, self.last)

    def resume(self, state: Tensor, read: Tensor | None, cursor: int, records: list[Record]) -> None:
        super().resume(state, read, cursor, records)
        assert read is not None, "a carried two_precision state has a read copy"
        self.stored_read = self.running = read
        for record in records:
            self.running = self.rule.add(self.rule.decay(self.running, record.g), record.k, record.u)

    def token(self, x: Token) -> Tensor:
        decayed = self.rule.decay(self.running, x.g)
        u = self.rule.update(decayed, x.k, x.v, x.beta)
        self.running = self.rule.add(decayed, x.k, u)
        o = self.rule.read(self.running, x.q)
        self.records = [*self.records, Record(x.k, u, x.g, x.v, x.beta)]
        if len(self.records) == self.writes.window:
            self._store(self.dense(), x.position)
            self.records = []
        self.cursor = len(self.records)
        return o

    def dense(self) -> Tensor:
        state = self.state
        for record in self.records:
            state = self.rule.step(state, record)
        return state

    def read_copy(self) -> Tensor:
        return self.stored_read

    def _store(self, state: Tensor, position: int) -> None:
        # The anchor travels as it is cast: its own rounding is a plain one, and casting twice is casting once.
        self.state = self.raw = self.writes.cast(state, position)
        self.stored_read = self.running = self.writes.state(self.state, position)
        self.written = position


SUFFIXES: dict[str, type[Suffix]] = {
    "token": TokenWrites,
    "chunk": ChunkWrites,
    "replay": ReplayWrites,
    "two_precision": TwoPrecisionWrites,
}
"""The loop of every write mode but "exact", by its name in `modes.MODES`."""
