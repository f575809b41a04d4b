"""What of a site's state is stored, in which tensors, and the way between them and a carried state.

A packed state is a dictionary of tensors `[slots, ...]`, one row a sequence, in an order that follows from the policy
alone (`names`). `pack` and `unpack` go between it and what `lc.linear_attention` carries, bit for bit: an
`EncodedState` (token), a `ReplayState` (replay, two_precision), or a Tensor (exact). What is true of those is true of
this.

    exact           `codes`, float32 `[slots, HV, K, V]`
    token           the format's (`codes`, `state_scale`, ...); with error feedback `residual`, `residual_scale`
    replay          those of the anchor; `ring_k`, `ring_u`, each with a `_scale` if its factors have one;
                    `ring_g` if there is a decay
    two_precision   `codes` of the anchor in its plain format; `read_` + the read copy's; `ring_k`, `ring_u`;
                    `ring_g` if there is a decay; `ring_v`; `ring_beta` if there is a beta

A window of one token has no ring. Scales and rings are float32, in a float64 computation float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lattn_compile import codec
from lattn_compile.carry import Call
from lattn_compile.errors import PolicyError, UnsupportedError
from lattn_compile.formats import factors as factor_codec
from lattn_compile.replay_state import ReplayState
from lattn_compile.ring import Ring
from lattn_compile.site_policy import Policy
from lattn_compile.state import EncodedState

__all__ = [
    "Carried",
    "Heads",
    "call_of",
    "compute_dtype",
    "empty",
    "handed_over",
    "heads_of",
    "names",
    "pack",
    "shapes",
    "unpack",
]

Carried = Tensor | EncodedState | ReplayState

_READ = "read_"
_SCALED = ("fp8_e4m3", "int8")  # factors that are stored with a scale


class Heads(NamedTuple):
    """The sizes of one site, and which gates it has: what a stored state's shapes follow from beside the policy.

    Attributes:
        H, HV: key and value heads. K, V: sizes of a key and of a value. decay: "none", "head" or "channel". has_beta:
            whether writes have a strength.
    """

    H: int
    HV: int
    K: int
    V: int
    decay: str = "none"
    has_beta: bool = False


def heads_of(q: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Heads:
    """Of a call's tensors `[B, T, ...]`."""
    decay = "none" if g is None else "head" if g.dim() == 3 else "channel"
    return Heads(q.shape[2], v.shape[2], q.shape[3], v.shape[3], decay, beta is not None)


def call_of(policy: Policy) -> Call:
    """A policy as constants of an op, whatever its storage.

    Raises:
        PolicyError: `Chunk`, which has no packed form. UnsupportedError: `Prefill`, or a part that is not built.
    """
    if policy.op_form == "chunk":
        raise PolicyError(
            "policy",
            got=str(policy),
            want="Token(), Replay(...), TwoPrecision(...) or Exact()",
            remedy="Inside a chunk the state is exact, so there is no packed form of it; choose another write mode.",
        )
    if policy.prefill is not None:
        raise UnsupportedError(
            "policy",
            got=f"prefill={policy.prefill!r}",
            want="prefill=None: a packed state is stepped, and its steps have no prefix",
            remedy="Drop prefill here; whoever runs the prefix takes it from the recipe.",
        )
    options = dataclasses.replace(policy, storage="emulated").op_kwargs()
    return Call(**{name: options[name] for name in Call._fields if name in options})


def names(call: Call, *, has_decay: bool, has_beta: bool) -> tuple[str, ...]:
    """The stored tensors, in the order in which the in-place ops take them."""
    if call.write == "exact":
        return ("codes",)
    if call.window is None:
        return codec.keys(call.state_format, feedback=call.feedback)
    two = call.write == "two_precision"
    if two:
        read = codec.keys(call.state_format, feedback=call.feedback)
        stored = ("codes", *(_READ + name for name in read))
    else:
        stored = codec.keys(call.state_format, feedback=call.feedback)
    if call.window == 1:
        return stored
    ring: list[str] = []
    for name in ("ring_k", "ring_u"):
        ring += [name, f"{name}_scale"] if call.factors in _SCALED else [name]
    ring += ["ring_g"] * has_decay + ["ring_v"] * two + ["ring_beta"] * (two and has_beta)
    return (*stored, *ring)


def pack(state: Carried, call: Call) -> dict[str, Tensor]:
    """The stored tensors of a carried state that was handed over, in the order of `names`; they may be its own."""
    if isinstance(state, Tensor):
        return {"codes": state}
    if isinstance(state, EncodedState):
        return dict(state.tensors)
    tensors = dict(state.anchor.tensors)
    if state.read is not None:
        tensors |= {_READ + name: x for name, x in state.read.tensors.items()}
    if state.window == 1:
        return tensors
    for name in ("ring_k", "ring_u"):
        encoded = factor_codec.encode(getattr(state.ring, name.removeprefix("ring_")), state.factors)
        tensors[name] = encoded["codes"]
        if "scale" in encoded:
            tensors[f"{name}_scale"] = encoded["scale"]
    rest = {"ring_g": state.ring.g, "ring_v": state.ring.v, "ring_beta": state.ring.beta}
    return tensors | {name: x for name, x in rest.items() if x is not None}


