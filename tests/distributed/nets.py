"""A small model with two linear-attention layers, one of them behind an activation checkpoint, and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from tests.distributed.ranks import DEVICE, GPU

WIDTH, HEADS, VOCABULARY, TOKENS = 16, 2, 32, 12
POLICY = lc.Recipe(rules=[("layers.0*", lc.Policy(lc.Int8(block_v=8))), ("*", lc.Policy(lc.Fp8(block_v=8)))])


class Layer(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        g, beta = self.gates(x).chunk(2, -1)
        o, _ = lc.linear_attention(q, k, v, F.logsigmoid(g), beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out(o.flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (checkpoint(self.mix, y, use_reentrant=False) if self.checkpointed else self.mix(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(checkpointed=False), Layer(checkpointed=True)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(recipe: Any = POLICY, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net().to(DEVICE, torch.float64 if GPU else torch.float32)
    return made if recipe is None else lc.attach(made, recipe)


def batch(number: int) -> tuple[Tensor, list[int]]:
    """Ids `[2, TOKENS + 1]`, and prefix lengths that differ from batch to batch."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
    return ids.to(DEVICE), [number % TOKENS, (3 * number + 1) % TOKENS]


def loss_of(model: Any, number: int) -> Tensor:
    ids, prefix = batch(number)
    with lc.training_phase(prefix):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        if torch.is_grad_enabled():
            loss.backward()
    return loss.detach()
