"""`lattn::decode_`, `lattn::replay_`, `lattn::flush_`: one step on a packed state, in place.

    decode_(q, k, v, g, beta, state, cursor, state_indices, has_initial_state, cu_seqlens, sequence_lengths,
            position, sequence_ids, *, ...) -> o
    replay_(the same) -> o
    flush_(state, cursor, state_indices, position, sequence_ids, *, ...) -> ()

q, k `[B, T, H, K]`; v, o `[B, T, HV, V]`; g `[B, T, HV]` or `[B, T, HV, K]`; beta `[B, T, HV]`; any T >= 0, every token
a suffix token. `state`: the stored tensors `[slots, ...]` in the order of `layout.names`, of any strides, in place.
cursor int32 `[slots]`, in place: -1, nothing is stored there and the sequence starts at zero; else, in token and exact
mode 0, in replay and two_precision the pending records, `0 <= cursor < window`.

N sequences, N = B or `len(cu_seqlens) - 1`. state_indices int `[N]`: their slots; -1 or `padding_slot` is padding,
whose tokens give zeros and nothing else; None: slot i is sequence i's. has_initial_state bool `[N]`: False starts at
zero, whatever the slot holds. sequence_lengths int `[N]`: tokens behind it vanish. A sequence without tokens changes
nothing. position int64 `[slots]`, in place: tokens that each sequence has seen; where the rounding is stochastic, else
None. sequence_ids int `[N]` key the stochastic rounding, 0 by default.

`flush_` writes the pending records of the slots (all, or those of state_indices) into the anchor, which is rounded as
at the end of a window; a slot without records keeps its bits.

Where `raw_gate` or `raw_beta` says so, g and beta are as projections left them (`raw_gates.py`): a_log `[HV]`, dt_bias
`[HV]` or `[HV, K]`, lower_bound, allow_neg_eigval.

`decode_device_`, `replay_device_` and `flush_device_` are the same, by Triton kernels or not at all. They read no
value, so Inductor lets a CUDA graph record them; it cuts its graphs around the others.

Values are looked at, and refused, where they lie on a CPU: slots, lengths, cursors and gates. On a device nobody waits
for them, so a CUDA graph can record a step that Triton kernels serve: a sequence whose slot there is not has NaN for
outputs and writes nothing, lengths are clamped, and two sequences in one slot are a race.

A kernel for packed rows (`dispatch.packed`) steps them where they lie. Where there is none, these ops compute nothing
themselves. They take the rows of their sequences out of the stored tensors as a carried state, run `lattn::decode` or
`lattn::replay` from it, and store what `carry.to_carry` makes of the result: what `lc.linear_attention` does under the
same policy. That is why packed and emulated have the same bits. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.carry import Call, carried, to_carry
from lattn_compile.errors import DtypeError, ShapeError, StateError, UnsupportedError, surfacing
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.ops import dispatch
from lattn_compile.ops.call import GATE_DTYPES
from lattn_compile.ops.segments import Segments, split
from lattn_compile.ops.validate import Geometry, Tensors, check_call, check_gates, check_lengths
from lattn_compile.packed import raw_gates
from lattn_compile.packed.layout import Carried, Heads, compute_dtype, names, pack, shapes, unpack
from lattn_compile.packed.rows import Rows, check_rows, check_slots

__all__ = ["FLUSH", "OPS", "OPTIONS", "advance", "checked", "define", "named"]

OPS = {"exact": "decode_", "token": "decode_", "replay": "replay_", "two_precision": "replay_"}
"""The op of each write mode that has a packed form."""

_STATE = "Tensor(a!)[] state, Tensor(b!) cursor, Tensor? state_indices"
_IDENTITY = "Tensor(c!)? position, Tensor? sequence_ids"
_STEP = (
    f"(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, {_STATE}, Tensor? has_initial_state, "
    f"Tensor? cu_seqlens, Tensor? sequence_lengths, {_IDENTITY}"
)
_POLICY = 'str write, str state_format="fp32"'
_ROUNDING = (
    'str rounding="nearest", int seed=0, str? feedback=None, str? rotation=None, int site_id=0, int padding_slot=-1'
)
OPTIONS = (
    f'str rule="delta", float scale, bool qk_l2norm=False, {_POLICY}, str readout="before_write", '
    f'str implementation="auto", {_ROUNDING}, str? gate=None'
)
_WINDOW = "int window, str? factors=None, str? anchor=None"


def define(name: str, signature: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """`lattn::<name>`, and `lattn::<name>device_`, which Triton kernels serve or nobody does.

    A reference that reads lengths and slots on the host cannot be recorded by a CUDA graph, and an op says once and for
    all whether it can. So there are two of each.
    """

    def on_device(*arguments: Any, **options: Any) -> Any:
        return impl(*arguments, **{**options, "implementation": "triton"})

    torch.library.define(f"lattn::{name}", signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    torch.library.define(f"lattn::{name}device_", signature, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"lattn::{name}", "default", impl)
    torch.library.impl(f"lattn::{name}device_", "default", on_device)
    for own in (name, f"{name}device_"):
        torch.library.register_fake(f"lattn::{own}", fake)


_SIGNATURES = {
    "decode_": f"{_STEP}, *, {OPTIONS}, {raw_gates.ARGUMENTS}) -> Tensor",
    "replay_": f"{_STEP}, *, {OPTIONS}, {_WINDOW}, {raw_gates.ARGUMENTS}) -> Tensor",
}
FLUSH = (
    f'({_STATE}, {_IDENTITY}, *, int[] heads, str decay="none", bool has_beta=False, str rule="delta", '
    f'{_POLICY}, str implementation="auto", {_ROUNDING}, {_WINDOW}) -> ()'
)
"""The signature of `flush_` (`packed/flush.py`)."""


class _Step(NamedTuple):
    """The positional arguments of a step, in schema order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Sequence[Tensor]
    cursor: Tensor
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    cu_seqlens: Tensor | None
    sequence_lengths: Tensor | None
    position: Tensor | None
    sequence_ids: Tensor | None


