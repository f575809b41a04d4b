"""Gates of one token on the device: a decay in natural log as the ops have it, or raw, as a serving engine has it.

GATE 0: `g` itself. 1: `-exp(A_log) softplus(raw + dt_bias)`. 2: `bound sigmoid(exp(A_log) (raw + dt_bias))`. The torch
counterpart is `recurrence/gates.py`; the two differ by rounding, so only GATE 0 has the bits of the emulated op.

Numbers come loaded: a kernel fetches what does not depend on a slot before it waits for the slot.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import exp

__all__ = ["decay_of", "exps", "gates_of", "log_decays_of", "strength_of"]


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))`, as `max(x, 0) + log1p(exp(-|x|))`; log1p loses nothing near 0 by what 1 + y lost."""
    y = exp(-tl.abs(x))
    u = 1.0 + y
    small = tl.where(u == 1.0, y, tl.log(u) * tl.div_rn(y, tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def _log_decay(x, rate, bound, GATE: tl.constexpr):
    """Of a raw gate and its head's exp(A_log)."""
    if GATE == 1:
        return -rate * _softplus(x)
    else:
        return bound * _sigmoid(rate * x)


@triton.jit
def _rate(a_log, head):
    if a_log is None:
        rate = 1.0
    else:
        rate = exp(tl.load(a_log + head).to(tl.float32))
    return rate


@triton.jit
def decay_of(x, a_log, bias, bound, head, GATE: tl.constexpr):
    """The log-decay of a head, from its number `x`; a_log `[HV]`, bias `[HV]`, either may be None."""
    x = x.to(tl.float32)
    if GATE:
        if bias is not None:
            x += tl.load(bias + head).to(tl.float32)
        x = _log_decay(x, _rate(a_log, head), bound, GATE)
    return x


@triton.jit
def gates_of(x, bias, a_log, bound, head, at, K: tl.constexpr, GATE: tl.constexpr):
    """The log-decays of a head's raw gates `x` of the key channels `at`; bias `[HV, K]` or None."""
    if bias is not None:
        x += tl.load(bias + head * K + at, mask=at < K, other=0.0).to(tl.float32)
    return _log_decay(x, _rate(a_log, head), bound, GATE)


@triton.jit
def log_decays_of(
    x,
    a_log,
    bias,
    bound,
    head,
    channel,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    GATE: tl.constexpr,
):
    """The log-decays of a head's key channels, in pieces, from their numbers `x` in pieces."""
    out = ()
    for i in tl.static_range(PIECES):
        y = x[i].to(tl.float32)
        if GATE:
            y = gates_of(y, bias, a_log, bound, head, channel + i * STEP, K, GATE)
        out = out + (y,)
    return out


@triton.jit
def exps(x, PIECES: tl.constexpr):
    """`exp` of pieces."""
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (exp(x[i]),)
    return out


@triton.jit
def strength_of(x, SIGMOID: tl.constexpr):
    """beta from its number `x`; SIGMOID 1: of a raw number, 2: twice that."""
    x = x.to(tl.float32)
    if SIGMOID == 1:
        x = _sigmoid(x)
    elif SIGMOID == 2:
        x = 2.0 * _sigmoid(x)
    return x
