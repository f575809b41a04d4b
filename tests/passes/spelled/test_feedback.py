"""Tokens whose key, value or gate is made of the last output, which are operators of their own; what looks like them
and is an erase in the wrong place; and recurrences that are read before the write, of which no token is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from tests.passes.spelled.corpus import Args, make_args
from tests.passes.spelled.harness import errors_against, rewrite_graph

Token = Callable[[Args, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore")


def _read(S: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, q)


def _write(S: Tensor, k: Tensor, u: Tensor) -> Tensor:
    return S + k[..., :, None] * u[..., None, :]


def _delta(a: Args, S: Tensor, **other: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule, with another k, v or g."""
    k, v, g = (other.get(name, getattr(a, name)) for name in "kvg")
    S = S * g.exp()[..., None, None]
    S = _write(S, k, a.beta[..., None] * (v - _read(S, k)))
    return S, _read(S, a.q)


def value(a: Args, S: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    return _delta(a, S, v=a.v if y is None else a.v + 0.1 * y)


def value_of_an_additive_rule(a: Args, S: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    S = _write(S * a.g.exp()[..., None, None], a.k, a.v if y is None else a.v + y)
    return S, _read(S, a.q)


def key(a: Args, S: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    return _delta(a, S, k=a.k if y is None else a.k + 0.1 * y)


def gate(a: Args, S: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    return _delta(a, S, g=a.g if y is None else a.g - F.softplus(y.sum(-1)))


def _over_tokens(token: Token, *, erases: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """Over all tokens; with `erases`, what a token erases is an output, too."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        outs: list[Tensor] = []
        last: Tensor | None = None
        for t in range(q.shape[1]):
            S, *found = token(Args(*(x[:, t] for x in (q, k, v, g, beta)), S), S, last)
            last = found[0]
            outs += found if erases else [last]
        return (torch.stack(outs, 1), S)

    return loop


def _args(value_dim: int = 4) -> Args:
    args = make_args(3, "head", value_dim=value_dim, dtype=torch.float64)
    return Args(*(x.requires_grad_() for x in args))


@pytest.mark.parametrize("via", ["make_fx", "compile"])
@pytest.mark.parametrize("token", [value, value_of_an_additive_rule, key, gate])
def test_a_token_may_be_made_of_the_last_output(token: Token, via: str) -> None:
    loop, args = _over_tokens(token), _args()
    rewritten, report = rewrite_graph(loop, args, via)
    assert len(report.rewritten) == 3 and not report.unmatched, str(report)
    values, gradients = errors_against(loop, rewritten, args)
    assert values < 1e-9 and gradients < 1e-9


def before_the_decay(a: Args, S: Tensor, y: Tensor | None) -> Any:
    erased = _read(S, a.k)
    S = _write(S * a.g.exp()[..., None, None], a.k, a.beta[..., None] * (a.v - erased))
    return S, _read(S, a.q), erased


def along_another_key(a: Args, S: Tensor, y: Tensor | None) -> Any:
    S = S * a.g.exp()[..., None, None]
    erased = _read(S, a.k.roll(1, -1))
    S = _write(S, a.k, a.beta[..., None] * a.v - erased)
    return S, _read(S, a.q), erased


def along_another_key_before_the_decay(a: Args, S: Tensor, y: Tensor | None) -> Any:
    erased = _read(S, a.k.roll(1, -1))
    S = _write(S * a.g.exp()[..., None, None], a.k, a.beta[..., None] * a.v - erased)
    return S, _read(S, a.q), erased


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (before_the_decay, "DECAY_ORDER"),
        (along_another_key, "KEYS_DIFFER"),
        (along_another_key_before_the_decay, "DECAY_ORDER"),
    ],
)
def test_an_erase_that_is_an_output_is_an_erase(token: Token, code: str) -> None:
    _, report = rewrite_graph(_over_tokens(token, erases=True), _args(), "make_fx")
    assert not report.rewritten and {m.reason.code for m in report.unmatched} == {code}, str(report)


def _with_a_bonus(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor]:
    """RWKV-6: the token itself counts for another number than its write. Nothing looks at the last state."""
    outs, S = [], torch.zeros_like(S)
    for t in range(q.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(_read(S + beta[:, t, :, None, None] * kv, q[:, t]))
        S = g[:, t].exp()[..., None, None] * S + kv
    return (torch.stack(outs, 1),)


@pytest.mark.parametrize("tokens", [3, 6])
def test_no_token_of_a_recurrence_with_a_bonus_gets_a_policy(tokens: int) -> None:
    args = make_args(tokens, "head")
    with lc.capture():
        program = torch.export.export(_Module(), tuple(args), strict=False)
    report = lc.rewrite(program, "int8").report
    assert not report.sites and "READ_BEFORE_WRITE" in {m.reason.code for m in report.unmatched}, str(report)


class _Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor]:
        return _with_a_bonus(q, k, v, g, beta, S)
