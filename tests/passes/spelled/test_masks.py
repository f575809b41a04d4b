"""Masked tokens: sequences that have ended, padding, documents that begin. However a mask is written, what comes of it
is a decay and a strength: a token that is skipped has g = 0 and beta = 0, a state that is cleared g = -inf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.spelled.harness import errors_against, recurrence, rewrite_graph
from tests.passes.spelled.registry import make_args

B, T = 3, 4
pytestmark = pytest.mark.filterwarnings("ignore")

# (mask of the tokens that are kept or cleared, as the shape of a state allows; old state, new state) -> state
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


def _in_place(m: Tensor, old: Tensor, new: Tensor) -> Tensor:
    kept = old.clone()
    kept.mul_(~m).add_(new * m)
    return kept


SKIPS: dict[str, Keep] = {
    "where": lambda m, old, new: torch.where(m, new, old),
    "where not": lambda m, old, new: torch.where(~m, old, new),
    "where of numbers": lambda m, old, new: torch.where(m.to(old.dtype) != 0, new, old),
    "float mask": lambda m, old, new: m.to(new.dtype) * new + (1 - m.to(new.dtype)) * old,
    "boolean products": lambda m, old, new: new * m + old * ~m,
    "lerp": lambda m, old, new: torch.lerp(old, new, m.to(new.dtype)),
    "difference": lambda m, old, new: old + (new - old) * m,
    "two fills": lambda m, old, new: new.masked_fill(~m, 0) + old.masked_fill(m, 0.0),
    "in place": _in_place,
    "two masks": lambda m, old, new: torch.where(m & m.new_ones(()), new, old),
}
CLEARS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda m, S: S.masked_fill(m, 0.0),
    "where a number": lambda m, S: torch.where(m, 0.0, S),
    "where zeros": lambda m, S: torch.where(~m, S, torch.zeros_like(S)),
    "product": lambda m, S: S * (1 - m.to(S.dtype)),
    "in place": lambda m, S: S.clone().masked_fill_(m, 0),
}


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", x, S)


def _update(rule: str, S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    S = S * (g.exp()[..., None, None] if g.ndim == 2 else g.exp()[..., None])
    u = beta[..., None] * (v - _read(S, k) if rule == "delta" else v)
    return S + k[..., :, None] * u[..., None, :]


def _case(decay: str) -> tuple[Tensor, ...]:
    """The six tensors, and a mask [B, T]."""
    args = make_args(T, decay, batch=B, dtype=torch.float64)
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) > 0.4
    assert mask.any() and not mask.all()
    return (*(x.requires_grad_() for x in args), mask)


def _check(
    fn: Callable[..., Any], args: tuple[Tensor, ...], kind: tuple[str, str], meaning: Callable[..., Any]
) -> None:
    rewritten, report = rewrite_graph(fn, args, "make_fx", tracing_mode="fake")
    assert {(s.rule, s.decay, s.verdict, s.form) for s in report.sites} == {(*kind, "rewritten", "loop")}, str(report)
    assert len(report.sites) == 1 and not report.unmatched, str(report)
    assert max(errors_against(meaning, rewritten, args)) < 1e-9


@pytest.mark.parametrize("kind", [("delta", "head"), ("additive", "channel")])
@pytest.mark.parametrize("name", SKIPS)
def test_a_masked_token_leaves_the_state_alone(name: str, kind: tuple[str, str]) -> None:
    rule, decay = kind
    args = _case(decay)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor) -> Any:
        outs = []
        for t in range(T):
            new = _update(rule, S, k[:, t], v[:, t], g[:, t], beta[:, t])
            S = SKIPS[name](mask[:, t, None, None, None], S, new)
            outs.append(_read(S, q[:, t]))
        return torch.stack(outs, 1), S

    def meaning(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor) -> Any:
        live = mask.reshape(B, T, *[1] * (g.dim() - 2))
        return recurrence(q, k, v, torch.where(live, g, 0.0), beta * mask[..., None], S, rule=rule)

    _check(loop, args, kind, meaning)


@pytest.mark.parametrize("after", [False, True], ids=["before the token", "after the token"])
@pytest.mark.parametrize("kind", [("delta", "head"), ("additive", "channel")])
@pytest.mark.parametrize("name", CLEARS)
def test_a_state_is_cleared(name: str, kind: tuple[str, str], after: bool) -> None:
    rule, decay = kind
    args = _case(decay)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor) -> Any:
        outs = []
        for t in range(T):
            here = mask[:, t, None, None, None]
            S = S if after else CLEARS[name](here, S)
            S = _update(rule, S, k[:, t], v[:, t], g[:, t], beta[:, t])
            outs.append(_read(S, q[:, t]))
            S = CLEARS[name](here, S) if after else S
        return torch.stack(outs, 1), S

    def meaning(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor) -> Any:
        cleared = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1) if after else mask
        cleared = cleared.reshape(B, T, *[1] * (g.dim() - 2))
        o, S = recurrence(q, k, v, g.masked_fill(cleared, -torch.inf), beta, S, rule=rule)
        return o, S.masked_fill(mask[:, -1, None, None, None], 0) if after else S

    _check(loop, args, kind, meaning)


def test_skipped_tokens_and_cleared_states_together() -> None:
    args = (*_case("head"), torch.rand(B, T, generator=torch.Generator().manual_seed(6)) > 0.6)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor, begins: Tensor) -> Any:
        outs = []
        for t in range(T):
            S = S.masked_fill(begins[:, t, None, None, None], 0.0)
            new = _update("delta", S, k[:, t], v[:, t], g[:, t], beta[:, t])
            S = torch.where(mask[:, t, None, None, None], new, S)
            outs.append(_read(S, q[:, t]))
        return torch.stack(outs, 1), S

    def meaning(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, mask: Tensor, begins: Tensor
    ) -> Any:
        g = torch.where(mask[..., None], g, 0.0).masked_fill(begins[..., None], -torch.inf)
        return recurrence(q, k, v, g, beta * mask[..., None], S, rule="delta")

    _check(loop, args, ("delta", "head"), meaning)


def test_a_mask_of_lengths() -> None:
    """Made anew at every token, of an integer input."""
    args = (*_case("head")[:6], torch.tensor([1, 4, 2]))

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, lengths: Tensor) -> Any:
        outs = []
        for t in range(T):
            new = _update("delta", S, k[:, t], v[:, t], g[:, t], beta[:, t])
            S = torch.where((t < lengths)[:, None, None, None], new, S)
            outs.append(_read(S, q[:, t]))
        return torch.stack(outs, 1), S

    def meaning(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, lengths: Tensor) -> Any:
        live = (torch.arange(T) < lengths[:, None])[..., None]
        return recurrence(q, k, v, torch.where(live, g, 0.0), beta * live, S, rule="delta")

    _check(loop, args, ("delta", "head"), meaning)
