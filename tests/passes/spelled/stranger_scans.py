"""Scans, while_loops and vmapped layers by strangers: see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.stranger_layers import B, H, K, T, V, layer, rand, unit


@layer("scan", "additive", "head")
def scan_retention() -> Any:
    from torch._higher_order_ops.scan import scan

    def forward(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float32))

        def step(S: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            q, k, v = x
            S = gamma[None, :, None, None] * S + k[..., :, None] * v[..., None, :]
            return S, torch.einsum("bhk,bhkv->bhv", q, S)

        S, o = scan(step, S, (q, k, v), dim=0)
        return o, S

    return forward, (rand(T, B, H, K), rand(T, B, H, K), rand(T, B, H, V), rand(B, H, K, V))


@layer("scan", "delta", "head")
def scan_gated_delta() -> Any:
    """A scan over tokens on axis 2 of [B, H, T, .], the state [V, K]."""
    from torch._higher_order_ops.scan import scan

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g, beta = -F.softplus(a), b.sigmoid()

        def step(S: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            q, k, v, g, beta = x
            S = S * g.exp()[..., None, None]
            err = (v - (S @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
            S = S + err.unsqueeze(-1) @ k.unsqueeze(-2)
            return S, (S @ q.unsqueeze(-1)).squeeze(-1)

        _, o = scan(step, torch.zeros(B, H, V, K), (q, k, v, g, beta), dim=2)
        return o.movedim(0, 2)

    return forward, (rand(B, H, T, K), unit(B, H, T, K), rand(B, H, T, V), rand(B, H, T), rand(B, H, T))


@layer("scan", "additive", "channel")
def scan_gla_gates_outside() -> Any:
    """GLA in a scan that takes decays as exp'd tensors and returns only outputs."""
    from torch._higher_order_ops.scan import scan

    def forward(q: Tensor, k: Tensor, v: Tensor, gk: Tensor) -> Tensor:
        alpha = F.logsigmoid(gk).div(16.0).exp()

        def step(S: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            q, k, v, alpha = x
            S = alpha.unsqueeze(-1) * S + torch.einsum("bhk,bhv->bhkv", k, v)
            return S.clone(), torch.einsum("bhk,bhkv->bhv", q, S)

        xs = tuple(t.transpose(0, 1) for t in (q, k, v, alpha))
        return scan(step, q.new_zeros(B, H, K, V), xs)[1].transpose(0, 1)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K))


@layer("scan", "delta", "channel")
def while_loop_kda() -> Any:
    """A while_loop over a token counter, outputs written with index_copy, inputs picked with index_select."""
    from torch._higher_order_ops.while_loop import while_loop

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        alpha, beta = torch.exp(-F.softplus(g)), torch.sigmoid(b)

        def cond(i: Tensor, S: Tensor, o: Tensor) -> Tensor:
            return i < T

        def body(i: Tensor, S: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = i.view(1)
            qi, ki, vi, ai, bi = (x.index_select(1, at).squeeze(1) for x in (q, k, v, alpha, beta))
            S = S * ai[..., None]
            u = bi[..., None] * (vi - torch.einsum("bhkv,bhk->bhv", S, ki))
            S = S + ki[..., None] * u[..., None, :]
            o = o.index_copy(1, at, torch.einsum("bhkv,bhk->bhv", S, qi).unsqueeze(1))
            return i + 1, S, o

        _, S, o = while_loop(cond, body, (torch.tensor(0), torch.zeros(B, H, K, V), torch.zeros(B, T, H, V)))
        return o, S

    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K), rand(B, T, H))


@layer("loop", "delta", "head")
def vmap_heads_and_batch() -> Any:
    """One head written plainly, mapped over batch and heads; a loop over tokens inside."""

    def head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        S = torch.zeros(K, V)
        outs = []
        for t in range(T):
            S = torch.exp(g[t]) * S
            S = S + torch.outer(k[t], beta[t] * (v[t] - k[t] @ S))
            outs.append(q[t] @ S)
        return torch.stack(outs)

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(torch.vmap(head))(q, k, v, -F.softplus(a), torch.sigmoid(b))

    return forward, (rand(B, H, T, K), unit(B, H, T, K), rand(B, H, T, V), rand(B, H, T), rand(B, H, T))


@layer("step", "additive", "head")
def vmap_steps_over_batch() -> Any:
    """A decode step of one sequence, all heads, mapped over the batch of states."""

    def one(S: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        S = torch.sigmoid(f)[:, None, None] * S + k[:, :, None] * v[:, None, :]
        return torch.einsum("hkv,hk->hv", S, q), S

    def forward(S: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.vmap(one)(S, q, k, v, f)

    return forward, (rand(B, H, K, V), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H))
