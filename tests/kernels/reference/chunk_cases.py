"""Calls of the chunked reference with ragged sequences, and what the oracle says about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference import chunk
from lattn_compile.testing import oracle

__all__ = ["DECAYS", "NAMES", "RULES", "Case", "assert_close", "make_case", "relative"]

NAMES = ("q", "k", "v", "g", "beta")
DECAYS = ("none", "head", "channel")
RULES = ("delta", "additive")


@dataclasses.dataclass
class Case:
    """Flat tokens of sequences of `lengths`, each in `rooms[i]` rows whose last ones belong to nobody."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    rooms: Tensor
    lengths: Tensor
    offsets: Tensor | None
    rule: str
    scale: float
    qk_l2norm: bool
    chunk_size: int = 64
    state_format: str | None = None
    readout: str = "before_write"
    rounding: dict[str, Any] = dataclasses.field(default_factory=dict)
    position: int = 0
    """`rounding`: options of the `Quantizer`. Every first token is at `position`, sequence i is named i + 2^33."""

    @property
    def starts(self) -> Tensor:
        return self.rooms.cumsum(0) - self.rooms

    @property
    def inside(self) -> Tensor:
        row = torch.arange(self.q.shape[0])
        return ((row >= self.starts[:, None]) & (row < (self.starts + self.lengths)[:, None])).any(0)

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name in NAMES if (x := getattr(self, name)) is not None}

    def map(self, change: Any) -> Case:
        return dataclasses.replace(
            self, **{name: change(x) for name, x in self.tensors().items()}, state=change(self.state)
        )

    def options(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "scale": self.scale,
            "qk_l2norm": self.qk_l2norm,
            "chunk_size": self.chunk_size,
            "quantize": None if self.state_format is None else Quantizer(parse(self.state_format), **self.rounding),
            "readout": self.readout,
            "identity": Identity(torch.full_like(self.lengths, self.position), self.names) if self.rounding else None,
        }

    @property
    def names(self) -> Tensor:
        return torch.arange(self.lengths.shape[0]) + 2**33

    def arguments(self) -> tuple[Any, ...]:
        tokens = (getattr(self, name) for name in NAMES)
        return (*tokens, self.state, self.starts, self.lengths, self.offsets)

    def forward(self) -> dict[str, Tensor]:
        """`o` (NaN where nothing was written) and `final`."""
        o = torch.full(self.v.shape, torch.nan, dtype=self.state.dtype)
        return {"final": chunk.forward(*self.arguments(), o, **self.options()), "o": o}

    def backward(self, grad_o: Tensor | None, grad_final: Tensor | None) -> dict[str, Tensor]:
        """Gradients by name, NaN where nothing was written."""
        grads = {
            f"d{name}": torch.full(x.shape, torch.nan, dtype=self.state.dtype) for name, x in self.tensors().items()
        }
        dstate = chunk.backward(grad_o, grad_final, *self.arguments(), grads, **self.options())
        return grads | {"dstate": dstate}

    def cotangents(self) -> tuple[Tensor, Tensor]:
        """Of `o`, NaN in rows that belong to nobody, and of the final state."""
        rng = torch.Generator().manual_seed(7)
        grad_o = torch.randn(self.v.shape, generator=rng, dtype=torch.float64)
        grad_o[~self.inside] = torch.nan
        grad_final = torch.randn(self.state.shape, generator=rng, dtype=torch.float64)
        return grad_o.to(self.state.dtype), grad_final.to(self.state.dtype)

    def both(self) -> dict[str, Tensor]:
        return self.forward() | self.backward(*self.cotangents())

    def expected(self, *, gradients: bool = True) -> dict[str, Tensor]:
        """The same by the oracle's loop and autograd through it; zeros in rows that belong to nobody."""
        grad_o, grad_final = (x.double() for x in self.cotangents())
        double = self.map(lambda x: x.double().clone().requires_grad_(gradients))
        edges = torch.cat((self.rooms.new_zeros(1), self.rooms.cumsum(0)))
        out = oracle(
            *(None if x is None else x[None] for x in (getattr(double, name) for name in NAMES)),
            double.state,
            edges,
            sequence_lengths=self.lengths,
            cursor=torch.zeros_like(self.lengths) if self.offsets is None else self.offsets % self.chunk_size,
            rule=self.rule,
            scale=self.scale,
            qk_l2norm=self.qk_l2norm,
            write="exact" if self.state_format is None else "chunk",
            state_format=self.state_format or "fp32",
            chunk_size=self.chunk_size,
            readout=self.readout,
            position=self.position,
            sequence_ids=self.names,
            **self.rounding,
        )
        result = {"final": out.final_state.detach(), "o": out.o[0].detach()}
        if gradients:
            loss = (out.o[0] * grad_o.nan_to_num()).sum() + (out.final_state * grad_final).sum()
            leaves = [*double.tensors().values(), double.state]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            result |= dict(zip([*(f"d{name}" for name in double.tensors()), "dstate"], grads, strict=True))
        return result


def make_case(
    *,
    rule: str = "delta",
    decay: str = "head",
    lengths: tuple[int, ...] = (130,),
    spare: int = 0,
    key_heads: int = 1,
    groups: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
    beta: bool = True,
    qk_l2norm: bool = True,
    offsets: tuple[int, ...] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    """A random case; rows that belong to nobody are NaN."""
    rng = torch.Generator().manual_seed(seed)
    heads = key_heads * groups
    rooms = torch.tensor([n + spare for n in lengths], dtype=torch.int64)
    tokens = int(rooms.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    k = normal(tokens, key_heads, key_dim)
    per_gate = {"head": (tokens, heads), "channel": (tokens, heads, key_dim)}
    # Rates over four decades, so that one block holds slow and strong decay side by side.
    g = None if decay == "none" else -(10.0 ** (normal(*per_gate[decay]).clamp(-3, 1.5)))
    case = Case(
        q=normal(tokens, key_heads, key_dim),
        k=k if qk_l2norm else torch.nn.functional.normalize(k, dim=-1),
        v=normal(tokens, heads, value_dim),
        g=g,
        beta=1.9 * torch.rand(tokens, heads, generator=rng, dtype=torch.float64) if beta else None,
        state=normal(len(lengths), heads, key_dim, value_dim),
        rooms=rooms,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        offsets=None if offsets is None else torch.tensor(offsets, dtype=torch.int64),
        rule=rule,
        scale=key_dim**-0.5,
        qk_l2norm=qk_l2norm,
        **options,
    )
    for x in case.tensors().values():
        x[~case.inside] = torch.nan
    return case.map(lambda x: x.to(dtype))


def relative(got: Tensor, want: Tensor) -> float:
    """Frobenius; where the right answer is (almost) zero, against 1e-4: the cases' numbers are of order 1."""
    if got.numel() == 0:
        return 0.0
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-4))
    return error if error == error else float("inf")


def assert_close(case: Case, got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    per_token = {"o", *(f"d{name}" for name in NAMES)}
    for name, expected in want.items():
        value = got[name]
        if name in per_token:
            assert value[~case.inside].isnan().all(), f"{name}: a row outside the sequences was written"
            value, expected = value[case.inside], expected[case.inside]
        assert relative(value, expected) < bound, f"{name}: {relative(value, expected):.1e}"
