"""Fills in the tables of `quality.md` and of the README and draws the plots, from `benchmarks/results/quality.json`.

Run it after measuring: `python docs/write_quality.py`. Tables stand between `<!-- quality: NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
ON_CPU = RESULTS.with_name("quality_cpu.json")
"""Rows of the same bases, measured on a CPU: text alone, over 1,024 bytes."""
sys.path.insert(0, str(ROOT))

from benchmarks.quality.config import FULL, HEADLINE, NEAREST, OTHERS, PREFILLS, policy_named  # noqa: E402
from benchmarks.quality.findings import Rows, findings  # noqa: E402
from benchmarks.quality.verdict import CONTROL, Spread, judged, seeds, spread  # noqa: E402
from docs.line_plot import Box, line_plot  # noqa: E402

NAMES = {"gdn": "Qwen3-Next (GDN)", "kda": "Kimi-Linear (KDA)"}
LOST = "exact, prefix lost"


class Results:
    """The rows, and what is asked of them."""

    def __init__(self, data: dict[str, Any], cpu: dict[str, Any] | None = None) -> None:
        self.data, self.rows, self.cpu = data, data["rows"], cpu or {"rows": []}
        self.models = [m for m in NAMES if any(r["model"] == m for r in self.rows)]

    def some(self, model: str, policy: str, *, weights: str = "base", small: bool = False) -> list[dict[str, Any]]:
        wanted = (model, weights, policy, small)
        return [r for r in self.rows if (r["model"], r["weights"], r["policy"], r["small"]) == wanted]

    def mean(
        self, model: str, policy: str, value: Callable[[dict[str, Any]], float], *, weights: str = "base",
        small: bool = False,
    ) -> Spread | None:  # fmt: skip
        return spread(value(r) for r in self.some(model, policy, weights=weights, small=small))


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
    return [str(h) for h in next(row for row in r.rows if not row["small"])["horizons"]]


def bases(r: Results) -> str:
    steps = horizons(r)
    heads = ["", "seed", "parameters", "recall in training", "bits per byte", *(f"recall %, to {s}" for s in steps)]
    rows = []
    for base in r.data["bases"]:
        model, seed = base["base"], base["seed"]
        exact = [x for x in r.some(model, "exact", weights="control") if x["seed"] == seed]
        bits = f"{exact[0]['bits']['all']:.3f}" if exact else "-"
        answers = [f"{100 * exact[0]['recall'][s]:.1f}" if exact else "-" for s in steps]
        learnt = f"{100 * base['curve'][-1][2]:.0f} %"
        rows.append([NAMES[model], str(seed), f"{base['parameters'] / 1e6:.1f} M", learnt, bits, *answers])
    for x in r.some("gdn", LOST):
        answers = [f"{100 * x['recall'][s]:.1f}" for s in steps]
        rows.append(["its base, states zeroed after the prefix", "0", "", "", f"{x['bits']['all']:.3f}", *answers])
    return grid(heads, rows)


def by_seed(r: Results) -> str:
    """The headline policies on the controls: change of bits per byte, seed by seed."""
    rows = []
    for name in HEADLINE:
        found = {x["seed"]: x for x in r.some("gdn", name, weights="control")}
        costs = [f"{found[s]['cost']:+.4f}" if s in found else "-" for s in range(3)]
        kl = [short(found[s]["kl"]["all"]) if s in found else "-" for s in range(3)]
        rows.append([name, _bytes(name), *costs, *kl])
    heads = ["state", "bytes a value", *(f"change, seed {s}" for s in range(3)), *(f"KL, seed {s}" for s in range(3))]
    return grid(heads, rows)


def on_cpu(r: Results, model: str) -> str:
    names = list(dict.fromkeys(x["policy"] for x in r.cpu["rows"] if x["model"] == model and "cost" in x))
    every = {**NEAREST, **OTHERS}
    rows = []
    for name in sorted(names, key=list(every).index):
        found = [x for x in r.cpu["rows"] if (x["model"], x["policy"]) == (model, name)]
        cost, change = spread(x["cost"] for x in found), spread(x["dlogp"]["all"] for x in found)
        kl, count = spread(x["kl"]["all"] for x in found), str(len(found))
        rows.append([name, _bytes(name), count, pm(cost), pm(change, signed=False), short(kl.mean if kl else None)])
    heads = ["state", "bytes a value", "seeds", "bits per byte, change", "mean \\|Δ log p\\|", "KL"]
    return grid(heads, rows) if rows else "Not measured."


def _row(r: Results, model: str, name: str, *, small: bool = False, bytes_: bool = True) -> list[str] | None:
    if not r.some(model, name, small=small):
        return None

    def mean(value: Callable[[dict[str, Any]], float]) -> Spread | None:
        return r.mean(model, name, value, small=small)

    if any(x["cost"] is None for x in r.some(model, name, small=small)):
        return [name, *([_bytes(name)] if bytes_ else []), "not finite", *[""] * 6]
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
    return [name, *([_bytes(name)] if bytes_ else []), *cells]


def _bytes(name: str) -> str:
    """Bytes of a value of a layer's state, ring and scales counted."""
    try:
        policy = policy_named(name)
    except KeyError:
        return ""
    heads, dim = FULL.size.heads, FULL.size.dim
    return f"{4.0:.2f}" if policy is None else f"{policy.nbytes(heads, heads, dim, dim) / (heads * dim * dim):.2f}"


