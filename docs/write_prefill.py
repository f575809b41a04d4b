"""Fills in the tables of `prefill.md`, beside this file. Run it after changing an inverse, or after new times.

    python docs/write_prefill.py [--quick]     all tables; or without those that take a minute: residuals by keys

Times are those of `benchmarks/results/prefill_nvidia_h200.json`, residuals of trained models those of
`benchmarks/results/prefill_residuals.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lattn_compile.kernels.reference.inverse import inverse_of, residual
from lattn_compile.modes import BlockDoubling, Inverse, Neumann, NewtonSchulz

PAGE = Path(__file__).resolve().with_name("prefill.md")

RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "prefill_nvidia_h200.json"
TRAINED = RESULTS.with_name("prefill_residuals.json")

KEYS = ("independent", "cosine 0.5", "cosine 0.9", "repeated")
BETAS = (0.5, 1.0, 1.9)
GATES = (0.0, -0.01, -1.0)
INVERSES: tuple[str | Inverse, ...] = (
    *(Neumann(order) for order in (7, 15, 31, 63)),
    *(NewtonSchulz(iterations) for iterations in (4, 6)),
    *(BlockDoubling(block) for block in (8, 16)),
    "exact",
)
MAX_RESIDUAL = 1e-3
SEEDS = 8


def system(keys: str, beta: float, g: float, *, seed: int = 0, size: int = 64, key_dim: int = 128) -> Tensor:
    """A of `I + A`, float32 `[size, size]`: unit keys at some cosine to one direction, one beta, one gate."""
    rng = torch.Generator().manual_seed(seed)
    cosine = {"independent": 0.0, "repeated": 1.0}.get(keys) if " " not in keys else float(keys.split()[1])
    assert cosine is not None
    direction = torch.nn.functional.normalize(torch.randn(key_dim, generator=rng, dtype=torch.float64), dim=0)
    noise = torch.randn(size, key_dim, generator=rng, dtype=torch.float64)
    noise = torch.nn.functional.normalize(noise - (noise @ direction)[:, None] * direction, dim=-1)
    unit = cosine * direction + (1 - cosine**2) ** 0.5 * noise
    at = torch.arange(size, dtype=torch.float64)
    return (beta * (unit @ unit.T) * torch.exp(g * (at[:, None] - at))).tril(-1).float()


def worst(keys: str, beta: float, g: float, inverse: str | Inverse) -> float:
    """The largest residual of some chunks of 64 tokens, computed in float32."""
    strict = torch.stack([system(keys, beta, g, seed=seed) for seed in range(SEEDS)])
    return float(residual(strict, inverse_of(strict, inverse)).max())


def table(beta: float) -> str:
    names = [str(inverse) for inverse in INVERSES]
    lines = ["| keys | g | " + " | ".join(names) + " |", "|---|---|" + "---:|" * len(names)]
    for keys in KEYS:
        for g in GATES:
            cells = [worst(keys, beta, g, inverse) for inverse in INVERSES]
            shown = [f"**{_short(x)}**" if x <= MAX_RESIDUAL else _short(x) for x in cells]
            lines.append(f"| {keys} | {g:g} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _short(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def times() -> str:
    """A row for each kind and case: forward, and forward and backward, with one and with eight sequences."""
    rows: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        rows.setdefault((row["kind"], row["case"]), {})[row["batch"]] = row
    columns = [(batch, what) for batch in (1, 8) for what in ("forward_ms", "train_ms")]
    head = [f"B = {batch} {'forward' if what == 'forward_ms' else 'and backward'}" for batch, what in columns]
    lines = ["| | | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(columns)]
    for (kind, case), found in rows.items():
        cells = []
        for batch, what in columns:
            mine, bar = (x.get(batch, {}).get(what) for x in (found, rows.get((kind, "exact"), {})))
            ratio = f" ({bar / mine:.2f})" if mine and bar and case != "exact" else ""
            cells.append(f"{mine:.2f}{ratio}" if mine else "-")
        lines.append(f"| {kind.upper()} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trained() -> str:
    """What each inverse left in the layers of trained models: the share of chunks and heads over the bound, and the
    largest residual."""
    found = json.loads(TRAINED.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in found["rows"]:
        cells.setdefault(row["inverse"], {}).setdefault(row["model"], []).append(row)
    models = list(next(iter(cells.values())))
    head = [f"{model.upper()}: {what}" for model in models for what in ("over", "largest")]
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for inverse, by_model in cells.items():
        shown = []
        for model in models:
            rows = by_model[model]
            over, chunks = (sum(row[what] for row in rows) for what in ("over", "chunks"))
            largest = max((row["largest"] for row in rows), key=lambda x: (x != x, x))
            share = f"{100 * over / chunks:.3g} %"
            shown += [f"**{share}**" if over == 0 else share, _short(largest)]
        lines.append(f"| {inverse} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _filled(text: str, name: str, found: str) -> str:
    return re.sub(rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{found}\n\n{m[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave the residuals by keys as they are")
    text = _filled(PAGE.read_text(encoding="utf-8"), "times", times())
    text = _filled(text, "trained", trained())
    if not parser.parse_args().quick:
        found = "\n\n".join(f"`beta = {beta:g}`:\n\n{table(beta)}" for beta in BETAS)
        text = _filled(text, "residuals", found)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
