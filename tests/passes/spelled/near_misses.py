"""What looks like a recurrence of the family and is none."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.registry import refuse

Pair = tuple[Tensor, Tensor]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", x, S)


def _keep(g: Tensor) -> Tensor:
    """exp(g) in the shape of a state, from [B, H] or [B, H, K]."""
    return g.exp()[..., None, None] if g.ndim == 2 else g.exp()[..., None]


def _delta(S: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return S + _outer(k, beta[..., None] * (v - _read(S, k)))


# (S, q, k, v, g, beta) of one token -> (S, o)
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Pair]


def _loop(step: Step, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S, y = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(y)
    return torch.stack(outs, 1), S


def _near(step: Step) -> Callable[..., Pair]:
    """The step's loop, under the step's name."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
        return _loop(step, q, k, v, g, beta, S)

    loop.__name__ = step.__name__
    return loop


@refuse("the state is clamped")
@_near
def clamped(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = (_keep(g) * S + _outer(k, v)).clamp(-1, 1)
    return S, _read(S, q)


@refuse("the state is normalised after every write")
@_near
def normalised_state(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta(_keep(g) * S, k, v, beta)
    S = S / S.norm(dim=(-2, -1), keepdim=True)
    return S, _read(S, q)


@refuse("a decay per channel acts after the erase", decay="channel")
@_near
def decay_after_erase(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * (S - beta[..., None, None] * _outer(k, _read(S, k))) + beta[..., None, None] * _outer(k, v)
    return S, _read(S, q)


@refuse("the decay acts on the write as well: the gates of a recurrence, one token late", either=True)
@_near
def decay_after_write(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * _delta(S, k, v, beta)
    return S, _read(S, q)


@refuse("beta on the write only: strength 1, unless beta counts as part of v", either=True)
@_near
def beta_on_write_only(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + _outer(k, beta[..., None] * v - _read(S, k))
    return S, _read(S, q)


@refuse("beta on the erase only")
@_near
def beta_on_erase_only(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + _outer(k, v - beta[..., None] * _read(S, k))
    return S, _read(S, q)


@refuse("beta twice on the erase, once on the write: strength 1, if beta counts as part of k", either=True)
@_near
def beta_squared_on_erase(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S, kb = _keep(g) * S, k * beta[..., None]
    S = S + _outer(kb, v - _read(S, kb))
    return S, _read(S, q)


@refuse("the previous token's key erases")
def previous_key_erases(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = []
    for t in range(q.shape[1]):
        S = _keep(g[:, t]) * S
        S = S + beta[:, t, :, None, None] * _outer(k[:, t], v[:, t] - _read(S, k[:, max(t - 1, 0)] + k[:, t]))
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs, 1), S


@refuse("the query erases")
@_near
def query_erases(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v - _read(S, q))
    return S, _read(S, q)


@refuse("the erase sees the state before its decay")
@_near
def erase_of_the_undecayed(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + beta[..., None, None] * _outer(k, v - _read(S, k))
    return S, _read(S, q)


@refuse("the prediction is added: a write strength below zero", either=True)
@_near
def erase_added(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v + _read(S, k))
    return S, _read(S, q)


@refuse("read before the token's own write", either=True)
@_near
def read_before_write(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    return _delta(S, k, v, beta), _read(S, q)


@refuse("RWKV's bonus: read before the write, plus the token's own association", either=True)
@_near
def bonus_for_the_present(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    y = _read(S + beta[..., None, None] * _outer(k, v), q)
    return _keep(g) * S + _outer(k, v), y


@refuse("each token reads the state of two tokens ago", either=True)
def older_state_read(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states, outs = [S, S], []
    for t in range(q.shape[1]):
        states.append(_delta(_keep(g[:, t]) * states[-1], k[:, t], v[:, t], beta[:, t]))
        outs.append(_read(states[-3], q[:, t]))
    return torch.stack(outs, 1), states[-1]


@refuse("every token starts from the state of two tokens ago: two chains", either=True)
def every_other_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states, outs = [S, S], []
    for t in range(q.shape[1]):
        states.append(_delta(_keep(g[:, t]) * states[-2], k[:, t], v[:, t], beta[:, t]))
        outs.append(_read(states[-1], q[:, t]))
    return torch.stack(outs, 1), states[-1] + states[-2]


@refuse("a symmetric write is of rank two", square=True, either=True)
@_near
def symmetric_write(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v) + _outer(v, k)
    return S, _read(S, q)


@refuse("two associations are written at once", either=True)
@_near
def two_writes(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v) + _outer(k.roll(1, -1), v.roll(1, -1))
    return S, _read(S, q)


@refuse("the decay is per value channel")
@_near
def value_channel_decay(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta(S * v.sigmoid().unsqueeze(-2), k, v, beta)
    return S, _read(S, q)


@refuse("the decay is a full matrix")
@_near
def full_decay(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = S * torch.sigmoid(k.unsqueeze(-1) + v.unsqueeze(-2)) + _outer(k, v)
    return S, _read(S, q)


@refuse("erased along the value axis", square=True)
@_near
def transposed_erase(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v - torch.einsum("bhkv,bhv->bhk", S, k))
    return S, _read(S, q)


@refuse("Oja's rule, the value erases: a delta rule of the transposed state, which is not read as one", either=True)
@_near
def oja(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k - torch.einsum("bhkv,bhv->bhk", S, v), v)
    return S, _read(S, q)


@refuse("read along the value axis, as if keys were values", square=True, either=True)
@_near
def transposed_read(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v)
    return S, torch.einsum("bhkv,bhv->bhk", S, q)


@refuse("heads are mixed")
@_near
def heads_mixed(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + 0.1 * S.roll(1, dims=1) + _outer(k, v)
    return S, _read(S, q)


@refuse("sequences are mixed")
@_near
def batch_mixed(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * (S - 0.5 * S.mean(0, keepdim=True)) + _outer(k, v)
    return S, _read(S, q)


@refuse("the previous head's key erases")
@_near
def neighbours_key(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v - _read(S, k.flip(1)))
    return S, _read(S, q)


@refuse("the state grows: cosh is never below 1")
@_near
def growth(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = torch.cosh(g)[..., None, None] * S + _outer(k, v)
    return S, _read(S, q)


@refuse("a negative factor is no decay")
@_near
def alternating(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _outer(k, v) - _keep(g) * S
    return S, _read(S, q)


@refuse("second order in the state")
@_near
def squared_state(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v) - 0.1 * S * S
    return S, _read(S, q)


@refuse("a constant is added to the state at every token")
@_near
def drift(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v) + 0.01
    return S, _read(S, q)


@refuse("which elements are written depends on the values")
@_near
def written_where_positive(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = torch.where((v > 0).unsqueeze(-2), _delta(_keep(g) * S, k, v, beta), S)
    return S, _read(S, q)


@refuse("read through a softmax of the state", either=True)
@_near
def softmax_read(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S + _outer(k, v)
    return S, _read(S.softmax(-2), q)


@refuse("the state is rolled along its keys at every token")
@_near
def rolled(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta(_keep(g) * S.roll(1, dims=2), k, v, beta)
    return S, _read(S, q)


@refuse("the state is smoothed along its values at every token")
@_near
def convolved(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * F.avg_pool1d(S.flatten(0, 1), 3, stride=1, padding=1).unflatten(0, S.shape[:2]) + _outer(k, v)
    return S, _read(S, q)


@refuse("no gradient passes through the state: steps of their own", differs="gradients", either=True)
@_near
def detached(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta(_keep(g) * S.detach(), k, v, beta)
    return S, _read(S, q)


@refuse("no gradient passes through the prediction", differs="gradients")
@_near
def prediction_detached(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v - _read(S, k).detach())
    return S, _read(S, q)


@refuse("dropout on the state")
@_near
def dropped_out(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = F.dropout(_keep(g) * S, 0.25, training=True) + _outer(k, v)
    return S, _read(S, q)


@refuse("the next key depends on the last output: one step at a time at most", either=True)
def fed_back(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    outs = [v[:, 0] * 0]
    for t in range(q.shape[1]):
        key = k[:, t] + 0.1 * outs[-1].sum(-1, keepdim=True)
        S = _delta(_keep(g[:, t]) * S, key, v[:, t], beta[:, t])
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs[1:], 1), S


@refuse("the decay depends on the state")
@_near
def gated_by_the_state(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta(torch.sigmoid(S.mean((-2, -1), keepdim=True)) * S, k, v, beta)
    return S, _read(S, q)


@refuse("momentum: two carried matrices, the second a sum of the first")
def momentum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    M, outs = torch.zeros_like(S), []
    for t in range(q.shape[1]):
        M = 0.9 * M + beta[:, t, :, None, None] * _outer(k[:, t], v[:, t] - _read(S, k[:, t]))
        S = _keep(g[:, t]) * S + M
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs, 1), S


@refuse("the update is divided by the norm of the state")
@_near
def normalised_update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    u = beta[..., None] * (v - _read(S, k))
    S = S + _outer(k, u) / (1 + S.norm(dim=(-2, -1), keepdim=True))
    return S, _read(S, q)


@refuse("rounded in the middle of a step, not where the state is stored")
@_near
def rounded_before_the_write(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _delta((_keep(g) * S).bfloat16().to(v.dtype), k, v, beta)
    return S, _read(S, q)


@refuse("only the erase sees a rounded state")
@_near
def rounded_for_the_erase(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    S = _keep(g) * S
    S = S + beta[..., None, None] * _outer(k, v - _read(S.bfloat16().to(v.dtype), k))
    return S, _read(S, q)


@refuse("intermediate states are returned: only what keeps them may be rewritten", either=True)
def all_states_returned(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    states, outs = [], []
    for t in range(q.shape[1]):
        S = _delta(_keep(g[:, t]) * S, k[:, t], v[:, t], beta[:, t])
        states.append(S)
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs, 1), torch.stack(states, 1)


@refuse("the state is reset to its first value half way", either=True)
def restarted(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    first, outs = S, []
    for t in range(q.shape[1]):
        S = _delta(_keep(g[:, t]) * (first if t == q.shape[1] // 2 else S), k[:, t], v[:, t], beta[:, t])
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs, 1), S
