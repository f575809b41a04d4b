"""Training arms: a model, its optimizer and one step, which on a GPU is one CUDA graph on a stream of its own.

Models this small do not fill a GPU, and a step is a thousand launches. Recorded once, steps of several arms run side by
side: `run` hands one step of each to the device in turn and waits for none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from benchmarks.quality.models import logits_of, recurrence, under
from benchmarks.quality.tasks import KINDS, PREFIX, Batch, Mixture

__all__ = ["Arm", "Method", "loss_of", "rate", "run"]


@dataclass(frozen=True)
class Method:
    """How an arm is trained.

    Attributes:
        loss: "data": `loss_of` what comes next; "distil": KL to the exact model it started from.
        peak: highest learning rate. decay: of the matrices.
        warm: steps until the rate is at its height. It is a number of steps and no share of a time that also passes
            while nothing is trained: the first steps of AdamW at the full rate take from a model what it begins with.
        shares: of text, answers and letters in the loss, whatever the number of such bytes: in long sequences answers
            are one byte in a hundred.
        times: of the usual number of steps.
    """

    loss: str = "data"
    peak: float = 2e-3
    decay: float = 0.1
    warm: int = 5
    shares: tuple[float, float, float] = (1.0, 0.5, 0.25)
    times: int = 1


def loss_of(logits: Tensor, ids: Tensor, kinds: Tensor, shares: tuple[float, float, float] = Method.shares) -> Tensor:
    """Nats of text, answers and letters, each the mean over its bytes, in fixed shares; nothing is copied from the
    host, which a CUDA graph would not record."""
    nats = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().long(), reduction="none")
    loss = nats.new_zeros(())
    for kind, share in zip(("text", "recall", "copy"), shares, strict=True):
        here = (kinds == KINDS[kind]).flatten().to(nats.dtype)
        loss = loss + share * (nats * here).sum() / here.sum().clamp(min=1.0)
    return loss


class Arm:
    """One training."""

    def __init__(
        self, name: str, model: Any, method: Method, data: Mixture, *, policy: lc.Policy | None = None,
        teacher: Any = None,
    ) -> None:  # fmt: skip
        """
        Args:
            policy: of every linear layer behind the prefix; None: exact. teacher: with the loss "distil".
        """
        self.name, self.model, self.method, self.policy, self.teacher = name, model.train(), method, policy, teacher
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        self.layers = model.config.layer_types.count("linear_attention")
        self.lr = torch.zeros((), device=self.device)
        # Decay pulls matrices only: on the bias of a gate it would pull a memory of thousands of tokens to one of few.
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() == 2) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, method.decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.lr if cuda else method.peak, betas=(0.9, 0.95),
            **({"fused": True, "capturable": True} if cuda else {}),
        )  # fmt: skip
        self.stream = torch.cuda.Stream() if cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps, self.curve = 0, list[tuple[int, float, float, float]]()
        # Of the steps since they were last read: the loss, the gradient's norm, right answers and questions of recall.
        self.sums = tuple(torch.zeros((), device=self.device) for _ in range(4))
        self.failed: str | None = None
        self.load(data)

    def load(self, data: Mixture) -> None:
        """From now on batches of `data`, whose sizes may be others."""
        self.data = data
        batch = data.draw()
        self.ids, self.kinds = batch.ids.to(self.device), batch.kinds.to(self.device)
        self.graph = None

    def compute(self) -> None:
        """One step on `ids` and `kinds`; nothing here waits for a device."""
        policies = [self.policy] * self.layers
        inputs = self.ids[:, :-1]
        with recurrence(under(policies, PREFIX), self.layers):
            logits = logits_of(self.model, inputs)
        if self.method.loss == "distil":
            with torch.no_grad(), recurrence(under([None] * self.layers, PREFIX), self.layers):
                wanted = logits_of(self.teacher, inputs)[:, PREFIX:].float().log_softmax(-1)
            ours = logits[:, PREFIX:].float().log_softmax(-1)
            loss = (wanted.exp() * (wanted - ours)).sum(-1).mean()
        else:
            loss = loss_of(logits, self.ids, self.kinds, self.method.shares)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            asked = self.kinds == KINDS["recall"]
            right = (logits.detach().argmax(-1) == self.ids[:, 1:]) & asked
            for total, x in zip(self.sums, (loss.detach(), norm, right.sum(), asked.sum()), strict=True):
                total.add_(x)

    def record(self) -> None:
        """Record a step; the weights and the optimizer are afterwards what they were before.

        Raises:
            RuntimeError: something in the step cannot be recorded.
        """
        if self.stream is None:
            return
        kept = [p.detach().clone() for p in self.model.parameters()]
        fresh = self.steps == 0
        moments = {} if fresh else self._moments(clone=True)
        self.lr.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.compute()
        torch.cuda.synchronize()
        self.graph = graph
        with torch.no_grad():
            for p, was in zip(self.model.parameters(), kept, strict=True):
                p.copy_(was)
            for key, x in self._moments(clone=False).items():
                x.zero_() if fresh else x.copy_(moments[key])
            for x in self.sums:
                x.zero_()
        torch.cuda.synchronize()

    def _moments(self, *, clone: bool) -> dict[tuple[int, str], Tensor]:
        states = enumerate(self.optimizer.state.values())
        return {
            (i, key): x.clone() if clone else x for i, state in states for key, x in state.items() if torch.is_tensor(x)
        }

    def step(self, lr: float) -> None:
        """One step with the next batch, in the arm's own order, without waiting for it."""
        batch = self.data.draw()
        if self.stream is None:
            self._fill(batch, lr)
            self.compute()
        else:
            with torch.cuda.stream(self.stream):
                self._fill(batch, lr)
                if self.graph is None:
                    self.compute()
                else:
                    self.graph.replay()
        self.steps += 1

    def _fill(self, batch: Batch, lr: float) -> None:
        for target, source in ((self.ids, batch.ids), (self.kinds, batch.kinds)):
            target.copy_(source.pin_memory() if self.stream is not None else source, non_blocking=True)
        if self.stream is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        else:
            self.lr.fill_(lr)

    def read(self, since: int) -> tuple[float, float]:
        """Mean loss in nats of the last `since` steps, and the share of right answers of recall; waits for them."""
        if self.stream is not None:
            self.stream.synchronize()
        loss, norm, rights, asked = (x.item() for x in self.sums)
        mean, right = loss / max(1, since), rights / max(1.0, asked)
        for x in self.sums:
            x.zero_()
        if self.stream is not None:
            torch.cuda.synchronize()
        self.curve.append((self.steps, mean, right, norm / max(1, since)))
        if not math.isfinite(mean):
            self.failed = f"loss {mean} at step {self.steps}"
        return mean, right


