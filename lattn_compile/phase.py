"""Which tokens of a call are prefix (exact prefill) and which are suffix (the write mode): semantics §4.

A model's layers do not pass lengths down to their recurrence, so the phase is ambient: `training_phase` sets it around
a training step, `current` reads it where a recurrence is called. It is process-global, not a context variable: autograd
runs backwards (and activation checkpoints recompute forwards) on threads of its own, which must see it as well.

Lengths are tensors, new ones at every entry. Dynamo reads them as module globals and so makes them inputs of the
compiled graph: other values do not recompile, and a graph's backward keeps the tensors of its own forward. An
activation checkpoint computes its forward again in the backward: `bound` gives it the phase that the forward had.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lattn_compile.errors import DtypeError, LattnWarning, SequenceError, UnsupportedError
from lattn_compile.refusal import refuse

__all__ = [
    "Lengths",
    "as_identity",
    "as_lengths",
    "bound",
    "current",
    "current_identity",
    "kind",
    "note_read",
    "training_phase",
]

NAMES = ("prefix_lengths", "sequence_lengths", "position", "sequence_ids")
"""What a phase says, as the ops' arguments are named, in the order of `current()` and `current_identity()`."""

Lengths = int | Sequence[int] | Tensor
"""An int for every sequence, or one length a sequence as a list or an int tensor `[N]`; a scalar tensor is an int."""

# What Dynamo reads has to be a global each.
_prefix: Tensor | None = None
_sequence: Tensor | None = None
_position: Tensor | None = None
_sequence_ids: Tensor | None = None
_kind: str = ""
_owner: int | None = None

_reads = 0
"""How often something has computed under a phase: what does not grow inside one had no part in it."""

_local = threading.local()
"""`guest`: whether this thread recomputes what another thread computed, and may enter phases as that one did."""

_guests: list[int] = []
_COUNT = threading.Lock()

KIND = "_kind"
"""Name of the global that `kind` returns, for a guard."""

_SWITCH = threading.RLock()
"""Held while the phase changes, and by a recompute that has put the phase of its forward in the place of another."""

_INSIDE = (
    "lc.training_phase must be entered outside the compiled region: its lengths are inputs of the compiled graph. "
    "Put the `with` around the call of the compiled function."
)

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class _State(NamedTuple):
    """The whole ambient state."""

    prefix: Tensor | None = None
    sequence: Tensor | None = None
    position: Tensor | None = None
    sequence_ids: Tensor | None = None
    owner: int | None = None

    def same(self, other: _State) -> bool:
        """Whether both are of one entry of one phase, or of none."""
        return all(a is b for a, b in zip(self[:-1], other[:-1], strict=True))


def as_lengths(name: str, lengths: Lengths | None) -> Tensor | None:
    """`lengths` as a new int32 tensor, `[]` or `[N]`; a tensor keeps its device.

    Raises:
        DtypeError, SequenceError: not whole numbers, negative (looked at on CPUs only), or not `[]` or `[N]`.
    """
    return None if lengths is None else _whole_numbers(name, lengths, torch.int32, "Lengths count tokens.", least=0)


def as_identity(name: str, numbers: Lengths | None) -> Tensor | None:
    """`position` (absolute position of the first token, >= 0) or `sequence_ids` (any int64, one a sequence) as a new
    int64 tensor, `[]` (positions only) or `[N]`; a tensor keeps its device. They key the stochastic rounding.

    Raises:
        DtypeError, SequenceError: not whole numbers, a negative position, or another shape.
    """
    if numbers is None:
        return None
    if name == "position":
        return _whole_numbers(name, numbers, torch.int64, "It counts tokens before this call.", least=0)
    remedy = "One int a sequence: the same for the same sequence in whatever batch it is."
    ids = _whole_numbers(name, numbers, torch.int64, remedy, least=None)
    if ids.dim() == 0:
        raise SequenceError(name, got="one number", want="[N], one a sequence", remedy=remedy)
    return ids


def _whole_numbers(name: str, numbers: Any, dtype: torch.dtype, remedy: str, *, least: int | None) -> Tensor:
    if isinstance(numbers, Tensor):
        _check_tensor(name, numbers, remedy, least)
        return numbers.detach().to(dtype, copy=True)
    single = isinstance(numbers, int)
    items = [numbers] if single else numbers
    if not isinstance(items, (list, tuple)) or not all(isinstance(n, int) and not isinstance(n, bool) for n in items):
        refuse("dtype", name, repr(numbers), "an int, a list of ints or an int tensor", remedy)
    what = "lengths" if dtype is torch.int32 else "numbers"
    if not items or (least is not None and min(items) < least):
        limit = "" if least is None else f" >= {least}"
        refuse("sequence", name, repr(numbers), f"{what}{limit}: one for all, or one a sequence", remedy)
    if not all(-(2 ** (8 * dtype.itemsize - 1)) <= n < 2 ** (8 * dtype.itemsize - 1) for n in items):
        refuse("sequence", name, repr(numbers), f"{what} that fit {dtype}", remedy)
    # On the CPU whatever torch.set_default_device says: ops take lengths from there on every device.
    return torch.tensor(items[0] if single else items, dtype=dtype, device="cpu")


