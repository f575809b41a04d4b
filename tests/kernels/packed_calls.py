"""Steps on packed rows, as the tests of their Triton kernels call them: in the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lattn_compile.packed import layout, ops
from lattn_compile.policy import Policy
from lattn_compile.recurrence import BY_NAME
from lattn_compile.testing.inputs import make_inputs

__all__ = ["Rows", "Tokens", "bits", "differing", "make_tokens"]

SCALE = 0.3


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One call: q, k, v, g, beta, its sequences' slots and lengths."""

    x: list[Any]
    slots: Tensor
    lengths: Tensor | None = None
    ends: Tensor | None = None
    has: Tensor | None = None

    def in_dtype(self, dtype: torch.dtype) -> Tokens:
        """q, k, v and beta in `dtype`; gates stay float32 unless it is float64."""
        own = [t if t is None or (i == 3 and dtype is not torch.float64) else t.to(dtype) for i, t in enumerate(self.x)]
        return dataclasses.replace(self, x=own)

    def to(self, device: str) -> Tokens:
        moved = [t if t is None else t.to(device) for t in self.x]
        rest = {n: getattr(self, n) for n in ("slots", "lengths", "ends", "has")}
        return Tokens(moved, **{n: t if t is None else t.to(device) for n, t in rest.items()})

    def at(self, t: int, lengths: Tensor) -> Tokens:
        """Token t of every sequence, for those that have it."""
        one = [x if x is None else x[:, t : t + 1].contiguous() for x in self.x]
        return dataclasses.replace(self, x=one, lengths=(lengths > t).to(torch.int32))


def make_tokens(
    kind: str,
    tokens: int,
    slots: list[int],
    *,
    lengths: list[int] | None = None,
    packed: bool = False,
    has: list[bool] | None = None,
    key_heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    seed: int = 0,
) -> Tokens:
    """Fresh tokens of `len(slots)` sequences; `packed`: one behind the other in a single row, with `lengths`."""
    x = make_inputs(
        kind,
        batch=1 if packed else len(slots),
        tokens=sum(lengths or []) + 1 if packed else tokens,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        seed=seed,
    )
    own = [x.q, x.k, x.v, x.g, x.beta]
    ends = lens = None
    if packed:  # with a row at the end that is nobody's
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    elif lengths is not None:
        lens = torch.tensor(lengths, dtype=torch.int32)
    return Tokens(own, torch.tensor(slots, dtype=torch.int32), lens, ends, None if has is None else torch.tensor(has))


class Rows:
    """Stored tensors of a site, full of NaN and rubbish, and their cursors: -1, nothing is stored.

    Args:
        dtype: of the arithmetic; float64 is the oracle's. v_first: codes lie as `[slots, HV, V, K]`.
    """

    def __init__(
        self,
        policy: Policy,
        kind: str,
        like: Tokens,
        slots: int,
        *,
        device: str = "cpu",
        dtype: Any = torch.float32,
        v_first: bool = False,
    ) -> None:
        q, _, v, g, beta = like.x
        decay = "none" if g is None else "head" if g.dim() == 3 else "channel"
        self.call, self.rule = layout.call_of(policy), BY_NAME[kind].rule
        self.heads = layout.Heads(q.shape[2], v.shape[2], q.shape[3], v.shape[3], decay, beta is not None)
        self.tensors = layout.empty(self.call, self.heads, slots, device, dtype, v_first=v_first)
        self.cursor = torch.full((slots,), -1, dtype=torch.int32, device=device)
        for x in self.tensors.values():
            if x.dtype.itemsize > 1:
                x.fill_(torch.nan)
            else:
                x.view(torch.uint8).random_(0, 256)

    def copy(self, dtype: torch.dtype | None = None) -> Rows:
        """The same rows; in float64, with the stored numbers' values."""
        other = object.__new__(Rows)
        other.call, other.rule, other.heads, other.cursor = self.call, self.rule, self.heads, self.cursor.clone()
        other.tensors = {
            n: x.to(dtype) if dtype is not None and x.dtype is torch.float32 else x.clone()
            for n, x in self.tensors.items()
        }
        return other

    def _options(self, implementation: str, qk_l2norm: bool) -> dict[str, Any]:
        own = {**self.call.op_options(), "implementation": implementation}
        return {**own, "rule": self.rule, "scale": SCALE, "qk_l2norm": qk_l2norm}

    def step(self, t: Tokens, implementation: str, *, padding_slot: int = -1, qk_l2norm: bool = True) -> Tensor:
        """The op, in place."""
        op = getattr(torch.ops.lattn, ops.OPS[self.call.write])
        state = (list(self.tensors.values()), self.cursor, t.slots, t.has, t.ends, t.lengths, None, None)
        o: Tensor = op(*t.x, *state, **self._options(implementation, qk_l2norm), padding_slot=padding_slot)
        return o

    def emulated(self, t: Tokens, implementation: str) -> tuple[Tensor, dict[str, Tensor], Any]:
        """What the functional op makes of the sequences' rows: o, and the rows stored as they would be."""
        at = t.slots.long()
        rows = {n: _take(x, at) for n, x in self.tensors.items()}
        for x in rows.values():  # what nobody stored is zeros
            (x.view(torch.uint8) if x.dtype.itemsize == 1 else x)[self.cursor[at] < 0] = 0
        before = layout.unpack(rows, self.call, self.cursor[at], self.heads, rule=self.rule)
        call = self.call._replace(implementation=implementation)
        options = {"rule": self.rule, "scale": SCALE, "qk_l2norm": True, "site_id": 0}
        o, after = ops.advance(before, call, t.x, **options, cu_seqlens=t.ends, sequence_lengths=t.lengths)  # type: ignore[arg-type]
        return o, layout.pack(after, self.call), after

    def flush(self, slots: Tensor, implementation: str) -> None:
        unused = ("readout", "implementation", "gate")
        own = {n: x for n, x in self.call.op_options().items() if n not in unused}
        h = self.heads
        torch.ops.lattn.flush_(
            list(self.tensors.values()), self.cursor, slots, None, None, heads=list(h[:4]), decay=h.decay,
            has_beta=h.has_beta, rule=self.rule, implementation=implementation, **own,
        )  # fmt: skip

    def records(self, slots: Tensor) -> dict[str, Tensor]:
        """The rows of slots, without the ring's places that hold no record."""
        at = slots.long()
        found = {}
        for name, x in self.tensors.items():
            rows = _take(x, at)
            if name.startswith("ring_"):
                rows = rows[torch.arange(rows.shape[1], device=rows.device) < self.cursor[at][:, None].clamp(min=0)]
            found[name] = rows
        return found


def _take(x: Tensor, at: Tensor) -> Tensor:
    if x.dtype.itemsize == 1:  # torch indexes no 8-bit floats
        return x.view(torch.uint8)[at].view(x.dtype)
    return x[at]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same, bit for bit."""
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]