HEADS = ["bits per byte, change", "mean \\|Δ log p\\|", "p95", "KL", "recall %", "copy %", "drift"]


def ptq(r: Results) -> str:
    parts = []
    for model in r.models:
        bits = r.mean(model, "exact", lambda x: x["bits"]["all"])
        exact = [
            "exact", "4.00", "-" if bits is None else f"{bits.mean:.4f} in all",
            "", "", "",
            percent(r.mean(model, "exact", lambda x: x["recall"]["all"])),
            percent(r.mean(model, "exact", lambda x: x["copy"]["all"])), "",
        ]  # fmt: skip
        rows = [exact, *(x for name in (CONTROL, *NEAREST) if (x := _row(r, model, name)))]
        if len(rows) < 2:
            continue
        parts.append(f"{NAMES[model]}:\n\n" + grid(["state", "bytes a value", *HEADS], rows))
    return "\n\n".join(parts)


def others(r: Results) -> str:
    parts = []
    for model in r.models:
        rows = []
        for name in NEAREST:
            for each in (name, *(other for other in OTHERS if other.startswith(name + ","))):
                if x := _row(r, model, each, small=True):
                    rows.append(x)
        if x := _row(r, model, "calibrated", small=True):
            rows.append(["**the recipe of lc.calibrate**", *x[1:]])
        if rows:
            parts.append(f"{NAMES[model]}:\n\n" + grid(["state", "bytes a value", *HEADS], rows))
    return "\n\n".join(parts)


def prefill(r: Results) -> str:
    parts = []
    for model in r.models:
        found = [x for name in PREFILLS if (x := _row(r, model, f"prefill: {name}", small=True, bytes_=False))]
        rows = [[x[0].removeprefix("prefill: "), *x[1:-1]] for x in found]
        if rows:
            parts.append(f"{NAMES[model]}:\n\n" + grid(["prefill", *HEADS[:-1]], rows))
    return "\n\n".join(parts)


def by_horizon(r: Results) -> str:
    steps = horizons(r)
    parts = []
    for model in r.models:
        rows = []
        for name in ("exact", *NEAREST):
            if not r.some(model, name):
                continue
            change = [
                pm(r.mean(model, name, lambda x, s=s: x["dlogp"][s]), signed=False) if name != "exact" else ""
                for s in steps
            ]
            recall = [percent(r.mean(model, name, lambda x, s=s: x["recall"][s])) for s in steps]
            rows.append([name, *change, *recall])
        if not rows:
            continue
        heads = ["state", *(f"\\|Δ log p\\|, to {s}" for s in steps), *(f"recall %, to {s}" for s in steps)]
        parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts)


