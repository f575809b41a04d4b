"""Calls of a decode kernel and what the float64 reference makes of them; for Triton's interpreter and for a GPU.

Tokens outside the sequences are NaN, and so is every output before the call: what is not NaN afterwards was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.checkpoints import Checkpoints, row_format, row_shape
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference import decode as reference

__all__ = ["Call", "Given", "Outcome", "make_call"]

NAMES = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call returned and wrote, by name: o, final, checkpoints, dq, dk, dv, dg, dbeta, dstate."""

    tensors: dict[str, Tensor]

    def errors(self, want: Outcome) -> dict[str, float]:
        """Relative Frobenius errors; where one wrote and the other did not, infinity."""
        found = {}
        for name, b in want.tensors.items():
            a = self.tensors[name].to(b.device)
            if bool((a.isnan() != b.isnan()).any()):
                found[name] = torch.inf
                continue
            a, b = a.double().nan_to_num(), b.double().nan_to_num()
            found[name] = float((a - b).norm() / b.norm().clamp(min=1e-30))
        return found

    def same_bits(self, other: Outcome) -> list[str]:
        """Names of the tensors that differ in any bit."""
        return [
            name
            for name, a in self.tensors.items()
            if not torch.equal(a.contiguous().view(torch.uint8), other.tensors[name].contiguous().view(torch.uint8))
        ]


class Given(Quantizer):
    """Rounds the t-th state it sees to the t-th of `states`: two implementations at one point of a trajectory."""

    def using(self, states: Sequence[Tensor]) -> Given:
        object.__setattr__(self, "_states", list(states))
        return self

    def qdq(self, S: Tensor, identity: Identity | None = None) -> Tensor:
        return self.__dict__["_states"].pop(0).to(S)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Call:
    """Flat tokens of sequences with a gap of NaN around each, a state each, and the options of a decode kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    starts: Tensor
    lengths: Tensor
    options: dict[str, Any]

    def map(self, change: Any) -> Call:
        """The same with every floating-point tensor changed."""
        names = (*NAMES, "state")
        return dataclasses.replace(self, **{n: change(x) for n in names if (x := getattr(self, n)) is not None})

    def to(self, device: str) -> Call:
        moved = self.map(lambda x: x.to(device))
        return dataclasses.replace(moved, starts=self.starts.to(device), lengths=self.lengths.to(device))

    def with_options(self, **options: Any) -> Call:
        return dataclasses.replace(self, options=self.options | options)

    def arguments(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state, self.starts, self.lengths)

    def forward(self, kernel: Any, every: int = 0, *, o: Tensor | None = None) -> Outcome:
        o = torch.full_like(self.v, torch.nan) if o is None else o
        marks = None
        if every:
            slots = self.q.shape[0] // every + self.starts.shape[0]
            marks = self.state.new_full((slots, *self.state.shape[1:]), torch.nan)
        final = kernel.forward(*self.arguments(), o, marks, every, **self.options)
        return Outcome({"o": o, "final": final} | ({} if marks is None else {"checkpoints": marks}))

    def rows(self, every: int) -> Checkpoints:
        """Checkpoints as the op would make them, every byte set."""
        quantize, heads = self.options["quantize"], self.state.shape[1:]
        fmt = row_format(quantize, self.state.dtype)
        shape = (self.q.shape[0] // every + self.starts.shape[0], *row_shape(self.state.shape, quantize, torch.float32))
        if fmt is None:
            buffer = self.state.new_full(shape, torch.nan)
        else:
            buffer = torch.full(shape, 255, dtype=torch.uint8, device=self.q.device)
        return Checkpoints(buffer, fmt, *heads, longest=int(self.lengths.max()))

    def trained(self, kernel: Any, every: int) -> Outcome:
        """As `both`, by way of the op's own checkpoints."""
        o, rows = torch.full_like(self.v, torch.nan), self.rows(every)
        final = kernel.forward(*self.arguments(), o, rows, every, **self.options)
        back = self.backward(kernel, rows, every, longest=rows.longest) if kernel is not reference else None
        back = back or self.backward(kernel, rows, every)
        return Outcome({"o": o, "final": final} | back.tensors)

    def cotangents(self) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(1)
        shapes = self.v.shape, self.state.shape
        grad_o, grad_final = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
        return grad_o.to(self.v), grad_final.to(self.state)

    def backward(self, kernel: Any, marks: Tensor | Checkpoints | None = None, every: int = 0, **more: Any) -> Outcome:
        grad_o, grad_final = self.cotangents()
        given = {n: x for n in NAMES if (x := getattr(self, n)) is not None}
        grads = {
            f"d{n}": torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for n, x in given.items()
        }
        dstate = kernel.backward(grad_o, grad_final, *self.arguments(), marks, every, grads, **self.options, **more)
        return Outcome(grads | {"dstate": dstate})

    def both(self, kernel: Any, every: int) -> Outcome:
        """Forward with checkpoints and the backward from them."""
        there = self.forward(kernel, every)
        back = self.backward(kernel, there.tensors["checkpoints"], every)
        return Outcome(there.tensors | back.tensors)

    def exact(self) -> Call:
        """In float64, as the reference computes it where nothing is lost."""
        return self.map(Tensor.double)

    def tokenwise(self, kernel: Any) -> list[Tensor]:
        """The state after every token, `[N, HV, K, V]` each, by calls of one token; all sequences as long as one."""
        state, states = self.state, []
        for t in range(int(self.lengths[0])):
            step = dataclasses.replace(self, state=state, starts=self.starts + t, lengths=torch.ones_like(self.lengths))
            state = step.forward(kernel).tensors["final"]
            states.append(state)
        return states


