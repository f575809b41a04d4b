"""Trace a function three ways and rewrite it through the public API; the plain recurrence to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc
from lattn_compile.report import Report
from lattn_compile.testing.backend import recorded

VIAS = ("make_fx", "export", "compile")


class _Layer(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        return self.fn(q, k, v, g, beta, S)


def copies(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Fresh leaves with the same values and `requires_grad`."""
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in args)


def rewrite_graph(
    fn: Callable[..., Any], args: Sequence[Tensor], via: str, *, tracing_mode: str = "real"
) -> tuple[Callable[..., Any], Report]:
    """`fn` traced on `args` and rewritten under the policy `exact`.

    Args:
        fn: a spelling. args: its six tensors; never changed.
        via: "make_fx" (pre-dispatch ATen), "export" (not strict), or "compile" (a Dynamo graph, run node by node
            without Inductor; later calls must need gradients of the same arguments, or Dynamo compiles once more).
        tracing_mode: make_fx's. "real" gives every node a fake mode of its own, "fake" one to all.
    Returns:
        What replaces `fn`, and the report.
    """
    if via == "make_fx":
        trace = make_fx(fn, tracing_mode=tracing_mode, pre_dispatch=True)
        result = lc.rewrite(trace(*_detached(args)), "exact")
        return result.module, result.report
    if via == "export":
        result = lc.rewrite(torch.export.export(_Layer(fn), _detached(args), strict=False), "exact")
        return result.module.module(), result.report
    assert via == "compile", via
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})

    def run(*args: Tensor) -> Any:
        with recorded():
            return compiled(*args)

    run(*copies(args))
    report = lc.last_report()
    assert report is not None
    return run, report


def _detached(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone() for x in args)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    S: Tensor | None,
    *,
    rule: str,
    scale: float = 1.0,
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """semantics.md §2, one sequence, head and token at a time, in float64.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]; value head j has key head j // (HV / H). g: None, [B, T, HV] or
            [B, T, HV, K]. beta: None or [B, T, HV]. S: None or [B, HV, K, V].
        stored: round the state to this dtype before the first and after every token, straight through for gradients.
    Returns:
        o [B, T, HV, V] and the final state [B, HV, K, V], both float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    (batch, tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[2:]
    outputs, finals = [], []
    for b in range(batch):
        for j in range(heads):
            h = j // (heads // key_heads)
            state = v.new_zeros(key_dim, value_dim) if S is None else S[b, j].double()
            state = _rounded(state, stored)
            for t in range(tokens):
                if g is not None:
                    state = g[b, t, j].double().exp().reshape(-1, 1) * state
                u = v[b, t, j] - k[b, t, h] @ state if rule == "delta" else v[b, t, j]
                if beta is not None:
                    u = beta[b, t, j].double() * u
                state = state + torch.outer(k[b, t, h], u)
                outputs.append(scale * (q[b, t, h] @ state))
                state = _rounded(state, stored)
            finals.append(state)
    o = torch.stack(outputs).reshape(batch, heads, tokens, value_dim).transpose(1, 2)
    return o, torch.stack(finals).reshape(batch, heads, key_dim, value_dim)


def _rounded(state: Tensor, stored: torch.dtype | None) -> Tensor:
    if stored is None:
        return state
    return state + (state.to(stored).double() - state).detach()


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of one fixed random projection of `outputs`; zeros for an input that was not used."""
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        loss = loss + (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(wanted, found, strict=True)]


def worst_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest difference of one tensor's elements, relative to its largest element (at least 1)."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape, f"{tuple(a.shape)} instead of {tuple(b.shape)}"
        if a.numel():
            difference = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1)
            # A NaN is no agreement.
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


def errors_against(
    meaning: Callable[..., Sequence[Tensor]], rewritten: Callable[..., Sequence[Tensor]], args: Sequence[Tensor]
) -> tuple[float, float]:
    """`worst_error` of what `rewritten` returns for `args`, and of its gradients."""
    own, plain = copies(args), copies(args)
    got, want = rewritten(*own), meaning(*plain)
    return worst_error(got, want), worst_error(gradients(got, own), gradients(want, plain))
