"""Layers as other people write them, one token each, and how all of them are registered.

Written without knowledge of the passes, in the manners of papers' reference code and of model files. Token loops and
scans are in stranger_loops.py, chunk forms in stranger_chunks.py, what must be left alone in stranger_near_misses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, H, K, V = 2, 4, 2, 4, 6
Built = tuple[Callable[..., Any], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layer:
    """One spelling.

    Attributes:
        name: how tests call it.
        form: step | loop | scan | chunk | miss.
        build: () -> (a callable or module of tensors, its inputs).
        rule, decay: what the report should say; None for near misses.
    """

    name: str
    form: str
    build: Callable[[], Built]
    rule: str | None = None
    decay: str | None = None


LAYERS: list[Layer] = []


def layer(form: str, rule: str | None = None, decay: str | None = None) -> Callable[[Callable[[], Built]], Any]:
    """Register a builder under its own name."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        LAYERS.append(Layer(build.__name__, form, build, rule, decay))
        return build

    return register


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def unit(*sizes: int) -> Tensor:
    return F.normalize(torch.randn(*sizes), dim=-1)


def outer(k: Tensor, u: Tensor) -> Tensor:
    return k[..., :, None] * u[..., None, :]


def read(S: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, k)


def delta_inputs(tokens: int = T) -> tuple[Tensor, ...]:
    """q, k (of unit norm), v, and what the decay and beta are made from; [B, T, H, .]."""
    return (rand(B, tokens, H, K), unit(B, tokens, H, K), rand(B, tokens, H, V), rand(B, tokens, H), rand(B, tokens, H))


def token_loop(step: Callable[..., tuple[Tensor, Tensor]]) -> Built:
    """A layer [B, T, H, .] that runs `step` (S, q, k, v, alpha, beta) -> (S, o) at every token."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        alpha, beta = torch.exp(-F.softplus(a)), torch.sigmoid(b)
        S = torch.zeros(B, H, K, V)
        outs = []
        for t in range(q.shape[1]):
            S, o = step(S, q[:, t], k[:, t], v[:, t], alpha[:, t, :, None, None], beta[:, t, :, None])
            outs.append(o)
        return torch.stack(outs, 1), S

    return forward, delta_inputs()


@layer("step", "delta", "head")
def step_cache_object() -> Any:
    """A decode step of Gated DeltaNet whose state lives in a buffer, written back with copy_."""

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = nn.Parameter(torch.rand(H))
            self.dt_bias = nn.Parameter(torch.rand(H))
            self.register_buffer("recurrent_state", torch.randn(B, H, K, V))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
            g = (-self.A_log.exp() * F.softplus(a + self.dt_bias)).exp()
            beta = b.sigmoid().unsqueeze(-1)
            k = F.normalize(k, dim=-1)
            q = F.normalize(q, dim=-1) * K**-0.5
            state = self.recurrent_state * g[..., None, None]
            memory = (state * k.unsqueeze(-1)).sum(-2)
            state = state + k.unsqueeze(-1) * ((v - memory) * beta).unsqueeze(-2)
            self.recurrent_state.copy_(state)
            return (state * q.unsqueeze(-1)).sum(-2)

    return Decode(), (rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H), rand(B, H))


@layer("step", "delta", "head")
def step_transition_matrix() -> Any:
    """The paper's formula: S = S (alpha (I - beta k k^T)) + beta v k^T, with S [V, K]."""

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        alpha = torch.exp(-F.softplus(a))[..., None, None]
        beta = torch.sigmoid(b)[..., None, None]
        k = F.normalize(k, dim=-1)
        eye = torch.eye(K)
        transition = alpha * (eye - beta * torch.einsum("bhi,bhj->bhij", k, k))
        S = S @ transition + beta * torch.einsum("bhi,bhj->bhij", v, k)
        return torch.einsum("bhvk,bhk->bhv", S, q), S

    return step, (rand(B, H, V, K), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H), rand(B, H))


