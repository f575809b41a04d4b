"""Every spelling of the corpus: what must be recognised is, with its rule and decay, and equal; the rest is left alone.

The recurrence is the plain loop of `harness.recurrence`. `LATTN_CORPUS=full` runs every T through every tracer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.spelled.corpus import MATCH, REFUSE, Args, make_args
from tests.passes.spelled.harness import VIAS, copies, gradients, recurrence, rewrite_graph, worst_error
from tests.passes.spelled.registry import Match, Refuse

FULL = os.environ.get("LATTN_CORPUS") == "full"
TOKENS = (1, 2, 5, 17)
# Normalised, the graphs of the three tracers are nearly one; export brings loops and compile brings steps.
CHEAP = {"export": (5,), "compile": (1,), "make_fx": (2,)}


def _vias(i: int, case: Match) -> list[str]:
    """Every tracer, or `make_fx` and, from spelling to spelling, one of the others."""
    able = [via for via in VIAS if via not in case.untraceable]
    others = [via for via in able if via != "make_fx"]
    return able if FULL or len(others) < 2 else [via for via in able if via != others[i % 2]]


# One spelling in eight is run with the longest loop, the others with the shortest.
GRID = [
    (name, via, tokens)
    for i, (name, case) in enumerate(MATCH.items())
    for via in _vias(i, case)
    for tokens in (TOKENS if FULL else (17,) if via == "make_fx" and not i % 8 else CHEAP[via])
    if tokens >= case.shortest
]
# Tracers say what they do not like about in-place code and .grad of copies; none of it is about the rewrite.
pytestmark = pytest.mark.filterwarnings("ignore")


def _match_args(case: Match, tokens: int, dtype: torch.dtype = torch.float32) -> Args:
    args = make_args(tokens, case.decay, heads=case.heads, dtype=dtype)
    return Args(*(x.requires_grad_(not case.mutates) for x in args))


def _refuse_args(case: Refuse, tokens: int, dtype: torch.dtype = torch.float32) -> Args:
    args = make_args(tokens, case.decay, value_dim=4 if case.square else 6, dtype=dtype)
    return Args(*(x.requires_grad_() for x in args))


def _values(fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """What it returns, and its argument S after the call."""
    own = copies(args)
    torch.manual_seed(0)
    return [*fn(*own), own[-1]]


def _grads(fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    own = copies(args)
    torch.manual_seed(0)
    return gradients(fn(*own), own)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", MATCH)
def test_what_must_be_recognised_is_the_recurrence(name: str, tokens: int) -> None:
    case = MATCH[name]
    args = _match_args(case, tokens, torch.float64)
    with torch.no_grad():
        want = recurrence(**case.meaning(args))
        got = case.fn(*copies(args))
    assert worst_error(got, want) < 1e-9


@pytest.mark.parametrize("name", REFUSE)
def test_what_must_be_left_alone_is_no_recurrence(name: str) -> None:
    """Neither rule with any decay of these inputs gives its values (or gradients)."""
    case = REFUSE[name]
    args = _refuse_args(case, 5, torch.float64)
    got = _grads(case.fn, args) if case.differs == "gradients" else _values(case.fn, args)[:2]
    for rule in ("delta", "additive"):
        beta = args.beta if rule == "delta" else None
        for g in (args.g, None):
            plain = recurrence(args.q, args.k, args.v, g, beta, args.S, rule=rule)
            want = gradients(plain, args) if case.differs == "gradients" else plain
            if got[1].shape == want[1].shape:
                assert worst_error(got, want) > 1e-4


@pytest.mark.parametrize(("name", "via", "tokens"), GRID)
def test_recognised_and_equal(name: str, via: str, tokens: int) -> None:
    case = MATCH[name]
    args = _match_args(case, tokens)
    rewritten, report = rewrite_graph(case.fn, args, via)

    assert report.rewritten, f"nothing found\n{report}"
    if not case.company:
        assert not report.unmatched, str(report)
    assert {(s.rule, s.decay, s.verdict) for s in report.sites} == {(case.rule, case.decay, "rewritten")}

    agree = _agrees if case.stored is None else _nearly_agrees
    assert agree(_values(rewritten, args), _values(case.fn, args))
    if not case.mutates:
        # Gradients are those of the plain loop: code that works in place has none of its own, and where a state is
        # stored the loop's rounding is straight-through (semantics.md §7) while the spelling's casts round gradients.
        assert agree(_grads(rewritten, args), gradients(recurrence(**case.meaning(args)), args))


def _agrees(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return worst_error(got, want) < 1e-5


def _nearly_agrees(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """All but 2 % of the elements agree at 1e-5, and those within one unit of a bf16: two orders of summation may
    round to neighbouring stored values, rarely."""
    for a, b in zip(got, want, strict=True):
        difference = (a.double() - b.double()).abs() / b.double().abs().max().clamp_min(1)
        if not (difference < 2**-7).all() or (difference > 1e-5).double().mean() > 0.02:
            return False
    return True


@pytest.mark.parametrize("via", VIAS if FULL else ["make_fx"])
@pytest.mark.parametrize("name", REFUSE)
def test_left_alone_with_a_reason(name: str, via: str) -> None:
    case = REFUSE[name]
    args = _refuse_args(case, 5)
    rewritten, report = rewrite_graph(case.fn, args, via)

    if not case.either:
        assert not report.rewritten, str(report)
    if not report.rewritten:
        assert report.unmatched or report.left, "no word about it"
        assert all(x.reason and x.reason.text for x in [*report.unmatched, *report.left])

    assert worst_error(_values(rewritten, args), _values(case.fn, args)) < 1e-5
    assert worst_error(_grads(rewritten, args), _grads(case.fn, args)) < 1e-5
