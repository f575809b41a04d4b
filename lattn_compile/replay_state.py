"""`ReplayState`: what the replay and two-precision modes carry from call to call (semantics §5).

One pytree holds the anchor (codes and scales), the read copy, the ring of pending updates and the cursors together, so
that a copy, a reordering or a save in the middle of a window cannot take one without the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lattn_compile.formats import factors as factor_codec
from lattn_compile.ring import Ring
from lattn_compile.state import EncodedState, as_bytes, check_index, device_of, from_bytes, nbytes

__all__ = ["ReplayState"]


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayState:
    """An anchor and the updates since it was written; `S = Γ A + Σ Γ k̂ ûᵀ` over the ring.

    Made by `lc.linear_attention` under the policies `Replay` and `TwoPrecision`; legal as `initial_state` of the next
    call under the same policy, and as a dense start (`dense()`) of an exact one.

    Attributes:
        mode: "replay" or "two_precision". window: W. factors: what the ring's k and u are stored in, None is fp32.
        rule: "delta" or "additive", which two_precision needs to advance its anchor.
        anchor: the state at the last flush, with the cursors and, where a sequence was not handed over yet, its exact
            state. read: two_precision's read copy of it, else None.
        ring: the pending records (`Ring`), decoded values in the compute dtype, slots from the cursor on zero.
        cursor: int32 `[N]`. -1: exact, the hand-over is still to come. Else 0 <= cursor < W pending records.
    """

    mode: str
    window: int
    anchor: EncodedState
    ring: Ring
    cursor: Tensor
    read: EncodedState | None = None
    factors: str | None = None
    rule: str = "delta"

    @property
    def exact(self) -> Tensor | None:
        """The state of sequences that were not handed over yet, `[N, HV, K, V]`; None where there are none."""
        return self.anchor.exact

    @property
    def position(self) -> Tensor | None:
        """Tokens that each sequence has seen, int64 `[N]`; where the rounding is stochastic, else None."""
        return self.anchor.position

    @property
    def nbytes(self) -> int:
        """Bytes of what has to be stored: codes, scales, the ring in its factors' format, cursors and `exact`."""
        total = self.anchor.nbytes + nbytes(self.ring.g, self.ring.v, self.ring.beta)
        if self.read is not None:
            total += nbytes(*self.read.tensors.values())
        for x in (self.ring.k, self.ring.u):
            vectors = x.numel() // max(x.shape[-1], 1)
            total += vectors * factor_codec.nbytes(x.shape[-1], self.factors) if self.factors else nbytes(x)
        return total

    def dense(self) -> Tensor:
        """The state as a reader sees it, `[N, HV, K, V]`: exact where it was not handed over yet; else, in replay, what
        is reconstructed from anchor and ring, in two_precision the anchor advanced exactly over the pending inputs."""
        anchor, ring = self.anchor.dense(), self.ring
        if self.window == 1:
            return anchor
        raw = self.mode == "two_precision"
        values, beta, rule = (ring.v, ring.beta, self.rule) if raw else (ring.u, None, "additive")
        pending = self.cursor.clamp(min=0)
        _, state = torch.ops.lattn.chunk(
            ring.k, ring.k, values, ring.g, beta, anchor, None, None, pending, None, rule=rule, scale=1.0
        )
        return state

    def index_select(self, index: Tensor) -> ReplayState:
        """The sequences `index` (int `[M]`), for reordering beams or dropping finished ones.

        Raises:
            DtypeError, StateError: not such a tensor, or (on CPUs) sequences that there are none of.
        """
        check_index(index, self.cursor)
        return self._map(lambda x: x.index_select(0, index))

    def detach(self) -> ReplayState:
        """Cuts the gradient, for truncated back-propagation."""
        return self._map(lambda x: x.detach())

    def to(self, device: torch.device | str) -> ReplayState:
        """All parts on another device. Raises as `EncodedState.to` does."""
        where = device_of(device)
        return self._map(lambda x: x.to(where))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> ReplayState:
        return dataclasses.replace(
            self,
            anchor=self.anchor._map(fn),
            read=None if self.read is None else self.read._map(fn),
            ring=Ring(*(None if x is None else fn(x) for x in self.ring)),  # type: ignore[arg-type]
            cursor=fn(self.cursor),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A file holds what would be stored: the anchor's codes, and the factors in their own format.
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "ring"}
        ring = {name: x.detach() for name, x in self.ring._asdict().items() if x is not None}
        narrow: dict[str, Any] = {}
        if self.factors is not None:
            for name in ("k", "u"):
                ring[name], narrow[name] = as_bytes(factor_codec.encode(ring[name], self.factors))
        return (_load, (fields, ring, narrow, self.anchor.dtype))

    def __repr__(self) -> str:
        size = [*self.ring.u.shape[:1], self.ring.u.shape[2], *self.anchor.shape]
        what = f"{self.anchor.state_format}, {self.mode}({self.window})"
        what += f", {self.factors} factors" if self.factors else ""
        what += f", read {self.read.state_format}" if self.read is not None else ""
        return f"ReplayState({what}, {size}, {self.nbytes} bytes)"


def _load(fields: dict[str, Any], ring: dict[str, Any], narrow: dict[str, Any], dtype: torch.dtype) -> ReplayState:
    factors = fields["factors"]
    for name, dtypes in narrow.items():
        ring[name] = factor_codec.decode(from_bytes(ring[name], dtypes), factors).to(dtype)
    return ReplayState(**fields, ring=Ring(**ring))


# `torch.load(weights_only=True)` calls nothing that is not listed.
torch.serialization.add_safe_globals([_load])

_OWN = ("anchor", "read", "cursor")


def _flatten(state: ReplayState) -> tuple[list[Any], tuple[Any, ...]]:
    children = {name: getattr(state, name) for name in _OWN} | state.ring._asdict()
    children = {name: child for name, child in children.items() if child is not None}
    return list(children.values()), (tuple(children), state.mode, state.window, state.factors, state.rule)


def _unflatten(children: Any, context: tuple[Any, ...]) -> ReplayState:
    names, mode, window, factors, rule = context
    named = dict(zip(names, children, strict=True))
    ring = Ring(**{name: named.pop(name) for name in Ring._fields if name in named})
    return ReplayState(mode, window, ring=ring, factors=factors, rule=rule, **named)


def _flatten_with_keys(state: ReplayState) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, context = _flatten(state)
    return [(pytree.MappingKey(name), child) for name, child in zip(context[0], children, strict=True)], context


def _dump(context: tuple[Any, ...]) -> list[Any]:
    return [list(context[0]), *context[1:]]


def _undump(context: list[Any]) -> tuple[Any, ...]:
    return (tuple(context[0]), *context[1:])


pytree.register_pytree_node(
    ReplayState,
    _flatten,
    _unflatten,
    serialized_type_name="lattn_compile.ReplayState",
    to_dumpable_context=_dump,
    from_dumpable_context=_undump,
    flatten_with_keys_fn=_flatten_with_keys,
)
