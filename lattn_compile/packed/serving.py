"""A library's call whose initial state is a `QuantizedState`: an op on the packed tensors in the call's place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lattn_compile import phase
from lattn_compile.errors import PhaseError, StateError
from lattn_compile.packed.layout import Heads, heads_of
from lattn_compile.packed.state import QuantizedState
from lattn_compile.recurrence import Recurrence

__all__ = ["carries", "note", "noted", "refuse_call", "serve"]

_LAST = threading.local()
"""`made`, of this thread's last eager call of a library: a weak reference to its final state, and what made it."""


def carries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has a packed state among its arguments."""
    return any(isinstance(x, QuantizedState) for x in args) or any(
        isinstance(x, QuantizedState) for x in kwargs.values()
    )


def refuse_call(name: str, why: str) -> StateError:
    return StateError(
        "initial_state",
        got=f"a QuantizedState in a call of {name}, and {why}",
        want="a call that has an exact counterpart",
        remedy="Drop that option, or hold this layer's state dense.",
    )


def note(out: Any, call: Recurrence | str, rule: str) -> None:
    """Remembers what the final state of a library's eager call was made by, until the next such call."""
    final = out[1] if isinstance(out, tuple) and len(out) > 1 else None
    if isinstance(call, str) or call.state_v_first or call.normalize or not isinstance(final, Tensor):
        return
    double = any(x is not None and x.dtype is torch.float64 for x in (call.q, call.k, call.v, call.g, call.beta))
    _LAST.made = weakref.ref(final), heads_of(call.q, call.v, call.g, call.beta), rule, double


def noted(final: Tensor) -> tuple[Heads, str, bool] | None:
    """Sizes and rule of the eager call that left `final`, and whether it is computed in float64; None: not known."""
    made, *what = getattr(_LAST, "made", (None,))
    return (what[0], what[1], what[2]) if made is not None and made() is final else None


def serve(call: Recurrence, *, name: str, rule: str, form: str) -> tuple[Tensor, Any]:
    """`(o, final_state)` of one call; `form` is "recurrent" or "chunk", as the library wrote it.

    In recurrent form every token is suffix: the step is written into the packed state, which is returned as the final
    state. In chunk form, unless the state is being verified against drafts, every token is prefix (semantics §4): an
    exact prefill from what a reader sees, whose final state is a Tensor.

    Raises:
        StateError: an option that the packed state has no counterpart of. PhaseError: inside `lc.training_phase`.
    """
    state = call.initial_state
    assert isinstance(state, QuantizedState)
    if call.state_v_first or call.normalize or call.z_state is not None:
        raise refuse_call(name, "its state is value-first, or normalised")
    if phase.current()[0] is not None:
        raise PhaseError(
            "lc.training_phase",
            got="a phase around a call with a packed state",
            want="none: prefill and decode are told apart by the cache",
            remedy="Leave the phase before generating.",
        )
    inputs = (*state.once(call.q, call.k, call.v), call.v, call.g, call.beta)
    scale = call.k.shape[-1] ** -0.5 if call.scale is None else call.scale
    if form == "recurrent" or state.verifies:
        step = state.verify if state.verifies else state.step
        o = step(*inputs, rule=rule, scale=scale, use_qk_l2norm_in_kernel=call.qk_l2norm, cu_seqlens=call.cu_seqlens)
        return o, state if call.output_final_state else None
    lengths = (call.cu_seqlens, None, None, None)
    o, final = torch.ops.lattn.chunk(*inputs, state.dense(), *lengths, rule=rule, scale=scale, qk_l2norm=call.qk_l2norm)
    return o, final if call.output_final_state else None