def call_in(options: dict[str, Any]) -> Call:
    return Call(**{name: options[name] for name in Call._fields if name in options})


def advance(
    before: Carried,
    call: Call,
    tokens: Sequence[Tensor | None],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    site_id: int,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    position: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Carried]:
    """A suffix from a carried state: o, and the state that is carried on. What `lc.linear_attention` does.

    Args:
        tokens: q, k, v, g, beta. position: int64 `[N]`, of each sequence's first token. Others as the op has them.
    """
    q, _, _, g, beta = tokens
    assert q is not None
    start = carried(before, call)
    lengths = (cu_seqlens, None, sequence_lengths, start.cursor)
    identity = () if position is None and sequence_ids is None else (position, sequence_ids)
    common = {**call.op_options(), "rule": rule, "scale": scale, "qk_l2norm": qk_l2norm, "site_id": site_id}
    ring: list[Tensor] = []
    if call.window is not None:
        o, final, *ring = torch.ops.lattn.replay(
            *tokens, start.state, start.read, *start.ring, *lengths, *identity, **common, keep_ring=True
        )
    else:
        o, final, _ = torch.ops.lattn.decode(*tokens, start.state, *lengths, *identity, **common)
    if call.write == "exact":
        return o, final
    return o, to_carry(
        final,
        ring,
        call,
        start,
        split(q.shape[0], q.shape[1], cu_seqlens, None, sequence_lengths, q.device),
        rule=rule,
        site_id=site_id,
        keep_exact=False,
        position=position,
        sequence_ids=sequence_ids,
        has_decay=g is not None,
        has_beta=beta is not None,
    )


