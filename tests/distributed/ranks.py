"""Runs the `check_*` functions of `*_checks.py` on several ranks: gloo on CPUs, NCCL on GPUs.

    python -m tests.distributed.ranks FOLDER sharding=2 context=3      area=ranks, one after another
    LATTN_RANKS_DEVICE=cuda python -m tests.distributed.ranks ...      on GPUs, one a rank

What a rank needs is imported once, here, and the ranks of every area are forked from that: a process that starts from
nothing takes longer than most checks do. Every rank writes what each check said: "", or its traceback. Ranks tell one
another after every check, so that one that failed everywhere does not keep the next from running; if one of them does
not answer, all leave.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("LATTN_RANKS_DEVICE", "cpu")
GPU = DEVICE == "cuda" or "LATTN_RANKS_AS_ON_A_GPU" in os.environ
"""Checks compute in float64 there, which no kernel but the reference does: whether ranks agree is the question, not
which kernel runs, and matrix products of other sizes sum in another order. (The second: to try that on CPUs.)"""
ANSWER = timedelta(seconds=30)
"""How long a rank waits for the others behind a check."""

IMPORTED = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
    *("torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed._functional_collectives"),
    *("lattn_compile.backend", "lattn_compile.calibrate", "lattn_compile.demo", "lattn_compile.distributed"),
    *("lattn_compile.integrations.tensor_parallel", "lattn_compile.integrations.transformers"),
    *("lattn_compile.testing.backend", "transformers.generation.utils", "transformers.distributed.tensor_parallel"),
    *("transformers.models.qwen3_next.modeling_qwen3_next", "transformers.models.qwen3_5.modeling_qwen3_5"),
    "transformers.models.kimi_linear.modeling_kimi_linear",
)


def names(area: str) -> list[str]:
    """The checks of an area, in order, without importing it."""
    lines = (ROOT / f"tests/distributed/{area}_checks.py").read_text().splitlines()
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def check_")]


def environment() -> dict[str, str]:
    """One thread a rank, and no pool of compilers: threads do not survive a fork."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": path}


def run(areas: dict[str, int], folder: Path, *, seconds: float = 480) -> dict[str, list[dict[str, str]]]:
    """What every rank of every area says of its checks: "" where one passed, else why not."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.ranks", str(folder)]
    process = subprocess.Popen(
        [*command, *(f"{area}={ranks}" for area, ranks in areas.items())],
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        pass  # what was not reached says so
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    return {area: [read(folder, area, rank) for rank in range(ranks)] for area, ranks in areas.items()}


def read(folder: Path, area: str, rank: int) -> dict[str, str]:
    file = folder / area / f"rank{rank}.json"
    found: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return {name: found.get(name, "not reached") for name in names(area)}


def started(act: Callable[..., None], *args: Any, ranks: int) -> list[Any]:
    """`act(*args, rank)` of every rank, each in a process of its own: forked from this one; for a GPU, which does not
    survive a fork, from nothing."""
    how = multiprocessing.get_context("spawn" if DEVICE == "cuda" else "fork")
    processes = [how.Process(target=act, args=(*args, rank)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def join(folder: Path, rank: int, ranks: int) -> None:
    """The process group of a rank, and its device."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


def check(area: str, folder: Path, ranks: int, rank: int) -> None:
    """All checks of an area, as one of its ranks."""
    import torch
    import torch.distributed as dist

    join(folder, rank, ranks)
    store = dist.distributed_c10d._get_default_store()
    checks: Any = importlib.import_module(f"tests.distributed.{area}_checks")
    checks.FOLDER = folder
    skipped = getattr(checks, "NOT_ON_A_GPU", ()) if GPU else ()
    results: dict[str, str] = {}
    for name in names(area):
        if name in skipped:
            results[name] = ""
            continue
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            getattr(checks, name)()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        if os.environ.get("LATTN_TIMES"):
            print(f"{area} rank {rank} {name} {time.perf_counter() - began:.1f} s", flush=True)
        store.set(f"{name}/{rank}", "done")
        try:
            store.wait([f"{name}/{other}" for other in range(ranks)], ANSWER)
        except RuntimeError:  # in a collective with this rank, which will not come
            return
    if not any(results.values()):
        dist.destroy_process_group()


def main(folder: Path, areas: dict[str, int]) -> None:
    for module in IMPORTED if DEVICE == "cpu" else ():
        with contextlib.suppress(ImportError):  # without transformers there are areas enough
            importlib.import_module(module)
    for area, ranks in areas.items():
        (folder / area).mkdir(parents=True, exist_ok=True)
        for process in started(check, area, folder / area, ranks, ranks=ranks):
            process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {area: int(n) for area, _, n in (text.partition("=") for text in sys.argv[2:])})
