"""`lattn::decode_`, `lattn::replay_`, `lattn::flush_`: one step on a packed state, in place.

    decode_(q, k, v, g, beta, state, cursor, state_indices, has_initial_state, cu_seqlens, sequence_lengths,
            position, sequence_ids, *, ...) -> o
    replay_(the same) -> o
    flush_(state, cursor, state_indices, position, sequence_ids, *, ...) -> ()

q, k `[B, T, H, K]`; v, o `[B, T, HV, V]`; g `[B, T, HV]` or `[B, T, HV, K]`; beta `[B, T, HV]`; any T >= 0, every token
a suffix token. `state`: the stored tensors `[slots, ...]` in the order of `layout.names`, written in place. cursor
int32 `[slots]`, in place: -1, nothing is stored there and the sequence starts at zero; else, in token and exact mode 0,
in replay and two_precision the pending records, `0 <= cursor < window`.

N sequences, N = B or `len(cu_seqlens) - 1`. state_indices int `[N]`: their slots; -1 or `padding_slot` is padding,
whose tokens give zeros and nothing else; None: slot i is sequence i's. has_initial_state bool `[N]`: False starts at
zero, whatever the slot holds. sequence_lengths int `[N]`: tokens behind it vanish. A sequence without tokens changes
nothing. position int64 `[slots]`, in place: tokens that each sequence has seen; where the rounding is stochastic, else
None. sequence_ids int `[N]` key the stochastic rounding, 0 by default.

`flush_` writes the pending records of the slots (all, or those of state_indices) into the anchor, which is rounded as
at the end of a window; a slot without records keeps its bits.

These ops compute nothing themselves. They take the rows of their sequences out of the stored tensors as a carried
state, run `lattn::decode` or `lattn::replay` from it, and store what `carry.to_carry` makes of the result: what
`lc.linear_attention` does under the same policy. That is why packed and emulated have the same bits. They have no
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.carry import Call, carried, to_carry
from lattn_compile.errors import DtypeError, ShapeError, StateError, surfacing
from lattn_compile.ops.segments import split
from lattn_compile.ops.validate import Geometry, Tensors, check_call
from lattn_compile.packed.layout import Carried, Heads, compute_dtype, handed_over, names, pack, shapes, unpack
from lattn_compile.packed.rows import Rows, check_rows

__all__ = ["OPS", "advance"]

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
_OPTIONS = (
    f'str rule="delta", float scale, bool qk_l2norm=False, {_POLICY}, str readout="before_write", '
    f'str implementation="auto", {_ROUNDING}, str? gate=None'
)
_WINDOW = "int window, str? factors=None, str? anchor=None"

# A reference that reads lengths and slots on the host cannot be recorded by a CUDA graph.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)

for _name, _signature in (
    ("decode_", f"{_STEP}, *, {_OPTIONS}) -> Tensor"),
    ("replay_", f"{_STEP}, *, {_OPTIONS}, {_WINDOW}) -> Tensor"),
    (
        "flush_",
        f'({_STATE}, {_IDENTITY}, *, int[] heads, str decay="none", bool has_beta=False, str rule="delta", '
        f"{_POLICY}, {_ROUNDING}, {_WINDOW}) -> ()",
    ),
):
    torch.library.define(f"lattn::{_name}", _signature, tags=_TAGS)


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


def _call(options: dict[str, Any]) -> Call:
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


def _checked(x: _Step, call: Call) -> tuple[Geometry, Heads, dict[str, Tensor]]:
    """The sizes of a step, and the stored tensors by name; what needs no values is refused here, at trace time too."""
    t = Tensors(x.q, x.k, x.v, x.g, x.beta, None, x.cu_seqlens, None, x.sequence_lengths, None, None, x.sequence_ids)
    geometry = check_call(t)
    decay = "none" if x.g is None else "head" if x.g.dim() == 3 else "channel"
    # What is stored has a layout of its own: sizes that a trace left open are decided here.
    H, HV, K, V = (int(n) for n in (geometry.heads, geometry.value_heads, geometry.key_dim, geometry.value_dim))
    heads = Heads(H, HV, K, V, decay, x.beta is not None)
    stored = named(x.state, x.cursor, call, heads)
    if (have := compute_dtype(stored)) is not geometry.dtype and have in {y.dtype for y in x.state}:
        raise DtypeError(
            "state",
            got=f"scales and records in {have}",
            want=f"{geometry.dtype}, in which the inputs are computed",
            remedy="A packed state of a float64 computation is made with dtype=torch.float64, any other without.",
        )
    check_rows(x.cursor, x.state_indices, x.has_initial_state, geometry.sequences)
    _check_position(x.position, x.cursor, call)
    return geometry, heads, stored


def named(state: Sequence[Tensor], cursor: Tensor, call: Call, heads: Heads) -> dict[str, Tensor]:
    """The stored tensors by name.

    Raises:
        StateError: another number of tensors than the policy has. ShapeError: made for other sizes or another policy.
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
        if list(x.shape) != shape or x.dtype is not dtype or not x.is_contiguous():
            raise ShapeError(
                f"state[{name}]",
                got=f"{x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}",
                want=f"{dtype} {shape}, contiguous",
                remedy="This packed state was made for other sizes, or for another policy.",
            )
    return stored


