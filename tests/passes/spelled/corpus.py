"""The corpus: every spelling that must be recognised (`MATCH`) or left alone (`REFUSE`).

Here are the ordinary ones; the others are in `delta_spellings`, `kda_spellings`, `additive_spellings`,
`all_tokens_spellings`, `strangers` and `near_misses`.
They are samples of an open set, not a list to match against.
"""

from __future__ import annotations

import torch
from torch import Tensor

# They register what they hold.
from tests.passes.spelled import (  # noqa: F401
    additive_spellings,
    all_tokens_spellings,
    delta_spellings,
    kda_spellings,
    near_misses,
    strangers,
)
from tests.passes.spelled.registry import MATCH, REFUSE, Args, make_args, match, refuse

__all__ = ["MATCH", "REFUSE", "Args", "make_args"]

Pair = tuple[Tensor, Tensor]


@match("delta", "head", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def multiply_and_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = S * torch.exp(g[:, t])[:, :, None, None]
        kt = k[:, t][..., None]
        u = beta[:, t][..., None] * (v[:, t] - torch.sum(kt * S, dim=2))
        S = S + kt * u[:, :, None]
        outs.append(torch.sum(q[:, t][..., None] * S, dim=2))
    return q.shape[-1] ** -0.5 * torch.stack(outs, dim=1), S


@match("delta", "channel")
def einsum_into_a_buffer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        S = g[:, t].exp()[..., None] * S
        seen = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], v[:, t] - seen)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return out, S


@match("delta", "head")
def heads_in_the_batch_bmm(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    batch, tokens, heads, K = q.shape
    N, V = batch * heads, v.shape[-1]
    S = S.view(N, K, V)
    outs = []
    for t in range(tokens):
        row = k[:, t].reshape(N, 1, K)
        S = S * g[:, t].reshape(N, 1, 1).exp()
        u = beta[:, t].reshape(N, 1, 1) * (v[:, t].reshape(N, 1, V) - row.bmm(S))
        S = torch.baddbmm(S, row.mT, u)
        outs.append(q[:, t].reshape(N, 1, K).bmm(S).view(batch, heads, V))
    return torch.stack(outs, 1), S.view(batch, heads, K, V)


@match("delta", "head")
def householder_matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    I = torch.eye(q.shape[-1], dtype=S.dtype, device=S.device)
    outs = []
    for t in range(q.shape[1]):
        column, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        reflect = I - b * (column @ column.transpose(-1, -2))
        S = reflect @ (S * g[:, t, :, None, None].exp()) + b * (column @ v[:, t, :, None, :])
        outs.append((q[:, t, :, None, :] @ S)[:, :, 0])
    return torch.stack(outs, 1), S


@match("additive", "head")
def retention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]) + g[:, t].exp()[..., None, None] * S
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S


@match("additive", "none")
def running_sum_of_outer_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(torch.matmul(q[:, t].unsqueeze(2), S).squeeze(2))
    return torch.stack(outs, 1), S


@match("delta", "head")
def state_with_values_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    M = S.transpose(2, 3)
    outs = []
    for t in range(q.shape[1]):
        M = g[:, t, :, None, None].exp() * M
        u = (v[:, t] - (M @ k[:, t, :, :, None])[..., 0]) * beta[:, t, :, None]
        M = M + u[..., None] @ k[:, t, :, None]
        outs.append((M @ q[:, t, :, :, None])[..., 0])
    return torch.stack(outs, 1), M.transpose(2, 3)


@match("delta", "head")
def everything_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    state, out = S.clone(), torch.empty_like(v)
    for t in range(q.shape[1]):
        state.mul_(g[:, t, :, None, None].exp())
        u = v[:, t].clone()
        u.sub_(torch.einsum("bhk,bhkv->bhv", k[:, t], state)).mul_(beta[:, t].unsqueeze(-1))
        state.add_(k[:, t].unsqueeze(-1) * u.unsqueeze(-2))
        out[:, t].copy_(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return out, state


@match("delta", "head", stored=torch.bfloat16)
def stored_in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Recognised only if the rounding after every token is kept."""
    kept = S.to(torch.bfloat16)
    outs = []
    for t in range(q.shape[1]):
        S = kept.to(v.dtype) * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * S).sum(2))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outs.append((q[:, t, :, :, None] * S).sum(2))
        kept = S.to(torch.bfloat16)
    return torch.stack(outs, 1), kept.to(v.dtype)


@refuse("a nonlinearity on the state path")
def squashed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = (g[:, t, :, None, None].exp() * S + k[:, t, :, :, None] * v[:, t, :, None]).tanh()
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@refuse("erases along one key and writes along another, with beta on the write only")
def another_key_erased(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        erased = torch.einsum("bhk,bhkv->bhv", k[:, t].roll(1, dims=-1), S)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * v[:, t] - erased)[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@refuse("an ordinary affine layer: nothing is carried")
def affine_layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    weight = 0.9 * S + k[:, 0, :, :, None] * v[:, 0, :, None]
    return torch.einsum("bthk,bhkv->bthv", q, weight), S
