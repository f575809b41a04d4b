"""Calls of a replay kernel and what the float64 reference makes of them; for Triton's interpreter and for a GPU.

Tokens outside the sequences are NaN, as are ring slots without a record, every output before the call, and, while
`poisoned`, the kernel's own workspace: what is not NaN afterwards was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats.factors import qdq
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels import replay, replay_run
from lattn_compile.kernels.reference import replay as reference
from lattn_compile.kernels.reference import writes
from lattn_compile.ring import Ring
from tests.kernels.reference.replay_cases import NAMES, Case, make_case

__all__ = ["Call", "errors", "make_call", "poisoned", "taken_over"]

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """A `Case` on any device, with gradients of what it returns.

    `results`: the dtype of outputs and gradients of tokens; None is that of the tokens.
    """

    case: Case
    cotangents: Tensors
    results: torch.dtype | None = None

    def map(self, change: Any) -> Call:
        cotangents = {name: change(x) for name, x in self.cotangents.items()}
        return dataclasses.replace(self, case=self.case.map(change), cotangents=cotangents)

    def to(self, device: str) -> Call:
        moved = self.map(lambda x: x.to(device))
        where = {name: getattr(self.case, name).to(device) for name in ("starts", "lengths", "cursor")}
        return dataclasses.replace(moved, case=dataclasses.replace(moved.case, **where))

    def inputs_in(self, dtype: torch.dtype) -> Call:
        """Tokens and the gradients of outputs in `dtype`, states and rings in fp32."""
        case = self.case.map(Tensor.float)
        tokens = {name: x.to(dtype) for name, x in case.tensors().items()}
        cotangents = {name: x.to(dtype if name == "o" else torch.float32) for name, x in self.cotangents.items()}
        return dataclasses.replace(self, case=dataclasses.replace(case, **tokens), cotangents=cotangents)

    def with_options(self, **options: Any) -> Call:
        case = dataclasses.replace(self.case, options=self.case.options | options)
        return dataclasses.replace(self, case=case)

    def forward(self, kernel: Any = replay) -> Tensors:
        """`o`, `anchor` and the ring's parts as `ring_k`, ..."""
        case = self.case
        o = torch.full_like(case.v, torch.nan, dtype=self.results)
        anchor, ring = kernel.forward(*case.arguments(), o, **case.options, keep=case.keep)
        return {"o": o, "anchor": anchor} | _parts(ring)

    def backward(self, kernel: Any = replay) -> Tensors:
        case, given = self.case, self.cotangents
        grads = {f"d{name}": torch.full_like(x, torch.nan, dtype=self.results) for name, x in case.tensors().items()}
        dring = Ring(*(given.get(f"ring_{name}") for name in Ring._fields))  # type: ignore[arg-type]
        has = any(x is not None for x in dring)
        danchor, dread, dring_in = kernel.backward(
            given.get("o"), given.get("anchor"), dring if has else None, *case.arguments(), grads, **case.options
        )
        return grads | {"danchor": danchor} | ({} if dread is None else {"dread": dread}) | _parts(dring_in, "d")

    def both(self, kernel: Any = replay) -> Tensors:
        return self.forward(kernel) | self.backward(kernel)

    def exact(self) -> Call:
        """In float64, as the reference computes it where nothing is lost."""
        return dataclasses.replace(self.map(Tensor.double), results=None)

    def at(self, states: list[Tensor]) -> Call:
        """The same, but a state that is rounded becomes the nearest of `states`, `[N, HV, K, V]` each; a read copy the
        nearest of theirs."""
        quantize = self.case.options["quantize"]
        if quantize is None:
            return self
        if self.case.read is not None:
            states = [quantize.qdq(x) for x in states]
        return self.with_options(quantize=Nearest(quantize.fmt).among(states))

    def stored(self, kernel: Any = replay) -> list[Tensor]:
        """The anchors that the kernel stores on its way, by calls that end at a flush each."""
        case, found = self.case, []
        for flush in range(1, int(((case.cursor + case.lengths) // case.window).max()) + 1):
            lengths = torch.minimum(case.lengths, flush * case.window - case.cursor)
            found.append(Call(dataclasses.replace(case, lengths=lengths, keep=False), {}).forward(kernel)["anchor"])
        return found

    def want(self) -> Tensors:
        """What the float64 reference makes of this, at the states and records that the kernel stores."""
        with taken_over(self.records()):
            return self.exact().at(self.stored()).both(reference)

    def records(self) -> list[Tensor]:
        """The keys `[.., K]` and updates `[.., V]` that the kernel writes, if it rounds them."""
        found: list[Tensor] = []
        if self.case.options["factors"] is None:
            return found
        walk = replay_run.Stretch.walk

        def recorded(self: replay_run.Stretch, *args: Any, **options: Any) -> None:
            walk(self, *args, **options)
            if self.written is not None and options.get("keep"):
                codes, sizes = self.run.written
                assert codes is not None and sizes is not None
                found.append((codes.float() * sizes[..., None]).flatten(0, -2))
                found.append(self.written.transpose(2, 3).flatten(0, 2)[:, : self.run.value_dim].clone())

        replay_run.Stretch.walk = recorded  # type: ignore[method-assign]
        try:
            self.backward()
        finally:
            replay_run.Stretch.walk = walk  # type: ignore[method-assign]
        return [x[~x.isnan().any(-1)] for x in found]


class Nearest(Quantizer):
    """Rounds a state to the nearest of some, head by head: two implementations at one trajectory, whatever their
    order."""

    def among(self, states: list[Tensor]) -> Nearest:
        object.__setattr__(self, "_states", torch.cat(states).double() if states else None)
        return self

    def qdq(self, S: Tensor, identity: Identity | None = None) -> Tensor:
        states = self.__dict__["_states"]
        if states is None:
            return super().qdq(S, identity)
        apart = torch.stack([(states - x.double()).flatten(2).norm(dim=2) for x in S])  # [E, states, HV]
        best = apart.argmin(1)
        heads = torch.arange(S.shape[1], device=S.device)
        return states[best, heads].to(S)


@contextlib.contextmanager
def taken_over(records: list[Tensor]) -> Iterator[None]:
    """The reference takes the nearest of these vectors for what it would round itself; one that is further from what is
    rounded than another code, by more than an error of fp32, is refused."""

    def nearest(x: Tensor, factors: str | None) -> Tensor:
        own = qdq(x, factors)
        rows = x.flatten(0, -2).double()
        known = [r.to(rows) for r in records if r.shape[-1] == x.shape[-1]]
        if not known or not x.numel():
            return own
        # In steps: a distance of float64 from a product would not tell neighbours apart.
        pool = torch.unique(torch.cat([*known, rows.new_zeros(1, x.shape[-1])]), dim=0)
        best = torch.cat([(pool - some[:, None]).norm(dim=2).argmin(1) for some in rows.split(32)])
        found = pool[best].view(x.shape).to(x)
        further = (found - x).abs() - (own - x).abs()
        allowed = 1e-4 * x.abs().amax(-1, keepdim=True) + 1e-30
        assert bool((further <= allowed).all()), (float((further / allowed).max()), factors)
        return found

    before, writes.qdq = writes.qdq, nearest if records else writes.qdq
    try:
        yield
    finally:
        writes.qdq = before


def _parts(ring: Ring | None, prefix: str = "") -> Tensors:
    if ring is None:
        return {}
    return {f"{prefix}ring_{name}": x for name, x in ring._asdict().items() if x is not None}


def errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Relative Frobenius errors; where one wrote and the other did not, infinity."""
    found = {}
    for name, b in want.items():
        a = got[name].to(b.device)
        if bool((a.isnan() != b.isnan()).any()):
            found[name] = torch.inf
            continue
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        found[name] = float((a - b).norm() / b.norm().clamp(min=1e-30))
    return found


def make_call(kind: str = "gdn", *, ring_grads: bool = True, **options: Any) -> Call:
    """A random call in float64; see `make_case`."""
    keep = options.pop("keep", False)
    case = dataclasses.replace(make_case(kind, **options), keep=keep)
    rng = torch.Generator().manual_seed(1)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=rng, dtype=torch.float64)

    cotangents = {"o": like(case.v), "anchor": like(case.anchor)}
    if keep and ring_grads:
        _, ring = reference.forward(*case.arguments(), torch.empty_like(case.v), **case.options, keep=True)
        cotangents |= {name: like(x) for name, x in _parts(ring).items()}
    return Call(case, cotangents)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills the kernel's workspace with NaN before it is used."""
    new = replay_run.Run.new

    def filled(self: Any, *shape: int, **options: Any) -> Tensor:
        return new(self, *shape, **options).fill_(torch.nan)

    replay_run.Run.new = filled  # type: ignore[method-assign]
    try:
        yield
    finally:
        replay_run.Run.new = new  # type: ignore[method-assign]


assert NAMES
