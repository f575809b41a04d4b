"""Token loops of the delta rule by strangers: see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.stranger_layers import B, H, K, T, V, layer, outer, rand, read, token_loop, unit


@layer("loop", "delta", "none")
def loop_delta_rule_naive() -> Any:
    """DeltaNet after FLA's naive.py: clone, in-place adds, an output buffer."""

    def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        b, h, length, dk = q.shape
        o = torch.zeros_like(v)
        S = torch.zeros(b, h, dk, v.shape[-1]).to(v)
        q = q * dk**-0.5
        beta = beta.sigmoid()
        for i in range(length):
            kk = k[:, :, i]
            vv = v[:, :, i].clone()
            bb = beta[:, :, i]
            vv = vv - (S.clone() * kk[..., None]).sum(-2)
            vv = vv * bb[..., None]
            S = S.clone() + kk.unsqueeze(-1) * vv.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i], S)
        return o, S

    return forward, (rand(B, H, T, K), unit(B, H, T, K), rand(B, H, T, V), rand(B, H, T))


@layer("loop", "delta", "head")
def loop_inplace_state() -> Any:
    """Gated DeltaNet whose state is updated in place (mul_, sub_, add_), outputs stacked, tokens first."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        S = q.new_zeros(B, H, V, K)
        alpha, beta = torch.exp(-F.softplus(a)), torch.sigmoid(b)
        out = []
        for t in range(q.shape[0]):
            S = S.mul(alpha[t][:, :, None, None])
            pred = torch.einsum("bhvk,bhk->bhv", S, k[t])
            S.add_(torch.einsum("bhv,bhk->bhvk", beta[t].unsqueeze(-1) * (v[t] - pred), k[t]))
            out.append(S.matmul(q[t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(out)

    return forward, (rand(T, B, H, K), unit(T, B, H, K), rand(T, B, H, V), rand(T, B, H), rand(T, B, H))


@layer("loop", "delta", "channel")
def loop_kda_optional_state() -> Any:
    """KDA with an optional initial state, decays clamped, fp32 inside, unbind over tokens."""

    def kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype = v.dtype
        q, k, v, g, beta = (x.to(torch.float32) for x in (q, k, v, g, beta))
        g = torch.clamp(-F.softplus(g), min=-5.0, max=0.0)
        S = k.new_zeros(B, H, K, V)
        if initial_state is not None:
            S += initial_state
        o = torch.zeros_like(v)
        scale = K**-0.5
        for i in range(q.shape[1]):
            q_i, k_i, v_i, g_i, b_i = q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i]
            S = S * g_i[..., None].exp()
            S = S + torch.einsum("bhk,bhv->bhkv", b_i[..., None] * k_i, v_i - (k_i[..., None] * S).sum(-2))
            o[:, i] = torch.einsum("bhk,bhkv->bhv", q_i * scale, S)
        return o.to(dtype), S

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return kda(q, F.normalize(k, dim=-1), v, g, b.sigmoid(), s)

    return forward, (
        rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K), rand(B, T, H), rand(B, H, K, V),
    )  # fmt: skip


@layer("loop", "delta", "head")
def loop_deltaproduct() -> Any:
    """DeltaProduct: two Householder steps a token, the decay only on the first, read after the last."""

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        S = q.new_zeros(B, H, K, V)
        beta = 2 * torch.sigmoid(b)
        alpha = torch.exp(-F.softplus(g))
        outs = []
        for t in range(q.shape[1]):
            S = S * alpha[:, t, :, None, None]
            for j in range(k.shape[2]):
                kj, vj, bj = k[:, t, j], v[:, t, j], beta[:, t, j]
                u = bj[..., None] * (vj - torch.einsum("bhkv,bhk->bhv", S, kj))
                S = S + torch.einsum("bhk,bhv->bhkv", kj, u)
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outs, 1), S

    return forward, (rand(B, 3, H, K), unit(B, 3, 2, H, K), rand(B, 3, 2, H, V), rand(B, 3, H), rand(B, 3, 2, H))


@layer("loop", "delta", "head")
def loop_qwen_style_layer() -> Any:
    """A Gated DeltaNet layer: projections, a causal short convolution, l2norm, loop, gated RMS norm."""

    class GatedDeltaNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.width = 10, H * K * 2 + 2 * H * V
            self.in_proj = nn.Linear(self.hidden, self.width, bias=False)
            self.ba = nn.Linear(self.hidden, 4 * H, bias=False)
            self.z = nn.Linear(self.hidden, 2 * H * V, bias=False)
            self.conv = nn.Conv1d(self.width, self.width, 4, groups=self.width, padding=3, bias=False)
            self.A_log, self.dt_bias = nn.Parameter(torch.rand(2 * H)), nn.Parameter(torch.ones(2 * H))
            self.weight = nn.Parameter(torch.ones(V))
            self.out = nn.Linear(2 * H * V, self.hidden, bias=False)

        @staticmethod
        def l2norm(x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            mixed = F.silu(self.conv(self.in_proj(x).transpose(1, 2))[:, :, :n]).transpose(1, 2)
            q, k, v = torch.split(mixed, [H * K, H * K, 2 * H * V], dim=-1)
            q, k, v = q.reshape(b, n, H, K), k.reshape(b, n, H, K), v.reshape(b, n, 2 * H, V)
            bb, a = self.ba(x).chunk(2, dim=-1)
            beta = bb.sigmoid()
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
            q, k = self.l2norm(q).repeat_interleave(2, dim=2), self.l2norm(k).repeat_interleave(2, dim=2)
            q, k, v, beta, g = (t.transpose(1, 2).contiguous().float() for t in (q, k, v, beta, g))
            q = q / q.shape[-1] ** 0.5
            core = torch.zeros(b, 2 * H, n, V)
            S = torch.zeros(b, 2 * H, K, V)
            for i in range(n):
                S = S * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
                kv_mem = (S * k[:, :, i].unsqueeze(-1)).sum(dim=-2)
                delta = (v[:, :, i] - kv_mem) * beta[:, :, i].unsqueeze(-1)
                S = S + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
                core[:, :, i] = (S * q[:, :, i].unsqueeze(-1)).sum(dim=-2)
            core = core.transpose(1, 2)
            core = core * torch.rsqrt(core.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            return self.out((core * F.silu(self.z(x).view(b, n, 2 * H, V))).flatten(2))

    return GatedDeltaNet(), (rand(B, T, 10),)


@layer("loop", "delta", "none")
def loop_single_head_lucid() -> Any:
    """Fast weights of one head, no heads axis: W [B, V, K] written with an error, beta an nn.Linear."""

    class FastWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_qkv = nn.Linear(7, 2 * K + V)
            self.to_beta = nn.Sequential(nn.Linear(7, 1), nn.Sigmoid())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.to_qkv(x).split([K, K, V], dim=-1)
            q, k = q.softmax(-1), k.softmax(-1)
            beta = self.to_beta(x)
            W = torch.zeros(x.shape[0], V, K)
            reads = []
            for qt, kt, vt, bt in zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
                error = vt - torch.einsum("bvk,bk->bv", W, kt)
                W = W + torch.einsum("bv,bk->bvk", bt * error, kt)
                reads.append(torch.einsum("bvk,bk->bv", W, qt))
            return torch.stack(reads, dim=1), W

    return FastWeights(), (rand(B, 5, 7),)


@layer("loop", "delta", "head")
def loop_masked_lengths() -> Any:
    """Padded batches: tokens past a sequence's length keep the old state by torch.where and read zeros."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        S = torch.zeros(B, H, K, V)
        outs = []
        for t in range(T):
            new = S * torch.sigmoid(a[:, t, :, None, None])
            u = torch.sigmoid(b[:, t, :, None]) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", new, k[:, t]))
            new = new + k[:, t, ..., None] * u[..., None, :]
            S = torch.where(keep[:, t, None, None, None], new, S)
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * keep[:, t, None, None])
        return torch.stack(outs, 1), S

    keep = torch.tensor([[True] * T, [True, True, False, False]])
    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H), rand(B, T, H), keep)


