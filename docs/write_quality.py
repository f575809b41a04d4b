"""Fills in the tables of `quality.md`, `quality_rows.md` and of the README and draws the plots, from `quality.json` and
`generate_nvidia_h200.jsonl` in `benchmarks/results`.

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
BEFORE = RESULTS.with_name("quality_before.json")
GENERATE = RESULTS.with_name("generate_nvidia_h200.jsonl")
sys.path.insert(0, str(ROOT))

from benchmarks.model_decode import read_rows  # noqa: E402
from benchmarks.quality.config import HEADLINE, INVERSES, NEAREST, OPERANDS, OTHERS  # noqa: E402
from benchmarks.quality.findings import findings, on_few  # noqa: E402
from benchmarks.quality.verdict import CONTROL, judged, seeds, spread  # noqa: E402
from docs.line_plot import Box, line_plot  # noqa: E402
from docs.quality_rows import (  # noqa: E402
    HEADS,
    NAMES,
    SHORT,
    Results,
    bytes_of,
    grid,
    horizons,
    percent,
    pm,
    row,
    short,
)  # fmt: skip
from docs.quality_trainings import (  # noqa: E402
    answer_training,
    distilled,
    downhill,
    objective,
    paid,
    recipes,
    recovered,
)  # fmt: skip

PAGES = ("docs/quality.md", "docs/quality_rows.md", "README.md")
LOST = "exact, prefix lost"


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
    for model in r.models:
        for x in r.some(model, LOST)[:1]:
            answers = [f"{100 * x['recall'][s]:.1f}" for s in steps]
            name = f"{NAMES[model]}, its base, states zeroed behind the prefix"
            rows.append([name, "0", "", "", f"{x['bits']['all']:.3f}", *answers])
    return grid(heads, rows)


def by_seed(r: Results) -> str:
    """The headline policies on the controls: change of bits per byte, seed by seed."""
    parts = []
    for model in r.models:
        rows = []
        for name in HEADLINE:
            found = {x["seed"]: x for x in r.some(model, name, weights="control")}
            costs = [f"{found[s]['cost']:+.4f}" if s in found else "-" for s in range(3)]
            kl = [short(found[s]["kl"]["all"]) if s in found else "-" for s in range(3)]
            rows.append([name, bytes_of(model, name), *costs, *kl])
        heads = ["state", "bytes a value", *(f"change, seed {s}" for s in range(3)), *(f"KL, {s}" for s in range(3))]
        parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts)


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
        rows = [exact, *(x for name in (CONTROL, *NEAREST) if (x := row(r, model, name)))]
        if len(rows) < 2:
            continue
        parts.append(f"{NAMES[model]}:\n\n" + grid(["state", "bytes a value", *HEADS], rows))
    return "\n\n".join(parts)


def others(r: Results) -> str:
    parts, on = [], on_few(r.rows)
    for model in r.models:
        rows = []
        for name in NEAREST:
            for each in (name, *(other for other in OTHERS if other.startswith(name + ","))):
                if x := row(r, model, each, on=on):
                    rows.append(x)
        if x := row(r, model, "calibrated", on=on):
            rows.append(["**the recipe of lc.calibrate**", *x[1:]])
        if rows:
            parts.append(f"{NAMES[model]}:\n\n" + grid(["state", "bytes a value", *HEADS], rows))
    return "\n\n".join(parts)


def prefill(r: Results) -> str:
    """Change of bits per byte, a row a set of operands, a column an inverse."""
    parts = []
    for model in r.models:
        rows = []
        for operands in OPERANDS:
            cells = []
            for inverse in INVERSES:
                found = r.some(model, f"prefill: {operands}, {inverse}", on="short")
                cost = found[0]["cost"] if found else None
                cells.append(f"{cost:+.4f}" if cost is not None else "not finite" if found else "-")
            rows.append([operands, *cells])
        if any(cell != "-" for row in rows for cell in row[1:]):
            parts.append(f"{NAMES[model]}:\n\n" + grid(["bits per byte, change", *INVERSES], rows))
    return "\n\n".join(parts)


def answer_cost(r: Results) -> str:
    """Bits per byte of text in each range of horizons, above the exact state's: the mean over the bases."""
    steps, rows = horizons(r), []
    for name in (*HEADLINE[:3], "int8 replay 8", "fp8 replay 8", "nvfp4 replay 16"):
        cells = []
        for step in steps:
            found = []
            for model in r.models:
                exact = {x["seed"]: x["bits"][step] for x in r.some(model, "exact")}
                over = spread(x["bits"][step] - exact[x["seed"]] for x in r.some(model, name))
                found.append("-" if over is None else f"{over.mean:+.4f}")
            cells.append(" / ".join(found))
        last = (r.mean(model, name, lambda x: 1.0 - x["recall"][steps[-1]]) for model in r.models)
        wrong = " / ".join("-" if x is None else f"{100 * x.mean:.1f} %" for x in last)
        rows.append([name, " / ".join(dict.fromkeys(bytes_of(model, name) for model in r.models)), *cells, wrong])
    firsts = ["1", *(str(int(x) + 1) for x in steps)]
    heads = ["GDN / KDA", "bytes a value", *(f"bytes {a} to {b}" for a, b in zip(firsts, steps, strict=False))]
    return grid([*heads, f"wrong recall, {firsts[-2]} to {steps[-1]} bytes away"], rows)


