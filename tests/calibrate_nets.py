"""Small models of gated delta rules, called or spelled out, in and out of checkpoints and graph breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lattn_compile as lc

H, HV, K, V = 2, 4, 8, 12


class Layer(nn.Module):
    """A gated delta rule between two projections; `spelled`: token by token in plain torch."""

    def __init__(self, seed: int = 0, *, spelled: bool = False, **options: Any) -> None:
        super().__init__()
        self.spelled, self.options = spelled, options
        self.inner = nn.Linear(16, 2 * H * K + HV * V + 2 * HV)
        self.outer = nn.Linear(HV * V, 16)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v, beta, g = self.inner(x).split([H * K, H * K, HV * V, HV, HV], -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        beta, g = beta.sigmoid(), -nn.functional.softplus(g - 4)
        if self.spelled:
            o = _spelled(*(y.repeat_interleave(HV // H, 2) for y in (q, k)), v, g, beta)
        else:
            o, _ = lc.linear_attention(q, k, v, g, beta, **self.options, **given)
        return x + self.outer(o.flatten(2))


def _spelled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    S, outputs = v.new_zeros(v.shape[0], HV, K, V), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(outputs, 1)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module, checkpoint: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.layers, self.checkpoint, self.broken = nn.ModuleList(layers), checkpoint, broken

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x, **given)
            if self.broken:
                torch._dynamo.graph_break()
        return x
