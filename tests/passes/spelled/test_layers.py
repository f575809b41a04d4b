"""Layers as people write them: projections, a normalised key, gates and a loop from an empty state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lattn_compile.testing.backend import recorded


class Layer(nn.Module):
    def __init__(self, width: int = 24, heads: int = 3, key: int = 8, value: int = 8) -> None:
        super().__init__()
        self.sizes = [heads * key, heads * key, heads * value, heads, heads]
        self.heads, self.key, self.value = heads, key, value
        self.project, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(heads * value, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v, g, beta = self.project(x).split(self.sizes, -1)
        q, k = (F.normalize(y.view(B, T, self.heads, self.key), dim=-1) for y in (q, k))
        v, g, beta = v.view(B, T, self.heads, self.value), -F.softplus(g), beta.sigmoid()
        state, rows = x.new_zeros(B, self.heads, self.key, self.value), []
        for t in range(T):
            state = state * g[:, t, :, None, None].exp()
            update = (v[:, t] - (state * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
            state = state + k[:, t, ..., None] * update[:, :, None]
            rows.append((state * q[:, t, ..., None]).sum(-2))
        return self.out(torch.stack(rows, 1).flatten(2))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_decay_of_an_empty_state_does_not_draw_the_layer_into_the_check(training: bool) -> None:
    """F.normalize has a clamp, which no random draw can check. The check must begin behind it, whatever token 0's decay
    is computed from: that multiplies zeros, and no new op reads it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = Layer().double(), torch.randn(2, 6, 24, dtype=torch.float64)
    with recorded() as record, torch.set_grad_enabled(training):
        got = torch.compile(layer, backend="lattn_compile", options={"policy": "exact"})(x)
        want = layer(x)
        assert [(s.kind, s.form, s.verdict) for s in record.report.sites] == [("gdn", "loop", "rewritten")]
    assert (got - want).abs().max() < 1e-12
    if training:
        ours, theirs = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (got, want))
        assert all((a - b).abs().max() < 1e-9 for a, b in zip(ours, theirs, strict=True))
