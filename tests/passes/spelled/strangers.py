"""Spellings in the manner of other people's layers: in-place buffers, fused ops, cells, masks. Written before anyone
looked how the matcher reads them; and what comes near them and is something else."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.spelled.registry import Args, match, refuse

Pair = tuple[Tensor, Tensor]


@match("additive", "head", means=lambda a: {"g": F.logsigmoid(a.g), "beta": 1 - a.g.sigmoid()})
def memory_lerped_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    forget = 1 - torch.sigmoid(g)
    memory, ys = S.clone(), []
    for t in range(q.size(1)):
        memory.lerp_(torch.einsum("...k,...v->...kv", k[:, t], v[:, t]), forget[:, t, :, None, None])
        ys.append(torch.einsum("...k,...kv->...v", q[:, t], memory))
    return torch.stack(ys, dim=1), memory


@match("delta", "head", heads=1)
def weights_of_a_linear_layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """A fast weight matrix for every sequence and head, applied by F.linear, and written by torch.outer."""
    out, final = torch.empty_like(v), torch.empty_like(S)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            W = S[b, h].t()  # [V, K]
            for t in range(q.shape[1]):
                W = torch.exp(g[b, t, h]) * W
                error = v[b, t, h] - F.linear(k[b, t, h], W)
                W = W + torch.outer(beta[b, t, h] * error, k[b, t, h])
                out[b, t, h] = F.linear(q[b, t, h], W)
            final[b, h] = W.t()
    return out, final


@match("delta", "channel")
def divided_and_added(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    growth = torch.exp(-g)
    ys = []
    for t in range(q.shape[1]):
        decayed = torch.addcdiv(torch.zeros_like(S), S, growth[:, t].unsqueeze(-1))
        err = torch.addcmul(
            v[:, t, :, None], k[:, t, :, None].matmul(decayed), torch.ones_like(S[..., :1, :1]), value=-1
        )
        S = torch.addcmul(decayed, beta[:, t, :, None, None] * k[:, t].unsqueeze(-1), err)
        ys.append(q[:, t, :, None].matmul(S))
    return torch.cat(ys, 2).transpose(1, 2), S


@match("delta", "head")
def fused_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    state = S.clone()
    gates = g.exp().unsqueeze(-1).unsqueeze(-1)
    y = v.new_zeros(v.shape)
    for t in range(q.shape[1]):
        state[:] = state * gates[:, t]
        u = v[:, t].sub((state * k[:, t].unsqueeze(-1)).sum(dim=-2)).mul(beta[:, t].unsqueeze(-1))
        state.addcmul_(k[:, t].unsqueeze(-1), u.unsqueeze(-2))
        y[:, t] += torch.sum(state * q[:, t].unsqueeze(-1), dim=-2)
    return y, state


@match("additive", "head")
def a_list_of_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """Heads in a python list, time outermost; products by tensordot where nothing is batched."""
    B, T, H = q.shape[:3]
    heads = [S[:, h] for h in range(H)]
    ones = torch.ones(1, dtype=v.dtype)
    rows = []
    for t in range(T):
        row = []
        for h in range(H):
            kv = k[:, t, h].unsqueeze(2) * v[:, t, h].unsqueeze(1)
            heads[h] = torch.add(heads[h] * g[:, t, h].exp().reshape(B, 1, 1), kv, alpha=1)
            scaled = torch.tensordot(q[:, t, h].unsqueeze(-1), ones, dims=([2], [0]))
            row.append(torch.einsum("bk,bkv->bv", scaled, heads[h]))
        rows.append(torch.stack(row, dim=1))
    return torch.stack(rows, dim=1), torch.stack(heads, dim=1)


@match("delta", "none", mutates=True)
def out_variants(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    B, T, H, K = q.shape
    V = v.shape[-1]
    W, ys = S.reshape(B * H, K, V).clone(), []
    guess, error = (torch.empty(B * H, 1, V, dtype=v.dtype) for _ in range(2))
    for t in range(T):
        qt, kt, vt, bt = (x[:, t].reshape(B * H, 1, -1) for x in (q, k, v, beta))
        torch.bmm(kt, W, out=guess)
        torch.sub(vt, guess, out=error)
        torch.mul(error, bt, out=error)
        W = torch.baddbmm(W, kt.mT, error)
        ys.append(torch.bmm(qt, W).view(B, H, V))
    return torch.stack(ys, 1), W.unflatten(0, (B, H))


class _Cell(nn.Module):
    """Keeps its state between calls."""

    state: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, strength: Tensor) -> Tensor:
        before = self.state * keep[:, :, None, None]
        wrong = torch.linalg.vecdot(before.mT, k.unsqueeze(-2), dim=-1) - v
        self.state = before - torch.einsum("bh,bhk,bhv->bhkv", strength, k, wrong)
        return torch.linalg.vecdot(self.state.mT, q.unsqueeze(-2), dim=-1)


@match("delta", "head")
def cell_with_a_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    cell = _Cell()
    cell.state = S
    ys = [cell(q[:, t], k[:, t], v[:, t], g[:, t].exp(), beta[:, t]) for t in range(q.shape[1])]
    return torch.stack(ys, 1), cell.state


@match("additive", "channel", means=lambda a: {"v": a.v * a.beta[..., None]})
def head_by_head_into_one_tensor(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """One state of all heads, each head's part written by index."""
    state = S.clone()
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        for h in range(q.shape[2]):
            gate = g[:, t, h].exp()
            write = torch.einsum("bk,bv->bkv", k[:, t, h], v[:, t, h] * beta[:, t, h, None])
            state[:, h] = state[:, h] * gate[..., None] + write
            out[:, t, h] = (q[:, t, h, None] @ state[:, h]).squeeze(1)
    return out, state


