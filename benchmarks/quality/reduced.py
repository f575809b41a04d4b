"""`python -m benchmarks.quality --reduced`: a small model on two CPU cores, held against the published order.

What a smaller model on another machine can be held to is not a number but an order: of every two headline rows that the
published results have more than two spreads, and a factor of two, apart at the same horizon, the one that costs less
there has to cost less here, in |Δ log p| and in KL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.quality.config import HEADLINE
from benchmarks.quality.verdict import CONTROL, reproduced, seeds

__all__ = ["PUBLISHED", "check"]

PUBLISHED = Path(__file__).resolve().parents[1] / "results" / "quality.json"

_STEP = "256"
"""The bucket of horizons that both have."""


def check(result: dict[str, Any], published: Path = PUBLISHED) -> int:
    """Prints what was measured and which orders hold. Returns 0, or 1 if any does not, or could not be looked at."""
    rows = result.get("rows", [])
    print(f"{'':36}{'|Δ log p|':>12}{'KL':>12}{'bits a byte':>14}")
    for name in ("exact", CONTROL, *HEADLINE):
        cells = []
        for of in ("dlogp", "kl", "bits"):
            found = seeds([r for r in rows if of in r], "gdn", "base", name, of)
            cells.append(f"{found[0]:.3g}" if found else "-")
        print(f"{name:36}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}")
    if not published.exists():
        print(f"{published} is not there: nothing to compare with.")
        return 1
    theirs = json.loads(published.read_text(encoding="utf-8"))["rows"]
    held = [(of, *pair) for of in ("dlogp", "kl") for pair in reproduced(theirs, rows, "gdn", of, _STEP)]
    print(f"\n{sum(holds is True for *_, holds in held)} of {len(held)} orders of rows that are apart hold.")
    for of, less, more, holds in held:
        if holds is not True:
            print(f"{'not so here' if holds is False else 'not measured here'}: {of} of {less} < {more}")
    if any(holds is None for *_, holds in held):
        print("The time ended before everything was measured: --seconds gives it more.")
    return 0 if held and all(holds for *_, holds in held) else 1
