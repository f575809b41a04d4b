"""Layers in the manners of public repositories' reference code: see stranger_layers.py."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.stranger_layers import B, H, K, T, V, layer, rand, unit

N, C = 3, 4
L = N * C


def taylor(x: Tensor) -> Tensor:
    """1, x and the products of its elements: exp(q . k) to second order."""
    d = x.shape[-1]
    second = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(start_dim=-2) / (math.sqrt(2) * math.sqrt(d))
    return torch.cat([torch.ones(x[..., :1].shape), x / d**0.25, second], dim=-1)


@layer("chunk", "additive", "none")
def parallel_taylor_features() -> Any:
    """Based: Taylor features, scores cut by tril, outputs over a cumulative sum of the keys."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = taylor(q), taylor(k)
        A = torch.tril(torch.einsum("bhnd,bhmd->bhnm", q, k))
        y = torch.einsum("bhnm,bhme->bhne", A, v)
        z = 1 / (torch.einsum("bhld,bhld->bhl", q, k.cumsum(2)) + 1e-6)
        return y * z[..., None]

    return forward, (rand(B, H, 8, 3), rand(B, H, 8, 3), rand(B, H, 8, V))


@layer("step", "additive", "none")
def step_taylor_features() -> Any:
    """Based's decode step: kv_state and k_state updated in place, everything of one token on an axis of 1."""

    def forward(q: Tensor, k: Tensor, v: Tensor, kv_state: Tensor, k_state: Tensor) -> tuple[Tensor, ...]:
        q, k = taylor(q), taylor(k)
        q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-1)
        kv_state += k[:, :, -1:] * v[:, :, -1:]
        k_state += k[:, :, -1:]
        num = (q * kv_state).sum(dim=-1)
        y = num / ((q * k_state).sum(dim=-1) + 1e-12)
        return y.squeeze(2), kv_state, k_state

    D = 1 + 3 + 9
    return forward, (rand(B, H, 1, 3), rand(B, H, 1, 3), rand(B, H, 1, V), rand(B, H, 1, V, D), rand(B, H, 1, 1, D))


