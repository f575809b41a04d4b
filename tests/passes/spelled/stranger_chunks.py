"""Chunk-parallel spellings by strangers: see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.stranger_layers import B, H, K, V, delta_inputs, layer, rand, unit

C, N = 4, 3
T = C * N


def heads_first(count: int = 5) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in delta_inputs(T)[:count])


@layer("chunk", "additive", "head")
def chunk_mamba2_ssd_minimal() -> Any:
    """Mamba-2's listing: segsum, intra-chunk, chunk states, inter-chunk recurrence by segsum, off-diagonal output."""

    def segsum(x: Tensor) -> Tensor:
        n = x.size(-1)
        x = x[..., None].expand(*x.shape, n)
        x = x.masked_fill(~torch.tril(torch.ones(n, n, dtype=torch.bool), diagonal=-1), 0)
        x = torch.cumsum(x, dim=-2)
        return x.masked_fill(~torch.tril(torch.ones(n, n, dtype=torch.bool), diagonal=0), -torch.inf)

    def forward(x: Tensor, dt: Tensor, A_log: Tensor, Bm: Tensor, Cm: Tensor) -> tuple[Tensor, Tensor]:
        dt = F.softplus(dt)
        A = dt * -torch.exp(A_log)
        X = x * dt[..., None]
        X, Bm, Cm = (t.reshape(B, N, C, *t.shape[2:]) for t in (X, Bm, Cm))
        A = A.reshape(B, N, C, H).permute(0, 3, 1, 2)
        A_cumsum = torch.cumsum(A, dim=-1)
        L = torch.exp(segsum(A))
        Y_diag = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", Cm, Bm, L, X)
        decay_states = torch.exp(A_cumsum[:, :, :, -1:] - A_cumsum)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", Bm, decay_states, X)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        decay_chunk = torch.exp(segsum(F.pad(A_cumsum[:, :, :, -1], (1, 0))))
        new_states = torch.einsum("bhzc,bchpn->bzhpn", decay_chunk, states)
        states, final_state = new_states[:, :-1], new_states[:, -1]
        Y_off = torch.einsum("bclhn,bchpn,bhcl->bclhp", Cm, states, torch.exp(A_cumsum))
        return (Y_diag + Y_off).reshape(B, T, H, V), final_state

    return forward, (rand(B, T, H, V), rand(B, T, H), rand(H), rand(B, T, H, K), rand(B, T, H, K))


