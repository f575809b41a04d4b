"""What a graph reads may change later, and a decay may be exactly 0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc


def _tokens() -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return [normal(2, 2, 4), normal(2, 2, 4), normal(2, 2, 3), normal(2, 2).sigmoid(), normal(2, 2, 4, 3)]


def _token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    S = S * decay
    u = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", S, k))
    S = S + k[..., None] * u[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", S, q), S


def test_a_tensor_that_was_closed_over_may_change() -> None:
    decay = torch.tensor(0.9, dtype=torch.float64)

    def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return _token(q, k, v, beta, S, decay)

    args = _tokens()
    module = lc.rewrite(make_fx(step, pre_dispatch=True)(*args), "exact").module
    decay.fill_(0.5)
    for ours, theirs in zip(module(*args), step(*args), strict=True):
        assert (ours - theirs).abs().max() <= 1e-9


def test_a_decay_of_exactly_0_keeps_its_gradient() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return _token(q, k, v, beta, S, keep.clamp(0, 1)[..., None, None])

    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        args = [*_tokens(), torch.tensor([[0.0, 0.5], [1.0, 0.0]])]
        args = [x.to(dtype) for x in args]
        result = lc.rewrite(make_fx(step, pre_dispatch=True)(*args), "exact")
        assert len(result.report.rewritten) == 1
        gradients = []
        for run in (step, result.module):
            leaves = [x.clone().requires_grad_() for x in args]
            o, S = run(*leaves)
            gradients.append(torch.autograd.grad(o.sum() + S.square().sum(), leaves))
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
