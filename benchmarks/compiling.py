"""Filling Triton's cache on disk in several processes, since compiling takes longer than what a benchmark times."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from torch import Tensor

__all__ = ["compile_in_parallel", "only_compile"]


def compile_in_parallel(arguments: list[str], processes: int, until: float) -> None:
    """Runs this program `processes` times with `arguments` and `--warm I PROCESSES`, at most until then.

    There it calls `only_compile(I, PROCESSES)` and then what launches the kernels.
    """
    command = [sys.executable, *arguments]
    running = [
        subprocess.Popen([*command, "--warm", str(i), str(processes)], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for i in range(processes)
    ]
    for process in running:
        try:
            process.wait(max(until - time.time(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()


def only_compile(mine: int, processes: int) -> None:
    """From now on a launch compiles if its kernel is one of this process's share, every `processes`-th, and no launch
    runs anything."""
    import triton

    run = triton.JITFunction.run
    seen: dict[str, int] = {}

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        constants = sorted((name, str(x)) for name, x in kwargs.items() if not isinstance(x, Tensor))
        key = f"{self.__name__} {constants} {[x is None for x in args]}"
        if seen.setdefault(key, len(seen)) % processes == mine:
            run(self, *args, grid=grid, warmup=True, **kwargs)

    triton.JITFunction.run = compiled
