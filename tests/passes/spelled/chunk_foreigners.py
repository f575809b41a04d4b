"""A second lot of chunk-parallel spellings by strangers, as modules where their decays stand in buffers.

Registered as in `chunk_strangers`, and written before the matcher was tried on any of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.chunk_strangers import Stranger, _before

FOREIGNERS: dict[str, Stranger] = {}


def foreigner(rule: str, decay: str, *tokens: int) -> Any:
    def register(fn: Any) -> Any:
        made = fn() if isinstance(fn, type) else fn
        FOREIGNERS[getattr(fn, "__name__", "")] = (made, rule, decay, tokens)
        return fn

    return register


@foreigner("additive", "head", 48, 40)
def ssd_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Mamba-2's reference in three functions: states of chunks, how they are passed on, what is read of them."""
    (_B, T, _H, K), V, n = q.shape, v.shape[-1], 16
    short = -T % n
    x, b, c = (F.pad(y, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, n)) for y in (v, k, q))
    dt = F.pad(beta, (0, 0, 0, short)).unflatten(1, (-1, n)).permute(0, 3, 1, 2)
    total = F.pad(g, (0, 0, 0, short)).unflatten(1, (-1, n)).permute(0, 3, 1, 2).cumsum(-1)

    decay_states = torch.exp(total[..., -1:] - total)
    states = torch.einsum("bclhn,bhcl,bhcl,bclhp->bchpn", b, decay_states, dt, x).flatten(-2)

    states = torch.cat([S.mT.flatten(-2)[:, None], states], dim=1)
    chunks = F.pad(total[..., -1], (1, 0)).cumsum(-1)
    m = chunks.shape[-1]
    decay = torch.exp(chunks[:, :, :, None] - chunks[:, :, None, :])
    decay = decay.masked_fill(~torch.tril(torch.ones(m, m, dtype=torch.bool)), 0)
    passed = torch.einsum("bhzc,bchd->bzhd", decay, states)
    before, last = passed[:, :-1].unflatten(-1, (V, K)), passed[:, -1].unflatten(-1, (V, K))

    scores = torch.einsum("bclhn,bcshn->bchls", c, b)
    segment = total[..., :, None] - total[..., None, :]
    scores = scores * torch.exp(segment).transpose(1, 2)
    scores = scores.masked_fill(~torch.tril(torch.ones(n, n, dtype=torch.bool)), 0)
    out = torch.einsum("bchls,bhcs,bcshp->bclhp", scores, dt, x)
    read = torch.exp(total.permute(0, 2, 3, 1))[..., None]
    out = out + torch.einsum("bclhn,bchpn->bclhp", c, before) * read
    return out.flatten(1, 2)[:, :T], last.mT