def rate(done: float, peak: float, warm: float = 1.0) -> float:
    """Learning rate when a share `done` of the training is over: constant, then down to a twentieth; times `warm`, the
    share of the warm-up that is over."""
    down = min(1.0, (1.0 - min(1.0, done)) / 0.4)
    return peak * min(1.0, warm) * (0.05 + 0.95 * down)


def run(
    arms: Sequence[Arm],
    *,
    steps: int | None = None,
    until: float | None = None,
    done: Callable[[int], float] | None = None,
    every: int = 20,
    tick: Callable[[str], None] = print,
) -> int:
    """Trains all arms side by side, a step of each in turn. Returns the steps that were made.

    Args:
        steps: of each arm; None: as many as fit until `until` (of time.perf_counter). With both, whichever ends first.
        done: from the steps of this call, how much of the whole training is over; default: of these `steps`.
    """
    n, began = 0, time.perf_counter()
    while (steps is None or n < steps) and (until is None or time.perf_counter() < until):
        live = [arm for arm in arms if arm.failed is None]
        if not live:
            break
        share = done(n) if done is not None else n / steps if steps is not None else 0.0
        for arm in live:
            arm.step(rate(share, arm.method.peak, (arm.steps + 1) / arm.method.warm))
        n += 1
        # Waiting now and then keeps the queue short, so that the clock above is the device's.
        if n % every == 0 or n == steps:
            since = every if n % every == 0 else n % every
            read = [arm.read(since) for arm in live]
            said = " ".join(f"{loss / math.log(2):.3f}/{right:.2f}" for loss, right in read)
            tick(f"step {n} ({(time.perf_counter() - began) / n * 1e3:.1f} ms a round): {said}")
    for arm in arms:
        if arm.stream is not None:
            arm.stream.synchronize()
    return n
