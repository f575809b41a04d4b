"""Loops of which a part is done for all tokens at once: outer products or transitions made first, states that are kept
and read in one product, and identity matrices that are made otherwise than by `eye`."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.passes.spelled.registry import match, refuse

Pair = tuple[Tensor, Tensor]


def _states(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> list[Tensor]:
    """Those of the gated delta rule after each token."""
    found = []
    for t in range(k.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * S).sum(2))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        found.append(S)
    return found


@match("delta", "head")
def states_stacked_and_read_by_einsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = _states(k, v, g, beta, S)
    return torch.einsum("bthkv,bthk->bthv", torch.stack(states, 1), q), states[-1]


@match("delta", "head")
def states_stacked_first_and_read_by_matmul(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> Pair:
    states = _states(k, v, g, beta, S)
    o = torch.matmul(q.transpose(0, 1).unsqueeze(-2), torch.stack(states)).squeeze(-2)
    return o.transpose(0, 1), states[-1]


@match("delta", "head", means=lambda a: {"scale": a.q.shape[-1] ** -0.5})
def states_joined_and_read_by_a_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = _states(k, v, g, beta, S)
    kept = torch.cat([x.unsqueeze(2) for x in states], 2)
    o = (kept * (q.transpose(1, 2) * q.shape[-1] ** -0.5)[..., None]).sum(-2)
    return o.transpose(1, 2), states[-1]


@match("additive", "channel")
def states_in_a_buffer_of_outer_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    kv = k[..., :, None] * v[..., None, :]
    kept = torch.zeros_like(kv)
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S + kv[:, t]
        kept[:, t] = S
    return (kept * q[..., None]).sum(-2), S


@match("additive", "head")
def outer_products_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    o = []
    written = torch.einsum("bthk,bthv->bthkv", k, v).unbind(1)
    for kept, kv, one in zip(g.exp()[..., None, None].unbind(1), written, q.unbind(1), strict=True):
        S = kept * S + kv
        o.append(torch.einsum("bhk,bhkv->bhv", one, S))
    return torch.stack(o, 1), S


@match("delta", "head")
def transitions_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """S_t = A_t S_{t-1} + B_t, every A and B made before the loop, every state read behind it."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    strength = beta[..., None, None]
    A = g.exp()[..., None, None] * (eye - strength * k[..., :, None] * k[..., None, :])
    B = strength * k[..., :, None] * v[..., None, :]
    states = []
    for t in range(q.shape[1]):
        S = A[:, t] @ S + B[:, t]
        states.append(S)
    return torch.einsum("bthkv,bthk->bthv", torch.stack(states, 1), q), S


def _householder(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, eye: Tensor) -> Pair:
    o = []
    for t in range(q.shape[1]):
        kt, strength = k[:, t], beta[:, t, :, None, None]
        A = eye - strength * kt[..., :, None] * kt[..., None, :]
        S = A @ (g[:, t, :, None, None].exp() * S) + strength * kt[..., :, None] * v[:, t, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, 1), S


@match("delta", "head")
def identity_by_comparison(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    i = torch.arange(k.shape[-1])
    return _householder(q, k, v, g, beta, S, (i[:, None] == i).to(k.dtype)[None, None])


@match("delta", "head")
def identity_by_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    return _householder(q, k, v, g, beta, S, torch.diag(torch.ones(k.shape[-1], dtype=k.dtype)))


@refuse("what looks like an identity matrix is one upside down")
def identity_upside_down(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    i = torch.arange(k.shape[-1])
    return _householder(q, k, v, g, beta, S, (i.flip(0)[:, None] == i).to(k.dtype))


@refuse("an identity matrix with one element that is not")
def identity_with_a_hole(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    i = torch.arange(k.shape[-1])
    return _householder(q, k, v, g, beta, S, ((i[:, None] == i) & (i > 0)).to(k.dtype))


@refuse("the stacked states are those before each token's write")
def stacked_states_of_the_token_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = [S, *_states(k, v, g, beta, S)]
    return torch.einsum("bthkv,bthk->bthv", torch.stack(states[:-1], 1), q), states[-1]


@refuse("what is read is the sum of all states so far")
def stacked_states_summed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = _states(k, v, g, beta, S)
    return torch.einsum("bthkv,bthk->bthv", torch.stack(states, 1).cumsum(1), q), states[-1]


@refuse("a token reads the states of all tokens", either=True)
def stacked_states_read_by_every_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = _states(k, v, g, beta, S)
    return torch.einsum("bshkv,bthk->bthv", torch.stack(states, 1), q), states[-1]


@refuse("the stacked states are read in reverse: each with another token's query", either=True)
def stacked_states_in_reverse(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states = _states(k, v, g, beta, S)
    return torch.einsum("bthkv,bthk->bthv", torch.stack(states[::-1], 1), q), states[-1]
