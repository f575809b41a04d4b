"""Whether the straight-through gradient of a rounded state leads downhill on a trained model.

The loss under a policy is a step function of the weights, and its gradient is an estimate: rounding is taken for the
identity. Here is what the loss really does a little further along that gradient, by a difference over batches that the
direction was not made from. The ratio of the two is 1 where the estimate is right (the exact model shows how near a
difference comes), smaller where the rounding hides a part of what the gradient promises, and negative where it leads
uphill.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.config import policy_named
from benchmarks.quality.lab import Lab
from benchmarks.quality.models import logits_of, recurrence, under
from benchmarks.quality.tasks import PREFIX, Batch
from benchmarks.quality.train import Method, loss_of

__all__ = ["POLICIES", "slopes"]

POLICIES = ("exact", "int8 token", "fp8 token", "nvfp4 token", "fp8 replay 8")
PARTS = {"loss": Method.shares, "text": (1.0, 0.0, 0.0), "recall": (0.0, 1.0, 0.0), "copy": (0.0, 0.0, 1.0)}
"""The loss of the trainings, and its parts by themselves."""
_BATCHES = 8
_FAR = (0.01, 0.03, 0.1)
"""How far to go along the gradient, in the norm of all weights, which is about 100."""
_SEED = 900


class _Losses:
    """The losses of a model under a policy, over given batches."""

    def __init__(self, lab: Lab, kind: str, name: str) -> None:
        self.model, self.layers = lab.load(kind, 0).train(), lab.settings.size.linear
        self.policy = policy_named(name)
        self.parameters = list(self.model.parameters())
        self.device = lab.device

    def parts(self, batch: Batch) -> list[Tensor]:
        ids, kinds = batch.ids.to(self.device), batch.kinds.to(self.device)
        with recurrence(under([self.policy] * self.layers, PREFIX), self.layers):
            logits = logits_of(self.model, ids[:, :-1])
        return [loss_of(logits, ids, kinds, shares) for shares in PARTS.values()]

    def gradient(self, batches: list[Batch]) -> list[Tensor]:
        """Of the whole loss, the mean over batches."""
        total = [torch.zeros_like(p) for p in self.parameters]
        for batch in batches:
            for t, g in zip(total, torch.autograd.grad(self.parts(batch)[0], self.parameters), strict=True):
                t.add_(g, alpha=1.0 / len(batches))
        return total

    def promised(self, batch: Batch, along: list[Tensor]) -> list[float]:
        """Of each part, its gradient's component along a direction."""
        losses = self.parts(batch)
        found = []
        for loss in losses:
            grads = torch.autograd.grad(loss, self.parameters, retain_graph=loss is not losses[-1])
            found.append(sum((g.double() * d.double()).sum() for g, d in zip(grads, along, strict=True)).item())
        return found

    @torch.no_grad()
    def kept(self, batch: Batch, along: list[Tensor], far: float) -> list[float]:
        """Of each part, the difference over a way of `far` on either side, a unit of length."""
        both = []
        for way in (far, -2.0 * far):
            torch._foreach_add_(self.parameters, along, alpha=way)
            both.append(self.parts(batch))
        torch._foreach_add_(self.parameters, along, alpha=far)
        return [(up - down).item() / (2.0 * far) for up, down in zip(*both, strict=True)]


def slopes(lab: Lab, until: float, kind: str) -> None:
    """What gradients promise and what the loss keeps of it, on the first base of a model, under each policy."""
    s = lab.settings
    if not lab.checkpoint(kind, 0).exists():
        return
    data = lab.mixture(s.further, _SEED)
    first, second = ([data.draw() for _ in range(_BATCHES)] for _ in range(2))
    for name in POLICIES:
        label = f"slopes {kind} {name}"
        if lab.has(label) or time.perf_counter() > until:
            continue
        lab.attempt(label, lambda name=name, label=label: lab.write(label, _of(lab, kind, name, first, second)))


def _of(lab: Lab, kind: str, name: str, first: list[Batch], second: list[Batch]) -> dict[str, Any]:
    began = time.perf_counter()
    torch.set_float32_matmul_precision("highest")
    losses = _Losses(lab, kind, name)
    along = losses.gradient(first)
    norm = sum(g.double().square().sum() for g in along).sqrt().item()
    along = [g / norm for g in along]
    promised = [losses.promised(batch, along) for batch in second]
    part: dict[str, Any] = {"slopes": name, "model": kind, "seed": 0, "norm": norm, "batches": len(second)}
    part["promised"] = _by_part(promised)
    part["kept"] = {str(far): _by_part([losses.kept(batch, along, far) for batch in second]) for far in _FAR}
    return part | {"seconds": time.perf_counter() - began}


def _by_part(values: list[list[float]]) -> dict[str, list[float]]:
    """Mean over batches and its standard error."""
    columns = zip(PARTS, zip(*values, strict=True), strict=True)
    return {part: [statistics.fmean(x), statistics.stdev(x) / len(x) ** 0.5] for part, x in columns}