def trained(r: Results) -> list[tuple[str, str, str]]:
    """Model, method and policy of every further training, in the order of the policies."""
    found = {(t["model"], t["trained"]) for t in r.data.get("trained", ()) if t["trained"] != "control"}
    every = [(m, method, name) for m in r.models for name in NEAREST for method in ("qat", "qad")]
    return [x for x in every if (x[0], f"{x[1]} {x[2]}") in found]


def recovered(r: Results, of: str) -> str:
    rows = []
    for model, method, name in trained(r):
        j = judged(r.rows, model, f"{method} {name}", name, of)
        if j is None:
            continue
        show: Callable[[float], str] = (lambda x: f"{x:+.4f}") if of == "bits" else (lambda x: f"{100 * x:+.1f}")
        exact, under, after = (
            seeds(r.rows, model, w, p, of)
            for w, p in (("control", "exact"), ("control", name), (f"{method} {name}", name))
        )
        label = f"{name}, {method.upper()}"
        for s in sorted(after.keys() & under.keys() & exact.keys()):
            cost, gain = under[s] - exact[s], under[s] - after[s]
            share = f"{100 * gain / cost:.0f} %" if of == "bits" and cost > 0 else ""
            rows.append([label, str(s), show(cost), show(after[s] - exact[s]), show(gain), share, ""])
        show_all = pm if of == "bits" else percent
        rows.append([label, "all", show_all(j.cost), show_all(j.left), show_all(j.gain), "", j.verdict])
    what = "bits per byte over exact" if of == "bits" else "wrong answers over exact, %"
    return grid(["", "seed", f"{what}: control", "trained", "won back", "share", "by the rule"], rows)


