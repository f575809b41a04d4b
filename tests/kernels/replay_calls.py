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

from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels import replay, replay_run
from lattn_compile.kernels.reference import replay as reference
from lattn_compile.ring import Ring
from tests.kernels.reference.replay_cases import NAMES, Case, make_case

__all__ = ["Call", "errors", "make_call", "poisoned"]

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """A `Case` on any device, with gradients of what it returns."""

    case: Case
    cotangents: Tensors

    def map(self, change: Any) -> Call:
        return Call(self.case.map(change), {name: change(x) for name, x in self.cotangents.items()})

    def to(self, device: str) -> Call:
        moved = self.map(lambda x: x.to(device))
        where = {name: getattr(self.case, name).to(device) for name in ("starts", "lengths", "cursor")}
        return Call(dataclasses.replace(moved.case, **where), moved.cotangents)

    def inputs_in(self, dtype: torch.dtype) -> Call:
        """Tokens and the gradients of outputs in `dtype`, states and rings in fp32."""
        case = self.case.map(Tensor.float)
        tokens = {name: x.to(dtype) for name, x in case.tensors().items()}
        cotangents = {name: x.to(dtype if name == "o" else torch.float32) for name, x in self.cotangents.items()}
        return Call(dataclasses.replace(case, **tokens), cotangents)

    def with_options(self, **options: Any) -> Call:
        return Call(dataclasses.replace(self.case, options=self.case.options | options), self.cotangents)

    def forward(self, kernel: Any = replay) -> Tensors:
        """`o`, `anchor` and the ring's parts as `ring_k`, ..."""
        case = self.case
        o = torch.full_like(case.v, torch.nan)
        anchor, ring = kernel.forward(*case.arguments(), o, **case.options, keep=case.keep)
        return {"o": o, "anchor": anchor} | _parts(ring)

    def backward(self, kernel: Any = replay) -> Tensors:
        case, given = self.case, self.cotangents
        grads = {f"d{name}": torch.full_like(x, torch.nan) for name, x in case.tensors().items()}
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
        return self.map(Tensor.double)

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
        """What the float64 reference makes of this, at the states that the kernel stores."""
        return self.exact().at(self.stored()).both(reference)


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