def _checked(x: _Step, call: Call, raw: raw_gates.Raw | None = None) -> tuple[Geometry, Heads, dict[str, Tensor]]:
    """The sizes of a step, and the stored tensors by name; what needs no values is refused here, at trace time too."""
    t = Tensors(x.q, x.k, x.v, x.g, x.beta, None, x.cu_seqlens, None, x.sequence_lengths, None, None, x.sequence_ids)
    geometry = check_call(t)
    decay = "none" if x.g is None else "head" if x.g.dim() == 3 else "channel"
    # What is stored has a layout of its own: sizes that a trace left open are decided here.
    H, HV, K, V = (int(n) for n in (geometry.heads, geometry.value_heads, geometry.key_dim, geometry.value_dim))
    heads = Heads(H, HV, K, V, decay, x.beta is not None)
    stored = named(x.state, x.cursor, call, heads)
    if geometry.dtype is torch.float64 and compute_dtype(stored) is torch.float32 in {y.dtype for y in x.state}:
        raise DtypeError(
            "state",
            got="scales and records in float32",
            want="float64, in which float64 inputs are computed",
            remedy="Make the packed state of a float64 computation with dtype=torch.float64, or convert the inputs.",
        )
    check_rows(x.q.device, x.cursor, x.state_indices, x.has_initial_state, geometry.sequences)
    check_position(x.position, x.cursor, call)
    if raw is not None:
        raw.check(x.g, x.beta)
    return geometry, heads, stored


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Sequence[Tensor],
    cursor: Tensor,
    **options: Any,
) -> tuple[Geometry, Heads, dict[str, Tensor]]:
    """The sizes of a step in which sequence i's slot is i, and the stored tensors by name.

    Raises:
        ShapeError, DtypeError, SequenceError, StateError: as the ops do before they look at values.
    """
    return _checked(_Step(q, k, v, g, beta, state, cursor, *[None] * 6), call_in(options))


def named(state: Sequence[Tensor], cursor: Tensor, call: Call, heads: Heads) -> dict[str, Tensor]:
    """The stored tensors by name.

    Raises:
        StateError: another number of tensors than the policy has. ShapeError: made for other sizes or another policy.
    DtypeError: on another device than the cursor.
    """
    want = names(call, has_decay=heads.decay != "none", has_beta=heads.has_beta)
    if len(state) != len(want):
        raise StateError(
            "state",
            got=f"{len(state)} tensors",
            want=f"{len(want)}: {', '.join(want)}",
            remedy="Pass all tensors of one packed state, made for this policy and these gates.",
        )
    stored = dict(zip(want, state, strict=True))
    for name, (dtype, size) in shapes(call, heads, compute_dtype(stored)).items():
        x, shape = stored[name], [cursor.shape[0], *size]
        if x.device != cursor.device:
            raise DtypeError(
                f"state[{name}]",
                got=str(x.device),
                want=f"{cursor.device}, where the cursor lies",
                remedy="Move the whole state: state.to(device).",
            )
        if list(x.shape) != shape or x.dtype is not dtype:
            raise ShapeError(
                f"state[{name}]",
                got=f"{x.dtype} {list(x.shape)}",
                want=f"{dtype} {shape}",
                remedy="This packed state was made for other sizes, or for another policy.",
            )
        if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
            raise ShapeError(
                f"state[{name}]",
                got=f"strides {list(x.stride())}: several values in one place",
                want="memory of its own for every value",
                remedy="An expanded tensor cannot be written to: pass a clone.",
            )
    return stored


def check_position(position: Tensor | None, cursor: Tensor, call: Call) -> None:
    if position is None and call.rounding != "stochastic":
        return
    if position is None or position.dtype is not torch.int64 or position.shape != cursor.shape:
        raise StateError(
            "position",
            got="None" if position is None else f"{position.dtype} {list(position.shape)}",
            want=f"int64 [slots] = [{cursor.shape[0]}] with stochastic rounding",
            remedy="The packed state of a stochastic policy counts its sequences' tokens; pass that tensor.",
        )


