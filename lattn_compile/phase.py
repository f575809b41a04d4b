"""Which tokens of a call are prefix (exact prefill) and which are suffix (the write mode): semantics §4.

A model's layers do not pass lengths down to their recurrence, so the phase is ambient: `training_phase` sets it around
a training step, `current` reads it where a recurrence is called. It is process-global, not a context variable: autograd
runs backwards (and activation checkpoints recompute forwards) on threads of its own, which must see it as well.

Lengths are tensors, new ones at every entry. Dynamo reads them as module globals and so makes them inputs of the
compiled graph: other values do not recompile, and a graph's backward keeps the tensors of its own forward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, SequenceError, UnsupportedError

__all__ = ["Lengths", "as_lengths", "current", "training_phase"]

Lengths = int | Sequence[int] | Tensor
"""An int for every sequence, or one length a sequence as a list or an int tensor `[N]`; a scalar tensor is an int."""

_prefix: Tensor | None = None
_sequence: Tensor | None = None
_owner: int | None = None

_INSIDE = (
    "lc.training_phase must be entered outside the compiled region: its lengths are inputs of the compiled graph. "
    "Put the `with` around the call of the compiled function."
)


def as_lengths(name: str, lengths: Lengths | None) -> Tensor | None:
    """`lengths` as a new int32 tensor, `[]` or `[N]`; a tensor keeps its device.

    Raises:
        DtypeError, SequenceError: not whole numbers, negative (looked at on CPUs only), or not `[]` or `[N]`.
    """
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        _check_tensor(name, lengths)
        return lengths.detach().to(torch.int32, copy=True)
    single = isinstance(lengths, int)
    items = [lengths] if single else lengths
    if not isinstance(items, (list, tuple)) or not all(isinstance(n, int) and not isinstance(n, bool) for n in items):
        raise DtypeError(
            name, got=f"{lengths!r}", want="an int, a list of ints or an int tensor", remedy="Lengths count tokens."
        )
    if not items or min(items) < 0:
        raise SequenceError(
            name, got=f"{lengths!r}", want="lengths >= 0, one or one a sequence", remedy="Lengths count tokens."
        )
    return torch.tensor(items[0] if single else items, dtype=torch.int32)


def _check_tensor(name: str, lengths: Tensor) -> None:
    if lengths.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise DtypeError(name, got=str(lengths.dtype), want="an int tensor", remedy="Lengths count tokens.")
    if lengths.dim() > 1 or (lengths.dim() == 1 and lengths.shape[0] == 0):
        raise SequenceError(
            name, got=f"shape {list(lengths.shape)}", want="[] or [N]", remedy="Give one length, or one a sequence."
        )
    if torch.compiler.is_compiling() or lengths.device.type != "cpu":
        return  # reading values would wait for the device; the op clamps, and on a CPU it checks them itself
    if bool((lengths < 0).any()):
        raise SequenceError(name, got=str(lengths.tolist()), want="lengths >= 0", remedy="Lengths count tokens.")


class training_phase:
    """`with lc.training_phase(prefix_lengths, sequence_lengths=None):` around a training step, backward included.

    Args:
        prefix_lengths: the first p tokens of a sequence are exact prefill, no state quantization; the others are in the
            policy's write mode. An int (clamped to each sequence), a list or an int tensor, one a sequence.
        sequence_lengths: the real length n of right-padded sequences; tokens behind it vanish. None: all are real.

    New values do not recompile; a new kind (an int where a list was, another number of sequences) may. Enter outside
    the compiled region, and stay inside for the backward: a checkpointed layer reads the phase again when it is
    recomputed. Nested phases restore the outer one.

    Raises:
        DtypeError, SequenceError: lengths that are not lengths, or a prefix longer than its sequence.
        UnsupportedError: entered inside a compiled region, or while another thread's phase is active.
    """

    def __init__(self, prefix_lengths: Lengths, sequence_lengths: Lengths | None = None) -> None:
        self._lengths = (prefix_lengths, sequence_lengths)
        self._outer: list[tuple[Tensor | None, Tensor | None, int | None]] = []

    def __enter__(self) -> training_phase:
        if torch.compiler.is_compiling():
            _refuse_inside()
        prefix = as_lengths("prefix_lengths", self._lengths[0])
        sequence = as_lengths("sequence_lengths", self._lengths[1])
        if prefix is None:
            raise DtypeError(
                "prefix_lengths", got="None", want="an int, a list of ints or an int tensor", remedy="0 is no prefix."
            )
        _check_pair(prefix, sequence)
        global _prefix, _sequence, _owner
        if _owner not in (None, threading.get_ident()):
            raise UnsupportedError(
                "training_phase",
                got="a second thread, while another thread's phase is active",
                want="one training step at a time in a process",
                remedy="Train in separate processes: the phase is shared with autograd's threads.",
            )
        self._outer.append((_prefix, _sequence, _owner))
        _prefix, _sequence, _owner = prefix, sequence, threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _prefix, _sequence, _owner
        _prefix, _sequence, _owner = self._outer.pop()


@torch.compiler.disable(reason=_INSIDE)
def _refuse_inside() -> NoReturn:
    # Not traced: under fullgraph=True Dynamo reports the reason, otherwise it breaks the graph and this raises.
    raise UnsupportedError(
        "training_phase", got="an entry inside a compiled region", want="one outside of it", remedy=_INSIDE
    )


def _check_pair(prefix: Tensor, sequence: Tensor | None) -> None:
    if sequence is None:
        return
    if prefix.dim() == sequence.dim() == 1 and prefix.shape != sequence.shape:
        raise SequenceError(
            "sequence_lengths",
            got=f"{sequence.shape[0]} lengths",
            want=f"{prefix.shape[0]}, as many as prefix_lengths",
            remedy="Give one length a sequence in both.",
        )
    if prefix.dim() == 1 and prefix.device.type == sequence.device.type == "cpu" and bool((prefix > sequence).any()):
        raise SequenceError(
            "prefix_lengths",
            got=str(prefix.tolist()),
            want=f"at most sequence_lengths = {sequence.tolist()}",
            remedy="A prefix is the exact part of its own sequence.",
        )


def current() -> tuple[Tensor | None, Tensor | None]:
    """`(prefix_lengths, sequence_lengths)` of the active phase, int32 `[]` or `[N]` each, None where there is none.

    Readable while Dynamo traces: the tensors become inputs of the graph.
    """
    return _prefix, _sequence
