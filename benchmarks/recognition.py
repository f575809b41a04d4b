"""What it costs to find spelled-out recurrences: seconds of search against seconds of Inductor, by layers.

    python benchmarks/recognition.py [--layers 1 48] [--inductor 1 48] [--form step|loop] [--out FILE.json]

Each layer is a spelled-out gated delta rule with its projections, gates and an MLP. "search" is everything this library
does to a graph before Inductor gets it (functional copy, search, self-check, rewrite, report); "Inductor" is
`compile_fx` on Dynamo's graph of the same model, caches off: AOTAutograd, Inductor, and the C++ compiler that it runs.
Dynamo's own time is in neither. Times are CPU seconds of the process and its children, so that a busy machine counts
less; every number of layers is measured in a process of its own, where no self-check is remembered.
FILE.svg, the plot, is written beside FILE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lattn_compile as lc
import lattn_compile.backend as backend
from lattn_compile.testing.backend import recorded

HEADS, KEY, VALUE, WIDTH = 4, 16, 16, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, HEADS * (2 * KEY + VALUE))
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(HEADS * VALUE, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH))

    def forward(self, x: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, -1)).split([KEY, KEY, VALUE], -1)
        k = F.normalize(k, dim=-1)
        g, beta = self.gates(x).chunk(2, -1)
        g, beta = -F.softplus(g), beta.sigmoid()
        outs = []
        for t in range(tokens):
            S = S * g[:, t].exp()[..., None, None]
            u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        x = x + self.out(torch.stack(outs, 1).flatten(2))
        return x + self.mlp(x), S


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new = []
        for layer, S in zip(self.layers, states, strict=True):
            x, S = layer(x, S)
            new.append(S)
        return x, new


class Clock:
    """Seconds spent in a function while it is wrapped: CPU of the process, of the programs it ran, and wall."""

    def __init__(self) -> None:
        self.own = self.children = self.wall = 0.0

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = os.times(), time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                after = os.times()
                self.own += after.user + after.system - before.user - before.system
                self.children += sum(after[2:4]) - sum(before[2:4])
                self.wall += time.perf_counter() - began

        return timed


def arguments(layers: int, tokens: int) -> Any:
    torch.manual_seed(0)
    return torch.randn(2, tokens, WIDTH), [torch.randn(2, HEADS, KEY, VALUE) for _ in range(layers)]


def measure(layers: int, tokens: int, *, inductor: bool) -> dict[str, Any]:
    """One row."""
    model, args = Model(layers).eval(), arguments(layers, tokens)
    row: dict[str, Any] = {"layers": layers}
    with torch.no_grad():
        torch._dynamo.reset()
        before, clock = len(lc.reports()), Clock()
        with recorded() as record, mock.patch.object(backend, "_compile", clock.around(backend._compile)):
            torch.compile(model, backend="lattn_compile", options={"policy": "int8"}, fullgraph=True)(*args)
        report = lc.reports()[before]
        assert len(report.rewritten) == layers, report
        checks = [site.evidence["self_check"] for site in report.rewritten]
        row |= {
            "nodes_after": len(record.graphs[-1].graph.nodes),
            "search_cpu_s": clock.own + clock.children,
            "search_wall_s": clock.wall,
            "self_checks_run": sum(not check["cached"] for check in checks),
            "self_check_s": sum(check["seconds"] for check in checks),
        }
        if inductor:
            row |= inductor_alone(model, args)
            row["share"] = row["search_cpu_s"] / row["inductor_cpu_s"]
            row["share_without_cpp"] = row["search_cpu_s"] / row["inductor_own_cpu_s"]
    return row


def inductor_alone(model: nn.Module, args: Any) -> dict[str, float]:
    from torch._inductor.compile_fx import compile_fx

    clock = Clock()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        torch.compile(model, backend=clock.around(compile_fx), fullgraph=True)(*args)
    return {
        "inductor_cpu_s": clock.own + clock.children,
        "inductor_own_cpu_s": clock.own,
        "inductor_wall_s": clock.wall,
    }


def warm_up(tokens: int, inductor: bool) -> None:
    """Imports, and what Inductor compiles once a process. One head less: its self-check is another's."""
    global HEADS
    heads, HEADS = HEADS, HEADS - 1
    with torch.no_grad(), recorded():
        args = arguments(1, tokens)
        torch.compile(Model(1).eval(), backend="lattn_compile")(*args)
    HEADS = heads
    if inductor:
        with torch.no_grad():
            inductor_alone(nn.Linear(4, 4), (torch.randn(2, 4),))


