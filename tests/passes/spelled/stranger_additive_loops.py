"""Token loops of additive rules by strangers: see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.stranger_layers import B, H, K, T, V, layer, outer, rand, read


@layer("loop", "additive", "channel")
def loop_gla_module() -> Any:
    """A whole GLA layer: low-rank gate, logsigmoid / 16, group norm, swish output gate; loop over tokens."""

    class GLA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = 12
            self.q, self.k, self.v = nn.Linear(d, H * K), nn.Linear(d, H * K), nn.Linear(d, H * V)
            self.gk = nn.Sequential(nn.Linear(d, 3), nn.Linear(3, H * K))
            self.g, self.o = nn.Linear(d, H * V), nn.Linear(H * V, d)
            self.norm = nn.LayerNorm(V)

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q = self.q(x).view(b, n, H, K) * K**-0.5
            k = self.k(x).view(b, n, H, K)
            v = self.v(x).view(b, n, H, V)
            gk = (F.logsigmoid(self.gk(x)) / 16).view(b, n, H, K)
            S = x.new_zeros(b, H, K, V)
            outs = []
            for t in range(n):
                S = S * gk[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
                outs.append((q[:, t, :, :, None] * S).sum(-2))
            o = self.norm(torch.stack(outs, 1)).flatten(2)
            return self.o(o * F.silu(self.g(x)))

    return GLA(), (rand(B, T, 12),)


@layer("loop", "additive", "head")
def loop_retnet_recurrent() -> Any:
    """RetNet: constant decays 1 - 2^(-5-h) in a buffer, state kept in a dict between tokens."""

    class Retention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gamma", 1 - torch.exp2(-5 - torch.arange(H, dtype=torch.float32)))

        def step(self, q: Tensor, k: Tensor, v: Tensor, cache: dict[str, Tensor]) -> Tensor:
            kv = k.unsqueeze(-1) * v.unsqueeze(-2)
            if "prev" in cache:
                kv = cache["prev"] * self.gamma.view(1, H, 1, 1) + kv
            cache["prev"] = kv
            return torch.sum(q.unsqueeze(-1) * kv, dim=2)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache: dict[str, Tensor] = {}
            outs = [self.step(q[:, :, t], k[:, :, t], v[:, :, t], cache) for t in range(q.size(2))]
            return torch.stack(outs, dim=2)

    return Retention(), (rand(B, H, T, K), rand(B, H, T, K), rand(B, H, T, V))


@layer("loop", "additive", "none")
def loop_linear_transformer() -> Any:
    """Katharopoulos' causal linear attention with elu + 1 and no normaliser; state of folded heads."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        q, k, v = (x.transpose(1, 2).reshape(B * H, T, -1) for x in (q, k, v))
        S = torch.zeros(B * H, K, V)
        o = torch.empty(B * H, T, V)
        for t in range(T):
            S = torch.addcmul(S, k[:, t, :, None], v[:, t, None, :])
            o[:, t] = torch.bmm(q[:, t : t + 1], S)[:, 0]
        return o.view(B, H, T, V).transpose(1, 2)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V))


@layer("loop", "additive", "head")
def loop_lightning_minimax() -> Any:
    """MiniMax's lightning attention at decoding: slopes, ratio = exp(-slope), kv carried."""

    class Lightning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = 2 ** (-(2 ** -(torch.log2(torch.tensor(float(H))) - 3)))
            self.register_buffer("slope_rate", (start ** torch.arange(1, H + 1)).view(H, 1, 1))
            self.qkv = nn.Linear(8, 3 * H * K, bias=False)
            self.gate = nn.Linear(8, H * K, bias=False)

        def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
            qkv = F.silu(self.qkv(x)).view(B, -1, H, 3 * K)
            q, k, v = torch.split(qkv, K, dim=3)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            ratio = torch.exp(-self.slope_rate)
            kv = past
            output = []
            for i in range(x.shape[1]):
                kv = ratio * kv + torch.einsum("... n d, ... n e -> ... d e", k[:, :, i : i + 1], v[:, :, i : i + 1])
                output.append(torch.einsum("... n e, ... e d -> ... n d", q[:, :, i : i + 1], kv))
            o = torch.cat(output, dim=-2).transpose(1, 2).reshape(B, -1, H * K)
            return F.sigmoid(self.gate(x)) * o, kv

    return Lightning(), (rand(B, 3, 8), rand(B, H, K, K))


@layer("loop", "additive", "channel")
def loop_rwkv6() -> Any:
    """RWKV-6 without its bonus: data-dependent w = exp(-exp(.)), read after the write."""

    def forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.exp(-torch.exp(w))
        out = torch.empty(B, T, H, V)
        for t in range(T):
            rt, kt, vt, wt = r[:, t].view(B, H, 1, K), k[:, t].view(B, H, K, 1), v[:, t].view(B, H, 1, V), w[:, t]
            state = kt @ vt + wt.view(B, H, K, 1) * state
            out[:, t] = (rt @ state).squeeze(2)
        return out.reshape(B, T, H * V), state

    return forward, (rand(B, T, H * K), rand(B, T, H * K), rand(B, T, H * V), rand(B, T, H * K), rand(B, H, K, V))


@layer("loop", "additive", "channel")
def loop_rwkv6_bonus() -> Any:
    """RWKV-6 as published: the output adds a bonus u for the current token before the state decays."""

    def forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.exp(-torch.exp(w))
        out = []
        for t in range(T):
            kv = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            out.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state + u[None, :, :, None] * kv))
            state = w[:, t, :, :, None] * state + kv
        return torch.stack(out, 1), state

    return forward, (
        rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K), rand(H, K), rand(B, H, K, V),
    )  # fmt: skip