@match("delta", "channel", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def moved_swapped_flattened(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    B, T, H, K = q.shape
    q, k, v, g = (torch.movedim(x, 1, 0).flatten(1, 2).unsqueeze(2) for x in (q, k, v, g))  # [T, B*H, 1, *]
    b = beta.movedim(1, 0).reshape(T, B * H, 1, 1)
    W = S.flatten(0, 1)
    y = []
    for qt, kt, vt, gt, bt in zip(q, k, v, g, b, strict=True):
        W = torch.swapaxes(gt.exp(), -1, -2) * W
        W = W + torch.swapaxes(kt, 1, 2) @ ((vt - kt @ W) * bt)
        y.append((qt / math.sqrt(K) @ W).squeeze(-2).unflatten(0, (B, H)))
    return torch.stack(y).movedim(0, 1), W.unflatten(0, (B, H))


def _gammas(a: Args) -> dict[str, Tensor]:
    heads = a.g.shape[-1]
    gamma = 1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), heads, dtype=torch.float64))
    return {"g": gamma.log().to(a.g.dtype).expand(a.g.shape)}


@match("additive", "head", means=_gammas)
def powers_of_gamma(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    heads = q.shape[2]
    gamma = (1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), heads, dtype=v.dtype))).view(1, -1, 1, 1)
    ys = []
    for n in range(q.shape[1]):
        S = torch.pow(gamma, 1) * S + k[:, n].unsqueeze(-1) @ v[:, n].unsqueeze(-2)
        ys.append(q[:, n].unsqueeze(-2) @ S)
    return torch.cat(ys, dim=-2).transpose(1, 2), S


def _softplus_gate(a: Args) -> dict[str, Tensor]:
    rates = torch.linspace(0.1, 0.7, a.g.shape[-1], dtype=a.g.dtype)
    return {"g": -rates.exp() * F.softplus(a.g + 0.3), "q": F.normalize(a.q, dim=-1), "k": F.normalize(a.k, dim=-1)}


@match("delta", "head", means=_softplus_gate)
def softplus_gate_and_unit_keys_in_the_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> Pair:
    A_log, dt_bias = torch.linspace(0.1, 0.7, g.shape[-1], dtype=g.dtype), 0.3
    ys = []
    for t in range(q.shape[1]):
        qt, kt = F.normalize(q[:, t], p=2.0, dim=-1), F.normalize(k[:, t], p=2.0, dim=-1)
        alpha = torch.exp(-torch.exp(A_log) * F.softplus(g[:, t] + dt_bias))
        S = torch.einsum("bh,bhkv->bhkv", alpha, S)
        delta = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, kt)
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], kt, delta)
        ys.append(torch.einsum("bhkv,bhk->bhv", S, qt))
    return torch.stack(ys, 1), S