@layer("chunk", "additive", "none")
def parallel_hedgehog() -> Any:
    """Hedgehog: learned softmax features of both signs, a float triu mask, rows normalised before the values."""

    class Hedgehog(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(H, K, K) / 2)

        def features(self, x: Tensor) -> Tensor:
            x = torch.einsum("hdf,bhld->bhlf", self.w, x)
            return torch.cat([torch.softmax(x, dim=-1), torch.softmax(-x, dim=-1)], dim=-1).clamp(min=1e-12)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.features(q), self.features(k)
            a = torch.einsum("bhmd,bhnd->bhmn", q, k)
            m, n = a.shape[-2:]
            a = a.masked_fill(torch.ones((m, n)).triu(n - m + 1).bool(), 0)
            a = a / (a.sum(dim=-1, keepdim=True) + 1e-12)
            return torch.einsum("bhmn,bhnd->bhmd", a, v)

    return Hedgehog(), (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@layer("chunk", "additive", "head")
def parallel_lightning_reference() -> Any:
    """Lightning Attention's reference: a mask filled row by row from the slopes, exp of it on the scores."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        slopes = torch.tensor([2.0 ** -(8 * (i + 1) / H) for i in range(H)])

        def mask_of(slope: Tensor) -> Tensor:
            mask = torch.triu(torch.zeros(n, n).float().fill_(float("-inf")), 1)
            for i in range(n):
                mask[i, : i + 1] = -torch.flip(slope * torch.arange(i + 1), [0])
            return torch.exp(mask)

        mask = torch.stack([mask_of(s) for s in slopes.unbind()])
        qk = torch.matmul(q, k.transpose(2, 3))
        qk = (qk.to(torch.float32) * mask).to(q.dtype)
        return torch.matmul(qk, v)

    return forward, (rand(B, H, 6, K), rand(B, H, 6, K), rand(B, H, 6, V))


@layer("chunk", "additive", "head")
def parallel_retention_reference() -> Any:
    """FLA's naive retention: log2 of the decays, exp2 of index differences times them, a three-operand einsum."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        orig = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        _, heads, n, d = q.shape
        s = (1 - q.new_tensor(2.0, dtype=torch.float).pow(-5.0 - q.new_tensor(range(heads), dtype=torch.float))).log2()
        i = q.new_tensor(range(n), dtype=torch.float)
        D = torch.exp2((i.unsqueeze(-1) - i) * s.view(-1, 1, 1)) * i.unsqueeze(-1).ge(i)
        scores = torch.einsum("bhqd,bhkd,hqk->bhqk", q * d**-0.5, k, D.to(q.dtype))
        return torch.einsum("bhqk,bhkd->bhqd", scores, v).to(orig)

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@layer("chunk", "additive", "head")
def chunk_ssd_reference() -> Any:
    """Mamba-2's unfused reference: chunk_state, state_passing, chunk_scan; dt applied where it is needed; D and z."""

    def forward(
        x: Tensor, dt: Tensor, A_log: Tensor, Bm: Tensor, Cm: Tensor, D: Tensor, z: Tensor, dt_bias: Tensor
    ) -> Tensor:
        b, n, h, p = x.shape
        dt = dt.reshape(b, N, C, h).permute(0, 3, 1, 2).float()
        dt = F.softplus(dt + dt_bias[:, None, None])
        dA = dt * -torch.exp(A_log)[:, None, None]
        cum = torch.cumsum(dA, dim=-1)

        def per_head(m: Tensor) -> Tensor:
            return m.repeat_interleave(h // m.shape[2], dim=2).reshape(b, N, C, h, K)

        Bh, Ch, xc = per_head(Bm), per_head(Cm), x.reshape(b, N, C, h, p)
        decay_states = torch.exp(cum[:, :, :, -1:] - cum)
        states = torch.einsum("bclhn,bhcl,bhcl,bclhp->bchpn", Bh, decay_states, dt, xc)
        flat = states.flatten(-2)
        flat = torch.cat([torch.zeros_like(flat[:, 0])[:, None], flat], dim=1)
        total = torch.cumsum(F.pad(cum[:, :, :, -1], (1, 0)), dim=-1)
        segments = total[:, :, :, None] - total[:, :, None, :]
        causal = torch.tril(torch.ones(N + 1, N + 1, dtype=torch.bool), diagonal=0)
        decay_chunk = torch.exp(segments).masked_fill(~causal, 0)
        passed = torch.einsum("bhzc,bchd->bzhd", decay_chunk, flat)[:, :-1].unflatten(-1, (p, K))
        CB = torch.einsum("bclhn,bcshn->bchls", Ch, Bh)
        decay = torch.exp(cum[..., :, None] - cum[..., None, :])
        scores = CB * decay.permute(0, 2, 1, 3, 4)
        scores = scores.masked_fill(~torch.tril(torch.ones(C, C, dtype=torch.bool)), 0)
        out = torch.einsum("bchls,bhcs,bcshp->bclhp", scores, dt, xc)
        out = out + torch.einsum("bclhn,bchpn->bclhp", Ch, passed) * torch.exp(cum.permute(0, 2, 3, 1)[..., None])
        out = out.reshape(b, n, h, p)
        out = out + x * D[:, None]
        return out * F.silu(z)

    return forward, (
        rand(B, L, H, V), rand(B, L, H), rand(H), rand(B, L, 1, K), rand(B, L, 1, K), rand(H), rand(B, L, H, V),
        rand(H),
    )  # fmt: skip


@layer("step", "additive", "head")
def step_selective_state_update() -> Any:
    """Mamba's selective_state_update reference as Mamba-2 calls it: A, dt, dt_bias and D expanded over P and N."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.rand(H)) for _ in range(3))

        def forward(self, state: Tensor, x: Tensor, dt: Tensor, Bm: Tensor, Cm: Tensor, z: Tensor) -> Tensor:
            A = (-torch.exp(self.A_log.float()))[:, None, None].expand(H, V, K)
            dt = dt[:, :, None].expand(-1, -1, V)
            bias = self.dt_bias[:, None].expand(-1, V)
            dt = F.softplus(dt + bias)
            dA = torch.exp(dt.unsqueeze(-1) * A)
            Bh = Bm.unsqueeze(2).expand(-1, -1, H, -1).reshape(B, H, K)
            Ch = Cm.unsqueeze(2).expand(-1, -1, H, -1).reshape(B, H, K)
            dB = dt.unsqueeze(-1) * Bh.unsqueeze(2)
            state.copy_(state * dA + dB * x.unsqueeze(-1))
            out = torch.einsum("bhdn,bhn->bhd", state.to(Ch.dtype), Ch)
            out = out + (x * self.D[:, None].expand(-1, V)).to(out.dtype)
            return out * F.silu(z)

    return Step(), (rand(B, H, V, K), rand(B, H, V), rand(B, H), rand(B, 1, K), rand(B, 1, K), rand(B, H, V))


@layer("chunk", "additive", "head")
def parallel_log_space_scan() -> Any:
    """Heinsen's scan: exp(c) cumsum(kv exp(-c)) with c the cumulative log decay, all states at once."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        c = F.logsigmoid(f).cumsum(dim=1)[..., None, None]
        kv = torch.einsum("bthk,bthv->bthkv", k, v)
        states = torch.exp(c) * torch.cumsum(kv * torch.exp(-c), dim=1)
        return torch.einsum("bthk,bthkv->bthv", q, states)

    return forward, (rand(B, 6, H, K), rand(B, 6, H, K), rand(B, 6, H, V), rand(B, 6, H))


@layer("loop", "delta", "none")
def loop_ttt_linear_one_token() -> Any:
    """TTT-Linear with mini-batches of one token and no norm: W - eta x_k^T (x_k W - (x_v - x_k)), then x_q W."""

    def forward(xq: Tensor, xk: Tensor, xv: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        W = torch.zeros(B, H, K, K)
        eta = torch.sigmoid(lr) / K
        outs = []
        for t in range(T):
            q, k, v = xq[:, :, t : t + 1], xk[:, :, t : t + 1], xv[:, :, t : t + 1]
            target = v - k
            grad = k @ W - target
            W = W - (eta[:, :, t : t + 1, None] * k).transpose(-1, -2) @ grad
            outs.append(q + q @ W)
        return torch.cat(outs, dim=2), W

    return forward, (rand(B, H, T, K), unit(B, H, T, K), rand(B, H, T, K), rand(B, H, T))


@layer("chunk", "additive", "none")
def chunk_linear_attention_normalised() -> Any:
    """FLA's naive chunk form: cumsum of the chunks' k^T v shifted by cat, outputs over q . cumsum(k)."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scale = K**-0.5
        qc, kc, vc = (x.unflatten(1, (N, C)).permute(0, 3, 1, 2, 4) for x in (q * scale, k, v))
        kv = (kc.transpose(-1, -2) @ vc).cumsum(2)
        kv = torch.cat([torch.zeros_like(kv[:, :, :1]), kv[:, :, :-1]], dim=2)
        inter = qc @ kv
        intra = ((qc @ kc.transpose(-1, -2)).masked_fill_(torch.ones(C, C, dtype=torch.bool).triu(1), 0)) @ vc
        o = (inter + intra).permute(0, 2, 3, 1, 4).reshape(B, L, H, V)
        z = (q * scale * k.cumsum(1)).sum(-1, keepdim=True)
        return o / (z + 1e-10)

    return forward, (rand(B, L, H, K), rand(B, L, H, K), rand(B, L, H, V))


@layer("loop", "additive", "none")
def loop_fast_transformers_recurrent() -> Any:
    """Katharopoulos: S and Z in place, the read divided inside one einsum of three operands."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S, Z = torch.zeros(B, H, K, V), torch.zeros(B, H, K)
        outs = []
        for t in range(T):
            Q, Kt, Vt = F.elu(q[:, t]) + 1, F.elu(k[:, t]) + 1, v[:, t]
            Z = Z + Kt
            S = S + torch.einsum("nhd,nhm->nhdm", Kt, Vt)
            D = 1.0 / (torch.einsum("nhd,nhd->nh", Q, Z) + 1e-6)
            outs.append(torch.einsum("nhd,nhdm,nh->nhm", Q, S, D))
        return torch.stack(outs, 1)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V))


@layer("chunk", "additive", "none")
def parallel_taylor_cumsum() -> Any:
    """lucidrains' causal Taylor attention: cumsum of all outer products and of keys, the denominator bounded below."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = taylor(q * 3**-0.5), taylor(k)
        num = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
        out = torch.einsum("bhnde,bhnd->bhne", num, q)
        den = torch.einsum("bhnd,bhnd->bhn", k.cumsum(dim=-2), q).clamp(min=1e-5)
        return (out / den.unsqueeze(-1)).transpose(1, 2).reshape(B, -1, H * V)

    return forward, (rand(B, H, 5, 3), rand(B, H, 5, 3), rand(B, H, 5, V))


@layer("loop", "delta", "none")
def loop_fast_weight_programmer() -> Any:
    """Schlag et al.: heads folded into the batch, sum-normalised DPFP-like keys, W.add of a bmm, out[i] = bmm(W, q)."""

    def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        def fold(x: Tensor) -> Tensor:
            return x.permute(1, 2, 0, 3).reshape(B * H, -1, x.shape[-1])

        q, k = (torch.cat([F.relu(x), F.relu(-x)], dim=-1) + 1e-3 for x in (q, k))
        q, k = q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True)
        q, k, v, beta = fold(q), fold(k), fold(v), fold(torch.sigmoid(beta))
        W = torch.zeros(B * H, V, 2 * K)
        out = torch.zeros(B * H, T, V)
        for i in range(T):
            v_old = torch.bmm(W, k[:, i].unsqueeze(2)).squeeze(2)
            insert = beta[:, i] * (v[:, i] - v_old)
            W = W.add(torch.bmm(insert.unsqueeze(2), k[:, i].unsqueeze(1)))
            out[:, i] = torch.bmm(W, q[:, i].unsqueeze(2)).squeeze(2)
        return out.reshape(B, H, T, V).permute(2, 0, 1, 3).reshape(T, B, H * V), W

    return forward, (rand(T, B, H, K), rand(T, B, H, K), rand(T, B, H, V), rand(T, B, H, 1))


@layer("loop", "additive", "channel")
def loop_gla_reference() -> Any:
    """FLA's naive recurrent GLA: heads first, fp32, zeros plus the initial state in place, a product and a sum."""

    def forward(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, gk = (x.transpose(1, 2).float() for x in (q, k, v, gk))
        o = torch.zeros_like(v)
        h = q.new_zeros(B, H, K, V, dtype=torch.float32)
        h += initial.float()
        for i in range(T):
            q_i, k_i, v_i = q[:, :, i] * K**-0.5, k[:, :, i], v[:, :, i]
            h = h * gk[:, :, i].exp()[..., None] + k_i[..., None] * v_i[..., None, :]
            o[:, :, i] = (q_i[..., None] * h).sum(-2)
        return o.transpose(1, 2), h

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), -rand(B, T, H, K).abs(), rand(B, H, K, V))


