"""All tokens at once, no state: spellings by strangers, see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.stranger_layers import B, H, K, V, layer, rand, unit


@layer("chunk", "additive", "none")
def parallel_linear_attention() -> Any:
    """(Q K^T, tril) V for all tokens, no state at all."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.relu(q), F.relu(k)
        scores = torch.tril(q @ k.transpose(-2, -1))
        return scores @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@layer("chunk", "additive", "head")
def parallel_retnet() -> Any:
    """RetNet's parallel form with its decay mask by nan_to_num, without the normalisers."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(H, dtype=torch.float))))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            n = q.shape[2]
            index = torch.arange(n).to(self.decay)
            mask = torch.tril(torch.ones(n, n).to(self.decay))
            mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
            mask = torch.nan_to_num(torch.exp(mask * self.decay[:, None, None]))
            qk = q @ k.transpose(-1, -2) * mask
            return torch.matmul(qk, v)

    return Parallel(), (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@layer("chunk", "additive", "none")
def parallel_cumsum_of_outer_products() -> Any:
    """All states at once: cumsum over tokens of k v^T, each read with its query."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=1)
        return torch.einsum("bthkv,bthk->bthv", states, q)

    return forward, (rand(B, 5, H, K), rand(B, 5, H, K), rand(B, 5, H, V))


@layer("chunk", "delta", "none")
def parallel_deltanet_quadratic() -> Any:
    """DeltaNet for all tokens at once: (tril(QK^T)) (I + tril(beta K K^T, -1))^-1 beta V."""

    def forward(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        n = q.shape[-2]
        beta = torch.diag_embed(b.sigmoid())
        A = torch.eye(n) + beta @ torch.tril(k @ k.mT, diagonal=-1)
        attn = torch.tril(q @ k.mT) @ torch.linalg.inv(A) @ beta
        return attn @ v

    return forward, (rand(B, H, 8, K), unit(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8))


@layer("chunk", "additive", "head")
def parallel_gated_gva() -> Any:
    """Gated attention without softmax, two value heads a key head, the mask times exp of differences in fp32."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        n = q.shape[1]
        cum = F.logsigmoid(f).cumsum(1).transpose(1, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, 2 * H, n, K)
        q = q[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, 2 * H, n, K)
        bias = torch.full((n, n), float("-inf")).triu(1)
        weights = torch.exp(cum[..., :, None] - cum[..., None, :] + bias)
        return (weights * torch.einsum("bhik,bhjk->bhij", q, k)).matmul(v).transpose(1, 2)

    return forward, (rand(B, 8, H, K), rand(B, 8, H, K), rand(B, 8, 2 * H, V), rand(B, 8, 2 * H))


@layer("chunk", "additive", "head")
def parallel_mamba2_quadratic() -> Any:
    """Mamba-2's dual form, M = C B^T ∘ L: one B and one C a token, for all heads, that never get an axis of heads."""

    def forward(x: Tensor, a: Tensor, Bm: Tensor, C: Tensor) -> Tensor:
        n, dt = x.shape[1], F.softplus(a)
        c = torch.cumsum(-dt, 1)
        L = (c[:, :, None] - c[:, None]).masked_fill(~torch.ones(n, n).tril().bool()[..., None], -torch.inf).exp()
        return torch.einsum("btsh,bts,bshp->bthp", L, C @ Bm.mT, dt[..., None] * x)

    return forward, (rand(B, 8, H, V), rand(B, 8, H), rand(B, 8, K), rand(B, 8, K))


@layer("chunk", "additive", "head")
def chunks_mamba2_without_heads() -> Any:
    """The same in chunks of four, its states passed on by a loop."""

    def forward(x: Tensor, a: Tensor, Bm: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        dt = F.softplus(a)
        x = (x * dt[..., None]).unflatten(1, (-1, 4))
        c = (-dt).unflatten(1, (-1, 4)).permute(0, 3, 1, 2).cumsum(-1)
        Bm, C = Bm.unflatten(1, (-1, 4)), C.unflatten(1, (-1, 4))
        L = (c[..., :, None] - c[..., None, :]).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf).exp()
        inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, Bm, L, x)
        left = torch.einsum("bcln,bhcl,bclhp->bchpn", Bm, (c[..., -1:] - c).exp(), x)
        S, states = torch.zeros_like(left[:, 0]), []
        for i in range(left.shape[1]):
            states.append(S)
            S = S * c[:, :, i, -1, None, None].exp() + left[:, i]
        before = torch.einsum("bcln,bchpn,bhcl->bclhp", C, torch.stack(states, 1), c.exp())
        return (inside + before).flatten(1, 2), S

    return forward, (rand(B, 8, H, V), rand(B, 8, H), rand(B, 8, K), rand(B, 8, K))


@layer("chunk", "additive", "head")
def parallel_mlstm_bounded_sums() -> Any:
    """mLSTM's parallel form: scores divided by their sums' size, or by 1 where that is less, by `maximum`."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
        n = q.shape[2]
        c = F.logsigmoid(f).cumsum(-1)
        D = c[..., :, None] - c[..., None, :] + F.logsigmoid(i)[..., None, :]
        D = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), D, -float("inf"))
        scores = q @ k.mT * D.exp()
        return (scores / torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.ones(()))) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8), rand(B, H, 8))
