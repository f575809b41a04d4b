"""Vmapped sections are written out before a graph is searched, and mean what they meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import lattn_compile as lc
from lattn_compile.passes.devmap import without_vmap
from lattn_compile.testing.backend import recorded
from tests.passes.spelled.harness import copies, gradients, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

pytestmark = pytest.mark.filterwarnings("ignore")


def _head(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of one head: vectors and a matrix."""
    S = S * torch.exp(g)
    S = S + torch.outer(k, beta * (v - k @ S))
    return S, q @ S


def stepwise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """vmap over batch and heads, once a token."""
    step, outs = torch.vmap(torch.vmap(_head)), []
    for t in range(q.shape[1]):
        S, o = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
    return torch.stack(outs, 1), S


def over_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The whole loop under one vmap over heads, the axis in another place of each input."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for qt, kt, vt, gt in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), strict=True):
            S = gt.exp()[:, None, None] * S + kt.unsqueeze(-1) * vt.unsqueeze(1)
            outs.append((qt.unsqueeze(1) @ S).squeeze(1))
        return torch.stack(outs, 1), S

    return torch.func.vmap(loop, in_dims=(2, 2, 2, 2, 1), out_dims=(2, 1))(q, k, v, g, S)


def from_zeros(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor]:
    """A loop of one head over what it makes itself, zeros and numbers."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        state, outs = torch.zeros(k.shape[-1], v.shape[-1]), []
        for t in range(2):
            state = g[t].exp() * torch.tensor(0.5) * state + torch.outer(k[t], v[t])
            outs.append(q[t] @ state)
        return torch.stack(outs)

    return (torch.vmap(torch.vmap(loop, in_dims=1, out_dims=1))(q, k, v, g),)


@pytest.mark.parametrize(
    ("fn", "rule", "via"),
    # export cannot lift the constants that indexing makes inside a vmap
    [
        (stepwise, "delta", "compile"),
        (stepwise, "delta", "export"),
        (over_heads, "additive", "compile"),
        (from_zeros, "additive", "compile"),
    ],
)
def test_a_vmapped_recurrence_is_found(fn: Callable[..., Any], rule: str, via: str) -> None:
    args = tuple(x.requires_grad_() for x in make_args(2, "head"))
    rewritten, report = rewrite_graph(fn, args, via)
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [(rule, "head", "rewritten")], str(report)
    a, b = copies(args), copies(args)
    got, want = rewritten(*a), fn(*b)
    assert worst_error(got, want) < 1e-5
    assert worst_error(gradients(got, a), gradients(want, b)) < 1e-5


def _captured(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def test_what_is_written_out_computes_the_same_and_the_original_stays() -> None:
    args = make_args(2, "head")
    gm = _captured(stepwise, *args)
    before = str(gm.graph)
    made = without_vmap(gm)
    assert str(gm.graph) == before
    assert not any("functorch" in str(getattr(n.target, "__module__", "")) for n in made.graph.nodes)
    inputs = [dict(zip("qkvgbS", args, strict=True))[n.name.split("_")[1][0].replace("s", "S")]
              for n in made.graph.find_nodes(op="placeholder")]  # fmt: skip
    assert worst_error(made(*inputs), stepwise(*args)) < 1e-6


def test_a_graph_without_vmap_is_not_copied() -> None:
    gm = _captured(lambda x: x + 1, torch.ones(2))
    assert without_vmap(gm) is gm


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.vmap(lambda y: y + torch.rand(3), randomness="different")(x),
        lambda x: torch.vmap(torch.func.grad(lambda y: (y * y).sum()))(x),
    ],
    ids=["random", "grad inside"],
)
def test_what_cannot_be_written_out_stays(fn: Callable[[Tensor], Tensor]) -> None:
    gm = _captured(fn, torch.ones(2, 3))
    assert without_vmap(gm) is gm


def test_vmap_beside_ordinary_code_keeps_its_meaning_through_the_backend() -> None:
    """Nothing to find: the graph that is compiled is the original."""

    def fn(x: Tensor) -> Tensor:
        return torch.vmap(lambda y: torch.outer(y, y).sum(0) + y)(x) * 2

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
    x = torch.randn(3, 4)
    assert worst_error([compiled(x)], [fn(x)]) < 1e-6
    report = lc.last_report()
    assert report is not None and not report.sites


def test_sizes_may_be_symbolic() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        over_heads, backend="lattn_compile", fullgraph=True, dynamic=True, options={"policy": "exact"}
    )
    args = tuple(x.requires_grad_() for x in make_args(2, "head"))
    with recorded():
        got = compiled(*args)
    report = lc.last_report()
    assert report is not None
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("additive", "head", "rewritten")], str(report)
    assert worst_error(got, over_heads(*args)) < 1e-5


@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_the_operator_itself_may_be_vmapped(policy: str) -> None:
    """Its values inside are batched: what a rewrite is checked by outside of the vmap cannot be run on them."""

    def fn(*x: Tensor) -> Tensor:
        return torch.vmap(lambda *y: lc.linear_attention(*(z[None] for z in y))[0])(*x)

    torch._dynamo.reset()
    args = make_args(5, "head")[:5]
    with recorded():
        got = torch.compile(fn, backend="lattn_compile", fullgraph=True, options={"policy": policy})(*args)
    want, _ = lc.linear_attention(*args, policy=policy)
    assert worst_error([got[:, 0]], [want]) < 1e-5
    report = lc.last_report()
    assert report is not None and [s.verdict for s in report.sites] == ["rewritten"]
