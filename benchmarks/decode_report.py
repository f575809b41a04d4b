"""What `decode.py` found, as Markdown, JSON and a plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["markdown", "plot", "write"]

KINDS = {"gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}
WIDE, HIGH, LEFT, TOP, APART = 380, 230, 56, 44, 84
COLOURS = ("#3b82d6", "#d9702e", "#2f9e63", "#a855c7", "#c7a008", "#1aa3b8", "#d64545", "#7c6f64", "#8fb339", "#e377c2")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444b55; } .axis { stroke: #9aa3ae; fill: none; }
.grid { stroke: #9aa3ae44; } path { fill: none; stroke-width: 1.8; }
@media (prefers-color-scheme: dark) { text { fill: #c3cad4; } }
"""


def write(found: dict[str, Any], path: Path) -> None:
    """`path` with .md, .json and .svg."""
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(found))
    path.with_suffix(".svg").write_text(plot(found))


def markdown(found: dict[str, Any]) -> str:
    """A table for every kind of decay: µs a step, how many times as fast as FLA, share of a copy's bandwidth."""
    lines = [
        f"# Decode steps on packed states, {found['gpu']}",
        "",
        *([found["note"], ""] if "note" in found else []),
        f"`python benchmarks/decode.py`, torch {found['torch']}, Triton {found['triton']}; "
        + ", ".join(f"{name} = {value}" for name, value in found["shape"].items())
        + f", bf16 inputs, one token a sequence. A copy moves {found['copy_bytes_per_second'] / 1e12:.2f} TB/s. "
        "Each place: µs a step, amortised over the window; FLA's time over it; and the bytes that a step must move, at "
        "a copy's bandwidth, over it. Bytes: resident, everything counted, fp32 = 1.",
    ]
    for kind, title in KINDS.items():
        rows = [r for r in found["rows"] if r["kind"] == kind]
        base = {r["batch"]: r for r in found["fla"] if r["kind"] == kind}
        batches = sorted({r["batch"] for r in rows} | set(base))
        if not batches:
            continue
        lines += ["", f"## {title}", "", f"| state | bytes | {' | '.join(f'B = {b}' for b in batches)} |"]
        lines.append("|---|---|" + "---|" * len(batches))
        if base:
            cells = [f"{base[b]['us']:.1f} · {100 * base[b]['bandwidth']:.0f} %" if b in base else "" for b in batches]
            lines.append(f"| FLA fused_recurrent, fp32 | 1.000 | {' | '.join(cells)} |")
        for name in dict.fromkeys(_name(r) for r in rows):
            own = {r["batch"]: r for r in rows if _name(r) == name}
            resident = next(iter(own.values()))["resident"]
            lines.append(f"| {name} | {resident:.3f} | {' | '.join(_cell(own.get(b)) for b in batches)} |")
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return str(row["state"]) if row["launch"] == "table" else f"{row['state']} ({row['launch']})"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    times = "" if row["times_fla"] is None else f" · **{row['times_fla']:.2f} ×**"
    return f"{row['us']:.1f}{times} · {100 * row['bandwidth']:.0f} %"


def plot(found: dict[str, Any]) -> str:
    """SVG: for each kind of decay the time and the share of a copy's bandwidth against B, a line for each state."""
    body: list[str] = []
    kinds = [kind for kind in KINDS if any(r["kind"] == kind for r in found["rows"])]
    names = list(dict.fromkeys(_name(r) for r in found["rows"]))
    for row, kind in enumerate(kinds):
        mine = [(_name(r), r) for r in found["rows"] if r["kind"] == kind]
        mine += [("FLA", r) for r in found["fla"] if r["kind"] == kind]
        y = TOP + row * (HIGH + APART)
        body += _panel(f"{KINDS[kind]}: µs a step", mine, names, LEFT, y, "us")
        body += _panel("share of a copy's bandwidth", mine, names, LEFT + WIDE + APART, y, "bandwidth")
    x = LEFT + 2 * WIDE + APART + 24
    for i, name in enumerate(["FLA", *names]):
        body.append(f'<rect x="{x}" y="{TOP + 20 * i}" width="12" height="3" fill="{_colour(name, names)}"/>')
        body.append(f'<text x="{x + 18}" y="{TOP + 20 * i + 6}">{name}</text>')
    size = f'viewBox="0 0 {x + 190} {max(TOP + len(kinds) * (HIGH + APART), TOP + 20 * len(names) + 40)}"'
    inner = "\n".join(body)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{inner}\n</svg>\n'


def _colour(name: str, names: list[str]) -> str:
    return "#8a8f98" if name == "FLA" else COLOURS[names.index(name) % len(COLOURS)]


def _panel(
    title: str, rows: list[tuple[str, dict[str, Any]]], names: list[str], x: int, y: int, what: str
) -> list[str]:
    """One pair of axes; B on a logarithmic one, times too."""
    batches = sorted({r["batch"] for _, r in rows})
    low, high = math.log2(batches[0]), max(math.log2(batches[-1]), math.log2(batches[0]) + 1)
    values = [r[what] for _, r in rows]
    if what == "us":
        least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
        ticks = [(f"{10**n:g}", (n - least) / (most - least)) for n in range(least, most + 1)]
    else:
        most = 0.2 * math.ceil(max(values) / 0.2)
        ticks = [(f"{100 * most * i / 5:.0f} %", i / 5) for i in range(6)]

    def at(r: dict[str, Any]) -> str:
        part = (math.log10(r[what]) - least) / (most - least) if what == "us" else r[what] / most
        return f"{x + WIDE * (math.log2(r['batch']) - low) / (high - low):.1f} {y + HIGH * (1 - part):.1f}"

    out = [f'<text x="{x}" y="{y - 14}" font-weight="600">{title}</text>']
    for label, part in ticks:
        height = y + HIGH * (1 - part)
        out.append(f'<line class="grid" x1="{x}" x2="{x + WIDE}" y1="{height:.1f}" y2="{height:.1f}"/>')
        out.append(f'<text x="{x - 6}" y="{height + 4:.1f}" text-anchor="end">{label}</text>')
    for batch in batches:
        place = x + WIDE * (math.log2(batch) - low) / (high - low)
        out.append(f'<text x="{place:.1f}" y="{y + HIGH + 18}" text-anchor="middle">{batch}</text>')
    out.append(f'<text x="{x + WIDE / 2}" y="{y + HIGH + 36}" text-anchor="middle">B</text>')
    out.append(f'<path class="axis" stroke-width="1" d="M{x} {y}V{y + HIGH}H{x + WIDE}"/>')
    for name in dict.fromkeys(n for n, _ in rows):
        own = sorted((r for n, r in rows if n == name), key=lambda r: r["batch"])
        colour, dashed = _colour(name, names), ' stroke-dasharray="5 4"' if name == "FLA" else ""
        out.append(f'<path stroke="{colour}"{dashed} d="M{"L".join(at(r) for r in own)}"/>')
        for r in own:
            cx, cy = at(r).split()
            out.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{colour}"/>')
    return out
