"""Raw gates: the decay as a layer makes it from a projection, `A_log` and `dt_bias`, in float64.

An op never sees these; a test compares their gradients all the same, because a cancellation in dg shows first in the
sums over tokens that dA_log and ddt_bias are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.recurrence import BY_NAME

__all__ = ["RAW_GATES", "RawGate", "make_raw_gate"]

RAW_GATES = ("softplus", "lower_bound")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawGate:
    """What a layer hands to its gate.

    Attributes:
        form: "softplus", `-exp(A_log) softplus(g_raw + dt_bias)`, or "lower_bound",
            `lower_bound sigmoid(exp(A_log) (g_raw + dt_bias))`.
        g_raw: `[B, T, HV]` or `[B, T, HV, K]`. A_log: `[HV]`. dt_bias: `[HV]` or `[HV, K]`.
    """

    form: str
    g_raw: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float = -5.0

    def leaves(self) -> dict[str, Tensor]:
        return {"g_raw": self.g_raw, "A_log": self.A_log, "dt_bias": self.dt_bias}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed, for example `raw.map(Tensor.double)`."""
        g_raw, A_log, dt_bias = (change(x) for x in self.leaves().values())
        return dataclasses.replace(self, g_raw=g_raw, A_log=A_log, dt_bias=dt_bias)

    def decay(self) -> Tensor:
        """The log decay g, float64, the shape of `g_raw`."""
        raw, rate, bias = (x.double() for x in self.leaves().values())
        rate = rate.exp() if raw.dim() == 3 else rate.exp()[:, None]
        if self.form == "softplus":
            return -rate * F.softplus(raw + bias)
        return self.lower_bound * torch.sigmoid(rate * (raw + bias))


def make_raw_gate(
    kind: str,
    form: str,
    *,
    batch: int,
    tokens: int,
    value_heads: int,
    key_dim: int,
    strong: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> RawGate:
    """A random raw gate for `kind`, whose decay is per head or per key channel as the kind's is.

    Args:
        form: a name in `RAW_GATES`.
        strong: A = 16 and dt_bias = 1, so that g is around -20 a step, where dg cancels almost wholly; else decays from
            about -0.01 to -1.
        dtype: of `g_raw`; A_log and dt_bias are parameters, fp32 (fp64 if this is).

    Raises:
        UnsupportedError: an unknown form, or a kind without a decay.
    """
    decay = BY_NAME[kind].decay
    if form not in RAW_GATES or decay == "none":
        kinds = ", ".join(name for name, traits in BY_NAME.items() if traits.decay != "none")
        raise UnsupportedError(
            "form",
            got=f"{form!r} for {kind}",
            want=f"{' or '.join(RAW_GATES)}, for {kinds}",
            remedy="A kind without a decay has no gate.",
        )
    rng = torch.Generator().manual_seed(seed)
    heads = (value_heads,) if decay == "head" else (value_heads, key_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    raw, rate, bias = normal(batch, tokens, *heads), 0.5 * normal(value_heads), normal(*heads) - 3.0
    if strong:
        rate, bias = torch.full_like(rate, 16.0).log(), torch.ones_like(bias)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return RawGate(form=form, g_raw=raw.to(dtype), A_log=rate.to(state_dtype), dt_bias=bias.to(state_dtype))
