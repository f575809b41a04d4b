"""What the rows say: means and spreads over seeds, the rule of what counts as recovered, and an order to reproduce."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.config import HEADLINE, control_of

__all__ = ["APART", "CONTROL", "Judged", "Spread", "at", "judged", "metric", "order", "reproduced", "seeds", "spread"]

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


def seeds(rows: list[Row], model: str, weights: str, policy: str, of: str, *, on: str = "all") -> dict[int, float]:
    """Seed -> number, of the rows that match."""
    value = metric(of)
    return {
        row["seed"]: value(row)
        for row in rows
        if (row["model"], row["weights"], row["policy"], row["on"]) == (model, weights, policy, on)
    }


@dataclass(frozen=True)
class Judged:
    """A training under a policy, judged by `config.RULE`.

    Attributes:
        cost: of the policy to the control. gain: of the training against the control under the policy. left: of the
            trained model under the policy, against the exact control.
        verdict: "recovered", "not recovered", "no cost shown" or "one seed".
    """

    cost: Spread
    gain: Spread
    left: Spread
    verdict: str


def judged(
    rows: list[Row], model: str, weights: str, policy: str, of: str, *, against: str | None = None
) -> Judged | None:
    """Of a training, named as its rows' weights; None without its rows and the control's.

    Args:
        against: other weights than the rule's control.
    """
    control = control_of(weights) if against is None else against
    exact, under = (seeds(rows, model, control, p, of) for p in ("exact", policy))
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
        verdict = "no cost shown"
    elif gain.mean >= cost.mean / 2 and gain.mean > 2 * gain.spread:
        verdict = "recovered"
    else:
        verdict = "not recovered"
    return Judged(cost, gain, left, verdict)


APART = 2.0
"""Rows that are to be in the same order in another model differ by this factor at least, and by two spreads."""


def order(rows: list[Row], model: str, of: str, step: str) -> list[tuple[str, str]]:
    """Pairs of headline policies `(less, more)` of the controls that are apart in the bucket of horizons `step`.

    Costs of rounding are factors: a model that leans on its memory pays several times what another one pays, under
    every policy. So what is averaged over the seeds is the logarithm of a seed's own ratio.
    """
    found = {name: at(rows, model, "control", name, of, step) for name in HEADLINE}
    apart = math.log(APART) * (2 if of == "kl" else 1)  # KL is of second order in the change
    pairs = []
    for less, more in itertools.permutations(HEADLINE, 2):
        both = found[less].keys() & found[more].keys()
        ratio = spread(math.log(found[more][s] / found[less][s]) for s in sorted(both))
        if ratio is not None and ratio.spread is not None and ratio.mean > max(2 * ratio.spread, apart):
            pairs.append((less, more))
    return pairs


def at(rows: list[Row], model: str, weights: str, policy: str, of: str, step: str) -> dict[int, float]:
    """Seed -> "dlogp" or "kl" in one bucket of horizons."""
    wanted = (model, weights, policy, "all")
    return {r["seed"]: r[of][step] for r in rows if (r["model"], r["weights"], r["policy"], r["on"]) == wanted}


def reproduced(
    published: list[Row], again: list[Row], model: str, of: str, step: str
) -> list[tuple[str, str, bool | None]]:
    """Every pair of `order` of the published rows, and whether the others' bases have it so; None: rows are missing."""
    found = []
    for less, more in order(published, model, of, step):
        x, y = (spread(at(again, model, "base", name, of, step).values()) for name in (less, more))
        found.append((less, more, None if x is None or y is None else x.mean < y.mean))
    return found
