"""Ways to write an additive state: linear attention, RetNet, Lightning, GLA, HGRN2, Mamba-2."""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.registry import Args, match

Pair = tuple[Tensor, Tensor]


def _retnet_decay(a: Args) -> dict[str, Tensor]:
    return {"g": (1 - 2.0 ** (-5 - torch.arange(a.g.shape[-1], dtype=a.g.dtype))).log().expand(a.g.shape)}


@match("additive", "head", means=_retnet_decay)
def retnet_constants(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    gamma = 1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=S.dtype, device=S.device))
    outs = []
    for t in range(q.shape[1]):
        S = gamma[None, :, None, None] * S + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outs, 1), S


@match("additive", "head", means=lambda a: {"g": torch.full_like(a.g, 0.95).log()})
def one_python_float(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = 0.95 * S + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, :, None] * S).sum(2))
    return torch.stack(outs, 1), S


def _slopes(a: Args) -> dict[str, Tensor]:
    return {"g": -(2.0 ** -torch.arange(1, a.g.shape[-1] + 1, dtype=a.g.dtype)).expand(a.g.shape)}


@match("additive", "head", means=_slopes)
def lightning_slopes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    slope = torch.tensor([2.0**-h for h in range(1, q.shape[2] + 1)], dtype=S.dtype)
    ratio = torch.exp(-slope)[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    outs = []
    for i in range(q.shape[2]):
        S = ratio * S + torch.matmul(k[:, :, i : i + 1].transpose(-1, -2), v[:, :, i : i + 1])
        outs.append(torch.matmul(q[:, :, i : i + 1], S))
    return torch.cat(outs, dim=-2).transpose(1, 2), S


@match("additive", "channel", means=lambda a: {"g": F.logsigmoid(a.g) / 16, "scale": a.q.shape[-1] ** -0.5})
def gla_with_temperature(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    alpha = torch.sigmoid(g) ** (1 / 16)
    outs = []
    for t in range(q.shape[1]):
        S = alpha[:, t, :, :, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] / math.sqrt(q.shape[-1]), S))
    return torch.stack(outs, 1), S


