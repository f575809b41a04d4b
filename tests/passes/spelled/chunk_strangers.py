"""More chunk-parallel spellings, in the manner of published listings: written before the matcher was tried on any.

All take (q, k, v, g, beta, S) as the corpus does and return (o, S), or o alone where that is how such code is written.
Each is registered with its rule, its decay and the token counts it is for. Chunks that do not divide them are padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Stranger = tuple[Callable[..., Any], str, str, tuple[int, ...]]
STRANGERS: dict[str, Stranger] = {}


def stranger(rule: str, decay: str, *tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        STRANGERS[fn.__name__] = (fn, rule, decay, tokens)
        return fn

    return register


def _before(n: int, *, itself: bool) -> Tensor:
    """Whether column j is at or before row i."""
    i = torch.arange(n)
    return i[:, None] >= i[None, :] if itself else i[:, None] > i[None, :]


@stranger("delta", "head", 64, 72)
def gdn_upper_solve(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Tokens along the last axis, so that the system is upper triangular and solved from the right; state [V, K]."""
    T, n = q.shape[1], 32
    pad = -T % n
    scale = 1 / math.sqrt(q.shape[-1])
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).permute(0, 2, 3, 1) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, pad)).permute(0, 2, 1) for x in (g, beta))
    S, out = S.transpose(-1, -2), []
    for at in range(0, T + pad, n):
        qc, kc, vc = (x[..., at : at + n] for x in (q, k, v))
        gc, bc = g[..., at : at + n].cumsum(-1), beta[..., at : at + n]
        decay = torch.where(_before(n, itself=True).T, gc[..., None, :] - gc[..., :, None], -torch.inf).exp()
        kk = (kc.mT @ kc) * decay * bc[..., None, :]
        upper = torch.where(_before(n, itself=False).T, kk, 0.0)
        rhs = (vc - S @ (kc * gc.exp()[..., None, :])) * bc[..., None, :]
        u = torch.linalg.solve_triangular(upper, rhs, upper=True, left=False, unitriangular=True)
        out.append(scale * (S @ (qc * gc.exp()[..., None, :]) + u @ (kc.mT @ qc * decay)))
        end = gc[..., -1:]
        S = S * end[..., None].exp() + u @ (kc * (end - gc).exp()[..., None, :]).mT
    return torch.cat(out, -1)[..., :T].permute(0, 3, 1, 2), S.transpose(-1, -2)


