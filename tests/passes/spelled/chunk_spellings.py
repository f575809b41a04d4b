"""Chunk-parallel spellings in different hands. All take (q, k, v, g, beta, S) as the corpus does and return (o, S).

Each is registered with its rule, its decay, and whether it needs a token count that its chunks divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Spelling = tuple[Callable[..., Any], str, str]
CHUNKED: dict[str, Spelling] = {}
C = 16


def chunked(rule: str, decay: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        CHUNKED[fn.__name__] = (fn, rule, decay)
        return fn

    return register


def _segment_sums(x: Tensor) -> Tensor:
    total = torch.cumsum(x, -1)
    difference = total[..., :, None] - total[..., None, :]
    return difference.masked_fill(~torch.tril(torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool)), -torch.inf)


@chunked("additive", "head")
def ssd_minimal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Mamba-2's minimal listing: einsums over five axes, states of all chunks at once, value-major."""
    B, T, H, _ = q.shape
    x, a, b, c = (y.reshape(B, T // C, C, *y.shape[2:]) for y in (v, g, k, q))
    a = a.permute(0, 3, 1, 2)
    total = torch.cumsum(a, -1)
    diagonal = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, torch.exp(_segment_sums(a)), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(total[..., -1:] - total), x)
    states = torch.cat([S.mT[:, None], states], 1)
    states = torch.einsum("bhzc,bchpn->bzhpn", torch.exp(_segment_sums(F.pad(total[..., -1], (1, 0)))), states)
    off = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states[:, :-1], torch.exp(total))
    return (diagonal + off).reshape(B, T, H, -1), states[:, -1].mT


