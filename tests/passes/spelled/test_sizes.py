"""Axes that sizes do not tell apart: K, V, heads or batch of 1, and symbolic sizes equal by chance or by a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from tests.passes.spelled.harness import copies, gradients, recurrence, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

pytestmark = pytest.mark.filterwarnings("ignore")
PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mul": (lambda k, u: k[..., None] * u[..., None, :], lambda S, x: (S * x[..., None]).sum(-2)),
    "matmul": (lambda k, u: k[..., None] @ u[..., None, :], lambda S, x: (x[..., None, :] @ S).squeeze(-2)),
    "einsum": (
        lambda k, u: torch.einsum("bhk,bhv->bhkv", k, u),
        lambda S, x: torch.einsum("bhkv,bhk->bhv", S, x),
    ),
}


def _loop(rule: str, product: str) -> Callable[..., Any]:
    outer, read = PRODUCTS[product]

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(q.shape[1]):
            S = S * (g[:, t].exp()[..., None, None] if g.ndim == 3 else g[:, t].exp()[..., None])
            u = beta[:, t, :, None] * (v[:, t] - read(S, k[:, t])) if rule == "delta" else v[:, t]
            S = S + outer(k[:, t], u)
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1), S

    return fn


# (batch, heads, K, V)
ONES = [(2, 2, 1, 3), (2, 2, 3, 1), (2, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 3), (1, 2, 3, 1), (2, 1, 1, 3), (1, 1, 3, 2)]


@pytest.mark.parametrize(("rule", "decay"), [("delta", "head"), ("additive", "channel")])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("sizes", ONES, ids=str)
def test_axes_of_size_one(sizes: tuple[int, ...], product: str, rule: str, decay: str) -> None:
    names = dict(zip(("batch", "heads", "key_dim", "value_dim"), sizes, strict=True))
    args = tuple(x.requires_grad_() for x in make_args(2, decay, **names, dtype=torch.float64))
    fn = _loop(rule, product)
    rewritten, report = rewrite_graph(fn, args, "make_fx", tracing_mode="fake")
    assert [(s.rule, s.decay, s.form, s.verdict) for s in report.sites] == [(rule, decay, "loop", "rewritten")]
    assert not report.unmatched, str(report)
    own, plain = copies(args), copies(args)
    q, k, v, g, beta, S = plain
    got, want = rewritten(*own), recurrence(q, k, v, g, beta if rule == "delta" else None, S, rule=rule)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients(got, own), gradients(want, plain)) < 1e-9


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x[..., None] * y[..., None] + 1.0,
        lambda x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True)) + y,
        lambda x, y: x + 0.5 * x[:, :1] * y,
    ],
    ids=["products", "norm", "gate"],
)
def test_ordinary_code_on_axes_of_size_one_is_no_recurrence(fn: Callable[..., Tensor]) -> None:
    x, y = torch.randn(2, 1, 1, 5), torch.randn(2, 1, 1, 5)
    _, report = rewrite_graph(lambda x, y: (fn(x, y), x), (x, y), "make_fx")
    assert not report.sites and not report.unmatched, str(report)


def _compiled(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="lattn_compile", fullgraph=True, dynamic=True, options={"policy": "exact"})
    own, plain = copies(args), copies(args)
    with recorded():
        got = compiled(*own)
    report = lc.last_report()
    want = fn(*plain)
    assert worst_error(got, want) < 1e-5
    assert worst_error(gradients(got, own), gradients(want, plain)) < 1e-5
    return report


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rule", "decay"), [("delta", "channel"), ("additive", "head")])
def test_dynamic_sizes_that_are_one_symbol(rule: str, decay: str, size: int) -> None:
    """Batch, heads, K and V share a symbol; products of it are taken apart again."""
    args = make_args(3, decay, batch=size, heads=size, key_dim=size, value_dim=size)
    report = _compiled(_loop(rule, "einsum"), tuple(x.requires_grad_() for x in args))
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [(rule, decay, "rewritten")], str(report)


def test_dynamic_sizes_that_are_halves_of_others() -> None:
    """KDA, the state value-major: K and V are parts of a projection, equal to those of the state by a guard."""

    def fn(x: Tensor, S: Tensor) -> Any:
        D = x.shape[-1]
        K = D // 4
        q, k, v, g = x[..., :K], x[..., K : D // 2], x[..., D // 2 :], x[..., :K]
        q, k, S, outs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), S.mT, []
        for t in range(x.shape[1]):
            S = S * torch.sigmoid(g[:, t])[..., None, :]
            S = S + (v[:, t] - (S @ k[:, t][..., None])[..., 0])[..., None] * k[:, t][..., None, :]
            outs.append((S @ q[:, t][..., None])[..., 0])
        return torch.stack(outs, 1), S.mT

    report = _compiled(fn, (torch.randn(2, 3, 2, 16).requires_grad_(), torch.randn(2, 2, 4, 8).requires_grad_()))
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("delta", "channel", "rewritten")], str(report)


def test_heads_folded_into_the_batch_where_both_are_one_symbol() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        B, T, H, K = q.shape
        flat = lambda x, t: x[:, t].reshape(B * H, 1, -1)  # noqa: E731
        W, outs = S.reshape(B * H, K, -1), []
        for t in range(T):
            W = g[:, t].exp().reshape(B * H, K, 1) * W
            kt = flat(k, t)
            W = torch.baddbmm(W, kt.mT, beta[:, t].reshape(B * H, 1, 1) * (flat(v, t) - kt @ W))
            outs.append((flat(q, t) @ W).view(B, H, -1))
        return torch.stack(outs, 1), W.view(S.shape)

    args = make_args(2, "channel", batch=2, heads=2, key_dim=3, value_dim=5)
    report = _compiled(fn, tuple(x.requires_grad_() for x in args))
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("delta", "channel", "rewritten")], str(report)