@stranger("delta", "head", 32, 64)
def gdn_neumann_factors(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """(I - A)(I + A²)(I + A⁴)(I + A⁸) for the inverse, applied to values and keys at once."""
    (B, T, H, K), V, n = q.shape, v.shape[-1], 16
    q, k, v = (x.view(B, T // n, n, H, -1).transpose(2, 3) for x in (q, k, v))
    G = g.view(B, T // n, n, H).transpose(2, 3).cumsum(-1)
    b = beta.view(B, T // n, n, H).transpose(2, 3)
    L = (G.unsqueeze(-1) - G.unsqueeze(-2)).tril().exp().tril()
    A = torch.tril(b.unsqueeze(-1) * torch.einsum("nchik,nchjk->nchij", k, k) * L, -1)
    eye = torch.eye(n, dtype=q.dtype)
    inverse, power = eye - A, A
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (eye + power)
    both = torch.cat([v * b.unsqueeze(-1), k * (b * G.exp()).unsqueeze(-1)], -1)
    U, W = (inverse @ both).split([V, K], -1)
    o = q.new_empty(B, T // n, H, n, V)
    for c in range(T // n):
        fresh = U[:, c] - W[:, c] @ S
        o[:, c] = (q[:, c] * G[:, c].exp().unsqueeze(-1)) @ S + (q[:, c] @ k[:, c].mT * L[:, c]) @ fresh
        rest = (G[:, c, :, -1:] - G[:, c]).exp().unsqueeze(-1)
        S = S * G[:, c, :, -1, None, None].exp() + torch.einsum("bhik,bhiv->bhkv", k[:, c] * rest, fresh)
    return o.transpose(2, 3).reshape(B, T, H, V) * K**-0.5, S


@stranger("delta", "none", 40, 64)
def deltanet_arange_masks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """A general solve, masks from comparisons of positions, tokens padded to chunks of 16."""
    (_B, T, _H, K), n = q.shape, 16
    C = math.ceil(T / n)

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.flatten(3) if x.dim() > 3 else x[..., None], (0, 0, 0, 0, 0, C * n - T))
        return x.unflatten(1, (C, n)).permute(1, 0, 3, 2, 4)

    q, k, v, b = map(chunks, (q / K**0.5, k, v, beta))
    strict, causal = _before(n, itself=False), _before(n, itself=True)
    system = torch.where(strict, (b * k) @ k.transpose(-2, -1), torch.zeros(())) + torch.eye(n)
    scores = torch.where(causal, q @ k.transpose(-2, -1), torch.zeros(()))
    out = []
    for c in range(C):
        u = torch.linalg.solve(system[c], b[c] * (v[c] - k[c] @ S))
        out.append(q[c] @ S + scores[c] @ u)
        S = S + k[c].transpose(-2, -1) @ u
    return torch.stack(out).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T], S


@stranger("delta", "channel", 32, 64)
def kda_inverse(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """A decay a channel: products over exp(G_i - G_j) written out, `torch.inverse`, diagonal put in by eye."""
    _B, T, _H, K = q.shape
    n, out = 16, []
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    for x in range(0, T, n):
        qc, kc, vc, gc, bc = (y[:, x : x + n].movedim(2, 1) for y in (q, k, v, g, beta))
        G = torch.cumsum(gc, dim=2)
        D = torch.exp((G[:, :, :, None] - G[:, :, None]).masked_fill(~mask[..., None], float("-inf")))
        qk = torch.einsum("bhid,bhjd,bhijd->bhij", qc, kc, D)
        kk = torch.einsum("bhid,bhjd,bhijd->bhij", kc, kc, D).masked_fill(torch.eye(n, dtype=torch.bool), 0)
        M = torch.inverse(torch.eye(n) + bc[..., None] * kk) * bc[:, :, None]
        u = M @ (vc - (kc * G.exp()) @ S)
        out.append(K**-0.5 * (torch.einsum("bhid,bhdv->bhiv", qc * G.exp(), S) + qk @ u))
        S = S * G[:, :, -1, :, None].exp() + ((G[:, :, -1:] - G).exp() * kc).transpose(2, 3) @ u
    return torch.cat(out, 2).movedim(1, 2), S


@stranger("delta", "none", 24)
def deltanet_parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """All tokens in one block, from no state: attention weights times a matrix that is inverted."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    b = beta.permute(0, 2, 1)
    attention = (q @ k.transpose(-1, -2)).tril()
    T = torch.linalg.inv(torch.eye(q.shape[2]) + (torch.diag_embed(b) @ (k @ k.transpose(-1, -2))).tril(-1))
    o = attention @ T @ torch.diag_embed(b) @ v
    return o.permute(0, 2, 1, 3)


@stranger("delta", "head", 64)
def gdn_bf16_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """What comes in low precision is widened, and so is the state kept; the output is cast back."""
    dtype, (B, T, H, _), n = q.dtype, q.shape, 64
    q, k, v, g, beta, S = (x.float() for x in (q, k, v, g, beta, S))
    q, k, v = (x.reshape(B, T // n, n, H, -1).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (x.reshape(B, T // n, n, H).permute(0, 3, 1, 2) for x in (g, beta))
    G = g.cumsum(-1)
    gamma = torch.exp(G)
    D = (G[..., :, None] - G[..., None, :]).exp().tril()
    eye = torch.eye(n).expand(B, H, T // n, n, n)
    A = eye + torch.tril(torch.einsum("...ik,...jk->...ij", beta[..., None] * k, k) * D, diagonal=-1)
    M = torch.linalg.solve_triangular(A, eye, upper=False)
    w, u = M @ ((beta * gamma)[..., None] * k), M @ (beta[..., None] * v)
    o = []
    for c in range(T // n):
        d = u[:, :, c] - w[:, :, c] @ S
        inside = (q[:, :, c] @ k[:, :, c].mT * D[:, :, c]) @ d
        o.append(gamma[:, :, c, :, None] * (q[:, :, c] @ S) + inside)
        tail = gamma[:, :, c, -1:, None] / gamma[:, :, c, :, None]
        S = gamma[:, :, c, -1, None, None] * S + (tail * k[:, :, c]).mT @ d
    return torch.stack(o, 2).permute(0, 2, 3, 1, 4).reshape(B, T, H, -1).to(dtype), S


@stranger("delta", "head", 48)
def gdn_transitions(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Each chunk as one affine map of the state; states first, outputs of all chunks after."""
    (B, T, H, K), n = q.shape, 16
    q, k, v = (x.reshape(B, T // n, n, H, -1).permute(1, 0, 3, 2, 4) for x in (q, k, v))
    g, beta = (x.reshape(B, T // n, n, H).permute(1, 0, 3, 2)[..., None] for x in (g, beta))
    G = g.cumsum(-2)
    D = torch.exp(torch.where(_before(n, itself=True), G - G.mT, -torch.inf))
    M = torch.linalg.solve_triangular(
        torch.eye(n) + torch.tril(beta * (k @ k.mT) * D, -1), torch.eye(n) * beta.mT, upper=False, unitriangular=True
    )
    U, W = M @ v, M @ (k * G.exp())
    tail = k * (G[..., -1:, :] - G).exp()
    transition = torch.eye(K) * G[..., -1:, :].exp() - tail.mT @ W
    added = tail.mT @ U
    states = [S]
    for c in range(T // n):
        states.append(transition[c] @ states[-1] + added[c])
    before = torch.stack(states[:-1])
    o = (q * G.exp()) @ before + (q @ k.mT * D) @ (U - W @ before)
    return o.permute(1, 0, 3, 2, 4).reshape(B, T, H, -1), states[-1]


@stranger("additive", "channel", 32, 64)
def gla_subblocks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Blocks of 4 in chunks of 16: decays count from a block's start between blocks, and are exact within one."""
    _B, T, _H, K = q.shape
    n, m, out = 16, 4, []
    q = q * K**-0.5
    for at in range(0, T, n):
        qc, kc, vc, gc = (x[:, at : at + n].transpose(1, 2) for x in (q, k, v, g))
        G = gc.cumsum(2)
        oc = (qc * G.exp()) @ S
        blocks = []
        for i in range(0, n, m):
            qi, Gi = qc[:, :, i : i + m], G[:, :, i : i + m]
            D = (Gi[:, :, :, None] - Gi[:, :, None]).exp()
            weights = (qi[:, :, :, None] * kc[:, :, None, i : i + m] * D).sum(-1).tril()
            block = weights @ vc[:, :, i : i + m]
            if i:
                start = G[:, :, i - 1 : i]
                cross = (qi * (Gi - start).exp()) @ (kc[:, :, :i] * (start - G[:, :, :i]).exp()).mT
                block = block + cross @ vc[:, :, :i]
            blocks.append(block)
        out.append(oc + torch.cat(blocks, 2))
        S = S * G[:, :, -1, :, None].exp() + (kc * (G[:, :, -1:] - G).exp()).mT @ vc
    return torch.cat(out, 2).transpose(1, 2), S


@stranger("additive", "channel", 40, 64)
def gla_split(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """q exp(G) and k exp(-G) for all chunks at once, heads in the batch, padded; only the states are a loop."""
    (B, T, H, K), V, n = q.shape, v.shape[-1], 16
    pad = (n - T % n) % n

    def fold(x: Tensor) -> Tensor:
        return F.pad(x.transpose(1, 2).reshape(B * H, T, -1), (0, 0, 0, pad)).reshape(B * H, (T + pad) // n, n, -1)

    q, k, v, g = map(fold, (q, k, v, g))
    G = g.cumsum(-2)
    qs, ks = q * G.exp(), k * (-G).exp()
    last = G[:, :, -1]
    kv = (k * (last[:, :, None] - G).exp()).transpose(-1, -2) @ v
    state, states = S.reshape(B * H, K, V), []
    for c in range(kv.shape[1]):
        states.append(state)
        state = state * last[:, c].exp().unsqueeze(-1) + kv[:, c]
    o = torch.tril(qs @ ks.transpose(-1, -2)) @ v + qs @ torch.stack(states, 1)
    return o.reshape(B, H, T + pad, V)[:, :, :T].transpose(1, 2) * K**-0.5, state.reshape(B, H, K, V)


@stranger("additive", "head", 48, 64)
def scalar_decay_cumsum_of_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """The states of all chunks by one cumulative sum, rescaled by the decay so far."""
    (B, T, H, _K), n = q.shape, 16
    q, k, v = (x.reshape(B, T // n, n, H, -1).transpose(2, 3) for x in (q, k, v))
    g = g.reshape(B, T // n, n, H).transpose(2, 3)
    G = g.cumsum(-1)
    whole = G[..., -1].cumsum(1)
    kv = torch.einsum("bchik,bchi,bchiv->bchkv", k, torch.exp(G[..., -1:] - G), v)
    carried = (kv * torch.exp(-whole)[..., None, None]).cumsum(1) + S[:, None]
    states = carried * torch.exp(whole)[..., None, None]
    before = torch.cat([S[:, None], states[:, :-1]], 1)
    D = torch.exp(G[..., None] - G[..., None, :]).masked_fill(~_before(n, itself=True), 0)
    o = (q @ k.mT * D) @ v + torch.exp(G)[..., None] * (q @ before)
    return o.transpose(2, 3).reshape(B, T, H, -1), states[:, -1]


@stranger("additive", "head", 16, 64)
def retnet_chunkwise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Decay a head from its logarithm: a mask, decays inside a chunk and across, all exp of positions times log."""
    _B, T, H, K = q.shape
    n, out = 16, []
    log_gamma = torch.log(1 - 2 ** (-5 - torch.arange(H, dtype=torch.float)))
    i = torch.arange(n, dtype=torch.float)
    apart = i[:, None] - i[None, :]
    mask = torch.exp(apart.masked_fill(apart < 0, float("inf")) * log_gamma[:, None, None])
    mask = torch.nan_to_num(mask)
    inner = torch.exp(log_gamma[:, None] * (i + 1))[..., None]
    value_decay = mask[:, -1, :, None]
    cross = torch.exp(log_gamma * n)[:, None, None]
    for c in range(T // n):
        qc, kc, vc = (x[:, c * n : (c + 1) * n].transpose(1, 2) for x in (q, k, v))
        out.append((qc @ kc.transpose(-1, -2) * mask) @ vc + (qc * inner) @ S)
        S = S * cross + kc.transpose(-1, -2) @ (vc * value_decay)
    return torch.cat(out, 2).transpose(1, 2) * K**-0.5, S


@stranger("additive", "head", 16)
def retention_from_nothing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """One block from no state, one decay for all heads, its powers filled in one by one; the state is returned."""
    T, gamma = q.shape[1], 0.9
    i = torch.arange(T).unsqueeze(1)
    j = torch.arange(T).unsqueeze(0)
    D = (gamma ** (i - j)) * (i >= j).float()
    D[D != D] = 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    state = k.transpose(-1, -2) @ (v * D[-1].view(1, 1, T, 1))
    return ((q @ k.transpose(-1, -2)) * D @ v).transpose(1, 2), state


@stranger("additive", "head", 48, 70)
def lightning_blocks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """A loop over blocks with a slope a head, as lightning attention's reference has it; the last block is shorter."""
    B, T, H, K = q.shape
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    slope = 2 ** (-8 / H * torch.arange(1, H + 1)).view(H, 1, 1)
    size = 32
    at = torch.arange(size) + 1
    q_decay = torch.exp(-slope * at.reshape(-1, 1))
    k_decay = torch.exp(-slope * (size - at.reshape(-1, 1)))
    index = at[:, None] - at[None, :]
    s_index = slope * index[None]
    s_index = torch.where(index >= 0, -s_index, float("-inf"))
    diagonal = torch.exp(s_index)
    kv = torch.zeros(B, H, K, v.shape[-1])
    output = torch.empty_like(v)
    for c in range((T + size - 1) // size):
        si, ei = c * size, min(c * size + size, T)
        m = ei - si
        qi, ki, vi = q[:, :, si:ei], k[:, :, si:ei], v[:, :, si:ei]
        inter = torch.matmul(qi * q_decay[:, :m], kv)
        intra = torch.matmul(torch.matmul(qi, ki.transpose(-1, -2)) * diagonal[:, :m, :m], vi)
        output[:, :, si:ei] = inter + intra
        kv = torch.exp(-slope * m) * kv + torch.matmul((ki * k_decay[:, -m:]).transpose(-1, -2), vi)
    return output.transpose(1, 2), kv


@stranger("additive", "head", 40, 64)
def ssd_continued(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Mamba-2 as transformers has it, without einsum: broadcast products and sums, a padded end, a state in and out."""
    (B, T, H, _K), n = q.shape, 16
    pad = (n - T % n) % n
    x, b, c, a = (F.pad(y, (0, 0) * (y.dim() - 2) + (0, pad)) for y in (v, k, q, g))
    x, b, c, a = (y.reshape(B, -1, n, *y.shape[2:]) for y in (x, b, c, a))
    a = a.permute(0, 3, 1, 2)
    total = a.cumsum(-1)

    def segments(y: Tensor) -> Tensor:
        m = y.shape[-1]
        y = y[..., None].expand(*y.shape, m).masked_fill(~torch.ones(m, m, dtype=torch.bool).tril(-1), 0)
        return y.cumsum(-2).masked_fill(~torch.ones(m, m, dtype=torch.bool).tril(), -torch.inf)

    L = segments(a).exp()
    weights = (c[:, :, :, None] * b[:, :, None]).sum(-1)[..., None] * L.permute(0, 2, 3, 4, 1)[..., None]
    inside = (weights[..., 0][..., None] * x[:, :, None]).sum(3)
    left = torch.exp(total[..., -1:] - total)
    states = ((b * left.permute(0, 2, 3, 1)[..., None])[..., None, :] * x[..., None]).sum(2)
    states = torch.cat([S.transpose(2, 3)[:, None], states], 1)
    chunk_decay = segments(F.pad(total[..., -1], (1, 0))).exp().transpose(1, 3)
    new = (chunk_decay[..., None, None] * states[:, :, None]).sum(1)
    before, last = new[:, :-1], new[:, -1]
    off = (c[..., None, :] * before[:, :, None]).sum(-1) * total.exp().permute(0, 2, 3, 1)[..., None]
    return (inside + off).reshape(B, -1, H, x.shape[-1])[:, :T], last.transpose(2, 3)