@layer("loop", "additive", "head")
def loop_mamba2_groups_list() -> Any:
    """Mamba-2's sequential reference: groups of B and C repeated over heads, states in a Python list."""

    def forward(x: Tensor, dt: Tensor, A_log: Tensor, Bm: Tensor, C: Tensor) -> Tensor:
        dt = F.softplus(dt)
        A = -torch.exp(A_log)
        Bm, C = (torch.repeat_interleave(m, 2, dim=2) for m in (Bm, C))
        states = [x.new_zeros(B, 4, V, K)]
        ys = []
        for t in range(x.shape[1]):
            decay = torch.exp(A * dt[:, t])
            update = (dt[:, t, :, None] * x[:, t])[..., None] * Bm[:, t, :, None, :]
            states.append(states[-1] * decay[..., None, None] + update)
            ys.append((states[-1] * C[:, t, :, None, :]).sum(-1))
        return torch.stack(ys, dim=1)

    return forward, (rand(B, T, 4, V), rand(B, T, 4), rand(4), rand(B, T, 2, K), rand(B, T, 2, K))


@layer("loop", "additive", "head")
def loop_two_layers_stack() -> Any:
    """Two retention layers one on the other, one loop over tokens that runs both layers at every token."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.ModuleList(nn.Linear(H * K, 3 * H * K) for _ in range(2))
            self.forget = nn.ModuleList(nn.Linear(H * K, H) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            states: list[Any] = [torch.zeros(B, H, K, K) for _ in range(2)]
            outs = []
            for t in range(x.shape[1]):
                h = x[:, t]
                for i in range(2):
                    q, k, v = self.proj[i](h).view(B, H, 3 * K).chunk(3, dim=-1)
                    f = torch.sigmoid(self.forget[i](h) + 3.0)
                    states[i] = f[..., None, None] * states[i] + k[..., :, None] * v[..., None, :]
                    h = h + (q[..., None, :] @ states[i]).reshape(B, H * K)
                outs.append(h)
            return torch.stack(outs, dim=1)

    return Stack(), (rand(B, 3, H * K),)


@layer("loop", "additive", "none")
def loop_based_taylor() -> Any:
    """Based: features 1, x, x (x) x / sqrt 2; the normaliser is a column of ones appended to the values."""

    def features(x: Tensor) -> Tensor:
        x = x * K**-0.25
        square = (x[..., :, None] * x[..., None, :]).flatten(-2) / 2**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, square], dim=-1)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = features(q), features(k)
        v = F.pad(v, (0, 1), value=1.0)
        S = v.new_zeros(B, H, q.shape[-1], V + 1)
        ys = []
        for t in range(T):
            S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            y = torch.einsum("bhd,bhdv->bhv", q[:, t], S)
            ys.append(y[..., :-1] / (y[..., -1:] + 1e-6))
        return torch.stack(ys, 1)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V))


@layer("loop", "additive", "head")
def loop_grouped_queries() -> Any:
    """Two query heads read one state, as in grouped-query lightning attention."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        S = q.new_zeros(B, H, K, V)
        f = torch.sigmoid(f)
        outs = []
        for t in range(T):
            S = f[:, t, :, None, None] * S + outer(k[:, t], v[:, t])
            outs.append(torch.einsum("bgrk,bgkv->bgrv", q[:, t].view(B, H, 2, K), S).reshape(B, 2 * H, V))
        return torch.stack(outs, 1), S

    return forward, (rand(B, T, 2 * H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H))


@layer("loop", "additive", "channel")
def loop_both_directions() -> Any:
    """A vision layer: forward and backward GLA over the same tokens, outputs added."""

    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        S, outs = torch.zeros(B, H, K, V), []
        for qt, kt, vt, wt in zip(q.unbind(1), k.unbind(1), v.unbind(1), w.unbind(1), strict=True):
            S = wt[..., None] * S + outer(kt, vt)
            outs.append(read(S, qt))
        return torch.stack(outs, 1)

    def forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        args = (q, k, v, torch.sigmoid(w))
        return run(*args) + run(*(x.flip(1) for x in args)).flip(1)

    return forward, (rand(B, 3, H, K), rand(B, 3, H, K), rand(B, 3, H, V), rand(B, 3, H, K))


@layer("loop", "additive", "head")
def loop_learned_initial_state() -> Any:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.S0 = nn.Parameter(torch.randn(1, H, K, V))
            self.qkvf = nn.Linear(5, H * (2 * K + V + 1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, f = self.qkvf(x).unflatten(-1, (H, -1)).split([K, K, V, 1], dim=-1)
            S = self.S0.expand(x.shape[0], -1, -1, -1)
            outs = []
            for t in range(x.shape[1]):
                S = S * f[:, t, ..., None].sigmoid() + k[:, t, ..., None] @ v[:, t, :, None]
                outs.append((q[:, t, :, None] @ S).flatten(1))
            return torch.stack(outs, dim=1)

    return Learned(), (rand(B, 3, 5),)


@layer("loop", "additive", "head")
def loop_writes_every_other_token() -> Any:
    """Only even tokens write; all read and decay."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        S, outs = torch.zeros(B, H, K, V), []
        f = torch.sigmoid(f)
        for t in range(T):
            S = f[:, t, :, None, None] * S
            if t % 2 == 0:
                S = S + outer(k[:, t // 2], v[:, t // 2])
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1)

    return forward, (rand(B, T, H, K), rand(B, 2, H, K), rand(B, 2, H, V), rand(B, T, H))