def work_of(
    call: Call, device: torch.device, dtype: torch.dtype, heads: Heads, inputs: torch.dtype, site_id: int
) -> dispatch.Work:
    """What a kernel for packed rows is chosen by; `quantize` is the state's, in two_precision the read copy's."""
    quantize = None
    if call.write != "exact":
        fmt = parse(call.state_format)
        quantize = Quantizer(fmt, call.rounding, call.feedback, call.rotation, call.seed, site_id)
    return dispatch.Work(device, dtype, heads.K, heads.V, quantize, call.factors, call.window or 0, inputs)


def kernel_of(call: Call, work: dispatch.Work, stored: dict[str, Tensor]) -> ModuleType | None:
    """A kernel that steps packed rows where they lie; None: they are taken out, stepped and put back.

    Raises:
        UnsupportedError: implementation "triton", and there is none for this call.
    """
    if call.implementation == "auto" and not is_proven(call, stored):
        return None
    if (name := in_pieces(stored)) is not None:
        if call.implementation != "triton":
            return None
        raise UnsupportedError(
            "implementation",
            got=f"'triton' with a state[{name}] of strides {list(stored[name].stride())}",
            want="contiguous rows, of codes [slots, HV, K, V] or [slots, HV, V, K], on the Triton path",
            remedy="Take implementation='auto' (a policy's kernel='auto'), or allocate the state by `allocate`.",
        )
    return dispatch.packed(call.implementation, work, write=call.write, anchor=call.anchor)