@layer("loop", "delta", "head")
def loop_two_reads() -> Any:
    """Differential: two queries a token, their outputs subtracted."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k)))
        return S, read(S, q) - 0.5 * read(S, q.flip(-1).tanh())

    return token_loop(step)


@layer("loop", "delta", "head")
def loop_from_the_last_token() -> Any:
    """The backward half of a bidirectional layer: tokens from the last to the first."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        S, o = q.new_zeros(B, H, K, V), torch.zeros_like(v)
        for t in reversed(range(T)):
            S = S * torch.exp(-F.softplus(a[:, t]))[..., None, None]
            S = S + outer(k[:, t], torch.sigmoid(b[:, t])[..., None] * (v[:, t] - read(S, k[:, t])))
            o[:, t] = read(S, q[:, t])
        return o

    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H), rand(B, T, H))


@layer("loop", "delta", "head")
def loop_resets_between_documents() -> Any:
    """Packed documents: a bool marks first tokens, where the state is masked_fill'ed with zeros."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        S = torch.zeros(B, H, K, V)
        outs = []
        for t in range(T):
            S = S.masked_fill(first[:, t, None, None, None], 0.0)
            S = S * torch.sigmoid(a[:, t])[..., None, None]
            S = S + outer(k[:, t], torch.sigmoid(b[:, t])[..., None] * (v[:, t] - read(S, k[:, t])))
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1), S

    first = torch.tensor([[True, False, True, False], [True, False, False, True]])
    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H), rand(B, T, H), first)


@layer("loop", "delta", "head")
def loop_all_sizes_equal() -> Any:
    """B = T = H = K = V: no size tells the axes apart."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        S = torch.zeros(3, 3, 3, 3)
        o = torch.empty_like(v)
        for t in range(3):
            S = S * torch.exp(-F.softplus(a[:, t]))[:, :, None, None]
            u = v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhv,bhk->bhvk", u * torch.sigmoid(b[:, t])[..., None], k[:, t])
            o[:, t] = torch.einsum("bhvk,bhk->bhv", S, q[:, t])
        return o, S

    return forward, (rand(3, 3, 3, 3), unit(3, 3, 3, 3), rand(3, 3, 3, 3), rand(3, 3, 3), rand(3, 3, 3))


