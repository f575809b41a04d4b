"""Which axis of which tensor of the `lattn::` ops is what, and which of them may be cut.

An axis is a letter: b batch, t tokens, h key heads, j value heads, k v channels, n sequences, s slots, w records; "."
any other. r and c are those of saved checkpoints, whose layout is the op's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lattn_compile.carry import Call
from lattn_compile.packed import layout

__all__ = ["HEADS", "OPS", "PACKED", "RAW_GATES", "SEQUENCES", "axes_of_output", "axes_of_tensors"]

SEQUENCES, HEADS = "bnsr", "hjc"
"""Axes that are cut together. Tokens and channels are what a recurrence runs through: they never are."""

PACKED = tuple(f"{name}{where}" for name in ("decode_", "replay_", "flush_") for where in ("", "device_"))
OPS = (
    *("chunk", "decode", "decode_recorded", "replay"),
    *("chunk_backward", "decode_backward", "decode_backward_recorded", "replay_backward"),
    *PACKED,
    *("encode_state", "decode_state", "qdq_state"),
)

_RING = {"ring_k": "nwhk", "ring_u": "nwjv", "ring_g": "nwj nwjk", "ring_v": "nwjv", "ring_beta": "nwj"}
_FLOATS = {"q": "bthk", "k": "bthk", "v": "btjv", "g": "btj btjk", "beta": "btj", **_RING}
RAW_GATES = ("a_log", "dt_bias")
"""Tensors among the options of a packed step."""
_COUNTS = ("prefix_lengths", "sequence_lengths", "cursor", "position", "sequence_ids", "has_initial_state")
_OUTPUTS = {"o": "btjv", "final_state": "njkv", "anchor": "njkv"}

_AXES: dict[str, str] = {
    **_FLOATS,
    **_OUTPUTS,
    **dict.fromkeys(("initial_state", "read_state", "dstate", "dread"), "njkv"),
    **dict.fromkeys((*_COUNTS, "state_indices"), "n"),
    **{f"d{name}": axes for name, axes in _FLOATS.items()},
    **{f"grad_{name}": axes for name, axes in {**_OUTPUTS, **_RING}.items()},
    "checkpoints": "rc rckv",
    **dict.fromkeys(RAW_GATES, "j jk"),
}
"""By the names in the schemas; where there are several, the number of dimensions decides."""


def _named(name: str, dims: int) -> str:
    """Of a tensor with `dims` dimensions; all "." where it is none of the kind: a scalar, or an empty placeholder."""
    return next((axes for axes in _AXES.get(name, "").split() if len(axes) == dims), "." * dims)


def _state(dims: int) -> str:
    """Of a state `[..., HV, K, V]`."""
    return "njkv"[-dims:].rjust(dims, ".")


def axes_of_tensors(op: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """The axes of every tensor among the arguments of a call; those of a list are called `name[key]`, those
    among the options come last."""
    found: dict[str, str] = {}
    raw = {name: options[name] for name in RAW_GATES if options.get(name) is not None}
    for name, x in {**arguments, **raw}.items():
        if isinstance(x, Tensor):
            if op in PACKED and name in ("cursor", "position"):
                found[name] = "s"
            else:
                found[name] = _state(x.dim()) if name == "state" else _named(name, x.dim())
        elif isinstance(x, (list, tuple)):
            found |= _stored(op, x, arguments, options) if name == "state" else _encoded(name, x)
    return found


def _encoded(name: str, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Of an encoded state: heads and sequences where the state has them, the rest is the format's."""
    lead = _state(tensors[0].dim())[:-2]
    return {f"{name}[{i}]": lead.ljust(x.dim(), ".") for i, x in enumerate(tensors)}


def _stored(
    op: str, tensors: Sequence[Tensor], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, str]:
    """Of a packed state `[slots, ...]`: rings are `[slots, records, heads, ...]`, all else `[slots, heads, ...]`."""
    if op.startswith("flush_"):
        has_decay, has_beta = options.get("decay", "none") != "none", options.get("has_beta", False)
    else:
        has_decay, has_beta = arguments["g"] is not None, arguments["beta"] is not None
    call = Call(**{name: options[name] for name in Call._fields if name in options})
    names: Sequence[str] = layout.names(call, has_decay=has_decay, has_beta=has_beta)
    if len(names) != len(tensors):  # the op says what is missing
        names = [str(i) for i in range(len(tensors))]
    heads = {
        name: "swh" if name.startswith("ring_k") else "swj" if name.startswith("ring_") else "sj" for name in names
    }
    return {f"state[{name}]": heads[name].ljust(x.dim(), ".") for name, x in zip(names, tensors, strict=True)}


def axes_of_output(op: str, name: str, x: Tensor, arguments: Mapping[str, Any]) -> str:
    """Of a tensor that the op returned, by the name in its schema."""
    if op == "encode_state":
        return _state(arguments["state"].dim())[:-2].ljust(x.dim(), ".")
    if op in ("qdq_state", "decode_state"):
        return _state(x.dim())
    return _named("o" if op in PACKED else name, x.dim())
