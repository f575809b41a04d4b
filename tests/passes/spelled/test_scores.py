"""Masks whose numbers are picked from a table by the distance of two tokens, and scores that something else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.harness import copies, errors_against, rewrite_graph

B, H, T, K, V = 2, 2, 6, 4, 5
pytestmark = pytest.mark.filterwarnings("ignore")


def _inputs() -> tuple[Tensor, ...]:
    """q, k [B, H, T, K]; v [B, H, T, V]; a [H]; w [H, T]; S [B, H, K, V]; float64."""
    torch.manual_seed(0)
    sizes = [(B, H, T, K), (B, H, T, K), (B, H, T, V), (H,), (H, T), (B, H, K, V)]
    return tuple(torch.randn(s, dtype=torch.float64).requires_grad_() for s in sizes)


def _picked(table: Tensor) -> Tensor:
    """[H, T, T]: entry i - j of a table [H, T] for a token i that sees a token j, 0 for one that does not."""
    at = torch.arange(T)
    return table[:, (at[:, None] - at).clamp(min=0)] * (at[:, None] >= at)


def powers_picked(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    powers = torch.sigmoid(a)[:, None] ** torch.arange(T, dtype=q.dtype)
    return (torch.einsum("bhik,bhjk,hij,bhjv->bhiv", q, k, _picked(powers), v),)


def free_numbers_picked(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    return ((q @ k.mT * _picked(w)) @ v,)


def relu(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    return (torch.relu(q @ k.mT).tril() @ v,)


def squared(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    return ((q @ k.mT).tril() ** 2 @ v,)


def dropped(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    return (F.dropout((q @ k.mT).tril(), 0.5) @ v,)


def detached_between(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    """Chunks between which the gradient is cut: truncated backpropagation."""
    outs = []
    q, k, v = (x.unflatten(2, (2, 3)) for x in (q, k, v))
    c = F.logsigmoid(v[..., 0]).cumsum(-1)
    masks = (c[..., :, None] - c[..., None, :]).tril().exp().tril()
    for i in range(2):
        qc, kc, vc, total, mask = (x[:, :, i] for x in (q, k, v, c, masks))
        outs.append(total.exp()[..., None] * (qc @ S) + (qc @ kc.mT * mask) @ vc)
        S = S * total[..., -1].exp()[..., None, None] + (kc * (total[..., -1:] - total).exp()[..., None]).mT @ vc
        S = S.detach()
    return (torch.cat(outs, 2),)


def softmax(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor]:
    """Attention, which is none of ours and no news."""
    outside = ~torch.ones(T, T, dtype=torch.bool).tril()
    return (torch.relu((q @ k.mT).masked_fill(outside, -torch.inf).softmax(-1)) @ v,)


@pytest.mark.parametrize("via", ["make_fx", "compile"])
def test_powers_of_a_decay_may_be_picked_from_a_table(via: str) -> None:
    args = _inputs()
    rewritten, report = rewrite_graph(powers_picked, args, via)
    (site,) = report.sites
    assert (site.verdict, site.form, site.rule, site.decay) == ("rewritten", "chunk", "additive", "head"), str(report)
    values, gradients = errors_against(powers_picked, rewritten, args)
    assert values < 1e-9 and gradients < 1e-9


@pytest.mark.parametrize(
    ("fn", "codes"),
    [
        (free_numbers_picked, {"CHUNK_DECAY_INPUTS"}),
        (relu, {"CHUNK_OPERATOR"}),
        (squared, {"CHUNK_OPERATOR"}),
        (dropped, {"CHUNK_OPERATOR"}),
        (detached_between, {"CHUNK_OPERATOR"}),
        (softmax, set()),
    ],
)
def test_what_is_told_of_scores_that_are_none_of_a_recurrence(fn: Callable[..., Any], codes: set[str]) -> None:
    args = _inputs()
    rewritten, report = rewrite_graph(fn, args, "make_fx")
    assert not report.sites and {m.reason.code for m in report.unmatched} == codes, str(report)
    torch.manual_seed(0)
    want = fn(*args)
    torch.manual_seed(0)
    assert torch.equal(rewritten(*copies(args))[0], want[0])
