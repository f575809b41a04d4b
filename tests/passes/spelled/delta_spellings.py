"""Ways to write the delta rule with no decay or one per head: DeltaNet and Gated DeltaNet."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.registry import Args, match

Pair = tuple[Tensor, Tensor]


@match("delta", "head")
def time_major_zip(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Tensors are turned to [T, B, H, ...] and walked through with zip."""
    q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta))
    alpha = g.exp()
    outs = []
    for qt, kt, vt, at, bt in zip(q, k, v, alpha, beta, strict=True):
        S = at[..., None, None] * S
        delta = bt[..., None] * (vt - torch.einsum("bhkv,bhk->bhv", S, kt))
        S = S + torch.einsum("bhv,bhk->bhkv", delta, kt)
        outs.append(torch.einsum("bhkv,bhk->bhv", S, qt))
    return torch.stack(outs).transpose(0, 1), S


@match("delta", "head", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def head_first_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """[B, H, T, D] in fp32, the query scaled for the whole sequence, outputs written into zeros."""
    q, k, v, beta, g = (x.transpose(1, 2).contiguous() for x in (q, k, v, beta, g))
    q = q * (1 / (q.shape[-1] ** 0.5))
    out = torch.zeros_like(v)
    for i in range(k.shape[2]):
        q_i, k_i, v_i = q[:, :, i], k[:, :, i], v[:, :, i]
        g_i = g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        S = S * g_i
        remembered = (S * k_i.unsqueeze(-1)).sum(dim=-2)
        u = (v_i - remembered) * beta[:, :, i].unsqueeze(-1)
        S = S + k_i.unsqueeze(-1) * u.unsqueeze(-2)
        out[:, :, i] = (S * q_i.unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous(), S


@match("delta", "head", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def clones_everywhere(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    scale = 1 / math.sqrt(q.shape[-1])
    h = torch.zeros_like(S) + S
    o = []
    for i in range(q.shape[1]):
        b_q, b_k, b_v = q[:, i] * scale, k[:, i], v[:, i].clone()
        h = h.clone() * g[:, i].exp()[..., None, None]
        b_v = b_v - (h.clone() * b_k[..., None]).sum(-2)
        b_v = b_v * beta[:, i][..., None]
        h = h.clone() + b_k.unsqueeze(-1) * b_v.unsqueeze(-2)
        o.append(torch.einsum("bhd,bhdm->bhm", b_q, h))
    return torch.stack(o, dim=1), h


@match("delta", "head")
def folded_einsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Batch and heads are one axis of [T, N, ...]."""
    batch, tokens, heads, _ = q.shape
    fold = lambda x: x.permute(1, 0, 2, 3).reshape(tokens, batch * heads, -1)  # noqa: E731
    q, k, v, g, beta = fold(q), fold(k), fold(v), fold(g[..., None]), fold(beta[..., None])
    S = S.flatten(0, 1)
    outs = []
    for t in range(tokens):
        S = S * g[t].exp().unsqueeze(1)
        u = beta[t] * (v[t] - torch.einsum("nk,nkv->nv", k[t], S))
        S = S + torch.einsum("nv,nk->nkv", u, k[t])
        outs.append(torch.einsum("nkv,nk->nv", S, q[t]))
    o = torch.stack(outs).reshape(tokens, batch, heads, -1).permute(1, 0, 2, 3)
    return o, S.unflatten(0, (batch, heads))


@match("delta", "head")
def addcmul_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = g[:, t].exp().view(*g[:, t].shape, 1, 1).mul(S)
        u = torch.addcmul(v[:, t], k[:, t].unsqueeze(2).matmul(S).squeeze(2), v.new_tensor(-1.0))
        S = torch.addcmul(S, k[:, t].unsqueeze(-1), (u * beta[:, t].unsqueeze(-1)).unsqueeze(-2))
        outs.append(q[:, t].unsqueeze(2).matmul(S).squeeze(2))
    return torch.stack(outs, 1), S


@match("delta", "head")
def interpolate_old_and_new(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """beta interpolates between what is remembered and what is to be remembered."""
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        new = torch.lerp(old, v[:, t], beta[:, t, :, None])
        S = S + k[:, t, :, :, None] * (new - old)[:, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "none")
def fast_weight_programmer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """W [B, H, V, K]: take the old value out, put a mixture in."""
    W = S.mT
    ys = []
    for t in range(q.shape[1]):
        kt, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        v_old = W @ kt
        v_new = b * v[:, t, :, :, None] + (1 - b) * v_old
        W = W - v_old @ kt.mT + v_new @ kt.mT
        ys.append((W @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(ys, 1), W.mT


@match("delta", "none")
def gradient_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Online gradient descent on |Wᵀk − v|² / 2 with learning rate beta."""
    W = S
    ys = []
    for t in range(q.shape[1]):
        residual = torch.einsum("bhkv,bhk->bhv", W, k[:, t]) - v[:, t]
        grad = torch.einsum("bhk,bhv->bhkv", k[:, t], residual)
        W = W - beta[:, t, :, None, None] * grad
        ys.append(torch.einsum("bhkv,bhk->bhv", W, q[:, t]))
    return torch.stack(ys, 1), W


@match("delta", "head")
def base_two_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    alpha = torch.exp2(g * math.log2(math.e))[..., None, None]
    outs = []
    for t in range(q.shape[1]):
        kt = k[:, t, :, None, :]
        S = alpha[:, t] * S
        S = S + kt.mT @ (beta[:, t, :, None, None] * (v[:, t, :, None, :] - kt @ S))
        outs.append(q[:, t, :, None, :] @ S)
    return torch.cat(outs, 2).transpose(1, 2), S


@match("delta", "head", means=lambda a: {"g": F.logsigmoid(a.g)})
def sigmoid_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """The decay is a probability of its own."""
    keep = torch.sigmoid(g)
    outs = []
    for t in range(q.shape[1]):
        S = torch.einsum("bh,bhkv->bhkv", keep[:, t], S)
        u = torch.einsum("bh,bhv->bhv", beta[:, t], v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "head")
def decay_from_cumulative_sums(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    total = g.cumsum(1)
    outs = []
    for t in range(q.shape[1]):
        step = total[:, t] - total[:, t - 1] if t else total[:, t]
        S = S * step.exp()[:, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


def _two_constants(a: Args) -> dict[str, Tensor]:
    return {"g": a.g.new_tensor([0.9, 0.97]).log().expand(a.g.shape)}


@match("delta", "head", means=_two_constants)
def constant_decays(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """One Python number per head."""
    keep = torch.tensor([0.9, 0.97], dtype=S.dtype)[:, None, None]
    outs = []
    for t in range(q.shape[1]):
        S = keep * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "head")
def keys_times_beta_for_all_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    kb = k * beta.unsqueeze(-1)
    outs = []
    for qt, kt, kbt, vt, gt in zip(q.unbind(1), k.unbind(1), kb.unbind(1), v.unbind(1), g.unbind(1), strict=True):
        S = S * gt.exp()[..., None, None]
        S = S + kbt.unsqueeze(-1) @ (vt.unsqueeze(-2) - kt.unsqueeze(-2) @ S)
        outs.append((qt.unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outs, 1), S


@match("delta", "head")
def keys_and_values_times_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """As in chunk code: beta is in v and in the erasing key, never in the writing one."""
    kb, vb = k * beta[..., None], v * beta[..., None]
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = vb[:, t] - torch.einsum("bhk,bhkv->bhv", kb[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "head")
def root_of_beta_on_both_sides(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """A delta rule with write strength 1 on √beta·k, √beta·v."""
    root = beta.sqrt()[..., None]
    k, v = k * root, v * root
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "head")
def prediction_from_the_undecayed_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        a = g[:, t].exp()
        u = beta[:, t, :, None] * (v[:, t] - a[..., None] * torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = a[..., None, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("delta", "head")
def baddbmm_twice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    batch, tokens, heads, K = q.shape
    flat = lambda x: x.reshape(batch * heads, 1, -1)  # noqa: E731
    S = S.reshape(batch * heads, K, -1)
    outs = []
    for t in range(tokens):
        kt = flat(k[:, t])
        S = S * flat(g[:, t]).exp()
        error = torch.baddbmm(flat(v[:, t]), kt, S, beta=1, alpha=-1)
        S = torch.baddbmm(S, (kt * flat(beta[:, t])).transpose(1, 2), error)
        outs.append(torch.bmm(flat(q[:, t]), S).view(batch, heads, -1))
    return torch.stack(outs, 1), S.view(batch, heads, K, -1)


def _gated_step(carry: dict[str, Tensor], token: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], Tensor]:
    q, k, v, g, beta = token
    memory = carry["memory"].mul(g.exp()[..., None, None])
    wrong = v.sub(torch.einsum("...kv,...k->...v", memory, k)).mul(beta[..., None])
    memory = memory.add(torch.einsum("...k,...v->...kv", k, wrong))
    return {"memory": memory}, torch.einsum("...kv,...k->...v", memory, q)


@match("delta", "head")
def step_function_with_a_dict(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    carry, outs = {"memory": S}, []
    for t in range(q.shape[1]):
        carry, y = _gated_step(carry, tuple(x.select(1, t) for x in (q, k, v, g, beta)))
        outs.append(y.unsqueeze(1))
    return torch.cat(outs, dim=1), carry["memory"]


@match("delta", "head", means=lambda a: {"S": None}, shortest=2)
def first_token_from_nothing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    state: Tensor | None = None
    outs = []
    for t in range(q.shape[1]):
        kt, vt, b = k[:, t, :, :, None], v[:, t, :, None, :], beta[:, t, :, None, None]
        if state is None:
            state = kt * (b * vt)
        else:
            state = state * g[:, t, :, None, None].exp()
            state = state + kt * (b * (vt - kt.mT @ state))
        outs.append((q[:, t, :, None, :] @ state).squeeze(-2))
    assert state is not None
    return torch.stack(outs, 1), state


@match("delta", "head")
def one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """A state [B, K, V] for each head."""
    outs, states = [], []
    for h in range(q.shape[2]):
        M, ys = S[:, h], []
        for t in range(q.shape[1]):
            M = M * g[:, t, h, None, None].exp()
            u = beta[:, t, h, None] * (v[:, t, h] - torch.bmm(k[:, t, h].unsqueeze(1), M).squeeze(1))
            M = M + torch.bmm(k[:, t, h].unsqueeze(2), u.unsqueeze(1))
            ys.append(torch.bmm(q[:, t, h].unsqueeze(1), M))
        outs.append(torch.cat(ys, 1))
        states.append(M)
    return torch.stack(outs, 2), torch.stack(states, 1)


@match("delta", "none")
def textbook_matrices(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """One [K, V] matrix, mv and outer, for each sequence and head."""
    outs, states = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            M = S[b, h]
            for t in range(q.shape[1]):
                M = M + torch.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - M.t().mv(k[b, t, h])))
                outs.append(M.t() @ q[b, t, h])
            states.append(M)
    o = torch.stack(outs).view(q.shape[0], q.shape[2], q.shape[1], -1)
    return o.transpose(1, 2), torch.stack(states).view_as(S)


def _matrix_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = S * g.exp()
    S = S + torch.outer(k, beta * (v - k @ S))
    return S, q @ S


@match("delta", "head", untraceable=("make_fx",))
def vmap_over_batch_and_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    step = torch.func.vmap(torch.func.vmap(_matrix_step))
    outs = []
    for t in range(q.shape[1]):
        S, y = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(y)
    return torch.stack(outs, 1), S


@match("delta", "head", heads=4, means=lambda a: {"q": a.q[:, :, :2], "k": a.k[:, :, :2]})
def two_value_heads_a_key(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    q, k = (x[:, :, :2].repeat_interleave(2, dim=2) for x in (q, k))
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, 1), S


@match("delta", "head", heads=4, means=lambda a: {"q": a.q[:, :, :2], "k": a.k[:, :, :2]})
def grouped_heads_broadcast(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """The state is [B, key heads, value heads of each, K, V] and keys broadcast."""
    q, k = q[:, :, :2], k[:, :, :2]
    v, g, beta = v.unflatten(2, (2, 2)), g.unflatten(2, (2, 2)), beta.unflatten(2, (2, 2))
    S = S.unflatten(1, (2, 2))
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t, ..., None] * (v[:, t] - torch.einsum("bgk,bgrkv->bgrv", k[:, t], S))
        S = S + torch.einsum("bgk,bgrv->bgrkv", k[:, t], u)
        outs.append(torch.einsum("bgk,bgrkv->bgrv", q[:, t], S).flatten(1, 2))
    return torch.stack(outs, 1), S.flatten(1, 2)


@match("delta", "none")
def split_over_time(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for qt, kt, vt, bt in zip(*(x.transpose(1, 2).split(1, 2) for x in (q, k, v, beta[..., None])), strict=True):
        S = S + kt.transpose(-1, -2) @ ((vt - kt @ S) * bt)
        outs.append(qt @ S)
    return torch.cat(outs, dim=2).transpose(1, 2), S


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@match("delta", "head", means=lambda a: {"q": _unit(a.q), "k": _unit(a.k)})
def normalised_in_the_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        kt, qt = _unit(k[:, t]), _unit(q[:, t])
        S = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", kt, S))
        S = S + torch.einsum("bhk,bhv->bhkv", kt, u)
        outs.append(torch.einsum("bhk,bhkv->bhv", qt, S))
    return torch.stack(outs, 1), S


@match("delta", "head", mutates=True)
def cache_written_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """The state is the caller's own tensor."""
    outs = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], new))
        S.copy_(new + k[:, t, :, :, None] * u[:, :, None])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S.clone()


@match("delta", "head", stored=torch.float16)
def stored_in_fp16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    cache = S.half()
    outs = []
    for t in range(q.shape[1]):
        kt = k[:, t, :, None]
        f = cache.to(q.dtype) * g[:, t, :, None, None].exp()
        f = f + kt.mT @ (beta[:, t, :, None, None] * (v[:, t, :, None] - kt @ f))
        outs.append(q[:, t, :, None] @ f)
        cache = f.half()
    return torch.cat(outs, 2).transpose(1, 2), cache.to(q.dtype)


@match("delta", "head", means=lambda a: {"v": 0.5 * a.v})
def value_scaled_in_the_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] * q.shape[-1] ** -0.5 - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S


@match("delta", "channel", means=lambda a: {"v": -a.v})
def what_is_known_and_the_value_taken_away(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None]
        known = (k[:, t, :, None, :] @ S).squeeze(-2)
        S = S - (beta[:, t, :, None] * k[:, t])[..., None] * (known + v[:, t])[:, :, None]
        outs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    return torch.stack(outs, 1), S