def make_call(
    *,
    key_heads: int = 1,
    ratio: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    lengths: Sequence[int] = (3, 0, 2),
    gap: int = 1,
    decay: str | None = "head",
    beta: bool = True,
    state_format: str | None = None,
    rule: str = "delta",
    readout: str = "before_write",
    qk_l2norm: bool = True,
    dtype: torch.dtype = torch.float32,
    rate: float = 0.3,
    seed: int = 0,
) -> Call:
    """Random tokens; the initial state is one that the format stores."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    starts, tokens = [], gap
    for length in lengths:
        starts.append(tokens)
        tokens += length + gap
    heads = key_heads * ratio
    size = 1.0 if qk_l2norm else key_dim**-0.5
    x: dict[str, Tensor | None] = {
        "q": normal(tokens, key_heads, key_dim),
        "k": normal(tokens, key_heads, key_dim) * size,
        "v": normal(tokens, heads, value_dim),
        "g": None,
        "beta": torch.rand(tokens, heads, generator=rng, dtype=torch.float64) if beta else None,
    }
    if decay is not None:
        shape = (tokens, heads) if decay == "head" else (tokens, heads, key_dim)
        x["g"] = -rate * torch.rand(shape, generator=rng, dtype=torch.float64)
    outside = torch.ones(tokens, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        outside[start : start + length] = False
    for tensor in x.values():
        if tensor is not None:
            tensor[outside] = torch.nan
    quantize = None if state_format is None else Quantizer(parse(state_format))
    state = 0.5 * normal(len(lengths), heads, key_dim, value_dim).float()
    options = {
        "rule": rule,
        "scale": key_dim**-0.5,
        "qk_l2norm": qk_l2norm,
        "quantize": quantize,
        "readout": readout,
    }
    return Call(
        **{name: None if t is None else t.to(dtype) for name, t in x.items()},  # type: ignore[arg-type]
        state=state if quantize is None else quantize.qdq(state),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        options=options,
    )


def at_its_states(call: Call, kernel: Any) -> Outcome:
    """Gradients of the float64 reference at the very states that `kernel` stored; sequences of one length."""
    states = [s.double() for s in call.tokenwise(kernel)]
    quantize = call.options["quantize"]
    exact = call.exact()
    if quantize is not None:
        exact = exact.with_options(quantize=Given(quantize.fmt).using(states))
    # One stretch, so that the reference runs each token once.
    return exact.backward(reference, exact.state, call.q.shape[0] + 1)
