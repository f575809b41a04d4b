"""`StatePool`: slots for continuous batching, every site of a model with the same slot numbers.

    pool = StatePool({path: (policy, heads), ...}, slots=256)
    slot = pool.allocate()
    pool.stage(slot, {path: exact_state, ...}, seen=len(prompt))     # what the prefill left
    indices = pool.indices([slot, None])                             # int32 [N] for this step; None is padding
    o = pool[path].step(q, k, v, g, beta, state_indices=indices)     # in every layer

A free slot's content is never looked at and never cleaned. Which slots are live is known on the host, so nothing here
waits for a device; `indices(slots, out=buffer)` fills the buffer that a CUDA graph reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, SequenceError, ShapeError, StateError
from lattn_compile.packed.given import check_heads, check_rule, check_seen
from lattn_compile.packed.layout import Heads
from lattn_compile.packed.state import QuantizedState
from lattn_compile.policy import preset
from lattn_compile.site_policy import Policy
from lattn_compile.state import nbytes

__all__ = ["PADDING", "Snapshot", "StatePool"]

PADDING = -1


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A sequence outside the pool: one row of each site, what was staged, and its name in stochastic rounding.
    `StatePool.restore` takes it in."""

    rows: dict[str, QuantizedState]
    exact: dict[str, Tensor]
    seen: int
    sequence_id: int

    @property
    def nbytes(self) -> int:
        """Bytes of one slot in all layers: what is stored, and exact states that were not handed over yet."""
        return sum(row.nbytes for row in self.rows.values()) + nbytes(*self.exact.values())


def _checked(name: str, site: object) -> tuple[Policy, Heads]:
    policy, heads = site if isinstance(site, tuple) and len(site) == 2 else (None, None)
    policy = preset(policy, f"sites[{name!r}]") if isinstance(policy, str) else policy
    if isinstance(policy, Policy) and isinstance(heads, Heads):
        check_heads(f"sites[{name!r}][1]", heads)
    else:
        raise StateError(
            f"sites[{name!r}]",
            got=repr(site),
            want="a policy, or a preset's name, and the layer's Heads",
            remedy="(lc.Policy(...), lc.Heads(H, HV, K, V, decay, has_beta)).",
        )
    return policy, heads


