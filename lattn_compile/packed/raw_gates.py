"""Gates as an engine's projections leave them: what a step of packed states makes decays and strengths of.

A kernel for packed rows does it inside (`kernels/common/packed_gates.py`); else `recurrence/gates.py` does it before.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lattn_compile.errors import ShapeError, UnsupportedError
from lattn_compile.recurrence.gates import lower_bound_gate, softplus_gate, write_strength

__all__ = ["ARGUMENTS", "Raw"]

ARGUMENTS = (
    "Tensor? a_log=None, Tensor? dt_bias=None, float? lower_bound=None, bool raw_gate=False, bool raw_beta=False, "
    "bool allow_neg_eigval=False"
)
"""Of the ops' schemas."""


class Raw(NamedTuple):
    """What is raw, and what goes into it; names as in `recurrence/gates.py`.

    Attributes:
        a_log: `[HV]`, or None under `lower_bound`. dt_bias: `[HV]`, of a decay by channel `[HV, K]`, or None.
        raw_gate, raw_beta: which of g and beta are.
    """

    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    raw_gate: bool = False
    raw_beta: bool = False
    allow_neg_eigval: bool = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self | None:
        """Of an op's options; None where nothing is raw and nothing is there for it."""
        found = cls(**{name: options[name] for name in cls._fields if name in options})
        given = (found.a_log, found.dt_bias, found.lower_bound)
        asked = found.raw_gate or found.raw_beta or found.allow_neg_eigval or any(x is not None for x in given)
        return found if asked else None

    def check(self, g: Tensor | None, beta: Tensor | None) -> None:
        """
        Raises:
            UnsupportedError: raw numbers that are not there, a gate without its decay rate, a bound that is none, or
                what nothing raw would use.
            ShapeError: of another size than the gates.
        """
        unused = {"a_log": self.a_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}
        for name, value in unused.items():
            if value is not None and not self.raw_gate:
                raise UnsupportedError(
                    name,
                    got="a value, while g is a log decay already",
                    want="None",
                    remedy="Say that g is raw (use_gate_in_kernel=True), or leave it out.",
                )
        if self.allow_neg_eigval and not self.raw_beta:
            raise UnsupportedError(
                "allow_neg_eigval",
                got="True, while beta is a strength already",
                want="False",
                remedy="Say that beta is raw (use_beta_sigmoid_in_kernel=True), or double beta before the call.",
            )
        for name, raw, x in (("g", self.raw_gate, g), ("beta", self.raw_beta, beta)):
            if raw and x is None:
                raise UnsupportedError(
                    name, got="None, said to be raw", want="its numbers", remedy=f"Pass {name}, or do not call it raw."
                )
        if not self.raw_gate or g is None:
            return
        if self.a_log is None and self.lower_bound is None:
            raise UnsupportedError(
                "a_log",
                got="None for a gate of softplus",
                want="log(A) of each value head",
                remedy="Pass a_log, or lower_bound for KDA's safe gate, which can do without.",
            )
        if self.lower_bound is not None and not self.lower_bound < 0:  # on a GPU nobody looks at what it makes
            raise UnsupportedError(
                "lower_bound",
                got=str(self.lower_bound),
                want="a number below 0",
                remedy="It is the natural log of the strongest decay of a token, -5.0 in KDA's safe gate.",
            )
        for name, x, size in (("a_log", self.a_log, g.shape[2:3]), ("dt_bias", self.dt_bias, g.shape[2:])):
            if x is not None and (x.shape != size or x.device != g.device):
                raise ShapeError(
                    name,
                    got=f"{list(x.shape)} on {x.device}",
                    want=f"{list(size)} on {g.device}, as g [B, T, HV] or [B, T, HV, K] has it",
                    remedy="One number a value head; a bias of a decay by channel has one a channel.",
                )

    def made(self, g: Tensor | None, beta: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The log decay and the strength, in float32; what is not raw as it is."""
        if self.raw_gate and g is not None:
            if self.lower_bound is not None:
                g = lower_bound_gate(g, self.a_log, self.lower_bound, self.dt_bias)
            elif self.a_log is not None:
                g = softplus_gate(g, self.a_log, self.dt_bias)
        if self.raw_beta and beta is not None:
            beta = write_strength(beta, allow_neg_eigval=self.allow_neg_eigval)
        return g, beta

    def kernel_options(self) -> dict[str, Any]:
        """Of `kernels.packed.RawGates`, tensors in float32 and contiguous."""
        a_log, dt_bias = (x if x is None else x.to(torch.float32).contiguous() for x in (self.a_log, self.dt_bias))
        return {
            "a_log": a_log,
            "dt_bias": dt_bias,
            "lower_bound": self.lower_bound,
            "raw_decay": self.raw_gate,
            "raw_beta": self.raw_beta,
            "beta_scale": 2.0 if self.allow_neg_eigval else 1.0,
        }
