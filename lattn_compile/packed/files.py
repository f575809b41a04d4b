"""Packed states in a safetensors file: codes and scales as they are stored, and what they mean beside them.

A file holds the states of several sites by name, `{"model.layers.0.linear_attn": state, ...}`. The tensors are
`name/tensor`; the metadata has, for each state, its policy, sizes and order of tensors as JSON, with a version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import FileFormatError, StateError, UnsupportedError
from lattn_compile.packed.layout import Heads
from lattn_compile.packed.state import QuantizedState
from lattn_compile.site_policy import Policy

__all__ = ["VERSION", "load_states", "save_states"]

VERSION = 1
_KEY = "lattn_compile.states"


def save_states(states: Mapping[str, QuantizedState], path: str | os.PathLike[str]) -> None:
    """Writes states, in the middle of a window too.

    Raises:
        StateError: no packed states by name, or drafts wait to be accepted. UnsupportedError: safetensors is not
        installed.
    """
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    if not isinstance(states, Mapping):
        raise StateError(
            "states", got=type(states).__name__, want="QuantizedStates by name", remedy="{site: pool[site], ...}."
        )
    for name, state in states.items():
        if not isinstance(state, QuantizedState):
            raise StateError(
                f"states[{name!r}]",
                got=type(state).__name__,
                want="a QuantizedState",
                remedy="torch.save keeps an EncodedState, a ReplayState or a tensor.",
            )
        if state.draft is not None:
            raise StateError(
                "states", got=f"{name} with drafts that wait", want="accept() first", remedy="accept(0) drops them."
            )
        held = state.held()
        about[name] = {
            "policy": state.policy.to_dict(),
            "site_id": state.site_id,
            "rule": state.rule,
            "repeats": state.repeats,
            "heads": None if state.heads is None else list(state.heads),
            "tensors": list(held),
        }
        tensors |= {f"{name}/{key}": x.contiguous().cpu() for key, x in held.items()}
    _safetensors().save_file(tensors, os.fspath(path), {_KEY: json.dumps({"version": VERSION, "states": about})})


def load_states(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, QuantizedState]:
    """What `save_states` wrote.

    Raises:
        FileFormatError: no such file, no states in it, or those of a newer version. UnsupportedError: safetensors is
        not installed.
    """
    file = Path(path)
    try:
        with _safetensors(whole=True).safe_open(file, framework="pt", device=str(device)) as opened:
            about = json.loads((opened.metadata() or {}).get(_KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_states(file, f"which cannot be read ({str(error).splitlines()[0]})") from error
    except Exception as error:  # safetensors has an exception class of its own
        raise _no_states(file, f"which is no safetensors file ({error})") from error
    if not isinstance(about, dict) or about.get("version") != VERSION:
        what = "without states" if not isinstance(about, dict) else f"of version {about.get('version')!r}"
        raise _no_states(file, what)
    states: dict[str, QuantizedState] = {}
    for name, one in about["states"].items():
        state = QuantizedState(Policy.from_dict(one["policy"]), site_id=one["site_id"])
        state.rule, state.heads = one["rule"], None if one["heads"] is None else Heads(*one["heads"])
        state.repeats = one.get("repeats", 1)
        missing = [key for key in one["tensors"] if f"{name}/{key}" not in tensors]
        if missing:
            raise _no_states(file, f"without {name}/{missing[0]}")
        states[name] = state.like({key: tensors[f"{name}/{key}"] for key in one["tensors"]})
    return states


def _no_states(file: Path, why: str) -> FileFormatError:
    return FileFormatError(
        "path",
        got=f"{str(file)!r}, {why}",
        want=f"a file of save_states, version {VERSION}",
        remedy="Save the states again with this version.",
    )


def _safetensors(*, whole: bool = False) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError(
            "path",
            got="a .safetensors file, and safetensors is not installed",
            want="safetensors",
            remedy="Install it with: pip install safetensors",
        ) from error
    return safetensors if whole else safetensors.torch