def answer_speed(r: Results) -> str:
    """Bytes of a state and what a decoded token takes, of `generate()`; times the exact state's speed."""
    batches = sorted({int(part.split("/")[2]) for part in r.generated if part.startswith("shaped/")})
    exact = {batch: r.generated.get(f"shaped/exact/{batch}", {}) for batch in batches}
    rows = []
    for name in ("compile", "exact", *SERVED):
        cells = []
        for batch in batches:
            x = r.generated.get(f"shaped/{name}/{batch}", {})
            if "ms" not in x or "ms" not in exact[batch]:
                cells += ["refused" if "refused" in x else "-", ""]
                continue
            same = x["commit"] == exact[batch]["commit"]  # the same run: another machine's load is no speed
            times = f", {exact[batch]['ms'] / x['ms']:.2f} x" if same else " (another run)"
            cells += [f"{x['ms']:.2f} ms{times}", f"{x['peak_gb']:.2f}"]
        if not any(cell not in ("", "-") for cell in cells):
            continue
        found = {b: r.generated.get(f"shaped/{name}/{b}", {}).get("states_gb") for b in batches}
        sizes = [f"{1e3 * x / batch:.1f} MB" for batch, x in found.items() if x is not None]
        rows.append([ARMS.get(name, name), sizes[-1] if sizes else "", *cells])
    heads = ["Qwen3-Next's shape, 894 M parameters, bf16", "state of a sequence"]
    for batch in batches:
        heads += [f"a step, B = {batch}", "peak GB"]
    return grid(heads, rows)


SERVED = ("int8 token", "fp8 token", "int8 replay 8", "nvfp4 token", "fp8 two-precision 16")


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


