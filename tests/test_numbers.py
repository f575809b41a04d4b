"""Measured numbers in the README and the docs are in the results files that the page links to, and those say how they
were made."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

OPEN = ("kernels.md", "serving.md")
"""Pages that still quote what a run measured whose results were not kept."""

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_UNITS = {"ms": (1.0, 1e-3, 1e3), "µs": (1.0, 1e-3, 1e-6), "GB": (1.0, 1e9), "tokens/s": (1.0,)}
"""What a file may hold in the place of one of a unit: milliseconds or seconds or microseconds, bytes or gigabytes."""
_MEASURED = re.compile(rf"({_NUMBER}(?:(?:, | and | / | to | or | against |–){_NUMBER})*)\s({'|'.join(_UNITS)})\b")


def _measured(text: str) -> Iterator[tuple[str, str]]:
    """Number and unit of everything with three digits or more: fewer are found in any file by chance."""
    text = re.sub(r"(?sm)^```.*?^```", "", text)  # what a command prints
    for match in _MEASURED.finditer(text):
        for number in re.findall(_NUMBER, match[1]):
            number = number.rstrip(",").replace(",", "")
            if len(number.replace(".", "").lstrip("0")) >= 3:
                yield number, match[2]
    for table in re.finditer(r"(?m)^\|.*\|\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", text):  # the unit is in the column's head
        head = [cell.strip() for cell in table[0].split("\n", 1)[0].split("|")]
        for row in table[1].splitlines():
            for name, cell in zip(head, (c.strip() for c in row.split("|")), strict=False):
                unit = next((u for u in _UNITS if re.search(rf"\b{u}\b", name)), None)
                if unit and re.fullmatch(_NUMBER, cell) and len(re.sub(r"[.,]", "", cell).lstrip("0")) >= 3:
                    yield cell.replace(",", ""), unit


def _numbers(x: Any) -> Iterator[float]:
    if isinstance(x, dict):
        for key, value in x.items():
            yield from _numbers(key)
            yield from _numbers(value)
    elif isinstance(x, list):
        for value in x:
            yield from _numbers(value)
    elif isinstance(x, str):
        yield from (float(n.replace(",", "")) for n in re.findall(_NUMBER, x))
    elif isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x):
        yield float(x)


def _linked(page: Path) -> list[Path]:
    """Results files that a page links to, or that one does which it links to, with the data that tables in Markdown
    were made from."""
    text = page.read_text(encoding="utf-8")
    others = [page.parent / link for link in re.findall(r"\]\(([\w/.-]+\.md)[)#]", text)]
    texts = [text, *(p.read_text(encoding="utf-8") for p in others if p.resolve() in PAGES)]
    stems = {name.rsplit(".", 1)[0] for t in texts for name in re.findall(r"benchmarks/results/([\w.]+)", t)}
    return sorted(p for p in RESULTS.iterdir() if p.name.rsplit(".", 1)[0] in stems and p.suffix in _READ)


_READ = {
    ".json": lambda text: json.loads(text),
    ".jsonl": lambda text: [json.loads(line) for line in text.splitlines() if line.strip()],
    ".md": lambda text: text,
}


def _missing(text: str, files: list[Path]) -> list[str]:
    known = sorted({n for path in files for n in _numbers(_READ[path.suffix](path.read_text(encoding="utf-8")))})

    def there(number: str, unit: str) -> bool:
        half = 0.50001 * 10.0 ** -len(number.partition(".")[2])
        for scale in _UNITS[unit]:
            low, high = (scale * (float(number) + way) for way in (-half, half))
            i = bisect.bisect_left(known, low)
            if i < len(known) and known[i] <= high:
                return True
        return False

    return [f"{number} {unit}" for number, unit in dict.fromkeys(_measured(text)) if not there(number, unit)]


SOURCES = RESULTS / "sources.json"
"""What results files do not say themselves: what made them, and the commit that they came with."""
_SAID = {
    "command": {"command"},
    "commit": {"commit"},
    "hardware": {"hardware", "gpu", "machine", "cpu"},
    "versions": {"torch", "versions"},
}


def _keys(x: Any) -> set[str]:
    if isinstance(x, dict):
        return set(x).union(*map(_keys, x.values()))
    return set().union(*map(_keys, x)) if isinstance(x, list) else set()


def test_results_say_how_they_were_made() -> None:
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    files = [p for p in sorted(RESULTS.iterdir()) if p.suffix in (".json", ".jsonl") and p != SOURCES]
    lacking = {}
    for path in files:
        said = _keys(_READ[path.suffix](path.read_text(encoding="utf-8"))) | set(sources.get(path.name, ()))
        if silent := [what for what, keys in _SAID.items() if not said & keys]:
            lacking[path.name] = silent
    assert not lacking, "write them into the file, or into sources.json"
    assert set(sources) <= {path.name for path in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_numbers_are_in_the_results_that_the_page_links_to(page: Path) -> None:
    missing = _missing(page.read_text(encoding="utf-8"), _linked(page))
    if missing and page.name in OPEN:
        pytest.xfail(f"{page.name}: {missing}")
    assert not missing, "measured by no file that this page links to in benchmarks/results"


def test_a_number_that_no_file_has_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"ms": 1.2345, "bytes": 3.11e9, "us": [77.04]}')
    text = "It takes 1.23 or 1.24 ms and 3.11 GB, 77.0 and 78 µs.\n"
    text += "\n| what | ms |\n|---|---:|\n| a | 1.234 |\n| b | 9.87 |\n"
    assert _missing(text, [path]) == ["1.24 ms", "9.87 ms"]
