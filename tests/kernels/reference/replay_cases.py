"""Calls of the windowed reference with ragged sequences, and semantics §5 written out for them, one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import factors as factor_formats
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference import replay
from lattn_compile.ring import Ring
from lattn_compile.testing import make_inputs

__all__ = ["NAMES", "Case", "assert_close", "assert_is_the_loop", "cotangents", "loop", "make_case", "relative"]

NAMES = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass
class Case:
    """Flat tokens of sequences of `lengths` with `gap` tokens of NaN before, between and after them.

    `read` makes it two_precision. Ring slots at and behind the cursor are NaN: nothing may read them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    anchor: Tensor
    read: Tensor | None
    ring: Ring | None
    starts: Tensor
    lengths: Tensor
    cursor: Tensor
    options: dict[str, Any]
    keep: bool = True

    @property
    def window(self) -> int:
        return int(self.options["window"])

    @property
    def inside(self) -> Tensor:
        row = torch.arange(self.q.shape[0])
        return ((row >= self.starts[:, None]) & (row < (self.starts + self.lengths)[:, None])).any(0)

    @property
    def held(self) -> Tensor:
        """bool `[N, W - 1]`, the slots that hold a record before the call."""
        return torch.arange(self.window - 1) < self.cursor[:, None]

    @property
    def left(self) -> Tensor:
        """The same after the call."""
        return torch.arange(self.window - 1) < ((self.cursor + self.lengths) % self.window)[:, None]

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name in NAMES if (x := getattr(self, name)) is not None}

    def carried(self) -> dict[str, Tensor]:
        """Anchor, read copy and ring, what there is."""
        rings = {} if self.ring is None else self.ring._asdict()
        every = {"anchor": self.anchor, "read": self.read} | {f"ring_{name}": x for name, x in rings.items()}
        return {name: x for name, x in every.items() if x is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Case:
        ring = None if self.ring is None else Ring(*(None if x is None else change(x) for x in self.ring))  # type: ignore[arg-type]
        changed = {name: change(x) for name, x in self.tensors().items()}
        read = None if self.read is None else change(self.read)
        return dataclasses.replace(self, **changed, anchor=change(self.anchor), read=read, ring=ring)

    def arguments(self) -> tuple[Any, ...]:
        tokens = (getattr(self, name) for name in NAMES)
        return (*tokens, self.anchor, self.read, self.ring, self.starts, self.lengths, self.cursor)

    def forward(self) -> dict[str, Tensor]:
        """`o` (NaN where nothing was written), `anchor`, and the ring's parts as `ring_k`, ..."""
        o = torch.full(self.v.shape, torch.nan, dtype=self.anchor.dtype)
        anchor, ring = replay.forward(*self.arguments(), o, **self.options, keep=self.keep)
        out = {"o": o, "anchor": anchor}
        if ring is not None:
            out |= {f"ring_{name}": x for name, x in ring._asdict().items() if x is not None}
        return out

    def backward(self, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by name, NaN where nothing was written."""
        dtype = self.anchor.dtype
        grads = {f"d{name}": torch.full(x.shape, torch.nan, dtype=dtype) for name, x in self.tensors().items()}
        dring = Ring(*(cotangents.get(f"ring_{name}") for name in Ring._fields))  # type: ignore[arg-type]
        given = cotangents.get("o"), cotangents.get("anchor"), dring if any(x is not None for x in dring) else None
        danchor, dread, dring_in = replay.backward(*given, *self.arguments(), grads, **self.options)  # type: ignore[misc]
        found = {"anchor": danchor, "read": dread}
        if dring_in is not None:
            found |= {f"ring_{name}": x for name, x in dring_in._asdict().items()}
        return grads | {f"d{name}": x for name, x in found.items() if x is not None}

    def rows(self, first: int, last: int) -> Tensor:
        """Flat tokens `first : last` of every sequence that has them."""
        lengths = (self.lengths - first).clamp(0, last - first)
        return torch.cat([torch.arange(s + first, s + first + n) for s, n in zip(self.starts, lengths, strict=True)])

    def piece(self, first: int, last: int, carried: dict[str, Tensor]) -> Case:
        """The tokens `rows(first, last)` as a call of its own, which goes on from what the call before left behind."""
        lengths = (self.lengths - first).clamp(0, last - first)
        parts = {name: x[self.rows(first, last)].clone() for name, x in self.tensors().items()}
        ring = Ring(*(carried.get(f"ring_{name}") for name in Ring._fields)) if "ring_k" in carried else None  # type: ignore[arg-type]
        cursor = (self.cursor + self.lengths.clamp(max=first)) % self.window
        state = {"anchor": carried["anchor"], "read": carried.get("read"), "ring": ring, "cursor": cursor}
        return dataclasses.replace(self, **parts, **state, starts=lengths.cumsum(0) - lengths, lengths=lengths)

    def in_pieces(self, *cuts: int) -> dict[str, Tensor]:
        """`forward` cut at these tokens of every sequence, each piece going on from the one before."""
        carried = {name: x.clone() for name, x in self.carried().items()}
        o = torch.full(self.v.shape, torch.nan, dtype=self.anchor.dtype)
        for first, last in pairwise((0, *cuts, max(int(self.lengths.max()), *cuts))):
            piece = self.piece(first, last, carried)
            out = piece.forward()
            o[self.rows(first, last)] = out.pop("o")
            if "read" in carried:
                quantize = self.options["quantize"]
                flushed = (piece.cursor + piece.lengths >= self.window)[:, None, None, None]
                anchor = out["anchor"]
                out["read"] = torch.where(flushed, quantize.qdq(anchor) if quantize else anchor, carried["read"])
            carried = out
        carried.pop("read", None)
        return {"o": o} | carried


def make_case(
    kind: str = "gdn",
    lengths: Sequence[int] = (7, 12),
    *,
    window: int = 4,
    factors: str | None = None,
    fmt: str | None = "int8",
    readout: str = "before_write",
    paired: bool = False,
    anchor_format: str | None = "fp32",
    cursor: Sequence[int] | None = None,
    gap: int = 1,
    dtype: torch.dtype = torch.float64,
    beta: bool = True,
    qk_l2norm: bool | None = None,
    seed: int = 0,
    **shape: Any,
) -> Case:
    """A random case. A `cursor` with a number above 0 brings a ring with as many records."""
    shape = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6} | shape
    count, slots = len(lengths), window - 1
    spaced = [n for length in lengths for n in (gap, length)] + [gap]
    x = make_inputs(kind, lengths=[*spaced, count * slots], dtype=torch.float64, seed=seed, **shape)
    assert x.cu_seqlens is not None and x.initial_state is not None
    flat = {name: t.squeeze(0) for name in NAMES if (t := getattr(x, name)) is not None and (beta or name != "beta")}
    tokens = sum(spaced)
    norm = x.qk_l2norm if qk_l2norm is None else qk_l2norm
    if not norm:
        flat["k"] = torch.nn.functional.normalize(flat["k"], dim=-1)
    state = x.initial_state[1 : 2 * count : 2].clone()
    cursors = torch.zeros(count, dtype=torch.int64) if cursor is None else torch.tensor(cursor, dtype=torch.int64)
    quantize = None if fmt is None else Quantizer(parse(fmt))
    case = Case(
        **{name: flat[name][:tokens].clone() if name in flat else None for name in NAMES},
        anchor=state if quantize is None else quantize.qdq(state).clone(),
        read=None,
        ring=None,
        starts=x.cu_seqlens[1 : 2 * count + 1 : 2].long(),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        cursor=cursors,
        options={
            "rule": x.rule, "scale": x.scale, "qk_l2norm": norm, "window": window, "factors": factors,
            "anchor_format": anchor_format if paired else None, "quantize": quantize, "readout": readout,
            "identity": None,
        },
    )  # fmt: skip
    if paired:
        case.anchor = state
        case.read = state if quantize is None else quantize.qdq(state).clone()
    if cursor is not None and slots:
        records = {name: t[tokens:].unflatten(0, (count, slots)).clone() for name, t in flat.items()}
        raw = (records["v"].flip(1), records.get("beta")) if paired else (None, None)
        k = torch.nn.functional.normalize(records["k"], dim=-1)
        case.ring = Ring(k, records["v"], records.get("g"), *raw)
        for part in case.ring:
            if part is not None:
                part[~case.held] = torch.nan
    for tensor in case.tensors().values():
        tensor[~case.inside] = torch.nan
    return case.map(lambda t: t.to(dtype))


class _StraightThrough(torch.autograd.Function):
    """Forward `f(x)`, backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(x.detach()).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _through(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    return _StraightThrough.apply(x, f)  # type: ignore[no-any-return, no-untyped-call]


def _outer(k: Tensor, u: Tensor) -> Tensor:
    return k[:, :, None] * u[:, None, :]


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("hkv,hk->hv", S, x)


@dataclasses.dataclass
class _Record:
    k: Tensor
    u: Tensor
    g: Tensor | None
    v: Tensor
    beta: Tensor | None


class _Loop:
    """One sequence of semantics §5, replay (read is None) or two_precision."""

    def __init__(
        self,
        case: Case,
        anchor: Tensor,
        read: Tensor | None,
        records: list[_Record],
        name: int,
        given: dict[str, Tensor] | None,
    ) -> None:
        self.case, self.options, self.anchor, self.read, self.records = case, case.options, anchor, read, records
        self.returned = anchor
        self.group = case.v.shape[1] // case.k.shape[1]
        self.name, self.done, self.given = name, 0, given

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 0)

    def decay(self, gates: list[Tensor | None]) -> Tensor | float:
        """Weight of what was written before these gates, against a state `[HV, K, V]`."""
        known = [g for g in gates if g is not None]
        if not known:
            return 1.0
        total = torch.stack(known).sum(0).exp()
        return total[:, None, None] if total.dim() == 1 else total[:, :, None]

    def rebuilt(self, base: Tensor) -> Tensor:
        """Γ(a→j-1) base + sum Γ(i→j-1) k_i u_iᵀ"""
        S = self.decay([r.g for r in self.records]) * base
        for i, r in enumerate(self.records):
            S = S + self.decay([later.g for later in self.records[i + 1 :]]) * _outer(self.spread(r.k), r.u)
        return S

    def update(self, S: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        u = v - _read(S, self.spread(k)) if self.options["rule"] == "delta" else v
        return u if beta is None else beta[:, None] * u

    def factor(self, name: str, x: Tensor) -> Tensor:
        slot = len(self.records)
        if self.given is not None and slot < int(self.case.left[self.name].sum()):
            return _through(x, lambda x: self.given[f"ring_{name}"][self.name, slot])  # type: ignore[index]
        return _through(x, lambda x: factor_formats.qdq(x, self.options["factors"]))

    def quantized(self, S: Tensor) -> Tensor:
        quantize, identity = self.options["quantize"], self.options["identity"]
        if self.given is not None:
            return _through(S, lambda x: self.given["anchor"][self.name])  # type: ignore[index]
        if quantize is None:
            return S
        if identity is not None:
            at, name = identity.position[self.name] + self.done - 1, identity.sequence[self.name]
            identity = Identity(at[None], name[None])
        return _through(S, lambda x: quantize.qdq(x[None], identity)[0])

    def token(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Tensor:
        options = self.options
        if options["qk_l2norm"]:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        self.done += 1
        q, after = options["scale"] * self.spread(q), options["readout"] == "after_write"
        S = self.decay([g]) * self.rebuilt(self.anchor if self.read is None else self.read)
        u = self.update(S, k, v, beta)
        rounded = self.factor("k", k), self.factor("u", u)
        o = _read(S + _outer(self.spread(rounded[0] if after else k), rounded[1] if after else u), q)
        self.records.append(_Record(*rounded, g, v, beta))
        if len(self.records) == options["window"]:
            if self.read is None:
                exact = S + _outer(self.spread(rounded[0]), rounded[1])
                self.anchor = self.quantized(exact)
                kept = options["quantize"] is None or options["quantize"].idempotent
                self.returned = self.anchor if kept else exact
            else:
                A = self.anchor
                for r in self.records:
                    A = self.decay([r.g]) * A
                    A = A + _outer(self.spread(r.k), self.update(A, r.k, r.v, r.beta))
                if options["anchor_format"] == "bf16":  # fp32 is the precision of fp32 arithmetic: no rounding here
                    A = _through(A, lambda x: x.bfloat16().to(x.dtype))
                self.returned = self.anchor = A
                self.read = self.quantized(A)
            self.records = []
            if after:
                o = _read(self.anchor, q)
        return o


def loop(
    case: Case, cotangents: dict[str, Tensor] | None = None, given: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What `Case.forward` and, with cotangents, `Case.backward` should give; zeros where nothing is written.

    Args:
        given: what another implementation returned: its factors and its anchors stand in place of roundings here. The
            factors of a window that it flushed are not known. Replay only.
    """
    if given is not None:
        given = {name: x.double() for name, x in given.items()}
    case = case.map(lambda x: x.double().clone())
    if case.ring is not None:
        case.ring = Ring(*(None if x is None else x.nan_to_num() for x in case.ring))  # type: ignore[arg-type]
    leaves = case.tensors() | case.carried()
    for x in leaves.values():
        x.requires_grad_()
    rows = [torch.zeros_like(case.v[0]) for _ in range(case.q.shape[0])]
    anchors, rings = [], []
    for i, (start, length) in enumerate(zip(case.starts.tolist(), case.lengths.tolist(), strict=True)):
        records = []
        if case.ring is not None:
            for j in range(int(case.cursor[i])):
                k, u, g, v, beta = (None if x is None else x[i, j] for x in case.ring)
                assert k is not None and u is not None
                records.append(_Record(k, u, g, u if v is None else v, beta))
        run = _Loop(case, case.anchor[i], None if case.read is None else case.read[i], records, i, given)
        for t in range(start, start + length):
            rows[t] = run.token(*(None if x is None else x[t] for x in (getattr(case, n) for n in NAMES)))  # type: ignore[arg-type]
        anchors.append(run.returned)
        rings.append(run.records)
    out = {"o": torch.stack(rows) if rows else case.v.new_zeros(case.v.shape)}
    out["anchor"] = torch.stack(anchors) if anchors else case.anchor
    slots, paired = case.window - 1, case.read is not None
    like = {"k": case.k, "u": case.v, "g": case.g} | ({"v": case.v, "beta": case.beta} if paired else {})
    for name, x in like.items():
        if x is not None:
            blank = torch.zeros(x.shape[1:], dtype=torch.float64)
            padded = [torch.stack([*(getattr(r, name) for r in ring), *[blank] * (slots - len(ring))]) if slots
                      else blank.new_zeros(0, *blank.shape) for ring in rings]  # fmt: skip
            out[f"ring_{name}"] = torch.stack(padded) if padded else blank.new_zeros(0, slots, *blank.shape)
    result = {name: x.detach() for name, x in out.items()}
    if cotangents is not None:
        loss = sum((out[name] * c.double().nan_to_num()).sum() for name, c in cotangents.items())
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        result |= {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return result


def cotangents(case: Case, seed: int = 7) -> dict[str, Tensor]:
    """Of every output, NaN where nothing is written."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for name, x in case.forward().items():
        out[name] = torch.randn(x.shape, generator=rng, dtype=torch.float64).to(case.anchor.dtype)
        if name == "o":
            out[name][~case.inside] = torch.nan
        elif name.startswith("ring"):
            out[name][~case.left] = torch.nan
    return out


def relative(got: Tensor, want: Tensor) -> float:
    """Frobenius; where the right answer is (almost) zero, against 1e-4: the cases' numbers are of order 1."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.numel() == 0:
        return 0.0
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-4))
    return error if error == error else float("inf")


def assert_close(case: Case, got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    per_token = {"o", *(f"d{name}" for name in NAMES)}
    assert got.keys() == want.keys()
    for name, expected in want.items():
        value = got[name]
        if name in per_token:
            assert value[~case.inside].isnan().all(), f"{name}: a row outside the sequences was written"
            value, expected = value[case.inside], expected[case.inside]
        assert relative(value, expected) < bound, f"{name}: {relative(value, expected):.1e}"


def assert_is_the_loop(case: Case, bound: float = 1e-9) -> None:
    given = cotangents(case)
    assert_close(case, case.forward() | case.backward(given), loop(case, given), bound)
