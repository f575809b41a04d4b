"""`StoredState`: the tensors of one site's packed states, held together.

One object holds codes, scales, ring, cursors and, before the first suffix token, the exact state; so a copy, a
reordering, a move or a save cannot take one without the others. It has the methods by which a cache handles a tensor
`[slots, HV, K, V]`, and no arithmetic: whoever multiplies it gets an error, not a silent decode. `state.py` adds what
steps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from lattn_compile.carry import Call
from lattn_compile.errors import DtypeError, ShapeError, StateError, UnsupportedError
from lattn_compile.packed.given import check_heads, check_rule, check_seen
from lattn_compile.packed.layout import Carried, Heads, call_of, compute_dtype, empty, handed_over, unpack
from lattn_compile.site_policy import Policy
from lattn_compile.state import check_index, nbytes

__all__ = ["OWN", "StoredState", "no_gradient"]

OWN = ("cursor", "exact", "position", "sequence_ids")
"""Tensors that are held beside the stored ones."""


class StoredState:
    """See `QuantizedState`, which this is but for stepping."""

    def __init__(self, policy: Policy, *, site_id: int = 0, call: Call | None = None) -> None:
        self.policy, self.site_id = policy, site_id
        self.call: Call = call_of(policy) if call is None else call
        self.tensors: dict[str, Tensor] = {}
        self.cursor: Tensor | None = None
        self.exact: Tensor | None = None
        self.position: Tensor | None = None
        self.sequence_ids: Tensor | None = None
        self.heads: Heads | None = None
        self.rule = "delta"
        self.encoded = False  # the stored tensors hold what the exact states are handed over as
        self.whole = False  # none of the staged states was handed over yet, as far as is known

    # What it is.

    @property
    def random(self) -> bool:
        """Whether codes are rounded stochastically."""
        return self.call.rounding == "stochastic"

    @property
    def slots(self) -> int:
        """How many sequences there is room for; 0 before the first call made it."""
        return 0 if self.cursor is None else self.cursor.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the stored tensors lie; the CPU while there are none."""
        return torch.device("cpu") if self.cursor is None else self.cursor.device

    @property
    def dtype(self) -> torch.dtype:
        """Of `dense()`."""
        return compute_dtype(self.tensors) if self.exact is None else self.exact.dtype

    @property
    def shape(self) -> torch.Size:
        """`[slots, HV, K, V]`, that of `dense()`."""
        if self.exact is not None:
            return self.exact.shape
        h = self._known()
        return torch.Size((self.slots, h.HV, h.K, h.V))

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held: codes, scales, rings, cursors, and the exact state while it is there."""
        return nbytes(*self.held().values())

    def held(self) -> dict[str, Tensor]:
        """Every tensor of the object, by name."""
        own = {name: getattr(self, name) for name in OWN}
        return {**self.tensors, **{name: x for name, x in own.items() if x is not None}}

    def _known(self) -> Heads:
        if self.heads is None:
            raise StateError(
                "state",
                got="a QuantizedState whose sizes are not known yet",
                want="one that was allocated or stepped",
                remedy="Call allocate(heads, slots), or step it first.",
            )
        return self.heads

    def carried(self) -> Carried:
        """What is stored as a state that `lc.linear_attention` takes, a snapshot in new memory.

        Slots that store nothing are zeros with cursor -1; staged exact states are not in it.
        """
        heads, cursor = self._known(), self.cursor
        assert cursor is not None
        tensors = {name: _where(cursor >= 0, x, torch.zeros_like(x)) for name, x in self.tensors.items()}
        position = None if self.position is None else self.position.clone()
        return unpack(tensors, self.call, cursor.clone(), heads, rule=self.rule, position=position)

    def dense(self) -> Tensor:
        """The states as a reader sees them, `[slots, HV, K, V]`: decoded; exact where staged; else zeros."""
        if not self.tensors:
            return torch.zeros(self.shape, device=self.device) if self.exact is None else self.exact
        state = self.carried()
        values = state if isinstance(state, Tensor) else state.dense()
        if self.exact is None or self.cursor is None:
            return values
        return torch.where(self.cursor.view(-1, 1, 1, 1) < 0, self.exact, values)

    def __repr__(self) -> str:
        size = list(self.shape) if self.exact is not None or self.heads is not None else "no slots"
        staged = ", exact" if self.exact is not None else ""
        return f"{type(self).__name__}({self.policy}, {size}{staged}, {self.nbytes} bytes)"

    # What fills it.

    def allocate(
        self,
        heads: Heads,
        slots: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rule: str = "delta",
        v_first: bool = False,
    ) -> Self:
        """Slots that hold nothing, for sequences that start at zero; returns itself.

        Args:
            v_first: codes lie in memory value-first, `[slots, HV, V, K]`, as the pools of some engines do.

        Raises:
            StateError: sizes, slots, a dtype or a rule that cannot be. FormatError, PolicyError: K or V does not fit
            the policy.
        """
        check_heads("heads", heads)
        check_rule("rule", rule)
        if isinstance(slots, bool) or not isinstance(slots, (int, torch.SymInt)) or slots < 0:
            raise StateError("slots", got=repr(slots), want="an int of at least 0", remedy="One slot a live sequence.")
        if dtype not in (torch.float32, torch.float64):
            raise StateError(
                "dtype",
                got=repr(dtype),
                want="torch.float32 or torch.float64, in which steps compute",
                remedy="What is stored has the dtype of the policy's format.",
            )
        self.policy.check_shape(heads.K, heads.V)
        self.heads, self.rule, self.exact, self.encoded = heads, rule, None, False
        self.tensors = empty(self.call, heads, slots, device, dtype, v_first=v_first)
        self._number(slots, device)
        return self

    def stage(self, exact: Tensor, *, seen: int | Tensor = 0) -> Self:
        """Takes what an exact prefill left, for all slots; it is handed over by the next step. Returns itself.

        What was stored before is given up. Of as many slots its memory is kept and written again: a CUDA graph that was
        recorded for it finds the next prompt's codes there.

        Args:
            exact: `[N, HV, K, V]`, kept as it is, not copied. seen: tokens so far, an int or int64 `[N]`; the
                stochastic rounding is keyed by it.

        Raises:
            ShapeError, DtypeError: not such a state. SequenceError: no such count of tokens. UnsupportedError: one that
            a gradient flows through.
        """
        if not isinstance(exact, Tensor):
            raise DtypeError(
                "exact", got=type(exact).__name__, want="a tensor", remedy="torch.as_tensor makes one of an array."
            )
        if exact.requires_grad and torch.is_grad_enabled():
            raise no_gradient("exact")
        if exact.dim() != 4:
            raise ShapeError(
                "exact", got=str(list(exact.shape)), want="[N, HV, K, V]", remedy="One state a sequence and head."
            )
        if not exact.dtype.is_floating_point or exact.dtype.itemsize == 1:
            raise DtypeError(
                "exact",
                got=str(exact.dtype),
                want="a floating-point state",
                remedy="Pass what the prefill returned, not codes.",
            )
        if self.heads is not None and tuple(exact.shape[1:]) != (self.heads.HV, self.heads.K, self.heads.V):
            raise ShapeError(
                "exact",
                got=str(list(exact.shape)),
                want=f"[N, HV, K, V] = [N, {self.heads.HV}, {self.heads.K}, {self.heads.V}], as before",
                remedy="Every state of a site has the same sizes.",
            )
        check_seen(seen, exact.shape[0])
        self.exact, self.encoded = exact if exact.dtype is torch.float64 else exact.float(), False
        self.whole = True
        if self.cursor is None or (self.slots, self.device) != (exact.shape[0], exact.device):
            self.tensors = {}
            self._number(exact.shape[0], exact.device)
        else:  # the same sequences, prefilled further, or others in their places
            self.cursor.fill_(-1)
        if self.position is not None:
            self.position.add_(seen - self.position)  # which may be one tensor
        return self

    def _number(self, slots: int, device: torch.device | str) -> None:
        self.cursor = torch.full((slots,), -1, dtype=torch.int32, device=device)
        if self.random:
            self.position = torch.zeros(slots, dtype=torch.int64, device=device)
            self.sequence_ids = torch.zeros(slots, dtype=torch.int64, device=device)

    def encode(self, heads: Heads, rule: str = "delta") -> None:
        """Rounds and stores the staged states ahead of their first suffix token, which then releases them and no more.

        Until then they are exact to every reader, and counted beside what is stored. For steps that are recorded: what
        they write to has to be there before.
        """
        if self.exact is None or self.encoded or not self.whole:
            return
        self._write(heads, rule, None)
        self.heads, self.rule, self.encoded = heads, rule, True

    def hand_over(self, heads: Heads, rule: str = "delta", rows: Tensor | None = None) -> None:
        """Rounds and stores the exact states of the slots `rows` (bool `[slots]`, all by default), if there are any.

        `step` does this just before a sequence's first suffix token. The exact states are released with the last one.
        """
        if self.exact is None or self.cursor is None:
            return
        if rows is None and self.whole:
            now = None
        else:
            now = self.cursor < 0 if rows is None else (self.cursor < 0) & rows
        if not self.encoded:
            self._write(heads, rule, now)
        self.whole = False
        self.cursor.copy_(torch.zeros_like(self.cursor) if now is None else torch.where(now, 0, self.cursor))
        # Whether that was the last one is in the values, which a trace does not see: there they stay.
        if rows is None or (not torch.compiler.is_compiling() and not bool((self.cursor < 0).any())):
            self.exact, self.encoded = None, False

    def _write(self, heads: Heads, rule: str, now: Tensor | None) -> None:
        """The exact states of the slots `now` (bool `[slots]`; None: all) as they are stored, where the stored tensors
        lie, if they fit."""
        assert self.exact is not None
        made = handed_over(
            self.exact,
            self.call,
            heads,
            rule=rule,
            site_id=self.site_id,
            position=self.position,
            sequence_ids=self.sequence_ids,
        )
        old = self.tensors
        if list(old) != list(made) or any((x.shape, x.dtype) != (old[n].shape, old[n].dtype) for n, x in made.items()):
            self.tensors = made  # what is made of a slot that stays exact is read by nobody
            return
        if now is not None:
            made = {name: _where(now, x, old[name]) for name, x in made.items()}
            if torch.compiler.is_compiling():  # Inductor cannot copy what is seen as another dtype
                self.tensors = made
                return
        for name, x in made.items():
            old[name].copy_(x)

    # What a cache does with a tensor.

    def index_select(self, dim: int, index: Tensor) -> Self:
        """The sequences `index` (int `[M]`) in a new object: reordered beams, or what is left of a batch.

        Raises:
            ShapeError: another axis. DtypeError, StateError: no such tensor, or (on CPUs) sequences that there are none
            of.
        """
        _first(dim)
        if self.cursor is not None:
            check_index(index.to(self.device) if isinstance(index, Tensor) else index, self.cursor)
        return self._map(lambda x: _bytewise(x, lambda y: y.index_select(0, index.to(y.device))))

    def repeat_interleave(self, repeats: int, dim: int = 0) -> Self:
        """Every sequence `repeats` times, in a new object.

        Raises:
            ShapeError: another axis. StateError: no such number.
        """
        _first(dim)
        if isinstance(repeats, bool) or not isinstance(repeats, (int, torch.SymInt)) or repeats < 0:
            raise StateError("repeats", got=repr(repeats), want="an int of at least 0", remedy="One for all sequences.")
        return self._map(lambda x: _bytewise(x, lambda y: y.repeat_interleave(repeats, 0)))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """On another device. float32 and float64 are what `dense()` gives, and say nothing of the codes.

        Raises:
            DtypeError: another dtype.
        """
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for x in args:
            device, dtype = (device, x) if isinstance(x, torch.dtype) else (x, dtype)
        if dtype not in (None, torch.float32, torch.float64):
            raise DtypeError(
                "dtype",
                got=str(dtype),
                want="float32 or float64: codes have the dtype of their format",
                remedy="Call dense() for numbers of another dtype.",
            )
        if device is None or torch.device(device) == self.device:
            return self
        non_blocking = bool(kwargs.get("non_blocking", False))
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def clone(self) -> Self:
        """A copy that shares no memory."""
        return self._map(lambda x: x.clone())

    def zero_(self) -> Self:
        """Every sequence starts at zero again; exact states are released."""
        self.exact, self.encoded = None, False
        if not self.tensors:  # never stepped: the next step makes what it stores
            self.cursor = self.position = None
            return self
        if self.cursor is not None:
            self.cursor.fill_(-1)
        if self.position is not None:
            self.position.zero_()
        return self

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return self.like({name: fn(x) for name, x in self.held().items()})

    def like(self, held: dict[str, Tensor]) -> Self:
        """A state of the same site and policy with other tensors, those of `held()` by name."""
        other = type(self)(self.policy, site_id=self.site_id, call=self.call)
        other.heads, other.rule, other.encoded, other.whole = self.heads, self.rule, self.encoded, self.whole
        other.cursor, other.exact = held.get("cursor"), held.get("exact")
        other.position, other.sequence_ids = held.get("position"), held.get("sequence_ids")
        other.tensors = {name: x for name, x in held.items() if name not in OWN}
        return other


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows (bool `[slots]`) that are set, else `old`."""
    mask = rows.view(-1, *(1,) * (new.dim() - 1))
    if new.dtype.itemsize == 1:
        return torch.where(mask, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)
    return torch.where(mask, new, old)


def _bytewise(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """`fn`, which only moves rows, through bytes where torch cannot index 8-bit floats."""
    return fn(x.view(torch.uint8)).view(x.dtype) if x.dtype.itemsize == 1 else fn(x)


def _first(dim: int) -> None:
    if dim != 0:
        raise ShapeError("dim", got=str(dim), want="0, the sequences", remedy="Decode with dense() to cut other axes.")


def no_gradient(what: str) -> UnsupportedError:
    return UnsupportedError(
        what,
        got="a tensor that requires a gradient",
        want="inference: a packed state is written in place and has no gradient",
        remedy='Run the model under torch.no_grad(), or train with storage="emulated", which has the same numbers.',
    )
