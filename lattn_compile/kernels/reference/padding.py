"""Ragged sequences as rectangles, head sharing, and the l2norm of q and k.

Tokens arrive flat, `[M, ...]`, and sequence i owns the rows `starts[i] : starts[i] + lengths[i]`. A kernel wants
rectangles `[rows, slots, ...]`. A `Slots` says which token sits in which slot; an empty slot is filled with zeros, and
a token whose `k`, `v`, `beta` and `g` are all 0 is the exact identity of the recurrence (semantics §2). Tokens outside
every sequence are never read, so they may hold NaN, and their output rows are never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["L2NORM_EPS", "Slots", "gather", "l2norm", "l2norm_backward", "scatter_", "split_heads"]

L2NORM_EPS = 1e-6
"""Inside the root, as FLA has it: a zero row stays zero and its gradient stays finite (1 / sqrt(eps) = 1e3)."""


@dataclass(frozen=True, slots=True)
class Slots:
    """A rectangle of token positions.

    Attributes:
        index: int64 `[rows, slots]`, the flat token in each slot; any legal token where the slot is empty.
        valid: bool `[rows, slots]`, False where the slot is empty; None when every slot holds a token.
        first: the first token when the slots are exactly the tokens `first, first + 1, ...` in order, so that gathering
            is a view and scattering one copy; None otherwise.
    """

    index: Tensor
    valid: Tensor | None
    first: int | None = None


def gather(x: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """Tokens `x [M, ...]` in their slots, `[rows, slots, ...]` of `dtype`, zeros in empty slots.

    The result may be a view of `x`: treat it as read-only.
    """
    rows, width = slots.index.shape
    shape = (rows, width, *x.shape[1:])
    if slots.first is not None:
        return x[slots.first : slots.first + rows * width].reshape(shape).to(dtype)
    if x.shape[0] == 0 or rows * width == 0:  # index_select refuses an empty tensor
        return x.new_zeros(shape, dtype=dtype)
    padded = x.index_select(0, slots.index.reshape(-1)).reshape(shape).to(dtype)
    if slots.valid is not None:
        # Selected, not multiplied: whatever lies in a token that is not ours (NaN included) must not come through.
        padded.masked_fill_(~slots.valid.reshape(rows, width, *(1,) * (x.dim() - 1)), 0)
    return padded


def scatter_(out: Tensor, slots: Slots, values: Tensor) -> None:
    """Writes `values [rows, slots, ...]` to the tokens of `out [M, ...]` that sit in a slot, and to no other row."""
    rows, width = slots.index.shape
    if slots.first is not None:
        out[slots.first : slots.first + rows * width] = values.reshape(rows * width, *out.shape[1:]).to(out.dtype)
        return
    values = values.to(out.dtype)
    if slots.valid is not None:
        out[slots.index[slots.valid]] = values[slots.valid]
    else:
        out[slots.index] = values


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, and the reciprocal norm `[..., 1]` that the backward needs."""
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return x * rstd, rstd


def l2norm_backward(grad: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of `l2norm` with respect to its input, from its two results and the gradient of the first."""
    return (grad - normed * (grad * normed).sum(-1, keepdim=True)) * rstd


def split_heads(x: Tensor, key_heads: int, dim: int) -> Tensor:
    """Views the value-head axis `dim` (`HV = R * H`) as `(H, R)`: value head j reads key head `j // R`.

    Products with a key-head tensor then broadcast over R (give it a size-1 axis), and a key-head gradient is the sum
    over R: no repeat of q or k is ever made.
    """
    return x.unflatten(dim, (key_heads, x.shape[dim] // key_heads))