def about(r: Results) -> str:
    a = r.data["about"]
    steps = ", ".join(f"{s['steps']} of {s['batch']} × {s['tokens']}" for s in r.data["bases"][0]["stages"])
    further = max((t["steps"] for t in r.data.get("trained", ())), default=0)
    text = (
        f"`{a['command']}`, commit {a['commit'][:10]}, {a['hardware']}, torch {a['torch']}, Triton {a['triton']}, "
        f"transformers {a['transformers']}; text of Python {a['corpus']['python']}, "
        f"{a['corpus']['train_bytes'] / 1e6:.1f} MB to train and {a['corpus']['heldout_bytes'] / 1e6:.2f} MB held out "
        f"(SHA-256 {a['corpus']['sha256'][:12]}). Steps of a base: {steps} bytes; of each further training: {further}."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def readme(r: Results) -> str:
    rows = []
    for name in HEADLINE:
        costs = {x["seed"]: x["cost"] for x in r.some("gdn", name, weights="control")}
        after = seeds(r.rows, "gdn", f"qat {name}", name, "bits")
        exact = seeds(r.rows, "gdn", "control", "exact", "bits")
        ptq = [f"{costs[s]:+.4f}" for s in sorted(costs)]
        qat = [f"{after[s] - exact[s]:+.4f}" for s in sorted(after)]
        rows.append([name, _bytes(name), " / ".join(ptq), " / ".join(qat) or "not run"])
    exact = seeds(r.rows, "gdn", "control", "exact", "bits")
    first = ["exact fp32", "4.00", " / ".join(f"{exact[s]:.4f}" for s in sorted(exact)) + " in all", ""]
    table = grid(["state", "bytes a value", "bits per byte, change: seeds 0 / 1 / 2", "after QAT"], [first, *rows])
    back = {name: Rows(r.rows).won_back(name) for name in ("int8 token", "nvfp4 token")}
    text = (
        f"QAT won back {back['int8 token']} of what int8 costs and {back['nvfp4 token']} of nvfp4, in each seed that "
        "was run; it also took some of the recall."
    )
    return f"{table}\n\n{textwrap.fill(text, 118)}"


BOX = Box(left=62, top=34, width=470, height=240, margin=230, gap=16)


def lines(title: str, xs: list[str], curves: dict[str, list[float]], *, log: bool, unit: str) -> str:
    """Values at the horizons, a line a policy, labelled at its end."""
    if log:
        values = [v for curve in curves.values() for v in curve if v > 0]
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        ticks = [((p - low) / (high - low), f"{10.0**p:g}") for p in range(low, high + 1)]
    else:
        low, high = 0, 1
        ticks = [(i / 4, f"{25 * i} %") for i in range(5)]

    def part(v: float) -> float:
        return (math.log10(max(v, 10.0**low)) - low) / (high - low) if log else v

    places = [(i + 0.5) / len(xs) for i in range(len(xs))]
    firsts = ["1", *(str(int(x) + 1) for x in xs)]
    return line_plot(
        BOX,
        title,
        unit,
        [(at, f"{first}-{x}") for at, first, x in zip(places, firsts, xs, strict=False)],
        ticks,
        {label: list(zip(places, map(part, curve), strict=False)) for label, curve in curves.items()},
        {label: short(curve[-1]) if log else f"{100 * curve[-1]:.0f} %" for label, curve in curves.items()},
    )


SHOWN = ("nvfp4 token", "int8 token", "nvfp4 replay 16", "int8 replay 8", "fp8 token", "fp8 replay 8")


def plots(r: Results) -> dict[str, str]:
    steps, found = horizons(r), {}
    for model in r.models:
        have = [name for name in SHOWN if r.some(model, name)]
        if not have:
            continue

        def curve(name: str, value: Callable[[dict[str, Any], str], float], model: str = model) -> list[float]:
            means = [r.mean(model, name, lambda x, s=s: value(x, s)) for s in steps]
            return [m.mean for m in means if m is not None]

        change = {name: curve(name, lambda x, s: x["dlogp"][s]) for name in have}
        recall = {name: curve(name, lambda x, s: x["recall"][s]) for name in ("exact", *have)}
        title = f"{NAMES[model]}: mean |Δ log p| of the next byte"
        unit = "decoded bytes behind 64 of exact prefill"
        found[f"docs/quality-change-{model}.svg"] = lines(title, steps, change, log=True, unit=unit)
        title = f"{NAMES[model]}: right answers of associative recall"
        found[f"docs/quality-recall-{model}.svg"] = lines(title, steps, recall, log=False, unit=unit)
    return found


def said(r: Results) -> str:
    """What the numbers say, as a list."""
    items = findings(r.data)
    filled = (textwrap.fill(x, 118, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False) for x in items)
    return "\n".join(filled)


TABLES: dict[str, Callable[[Results], str]] = {
    "about": about,
    "findings": said,
    "bases": bases,
    "ptq": ptq,
    "seeds": by_seed,
    "kda": lambda r: on_cpu(r, "kda"),
    "stochastic": lambda r: on_cpu(r, "gdn"),
    "horizon": by_horizon,
    "recovered bits": lambda r: recovered(r, "bits"),
    "recovered recall": lambda r: recovered(r, "recall"),
    "recovered copy": lambda r: recovered(r, "copy"),
    "others": others,
    "prefill": prefill,
    "readme": readme,
}


def filled(text: str, results: Results) -> str:
    """A page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{TABLES[match[2]](results)}\n\n<!-- end -->"

    return re.sub(r"(?s)(<!-- quality: ([a-z ]+) -->).*?<!-- end -->", table, text)


def pages(data: dict[str, Any]) -> dict[str, str]:
    """Every file that this script writes, by its path from the root folder."""
    results = Results(data, json.loads(ON_CPU.read_text(encoding="utf-8")) if ON_CPU.exists() else None)
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/quality.md", "README.md")}
    return {**{name: filled(text, results) for name, text in texts.items()}, **plots(results)}


if __name__ == "__main__":
    for name, text in pages(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        (ROOT / name).write_text(text, encoding="utf-8")