@layer("scan", "additive", "head")
def associative_scan_of_outer_products() -> Any:
    """Mamba-2 by torch's associative_scan over (decay, k v^T)."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        a = torch.sigmoid(f)[..., None, None].expand(B, T, H, K, V)
        kv = k[..., :, None] * v[..., None, :]

        def combine(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return x[0] * y[0], y[0] * x[1] + y[1]

        _, states = associative_scan(combine, (a, kv), dim=1, combine_mode="generic")
        return torch.einsum("bthk,bthkv->bthv", q, states)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H))


@layer("step", "additive", "head")
def step_retention_with_a_running_scale() -> Any:
    """torchscale's recurrent retention: the state is kept divided by the root of a running sum of decays."""

    class Retention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(H, dtype=torch.float))).exp())

        def forward(self, qr: Tensor, kr: Tensor, v: Tensor, prev_kv: Tensor, prev_scale: Tensor) -> tuple[Tensor, ...]:
            v = v.view(B, H, V, 1)
            kv = kr * v
            scale = prev_scale * self.decay + 1
            kv = prev_kv * (prev_scale.sqrt() * self.decay / scale.sqrt()).view(H, 1, 1) + kv / scale.sqrt().view(
                H, 1, 1
            )
            return torch.sum(qr * kv, dim=3), kv, scale

    return Retention(), (rand(B, H, 1, K), rand(B, H, 1, K), rand(B, 1, H * V), rand(B, H, V, K), rand(H).abs())
