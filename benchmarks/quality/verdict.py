"""What the rows say: means and spreads over seeds, the rule of what counts as recovered, and an order to reproduce."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.config import HEADLINE

__all__ = ["CONTROL", "Judged", "Spread", "judged", "metric", "order", "reproduced", "seeds", "spread"]

Row = dict[str, Any]

CONTROL = "exact, chunks of 64 (control)"
"""Another order of sums: no quantization."""


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and standard deviation; None of one seed."""

    mean: float
    spread: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if self.spread is None else f" ± {self.spread:.4f}")


def spread(values: Iterable[float]) -> Spread | None:
    """None of no values."""
    found = list(values)
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def metric(name: str) -> Callable[[Row], float]:
    """A number of a row over its whole suffix: "bits", "dlogp", "kl", "cost", or the share of wrong answers: "recall",
    "copy"."""
    if name == "cost":
        return lambda row: float(row["cost"])
    if name in ("recall", "copy"):
        return lambda row: 1.0 - float(row[name]["all"])
    return lambda row: float(row[name]["all"])


def seeds(rows: list[Row], model: str, weights: str, policy: str, of: str, *, small: bool = False) -> dict[int, float]:
    """Seed -> number, of the rows that match."""
    value = metric(of)
    return {
        row["seed"]: value(row)
        for row in rows
        if (row["model"], row["weights"], row["policy"], row["small"]) == (model, weights, policy, small)
    }


@dataclass(frozen=True)
class Judged:
    """A training under a policy, judged by `config.RULE`.

    Attributes:
        cost: of the policy to the control. gain: of the training against the control under the policy. left: of the
            trained model under the policy, against the exact control.
        verdict: "recovered", "not recovered", "nothing to recover" or "one seed".
    """

    cost: Spread
    gain: Spread
    left: Spread
    verdict: str


def judged(rows: list[Row], model: str, weights: str, policy: str, of: str) -> Judged | None:
    """Of a training, named as its rows' weights; None without its rows and the control's."""
    exact, under = (seeds(rows, model, "control", p, of) for p in ("exact", policy))
    trained = seeds(rows, model, weights, policy, of)
    both = sorted(exact.keys() & under.keys() & trained.keys())
    cost = spread(under[s] - exact[s] for s in both)
    gain = spread(under[s] - trained[s] for s in both)
    left = spread(trained[s] - exact[s] for s in both)
    if cost is None or gain is None or left is None:
        return None
    if cost.spread is None or gain.spread is None:
        verdict = "one seed"
    elif cost.mean <= 2 * cost.spread:
        verdict = "nothing to recover"
    elif gain.mean >= cost.mean / 2 and gain.mean > 2 * gain.spread:
        verdict = "recovered"
    else:
        verdict = "not recovered"
    return Judged(cost, gain, left, verdict)


def order(rows: list[Row], model: str, of: str) -> list[tuple[str, str]]:
    """Pairs of headline policies `(less, more)` of the bases whose means are more than two spreads of either apart."""
    names = [CONTROL, *HEADLINE]
    found = {name: spread(seeds(rows, model, "base", name, of).values()) for name in names}
    pairs = []
    for a, b in itertools.permutations(names, 2):
        x, y = found[a], found[b]
        if x is None or y is None or x.spread is None or y.spread is None:
            continue
        if y.mean - x.mean > 2 * max(x.spread, y.spread):
            pairs.append((a, b))
    return pairs


def reproduced(published: list[Row], again: list[Row], model: str, of: str) -> list[tuple[str, str, bool | None]]:
    """Every pair of `order` of the published rows, and whether the others have it so; None: rows are missing."""
    found = []
    for less, more in order(published, model, of):
        x, y = (spread(seeds(again, model, "base", name, of).values()) for name in (less, more))
        found.append((less, more, None if x is None or y is None else x.mean < y.mean))
    return found
