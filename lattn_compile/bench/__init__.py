"""`lattn-compile bench`: times the kernels on this machine's GPU, beside flash-linear-attention's where it is there.

Every case is first held to float64 on a short run, in a process of its own, which also compiles its kernels; if one is
off, nothing is timed. Times are medians of replays of a CUDA graph. `decode.py` has the token loop; `tables.py` writes
what was found as Markdown, JSON and a plot.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lattn_compile.errors import PolicyError, UnsupportedError

if TYPE_CHECKING:
    from lattn_compile.bench.decode import Case

__all__ = ["run"]


def run(*, batch: int = 4, tokens: int = 4096, out: Path | None = None, only: str = "", seconds: float = 3600.0) -> int:
    """Checks, times, prints a table, and writes `kernels_<gpu>.md`, `.json` and, with matplotlib, `.png` into `out`.

    Args:
        batch, tokens: B sequences of T tokens. only: a regular expression that is found in cases' names.
        seconds: no case is begun after that; what was found is written after every case.

    Returns:
        The exit code: 1 if a kernel computes wrongly; then nothing is timed or written.

    Raises:
        UnsupportedError: no GPU. PolicyError: `only` is in no case's name, or no regular expression.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "bench",
            got="a machine without a CUDA device",
            want="a GPU to time the Triton kernels on",
            remedy="Run it where torch.cuda.is_available(); kernels of a CPU are timed by benchmarks/cpu_decode.py.",
        )
    from lattn_compile.bench import decode, tables

    began = time.time()
    cases = _named(only, decode.CASES)
    with multiprocessing.get_context("spawn").Pool(min(len(cases), os.cpu_count() or 1)) as pool:
        checked = pool.map(decode.prepare, cases, chunksize=1)
    broken = [
        f"{case.name}: {what} is off by {error:.2g} (bound {bound:.0e})"
        for case, rows in zip(cases, checked, strict=True)
        for what, error, bound in rows
        if not error <= bound
    ]
    if broken:
        print("Not timed, because these are wrong:", *broken, sep="\n  ", flush=True)
        return 1
    print(f"{len(cases)} cases are right, {time.time() - began:.0f} s", flush=True)
    found = None
    for found in decode.measure(cases, batch, tokens):
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            name = f"kernels_{found['gpu'].lower().replace(' ', '_')}"
            (out / f"{name}.md").write_text(tables.markdown(found))
            (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        if time.time() - began > seconds:
            print(f"stopped after {seconds:.0f} s, {len(found['rows'])} of {len(cases)} cases", flush=True)
            break
    if found is not None:
        print(tables.markdown(found))
        if out is not None:
            tables.plot(found, out / f"{name}.png")
    return 0


def _named(only: str, cases: Sequence[Case]) -> list[Case]:
    try:
        found = [case for case in cases if re.search(only, case.name)]
    except re.error as error:
        raise PolicyError("only", got=repr(only), want="a regular expression", remedy=f"It says: {error}.") from None
    if not found:
        names = ", ".join(case.name for case in cases)
        raise PolicyError("only", got=repr(only), want="part of a case's name", remedy=f"There are: {names}.")
    return found
