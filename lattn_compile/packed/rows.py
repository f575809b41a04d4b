"""Which slots a call's sequences live in: reading their rows, and writing back those that had a token.

A padding sequence has no slot; a fresh one has a slot whose content is somebody else's past. Neither's row is read:
what they start from is zeros, made here. So NaN and rubbish in a free slot reach nobody.

Nothing here waits for a device or has a size that depends on values, so a CUDA graph can record it. Slots are looked
at, and refused, where they lie on a CPU. Elsewhere nobody looks: a sequence whose slot there is not has NaN for outputs
and writes nothing, and two sequences in one slot leave the state of one of them there, or a mixture.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, SequenceError, StateError
from lattn_compile.ops.arguments import check_device
from lattn_compile.ops.validate import INTEGERS

__all__ = ["Rows", "Writer", "check_rows", "check_slots"]


def check_rows(
    device: torch.device,
    cursor: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    sequences: int,
) -> None:
    """Shapes, dtypes and devices; values are looked at when the op runs.

    Raises:
        DtypeError, SequenceError, StateError: naming the argument.
    """
    if cursor.dtype is not torch.int32 or cursor.dim() != 1:
        raise StateError(
            "cursor",
            got=f"{cursor.dtype} {list(cursor.shape)}",
            want="int32 [slots]",
            remedy="It is one of the tensors of a packed state: pass them together.",
        )
    if cursor.device != device:
        raise DtypeError(
            "cursor",
            got=str(cursor.device),
            want=f"q's device {device}",
            remedy="Move the whole state: state.to(device).",
        )
    if state_indices is None and cursor.shape[0] != sequences:
        raise SequenceError(
            "state_indices",
            got=f"None beside {cursor.shape[0]} slots",
            want=f"[N] = [{sequences}] slots, one a sequence",
            remedy="Say which slot each sequence lives in, or hold one slot a sequence.",
        )
    for name, x, dtypes in (
        ("state_indices", state_indices, INTEGERS),
        ("has_initial_state", has_initial_state, (torch.bool,)),
    ):
        if x is None:
            continue
        if x.dtype not in dtypes:
            want = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise DtypeError(name, got=str(x.dtype), want=want, remedy="One a sequence.")
        if x.dim() != 1 or x.shape[0] != sequences:
            raise SequenceError(
                name, got=str(list(x.shape)), want=f"[N] = [{sequences}], one a sequence", remedy="Give one a sequence."
            )
        check_device(name, x, device)


def check_slots(state_indices: Tensor | None, count: int, padding_slot: int) -> None:
    """Where they lie on a CPU, whether every sequence that is not padding has a slot of its own among `count`.

    Raises:
        StateError: a slot that there is not, or one slot for two sequences.
    """
    if state_indices is None or state_indices.device.type != "cpu":
        return
    slots = state_indices[(state_indices != padding_slot) & (state_indices != -1)]
    if bool(((slots < 0) | (slots >= count)).any()):
        raise StateError(
            "state_indices",
            got=str(slots.tolist()),
            want=f"slots 0 to {count - 1}, or {padding_slot} for padding",
            remedy="Allocate the sequence a slot first.",
        )
    if slots.unique().numel() != slots.numel():
        raise StateError(
            "state_indices",
            got=str(slots.tolist()),
            want="a slot of its own for each sequence",
            remedy="Two sequences that share a past need a copy of it each: copy the slot.",
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The sequences of one call, and their slots.

    Attributes:
        slot: int64 `[N]`, 0 for padding. live: bool `[N]`, it has a slot. stored: bool `[N]`, live and not fresh: its
            slot holds a state of its own. lost: bool `[N]`, neither live nor padding.
    """

    slot: Tensor
    live: Tensor
    stored: Tensor
    lost: Tensor

    @staticmethod
    def of(
        cursor: Tensor,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
        sequences: int,
        padding_slot: int,
    ) -> Rows:
        """
        Raises:
            StateError: where the indices lie on a CPU: no such slot, or one slot for two sequences.
        """
        count, device = cursor.shape[0], cursor.device
        if state_indices is None:
            slot = torch.arange(sequences, device=device)
            live = torch.ones(sequences, dtype=torch.bool, device=device)
            lost = ~live
        else:
            check_slots(state_indices, count, padding_slot)
            given = state_indices.to(device=device, dtype=torch.int64)
            named = (given != padding_slot) & (given != -1)
            live = named & (given >= 0) & (given < count)
            slot = torch.where(live, given, 0)
            lost = named & ~live
        stored = live if has_initial_state is None else live & has_initial_state.to(device)
        if count:
            stored = stored & (cursor.index_select(0, slot) >= 0)
        return Rows(slot, live, stored, lost)

    def read(self, x: Tensor, otherwise: int = 0) -> Tensor:
        """The rows `[N, ...]` of `x [slots, ...]`, new memory; `otherwise` where nothing is stored."""
        if not x.shape[0]:
            return x.new_full((self.slot.shape[0], *x.shape[1:]), otherwise)
        rows = _bytes(x).index_select(0, self.slot)
        # 0 is all bytes 0 in every dtype; another number is asked for of ints only.
        kept = torch.where(self.stored.view(-1, *(1,) * (x.dim() - 1)), rows, otherwise)
        return kept.view(x.dtype)

    def writer(self, rows: Tensor) -> Writer:
        """Writes the slots of the sequences `rows` (bool `[N]`)."""
        rows = rows & self.live
        number = torch.arange(rows.shape[0], device=rows.device)
        # Of a sequence that is not written, the number of one that is: to write that one twice changes nothing.
        source = torch.where(rows, number, rows.to(torch.uint8).argmax(0)) if rows.shape[0] else number
        some = rows.any()
        return Writer(source, torch.where(some, self.slot.index_select(0, source), 0), some)


class Writer(NamedTuple):
    """Which sequence's value is written to which slot.

    Attributes:
        source, slot: int64 `[N]`. A slot may be named twice, with one source. some: bool `[]`, whether any is written.
    """

    source: Tensor
    slot: Tensor
    some: Tensor

    def write(self, x: Tensor, values: Tensor) -> None:
        """`values [N, ...]` to `x [slots, ...]`, in place."""
        if not x.shape[0] or not self.source.shape[0]:
            return
        old, new = _bytes(x), _bytes(values.to(x.dtype)).index_select(0, self.source)
        # If none is written, slot 0 is, with what it holds.
        old.index_copy_(0, self.slot, torch.where(self.some, new, old[:1]))


def _bytes(x: Tensor) -> Tensor:
    """Torch has no indexing of 8-bit floats on every device; their bytes it has."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