def _check_position(position: Tensor | None, cursor: Tensor, call: Call) -> None:
    if position is None and call.rounding != "stochastic":
        return
    if position is None or position.dtype is not torch.int64 or position.shape != cursor.shape:
        raise StateError(
            "position",
            got="None" if position is None else f"{position.dtype} {list(position.shape)}",
            want=f"int64 [slots] = [{cursor.shape[0]}] with stochastic rounding",
            remedy="The packed state of a stochastic policy counts its sequences' tokens; pass that tensor.",
        )


def _at(x: Tensor, rows: Rows, otherwise: int) -> Tensor:
    """The slots' own numbers `[N]`, `otherwise` where nothing is stored."""
    if not x.shape[0]:
        return x.new_full(rows.slot.shape, otherwise)
    return torch.where(rows.stored, x[rows.slot], otherwise)


def _step(*arguments: Any, **options: Any) -> Tensor:
    x, call = _Step(*arguments), _call(options)
    geometry, heads, stored = _checked(x, call)
    rows = Rows.of(x.cursor, x.state_indices, x.has_initial_state, geometry.sequences, options.get("padding_slot", -1))
    lengths = x.sequence_lengths
    size = split(geometry.batch, geometry.tokens, x.cu_seqlens, None, lengths, x.q.device).total
    if not bool(rows.live.all()):
        lengths = size = torch.where(rows.live, size, 0)
    rule = options.get("rule", "delta")
    cursor = _at(x.cursor, rows, -1)
    seen = None if x.position is None else _at(x.position, rows, 0)
    before = unpack({name: rows.read(y) for name, y in stored.items()}, call, cursor, heads, rule=rule, position=seen)
    random = call.rounding == "stochastic"
    o, after = advance(
        before,
        call,
        x[:5],
        rule=rule,
        scale=options["scale"],
        qk_l2norm=options.get("qk_l2norm", False),
        site_id=options.get("site_id", 0),
        cu_seqlens=x.cu_seqlens,
        sequence_lengths=lengths,
        position=seen if random else None,
        sequence_ids=x.sequence_ids if random else None,
    )
    for name, y in pack(after, call).items():
        rows.write(stored[name], y, size > 0)
    rows.write(x.cursor, torch.zeros_like(cursor) if isinstance(after, Tensor) else after.cursor, size > 0)
    if x.position is not None and seen is not None:
        rows.write(x.position, seen + size, size > 0)
    return o


def _step_fake(*arguments: Any, **options: Any) -> Tensor:
    x = _Step(*arguments)
    with surfacing():
        _checked(x, _call(options))
    return x.q.new_empty(x.v.shape)


for _name in ("decode_", "replay_"):
    torch.library.impl(f"lattn::{_name}", "default", _step)
    torch.library.register_fake(f"lattn::{_name}", _step_fake)


def _sizes(heads: Sequence[int], decay: str, has_beta: bool) -> Heads:
    key_heads, value_heads, key_dim, value_dim = heads
    return Heads(key_heads, value_heads, key_dim, value_dim, decay, has_beta)


@torch.library.impl("lattn::flush_", "default")
def _flush(
    state: Sequence[Tensor],
    cursor: Tensor,
    state_indices: Tensor | None,
    position: Tensor | None,
    sequence_ids: Tensor | None,
    *,
    heads: Sequence[int],
    decay: str = "none",
    has_beta: bool = False,
    rule: str = "delta",
    **options: Any,
) -> None:
    call, sizes = _call(options), _sizes(heads, decay, has_beta)
    stored = named(state, cursor, call, sizes)
    _check_position(position, cursor, call)
    sequences = cursor.shape[0] if state_indices is None else state_indices.shape[0]
    check_rows(cursor, state_indices, None, sequences)
    rows = Rows.of(cursor, state_indices, None, sequences, options.get("padding_slot", -1))
    at = _at(cursor, rows, -1)
    if call.window is None or not bool((at > 0).any()):
        return
    seen = None if position is None else _at(position, rows, 0)
    before = unpack({name: rows.read(y) for name, y in stored.items()}, call, at, sizes, rule=rule, position=seen)
    assert not isinstance(before, Tensor)
    made = handed_over(
        before.dense(),
        call,
        sizes,
        rule=rule,
        site_id=options.get("site_id", 0),
        position=seen,
        sequence_ids=sequence_ids,
    )
    for name, y in made.items():
        rows.write(stored[name], y, at > 0)
    rows.write(cursor, torch.zeros_like(at), at > 0)


@torch.library.register_fake("lattn::flush_")
def _flush_fake(state: Sequence[Tensor], cursor: Tensor, *rest: Any, **options: Any) -> None:
    with surfacing():
        sizes = _sizes(options["heads"], options.get("decay", "none"), options.get("has_beta", False))
        named(state, cursor, _call(options), sizes)
