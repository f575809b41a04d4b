"""Writes `drift.md` and its plots, beside this file, from `benchmarks/results/drift.json`. Run it after measuring."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "drift.json"
sys.path.insert(0, str(HERE.parent))

from docs.line_plot import Box, line_plot  # noqa: E402

BOX = Box(left=58, top=34, width=470, height=250, margin=262, gap=22)

PLOTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "drift-formats": (
        "One rounding a token, by format (gdn)",
        "gdn",
        {"nvfp4": "nvfp4 token", "fp8": "fp8_e4m3/*x64 token", "int8": "int8/*x64 token", "bf16": "bf16 token",
         "fp16": "fp16 token"},
    ),
    "drift-windows": (
        "fp8, by write mode (gdn)",
        "gdn",
        {"token": "fp8_e4m3/*x64 token", "replay 4": "fp8_e4m3/*x64 replay(4)", "replay 16": "fp8_e4m3/*x64 replay(16)",
         "replay 64": "fp8_e4m3/*x64 replay(64)",
         "two_precision, bf16 anchor": "two_precision(16, read fp8_e4m3/128x1, anchor bf16)",
         "two_precision, fp32 anchor": "two_precision(16, read fp8_e4m3/128x1, anchor fp32)"},
    ),
    "drift-feedback": (
        "One rounding a token, with an int4 residual and without (gdn)",
        "gdn",
        {"nvfp4": "nvfp4 token", "nvfp4 stochastic": "nvfp4 token rounding='stochastic'", "fp8": "fp8_e4m3/*x64 token",
         "nvfp4 + int4": "nvfp4 token feedback='int4'", "int8": "int8/*x64 token",
         "fp8 + int4": "fp8_e4m3/*x64 token feedback='int4'", "int8 + int4": "int8/*x64 token feedback='int4'"},
    ),
    "drift-additive": (
        "A recurrence that only adds (retention)",
        "retention",
        {"nvfp4 token": "nvfp4 token", "fp8 token": "fp8_e4m3/*x64 token", "nvfp4 replay 16": "nvfp4 replay(16)",
         "int8 token": "int8/*x64 token", "fp8 replay 16": "fp8_e4m3/*x64 replay(16)",
         "int8 + int4": "int8/*x64 token feedback='int4'", "bf16 token": "bf16 token"},
    ),
}  # fmt: skip
"""File name -> title, kind, and its lines: label -> policy, at most as many as there are colours."""


class Drift:
    """The measured curves."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.rows = data, data["rows"]

    def row(self, policy: str, kind: str = "gdn") -> dict[str, Any]:
        return next(row for row in self.rows if (row["policy"], row["kind"]) == (policy, kind))

    def at(self, row: dict[str, Any], tokens: int, what: str = "state_error") -> str:
        return number(row[what][tokens // self.data["every"] - 1])


def number(x: float) -> str:
    """Three digits, without an exponent where people do without."""
    return f"{x:.3g}" if 1e-4 <= x < 1e3 else f"{x:.1e}".replace("e-0", "e-")


def svg(drift: Drift, title: str, kind: str, lines: dict[str, str]) -> str:
    """State error against tokens, logarithmic, a line a policy, labelled at its end."""
    every, tokens = drift.data["every"], drift.data["tokens"]
    curves = {label: drift.row(policy, kind)["state_error"] for label, policy in lines.items()}
    values = [x for curve in curves.values() for x in curve]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def part(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    powers = [(power, f"{10.0**power:g}".replace("e-0", "e-")) for power in range(low, high + 1)]
    return line_plot(
        BOX,
        f"{title}: relative error of the state",
        "tokens",
        [(i / 4, str(tokens * i // 4)) for i in range(5)],
        [((power - low) / (high - low), mark) for power, mark in powers],
        {label: [((j + 1) * every / tokens, part(x)) for j, x in enumerate(curve)] for label, curve in curves.items()},
        {label: number(curve[-1]) for label, curve in curves.items()},
    )


def table(drift: Drift, kind: str) -> str:
    last = drift.data["tokens"]
    points = sorted({last // 16, last // 4, last})
    heads = [f"state, {t}" for t in points]
    out = [
        f"| policy | bytes a value | {' | '.join(heads)} | output, last {drift.data['every']} |",
        f"|---|{'---:|' * (len(points) + 2)}",
    ]
    for row in drift.rows:
        if row["kind"] == kind:
            cells = [drift.at(row, t) for t in points] + [drift.at(row, last, "output_error")]
            policy = row["policy"].replace("'", "").replace("*", "\\*")
            out.append(f"| {policy} | {row['bytes_a_value']:.2f} | {' | '.join(cells)} |")
    return "\n".join(out)


def findings(drift: Drift) -> list[str]:
    """What the numbers say, with the numbers."""
    data, ends = drift.data, {(row["kind"], row["policy"]): row["state_error"][-1] for row in drift.rows}

    def end(policy: str, kind: str = "gdn") -> str:
        return number(ends[kind, policy])

    def gain(policy: str) -> float:
        return float(ends["gdn", policy] / ends["gdn", f"{policy} feedback='int4'"])

    fp8, int8, nvfp4 = "fp8_e4m3/*x64", "int8/*x64", "nvfp4"
    two = "two_precision(16, read fp8_e4m3/128x1, anchor {})"
    read = number(drift.row(two.format("fp32"))["output_error"][-1])
    grown = number(drift.row(f"{nvfp4} token")["state_error"][3])
    stochastic, int4 = "token rounding='stochastic'", "token feedback='int4'"
    adds = "retention"
    return [
        f"**Every write adds its error.** fp8 in token mode ends at {end(f'{fp8} token')}; stored every 16 tokens "
        f"(`replay(16)`) at {end(f'{fp8} replay(16)')}, every 64 at {end(f'{fp8} replay(64)')}: about the square root "
        "of the number of writes.",
        f"**nvfp4 in token mode grows** when the decay is slow: {grown} after {4 * data['every']} tokens, "
        f"{end(f'{nvfp4} token')} after {data['tokens']}. `replay(16)` stays at {end(f'{nvfp4} replay(16)')}, which is "
        f"why the preset `nvfp4` uses it. Stochastic rounding ({end(f'{nvfp4} {stochastic}')}) and an int4 residual "
        f"({end(f'{nvfp4} {int4}')}) hold it too; a Hadamard rotation does not "
        f"({end(nvfp4 + ' token rotation=' + repr('hadamard_k'))}).",
        f"**Where nothing overwrites, fp8 in token mode grows too**: retention ends at {end(f'{fp8} token', adds)}, "
        f"with stochastic rounding at {end(f'{fp8} {stochastic}', adds)}, under `replay(16)` at "
        f"{end(f'{fp8} replay(16)', adds)}, with an int4 residual at {end(f'{fp8} {int4}', adds)}. A change smaller "
        "than half a step leaves a code as it is, whose value then follows the largest one of its tile: the state "
        f"becomes too large. There `replay(16)` does not hold nvfp4 ({end(f'{nvfp4} replay(16)', adds)}), an int4 "
        f"residual does ({end(f'{nvfp4} {int4}', adds)}).",
        f"**Error feedback buys most for its bytes.** An int4 residual, half a byte a value, lowers the error of int8 "
        f"{gain(f'{int8} token'):.0f} times and that of fp8 {gain(f'{fp8} token'):.0f} times.",
        f"**`two_precision` does not drift.** Its fp32 anchor ends at {end(two.format('fp32'))}, the rounding of fp32 "
        f"itself; what remains is the error of reading a rounded copy, {read} of the output at any length. With a bf16 "
        f"anchor it drifts as bf16 does with a write every 16 tokens ({end(two.format('bf16'))}).",
        f"**Stochastic rounding costs error where rounding to nearest has no bias** (int8 of the delta rule: "
        f"{end(f'{int8} {stochastic}')} instead of {end(f'{int8} token')}) and helps where it has one.",
        f"**Factors of a replay ring** in bf16 or int8 do not show beside the anchor's rounding "
        f"({end(f'{fp8} replay(16, bf16 factors)')}, {end(f'{fp8} replay(16, int8 factors)')}; without, "
        f"{end(f'{fp8} replay(16)')}); in fp8 they do ({end(f'{fp8} replay(16, fp8_e4m3 factors)')}).",
        f"**Narrower tiles help int8** ({end('int8/*x1 token')} with a scale a column, {end('int8/*x* token')} with "
        f"one a head), and fp8, whose codes have exponents of their own, less ({end('fp8_e4m3/*x1 token')}, "
        f"{end('fp8_e4m3/*x* token')}).",
        f"**A rounded gate** costs little here (bf16: {end('exact gate=' + repr('bf16'))}): its relative error is one "
        "of a logarithm near 0.",
    ]


def markdown(drift: Drift) -> str:
    data, size = drift.data, drift.data["size"]

    def filled(text: str, first: str = "") -> str:
        rest = " " * len(first)
        return textwrap.fill(text, 118, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)

    intro = [
        "How far a rounded state is from the exact one after thousands of tokens. A single rounding says little: what "
        "counts is whether the recurrence forgets errors faster than its writes add them. These are random inputs with "
        f"almost no decay (`{data['decay']}`), the hardest case for a stored state; a stronger decay forgets "
        "errors sooner. They compare ways to store a state with each other, and say nothing about a model's quality.",
        f"Errors are relative Frobenius norms against a float64 run that rounds nothing; H = {size['key_heads']}, "
        f"HV = {size['value_heads']}, K = V = {size['key_dim']}, {data['tokens']} tokens, fp32 arithmetic, torch "
        f"{data['torch'].partition('+')[0]}. `python benchmarks/drift.py` measures again and rewrites this page.",
    ]
    bytes_note = (
        "Bytes are those of the carried state: codes, scales, residual, the ring's records and cursors. Chunk mode "
        "also carries an exact state, and `two_precision` its anchor and the window's raw inputs."
    )
    parts = [
        "# Drift",
        *(filled(text) for text in intro),
        *(f"![{title}]({name}.svg)" for name, (title, _, _) in PLOTS.items()),
        "## What the numbers say",
        "\n".join(filled(text, "* ") for text in findings(drift)),
        "## The delta rule (gdn)",
        filled(bytes_note),
        table(drift, "gdn"),
        "## A recurrence that only adds (retention)",
        table(drift, "retention"),
    ]
    return "\n\n".join(parts) + "\n"


def pages(data: dict[str, Any]) -> dict[str, str]:
    """Every file that this script writes, by name."""
    drift = Drift(data)
    plots = {f"{name}.svg": svg(drift, *plot) for name, plot in PLOTS.items()}
    return {"drift.md": markdown(drift), **plots}


if __name__ == "__main__":
    for name, text in pages(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        (HERE / name).write_text(text, encoding="utf-8")
