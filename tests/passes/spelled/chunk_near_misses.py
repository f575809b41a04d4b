"""Chunk forms with one mistake each: they compute no recurrence of the library's, however much they look like one.

All take (q, k, v, g, beta, S) and return (o, S). A first block may be a recurrence of its own, and is then one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NEAR_MISSES: dict[str, Callable[..., Any]] = {}
N = 16


def near_miss(fn: Callable[..., Any]) -> Callable[..., Any]:
    NEAR_MISSES[fn.__name__] = fn
    return fn


def _gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor,
    *,
    system: Callable[[Tensor], Tensor] = lambda A: A.tril(-1),
    scores: Callable[[Tensor], Tensor] = torch.tril,
    into: Callable[[Tensor, Tensor], Tensor] = lambda G, g: G,
    rest: Callable[[Tensor, Tensor], Tensor] = lambda G, g: G[..., -1:] - G,
    carry: Callable[[Tensor], Tensor] = lambda G: G[..., -1],
    beta_of_values: bool = True,
    turned: bool = False,
    scale: Callable[[int], float] = lambda c: 1.0,
    erased: Callable[[Tensor], Tensor] = lambda k: k,
) -> Any:
    """Gated DeltaNet as it should be; every argument is a place to make a mistake."""
    out = []
    for c, at in enumerate(range(0, q.shape[1], N)):
        qc, kc, vc, gc, bc = (x[:, at : at + N].transpose(1, 2) for x in (q, k, v, g, beta))
        G = gc.cumsum(-1)
        D = (G[..., :, None] - G[..., None, :]).tril().exp()
        kb = kc * bc[..., None]
        A = system(kb @ erased(kc).mT * D)
        rhs = (vc * bc[..., None] if beta_of_values else vc) - (kb * G.exp()[..., None]) @ S
        u = torch.linalg.inv(A + torch.eye(N)) @ rhs
        o = (qc * into(G, gc).exp()[..., None]) @ S + scores(qc @ kc.mT * D) @ u
        out.append(o * scale(c))
        S = S * carry(G).exp()[..., None, None] + (kc * rest(G, gc).exp()[..., None]).mT @ u
        S = S.mT if turned else S
    return torch.cat(out, 2).transpose(1, 2), S


@near_miss
def system_with_its_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Every token erases along its own key, too."""
    return _gdn(q, k, v, g, beta, S, system=torch.tril)


@near_miss
def reads_before_the_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, scores=lambda A: A.tril(-1))


@near_miss
def sees_one_token_ahead(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, scores=lambda A: A.tril(1))


@near_miss
def decay_off_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """The state from before the chunk does not feel a token's own decay."""
    return _gdn(q, k, v, g, beta, S, into=lambda G, g: G - g)


@near_miss
def writes_decay_too_much(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, rest=lambda G, g: G[..., -1:] - G + g)


@near_miss
def beta_on_keys_only(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, beta_of_values=False)


@near_miss
def carry_without_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, carry=lambda G: G[..., -1] * 0.0)


@near_miss
def carry_of_the_token_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, carry=lambda G: G[..., -2])


@near_miss
def state_turned_between_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """K = V hides it from the shapes."""
    return _gdn(q, k, v, g, beta, S, turned=True)


@near_miss
def scale_twice_in_later_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, scale=lambda c: q.shape[-1] ** (-0.5 if c == 0 else -1.0))


@near_miss
def erases_along_shifted_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return _gdn(q, k, v, g, beta, S, erased=lambda x: x.roll(1, -2))


@near_miss
def truncated_neumann_series(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """(I - A)(I + A²)(I + A⁴) is no inverse of 16 rows: A⁸ is not zero."""

    def almost(A: Tensor) -> Tensor:
        eye, A = torch.eye(N), A.tril(-1)
        return torch.linalg.inv((eye - A) @ (eye + A @ A) @ (eye + A @ A @ A @ A)) - eye

    return _gdn(q, k, v, g, beta, S, system=almost)


@near_miss
def decay_of_the_next_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """The state is carried with another head's decay than its tokens have."""
    return _gdn(q, k, v, g, beta, S, carry=lambda G: G[..., -1].roll(1, 1))


@near_miss
def retention_with_two_decays(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Inside a block tokens decay by 0.9, across blocks by 0.95."""
    i, out = torch.arange(N, dtype=q.dtype), []
    D = (0.9 ** (i[:, None] - i).clamp(min=0)).tril()
    for at in range(0, q.shape[1], N):
        qc, kc, vc = (x[:, at : at + N].transpose(1, 2) for x in (q, k, v))
        out.append((qc @ kc.mT * D) @ vc + (qc * (0.9 ** (i + 1))[:, None]) @ S)
        S = S * 0.95**N + (kc * (0.9 ** (N - 1 - i))[:, None]).mT @ vc
    return torch.cat(out, 2).transpose(1, 2), S


@near_miss
def retention_of_normalised_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Every row of the decay mask sums to one, as RetNet's stabilised form has it: a scale a token."""
    i = torch.arange(q.shape[1], dtype=q.dtype)
    D = (0.9 ** (i[:, None] - i).clamp(min=0)).tril()
    D = D / D.sum(-1, keepdim=True).sqrt()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * D) @ v).transpose(1, 2), S
