"""Functions with a kink: an equality is proved through it, and a wrong one is not, however far the kink lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.harness import copies, gradients, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

pytestmark = pytest.mark.filterwarnings("ignore")
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "leaky_relu": F.leaky_relu,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1.0, 0.5),
    "clamp_min": lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "hardtanh": F.hardtanh,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "gelu": F.gelu,
}


def _loop(kink: Callable[[Tensor], Tensor], undone: bool = False) -> Callable[..., Any]:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(q.shape[1]):
            kt = kink(k[:, t])
            S = S * g[:, t, :, None, None].exp()
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", kt, S))
            S = S + kt[..., :, None] * u[..., None, :]
            o = torch.einsum("bhk,bhkv->bhv", kink(q[:, t]), S)
            outs.append(kink(o) if undone else o)
        return torch.stack(outs, 1), S

    return fn


@pytest.mark.parametrize("name", KINKS)
def test_keys_with_a_kink_inside_the_step(name: str) -> None:
    args = tuple(x.requires_grad_() for x in make_args(2, "head", dtype=torch.float64))
    fn = _loop(KINKS[name])
    rewritten, report = rewrite_graph(fn, args, "make_fx", tracing_mode="fake")
    assert [(s.rule, s.form, s.verdict) for s in report.sites] == [("delta", "loop", "rewritten")], str(report)
    a, b = copies(args), copies(args)
    got, want = rewritten(*a), fn(*b)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients(got, a), gradients(want, b)) < 1e-9


def test_decays_that_are_clamped() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(q.shape[1]):
            S = S * (g[:, t, :, None, None] + 1.2).clamp(0.1, 1.0) + k[:, t, :, :, None] * v[:, t, :, None]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(outs, 1), S

    args = make_args(2, "head", dtype=torch.float64)
    rewritten, report = rewrite_graph(fn, args, "make_fx", tracing_mode="fake")
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("additive", "head", "rewritten")], str(report)
    assert worst_error(rewritten(*args), fn(*args)) < 1e-9