class _Book:
    """Which slots are whose: shared by a pool and its states, which ask it about the slots that a call names.

    Attributes:
        slots: how many there are; numbers beyond them are the ops' to refuse. names: of each live slot, its sequence's
            in stochastic rounding. staged: of each that waits for its first suffix token, its exact states and how many
            tokens it has seen. in_use: whether slots are allocated here at all. An engine that has bookkeeping of its
            own, and never allocates, is asked nothing.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.names: dict[int, int] = {}
        self.staged: dict[int, tuple[dict[str, Tensor], int]] = {}
        self.in_use = False

    def check(self, state_indices: Tensor | None, padding_slot: int) -> None:
        if not self.in_use:
            return
        if state_indices is None:
            if self.staged:
                raise StateError(
                    "state_indices",
                    got=f"none, which are all slots, while what was staged in {sorted(self.staged)} waits",
                    want="the indices that pool.indices(slots) returned after stage()",
                    remedy="Call pool.indices before the step: it stores what was staged.",
                )
            return
        for slot in state_indices.flatten().tolist():
            if slot in self.staged:
                raise StateError(
                    "state_indices",
                    got=f"slot {slot}, whose staged state was not handed over",
                    want="the indices that pool.indices(slots) returned after stage()",
                    remedy="Call pool.indices before the step: it stores what was staged.",
                )
            if slot in range(self.slots) and slot != padding_slot and slot not in self.names:
                raise StateError(
                    "state_indices",
                    got=f"slot {slot}, which is nobody's",
                    want="slots that allocate() gave and free() did not take",
                    remedy="Allocate the sequence a slot first; pool.indices(slots) makes indices of live ones.",
                )


class StatePool:
    """Slots of packed states, `[slots, HV, ...]` for each site.

    Args:
        sites: by name, the policy (or a preset's name) and the sizes of each layer's recurrence, an `lc.Heads`; the
            order numbers the sites for stochastic rounding. rules: by name, where the rule is not "delta".
        slots: how many sequences may live at a time. v_first: codes lie in memory as `[slots, HV, V, K]`.

    Raises:
        StateError: no slots, or a site that is no policy and sizes. PolicyError, FormatError: no such preset, a policy
            without a packed form, or sizes that do not fit it.
    """

    def __init__(
        self,
        sites: Mapping[str, tuple[Policy, Heads]],
        slots: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rules: Mapping[str, str] | None = None,
        v_first: bool = False,
    ) -> None:
        if type(slots) is not int or slots < 1:
            raise StateError("slots", got=repr(slots), want="an int of at least 1", remedy="One slot a live sequence.")
        self.slots, self.device, self.dtype = slots, torch.device(device), dtype
        if not isinstance(sites, Mapping) or not sites:
            raise StateError(
                "sites",
                got=repr(sites),
                want="a policy and the sizes of each layer, by name",
                remedy='{"model.layers.0.linear_attn": (lc.Policy(...), lc.Heads(...)), ...}.',
            )
        rules = {} if rules is None else rules
        if not isinstance(rules, Mapping) or not rules.keys() <= sites.keys():
            raise StateError(
                "rules", got=repr(rules), want=f"by names of sites: {', '.join(sites)}", remedy='{name: "additive"}.'
            )
        self._states: dict[str, QuantizedState] = {}
        for number, (name, site) in enumerate(sites.items()):
            policy, heads = _checked(name, site)
            state = QuantizedState(policy, site_id=number)
            rule = rules.get(name, "delta")
            check_rule(f"rules[{name!r}]", rule)
            self._states[name] = state.allocate(heads, slots, device=device, dtype=dtype, rule=rule, v_first=v_first)
        self._free = list(range(slots))[::-1]
        self._book = _Book(slots)
        self._watch()

    def _watch(self) -> None:
        self._names, self._staged = self._book.names, self._book.staged
        for state in self._states.values():
            state.check_named = self._book.check

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._watch()  # states are copied without their pool

    def __getitem__(self, site: str) -> QuantizedState:
        if site not in self._states:
            raise StateError(
                "site",
                got=repr(site),
                want=f"one of {', '.join(self._states)}",
                remedy="The names that the pool was made with.",
            )
        return self._states[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        """Live sequences."""
        return self.slots - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not, and of the exact states that are staged."""
        staged = sum(nbytes(*exact.values()) for exact, _ in self._staged.values())
        return sum(state.nbytes for state in self._states.values()) + staged

    def allocate(self, *, sequence_id: int = 0) -> int:
        """A slot for a sequence that starts at zero; `sequence_id` names it in stochastic rounding.

        Raises:
            StateError: every slot is taken, or no such name.
        """
        if type(sequence_id) is not int or not -(2**63) <= sequence_id < 2**63:
            raise StateError("sequence_id", got=repr(sequence_id), want="an int64", remedy="A number of your choice.")
        if not self._free:
            raise StateError(
                "slot",
                got=f"{self.slots} sequences, as many as there are slots",
                want="a free slot",
                remedy="Free one, or swap a sequence out: swap_out(slot) keeps it outside the pool.",
            )
        self._book.in_use = True
        slot = self._free.pop()
        self._names[slot] = sequence_id
        for state in self._states.values():
            self._clear(state, slot)
            if state.sequence_ids is not None:
                state.sequence_ids[slot] = sequence_id
        return slot

    def free(self, slot: int) -> None:
        """The sequence has ended, or was cancelled; its slot may be anyone's. Drafts of it that wait are dropped.

        Raises:
            StateError: no live slot.
        """
        self._live(slot)
        for state in self._states.values():
            self._clear(state, slot)
        self._staged.pop(slot, None)
        del self._names[slot]
        self._free.append(slot)

    @staticmethod
    def _clear(state: QuantizedState, slot: int) -> None:
        assert state.cursor is not None
        state.drop_drafts(slot)
        state.cursor[slot] = -1
        if state.position is not None:
            state.position[slot] = 0

    def _live(self, *slots: int) -> None:
        for slot in slots:
            if type(slot) is not int or not 0 <= slot < self.slots or slot in self._free:
                raise StateError(
                    "slot",
                    got=repr(slot),
                    want="a slot that allocate() gave and free() did not take",
                    remedy="An int from allocate(), while the sequence lives; int(slot) makes one of a tensor.",
                )

    def stage(self, slot: int, exact: Mapping[str, Tensor], *, seen: int = 0) -> None:
        """Takes a copy of what an exact prefill left of a sequence, `[HV, K, V]` for each site. It is exact until the
        sequence's first suffix token.

        A prefill in pieces starts the next one from `staged(slot)` and stages again. What was stored is given up.

        Raises:
            StateError: no live slot, or a site is missing or one too many. ShapeError, DtypeError: not such a state.
            SequenceError: no such count of tokens.
        """
        self._live(slot)
        check_seen(seen, 1)
        if not isinstance(exact, Mapping):
            raise StateError(
                "exact", got=type(exact).__name__, want="the states by name", remedy="{site: tensor [HV, K, V], ...}."
            )
        if exact.keys() != self._states.keys():
            raise StateError(
                "exact",
                got=f"states of {sorted(exact)}",
                want=f"one for each of {sorted(self._states)}",
                remedy="A sequence has passed every layer, or none.",
            )
        for name, state in self._states.items():
            assert state.heads is not None
            want = [state.heads.HV, state.heads.K, state.heads.V]
            if not isinstance(exact[name], Tensor):
                raise DtypeError(
                    f"exact[{name!r}]",
                    got=type(exact[name]).__name__,
                    want="a tensor",
                    remedy="torch.as_tensor makes one of an array.",
                )
            if list(exact[name].shape) != want:
                raise ShapeError(
                    f"exact[{name!r}]",
                    got=str(list(exact[name].shape)),
                    want=str(want),
                    remedy="One sequence's state, heads first: [HV, K, V].",
                )
            if not exact[name].dtype.is_floating_point or exact[name].dtype.itemsize == 1:
                raise DtypeError(
                    f"exact[{name!r}]",
                    got=str(exact[name].dtype),
                    want="a floating-point state",
                    remedy="Pass what the prefill returned, not codes.",
                )
        # A row is a view of the prefill's batch, which would live as long as the row.
        copies = {name: exact[name].to(self.device, self.dtype, copy=True) for name in self._states}
        self._staged[slot] = copies, seen
        for state in self._states.values():
            self._clear(state, slot)

    def staged(self, slot: int) -> dict[str, Tensor]:
        """The exact states of a slot that waits for its first suffix token; empty if it does not.

        Raises:
            StateError: no live slot.
        """
        self._live(slot)
        return dict(self._staged.get(slot, ({}, 0))[0])

    def indices(self, slots: Sequence[int | None], *, out: Tensor | None = None) -> Tensor:
        """`state_indices` int32 `[N]` of a step in which every one of `slots` has a suffix token; None is padding.

        Staged states are handed over here, and released.

        Args:
            out: int32 `[N]`, N >= len(slots), written and returned: the buffer that a recorded step reads. What is left
                of it is padding.

        Raises:
            StateError: no live slot, or one of them twice. SequenceError: `out` is no such buffer.
        """
        if not isinstance(slots, Sequence) or isinstance(slots, str):
            raise StateError("slots", got=repr(slots), want="a list of slots, None for padding", remedy="[slot, ...].")
        named = [slot for slot in slots if slot is not None]
        self._live(*named)
        if len(set(named)) != len(named):
            raise StateError(
                "slots",
                got=str(list(slots)),
                want="every slot once",
                remedy="Two sequences that share a past need a copy of it each: copy(source, target).",
            )
        fits = isinstance(out, Tensor) and out.dtype is torch.int32 and out.dim() == 1 and out.shape[0] >= len(slots)
        if out is not None and not fits:
            raise SequenceError(
                "out",
                got=f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
                want=f"int32 [N], N >= {len(slots)}",
                remedy="Make it as long as the largest batch.",
            )
        for slot in named:
            if slot in self._staged:
                self._hand_over(slot, *self._staged.pop(slot))
        numbers = [PADDING if slot is None else slot for slot in slots]
        if out is None:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)
        numbers += [PADDING] * (out.shape[0] - len(numbers))
        return out.copy_(torch.tensor(numbers, dtype=torch.int32))

    def _hand_over(self, slot: int, exact: Mapping[str, Tensor], seen: int) -> None:
        for name, state in self._states.items():
            assert state.heads is not None
            one = QuantizedState(state.policy, site_id=state.site_id, call=state.call)
            one.stage(exact[name].unsqueeze(0), seen=seen)
            if state.sequence_ids is not None:
                one.sequence_ids = state.sequence_ids[slot : slot + 1]
            one.hand_over(state.heads, state.rule)
            _put(one, state, slot)

    def copy(self, source: int, target: int) -> None:
        """`target` goes on from where `source` is: a shared prefix, a beam. It keeps its own name in random rounding.

        Raises:
            StateError: no live slots, or drafts wait to be accepted.
        """
        self._live(source, target)
        at = torch.tensor([source], device=self.device)
        rows = [state.index_select(0, at) for state in self._states.values()]  # refused while drafts wait
        for row, state in zip(rows, self._states.values(), strict=True):
            _put(row, state, target)
        if source in self._staged:
            self._staged[target] = self._staged[source]
        else:
            self._staged.pop(target, None)

    def snapshot(self, slot: int, *, device: torch.device | str | None = None) -> Snapshot:
        """A copy of a sequence outside the pool, on `device` if one is given.

        Raises:
            StateError: no live slot.
        """
        self._live(slot)
        at = torch.tensor([slot], device=self.device)
        where = self.device if device is None else torch.device(device)
        exact, seen = self._staged.get(slot, ({}, 0))
        rows = {name: state.index_select(0, at).to(where) for name, state in self._states.items()}
        exact = {name: x.to(where, copy=True) for name, x in exact.items()}
        return Snapshot(rows, exact, seen, self._names[slot])

    def restore(self, snapshot: Snapshot, slot: int) -> None:
        """`slot` goes on from where the snapshot was taken, as often as asked. It keeps its own name.

        Raises:
            StateError: no live slot, or a snapshot of another pool's sites.
        """
        self._live(slot)
        self._takes(snapshot)
        for name, state in self._states.items():
            state.drop_drafts(slot)
            _put(snapshot.rows[name].to(self.device), state, slot)
        self._staged.pop(slot, None)
        if snapshot.exact:
            self._staged[slot] = {n: x.to(self.device, copy=True) for n, x in snapshot.exact.items()}, snapshot.seen

    def _takes(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, Snapshot):
            raise StateError(
                "snapshot", got=type(snapshot).__name__, want="what snapshot or swap_out returned", remedy="Pass that."
            )
        if snapshot.rows.keys() != self._states.keys():
            raise StateError(
                "snapshot",
                got=f"rows of {sorted(snapshot.rows)}",
                want=f"of {sorted(self._states)}",
                remedy="Restore it to the pool it was taken from, or to one of the same model.",
            )
        for name, state in self._states.items():
            row = snapshot.rows[name]
            if (row.policy, row.heads, row.rule, row.dtype) != (state.policy, state.heads, state.rule, state.dtype):
                raise StateError(
                    "snapshot",
                    got=f"{name!r} of {row.policy!r}, {row.heads}, {row.rule!r}, {row.dtype}",
                    want=f"of {state.policy!r}, {state.heads}, {state.rule!r}, {state.dtype}",
                    remedy="Codes mean nothing under another policy: restore to a pool of the same model and recipe.",
                )

    def swap_out(self, slot: int, *, device: torch.device | str = "cpu") -> Snapshot:
        """The sequence leaves the pool for `device`; its slot is free."""
        taken = self.snapshot(slot, device=device)
        self.free(slot)
        return taken

    def swap_in(self, snapshot: Snapshot) -> int:
        """A slot in which the sequence goes on under its own name.

        Raises:
            StateError: every slot is taken, or a snapshot of another pool's sites.
        """
        self._takes(snapshot)
        slot = self.allocate(sequence_id=snapshot.sequence_id)
        self.restore(snapshot, slot)
        return slot


def _put(row: QuantizedState, state: QuantizedState, slot: int) -> None:
    """The single row of `row`, of the same policy and sizes, into a slot of `state`, all but its name."""
    held = state.held()
    for name, x in row.held().items():
        if name not in ("sequence_ids", "exact"):
            held[name][slot].copy_(x[0])
