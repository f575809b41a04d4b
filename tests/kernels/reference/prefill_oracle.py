"""The prefix with rounded operands, written out in float64: one sequence, one value head and one chunk at a time.

Plain differentiable torch. Nothing is shared with the kernel but the codecs of the formats: a vector along the sum of a
product is rounded by itself, and passes its gradient on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.modes import Inverse, Neumann, NewtonSchulz, Prefill
from lattn_compile.testing.oracle import straight_through

__all__ = ["CHUNK", "prefill_oracle", "rounded"]

CHUNK, SUB = 64, 16


def rounded(x: Tensor, fmt: str | None) -> Tensor:
    """Vectors `[..., D]`, each with a scale of its own."""
    if fmt is None:
        return x
    if fmt == "nvfp4":
        return straight_through(x[..., None], Nvfp4())[..., 0]
    codec = {"int8": Int8(None), "fp8_e4m3": Fp8(None)}[fmt]
    return straight_through(x[..., None, :], codec)[..., 0, :]


class _Approximate(torch.autograd.Function):
    """A given T in the place of the inverse, whose derivative at T it has."""

    @staticmethod
    def forward(ctx: Any, system: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (t,) = ctx.saved_tensors
        return -(t.T @ grads[0] @ t.T), None


def _inverse(system: Tensor, prefill: Prefill) -> Tensor:
    one = torch.eye(system.shape[0], dtype=system.dtype)
    method: str | Inverse = prefill.inverse
    if isinstance(method, Neumann):
        t = sum((torch.linalg.matrix_power(-system, i) for i in range(1, method.order + 1)), one)
    elif isinstance(method, NewtonSchulz):
        t = one
        for _ in range(method.iterations):
            t = t @ (2 * one - (one + system) @ t)
    else:  # what doubling sums is all of the inverse
        return torch.linalg.inv(one + system)
    return t if prefill.gradient == "series" else _Approximate.apply(system, t.detach())  # type: ignore[no-any-return, no-untyped-call]


def _between(g: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """exp of the gates `first <= l < last`, each sum by itself; bounds `[...]`, g `[b, c]`, to `[..., c]`."""
    at = torch.arange(g.shape[0])
    inside = (at >= first[..., None]) & (at < last[..., None])
    return torch.where(inside[..., None], g, 0).sum(-2).exp()


def _pairs(left: Tensor, k: Tensor, g: Tensor, fmt: str | None) -> Tensor:
    """`left_i . w(j -> i) k_j` for all j <= i of one chunk; g `[b, K]` by channel or `[b, 1]`."""
    at = torch.arange(k.shape[0])
    i, j = at[:, None], at[None, :]
    weights = _between(g, *torch.broadcast_tensors(j + 1, i + 1))
    if g.shape[1] == 1:
        return (rounded(left, fmt) @ rounded(k, fmt).T * weights[..., 0]).tril()
    near = (left[:, None] * k[None] * weights).sum(-1)
    start = i // SUB * SUB
    later = rounded(left * _between(g, start[:, 0], at + 1), fmt)
    earlier = rounded(k[None] * _between(g, *torch.broadcast_tensors(j + 1, start)), fmt)
    return torch.where(j < start, (later[:, None] * earlier).sum(-1), near).tril()


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rule: str, prefill: Prefill
) -> tuple[Tensor, Tensor]:
    """`[b, V]` without the query scale, and the state after; q, k `[b, K]`, g `[b, 1 | K]`, beta `[b, 1]`."""
    fmt = prefill.formats.get

    def product(site: str, a: Tensor, b: Tensor) -> Tensor:
        return rounded(a, fmt(site)) @ rounded(b.T, fmt(site)).T

    at = torch.arange(g.shape[0])
    start, end = _between(g, 0 * at, at + 1), _between(g, at + 1, torch.full_like(at, g.shape[0]))
    new = beta * v
    if rule == "delta":
        system = (beta * _pairs(k, k, g, fmt("kk"))).tril(-1)
        t = _inverse(system, prefill)
        w, u = product("w", t, beta * k * start), product("u", t, beta * v)
        new = u - product("ws", w, state)
    out = product("qs", q * start, state) + product("av", _pairs(q, k, g, fmt("qk")), new)
    whole = g.sum(0).exp()[:, None]
    return out, whole * state + product("kv", (k * end).T, new)


def prefill_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    lengths: list[int],
    prefill: Prefill,
    *,
    rule: str = "delta",
    scale: float,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, HV, V]`, zero at and beyond each sequence's length, and final states `[B, HV, K, V]`."""
    groups = v.shape[2] // q.shape[2]
    if qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outs, finals = [], []
    for n, length in enumerate(lengths):
        heads, ends = [], []
        for h in range(v.shape[2]):
            current, pieces = state[n, h], [v.new_zeros(0, v.shape[3])]
            for first in range(0, length, CHUNK):
                rows = slice(first, min(first + CHUNK, length))
                gate = v.new_zeros(rows.stop - first, 1) if g is None else g[n, rows, h].reshape(rows.stop - first, -1)
                strength = v.new_ones(rows.stop - first, 1) if beta is None else beta[n, rows, h, None]
                out, current = _chunk(
                    q[n, rows, h // groups],
                    k[n, rows, h // groups],
                    v[n, rows, h],
                    gate,
                    strength,
                    current,
                    rule,
                    prefill,
                )
                pieces.append(scale * out)
            pieces.append(v.new_zeros(q.shape[1] - length, v.shape[3]))
            heads.append(torch.cat(pieces))
            ends.append(current)
        outs.append(torch.stack(heads, 1))
        finals.append(torch.stack(ends))
    return torch.stack(outs), torch.stack(finals)
