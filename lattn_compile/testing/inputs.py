"""Random inputs for a recurrence kind, shaped like what a trained layer feeds it, and hostile ones.

Realistic: keys of norm about 1, decays as that kind's models make them, write strengths after a sigmoid. Hostile: one
known way at a time to break an implementation (`HOSTILE`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lattn_compile.errors import UnsupportedError, nearest
from lattn_compile.recurrence import BY_NAME

__all__ = ["HOSTILE", "Inputs", "make_inputs"]

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call of a recurrence op: its tensors (shapes as in semantics §1) and the options that the kind fixes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    rule: str
    scale: float
    qk_l2norm: bool

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the ops and the oracle take first: q, k, v, g, beta, initial_state, cu_seqlens."""
        return (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.cu_seqlens)

    def options(self) -> dict[str, Any]:
        """Their keyword arguments `rule`, `scale`, `qk_l2norm`."""
        return {"rule": self.rule, "scale": self.scale, "qk_l2norm": self.qk_l2norm}

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable tensors that are present, by name."""
        return {name: x for name in _TENSORS if (x := getattr(self, name)) is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same inputs with every differentiable tensor changed, for example `inputs.map(Tensor.double)`."""
        changed: dict[str, Any] = {name: change(x) for name, x in self.leaves().items()}
        return dataclasses.replace(self, **changed)

    def ragged(self, lengths: Sequence[int]) -> Self:
        """The same with NaN at and beyond each sequence's length, whose tokens no implementation may read."""
        if self.cu_seqlens is None:
            starts = [i * self.q.shape[1] for i in range(len(lengths))]
            ends = [start + self.q.shape[1] for start in starts]
        else:
            starts, ends = self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist()

        def poisoned(x: Tensor) -> Tensor:
            flat = x.flatten(0, 1).clone()
            for start, end, length in zip(starts, ends, lengths, strict=True):
                flat[start + length : end] = torch.nan
            return flat.view_as(x)

        changed: dict[str, Any] = {name: poisoned(x) for name, x in self.leaves().items() if name != "initial_state"}
        return dataclasses.replace(self, **changed)


