"""Which graphs are worth a functional copy: in doubt all, and none of the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lattn_compile.passes.spelled.prefilter import may_hold_a_recurrence

T = 6


def looked_at(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> bool:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True)(*(torch.randn(s) for s in shapes))
    return may_hold_a_recurrence(graphs[0])


def decay_mask() -> Tensor:
    i = torch.arange(T)
    return torch.where(i[:, None] >= i, 0.9 ** (i[:, None] - i), 0.0)


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * decay_mask()) @ v


def retention_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)) / 2.0
    return torch.bmm(scores.masked_fill(decay_mask() == 0, 0.0), v)


def projected(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = F.linear(x, w).chunk(3, -1)
    return torch.matmul(torch.matmul(q, k.mT) * decay_mask(), v)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.5).softmax(-1) @ v


def gated_mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return ((x @ a) * F.silu(x @ b)) @ c


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a) @ b


@pytest.mark.parametrize("fn", [retention, retention_scaled])
def test_a_parallel_form_without_any_other_sign(fn: Callable[..., Any]) -> None:
    assert looked_at(fn, *[(2, T, 4)] * 3)


def test_a_parallel_form_of_projections() -> None:
    assert looked_at(projected, (2, T, 4), (12, 4))


def test_what_every_model_has_is_no_sign() -> None:
    assert not looked_at(attention, *[(2, T, 4)] * 3)
    assert not looked_at(gated_mlp, (2, T, 4), (4, 5), (4, 5), (5, 4))
    assert not looked_at(low_rank, (2, T, 4), (4, 2), (2, 4))