@match("additive", "channel")
def two_to_the_power(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    bits = g * math.log2(math.e)
    state = S.permute(1, 0, 3, 2)  # [H, B, V, K]
    out = []
    for t in range(q.shape[1]):
        keep = (2 ** bits[:, t]).transpose(0, 1).unsqueeze(2)
        state = state * keep + v[:, t].transpose(0, 1)[..., None] * k[:, t].transpose(0, 1)[..., None, :]
        out.append(torch.stack(list((state @ q[:, t].transpose(0, 1)[..., None])[..., 0]), dim=1))
    return torch.stack(out, 1), state.permute(1, 0, 3, 2)


def _live(a: Args) -> Tensor:
    """[B, T]: some tokens are padding."""
    return a.beta[..., 0] > 0.4


def _skipped(a: Args) -> dict[str, Tensor]:
    live = _live(a)[..., None]
    return {"g": a.g.masked_fill(~live.view(*live.shape, *[1] * (a.g.dim() - 3)), 0), "beta": a.beta * live}


@match("delta", "head", means=_skipped)
def padding_keeps_the_old_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    live = beta[..., 0] > 0.4
    ys = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp()
        new = (
            new
            + k[:, t, :, :, None] * ((v[:, t] - (new * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None])[:, :, None]
        )
        S = torch.where(live[:, t, None, None, None], new, S)
        ys.append((S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(ys, 1), S


@match("additive", "channel", means=_skipped)
def finished_sequences_by_a_float_mask(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    mask = (beta[..., 0] > 0.4).to(v.dtype)
    ys = []
    for t in range(q.shape[1]):
        m = mask[:, t].view(-1, 1, 1, 1)
        new = torch.exp(g[:, t]).unsqueeze(-1) * S + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], v[:, t], beta[:, t])
        S = m * new + (1 - m) * S
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


def _restarted(a: Args) -> dict[str, Tensor]:
    return {"g": a.g.masked_fill(~_live(a)[..., None], -torch.inf)}


@match("delta", "head", means=_restarted)
def state_cleared_where_a_document_begins(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    begins = beta[..., 0] <= 0.4
    ys = []
    for t in range(q.shape[1]):
        S = S.masked_fill(begins[:, t].reshape(-1, 1, 1, 1), 0.0)
        S = S * torch.exp(g[:, t])[:, :, None, None]
        S = S + k[:, t].unsqueeze(-1) * (beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S).squeeze(2))).unsqueeze(
            -2
        )
        ys.append((q[:, t, :, None] @ S).squeeze(2))
    return torch.stack(ys, 1), S


@refuse("small entries of the state are dropped")
def sparsified(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        S = torch.where(S.abs() > 0.1, S, 0.0)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


@refuse("a gate between 0 and 1, no mask, mixes the old state with the new one of a delta rule")
def highway(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp()
        new = new + k[:, t, :, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], new))[:, :, None]
        S = torch.lerp(S, new, beta[:, t, :, None, None])
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


@refuse("the output of a masked token is read from the state that is not kept")
def read_before_the_mask(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], new))
        S = torch.where(beta[:, t, :1, None, None] > 0.4, new, S)
    return torch.stack(ys, 1), S


@refuse("the mask is on the erase, not on the write", either=True)
def masked_erase(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        guess = torch.einsum("bhk,bhkv->bhv", k[:, t], S).masked_fill(beta[:, t, :, None] <= 0.4, 0)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t] - guess)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


@refuse("the mask runs along the value axis")
def masked_columns(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        S = torch.where(v[:, t, :, None, :] > 0, new, S)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


@refuse("masked key channels: a delta rule that erases along one key and writes along another")
def masked_channels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        new = S * g[:, t, :, None, None].exp()
        guess = torch.einsum("bhk,bhkv->bhv", k[:, t], new)
        new = new + beta[:, t, :, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t] - guess)
        S = torch.where(q[:, t, :, :, None] > 0, new, S)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


@refuse("baddbmm halves the state after the erase was read from all of it")
def halved_by_baddbmm(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    B, T, H = q.shape[:3]
    W, ys = S.flatten(0, 1), []
    for t in range(T):
        qt, kt, vt = (x[:, t].reshape(B * H, 1, -1) for x in (q, k, v))
        W = torch.baddbmm(W, kt.mT, vt - kt @ W, beta=0.5)
        ys.append((qt @ W).view(B, H, -1))
    return torch.stack(ys, 1), W.view(S.shape)


@refuse("addcmul takes the error away that it should add", either=True)
def subtracted_error(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    ys = []
    for t in range(q.shape[1]):
        S = S.mul(g[:, t, :, None, None].exp())
        err = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S.addcmul(beta[:, t, :, None, None] * k[:, t].unsqueeze(-1), err.unsqueeze(-2), value=-1)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S