def in_pieces(stored: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor whose rows are no contiguous memory, of codes key-first or all of them value-first."""
    codes = [name for name in stored if name.endswith("codes")]
    turned = [name for name in codes if not stored[name].is_contiguous()]
    for name, x in stored.items():
        if name in codes and len(turned) == len(codes):
            x = x.transpose(-1, -2)
        if not x.is_contiguous():
            return name
    return None


def is_proven(call: Call, stored: Mapping[str, Tensor]) -> bool:
    """Whether codes lie as those did that a GPU has stepped: key-first, or value-first but in two_precision."""
    return call.write != "two_precision" or all(x.is_contiguous() for x in stored.values())


def is_served(
    call: Call, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, inputs: torch.dtype
) -> bool:
    """Whether `<op>device_` can do such a step of contiguous rows; known when it is traced."""
    heads = Heads(1, 1, key_dim, value_dim)
    try:
        work = work_of(call, device, dtype, heads, inputs, 0)
        return dispatch.packed(call.implementation, work, write=call.write, anchor=call.anchor) is not None
    except UnsupportedError:
        return False


# What torch.compiler.assume_constant_result does, which would import Dynamo here, with the ops, in every process.
setattr(is_served, "_dynamo_marked_constant", True)  # noqa: B010


def written(call: Call, work: dispatch.Work) -> dict[str, Any]:
    """How a kernel for packed rows writes."""
    window = {"window": call.window, "factors": call.factors, "anchor": call.anchor}
    return {"write": call.write, "quantize": work.quantize, **window}


def _check_values(x: _Step, geometry: Geometry, call: Call, padding_slot: int) -> None:
    """What the reference refuses by value, for a kernel that looks at none: slots, lengths, cursors and gates that lie
    on a CPU."""
    check_slots(x.state_indices, x.cursor.shape[0], padding_slot)
    cursor = None
    if x.cursor.device.type == "cpu":
        rows = Rows.of(x.cursor, x.state_indices, x.has_initial_state, geometry.sequences, padding_slot)
        cursor = rows.read(x.cursor, -1)
    t = Tensors(x.q, x.k, x.v, x.g, x.beta, None, x.cu_seqlens, None, x.sequence_lengths, cursor, x.position)
    check_lengths(t, geometry, cursor_end=call.window or 1)

    def counted() -> Tensor:  # asked for by gates on a CPU: on a device every tensor made here is a kernel of each step
        segments = split(geometry.batch, geometry.tokens, x.cu_seqlens, None, x.sequence_lengths, x.q.device)
        return segments.rows(geometry.flat_tokens)

    check_gates(x.g, counted)


def _step(*arguments: Any, **options: Any) -> Tensor:
    x, call = _Step(*arguments), call_in(options)
    raw = raw_gates.Raw.of(options)
    geometry, heads, stored = _checked(x, call, raw)
    padding = options.get("padding_slot", -1)
    settings = {
        "rule": options.get("rule", "delta"),
        "scale": options["scale"],
        "qk_l2norm": options.get("qk_l2norm", False),
        "site_id": options.get("site_id", 0),
    }
    dtype = torch.float64 if compute_dtype(stored) is torch.float64 else geometry.dtype
    work = work_of(call, x.q.device, dtype, heads, x.q.dtype, settings["site_id"])
    kernel = kernel_of(call, work, stored)
    if raw is not None and (kernel is None or call.gate is not None):
        g, beta = raw.made(x.g, x.beta)
        x, raw = x._replace(g=g, beta=beta), None
    if kernel is not None:
        _check_values(x._replace(g=None) if raw is not None and raw.raw_gate else x, geometry, call, padding)
        g = x.g if x.g is None or call.gate is None else x.g.to(GATE_DTYPES[call.gate]).to(x.g.dtype)
        del settings["site_id"]
        tokens = (x.q, x.k, x.v, g, x.beta)
        slots = (x.cursor, x.state_indices, x.has_initial_state)
        options = {**settings, **written(call, work), "readout": call.readout, "padding_slot": padding}
        if raw is not None:
            options["gates"] = kernel.RawGates(**raw.kernel_options())
        out: Tensor = kernel.step(*tokens, stored, *slots, x.cu_seqlens, x.sequence_lengths, **options)
        return out
    rows = Rows.of(x.cursor, x.state_indices, x.has_initial_state, geometry.sequences, padding)
    lengths = x.sequence_lengths
    segments = split(geometry.batch, geometry.tokens, x.cu_seqlens, None, lengths, x.q.device)
    size = segments.total
    if x.state_indices is not None:
        # Lengths as they were given, for the op below to refuse those that are none.
        lengths = torch.where(rows.live, size if lengths is None else lengths.to(size), 0)
        size = torch.where(rows.live, size, 0)
    cursor = rows.read(x.cursor, -1)
    seen = None if x.position is None else rows.read(x.position)
    before = unpack(
        {name: rows.read(y) for name, y in stored.items()}, call, cursor, heads, rule=settings["rule"], position=seen
    )
    random = call.rounding == "stochastic"
    o, after = advance(
        before,
        call,
        x[:5],
        **settings,
        cu_seqlens=x.cu_seqlens,
        sequence_lengths=lengths,
        position=seen if random else None,
        sequence_ids=x.sequence_ids if random else None,
    )
    writer = rows.writer(size > 0)
    for name, y in pack(after, call).items():
        writer.write(stored[name], y)
    writer.write(x.cursor, torch.zeros_like(cursor) if isinstance(after, Tensor) else after.cursor)
    if x.position is not None and seen is not None:
        writer.write(x.position, seen + size)
    if x.state_indices is not None:
        lost = Segments(segments.begin, segments.prefix, torch.where(rows.lost, segments.total, 0))
        o.masked_fill_(lost.rows(geometry.flat_tokens).view(*o.shape[:2], 1, 1), torch.nan)
    return o


def _step_fake(*arguments: Any, **options: Any) -> Tensor:
    x = _Step(*arguments)
    with surfacing():
        _checked(x, call_in(options), raw_gates.Raw.of(options))
    return x.q.new_empty(x.v.shape)


for _name, _signature in _SIGNATURES.items():
    define(_name, _signature, _step, _step_fake)
