"""Which slots a call's sequences live in: reading their rows, and writing back those that had a token.

A padding sequence has no slot; a fresh one has a slot whose content is somebody else's past. Neither's row is read:
what they start from is zeros, made here. So NaN and rubbish in a free slot reach nobody.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, SequenceError, StateError
from lattn_compile.ops.validate import INTEGERS

__all__ = ["Rows", "check_rows"]


def check_rows(cursor: Tensor, state_indices: Tensor | None, has_initial_state: Tensor | None, sequences: int) -> None:
    """Shapes and dtypes; values are looked at when the op runs.

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


@dataclasses.dataclass(frozen=True)
class Rows:
    """The sequences of one call, and their slots.

    Attributes:
        slot: int64 `[N]`, 0 for padding. live: bool `[N]`, not padding. stored: bool `[N]`, live and not fresh: its
            slot holds a state of its own.
    """

    slot: Tensor
    live: Tensor
    stored: Tensor

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
            StateError: a slot that there is not, or one slot for two sequences.
        """
        device = cursor.device
        if state_indices is None:
            slot = torch.arange(sequences, device=device)
            live = torch.ones(sequences, dtype=torch.bool, device=device)
        else:
            given = state_indices.to(device=device, dtype=torch.int64)
            live = (given != padding_slot) & (given != -1)
            _check_slots(given[live], cursor.shape[0], padding_slot)
            slot = torch.where(live, given, 0)
        stored = live if has_initial_state is None else live & has_initial_state.to(device)
        if cursor.shape[0]:
            stored = stored & (cursor[slot] >= 0)
        return Rows(slot, live, stored)

    def read(self, x: Tensor) -> Tensor:
        """The rows `[N, ...]` of `x [slots, ...]`, new memory; zeros where nothing is stored."""
        out = x.new_zeros(self.slot.shape[0], *x.shape[1:])
        rows = self.stored.nonzero().squeeze(1)
        if rows.numel():
            _bytes(out).index_copy_(0, rows, _bytes(x).index_select(0, self.slot[rows]))
        return out

    def write(self, x: Tensor, values: Tensor, rows: Tensor) -> None:
        """`values [N, ...]` of the sequences `rows` (bool `[N]`) to their slots of `x [slots, ...]`, in place."""
        rows = (rows & self.live).nonzero().squeeze(1)
        if rows.numel():
            _bytes(x).index_copy_(0, self.slot[rows], _bytes(values.to(x.dtype)).index_select(0, rows))


def _check_slots(slots: Tensor, count: int, padding_slot: int) -> None:
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


def _bytes(x: Tensor) -> Tensor:
    """Torch has no indexing of 8-bit floats on every device; their bytes it has."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
