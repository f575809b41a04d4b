"""Calls that do several things at once, and states whose axes stand in another order than usual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc
from tests.passes.spelled.harness import worst_error

pytestmark = pytest.mark.filterwarnings("ignore")


def _inputs(tokens: int = 5) -> list[Tensor]:
    """q, k, v, g, S of float64."""
    r = torch.Generator().manual_seed(0)
    shapes = ((2, tokens, 3, 4), (2, tokens, 3, 4), (2, tokens, 3, 6), (2, tokens, 3), (2, 3, 4, 6))
    return [torch.randn(*s, generator=r, dtype=torch.float64, requires_grad=True) for s in shapes]


def _rewritten(fn: Callable[..., Any], via: str) -> tuple[fx.GraphModule, lc.Report]:
    """The rewritten graph, whose values and gradients are those of `fn`."""
    if via == "export":
        module = nn.Module()
        module.forward = fn  # type: ignore[method-assign]
        result = lc.rewrite(torch.export.export(module, tuple(_inputs()), strict=False), "exact")
        call = result.module.module()
    else:
        result = lc.rewrite(make_fx(fn)(*_inputs()), "exact")
        call = result.module
    outcomes = []
    for f in (fn, call):
        x = _inputs()
        out = f(*x)
        outcomes.append([*out, *torch.autograd.grad(sum(y.square().sum() for y in out), x, materialize_grads=True)])
    assert worst_error(outcomes[1], outcomes[0]) < 1e-9
    return result.module if via == "make_fx" else result.module.graph_module, result.report


def hgrn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """S = f S + (1 - f) v, one lerp a token; its ends and its weight are expanded."""
    f, o = k.sigmoid(), []
    for t in range(q.shape[1]):
        S = torch.lerp(v[:, t, :, None].expand_as(S), S, f[:, t, :, :, None].expand_as(S))
        o.append((S * q[:, t, :, :, None]).sum(2))
    return torch.stack(o, 1), S


def towards_the_value(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """S + w (v - S), the lerp's other end."""
    w, o = k.sigmoid(), []
    for t in range(q.shape[1]):
        S = torch.lerp(S, v[:, t, :, None], w[:, t, :, :, None])
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, 1), S


def katharopoulos(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """Linear attention by a cumulative sum of outer products; the normaliser is the third operand of the read."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = 1 / (torch.einsum("bthk,bthk->bth", q, k.cumsum(1)) + 1e-6)
    kv = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
    return torch.einsum("bthk,bthkv,bth->bthv", q, kv, z), S * 2


def powers_of_a_number(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """Retention as one einsum of four operands."""
    i = torch.arange(q.shape[1])
    gamma = torch.linspace(0.7, 0.95, q.shape[2], dtype=q.dtype)
    D = torch.pow(gamma[:, None, None], (i[:, None] - i).clamp(min=0)) * (i[:, None] >= i)
    return torch.einsum("bihk,bjhk,hij,bjhv->bihv", q, k, D, v), S * 2


def keys_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """The state as [K, V, B, H]: without a decay or an erase, only its reads say which axis is K."""
    S, o = S.permute(2, 3, 0, 1), []
    for t in range(q.shape[1]):
        S = S + k[:, t].permute(2, 0, 1)[:, None] * v[:, t].permute(2, 0, 1)[None]
        o.append((q[:, t].permute(2, 0, 1)[:, None] * S).sum(0).permute(1, 2, 0))
    return torch.stack(o, 1), S.permute(2, 3, 0, 1)


def batched_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """One head of one sequence, under two vmaps that put their axes behind the tokens."""

    def one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        o = []
        for t in range(q.shape[0]):
            S = S * torch.sigmoid(g[t])
            S = S + torch.outer(k[t], v[t])
            o.append(q[t] @ S)
        return torch.stack(o), S

    heads = torch.vmap(one, in_dims=(1, 1, 1, 1, 0), out_dims=(1, 0))
    return torch.vmap(heads)(q, k, v, g, S)


@pytest.mark.parametrize("via", ["export", "make_fx"])
@pytest.mark.parametrize(
    ("fn", "decay", "form"),
    [
        (hgrn2, "channel", "loop"),
        (towards_the_value, "channel", "loop"),
        (katharopoulos, "none", "chunk"),
        (powers_of_a_number, "head", "chunk"),
        (keys_first, "none", "loop"),
        (batched_heads, "head", "loop"),
    ],
)
def test_it_is_one_site(fn: Callable[..., Any], decay: str, form: str, via: str) -> None:
    _, report = _rewritten(fn, via)
    assert [(s.rule, s.decay, s.form, s.verdict) for s in report.sites] == [("additive", decay, form, "rewritten")]
    assert not report.unmatched and not report.notes


def test_what_stays_is_called_as_it_was() -> None:
    """Beside a site: a lerp that is not linear in its state, and an einsum of three that mixes no tokens."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        o, R = towards_the_value(q, k, v, g, S)
        for t in range(q.shape[1]):
            S = torch.lerp(v[:, t, :, None], S, k[:, t, :, :, None].sigmoid()).tanh()
        return o, R, S, torch.einsum("bthk,bthv,bth->bhkv", q.sin(), v.cos(), g)

    graph, report = _rewritten(fn, "export")
    assert [s.verdict for s in report.sites] == ["rewritten"]
    calls = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
    assert calls["aten.lerp.Tensor"] == 5
    assert [n.args[0] for n in graph.graph.nodes if n.target is torch.ops.aten.einsum.default] == [
        "bthk,bthv,bth->bhkv"
    ]


def test_a_lerp_along_values_is_left_with_a_reason() -> None:
    """Its weight varies along keys and values: no decay of any kind here."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        o = []
        for t in range(q.shape[1]):
            w = torch.sigmoid(k[:, t, :, :, None] + v[:, t, :, None])
            S = torch.lerp(v[:, t, :, None].expand_as(S), S, w)
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(o, 1), S

    _, report = _rewritten(fn, "make_fx")
    assert not report.sites
