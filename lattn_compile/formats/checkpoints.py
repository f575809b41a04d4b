"""States that a forward leaves for its backward, in one tensor: encoded where that loses nothing.

In token mode a state between two tokens is one that its format stores (quantizers that write a written state
unchanged), so its codes and scales are the state, to the bit. Then a row of the buffer is one sequence's state in
bytes: the tensors of `Format.encode`, each of all heads, one after another from a multiple of 16 bytes on. Else a row
is the state itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import Encoded, Format
from lattn_compile.formats.quantizer import Quantizer

__all__ = ["Checkpoints", "Field", "row_fields", "row_format", "row_interval", "row_shape"]

_ALIGN = 16


def row_format(quantize: Quantizer | None, dtype: torch.dtype) -> Format | None:
    """The format of the rows of a call whose arithmetic is in `dtype`; None: the states themselves.

    float64, in which semantics are tested, has none on purpose: its scales are wider than any that is kept.
    """
    if quantize is None or not quantize.idempotent or quantize.fmt.name == "fp32" or dtype is not torch.float32:
        return None
    return quantize.fmt


def row_interval(every: int, quantize: Quantizer | None, dtype: torch.dtype) -> int:
    """Tokens between two checkpoints of which an op says `every`: as many more as a value takes more than one byte."""
    fmt = row_format(quantize, dtype)
    if fmt is None:
        return every if dtype is torch.float64 else 4 * every
    return 2 * every if fmt.is_plain else every


def row_shape(state_shape: Sequence[Any], quantize: Quantizer | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Trailing shape of the buffer for states `[.., HV, K, V]`: their own, or bytes, always a multiple of 16."""
    heads, key_dim, value_dim = state_shape[-3:]
    fmt = row_format(quantize, dtype)
    if fmt is None:
        return (heads, key_dim, value_dim)
    # Room for every field's alignment, so that nothing has to be known here of a format but its size.
    return ((heads * fmt.nbytes(key_dim, value_dim) + _ALIGN * len(fmt.keys)) // _ALIGN * _ALIGN,)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of an encoded state in a row: `shape` `[HV, ...]`, at byte `offset`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=256)
def row_fields(fmt: Format, heads: int, key_dim: int, value_dim: int) -> dict[str, Field]:
    """Where a row has the tensors of `fmt`, by their names."""
    fields, offset = {}, 0
    for key, x in fmt.encode(torch.empty(heads, key_dim, value_dim, device="meta")).items():
        fields[key] = Field(x.dtype, tuple(x.shape), offset)
        offset += -(-fields[key].nbytes // _ALIGN) * _ALIGN
    return fields


@dataclass(frozen=True)
class Checkpoints:
    """A buffer of rows, which reads and writes as the tensor of states `[rows, HV, K, V]` that it stands for.

    Attributes:
        buffer: `[rows, bytes]` uint8, or `[rows, HV, K, V]` where `fmt` is None. Contiguous.
        longest: no sequence of the call has more tokens, as far as shapes tell.
    """

    buffer: Tensor
    fmt: Format | None
    heads: int
    key_dim: int
    value_dim: int
    longest: int | None = None

    @property
    def fields(self) -> dict[str, Field]:
        assert self.fmt is not None
        return row_fields(self.fmt, int(self.heads), int(self.key_dim), int(self.value_dim))

    def index_copy_(self, dim: int, index: Tensor, states: Tensor) -> Checkpoints:
        """Writes `states [n, HV, K, V]`, each one that `fmt` stores, to the rows `index`."""
        assert dim == 0
        if self.fmt is None:
            self.buffer.index_copy_(0, index, states.to(self.buffer.dtype))
            return self
        encoded = self.fmt.encode(states)
        for key, field in self.fields.items():
            rows = encoded[key].flatten(1).view(torch.uint8)
            self.buffer.narrow(1, field.offset, field.nbytes).index_copy_(0, index, rows)
        return self

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The states `[n, HV, K, V]` of the rows `index`: fp32 of encoded ones."""
        assert dim == 0
        rows = self.buffer.index_select(0, index)
        if self.fmt is None:
            return rows
        encoded: Encoded = {}
        for key, field in self.fields.items():
            taken = rows.narrow(1, field.offset, field.nbytes).contiguous().view(field.dtype)
            encoded[key] = taken.view(rows.shape[0], *field.shape)
        return self.fmt.decode(encoded, shape=(self.key_dim, self.value_dim), dtype=torch.float32)
