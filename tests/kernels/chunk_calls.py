"""Calls of a chunk kernel and what the float64 reference makes of them; for Triton's interpreter and for a GPU.

Tokens outside the sequences are NaN, and so is every output before the call: what is not NaN afterwards was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from tests.kernels import decode_calls
from tests.kernels.decode_calls import NAMES, Outcome

__all__ = ["Call", "make_call"]


@dataclasses.dataclass(frozen=True)
class Call:
    """Flat tokens of sequences with a gap of NaN around each, a state each, and the options of a chunk kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    starts: Tensor
    lengths: Tensor
    offsets: Tensor | None
    options: dict[str, Any]

    def map(self, change: Any) -> Call:
        """The same with every floating-point tensor changed."""
        names = (*NAMES, "state")
        return dataclasses.replace(self, **{n: change(x) for n in names if (x := getattr(self, n)) is not None})

    def inputs(self, dtype: torch.dtype) -> Call:
        """The same with q, k, v and beta in another dtype; g and the state stay in float32."""
        names = ("q", "k", "v", "beta")
        return dataclasses.replace(self, **{n: x.to(dtype) for n in names if (x := getattr(self, n)) is not None})

    def to(self, device: str) -> Call:
        moved = self.map(lambda x: x.to(device))
        names = ("starts", "lengths", "offsets")
        return dataclasses.replace(moved, **{n: x.to(device) for n in names if (x := getattr(self, n)) is not None})

    def exact(self) -> Call:
        return self.map(Tensor.double)

    def arguments(self) -> tuple[Any, ...]:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.state)
        return (*tensors, self.starts, self.lengths, self.offsets)

    def forward(self, kernel: Any) -> Outcome:
        o = torch.full_like(self.v, torch.nan, memory_format=torch.contiguous_format)
        final = kernel.forward(*self.arguments(), o, **self.options)
        return Outcome({"o": o, "final": final})

    def backward(self, kernel: Any) -> Outcome:
        rng = torch.Generator().manual_seed(1)
        # Numbers that every dtype holds, so that all dtypes get the same.
        grad_o, grad_final = (torch.randn(x.shape, generator=rng).mul(16).round() / 16 for x in (self.v, self.state))
        given = {n: x for n in NAMES if (x := getattr(self, n)) is not None}
        grads = {
            f"d{n}": torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for n, x in given.items()
        }
        dstate = kernel.backward(grad_o.to(self.v), grad_final.to(self.state), *self.arguments(), grads, **self.options)
        return Outcome(grads | {"dstate": dstate})

    def both(self, kernel: Any) -> Outcome:
        return Outcome(self.forward(kernel).tensors | self.backward(kernel).tensors)


def make_call(
    *,
    chunk_size: int = 64,
    offsets: Sequence[int] | None = None,
    state_format: str | None = None,
    one_key: bool = False,
    strength: float | None = None,
    **options: Any,
) -> Call:
    """Random tokens (`decode_calls.make_call`) for the chunk form.

    Args:
        one_key: every token has the same key. strength: every token's beta.
    """
    call = decode_calls.make_call(**options)
    k, beta = call.k, call.beta
    if one_key:
        k = torch.where(k.isnan(), k, k[int(call.starts[0])])
    if strength is not None and beta is not None:
        beta = torch.where(beta.isnan(), beta, strength)
    quantize = None if state_format is None else Quantizer(parse(state_format))
    return Call(
        call.q, k, call.v, call.g, beta, call.state, call.starts, call.lengths,
        None if offsets is None else torch.tensor(offsets),
        call.options | {"quantize": quantize, "chunk_size": chunk_size},
    )  # fmt: skip