def _check_tensor(name: str, numbers: Tensor, remedy: str, least: int | None) -> None:
    if numbers.dtype not in _INTEGERS:
        refuse("dtype", name, str(numbers.dtype), "an int tensor", remedy)
    if numbers.dim() > 1 or (numbers.dim() == 1 and numbers.shape[0] == 0):
        refuse("sequence", name, f"shape {list(numbers.shape)}", "[] or [N]", "Give one, or one a sequence.")
    if least is None or torch.compiler.is_compiling() or numbers.device.type != "cpu":
        return  # reading values would wait for the device; the op clamps, and on a CPU it checks them itself
    if bool((numbers < least).any()):
        what = "lengths" if name.endswith("lengths") else "numbers"
        raise SequenceError(name, got=str(numbers.tolist()), want=f"{what} >= {least}", remedy=remedy)


class training_phase:
    """`with lc.training_phase(prefix_lengths, sequence_lengths=None):` around a training step.

    Args:
        prefix_lengths: the first p tokens of a sequence are exact prefill, no state quantization; the others are in the
            policy's write mode. One for all (an int, a scalar tensor), clamped to each sequence; or one a sequence (a
            list, an int tensor), not clamped.
        sequence_lengths: the real length n of right-padded sequences, one for all or one a sequence; not clamped: more
            than a sequence's tokens is refused. Tokens behind it vanish. None: all are real.
        sequence_ids: a caller's own number for each sequence, `[N]`, any int64; None: 0. position: absolute position of
            the first token, an int, a list or an int tensor, one a sequence; None: 0. Both key stochastic rounding
            only. Give a sequence the same id in every step in which it shall meet the same random bits.

    New values do not recompile; a new kind (an int where a list was, another number of sequences) may. Enter outside
    the compiled region. A backward uses the phase of its own forward, wherever it runs: compiled graphs and the ops
    keep their lengths, and `torch.utils.checkpoint` recomputes under the phase of the forward. (An implementation of
    activation checkpoints of another library does not: stay inside the `with` for its backward.) Nested phases restore
    the outer one. A phase in which nothing read the lengths, as a model that is not compiled does not, warns when it
    ends: nothing was rounded in it.

    Raises:
        DtypeError, SequenceError: lengths that are not lengths, or a prefix of a list longer than its sequence. What
            only a call can know, from that call: another number of sequences, and lengths beyond its tokens (those of
            tensors on other devices than the CPU are clamped: looking at them would wait).
        UnsupportedError: entered inside a compiled region, or while another thread's phase is active; or left while
            another phase than this one is active, as coroutines and generators do that take turns inside of theirs.
    """

    def __init__(
        self,
        prefix_lengths: Lengths,
        sequence_lengths: Lengths | None = None,
        *,
        sequence_ids: Sequence[int] | Tensor | None = None,
        position: Lengths | None = None,
    ) -> None:
        self._given = (prefix_lengths, sequence_lengths, position, sequence_ids)
        self._outer: list[tuple[_State, bool, _State, int]] = []

    def __enter__(self) -> training_phase:
        if torch.compiler.is_compiling():
            _refuse_inside()
        given = self._given
        prefix, sequence = as_lengths("prefix_lengths", given[0]), as_lengths("sequence_lengths", given[1])
        if prefix is None:
            raise DtypeError(
                "prefix_lengths", got="None", want="an int, a list of ints or an int tensor", remedy="0 is no prefix."
            )
        position, ids = as_identity("position", given[2]), as_identity("sequence_ids", given[3])
        _check_counts(
            {"prefix_lengths": prefix, "sequence_lengths": sequence, "position": position, "sequence_ids": ids}
        )
        _check_pair(prefix, sequence)
        with _SWITCH:
            guest = _owner not in (None, threading.get_ident())
            if guest and (not getattr(_local, "guest", False) or len(set(_guests)) > 1):
                raise UnsupportedError(
                    "training_phase",
                    got="a second thread, while another thread's phase is active",
                    want="one training step at a time in a process",
                    remedy="Train in separate processes: the phase is shared with autograd's threads.",
                )
            if guest:
                _SWITCH.acquire()  # until it has left the phase again: no other recompute may begin in it
            mine = _State(prefix, sequence, position, ids, threading.get_ident())
            self._outer.append((_ambient(), guest, mine, _reads))
            _put(mine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer, guest, mine, reads = self._outer.pop()
        with _SWITCH:
            in_turn = _ambient().same(mine)
            # Out of turn nobody knows which phase is whose any more: none is left behind.
            _put(outer if in_turn else _State())
        if guest:
            _SWITCH.release()
        if error is not None:
            return
        if not in_turn:
            raise UnsupportedError(
                "training_phase",
                got="an exit while another phase is active, or none",
                want="phases that end in the reverse order of their beginnings",
                remedy="The phase is one for the process: coroutines and generators that take turns inside of theirs "
                "see each other's lengths. Let one leave its phase before another enters.",
            )
        if reads == _reads:
            warnings.warn(
                "lc.training_phase: nothing that ran in this phase read its lengths, so no state was rounded in it. "
                'A model that is not compiled computes exactly: model.compile(backend="lattn_compile", ...), or call '
                "lc.linear_attention with a policy.",
                LattnWarning,
                stacklevel=2,
            )


def _ambient() -> _State:
    return _State(_prefix, _sequence, _position, _sequence_ids, _owner)


def _put(state: _State) -> None:
    global _prefix, _sequence, _position, _sequence_ids, _owner, _kind
    _prefix, _sequence, _position, _sequence_ids, _owner = state
    _kind = _kind_of(state)


def _kind_of(state: _State) -> str:
    if state.prefix is None:
        return ""
    return " ".join("-" if x is None else f"{'N' if x.dim() else '1'}@{x.device}" for x in state[:-1])


@torch.compiler.disable(reason=_INSIDE)
def _refuse_inside() -> NoReturn:
    # Not traced: under fullgraph=True Dynamo reports the reason, otherwise it breaks the graph and this raises.
    raise UnsupportedError(
        "training_phase", got="an entry inside a compiled region", want="one outside of it", remedy=_INSIDE
    )


def _check_counts(given: dict[str, Tensor | None]) -> None:
    """All that have one number a sequence have as many."""
    counts = {name: x.shape[0] for name, x in given.items() if x is not None and x.dim() == 1}
    for name, count in counts.items():
        first = next(iter(counts))
        if count != counts[first]:
            what = "lengths" if name.endswith("lengths") else "numbers"
            raise SequenceError(
                name,
                got=f"{count} {what}",
                want=f"{counts[first]}, as many as {first}",
                remedy="Give one a sequence in both.",
            )


def _check_pair(prefix: Tensor, sequence: Tensor | None) -> None:
    if sequence is None or prefix.dim() == 0 or not prefix.device.type == sequence.device.type == "cpu":
        return
    if bool((prefix > sequence).any()):
        raise SequenceError(
            "prefix_lengths",
            got=str(prefix.tolist()),
            want=f"at most sequence_lengths = {sequence.tolist()}",
            remedy="A prefix is the exact part of its own sequence. Lists are not clamped; one int for all is.",
        )


def current() -> tuple[Tensor | None, Tensor | None]:
    """`(prefix_lengths, sequence_lengths)` of the active phase, int32 `[]` or `[N]` each, None where there is none.

    Readable while Dynamo traces: the tensors become inputs of the graph.
    """
    if not torch.compiler.is_compiling():
        note_read()
    return _prefix, _sequence


def note_read() -> None:
    """Something computes under the phase that is active now."""
    global _reads
    _reads += 1


def current_identity() -> tuple[Tensor | None, Tensor | None]:
    """`(position, sequence_ids)` of the active phase, int64 `[]` or `[N]`, and `[N]`; None where nothing is said.

    Readable while Dynamo traces, as `current`.
    """
    return _position, _sequence_ids


def kind() -> str:
    """What a graph that was compiled for the active phase serves: which of its four tensors are there, with one number
    for all sequences or one each, and on which device. "" without a phase."""
    return _kind


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be run under the phase that is active now (or under none), wherever and whenever it is called.

    Where that is another phase than the active one, all threads see it meanwhile: no forward may run beside it.
    """
    mine, home = _ambient(), threading.get_ident()

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _ambient().same(mine):
            with _restored(mine):
                return function(*args, **kwargs)
        if threading.get_ident() == home:
            return function(*args, **kwargs)
        with _guest():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _guest() -> Iterator[None]:
    """While one of autograd's threads recomputes under the phase that is active anyway. Several may at the same time,
    and do not wait for one another: one's backward may need the other."""
    before = getattr(_local, "guest", False)
    _local.guest = True
    with _COUNT:
        _guests.append(threading.get_ident())
    try:
        yield
    finally:
        with _COUNT:
            _guests.remove(threading.get_ident())
        _local.guest = before


@contextlib.contextmanager
def _restored(state: _State) -> Iterator[None]:
    with _SWITCH:
        outer = _ambient()
        # The recomputing thread owns it: what is recomputed may enter a phase of its own, as it did in the forward.
        _put(state._replace(owner=None if state.prefix is None else threading.get_ident()))
        try:
            yield
        finally:
            _put(outer)


@functools.cache
def _watch_checkpoints() -> None:
    # By name, as kernels are: this file stands below the one that knows torch's private side.
    importlib.import_module("lattn_compile.lowering._torch_checkpoint").recompute_under(bound)


_watch_checkpoints()
