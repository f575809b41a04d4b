"""Triton kernels compiled before they are needed, by many processes: one takes up to half a minute of one core.

Each process goes through the same calls without launching any kernel, and compiles its share of the kernels that it
meets; Triton's cache on the disk has them for everybody then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["compiling", "start", "wait"]


@contextmanager
def compiling(share: int, shares: int) -> Iterator[list[tuple[str, float]]]:
    """Inside, Triton launches nothing and compiles every `shares`-th kernel that is met, from number `share` on.

    Yields:
        Name and seconds of each kernel that was compiled.
    """
    from triton.runtime.jit import JITFunction

    run, compile_ = JITFunction.run, JITFunction._do_compile
    seen: set[tuple[int, Any]] = set()
    done: list[tuple[str, float]] = []

    def without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def some(self: Any, key: Any, *args: Any) -> Any:
        if (id(self), key) in seen:
            return None
        seen.add((id(self), key))
        if (len(seen) - 1) % shares != share:
            return None
        began = time.perf_counter()
        kernel = compile_(self, key, *args)
        done.append((self.fn.__name__, time.perf_counter() - began))
        return kernel

    JITFunction.run, JITFunction._do_compile = without_launch, some
    try:
        yield done
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_


def start(command: list[str], shares: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts `command --share i/shares` for every i; its output goes to `folder/ahead_i.log`."""
    found = []
    for i in range(shares):
        with open(folder / f"ahead_{i}.log", "wb") as log:
            found.append(
                subprocess.Popen(
                    [sys.executable, "-u", *command, "--share", f"{i}/{shares}"],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    return found


def wait(folder: Path, shares: int, job: str, processes: Callable[[], bool], until: float) -> bool:
    """Waits until every process has said that it is through with `job`; False if the time (of time.perf_counter) is
    over or `processes` says that none runs any more."""
    while time.perf_counter() < until:
        logs = [folder / f"ahead_{i}.log" for i in range(shares)]
        if all(log.exists() and f"@@ {job} " in log.read_text(errors="replace") for log in logs):
            return True
        if not processes():
            return False
        time.sleep(0.2)
    return False
