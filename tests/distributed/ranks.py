"""Runs the `check_*` functions of a module on gloo processes, two or more: the processes start once, for all of them.

    python -m tests.distributed.ranks MODULE FOLDER        (one process; RANK and WORLD_SIZE in the environment)

Every process writes which checks passed, and the traceback of the first that did not, after which it leaves: the others
are in a collective by then, and hear of it from gloo.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def names(module: str) -> list[str]:
    """The checks of a module, in order, without importing it."""
    lines = (ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines()
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def check_")]


def environment(rank: int, world: int) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return env | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}


def start(module: str, folder: Path, world: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.ranks", module, str(folder)]
    return [subprocess.Popen(command, env=environment(rank, world), cwd=ROOT) for rank in range(world)]


def run(module: str, folder: Path, *, world: int = 2, seconds: float = 240) -> list[dict[str, str]]:
    """What every rank says of its checks: "" where one passed, else why not."""
    processes = start(module, folder, world)
    try:
        deadline = time.monotonic() + seconds
        for process in processes:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def require(results: list[dict[str, str]], name: str) -> None:
    """One check as a test: it passed on every rank."""
    said = [f"rank {rank}: {found.get(name, 'not reached')}" for rank, found in enumerate(results)]
    assert all(found.get(name) == "" for found in results), "\n".join(said)


def main(module: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results: dict[str, str] = {}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    checks: Any = importlib.import_module(module)
    checks.FOLDER = folder
    for name in names(module):
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            getattr(checks, name)()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        if os.environ.get("LATTN_TIMES"):
            print(f"rank {rank} {name} {time.perf_counter() - began:.1f} s", flush=True)
        if results[name]:
            break
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    if any(results.values()):
        os._exit(1)  # at once: the other rank waits for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