@layer("loop", "delta", "none")
def loop_normalised_lms() -> Any:
    """The step size is over |k|^2 at the erase and the write (NLMS), keys not of unit norm."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mu: Tensor) -> Tensor:
        W = torch.zeros(B, H, V, K)
        outs = []
        for t in range(T):
            kt = k[:, t]
            step = torch.sigmoid(mu) / (kt.square().sum(-1, keepdim=True) + 1e-3)
            e = v[:, t] - (W @ kt[..., None])[..., 0]
            W = W + (step * e)[..., :, None] * kt[..., None, :]
            outs.append((W @ q[:, t, ..., None])[..., 0])
        return torch.stack(outs, 1)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(H, 1))


@layer("loop", "delta", "channel")
def loop_channel_decay_after_the_write() -> Any:
    """S = a (S + k beta (v - S^T k)) with a channel decay: KDA, its decay of the token before, and a decayed query."""

    def forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        w, b = torch.sigmoid(w), torch.sigmoid(b)
        S, outs = torch.zeros(B, H, K, V), []
        for t in range(T):
            S = S + outer(k[:, t], b[:, t, :, None] * (v[:, t] - read(S, k[:, t])))
            outs.append(read(S, q[:, t]))
            S = S * w[:, t, :, :, None]
        return torch.stack(outs, 1), S

    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K), rand(B, T, H))
