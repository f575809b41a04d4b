"""Parallel forms that are normalised by their row sums, and cumulative sums of outer products: two recurrences, or one,
with everything between them left as it is; and what is nearly one, which is left with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.harness import copies, gradients, rewrite_graph, worst_error

B, H, T, K, V = 2, 3, 7, 4, 5
pytestmark = pytest.mark.filterwarnings("ignore")


def _inputs() -> tuple[Tensor, ...]:
    """q, k [B, H, T, K], both positive; v [B, H, T, V]; a [B, H, T]; float64."""
    torch.manual_seed(0)
    sizes = [(B, H, T, K), (B, H, T, K), (B, H, T, V), (B, H, T)]
    return tuple(F.softplus(torch.randn(s, dtype=torch.float64)).requires_grad_() for s in sizes)


def _by_token(a: Tensor) -> Tensor:
    total = F.logsigmoid(a).cumsum(-1)
    outside = ~torch.ones(T, T, dtype=torch.bool).tril()
    return torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(outside, -math.inf))


def _by_head() -> Tensor:
    at = torch.arange(T, dtype=torch.float64)
    log = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64)))
    return torch.tril(torch.exp((at[:, None] - at) * log[:, None, None]))


def divided_behind(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT)
    return (scores @ v) / (scores.sum(-1, keepdim=True) + 1e-6)


def divided_before(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT)
    return (scores / scores.sum(-1, keepdim=True)) @ v


def einsum_and_mask(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    outside = ~torch.ones(T, T, dtype=torch.bool).tril()
    scores = torch.einsum("bhtk,bhsk->bhts", q, k).masked_fill(outside, 0.0)
    return torch.einsum("bhts,bhsv->bhtv", scores, v) / scores.sum(-1)[..., None]


def decay_by_token(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = q @ k.mT * _by_token(a)
    return (scores @ v) / scores.sum(-1, keepdim=True).abs().clamp(min=1)


def retnet(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """As published: the sum is detached."""
    scores = q @ k.mT * _by_head() * K**-0.5
    return (scores / scores.detach().sum(-1, keepdim=True).abs().clamp(min=1)) @ v


def own_normaliser(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    return (torch.tril(q @ k.mT) @ v) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def sum_of_outer_products(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    states = torch.cumsum(k[..., :, None] * v[..., None, :], dim=2)
    return (q[..., None] * states).sum(-2)


FORMS: dict[Callable[..., Tensor], tuple[str, int]] = {
    divided_behind: ("none", 2),
    divided_before: ("none", 2),
    einsum_and_mask: ("none", 2),
    decay_by_token: ("head", 2),
    retnet: ("head", 2),
    own_normaliser: ("none", 1),
    sum_of_outer_products: ("none", 1),
}


def sums_of_columns(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT)
    return (scores @ v) / scores.sum(-2)[..., None]


def divided_by_column(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT)
    return (scores / scores.sum(-1)[..., None, :]) @ v


def divided_by_transposed_sums(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """As many values as tokens: dividing behind would go, and be wrong."""
    scores = torch.tril(q @ k.mT)
    return (scores / scores.sum(-1, keepdim=True).transpose(-1, -2)) @ torch.cat([v, v[..., : T - V]], -1)


def strictly_causal(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT, -1)
    return (scores @ v) / (1 + scores.sum(-1, keepdim=True))


def sums_of_squares(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(q @ k.mT)
    return (scores @ v) / (scores * scores).sum(-1, keepdim=True)


def documents(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    number = (a[:, 0] > 0.7).cumsum(-1)
    same = (number[:, :, None] == number[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    return ((q @ k.mT) * same[:, None]) @ v


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    scores = torch.tril(torch.exp(q @ k.mT))
    return (scores @ v) / scores.sum(-1, keepdim=True)


LEFT: dict[Callable[..., Tensor], set[str]] = {
    sums_of_columns: {"CHUNK_NOT_EQUAL"},
    divided_by_column: {"CHUNK_NOT_EQUAL"},
    divided_by_transposed_sums: {"CHUNK_NOT_EQUAL"},
    strictly_causal: {"CHUNK_NOT_EQUAL"},
    sums_of_squares: {"CHUNK_NOT_EQUAL"},
    documents: {"CHUNK_INPUTS"},
    softmax_attention: set(),
}


def _rewritten(form: Callable[..., Tensor]) -> Any:
    def layer(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor]:
        return (form(q, k, v, a),)

    args = _inputs()
    rewritten, report = rewrite_graph(layer, args, "make_fx", tracing_mode="fake")
    own, original = copies(args), copies(args)
    got, want = rewritten(*own), layer(*original)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients(got, own), gradients(want, original)) < 1e-9
    return report


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_a_normalised_form_is_rewritten(form: Callable[..., Tensor]) -> None:
    report = _rewritten(form)
    decay, sites = FORMS[form]
    assert [(s.form, s.rule, s.decay, s.verdict) for s in report.sites] == [
        ("chunk", "additive", decay, "rewritten")
    ] * sites, str(report)
    assert not report.unmatched, str(report)
    assert sorted(s.shapes["V"] for s in report.sites) == [1, V][2 - sites :]


@pytest.mark.parametrize("form", LEFT, ids=lambda f: f.__name__)
def test_what_is_nearly_one_is_left_with_a_reason(form: Callable[..., Tensor]) -> None:
    report = _rewritten(form)
    assert not report.rewritten and {u.reason.code for u in report.unmatched} == LEFT[form], str(report)


def test_nothing_is_left_of_the_scores() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor]:
        return (divided_before(q, k, v, a),)

    rewritten, _ = rewrite_graph(layer, _inputs(), "make_fx", tracing_mode="fake")
    assert not [n for n in rewritten.graph.nodes if "matmul" in str(n.target) or "tril" in str(n.target)]