def serving(r: Results) -> str:
    """Tokens a second and memory of `generate()`, a table for each model."""
    names = {"shaped": "Qwen3-Next's shape, 894 M parameters, random", "trained": "The trained model"}
    parts = []
    for model, title in names.items():
        found = {part.split("/")[1]: part for part in r.generated if part.startswith(model + "/")}
        batches = sorted({int(part.split("/")[2]) for part in r.generated if part.startswith(model + "/")})
        rows = []
        for arm in found:
            cells = []
            for batch in batches:
                x = r.generated.get(f"{model}/{arm}/{batch}", {})
                if "ms" not in x:
                    cells += ["refused" if "refused" in x else "-", "", ""]
                    continue
                cells += [
                    f"{x['ms']:.2f}",
                    f"{x['tokens_per_s']:,.0f}",
                    f"{x['peak_gb']:.2f}" if "peak_gb" in x else "",
                ]
            rows.append([ARMS.get(arm, f"lattn_compile, {arm}"), *cells])
        heads = [""]
        for batch in batches:
            heads += [f"ms a step, B = {batch}", "tokens/s", "peak GB"]
        if rows:
            parts.append(f"{title}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not measured."


ARMS = {"eager": "transformers with FLA, eager", "compile": "transformers with FLA, torch.compile, reduce-overhead"}


def about(r: Results) -> str:
    a = r.data["about"]
    steps = ", ".join(f"{s['steps']} of {s['batch']} × {s['tokens']}" for s in r.data["bases"][0]["stages"])
    further = a["settings"]["steps"]
    size = a["settings"]["further"]
    runs = [*a.get("before", []), a]
    said = "; then ".join(f"`{x['command']}`, commit {x['commit'][:10]}" for x in runs)
    text = (
        f"{said}. {a['hardware']}, torch {a['torch']}, Triton {a['triton']}, "
        f"transformers {a['transformers']}; text of Python {a['corpus']['python']}, "
        f"{a['corpus']['train_bytes'] / 1e6:.1f} MB to train and {a['corpus']['heldout_bytes'] / 1e6:.2f} MB held out "
        f"(SHA-256 {a['corpus']['sha256'][:12]}). Steps of a base: {steps} bytes; of each further training: "
        f"{further} of {size['count']} × {size['length']} bytes."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def before(r: Results) -> str:
    """The runs before this one, whose bases did not all learn to remember."""
    words = (
        "With the classes' own initialisation and keys of letters that texts have too",
        "With today's, and no warm-up of the learning rate",
    )
    parts = []
    for word, run in zip(words, r.before, strict=True):
        learnt = sum(base["recall"] > 0.9 for base in run["bases"])
        costs = {
            name: [x["cost"] for x in run["rows"] if (x["model"], x["policy"]) == ("gdn", name)]
            for name in ("int8 token", "fp8 token")
        }
        span = {name: f"{min(found):+.3f} to {max(found):+.3f}" for name, found in costs.items() if len(found) > 1}
        said = f"{word}, {learnt} of {len(run['bases'])} bases learnt recall (commit {run['about']['commit'][:7]})"
        if span:
            said += (
                f"; int8 in token mode then cost GDN {span['int8 token']} bits per byte, and fp8 {span['fp8 token']}"
            )
        parts.append(said + ".")
    link = "[quality_before.json](../benchmarks/results/quality_before.json)"
    text = f"**Runs before this one** ({link}) are not in the tables. {' '.join(parts)}"
    return textwrap.fill(text, 118, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)


def readme(r: Results) -> str:
    def left(model: str, name: str) -> str:
        j = judged(r.rows, model, f"qat {name}", name, "bits")
        return "not run" if j is None else pm(j.left)

    def bits(model: str) -> str:
        s = spread(seeds(r.rows, model, "control", "exact", "bits").values())
        return "-" if s is None else f"{s.mean:.3f} ± {s.spread or 0:.3f} in all"

    rows = [["exact fp32", "4.00", *(cell for model in r.models for cell in (bits(model), ""))]]
    for name in HEADLINE:
        cells = []
        for model in r.models:
            costs = spread(x["cost"] for x in r.some(model, name, weights="control"))
            cells += [pm(costs), left(model, name)]
        rows.append([name, " / ".join(dict.fromkeys(bytes_of(model, name) for model in r.models)), *cells])
    heads = ["state", f"bytes a value: {' / '.join(SHORT[model] for model in r.models)}"]
    for model in r.models:
        heads += [f"{NAMES[model]}: change", "after QAT"]
    before, last = horizons(r)[-2:]

    def right(name: str, weights: str) -> str:
        found = [r.mean(model, name, lambda x: x["recall"][last], weights=weights) for model in r.models]
        return " and ".join(f"{100 * x.mean:.0f}" for x in found if x is not None) + " %"

    arms = [("exact", "control", "with an exact state"), ("int8 token", "control", "in int8 token mode")]
    arms += [("fp8 token", "control", "in fp8"), ("fp8 token", "qat fp8 token", "in fp8 after QAT")]
    arms += [("fp8 replay 8", "control", "in fp8 replay 8")]
    said = ", ".join(f"{right(name, weights)} {where}" for name, weights, where in arms)
    where = f"{int(before):,} to {int(last):,} bytes away"
    text = f"Bits do not show it all. Of answers {where} there are right (GDN and KDA): {said}."
    name = "int8 token"
    taught = {SHORT[m]: judged(r.rows, m, f"qad {name}", name, "bits", against="base") for m in r.models}
    found = [f"{m} from {j.cost.mean:+.4f} to {j.left.mean:+.4f}" for m, j in taught.items() if j is not None]
    if found:
        text += (
            " Distillation (QAD) from the exact base, in as many steps and without labels, takes int8 in token mode of "
            f"{' and '.join(found)} above that base; an exact base that goes on training on labels is ahead of both, "
            "and against it nothing counts as recovered."
        )
    return f"{grid(heads, rows)}\n\n{textwrap.fill(text, 118, break_on_hyphens=False)}"


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
    "answer cost": answer_cost,
    "answer training": answer_training,
    "answer speed": answer_speed,
    "bases": bases,
    "ptq": ptq,
    "seeds": by_seed,
    "horizon": by_horizon,
    "recovered bits": lambda r: recovered(r, "bits"),
    "recovered recall": lambda r: recovered(r, "recall"),
    "recovered copy": lambda r: recovered(r, "copy"),
    "paid": paid,
    "distilled": distilled,
    "objective": objective,
    "recipes": recipes,
    "downhill": downhill,
    "serving": serving,
    "before": before,
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
    results = Results(data, read_rows(GENERATE), json.loads(BEFORE.read_text(encoding="utf-8"))["runs"])
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    return {**{name: filled(text, results) for name, text in texts.items()}, **plots(results)}


if __name__ == "__main__":
    for name, text in pages(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        (ROOT / name).write_text(text, encoding="utf-8")