WIDE, HIGH, LEFT, TOP, RIGHT = 460, 240, 56, 40, 60
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444b55; } .axis { stroke: #9aa3ae; fill: none; }
.grid { stroke: #9aa3ae44; } path { fill: none; stroke-width: 1.8; }
@media (prefers-color-scheme: dark) { text { fill: #c3cad4; } }
"""
SECONDS, SHARE = "#3b82d6", "#d9702e"  # to be told apart on white and on black


def plot(rows: list[dict[str, Any]]) -> str:
    """Seconds of search against layers (line, left axis), and its share of Inductor's time (points, right axis)."""
    most = max(r["layers"] for r in rows)
    step = next(s for s in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if 5 * s >= max(r["search_cpu_s"] for r in rows))
    shares = [r for r in rows if "share" in r]
    percent = next(s for s in (1, 2, 4, 10, 20) if 5 * s >= 100 * max((r["share"] for r in shares), default=0.0))

    def at(layers: float, part: float) -> str:
        return f"{LEFT + WIDE * layers / most:.1f} {TOP + HIGH * (1 - part):.1f}"

    out = [f'<text x="{LEFT}" y="16" font-weight="600">Finding spelled-out recurrences: CPU time by layers</text>']
    out.append(f'<text x="{LEFT - 6}" y="{TOP - 10}" text-anchor="end" style="fill:{SECONDS}">s</text>')
    out.append(f'<text x="{LEFT + WIDE + 6}" y="{TOP - 10}" style="fill:{SHARE}">of Inductor</text>')
    for i in range(6):
        y = TOP + HIGH * (1 - i / 5)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{step * i:g}</text>')
        out.append(f'<text x="{LEFT + WIDE + 6}" y="{y + 4:.1f}">{percent * i} %</text>')
    for r in rows:
        if r["layers"] == 1 or r["layers"] >= 8:
            x = LEFT + WIDE * r["layers"] / most
            out.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{r["layers"]}</text>')
    out.append(f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 36}" text-anchor="middle">layers</text>')
    out.append(f'<path class="axis" stroke-width="1" d="M{LEFT} {TOP}V{TOP + HIGH}H{LEFT + WIDE}V{TOP}"/>')
    line = "L".join(at(r["layers"], r["search_cpu_s"] / (5 * step)) for r in rows)
    out.append(f'<path stroke="{SECONDS}" d="M{line}"/>')
    for r in rows:
        x, y = at(r["layers"], r["search_cpu_s"] / (5 * step)).split()
        out.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{SECONDS}"/>')
    for r in shares:
        x, y = at(r["layers"], 20 * r["share"] / percent).split()
        out.append(f'<rect x="{float(x) - 4:.1f}" y="{float(y) - 4:.1f}" width="8" height="8" fill="{SHARE}"/>')
        out.append(f'<text x="{float(x) + 8:.1f}" y="{float(y) - 6:.1f}">{100 * r["share"]:.1f} %</text>')
    size = f'viewBox="0 0 {LEFT + WIDE + RIGHT + 20} {TOP + HIGH + 46}"'
    body = "\n".join(out)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| layers | search, CPU s | s a layer | self-checks run | Inductor, CPU s | share | without C++ |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in rows:
        share = "- | - | -"
        if "share" in r:
            share = f"{r['inductor_cpu_s']:.1f} | {100 * r['share']:.1f} % | {100 * r['share_without_cpp']:.1f} %"
        own = f"{r['search_cpu_s']:.2f} | {r['search_cpu_s'] / r['layers']:.3f} | {r['self_checks_run']}"
        lines.append(f"| {r['layers']} | {own} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64])
    parser.add_argument(
        "--inductor", type=int, nargs="*", default=[1, 4, 16, 48], help="layers for which Inductor is timed too"
    )
    parser.add_argument("--form", choices=("step", "loop"), default="step", help="one token, or a loop of 8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a row, printed as JSON: what the others run
    args = parser.parse_args()
    tokens = 1 if args.form == "step" else 8
    if args.one is not None:
        inductor = args.one in args.inductor
        warm_up(tokens, inductor)
        print(json.dumps(measure(args.one, tokens, inductor=inductor)))
        return
    rows, load = [], os.getloadavg()[0]
    for layers in args.layers:
        again = [sys.executable, __file__, "--form", args.form, "--one", str(layers)]
        again += ["--inductor", *map(str, args.inductor)]
        rows.append(
            json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, form {args.form}")
    print(table(rows))
    if args.out:
        made = {
            "command": "benchmarks/recognition.py",
            "torch": torch.__version__,
            "form": args.form,
            "cores": os.cpu_count(),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "rows": rows,
        }
        args.out.write_text(json.dumps(made, indent=2) + "\n")
        args.out.with_suffix(".svg").write_text(plot(rows))


if __name__ == "__main__":
    main()