@match("additive", "channel", means=lambda a: {"g": F.logsigmoid(a.g) / 16})
def gla_log_gates(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    gates = (F.logsigmoid(g) / 16).transpose(1, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = torch.zeros_like(v)
    for i in range(q.shape[2]):
        kv = k[:, :, i, :, None] * v[:, :, i, None, :]
        S = S * gates[:, :, i, :, None].exp() + kv
        out[:, :, i] = (q[:, :, i, :, None] * S).sum(-2)
    return out.transpose(1, 2), S


def _hgrn(a: Args) -> dict[str, Tensor]:
    return {"g": F.logsigmoid(a.g), "k": 1 - a.g.sigmoid()}


@match("additive", "channel", means=_hgrn)
def hgrn2_tied_gate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """The key is what the forget gate leaves free."""
    f = g.sigmoid()
    outs = []
    for ft, it, qt in zip(f.unbind(1), v.unbind(1), q.unbind(1), strict=True):
        S = torch.einsum("bhd,bhde->bhde", ft, S) + torch.einsum("bhd,bhe->bhde", 1 - ft, it)
        outs.append(torch.einsum("bhde,bhd->bhe", S, qt))
    return torch.stack(outs, dim=1), S


def _mamba(a: Args) -> dict[str, Tensor]:
    A = -torch.arange(1, a.g.shape[-1] + 1, dtype=a.g.dtype)
    first = [x[:, :, :1] for x in (a.q, a.k)]
    return {"g": a.beta * A, "beta": a.beta, "q": first[0], "k": first[1]}


@match("additive", "head", means=_mamba)
def mamba2_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """x = v, dt = beta, B = k and C = q of one group; h is [B, H, P, N]."""
    A = -torch.arange(1, v.shape[2] + 1, dtype=v.dtype)
    B, C, dt = k[:, :, 0], q[:, :, 0], beta
    h, ys = S.transpose(-1, -2), []
    for t in range(v.shape[1]):
        dA = torch.exp(dt[:, t] * A)
        dBx = torch.einsum("bh,bn,bhp->bhpn", dt[:, t], B[:, t], v[:, t])
        h = h * dA[..., None, None] + dBx
        ys.append(torch.einsum("bhpn,bn->bhp", h, C[:, t]))
    return torch.stack(ys, dim=1), h.transpose(-1, -2)


@match("additive", "head", means=lambda a: {**_mamba(a), "q": a.q, "k": a.k})
def mamba2_state_update(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Expanded to the shape of the state, read by a bmm of flattened heads; the skip is added and taken off again."""
    batch, tokens, heads, N = k.shape
    P = v.shape[-1]
    state = S.mT.contiguous()
    A = (-torch.arange(1, heads + 1, dtype=v.dtype))[:, None, None].expand(heads, P, N)
    D = v.new_ones(heads, P)
    ys = []
    for t in range(tokens):
        x, dt = v[:, t], beta[:, t, :, None].expand(batch, heads, P)
        dA = torch.exp(dt[..., None] * A)
        dB = dt[..., None] * k[:, t, :, None, :]
        state = state * dA + dB * x[..., None]
        y = torch.bmm(state.view(batch * heads, P, N), q[:, t].reshape(batch * heads, N, 1)).view(batch, heads, P)
        ys.append(y + x * D)
    return torch.stack(ys, 1) - v, state.mT


@match("additive", "none", company=True, means=lambda a: {"q": F.elu(a.q) + 1, "k": F.elu(a.k) + 1})
def with_a_normaliser(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Katharopoulos et al.: the sum of keys divides the output (and is multiplied back here, to be comparable)."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z, outs, norms = torch.zeros_like(k[:, 0]), [], []
    for t in range(q.shape[1]):
        z = z + k[:, t]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        norm = torch.einsum("bhk,bhk->bh", q[:, t], z)[..., None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) / norm)
        norms.append(norm)
    return torch.stack(outs, 1) * torch.stack(norms, 1), S


@match("additive", "head", means=lambda a: {"v": a.v * (a.beta > 0.4)[..., None]})
def padding_masked_in_v(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    mask = (beta > 0.4).to(v.dtype)[..., None]
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) * (v[:, t] * mask[:, t]).unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


def _held(a: Args) -> dict[str, Tensor]:
    live = a.beta > 0.4
    return {"g": torch.where(live, a.g, 0.0), "v": a.v * live[..., None]}


@match("additive", "head", means=_held)
def padding_holds_the_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    live = beta > 0.4
    a = g.masked_fill(~live, 0).exp()
    v = v.masked_fill(~live.unsqueeze(-1), 0)
    outs = []
    for t in range(q.shape[1]):
        S = a[:, t, :, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append((q[:, t, :, None, :] @ S).squeeze(2))
    return torch.stack(outs, 1), S


@match("additive", "none")
def flat_baddbmm(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    batch, tokens, heads, K = k.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    S = S.flatten(0, 1)
    outs = []
    for t in range(tokens):
        S = S.baddbmm(k[:, t, :, None], v[:, t, None, :])
        outs.append(q[:, t, None, :].bmm(S).squeeze(1))
    return torch.stack(outs, 1).view(batch, heads, tokens, -1).transpose(1, 2), S.view(batch, heads, K, -1)


@match("additive", "head")
def writes_formed_and_states_read_in_bulk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """All outer products before the loop, all reads after it."""
    writes = torch.einsum("bthk,bthv->tbhkv", k, v)
    keep = g.exp().permute(1, 0, 2)[..., None, None]
    states = []
    for w, a in zip(writes, keep, strict=True):
        S = a * S + w
        states.append(S)
    return torch.einsum("bthk,tbhkv->bthv", q, torch.stack(states)), S


@match("additive", "head")
def reduce_over_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    tokens = list(zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), strict=True))

    def step(carry: tuple[Tensor, list[Tensor]], token: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        (S, ys), (qt, kt, vt, gt) = carry, token
        S = torch.addcmul(kt[..., :, None] * vt[..., None, :], S, gt.exp()[..., None, None])
        return S, [*ys, (S.transpose(-2, -1) @ qt[..., None])[..., 0]]

    S, ys = functools.reduce(step, tokens, (S, []))
    return torch.stack(ys, 1), S


@match("additive", "head")
def accumulate_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    def step(S: Tensor, t: int) -> Tensor:
        return torch.exp(g[:, t])[..., None, None] * S + torch.einsum("bhv,bhk->bhkv", v[:, t], k[:, t])

    states = list(itertools.accumulate(range(q.shape[1]), step, initial=S))[1:]
    outs = [torch.einsum("bhkv,bhk->bhv", S, q[:, t]) for t, S in enumerate(states)]
    return torch.stack(outs, 1), states[-1]


@match("additive", "head", means=lambda a: {"g": F.logsigmoid(a.g), "beta": 1 - a.g.sigmoid()})
def moving_average(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """lerp between the state and the new association: what is forgotten is what is learnt."""
    keep = g.sigmoid()
    outs = []
    for t in range(q.shape[1]):
        S = torch.lerp(k[:, t, :, :, None] * v[:, t, :, None], S, keep[:, t, :, None, None])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("additive", "head")
def divided_by_growth(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = S / torch.exp(-g[:, t]).reshape(*g.shape[:1], -1, 1, 1) + torch.einsum("bhi,bhj->bhij", k[:, t], v[:, t])
        outs.append(torch.einsum("bhij,bhi->bhj", S, q[:, t]))
    return torch.stack(outs, 1), S


# make_fx cannot run what it traces of a vmap; export cannot lift a constant out of this one.
@match("additive", "channel", untraceable=("make_fx", "export"))
def vmap_over_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    def head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> Pair:
        ys = []
        for t in range(q.shape[1]):
            S = g[:, t].exp().unsqueeze(-1) * S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(1)
            ys.append((q[:, t].unsqueeze(1) @ S).squeeze(1))
        return torch.stack(ys, 1), S

    return torch.vmap(head, in_dims=(2, 2, 2, 2, 1), out_dims=(2, 1))(q, k, v, g, S)


@match("additive", "head", stored=torch.bfloat16)
def bf16_cache(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    cache = S.bfloat16()
    outs = []
    for t in range(q.shape[1]):
        full = cache.type_as(v) * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ full).squeeze(-2))
        cache = full.bfloat16()
    return torch.stack(outs, 1), cache.type_as(v)


@match("additive", "head")
def written_slice_by_slice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """All states in one buffer, each written from the one before."""
    tokens = q.shape[1]
    states = S.new_zeros(tokens + 1, *S.shape)
    states[0] = S
    out = v.new_zeros(v.shape)
    for t in range(tokens):
        states[t + 1] = states[t] * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        out[:, t] = (states[t + 1] * q[:, t, :, :, None]).sum(-2)
    return out, states[tokens]


@match("additive", "none", means=lambda a: {"S": None, "q": a.q.softmax(-1), "k": a.k.softmax(-1)})
def zeros_to_begin_with(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    batch, tokens, heads, K = q.shape
    M = torch.zeros(batch, heads, v.shape[-1], K, dtype=v.dtype)
    q, k = q.softmax(-1), k.softmax(-1)
    outs = []
    for t in range(tokens):
        M += torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", M, q[:, t]))
    return torch.stack(outs, 1), M.transpose(2, 3)


@match("additive", "head", heads=4, means=lambda a: {"q": a.q[:, :, ::2], "k": a.k[:, :, ::2]})
def keys_expanded_over_groups(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    def widen(x: Tensor) -> Tensor:
        x = x[:, :, ::2]
        return x[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(v.shape[0], v.shape[1], v.shape[2], -1)

    q, k = widen(q), widen(k)
    outs = []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, 1), S


@match("additive", "channel")
def growing_basis(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """A decay that multiplies the key side of a state kept as [H, B, K, V]."""
    S = S.transpose(0, 1)
    q, k, v, g = (x.permute(1, 2, 0, 3) for x in (q, k, v, g))
    outs = []
    for t in range(q.shape[0]):
        S = torch.einsum("hbkv,hbk->hbkv", S, g[t].exp()).add(torch.einsum("hbk,hbv->hbkv", k[t], v[t]))
        outs.append(torch.einsum("hbkv,hbk->hbv", S, q[t]))
    return torch.stack(outs).permute(2, 0, 1, 3), S.transpose(0, 1)


@match("additive", "channel", means=lambda a: {"k": a.k * (1 - a.g.exp())})
def lerp_from_an_outer_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """HGRN2 with keys: what is forgotten makes room for what is written."""
    outs = []
    for t in range(q.shape[1]):
        S = torch.lerp(torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]), S, g[:, t].exp()[..., None])
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S


@match("additive", "head", means=lambda a: {"k": a.k + 0.3 * a.q})
def two_keys_write_one_value(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        value = v[:, t, :, None, :]
        S = g[:, t].exp()[..., None, None] * S + k[:, t, :, :, None] * value + (0.3 * q[:, t, :, :, None]) * value
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S