@foreigner("delta", "head", 32)
def gdn_rows_in_a_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Forward substitution written out, a list of rows stacked."""
    _B, _T, _H, K = q.shape
    n, outs = 8, []
    for qc, kc, vc, gc, bc in zip(*(x.split(n, dim=1) for x in (q, k, v, g, beta)), strict=True):
        qc, kc, vc = (x.transpose(1, 2) for x in (qc, kc, vc))
        G, bc = gc.transpose(1, 2).cumsum(-1), bc.transpose(1, 2)
        ratio = torch.exp(G[..., None] - G[..., None, :])
        A = bc[..., None] * (kc @ kc.transpose(-1, -2)) * ratio
        rhs = bc[..., None] * (vc - torch.exp(G)[..., None] * (kc @ S))
        rows = [rhs[:, :, 0]]
        for i in range(1, n):
            above = torch.stack(rows, dim=2)
            rows.append(rhs[:, :, i] - torch.einsum("bhj,bhjv->bhv", A[:, :, i, :i], above))
        u = torch.stack(rows, dim=2)
        weights = torch.where(_before(n, itself=True), (qc @ kc.transpose(-1, -2)) * ratio, 0.0)
        outs.append((torch.exp(G)[..., None] * (qc @ S) + weights @ u) / K**0.5)
        S = torch.exp(G[..., -1])[..., None, None] * S + (kc * torch.exp(G[..., -1:] - G)[..., None]).mT @ u
    return torch.cat(outs, dim=2).transpose(1, 2), S


@foreigner("delta", "none", 48)
def deltanet_beta_on_the_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """The UT transform as (diag(1 / beta) + tril(K Kᵀ))⁻¹, state [V, K]."""
    n, S, outs = 16, S.mT, []
    for at in range(0, q.shape[1], n):
        qc, kc, vc = (x[:, at : at + n].transpose(1, 2) for x in (q, k, v))
        inverse_beta = torch.diag_embed(1 / beta[:, at : at + n].transpose(1, 2))
        T = torch.linalg.inv(inverse_beta + torch.tril(kc @ kc.mT, -1))
        u = T @ (vc - kc @ S.mT)
        outs.append(qc @ S.mT + torch.tril(qc @ kc.mT) @ u)
        S = S + u.mT @ kc
    return torch.cat(outs, 2).transpose(1, 2), S.mT


@foreigner("delta", "channel", 32, 40)
def kda_split(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Keys scaled by exp(G) and exp(-G); padded; everything of a chunk before the loop."""
    (B, T, H, K), V, n = q.shape, v.shape[-1], 16
    short = -T % n

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.transpose(1, 2), (0, 0, 0, short))
        return x.reshape(B, H, -1, n, x.shape[-1])

    q, k, v, g, b = map(chunks, (q * K**-0.5, k, v, g, beta[..., None]))
    G = g.cumsum(3)
    up, down = G.exp(), (-G).exp()
    A = torch.tril((k * up * b) @ (k * down).mT, -1)
    M = torch.linalg.solve_triangular(torch.eye(n) + A, torch.cat([v * b, k * up * b], -1), upper=False)
    u, w = M[..., :V], M[..., V:]
    scores = torch.tril((q * up) @ (k * down).mT)
    o = torch.zeros_like(v)
    for c in range(q.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ S
        o[:, :, c] = (q * up)[:, :, c] @ S + scores[:, :, c] @ new
        last = G[:, :, c, -1]
        S = last.exp().unsqueeze(-1) * S + ((last.unsqueeze(2) - G[:, :, c]).exp() * k[:, :, c]).mT @ new
    return o.reshape(B, H, -1, V)[:, :, :T].transpose(1, 2), S


@foreigner("additive", "head", 24, 40)
class SlopesInABuffer(nn.Module):
    """ALiBi's slopes in a buffer; decays are exp of positions times slope, made in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -(torch.arange(1, 4) * 8 / 3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        s, n, outs = self.slopes.view(-1, 1, 1), 16, []
        for qc, kc, vc in zip(*(x.split(n, dim=2) for x in (q, k, v)), strict=True):
            m = qc.shape[2]
            at = torch.arange(m).view(-1, 1)
            weights = qc @ kc.mT * torch.exp(-s * (at - at.T).clamp(min=0)).tril()
            outs.append(weights @ vc + (qc * torch.exp(-s * (at + 1))) @ S)
            S = torch.exp(-s * m) * S + (kc * torch.exp(-s * (m - 1 - at))).mT @ vc
        return torch.cat(outs, 2).transpose(1, 2), S


@foreigner("additive", "head", 16, 48)
class RetentionTables(nn.Module):
    """A mask, decays inside a block and across blocks, all made at construction and kept as buffers, and no decay."""

    def __init__(self, block: int = 16, heads: int = 3) -> None:
        super().__init__()
        gamma = 1 - torch.exp(torch.linspace(-3.4657, -6.2383, heads))
        i = torch.arange(block)
        apart = i[:, None] - i[None, :]
        self.register_buffer("mask", torch.where(apart >= 0, gamma[:, None, None] ** apart.clamp(min=0), 0.0))
        self.register_buffer("inner", (gamma[:, None] ** (i + 1))[..., None])
        self.register_buffer("cross", (gamma**block)[:, None, None], persistent=False)
        self.block = block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        q, k, v = (x.permute(0, 2, 1, 3).unflatten(2, (-1, self.block)) for x in (q, k, v))
        outs = []
        for c in range(q.shape[2]):
            qc, kc, vc = q[:, :, c], k[:, :, c], v[:, :, c]
            outs.append((qc @ kc.mT * self.mask) @ vc + qc @ S * self.inner)
            S = S * self.cross + kc.mT @ (vc * self.mask[:, -1, :, None])
        return torch.cat(outs, 2).permute(0, 2, 1, 3), S


@foreigner("additive", "head", 32)
def simple_gla_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Decays as they are, multiplied up, and quotients of their products."""
    n, outs = 16, []
    for at in range(0, q.shape[1], n):
        qc, kc, vc = (x[:, at : at + n].movedim(1, 2) for x in (q, k, v))
        P = torch.cumprod(g[:, at : at + n].exp().movedim(1, 2), -1).unsqueeze(-1)
        outs.append(((qc * P) @ (kc / P).mT).tril() @ vc + (qc * P) @ S)
        S = P[:, :, -1:] * (S + (kc / P).mT @ vc)
    return torch.cat(outs, 2).movedim(2, 1), S


@foreigner("additive", "none", 40)
def linear_attention_uneven(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Tokens first, the last block shorter, the running sum added after the block."""
    outs = []
    for at in range(0, q.shape[1], 16):
        qc, kc, vc = (x[:, at : at + 16] for x in (q, k, v))
        weights = torch.einsum("bihk,bjhk->bhij", qc, kc)
        weights = weights * _before(qc.shape[1], itself=True).to(weights.dtype)
        outs.append(torch.einsum("bhij,bjhv->bihv", weights, vc) + torch.einsum("bihk,bhkv->bihv", qc, S))
        S = S + torch.einsum("bihk,bihv->bhkv", kc, vc)
    return torch.cat(outs, 1), S


@foreigner("additive", "channel", 32)
def hgrn2_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Keys are what the gate does not keep."""
    f = g.exp()
    q, f, v = (x.transpose(1, 2) for x in (q, f, v))
    k, g, n, outs = 1 - f, f.log(), 16, []
    for c in range(q.shape[2] // n):
        s = slice(c * n, (c + 1) * n)
        G = g[:, :, s].cumsum(2)
        weights = torch.einsum("bhid,bhjd->bhij", q[:, :, s] * G.exp(), k[:, :, s] * (-G).exp()).tril()
        outs.append(weights @ v[:, :, s] + (q[:, :, s] * G.exp()) @ S)
        S = G[:, :, -1, :, None].exp() * S + (k[:, :, s] * (G[:, :, -1:] - G).exp()).mT @ v[:, :, s]
    return torch.cat(outs, 2).transpose(1, 2), S