@layer("chunk", "delta", "head")
def chunk_gdn_solve_triangular() -> Any:
    """Gated DeltaNet, WY form by solve_triangular on [v beta | k beta exp g], a Python loop over chunks."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = -F.softplus(a), torch.sigmoid(b)
        q, k, v = (x.unflatten(2, (N, C)) for x in (q * K**-0.5, k, v))
        g, beta = g.unflatten(2, (N, C)).cumsum(-1), beta.unflatten(2, (N, C))
        causal = torch.ones(C, C, dtype=torch.bool).tril()
        decay = torch.where(causal, g[..., :, None] - g[..., None, :], -torch.inf).exp()
        kb = k * beta[..., None]
        A = (kb @ k.mT * decay).tril(-1) + torch.eye(C)
        rhs = torch.cat([v * beta[..., None], kb * g[..., None].exp()], dim=-1)
        u, w = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True).split([V, K], dim=-1)
        S = torch.zeros(B, H, K, V)
        outs = []
        for i in range(N):
            new = u[:, :, i] - w[:, :, i] @ S
            inter = (q[:, :, i] * g[:, :, i, :, None].exp()) @ S
            outs.append(inter + (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]) @ new)
            last = g[:, :, i, -1]
            S = S * last[..., None, None].exp()
            S = S + (k[:, :, i] * (last[..., None] - g[:, :, i]).exp()[..., None]).mT @ new
        return torch.stack(outs, 2).flatten(2, 3), S

    return forward, heads_first()


@layer("chunk", "delta", "none")
def chunk_deltanet_rowwise() -> Any:
    """DeltaNet with the inverse by row-wise forward substitution in a clone, as in FLA's naive chunk form."""

    def forward(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        beta = b.sigmoid()
        v = v * beta[..., None]
        k_beta = k * beta[..., None]
        mask = torch.triu(torch.ones(C, C, dtype=torch.bool), diagonal=0)
        q, k, v, k_beta = (x.reshape(B, H, N, C, -1) for x in (q, k, v, k_beta))
        attn = -(k_beta @ k.transpose(-1, -2)).masked_fill(mask, 0)
        for i in range(1, C):
            attn[..., i, :i] = attn[..., i, :i].clone() + (
                attn[..., i, :, None].clone() * attn[..., :, :i].clone()
            ).sum(-2)
        attn = attn + torch.eye(C)
        u, w = attn @ v, attn @ k_beta
        S = k.new_zeros(B, H, K, V)
        o = torch.zeros_like(v)
        strict = torch.triu(torch.ones(C, C, dtype=torch.bool), diagonal=1)
        for i in range(N):
            q_i, k_i = q[:, :, i], k[:, :, i]
            score = (q_i @ k_i.transpose(-1, -2)).masked_fill_(strict, 0)
            u_i = u[:, :, i] - w[:, :, i] @ S
            o[:, :, i] = q_i @ S + score @ u_i
            S = S + k_i.transpose(-1, -2) @ u_i
        return o.reshape(B, H, T, V), S

    return forward, heads_first(4)


@layer("chunk", "delta", "head")
def chunk_gdn_explicit_inverse() -> Any:
    """torch.inverse of the unit lower triangle, T padded to a multiple of the chunk, an initial state."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        length = q.shape[2]
        pad = -length % C
        g, beta = -F.softplus(a), torch.sigmoid(b)
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
        outs = []
        for s in range(0, length + pad, C):
            qc, kc, vc = (x[:, :, s : s + C] for x in (q, k, v))
            gc, bc = g[:, :, s : s + C].cumsum(-1), beta[:, :, s : s + C, None]
            D = torch.exp((gc.unsqueeze(-1) - gc.unsqueeze(-2)).tril()).tril()
            M = torch.inverse(torch.eye(C) + (D * ((bc * kc) @ kc.transpose(-1, -2))).tril(-1))
            e = gc.exp().unsqueeze(-1)
            U = M @ (bc * (vc - e * (kc @ S)))
            outs.append(e * (qc @ S) + (D * (qc @ kc.transpose(-1, -2))) @ U)
            S = gc[..., -1:, None].exp() * S + (kc * (gc[..., -1:] - gc).exp().unsqueeze(-1)).transpose(-1, -2) @ U
        return torch.cat(outs, 2)[:, :, :length], S

    n = 10
    return forward, (
        rand(B, H, n, K), unit(B, H, n, K), rand(B, H, n, V), rand(B, H, n), rand(B, H, n), rand(B, H, K, V),
    )  # fmt: skip


@layer("chunk", "additive", "channel")
def chunk_gla_scaled_keys() -> Any:
    """GLA's chunk form: queries times exp(cumsum), keys over it, a state a chunk."""

    def forward(q: Tensor, k: Tensor, v: Tensor, gk: Tensor) -> tuple[Tensor, Tensor]:
        gk = F.logsigmoid(gk) / 16
        q, k, v, gk = (x.view(B, H, N, C, -1) for x in (q, k, v, gk))
        gk = gk.cumsum(-2)
        q = q * gk.exp() * K**-0.5
        kd = k * (-gk).exp()
        ke = k * (gk[..., -1:, :] - gk).exp()
        attn = (q @ kd.transpose(-1, -2)).masked_fill(torch.triu(torch.ones(C, C), 1).bool(), 0)
        o_intra = attn @ v
        S = torch.zeros(B, H, K, V)
        o_inter = []
        for i in range(N):
            o_inter.append(q[:, :, i] @ S)
            S = gk[:, :, i, -1].exp()[..., None] * S + ke[:, :, i].transpose(-1, -2) @ v[:, :, i]
        return (o_intra + torch.stack(o_inter, 2)).view(B, H, T, V), S

    return forward, (rand(B, H, T, K), rand(B, H, T, K), rand(B, H, T, V), rand(B, H, T, K))


@layer("chunk", "additive", "head")
def chunk_lightning_minimax() -> Any:
    """MiniMax's prefill: decay tables made from the slopes, kv carried over blocks, a short last block."""

    class Lightning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = 1 / (2 ** (8 / H))
            self.register_buffer("slope_rate", (base ** (torch.arange(H) + 1))[:, None, None])

        def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
            r = torch.arange(C) + 1
            q_decay = torch.exp(-self.slope_rate * r[:, None])
            k_decay = torch.exp(-self.slope_rate * (C - r[:, None]))
            diff = r[:, None] - r[None, :]
            s_index = self.slope_rate * diff[None]
            diagonal = torch.exp(torch.where(diff[None] >= 0, -s_index, float("-inf")))
            outs = []
            n = q.shape[2]
            for start in range(0, n, C):
                end = min(start + C, n)
                m = end - start
                qi, ki, vi = (x[:, :, start:end] for x in (q, k, v))
                inter = torch.matmul(qi * q_decay[:, :m], kv)
                intra = torch.matmul(torch.matmul(qi, ki.transpose(-1, -2)) * diagonal[:, :m, :m], vi)
                outs.append(inter + intra)
                block = torch.exp(-self.slope_rate * m)
                kv = kv * block + torch.matmul((ki * k_decay[:, -m:]).transpose(-1, -2), vi)
            return torch.cat(outs, 2), kv

    return Lightning(), (rand(B, H, 10, K), rand(B, H, 10, K), rand(B, H, 10, V), rand(B, H, K, V))


@layer("chunk", "delta", "channel")
def chunk_kda_exact_pairs() -> Any:
    """KDA in chunks with the decay of every pair of tokens inside the dot product, inverse by substitution."""

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = -F.softplus(g), b.sigmoid()
        q, k, v, g = (x.unflatten(2, (N, C)) for x in (q, k, v, g))
        beta, g = beta.unflatten(2, (N, C)), g.cumsum(-2)
        lower = torch.ones(C, C).tril().bool()
        pair = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(~lower[..., None], float("-inf")).exp()
        Aqk = torch.einsum("bhnid,bhnjd,bhnijd->bhnij", q, k, pair)
        Akk = torch.einsum("bhnid,bhnjd,bhnijd->bhnij", k * beta[..., None], k, pair).tril(-1)
        Tm = torch.linalg.solve_triangular(Akk + torch.eye(C), torch.eye(C).expand_as(Akk), upper=False)
        w = Tm @ (beta[..., None] * k * g.exp())
        u = Tm @ (beta[..., None] * v)
        S = torch.zeros(B, H, K, V)
        o = torch.zeros(B, H, N, C, V)
        for i in range(N):
            r = u[:, :, i] - w[:, :, i] @ S
            o[:, :, i] = (q[:, :, i] * g[:, :, i].exp()) @ S + Aqk[:, :, i] @ r
            tail = (g[:, :, i, -1:] - g[:, :, i]).exp() * k[:, :, i]
            S = S * g[:, :, i, -1].exp()[..., None] + tail.transpose(-1, -2) @ r
        return o.flatten(2, 3), S

    return forward, (rand(B, H, T, K), unit(B, H, T, K), rand(B, H, T, V), rand(B, H, T, K), rand(B, H, T))


@layer("chunk", "additive", "head")
def chunk_mlstm_no_normaliser() -> Any:
    """mLSTM's parallel form with log-sigmoid forget gates and sigmoid input gates, the stabiliser left away."""

    def forward(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        n = q.shape[-2]
        log_f = F.logsigmoid(f)
        cum = torch.cat([torch.zeros(B, H, 1), torch.cumsum(log_f, dim=-1)], dim=-1)
        matrix = cum[..., 1:, None] - cum[..., None, 1:]
        ltr = torch.tril(torch.ones((n, n), dtype=torch.bool))
        D = torch.where(ltr, matrix + F.logsigmoid(i)[..., None, :], -float("inf")).exp()
        return ((q @ (k * K**-0.5).transpose(-2, -1)) * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8), rand(B, H, 8))


@layer("chunk", "additive", "none")
def chunk_cumsum_of_states() -> Any:
    """lucidrains' causal linear attention in buckets: exclusive cumsum of k^T v over buckets, no loop."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.softmax(q, dim=-1), torch.exp(k)
        bq, bk, bv = (t.reshape(B, H, N, C, -1) for t in (q, k, v))
        context = torch.einsum("bhund,bhune->bhude", bk, bv)
        cumulative = context.cumsum(dim=2)
        before = F.pad(cumulative, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        inter = torch.einsum("bhund,bhude->bhune", bq, before)
        mask = torch.ones(C, C, dtype=torch.bool).tril()
        intra = torch.einsum("bhuij,bhuje->bhuie", (bq @ bk.mT).masked_fill(~mask, 0.0), bv)
        return (inter + intra).reshape(B, H, T, V)

    return forward, (rand(B, H, T, K), rand(B, H, T, K), rand(B, H, T, V))


@layer("chunk", "delta", "head")
def chunk_gdn_tokens_first_module() -> Any:
    """A layer around a [B, T, H, .] chunk form with the inverse by doubling (I + A)(I + A^2)(I + A^4)..."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = 9
            self.q, self.k, self.v = nn.Linear(d, H * K), nn.Linear(d, H * K), nn.Linear(d, H * V)
            self.a, self.b = nn.Linear(d, H), nn.Linear(d, H)
            self.o = nn.Linear(H * V, d)

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q = F.normalize(self.q(x).view(b, n // C, C, H, K), dim=-1)
            k = F.normalize(self.k(x).view(b, n // C, C, H, K), dim=-1)
            v = self.v(x).view(b, n // C, C, H, V)
            g = F.logsigmoid(self.a(x)).view(b, n // C, C, H).cumsum(2)
            beta = torch.sigmoid(self.b(x)).view(b, n // C, C, H, 1)
            D = (g.unsqueeze(3) - g.unsqueeze(2)).permute(0, 1, 4, 2, 3)
            tri = torch.tril(torch.ones(C, C))
            D = torch.exp(D * tri) * tri
            A = -torch.einsum("bnihk,bnjhk->bnhij", k * beta, k) * D * torch.tril(torch.ones(C, C), -1)
            inverse, power = torch.eye(C) + A, A
            for _ in range(1):
                power = power @ power
                inverse = inverse + inverse @ power
            S = x.new_zeros(b, H, K, V)
            outs = []
            for c in range(n // C):
                eg = g[:, c].exp().unsqueeze(-1)
                rhs = beta[:, c] * (v[:, c] - torch.einsum("bihk,bhkv->bihv", k[:, c] * eg, S))
                u = torch.einsum("bhij,bjhv->bihv", inverse[:, c], rhs)
                qk = torch.einsum("bihk,bjhk->bhij", q[:, c], k[:, c]) * D[:, c]
                outs.append(torch.einsum("bihk,bhkv->bihv", q[:, c] * eg, S) + torch.einsum("bhij,bjhv->bihv", qk, u))
                tail = (g[:, c, -1:] - g[:, c]).exp().unsqueeze(-1)
                S = S * g[:, c, -1].exp()[..., None, None] + torch.einsum("bjhk,bjhv->bhkv", k[:, c] * tail, u)
            return self.o(torch.cat(outs, 1).flatten(2))

    return Layer(), (rand(B, 8, 9),)


@layer("chunk", "additive", "head")
def chunk_simple_gla_head_bmm() -> Any:
    """Mamba-2-like per-head decays, heads folded for bmm, the inter-chunk part carried with lerp-free plain ops."""

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.sigmoid(g + 2)
        q, k, v = (x.transpose(1, 2).reshape(B * H, T, -1) for x in (q, k, v))
        lam = decay.transpose(1, 2).reshape(B * H, T)
        S = S.reshape(B * H, K, V)
        os = []
        for chunk in range(N):
            sl = slice(chunk * C, (chunk + 1) * C)
            lc = torch.cumprod(lam[:, sl], dim=-1)
            ratio = torch.tril(lc[:, :, None] / lc[:, None, :])
            local = torch.bmm(torch.bmm(q[:, sl], k[:, sl].transpose(1, 2)) * ratio, v[:, sl])
            carried = torch.bmm(q[:, sl] * lc[..., None], S)
            os.append(local + carried)
            S = lc[:, -1, None, None] * S + torch.bmm(
                (k[:, sl] * (lc[:, -1:] / lc)[..., None]).transpose(1, 2), v[:, sl]
            )
        return torch.cat(os, 1).reshape(B, H, T, V).transpose(1, 2), S.reshape(B, H, K, V)

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, T, H), rand(B, H, K, V))


@layer("chunk", "additive", "head")
def chunk_clamped_differences() -> Any:
    """exp((g_i - g_j).clamp(max=0)) * tril: the usual guard against overflow above the diagonal."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        g = -F.softplus(a)
        S, outs, C = torch.zeros(B, H, K, V), [], 4
        for qc, kc, vc, gc in zip(*(x.split(C, dim=2) for x in (q, k, v, g)), strict=True):
            cum = gc.cumsum(-1)
            D = torch.exp((cum[..., :, None] - cum[..., None, :]).clamp(max=0)) * torch.ones(C, C).tril()
            outs.append((qc @ kc.mT * D) @ vc + cum.exp()[..., None] * (qc @ S))
            S = cum[..., -1, None, None].exp() * S + (kc * (cum[..., -1:] - cum).exp()[..., None]).mT @ vc
        return torch.cat(outs, 2), S

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8))


@layer("chunk", "additive", "channel")
def chunk_gla_subblocks() -> Any:
    """GLA with secondary chunks: decays relative to a sub-block's first token, pairs of sub-blocks in a loop."""

    def forward(q: Tensor, k: Tensor, v: Tensor, gk: Tensor) -> Tensor:
        C, sub = 8, 4
        q, k, v, g = (x.unflatten(1, (-1, C)).transpose(2, 3) for x in (q, k, v, F.logsigmoid(gk) / 8))
        g = g.cumsum(-2)
        A = q.new_zeros(*q.shape[:-1], C)
        for i in range(0, C, sub):
            qi, gi = q[..., i : i + sub, :], g[..., i : i + sub, :]
            for j in range(0, i, sub):
                ref = g[..., i : i + 1, :]
                A[..., i : i + sub, j : j + sub] = (qi * (gi - ref).exp()) @ (
                    k[..., j : j + sub, :] * (ref - g[..., j : j + sub, :]).exp()
                ).mT
            local = ((gi[..., :, None, :] - gi[..., None, :, :]).clamp(max=0.0).exp() * qi[..., :, None, :]) * k[
                ..., i : i + sub, :
            ][..., None, :, :]
            A[..., i : i + sub, i : i + sub] = local.sum(-1).tril()
        o = A @ v
        S = q.new_zeros(B, H, K, V)
        inter = []
        for n in range(q.shape[1]):
            inter.append((q[:, n] * g[:, n].exp()) @ S)
            S = g[:, n, :, -1].exp()[..., None] * S + (k[:, n] * (g[:, n, :, -1:] - g[:, n]).exp()).mT @ v[:, n]
        return (o + torch.stack(inter, 1)).transpose(2, 3).flatten(1, 2)

    return forward, (rand(B, 16, H, K), rand(B, 16, H, K), rand(B, 16, H, V), rand(B, 16, H, K))


@layer("chunk", "additive", "none")
def chunk_grouped_queries() -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        mask = torch.arange(n)[:, None] >= torch.arange(n)[None, :]
        return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k) * mask, v)

    return forward, (rand(B, 2 * H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))
