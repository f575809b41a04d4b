"""Ways to write the delta rule with a decay per key channel: Kimi Delta Attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.registry import match

Pair = tuple[Tensor, Tensor]


@match("delta", "channel", means=lambda a: {"g": F.logsigmoid(-a.g)})
def forget_fraction(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """What is forgotten, a fraction of each key channel, is taken away."""
    forget = g.sigmoid()
    outs = []
    for t in range(q.shape[1]):
        S = S - forget[:, t].unsqueeze(-1) * S
        error = v[:, t] - (k[:, t].unsqueeze(-1) * S).sum(-2)
        S = S + (beta[:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1) * error.unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-1) * S).sum(-2))
    return torch.stack(outs, 1), S


@match("delta", "channel")
def erase_then_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        kt, b = k[:, t], beta[:, t, :, None, None]
        S = S * g[:, t].exp()[..., None]
        S = S - kt[..., None] * (kt[..., None] * S).sum(-2, keepdim=True) * b
        S = S + b * kt[..., None] * v[:, t, :, None, :]
        outs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    return torch.stack(outs, 1), S


@match("delta", "channel", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def kimi_style(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    q, k, v, g, beta = (x.to(S.dtype) for x in (q, k, v, g, beta))
    q = q * q.shape[-1] ** -0.5
    o = torch.zeros_like(v)
    for i in range(q.shape[1]):
        q_i, k_i, v_i, g_i, b_i = q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i]
        S = S * g_i[..., None].exp()
        S = S + torch.einsum("bhk,bhv->bhkv", b_i[..., None] * k_i, v_i - (k_i[..., None] * S).sum(-2))
        o[:, i] = torch.einsum("bhk,bhkv->bhv", q_i, S)
    return o, S


@match("delta", "channel")
def channel_decay_values_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    M, decay = S.mT, g.exp().unsqueeze(-2)
    outs = []
    for t in range(q.shape[1]):
        M = M * decay[:, t]
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhvk,bhk->bhv", M, k[:, t]))
        M = M + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outs.append(torch.linalg.vecdot(M, q[:, t].unsqueeze(-2)))
    return torch.stack(outs, 1), M.mT


@match("delta", "channel")
def transition_matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """S ← (I − beta k kᵀ) diag(α) S + beta k vᵀ, as the papers print it."""
    I = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    outs = []
    for t in range(q.shape[1]):
        b = beta[:, t, :, None, None]
        kk = torch.einsum("bhi,bhj->bhij", k[:, t], k[:, t])
        A = (I - b * kk) @ torch.diag_embed(g[:, t].exp())
        S = A @ S + b * torch.einsum("bhi,bhj->bhij", k[:, t], v[:, t])
        outs.append((S.mT @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outs, 1), S


@match("delta", "channel")
def transition_matrix_with_scaled_columns(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    I = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    outs = []
    for t in range(q.shape[1]):
        kb = beta[:, t, :, None] * k[:, t]
        A = (I - kb[..., :, None] * k[:, t, :, None, :]) * g[:, t].exp()[..., None, :]
        S = torch.einsum("bhij,bhjv->bhiv", A, S) + torch.einsum("bhi,bhv->bhiv", kb, v[:, t])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S