def make_inputs(
    kind: str,
    *,
    batch: int = 2,
    tokens: int = 16,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 64,
    value_dim: int = 64,
    lengths: Sequence[int] | None = None,
    spare_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    initial_state: bool = True,
    slow_decay: bool = False,
    hostile: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random inputs of `kind` ("gdn", "kda", "gla", "delta", "retention", "linear").

    Args:
        batch, tokens, key_heads, value_heads, key_dim, value_dim: B, T, H, HV (a multiple of H), K, V.
        lengths: packs sequences of these lengths into one row (B = 1, `cu_seqlens`); `batch` and `tokens` are ignored.
        spare_tokens: tokens after the last packed sequence, filled with NaN: nothing may read them.
        dtype: of q, k, v, g and beta; the initial state is fp32, or fp64 if this is. Drawn in float64 and then cast, so
            that every dtype sees the same numbers.
        slow_decay: g around -1e-3 instead of the kind's usual range (states remember thousands of tokens).
        hostile: a name in `HOSTILE`.

    Raises:
        UnsupportedError: an unknown kind or hostile variant (with the nearest known name).
    """
    traits = BY_NAME.get(kind)
    if traits is None:
        raise _unknown("kind", kind, BY_NAME)
    if hostile is not None and hostile not in HOSTILE:
        raise _unknown("hostile", hostile, HOSTILE)
    rng = torch.Generator().manual_seed(seed)
    cu_seqlens = None
    count = batch
    if lengths is not None:
        batch, tokens, count = 1, sum(lengths) + spare_tokens, len(lengths)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    per_key_head, per_head = (batch, tokens, key_heads), (batch, tokens, value_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    delta = traits.rule == "delta"
    # The delta-rule layers hand over raw projections and let the kernel normalise; the others have keys of norm 1.
    size = 1.0 if delta else key_dim**-0.5
    draw: dict[str, Any] = {
        "q": normal(*per_key_head, key_dim),
        "k": normal(*per_key_head, key_dim) * size,
        "v": normal(*per_head, value_dim),
        "g": _decay(kind, per_head, key_dim, slow_decay, rng),
        "beta": normal(*per_head).sigmoid() if delta else None,
        "initial_state": 0.5 * normal(count, value_heads, key_dim, value_dim) if initial_state else None,
    }
    if hostile is not None:
        HOSTILE[hostile](draw)
    if spare_tokens and lengths is not None:
        for name in ("q", "k", "v", "g", "beta"):
            if draw[name] is not None:
                draw[name][:, sum(lengths) :] = torch.nan
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cast: dict[str, Any] = {
        name: None if x is None else x.to(device=device, dtype=state_dtype if name == "initial_state" else dtype)
        for name, x in draw.items()
    }
    return Inputs(
        **cast,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device),
        rule=traits.rule,
        scale=key_dim**-0.5,
        qk_l2norm=delta,
    )


def _unknown(argument: str, name: str, known: dict[str, Any]) -> UnsupportedError:
    return UnsupportedError(
        argument, got=repr(name), want=", ".join(known), remedy=f"Choose a known name.{nearest(name, known)}"
    )


def _decay(kind: str, per_head: tuple[int, int, int], key_dim: int, slow: bool, rng: torch.Generator) -> Tensor | None:
    """`g` as models of that kind produce it at initialisation."""
    traits = BY_NAME[kind]
    if traits.decay == "none":
        return None
    heads = per_head[-1]
    shape = per_head if traits.decay == "head" else (*per_head, key_dim)
    if slow:
        return -1e-3 * torch.rand(shape, generator=rng, dtype=torch.float64)
    if kind == "retention":
        # RetNet's fixed decays, 1 - 2^(-5 - h) (arXiv:2307.08621).
        return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float64)))).expand(shape).clone()
    raw = torch.randn(shape, generator=rng, dtype=torch.float64)
    if kind == "gla":
        return F.logsigmoid(raw) / 16  # the temperature of arXiv:2312.06635
    # -A softplus(x + dt_bias) with A from U(0, 16) and softplus(dt_bias) log-uniform in [1e-3, 1e-1], as Mamba-2,
    # GDN and KDA start out.
    rate = 16 * torch.rand(heads, generator=rng, dtype=torch.float64)
    step = 10 ** (-3 + 2 * torch.rand(heads, generator=rng, dtype=torch.float64))
    if traits.decay == "channel":
        rate, step = rate[:, None], step[:, None]
    return -rate * F.softplus(raw + step.expm1().log())


def _repeat_key(draw: dict[str, Any]) -> None:
    """One key for all tokens, beta = 1.9 and almost no decay: eigenvalue -0.9, and I + A at its worst conditioned."""
    draw["k"][:] = draw["k"][:1, :1].clone()
    if draw["beta"] is not None:
        draw["beta"].fill_(1.9)
    if draw["g"] is not None:
        draw["g"].fill_(-0.01)


def _reset(draw: dict[str, Any]) -> None:
    """g = -inf at every third token, which clears the state."""
    if draw["g"] is not None:
        draw["g"][:, 1::3] = -torch.inf


def _strong_decay(draw: dict[str, Any]) -> None:
    """g between -90 and 0 within one segment: a product of two exponentials would be 0 or inf."""
    if draw["g"] is not None:
        draw["g"][:] = -0.01
        draw["g"][:, ::4] = -90.0


def _mixed_channels(draw: dict[str, Any]) -> None:
    """Channels (or heads) with no decay beside ones at KDA's lower bound of -5."""
    if draw["g"] is not None:
        draw["g"][..., ::2] = 0.0
        draw["g"][..., 1::2] = -5.0


def _masked(draw: dict[str, Any]) -> None:
    """Every second token has g = 0 and beta = 0 (additive: v = 0), the exact identity of the recurrence."""
    if draw["g"] is not None:
        draw["g"][:, ::2] = 0.0
    draw["v" if draw["beta"] is None else "beta"][:, ::2] = 0.0


def _zero_keys(draw: dict[str, Any]) -> None:
    """Key and query rows of zeros, where the gradient of the l2norm is 1/sqrt(eps)."""
    draw["k"][:, ::3] = 0.0
    draw["q"][:, ::4] = 0.0


def _large_state(draw: dict[str, Any]) -> None:
    """An initial state beyond fp16's range, and values to match."""
    if draw["initial_state"] is not None:
        draw["initial_state"].mul_(1e5)
    draw["v"].mul_(1e5)


def _tiny_state(draw: dict[str, Any]) -> None:
    """State and values around 1e-35, where a careless scale underflows."""
    if draw["initial_state"] is not None:
        draw["initial_state"].mul_(1e-35)
    draw["v"].mul_(1e-35)


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "repeated_key": _repeat_key,
    "reset": _reset,
    "strong_decay": _strong_decay,
    "mixed_channels": _mixed_channels,
    "masked": _masked,
    "zero_keys": _zero_keys,
    "large_state": _large_state,
    "tiny_state": _tiny_state,
}
"""Variants of the inputs, each one known way to go wrong; where a kind lacks the tensor, that part does nothing."""
