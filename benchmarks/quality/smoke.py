"""How long a step of every arm and a row of every policy take on this machine, before a run is planned on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.quality.config import NEAREST, OTHERS
from benchmarks.quality.lab import Lab
from benchmarks.quality.measure import evaluate
from benchmarks.quality.models import build
from benchmarks.quality.tasks import measured
from benchmarks.quality.train import Arm, run

__all__ = ["JOBS", "smoke"]

JOBS = ("base gdn", "base kda", "row gdn exact", "row gdn int8 token", "train gdn qat int8 token", "row gdn fast",
        "base gdn 2", "row gdn int8 replay 8", "train gdn qat int8 replay 8", "train kda qat int8 token",
        "train gdn qat nvfp4 token")  # fmt: skip
"""What is compiled ahead for it, in this order."""


def smoke(lab: Lab, until: float, only: list[str] | None = None) -> None:
    """Prints a line for each measurement and writes all of them; stops when the time is over.

    Args:
        only: measurements whose name begins so.
    """
    found: dict[str, Any] = {}

    def measure(name: str, what: Callable[[], dict[str, Any]]) -> None:
        if time.perf_counter() > until or (only and not name.startswith(tuple(only))):
            return

        def once() -> None:
            began = time.perf_counter()
            found[name] = {**what(), "all_s": time.perf_counter() - began}
            print(f"@@ smoke {name}: {found[name]}", flush=True)
            lab.write("smoke", found)

        lab.attempt(f"smoke {name}", once)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    torch.set_float32_matmul_precision("high")
    bases: list[Arm] = []

    def base(kind: str, seed: int) -> dict[str, Any]:
        arm = lab.base_arm(kind, seed)
        bases.append(arm)
        return _timed([arm])

    measure("base gdn", lambda: base("gdn", 0))
    measure("base gdn kernels", lambda: _kernels(bases[0]))
    measure("learns", lambda: _learns(lab, 12.0 if only is None else max(12.0, until - time.perf_counter() - 30.0)))
    measure("base kda", lambda: base("kda", 0))
    for seed in (1, 2):
        for kind in ("gdn", "kda"):
            measure(f"base {kind} {seed}", lambda kind=kind, seed=seed: base(kind, seed))
    measure("all bases together", lambda: _timed(bases))
    bases.clear()
    for kind in ("gdn", "kda"):
        if not lab.checkpoint(kind, 0).exists():
            lab.save(kind, 0, build(kind, lab.settings.size, 0))
    row = ("int8 token", "int8 replay 8")

    def rows(names: tuple[str, ...], on: str) -> dict[str, Any]:
        model, data, layers = lab.load("gdn", 0), lab.data(on), lab.settings.size.linear
        torch.set_float32_matmul_precision("highest")
        times: dict[str, Any] = {}
        began = time.perf_counter()
        _, reference = evaluate(model, [None] * layers, data)
        times["exact"] = time.perf_counter() - began
        for name in names:
            for again in ("first ", ""):
                began = time.perf_counter()
                got, _ = evaluate(model, [{**NEAREST, **OTHERS}[name]] * layers, data, reference)
                times[again + name] = time.perf_counter() - began
                times["kl of " + name] = got["kl"]["all"]
                if on != "all":
                    break
        torch.set_float32_matmul_precision("high")
        return times

    measure("rows", lambda: rows(row, "all"))
    arms: list[Arm] = []

    def trained(kind: str, name: str, count: int) -> dict[str, Any]:
        arms.clear()
        arms.extend(lab.further_arm(kind, "qat", name, 0) for _ in range(count))
        return _timed(arms, 3)

    measure("qat gdn int8 token", lambda: trained("gdn", "int8 token", 1))
    measure("qat gdn int8 token, 6 together", lambda: trained("gdn", "int8 token", 6))
    measure("qat gdn int8 replay 8", lambda: trained("gdn", "int8 replay 8", 1))
    measure("qat kda int8 token", lambda: trained("kda", "int8 token", 1))
    measure("rows of the reference", lambda: rows(("nvfp4 token, int4 feedback",), "short"))
    measure("qat gdn nvfp4 token", lambda: trained("gdn", "nvfp4 token", 1))

    for number in range(1, len(lab.settings.curriculum)):
        measure(f"base gdn, stage {number}", lambda number=number: _timed([lab.base_arm("gdn", 0, stage=number)], 4))


def _learns(lab: Lab, seconds: float) -> dict[str, Any]:
    """What the first stage of the curriculum teaches in so little time, at two learning rates."""
    s = lab.settings
    arms = []
    for peak in (2e-3, 3e-3, 5e-3):
        arm = lab.base_arm("gdn", 0)
        arm.method = replace(arm.method, peak=peak)
        arm.record()
        arms.append(arm)
    n = run(arms, until=time.perf_counter() + seconds, every=50)
    data = measured(lab.corpus.heldout, {"text": 8, "recall": 64, "copy": 32}, 256, 1)
    out: dict[str, Any] = {"steps": n}
    for arm in arms:
        row, _ = evaluate(arm.model, [None] * s.size.linear, data)
        out[f"peak {arm.method.peak}"] = [row["bits"], row["recall"], row["copy"]]
    return out


def _timed(arms: list[Arm], steps: int = 6) -> dict[str, Any]:
    """Milliseconds a step of all arms, eager and recorded; what a graph takes to record."""
    out: dict[str, Any] = {"arms": len(arms)}
    cuda = arms[0].stream is not None
    for recorded in (False, True) if len(arms) == 1 else (True,):
        if recorded and cuda:
            began = time.perf_counter()
            try:
                for arm in arms:
                    if arm.graph is None:
                        arm.record()
                out["record_s"] = time.perf_counter() - began
            except Exception as error:
                out["not_recorded"] = repr(error)[-600:]
                torch.cuda.synchronize()
        if not recorded:
            began = time.perf_counter()
            for arm in arms:
                arm.step(0.0)
                out["first_loss"] = arm.read(1)[0]
            out["first_s"] = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(steps):
            for arm in arms:
                arm.step(1e-4)
        for arm in arms:
            out["loss"] = arm.read(steps)[0]
        out["ms_recorded" if recorded and arms[0].graph is not None else "ms_eager"] = (
            (time.perf_counter() - began) / steps * 1e3
        )
    if cuda:
        out["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return out


def _kernels(arm: Arm) -> dict[str, Any]:
    """What a step's time on the device goes to."""
    if arm.stream is None:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            arm.step(0.0)
        torch.cuda.synchronize()
    spent = sorted(
        ((e.self_device_time_total / 2e3, e.count // 2, e.key[:60]) for e in seen.key_averages()), reverse=True
    )
    return {"kernels_ms": [f"{ms:.2f} ms {count} x {name}" for ms, count, name in spent[:24]],
            "all_ms": sum(ms for ms, _, _ in spent), "launches": sum(count for _, count, _ in spent)}  # fmt: skip