@layer("step", "additive", "head")
def step_mamba2() -> Any:
    """Mamba-2's `step`: one B and C for all heads, the skip D x, a state [B, H, P, N]."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = nn.Parameter(torch.rand(H))
            self.dt_bias = nn.Parameter(torch.rand(H))
            self.D = nn.Parameter(torch.ones(H))

        def forward(self, xBC: Tensor, dt: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor]:
            x, Bm, C = torch.split(xBC, [H * V, K, K], dim=-1)
            A = -torch.exp(self.A_log.float())
            dt = F.softplus(dt + self.dt_bias)
            dA = torch.exp(dt * A)
            x = x.reshape(-1, H, V)
            dBx = torch.einsum("bh,bn,bhp->bhpn", dt, Bm, x)
            ssm_state = ssm_state * dA[:, :, None, None] + dBx
            y = torch.einsum("bhpn,bn->bhp", ssm_state, C)
            y = y + self.D[:, None] * x
            return y.flatten(1), ssm_state

    return Step(), (rand(B, H * V + 2 * K), rand(B, H), rand(B, H, V, K))


@layer("step", "delta", "channel")
def step_kda_tuple_bf16() -> Any:
    """A decode step of KDA: bf16 activations, the state and its arithmetic in fp32."""

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float()
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        S = S * torch.exp(-5.0 * torch.sigmoid(g)).unsqueeze(-1)
        delta = b.sigmoid().unsqueeze(-1) * (v - torch.matmul(k.unsqueeze(-2), S).squeeze(-2))
        S = torch.baddbmm(S.reshape(B * H, K, V), k.reshape(B * H, K, 1), delta.reshape(B * H, 1, V)).view(B, H, K, V)
        o = torch.matmul(q.unsqueeze(-2), S).squeeze(-2) * K**-0.5
        return o.to(torch.bfloat16).float(), S

    return step, (
        rand(B, H, K, V), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H, K), rand(B, H),
    )  # fmt: skip


@layer("step", "additive", "head")
def step_xlstm_mlstm() -> Any:
    """mLSTM's cell with exponential-free gates and no normaliser: C = f C + i v k^T, h = o * (C q)."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(H * K, 3 * H * K)
            self.gates = nn.Linear(H * K, 2 * H)
            self.o = nn.Linear(H * K, H * K)

        def forward(self, x: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(x).view(B, 3, H, K).unbind(1)
            i, f = self.gates(x).chunk(2, dim=-1)
            f = torch.sigmoid(f).view(B, H, 1, 1)
            i = torch.sigmoid(i).view(B, H, 1, 1)
            k = k / K**0.5
            C = f * C + i * (v.unsqueeze(-1) @ k.unsqueeze(-2))
            h = torch.sigmoid(self.o(x)) * (C @ q.unsqueeze(-1)).squeeze(-1).flatten(1)
            return h, C

    return Cell(), (rand(B, H * K), rand(B, H, K, K))


@layer("step", "additive", "channel")
def step_hgrn2() -> Any:
    """HGRN2: the key is one minus the forget gate, lower bounded."""

    def step(S: Tensor, q: Tensor, f: Tensor, v: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        bound = torch.sigmoid(low).view(1, H, 1)
        gate = bound + (1 - bound) * torch.sigmoid(f)
        S = gate.unsqueeze(-1) * S + (1 - gate).unsqueeze(-1) * v.unsqueeze(-2)
        return torch.einsum("bhk,bhkv->bhv", F.silu(q), S), S

    return step, (rand(B, H, K, V), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(H))


@layer("step", "delta", "none")
def step_longhorn() -> Any:
    """Longhorn with scalar keys' norm: the closed-form step size beta / (1 + beta |k|^2)."""

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        beta = torch.sigmoid(b)
        eps = beta / (1 + beta * (k * k).sum(-1))
        err = v - torch.einsum("bhvk,bhk->bhv", S, k)
        S = S + eps[..., None, None] * err[..., :, None] * k[..., None, :]
        return torch.einsum("bhvk,bhk->bhv", S, q), S

    return step, (rand(B, H, V, K), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H))


@layer("step", "delta", "head")
def step_gva_heads_folded() -> Any:
    """Grouped values (two value heads a key head), batch and heads folded into one axis for bmm."""

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q = q.repeat_interleave(2, dim=1).reshape(-1, 1, K)
        k = k.repeat_interleave(2, dim=1).reshape(-1, 1, K)
        v = v.reshape(-1, 1, V)
        S = S.reshape(-1, K, V) * torch.sigmoid(a).reshape(-1, 1, 1)
        u = (v - torch.bmm(k, S)) * torch.sigmoid(b).reshape(-1, 1, 1)
        S = S + torch.bmm(k.transpose(1, 2), u)
        o = torch.bmm(q, S).reshape(B, 2 * H, V)
        return o, S.reshape(B, 2 * H, K, V)

    return step, (rand(B, 2 * H, K, V), rand(B, H, K), unit(B, H, K), rand(B, 2 * H, V), rand(B, 2 * H), rand(B, 2 * H))


@layer("step", "delta", "head")
def step_comba() -> Any:
    """Comba's recurrence without its output correction: alpha S - beta k (k^T alpha S) + beta k v."""

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b = b.sigmoid()[:, :, None]
        S = S * (-F.softplus(g)).exp()[:, :, None, None]
        erase = torch.einsum("bhk,bhkv->bhv", k, S) * b
        S = S + torch.einsum("bhk,bhv->bhkv", k, b * v) - torch.einsum("bhk,bhv->bhkv", k, erase)
        return torch.einsum("bhk,bhkv->bhv", q, S), S

    return step, (rand(B, H, K, V), rand(B, H, K), unit(B, H, K), rand(B, H, V), rand(B, H), rand(B, H))


@layer("step", "additive", "channel")
def step_gsa() -> Any:
    """Gated slot attention: two gated states a token, the second read with a softmax of the first's output."""

    def step(Sk: Tensor, Sv: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.sigmoid(f) ** (1 / 16)
        Sk = Sk * gate[..., None, :] + k[..., :, None] * (1 - gate)[..., None, :]
        p = torch.einsum("bhkm,bhk->bhm", Sk, q * K**-0.5).softmax(-1)
        Sv = Sv * gate[..., :, None] + (1 - gate)[..., :, None] * v[..., None, :]
        return torch.einsum("bhmv,bhm->bhv", Sv, p), Sk, Sv

    M = 5
    return step, (rand(B, H, K, M), rand(B, H, M, V), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H, M))


@layer("step", "additive", "head")
def step_flat_state() -> Any:
    """The cache is one flat row a sequence, viewed as [B, H, V, K] at every step and flattened again."""

    def step(flat: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        S = flat.view(B, H, V, K)
        S = S.lerp(v[..., :, None] * k[..., None, :], 1 - torch.sigmoid(f)[..., None, None])
        return (S * q[..., None, :]).sum(-1).flatten(1), S.reshape(B, -1)

    return step, (rand(B, H * V * K), rand(B, H, K), rand(B, H, K), rand(B, H, V), rand(B, H))


@layer("step", "additive", "head")
def step_mamba2_with_conv_cache() -> Any:
    """Mamba-2's whole decode step: in_proj, a conv cache rolled, the ssm state, gated norm, out_proj."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d_inner, d = H * V, 8
            width = self.d_inner + 2 * K
            self.in_proj = nn.Linear(d, self.d_inner + width + H, bias=False)
            self.conv_weight, self.conv_bias = nn.Parameter(torch.randn(width, 4)), nn.Parameter(torch.randn(width))
            self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.rand(H)) for _ in range(3))
            self.out_proj = nn.Linear(self.d_inner, d)

        def forward(self, x: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z, xBC, dt = torch.split(self.in_proj(x), [self.d_inner, self.d_inner + 2 * K, H], dim=-1)
            conv_state = torch.roll(conv_state, shifts=-1, dims=-1)
            conv_state[:, :, -1] = xBC
            xBC = F.silu((conv_state * self.conv_weight).sum(-1) + self.conv_bias)
            x, Bm, C = torch.split(xBC, [self.d_inner, K, K], dim=-1)
            A = -torch.exp(self.A_log)
            dt = F.softplus(dt + self.dt_bias)
            x = x.view(-1, H, V)
            ssm_state = ssm_state * torch.exp(dt * A)[..., None, None] + torch.einsum("bh,bn,bhp->bhpn", dt, Bm, x)
            y = torch.einsum("bhpn,bn->bhp", ssm_state, C) + self.D[:, None] * x
            y = F.rms_norm(y.flatten(1) * F.silu(z), (self.d_inner,))
            return self.out_proj(y), conv_state, ssm_state

    return Block(), (rand(B, 8), rand(B, H * V + 2 * K, 4), rand(B, H, V, K))


@layer("step", "additive", "head")
def step_mlstm_stabilised() -> Any:
    """xLSTM's mLSTM step in full: max stabiliser, normaliser state, exponential input gate."""

    def step(
        C: Tensor, n: Tensor, m: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, ...]:
        log_f = F.logsigmoid(f)
        m_new = torch.maximum(log_f + m, i)
        fa = torch.exp(log_f + m - m_new)[..., None]
        ia = torch.exp(i - m_new)[..., None]
        k = k * K**-0.5
        C = fa[..., None] * C + ia[..., None] * (k[..., :, None] * v[..., None, :])
        n = fa * n + ia * k
        num = (q[..., None, :] @ C).squeeze(-2)
        den = torch.maximum((q * n).sum(-1, keepdim=True).abs(), torch.exp(-m_new)[..., None]) + 1e-6
        return num / den, C, n, m_new

    return step, (
        rand(B, H, K, V), rand(B, H, K), rand(B, H), rand(B, H, K), rand(B, H, K), rand(B, H, V),
        rand(B, H), rand(B, H),
    )  # fmt: skip