@chunked("additive", "channel")
def gla_slices(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    o = torch.zeros_like(v)
    causal = torch.tril(torch.ones(C, C, dtype=torch.bool))
    for i in range(0, v.shape[2], C):
        s = slice(i, i + C)
        total = g[:, :, s].cumsum(2)
        last = total[:, :, -1:]
        qi = q[:, :, s] * total.exp() * q.shape[-1] ** -0.5
        scores = (qi @ (k[:, :, s] * (-total).exp()).mT).masked_fill(~causal, 0)
        o[:, :, s] = qi @ S + scores @ v[:, :, s]
        S = S * last.mT.exp() + (k[:, :, s] * (last - total).exp()).mT @ v[:, :, s]
    return o.transpose(1, 2), S


@chunked("additive", "head")
def retnet_numbers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Decays are numbers; the graph holds their powers."""
    gamma = 1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=q.dtype))
    i = torch.arange(C, dtype=q.dtype)
    D = torch.where(i[:, None] >= i, gamma[:, None, None] ** (i[:, None] - i).clamp(min=0), 0.0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = []
    for c in range(0, q.shape[2], C):
        qi, ki, vi = (x[:, :, c : c + C] for x in (q, k, v))
        o.append((qi @ ki.mT * D) @ vi + qi @ S * (gamma[:, None] ** (i + 1))[..., None])
        S = S * (gamma**C)[:, None, None] + (ki * (gamma[:, None] ** (C - 1 - i))[..., None]).mT @ vi
    return torch.cat(o, 2).transpose(1, 2), S


@chunked("additive", "none")
def linear_attention_prefix_sums(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    B, T, H, K = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B, H, T // C, C, -1) for x in (q * K**-0.5, k, v))
    kv = torch.cat([S[:, :, None], k.mT @ v], 2).cumsum(2)
    scores = (q @ k.mT).masked_fill(torch.triu(torch.ones(C, C, dtype=torch.bool), 1), 0)
    return (q @ kv[:, :, :-1] + scores @ v).reshape(B, H, T, -1).transpose(1, 2), kv[:, :, -1]


@chunked("delta", "none")
def deltanet_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """beta on whole sequences; the inverse by row substitution in place."""
    B, T, H, K = q.shape
    q, k, v = (x.transpose(1, 2) for x in (q * K**-0.5, k, v))
    beta = beta.transpose(1, 2)[..., None]
    q, k, u, kb = (x.reshape(B, H, T // C, C, -1) for x in (q, k, v * beta, k * beta))
    A = -(kb @ k.mT).masked_fill(torch.triu(torch.ones(C, C, dtype=torch.bool)), 0)
    for i in range(1, C):
        A[..., i, :i] = A[..., i, :i] + (A[..., i, :, None].clone() * A[..., :, :i].clone()).sum(-2)
    A = A + torch.eye(C)
    u, w = A @ u, A @ kb
    o = torch.zeros_like(u)
    for i in range(T // C):
        ui = u[:, :, i] - w[:, :, i] @ S
        o[:, :, i] = q[:, :, i] @ S + (q[:, :, i] @ k[:, :, i].mT).tril() @ ui
        S = S + k[:, :, i].mT @ ui
    return o.reshape(B, H, T, -1).transpose(1, 2), S


@chunked("delta", "head")
def gdn_inverse_tokens_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Slices of [B, T, H, .], an explicit inverse, the scale behind."""
    lower, o = torch.tril(torch.ones(C, C)), []
    for i in range(0, q.shape[1], C):
        qi, ki, vi, gi, bi = (x[:, i : i + C] for x in (q, k, v, g, beta))
        G = gi.cumsum(1)
        D = torch.exp(G[:, :, None] - G[:, None]) * lower[None, :, :, None]
        A = (torch.einsum("bihk,bjhk->bijh", ki, ki) * D * bi[:, :, None]).permute(0, 3, 1, 2).tril(-1)
        W = torch.linalg.inv(torch.eye(C) + A) * bi.permute(0, 2, 1)[:, :, None]
        u = vi - torch.einsum("bihk,bhkv->bihv", ki * G.exp()[..., None], S)
        u = torch.einsum("bhij,bjhv->bihv", W, u)
        inter = torch.einsum("bihk,bhkv->bihv", qi * G.exp()[..., None], S)
        o.append(torch.einsum("bijh,bjhv->bihv", torch.einsum("bihk,bjhk->bijh", qi, ki) * D, u) + inter)
        carried = torch.einsum("bihk,bihv->bhkv", ki * (G[:, -1:] - G).exp()[..., None], u)
        S = S * G[:, -1].exp()[..., None, None] + carried
    return torch.cat(o, 1) * q.shape[-1] ** -0.5, S


@chunked("delta", "head")
def gdn_folded_neumann(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Heads folded into the batch; the inverse by repeated squaring."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    q, k, v = (x.transpose(1, 2).reshape(B * H, T // C, C, -1) for x in (q, k, v))
    G = g.transpose(1, 2).reshape(B * H, T // C, C).cumsum(-1)
    beta = beta.transpose(1, 2).reshape(B * H, T // C, C, 1)
    S = S.reshape(B * H, K, V)
    D = torch.exp((G[..., None] - G[..., None, :]).masked_fill(torch.ones(C, C, dtype=torch.bool).triu(1), -1e30))
    P = -(torch.matmul(k * beta, k.mT) * D).tril(-1)
    M = torch.eye(C) + P
    for _ in range(3):
        P = P @ P
        M = M + M @ P
    u, w = M @ (v * beta), M @ (k * beta * G.exp()[..., None])
    o = []
    for i in range(T // C):
        new = u[:, i] - torch.bmm(w[:, i], S)
        scores = torch.bmm(q[:, i], k[:, i].mT) * D[:, i]
        o.append(torch.bmm(q[:, i] * G[:, i].exp()[..., None], S) + torch.bmm(scores, new))
        last = G[:, i, -1:]
        S = torch.baddbmm(S * last.exp()[..., None], (k[:, i] * (last - G[:, i]).exp()[..., None]).mT, new)
    return torch.stack(o, 1).reshape(B, H, T, V).transpose(1, 2), S.reshape(B, H, K, V)


@chunked("additive", "head")
def simple_gla_quadratic(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """One chunk: scores of all tokens with all tokens, no state."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    G = g.transpose(1, 2).cumsum(-1)
    scores = q @ k.mT * (G[..., None] - G[..., None, :]).tril().exp()
    return (scores.tril() @ v).transpose(1, 2), S
