"""`lattn::replay`: an anchor is rounded every `window` tokens, the updates since are kept beside it (semantics §5).

    replay(q, k, v, g, beta, initial_state, read_state, ring_k, ring_u, ring_g, ring_v, ring_beta,
           cu_seqlens, prefix_lengths, sequence_lengths, cursor, position, sequence_ids, *, ...)
        -> (o, anchor, ring_k, ring_u, ring_g, ring_v, ring_beta)

Tokens as in `lattn::chunk`; any T >= 0. initial_state is the anchor `[N, HV, K, V]` where the cursor is >= 0, else an
exact state. The ring holds the `cursor` updates since the last flush, W = window, slots behind them zero, all in the
compute dtype: k `[N, W - 1, H, K]`, u `[N, W - 1, HV, V]`, g `[N, W - 1, HV(, K)]` or None. cursor int `[N]`: -1 exact,
not handed over; else 0 <= cursor < W.

write="replay": k and u are the encoded and decoded factors, the normalised key and the update. write="two_precision":
read_state is the read copy, state_format its format, `anchor` the anchor's; ring_v `[N, W - 1, HV, V]` and ring_beta
`[N, W - 1, HV]` join, and k and u are not encoded.

The returned anchor is raw: the stored value, or exact where no suffix token has come yet; of a quantizer that is not
idempotent, the value before its last rounding, if that was made in this call. Ring outputs are empty `[0]` tensors
where they do not apply, and all of them without `keep_ring`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.errors import PolicyError, ShapeError, StateError, surfacing
from lattn_compile.formats import parse
from lattn_compile.formats.factors import FACTORS
from lattn_compile.modes import ANCHORS, MAX_WINDOW
from lattn_compile.ops import dispatch
from lattn_compile.ops.autograd import register_first_order
from lattn_compile.ops.call import (
    GRADS,
    TAGS,
    TENSORS,
    Plan,
    empty_grads,
    fresh,
    incoming,
    moved,
    no_autocast,
    plan,
    prefix_backward,
    prefix_forward,
    returned,
    returned_fake,
    rounded,
)
from lattn_compile.ops.options import OpOptions, Options, schema
from lattn_compile.ops.validate import Geometry, Tensors
from lattn_compile.ring import Ring

__all__ = ["RING", "ReplayOptions", "sort_tensors"]

RING = ("ring_k", "ring_u", "ring_g", "ring_v", "ring_beta")

_CARRIED = ("read_state", *RING)
_TENSORS = TENSORS.replace(
    "Tensor? initial_state, ", f"Tensor? initial_state, {', '.join(f'Tensor? {name}' for name in _CARRIED)}, "
)
_OPTIONS = schema('int window=8, str? factors=None, str anchor="fp32", bool keep_ring=True', write="str write")

torch.library.define(
    "lattn::replay",
    f"({_TENSORS}, *, {_OPTIONS}) -> (Tensor o, Tensor anchor, {', '.join(f'Tensor {name}' for name in RING)})",
    tags=TAGS,
)
torch.library.define(
    "lattn::replay_backward",
    f"(Tensor? grad_o, Tensor? grad_anchor, {', '.join(f'Tensor? grad_{name}' for name in RING)}, "
    f"{_TENSORS.replace('=None', '')}, *, {_OPTIONS}) -> "
    f"{GRADS[:-1]}, Tensor dread, {', '.join(f'Tensor d{name}' for name in RING)})",
    tags=TAGS,
)


@dataclass(frozen=True, slots=True)
class _Carried:
    """The tensors that this op carries beside the state, in schema order."""

    read_state: Tensor | None
    ring_k: Tensor | None
    ring_u: Tensor | None
    ring_g: Tensor | None
    ring_v: Tensor | None
    ring_beta: Tensor | None

    def ring(self, dtype: torch.dtype, keep: Tensor | None = None) -> Ring | None:
        """The ring in the compute dtype, slots from `keep` (int64 `[N]`) on zeroed."""
        if self.ring_k is None or self.ring_u is None or self.ring_k.shape[1] == 0:
            return None

        def ready(x: Tensor | None) -> Tensor | None:
            if x is None or keep is None:
                return None if x is None else x.to(dtype)
            live = torch.arange(x.shape[1], device=x.device) < keep[:, None]
            return torch.where(live.view(*live.shape, *(1,) * (x.dim() - 2)), x.to(dtype), 0)

        k, u = ready(self.ring_k), ready(self.ring_u)
        assert k is not None and u is not None
        return Ring(k, u, ready(self.ring_g), ready(self.ring_v), ready(self.ring_beta))


def sort_tensors(tensors: tuple[Any, ...]) -> tuple[Tensors, _Carried]:
    """The op's positional arguments, the common ones and those of this op."""
    return Tensors(*tensors[:6], *tensors[6 + len(_CARRIED) :]), _Carried(*tensors[6 : 6 + len(_CARRIED)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(OpOptions):
    """Options of `lattn::replay` and its backward, spelled as the op's schema does.

    `window`: tokens between roundings; `factors`: format of the kept updates; `anchor`: format of the anchor of
    two-precision; `keep_ring`: whether a call hands its last window over.
    """

    window: int = 8
    factors: str | None = None
    anchor: str = "fp32"
    keep_ring: bool = True

    FORM: ClassVar[str] = "replay"
    WRITES: ClassVar[tuple[str, ...]] = ("replay", "two_precision")

    def interval(self) -> tuple[str, int, int, int | None]:
        return "window", self.window, 1, MAX_WINDOW

    @property
    def two_precision(self) -> bool:
        return self.write == "two_precision"

    @property
    def is_token_mode(self) -> bool:
        """A window of one token without factors is the token mode, bit for bit: the same kernel computes it."""
        return self.window == 1 and self.factors is None and not self.two_precision

    def resolved(self, t: Tensors, carried: _Carried) -> tuple[Geometry, Options]:
        geometry, options = self.checked(t)
        for name, word, known in (("factors", self.factors, FACTORS), ("anchor", self.anchor, ANCHORS)):
            if word not in known:
                raise PolicyError(
                    name, got=repr(word), want=" or ".join(map(repr, known)), remedy="Choose one of these."
                )
        work = replace(options.work, factors=self.factors, window=self.window, paired=self.two_precision)
        options = replace(options, work=work)
        if options.implementation == "triton":
            dispatch.choose("decode" if self.is_token_mode else "replay", "triton", options.work)
        if self.two_precision and (self.readout != "before_write" or self.factors is not None or self.feedback):
            raise PolicyError(
                "write",
                got=f"'two_precision' with readout={self.readout!r}, factors={self.factors!r}, "
                f"feedback={self.feedback!r}",
                want="readout='before_write', no factors and no feedback",
                remedy="Drop them, or choose 'replay'.",
            )
        for name, shape in self.ring_shapes(t, geometry).items():
            _check_carried(name, getattr(carried, name), shape, required=carried.ring_k is not None)
        _check_carried("read_state", carried.read_state, geometry.state_shape if self.two_precision else None)
        if t.cursor is not None and self.two_precision and carried.read_state is None:
            raise StateError(
                "read_state",
                got="None beside a cursor",
                want="the read copy [N, HV, K, V] of the carried anchor",
                remedy="Pass what the call returned that made the cursor; a dense start takes no cursor.",
            )
        return geometry, options

    def ring_shapes(self, t: Tensors, geometry: Geometry) -> dict[str, tuple[int, ...] | None]:
        """Shape of each of the ring's tensors, None of one that this call has not."""
        slots = (geometry.sequences, self.window - 1)
        values = (*slots, geometry.value_heads, geometry.value_dim)
        gates = None if t.g is None else (*slots, geometry.value_heads, *t.g.shape[3:])
        return {
            "ring_k": (*slots, geometry.heads, geometry.key_dim),
            "ring_u": values,
            "ring_g": gates,
            "ring_v": values if self.two_precision else None,
            "ring_beta": (*slots, geometry.value_heads) if self.two_precision and t.beta is not None else None,
        }

    def kernel(self, options: Options, p: Plan) -> dict[str, Any]:
        return {
            **options.suffix(),
            "window": self.window,
            "factors": self.factors,
            "anchor_format": self.anchor if self.two_precision else None,
            "identity": p.identity,
        }


def _check_carried(name: str, x: Tensor | None, want: tuple[int, ...] | None, *, required: bool = False) -> None:
    if x is None and not (required and want is not None):
        return
    if x is None or want is None or tuple(x.shape) != tuple(want):
        raise ShapeError(
            name,
            got="None" if x is None else str(list(x.shape)),
            want="None: this mode, or this call without g or beta, has none" if want is None else str(list(want)),
            remedy="Pass the tensors of one state together, as the call returned them that made it.",
        )


@torch.library.register_fake("lattn::replay")
def _replay_fake(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    (t, carried), chosen = sort_tensors(tensors), ReplayOptions(**options)
    with surfacing():
        geometry, _ = chosen.resolved(t, carried)
    state = t.q.new_empty(geometry.state_shape, dtype=geometry.dtype)
    return t.q.new_empty(t.v.shape), state, *_ring_outputs(t, geometry, chosen, None)


def _ring_outputs(t: Tensors, geometry: Geometry, chosen: ReplayOptions, ring: Ring | None) -> list[Tensor]:
    """The ring as outputs of the op; without one, empty tensors of the right shapes."""
    outputs = []
    for name, shape in chosen.ring_shapes(t, geometry).items():
        if shape is None or not chosen.keep_ring:
            outputs.append(t.q.new_empty(0, dtype=geometry.dtype))
            continue
        x = None if ring is None else getattr(ring, name.removeprefix("ring_"))
        outputs.append(t.q.new_zeros(shape, dtype=geometry.dtype) if x is None else x)
    return outputs


@dataclass(frozen=True, slots=True)
class _Start:
    """What the suffix starts from: `exact` is the anchor before it was handed over."""

    plan: Plan
    exact: Tensor
    anchor: Tensor
    read: Tensor | None
    ring: Ring | None
    dense_lengths: Tensor | None


def _start(
    t: Tensors, carried: _Carried, geometry: Geometry, options: Options, chosen: ReplayOptions, o: Tensor
) -> _Start:
    """Runs the prefix, writing its rows of `o`, and hands over."""
    p = plan(t, geometry, options, chunk_size=chosen.window)
    ring = carried.ring(geometry.dtype, p.offset)
    if p.empty:
        return _Start(p, p.state, p.state, carried.read_state, ring, None)
    dense_lengths = None
    if ring is not None and p.has_prefix and t.cursor is not None:
        # A prefix starts from `.dense()`: the anchor with the pending updates.
        dense_lengths = torch.where(p.segments.prefix > 0, t.cursor.to(p.begin).clamp(min=0), 0)
        p = replace(p, state=_pending(carried, geometry, options, chosen, p.state, dense_lengths, None)[0])
    exact = prefix_forward(replace(p, handover=None), options, o)
    assert p.handover is not None and options.quantize is not None
    before_suffix = moved(p.identity, -1)
    if not chosen.two_precision:
        return _Start(p, exact, rounded(exact, p.handover, options.quantize, before_suffix), None, ring, dense_lengths)
    rows = p.handover.view(-1, 1, 1, 1)
    anchor = torch.where(rows, parse(chosen.anchor).qdq(exact), exact)
    read = anchor if carried.read_state is None else carried.read_state.to(geometry.dtype)
    read = torch.where(rows, options.quantize.qdq(anchor, before_suffix), read)
    return _Start(p, exact, anchor, read, ring, dense_lengths)


def _pending(
    carried: _Carried,
    geometry: Geometry,
    options: Options,
    chosen: ReplayOptions,
    anchor: Tensor,
    lengths: Tensor,
    grad: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The anchor advanced over the first `lengths` records of the ring; with `grad`, of the result, its adjoint.

    Replay reads its records as writes that are known, two_precision runs the exact recurrence over the raw inputs.

    Returns:
        The state, or the gradient of `anchor`; and the gradients of the ring's tensors, by their names.
    """
    ring = carried.ring(geometry.dtype)
    assert ring is not None
    raw = chosen.two_precision
    names = {"dk": "ring_k", "dg": "ring_g", "dv": "ring_v" if raw else "ring_u", "dbeta": "ring_beta"}
    k, g, v, beta = (
        None if x is None else x.flatten(0, 1)
        for x in (ring.k, ring.g, ring.v if raw else ring.u, ring.beta if raw else None)
    )
    assert k is not None and v is not None
    starts = torch.arange(geometry.sequences, device=lengths.device) * (chosen.window - 1)
    settings = {
        "rule": options.rule if raw else "additive",
        "scale": 1.0,
        "qk_l2norm": False,
        "chunk_size": chosen.window,
        "quantize": None,
        "readout": "before_write",
        "identity": None,
    }
    kernel = options.kernel("chunk", exact=True)
    if grad is None:
        out = torch.empty_like(v)
        return kernel.forward(k, k, v, g, beta, anchor, starts, lengths, None, out, **settings), {}
    grads = {
        name: torch.zeros_like(x) for name, x in (("dk", k), ("dg", g), ("dv", v), ("dbeta", beta)) if x is not None
    }
    danchor = kernel.backward(None, grad, k, k, v, g, beta, anchor, starts, lengths, None, grads, **settings)
    return danchor, {names[name]: x.unflatten(0, (geometry.sequences, -1)) for name, x in grads.items()}


@torch.library.impl("lattn::replay", "default")
def _replay(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    (t, carried), chosen = sort_tensors(tensors), ReplayOptions(**options)
    geometry, shared = chosen.resolved(t, carried)
    o = t.q.new_zeros(geometry.flat_tokens, *t.v.shape[2:])
    with no_autocast(t.q.device):
        s = _start(t, carried, geometry, shared, chosen, o)
        p, anchor, ring = s.plan, s.anchor, s.ring
        if not p.empty:
            anchor, ring = _forward(s, shared, chosen, o)
            if shared.quantize is not None and not shared.quantize.idempotent and not chosen.two_precision:
                # A hand-over without a flush after it is the last rounding of this call.
                pending = (p.handover if p.handover is not None else p.length < 0) & (p.length < chosen.window)
                anchor = torch.where(pending.view(-1, 1, 1, 1), s.exact, anchor)
    inputs = (t.initial_state, carried.ring_k, carried.ring_u, carried.ring_g, carried.ring_v, carried.ring_beta)
    rings = [fresh(x, *inputs) for x in _ring_outputs(t, geometry, chosen, ring)]
    return o.view(t.v.shape), fresh(anchor, t.initial_state, carried.read_state), *rings


def _forward(s: _Start, shared: Options, chosen: ReplayOptions, o: Tensor) -> tuple[Tensor, Ring | None]:
    p = s.plan
    if chosen.is_token_mode:
        decode = shared.kernel("decode")
        suffix = {**shared.suffix(), "identity": p.identity}
        return decode.forward(*p.flat, s.anchor, p.begin, p.length, o, None, 0, **suffix), None
    kernel = shared.kernel("replay")
    return kernel.forward(
        *p.flat,
        s.anchor,
        s.read,
        s.ring,
        p.begin,
        p.length,
        p.offset,
        o,
        keep=chosen.keep_ring,
        **chosen.kernel(shared, p),
    )


@torch.library.register_fake("lattn::replay_backward")
def _replay_backward_fake(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    t, carried = sort_tensors(tensors[2 + len(RING) :])
    ReplayOptions(**options).resolved(t, carried)
    return *returned_fake(t), *(t.q.new_empty(0) if x is None else torch.empty_like(x) for x in _present(carried))


def _present(carried: _Carried) -> list[Tensor | None]:
    return [getattr(carried, name) for name in _CARRIED]


@torch.library.impl("lattn::replay_backward", "default")
def _replay_backward(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    grad_o, grad_anchor, *grad_ring = tensors[: 2 + len(RING)]
    (t, carried), chosen = sort_tensors(tensors[2 + len(RING) :]), ReplayOptions(**options)
    geometry, shared = chosen.resolved(t, carried)
    grad_o, grad_anchor = incoming(grad_o, grad_anchor, t, geometry)
    with no_autocast(t.q.device):
        s = _start(t, carried, geometry, shared, chosen, torch.empty_like(grad_o))
        p = s.plan
        grads: dict[str, Tensor] = empty_grads(p)
        dcarried: dict[str, Tensor | None] = dict.fromkeys(_CARRIED)
        if p.empty:  # what came in went out
            dcarried |= {n: x for n, x in zip(RING, grad_ring, strict=True) if x is not None and x.numel()}
        else:
            grad_anchor, dread, dring = _backward(s, t, geometry, shared, chosen, grad_o, grad_anchor, grad_ring, grads)
            dcarried |= {} if dring is None else dict(zip(RING, dring, strict=True))
            if dread is not None and p.handover is not None:
                # Where the read copy was made from the anchor, its gradient passes straight through to it.
                made = p.handover.view(-1, 1, 1, 1)
                if carried.read_state is None:
                    grad_anchor = grad_anchor + dread
                else:
                    grad_anchor = grad_anchor + torch.where(made, dread, 0)
                    dcarried["read_state"] = torch.where(made, 0, dread)
            grad_anchor = prefix_backward(p, shared, grad_o, grad_anchor, grads)
            if s.dense_lengths is not None:
                start = t.initial_state
                assert start is not None
                grad_anchor, more = _pending(
                    carried, geometry, shared, chosen, start.to(geometry.dtype), s.dense_lengths, grad_anchor
                )
                for name, x in more.items():
                    known = dcarried[name]
                    dcarried[name] = x if known is None else known + x
    out = returned(grads, grad_anchor, t)
    return *out, *(_like(dcarried[name], getattr(carried, name), t.q) for name in _CARRIED)


def _like(grad: Tensor | None, x: Tensor | None, q: Tensor) -> Tensor:
    if x is None:
        return q.new_empty(0)
    return torch.zeros_like(x) if grad is None else fresh(grad.to(x.dtype))


def _backward(
    s: _Start,
    t: Tensors,
    geometry: Geometry,
    shared: Options,
    chosen: ReplayOptions,
    grad_o: Tensor,
    grad_anchor: Tensor,
    grad_ring: list[Tensor | None],
    grads: dict[str, Tensor],
) -> tuple[Tensor, Tensor | None, Ring | None]:
    p = s.plan
    if chosen.is_token_mode:
        decode = shared.kernel("decode")
        suffix = {**shared.suffix(), "identity": p.identity, "longest": geometry.tokens}
        danchor = decode.backward(grad_o, grad_anchor, *p.flat, s.anchor, p.begin, p.length, None, 0, grads, **suffix)
        return danchor, None, None
    ring = None
    if chosen.keep_ring and any(x is not None and x.numel() for x in grad_ring):
        shapes = chosen.ring_shapes(t, geometry).values()
        given = [x if x is not None and x.numel() else None for x in grad_ring]
        full = [
            t.q.new_zeros(shape, dtype=geometry.dtype) if x is None and shape is not None else x
            for x, shape in zip(given, shapes, strict=True)
        ]
        ring = Ring(*full)  # type: ignore[arg-type]
    kernel = shared.kernel("replay")
    return kernel.backward(
        grad_o,
        grad_anchor,
        ring,
        *p.flat,
        s.anchor,
        s.read,
        s.ring,
        p.begin,
        p.length,
        p.offset,
        grads,
        **chosen.kernel(shared, p),
    )


register_first_order("lattn::replay", differentiable=6 + len(_CARRIED), outputs=2 + len(RING))
