"""What a policy costs a trained model: held-out text and memory tasks, every byte given, by the decode horizon.

A row of numbers has, for each bucket of horizons (`tasks.BUCKETS`) and under "all" for the whole suffix:

    bits        bits per byte of the text              cost, cost_error   its difference to the exact model of the same
    dlogp       mean |Δ log p| of the next byte, nats                     weights, and the standard error over windows
    dlogp_p95   its 95th percentile                    kl                 mean KL(exact || this), nats
    recall      share of asked values that are right   copy               share of letters that are right
    drift       of each linear layer, ‖S − S_exact‖ / ‖S_exact‖ at the bucket's end, S_exact that of the exact model
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lattn_compile as lc
from benchmarks.quality.models import exact, logits_of, recurrence
from benchmarks.quality.tasks import BUCKETS, KINDS, PREFIX, Batch

__all__ = ["Reference", "evaluate"]


@dataclass
class Reference:
    """Of the exact model: log-probabilities `[N, S, 256]` of the text's suffix, and states `[layers][buckets]`."""

    logp: Tensor
    states: list[list[Tensor]]


class _Probe:
    """A layer under a policy that keeps the states of the first `rows` sequences at the ends of the buckets."""

    def __init__(self, policies: list[lc.Policy | None], cuts: list[int], rows: int, way: str, clear: bool) -> None:
        self.policies, self.cuts, self.rows, self.way, self.clear = policies, cuts, rows, way, clear
        self.states: list[list[Tensor]] = [[] for _ in policies]

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        policy, state = self.policies[i], None
        if self.way == "whole":
            assert policy is not None
            o, _ = lc.linear_attention(
                q, k, v, g, beta, policy=policy, prefix_lengths=q.shape[1], use_qk_l2norm_in_kernel=True
            )
            return o
        outputs, first = [], 0
        for end in (PREFIX, *self.cuts):
            part = tuple(x[:, first:end] for x in (q, k, v, g, beta))
            if policy is None or first == 0:
                o, state = exact(*part, state=state, keep=True, way=self.way)
                if first == 0 and self.clear:
                    state = torch.zeros_like(state)
                dense = state
            else:
                options: dict[str, Any] = {}
                if policy.rounding == "stochastic":
                    ids = torch.arange(len(q), device=q.device)
                    options = {"sequence_ids": ids, "site_id": i, "position": first}
                o, state = lc.linear_attention(
                    *part, policy=policy, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                    **options,
                )  # fmt: skip
                assert isinstance(state, lc.EncodedState | lc.ReplayState)
                dense = state.dense()
            if first:
                self.states[i].append(dense[: self.rows].clone())
            outputs.append(o)
            first = end
        return torch.cat(outputs, 1)


def _cuts(batch: Batch) -> list[int]:
    suffix = batch.ids.shape[1] - 1 - PREFIX
    cuts = [PREFIX + b for b in BUCKETS if b <= suffix]
    return cuts if cuts and cuts[-1] == PREFIX + suffix else [*cuts, PREFIX + suffix]


@torch.no_grad()
def evaluate(
    model: Any,
    policies: list[lc.Policy | None],
    data: dict[str, Batch],
    reference: Reference | None = None,
    *,
    way: str = "steps",
    clear: bool = False,
    block: int = 64,
) -> tuple[dict[str, Any], Reference]:
    """One row, and what others are compared with if this is the exact model.

    Args:
        policies: of each linear layer; None: exact. data: of `tasks.measured`. block: sequences at a time.
        way: how the exact part is computed (`models.exact`); "whole": all tokens are prefix under the policy.
        clear: the state that the prefix leaves is lost: what the rest of the model can do without.
    """
    model.eval()
    device = next(model.parameters()).device
    cuts, rows = _cuts(data["text"]), len(data["text"])
    names = list(data)
    ids = torch.cat([data[name].ids for name in names]).to(device)
    kinds = torch.cat([data[name].kinds for name in names]).to(device)[:, PREFIX:]
    logits, states = [], list[list[Tensor]]()
    for first in range(0, len(ids), block):
        probe = _Probe(policies, cuts, max(0, rows - first), way, clear)
        with recurrence(probe, len(policies)):
            logits.append(logits_of(model, ids[first : first + block, :-1])[:, PREFIX:].float())
        states = probe.states if not states else _joined(states, probe.states, rows)
    out = torch.cat(logits)
    target = ids[:, PREFIX + 1 :].long()
    edges = list(zip([0, *(c - PREFIX for c in cuts)], [c - PREFIX for c in cuts], strict=False))
    row: dict[str, Any] = {"horizons": [high for _, high in edges], "finite": bool(torch.isfinite(out).all())}
    right = out.argmax(-1) == target
    for name in ("recall", "copy"):
        if name in data:
            asked = kinds == KINDS[name]
            row[name] = _by_bucket(right.float(), edges, where=asked)
    logp = torch.cat([x.double().log_softmax(-1).float() for x in out[:rows].split(16)])
    nats = -logp.gather(-1, target[:rows, :, None]).squeeze(-1)
    row["bits"] = _by_bucket(nats / math.log(2), edges)
    if reference is not None:
        row |= _compared(reference, logp, nats, target[:rows], edges)
        row["drift"] = [
            [_ratio(x, y) for x, y in zip(ours, theirs, strict=True)]
            for ours, theirs in zip(states, reference.states, strict=True)
            if ours
        ]
    return row, Reference(logp, states)


def _joined(a: list[list[Tensor]], b: list[list[Tensor]], rows: int) -> list[list[Tensor]]:
    return [[torch.cat((x, y))[:rows] for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]


def _ratio(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item()


def _by_bucket(x: Tensor, edges: list[tuple[int, int]], where: Tensor | None = None) -> dict[str, float]:
    """Means over the buckets, and over all."""
    found = {}
    for low, high in [*edges, (0, edges[-1][1])]:
        part = x[:, low:high]
        part = part if where is None else part[where[:, low:high]]
        found[str(high)] = part.double().mean().item() if part.numel() else math.nan
    # The last bucket and the whole suffix end at the same place.
    total = found.pop(str(edges[-1][1]))
    last = x[:, edges[-1][0] :] if where is None else x[:, edges[-1][0] :][where[:, edges[-1][0] :]]
    found[str(edges[-1][1])] = last.double().mean().item() if last.numel() else math.nan
    return {**found, "all": total}


def _compared(
    reference: Reference, logp: Tensor, nats: Tensor, target: Tensor, edges: list[tuple[int, int]]
) -> dict[str, Any]:
    theirs = -reference.logp.gather(-1, target[:, :, None]).squeeze(-1)
    change = (nats - theirs).abs()
    kl = torch.cat(
        [
            (a.double().exp() * (a.double() - b.double())).sum(-1).float()
            for a, b in zip(reference.logp.split(16), logp.split(16), strict=True)
        ]
    )
    windows = ((nats - theirs) / math.log(2)).double().mean(1)
    p95 = {str(high): torch.quantile(change[:, low:high].flatten(), 0.95).item() for low, high in edges}
    return {
        "cost": windows.mean().item(),
        "cost_error": (windows.std() / len(windows) ** 0.5).item() if len(windows) > 1 else math.nan,
        "dlogp": _by_bucket(change, edges),
        "dlogp_p95": {**p95, "all": torch.quantile(change.flatten(), 0.95).item()},
        "kl": _by_bucket(kl, edges),
    }