def unpack(
    tensors: dict[str, Tensor], call: Call, cursor: Tensor, heads: Heads, *, rule: str, position: Tensor | None = None
) -> Carried:
    """The carried state of stored tensors `[N, ...]`.

    Args:
        cursor: int32 `[N]`, as the states have it. heads: of the site. rule: of the recurrence.
        position: int64 `[N]`, tokens that each sequence has seen, where the rounding is stochastic.
    """
    if call.write == "exact":
        return tensors["codes"]
    shape, dtype = (heads.K, heads.V), compute_dtype(tensors)

    def encoded(prefix: str, state_format: str, **options: str | None) -> EncodedState:
        keys = codec.keys(state_format, feedback=options.get("feedback"))
        own = {name: tensors[prefix + name] for name in keys}
        # A token state that is stored was handed over; the cursor says the same of each sequence.
        return EncodedState(state_format, own, cursor, None, None, None, shape, dtype, position=position, **options)

    rounding = {"feedback": call.feedback, "rotation": call.rotation}
    if call.window is None:
        return encoded("", call.state_format, **rounding)
    two = call.write == "two_precision"
    anchor = encoded("", call.anchor or "fp32") if two else encoded("", call.state_format, **rounding)
    read = encoded(_READ, call.state_format, **rounding) if two else None
    ring = _ring(tensors, call, cursor, heads, dtype)
    return ReplayState(call.write, call.window, anchor, ring, cursor, read, call.factors, rule)


def _ring(tensors: dict[str, Tensor], call: Call, cursor: Tensor, heads: Heads, dtype: torch.dtype) -> Ring:
    if call.window == 1:
        return _no_records(call, cursor, heads, dtype)

    def factor(name: str) -> Tensor:
        encoded = {"codes": tensors[name]}
        if f"{name}_scale" in tensors:
            encoded["scale"] = tensors[f"{name}_scale"]
        return factor_codec.decode(encoded, call.factors).to(dtype)

    rest = (tensors.get(name) for name in ("ring_g", "ring_v", "ring_beta"))
    return Ring(factor("ring_k"), factor("ring_u"), *rest)


def _no_records(call: Call, cursor: Tensor, heads: Heads, dtype: torch.dtype) -> Ring:
    """An empty ring, `[N, W - 1, ...]` zeros, of the call's own parts."""
    assert call.window is not None
    two = call.write == "two_precision"
    sizes = {
        "k": (heads.H, heads.K),
        "u": (heads.HV, heads.V),
        "g": {"none": None, "head": (heads.HV,), "channel": (heads.HV, heads.K)}[heads.decay],
        "v": (heads.HV, heads.V) if two else None,
        "beta": (heads.HV,) if two and heads.has_beta else None,
    }
    lead = (cursor.shape[0], call.window - 1)
    made = {
        name: None if size is None else torch.zeros(*lead, *size, dtype=dtype, device=cursor.device)
        for name, size in sizes.items()
    }
    return Ring(**made)  # type: ignore[arg-type]


def handed_over(
    exact: Tensor,
    call: Call,
    heads: Heads,
    *,
    rule: str,
    site_id: int = 0,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is stored of exact states `[N, HV, K, V]` just before their first suffix token (semantics §4).

    Args:
        position, sequence_ids: int64 `[N]`, of that token; where the rounding is stochastic.
    """
    exact = exact if exact.dtype is torch.float64 else exact.float()
    if call.write == "exact":
        return {"codes": exact.clone()}
    options = call.rounding_options()
    if call.rounding == "stochastic":
        options |= {"site_id": site_id, "position": None if position is None else position - 1}
        options["sequence_ids"] = sequence_ids
    if call.write != "two_precision":
        stored = codec.encode_tensors(exact, call.state_format, **options)
    else:
        anchor = call.anchor or "fp32"
        stored = codec.encode_tensors(exact, anchor)
        read = codec.encode_tensors(codec.qdq(exact, anchor), call.state_format, **options)
        stored |= {_READ + name: x for name, x in read.items()}
    if call.window is None or call.window == 1:
        return stored
    cursor = torch.zeros(exact.shape[0], dtype=torch.int32, device=exact.device)
    shell = EncodedState(call.state_format, {}, cursor)
    ring = _no_records(call, cursor, heads, exact.dtype)
    return stored | pack(ReplayState(call.write, call.window, shell, ring, cursor, None, call.factors, rule), call)


def empty(
    call: Call,
    heads: Heads,
    slots: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    v_first: bool = False,
) -> dict[str, Tensor]:
    """Zeros for `slots` sequences. They are never read: a slot without a state is read by nobody.

    Args:
        v_first: codes lie in memory as `[slots, HV, V, K]`; their shape is `[slots, HV, K, V]` all the same.
    """
    made = {}
    for name, (kind, size) in shapes(call, heads, dtype).items():
        if v_first and name.endswith("codes"):
            *lead, rows, columns = size
            made[name] = torch.zeros(slots, *lead, columns, rows, dtype=kind, device=device).transpose(-1, -2)
        else:
            made[name] = torch.zeros(slots, *size, dtype=kind, device=device)
    return made


def shapes(
    call: Call, heads: Heads, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of what one sequence's row of each stored tensor is; `dtype` is the arithmetic's."""
    return _shapes(call._replace(rounding="nearest", seed=0), heads, dtype)


@functools.lru_cache(maxsize=256)
def _shapes(call: Call, heads: Heads, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    # Asked of the codecs themselves, of a state without data.
    one = torch.zeros(1, heads.HV, heads.K, heads.V, dtype=dtype, device="meta")
    made = handed_over(one, call, heads, rule="delta")
    return {name: (x.dtype, tuple(x.shape[1:])) for name, x in made.items()}


def compute_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """Float64 if any scale, code or record is, else float32."""
    return torch.float64 if any(x.dtype is torch.float64 for x in tensors.values()) else torch.float32
