"""Rows of `quality.json` for the tables of `quality.md`, and how numbers are written there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.quality.config import FULL, policy_named
from benchmarks.quality.verdict import Spread, spread

NAMES = {"gdn": "Qwen3-Next (GDN)", "kda": "Kimi-Linear (KDA)"}
SHORT = {"gdn": "GDN", "kda": "KDA"}


class Results:
    """The rows, and what is asked of them."""

    def __init__(
        self, data: dict[str, Any], generated: dict[str, dict[str, Any]], before: list[dict[str, Any]]
    ) -> None:
        self.data, self.rows, self.generated, self.before = data, data["rows"], generated, before
        self.models = [m for m in NAMES if any(r["model"] == m for r in self.rows)]

    def some(self, model: str, policy: str, *, weights: str = "base", on: str = "all") -> list[dict[str, Any]]:
        wanted = (model, weights, policy, on)
        return [r for r in self.rows if (r["model"], r["weights"], r["policy"], r["on"]) == wanted]

    def mean(
        self, model: str, policy: str, value: Callable[[dict[str, Any]], float], *, weights: str = "base",
        on: str = "all",
    ) -> Spread | None:  # fmt: skip
        return spread(value(r) for r in self.some(model, policy, weights=weights, on=on))


def short(x: float | None, digits: int = 2) -> str:
    """A small number, without an exponent where people do without."""
    if x is None or math.isnan(x):
        return "-"
    if x == 0:
        return "0"
    return f"{x:.{digits}g}" if 1e-4 <= abs(x) < 1e4 else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")


def tight(x: float) -> str:
    """Two digits in plain notation down to 0.0001."""
    if x == 0:
        return "0"
    if abs(x) < 1e-4:
        return short(x)
    return f"{x:.{max(0, min(4, 1 - math.floor(math.log10(abs(x)))))}f}"


def pm(s: Spread | None, signed: bool = True) -> str:
    if s is None:
        return "-"
    mean = f"{s.mean:+.4f}" if signed else tight(s.mean)
    return mean if s.spread is None else f"{mean} ± {s.spread:.4f}" if signed else f"{mean} ± {tight(s.spread)}"


def percent(s: Spread | None) -> str:
    if s is None:
        return "-"
    return f"{100 * s.mean:.1f}" + ("" if s.spread is None else f" ± {100 * s.spread:.1f}")


def grid(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def horizons(r: Results) -> list[str]:
    return [str(h) for h in next(row for row in r.rows if row["on"] == "all")["horizons"]]


def row(r: Results, model: str, name: str, *, on: str = "all") -> list[str] | None:
    if not r.some(model, name, on=on):
        return None

    def mean(value: Callable[[dict[str, Any]], float]) -> Spread | None:
        return r.mean(model, name, value, on=on)

    if any(x["cost"] is None for x in r.some(model, name, on=on)):
        return [name, bytes_of(model, name), "not finite", *[""] * 6]
    drift = mean(lambda x: max(layer[-1] for layer in x["drift"]) if x.get("drift") else math.nan)
    cells = [
        pm(mean(lambda x: x["cost"])),
        pm(mean(lambda x: x["dlogp"]["all"]), signed=False),
        short(v.mean if (v := mean(lambda x: x["dlogp_p95"]["all"])) else None),
        short(v.mean if (v := mean(lambda x: x["kl"]["all"])) else None),
        percent(mean(lambda x: x["recall"]["all"])),
        percent(mean(lambda x: x["copy"]["all"])),
        short(drift.mean if drift else None),
    ]
    return [name, bytes_of(model, name), *cells]


def bytes_of(model: str, name: str) -> str:
    """Bytes of a value of a layer's state, ring and scales counted: records of KDA have a gate for each channel."""
    try:
        policy = policy_named(name)
    except KeyError:
        return ""
    heads, dim = FULL.size.heads, FULL.size.dim
    if policy is None:
        return "4.00"
    total = policy.nbytes(heads, heads, dim, dim, decay="channel" if model == "kda" else "head")
    return f"{total / (heads * dim * dim):.2f}"


HEADS = ["bits per byte, change", "mean \\|Δ log p\\|", "p95", "KL", "recall %", "copy %", "drift"]
