"""Runs the parts one after another under a clock, side by side where they do not wait for the same device.

Whatever happens to a part, its results are on the disk, and `FILE.json` is made of them after every part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality import ahead
from benchmarks.quality.config import Settings

__all__ = ["Supervisor"]

_WORK = ["-m", "benchmarks.quality.work"]


class Supervisor:
    """Starts processes of `work.py`, and ends those that it started."""

    def __init__(
        self, folder: Path, settings: str, device: str, seconds: float, collect: Callable[[dict[str, float]], Any]
    ) -> None:
        self.folder, self.settings, self.device, self.collect = folder, settings, device, collect
        self.began, self.seconds = time.perf_counter(), seconds
        self.spent: dict[str, float] = {}
        self.running: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.began)

    def command(self, stage: str, *more: str) -> list[str]:
        return [
            *_WORK,
            stage,
            "--folder",
            str(self.folder),
            "--settings",
            self.settings,
            "--device",
            self.device,
            *more,
        ]

    def start(self, stage: str, *more: str, name: str | None = None, quiet: bool = True) -> subprocess.Popen[bytes]:
        """A process whose output goes to `folder/<name>.log`, or to ours."""
        log = open(self.folder / f"{name or stage}.log", "ab") if quiet else None  # noqa: SIM115
        command = [sys.executable, "-u", *self.command(stage, *more)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT if quiet else None, env=_environment())
        if log is not None:
            log.close()
        self.running.append(process)
        return process

    def ahead(self, shares: int, *more: str) -> list[subprocess.Popen[bytes]]:
        """Compiling in the background."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        processes = ahead.start(self.command("ahead", *more), shares, self.folder)
        self.running += processes
        return processes

    def stage(
        self, stage: str, seconds: float, *more: str, tries: int = 3, grace: float = 25.0,
        first: subprocess.Popen[bytes] | None = None,
    ) -> None:  # fmt: skip
        """A part in a process, again if the process dies of something; ended when it does not end itself.

        Args:
            first: a process that was started for it before.
        """
        end = time.perf_counter() + min(seconds, self.left())
        began = time.perf_counter()
        for _ in range(tries):
            left = end - time.perf_counter()
            if left < 2.0:
                break
            process = first or self.start(stage, "--seconds", f"{left:.1f}", *more, quiet=False)
            first = None
            try:
                code = process.wait(min(left + grace, max(1.0, self.left())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                print(f"{stage}: ended by the clock", flush=True)
                break
            if code == 0:
                break
            print(f"{stage}: exit {code}", flush=True)
        self.spent[stage] = self.spent.get(stage, 0.0) + time.perf_counter() - began
        print(f"== {stage}: {self.spent[stage]:.0f} s, {self.left():.0f} s left", flush=True)
        self.collect(self.spent)

    def join(self, processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
        """Waits for processes, and ends them when the time is over."""
        end = time.perf_counter() + max(0.0, min(seconds, self.left()))
        for process in processes:
            try:
                process.wait(max(0.0, end - time.perf_counter()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def finish(self) -> None:
        """Ends whatever still runs of what was started here."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.collect(self.spent)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def on_gpu(s: Supervisor, settings: Settings, shares: int, steps: int | None) -> None:
    """The order of a run on one GPU, and how its time is divided. What runs beside is on other cores."""
    more = [] if steps is None else ["--steps", str(steps)]
    compiled, trained, last = (s.folder / f"go_{name}" for name in ("bases", "measured", "others"))
    for path in (compiled, trained, last):
        path.unlink(missing_ok=True)
    # Libraries load for up to a minute on a machine that has not seen them yet: the first to need them starts first,
    # and what comes later loads them while the bases are trained.
    end = 0.5 * s.left()
    training = s.start("bases", "--seconds", f"{end:.1f}", "--after", str(compiled), quiet=False)
    compiling = s.ahead(shares)
    until = time.perf_counter() + 0.12 * s.left()
    for kind in settings.models:
        ahead.wait(s.folder, shares, f"base {kind}", lambda: any(p.poll() is None for p in compiling), until)
    print(f"compiled what the bases need, {s.left():.0f} s left", flush=True)
    compiled.touch()
    measuring = s.start("measured", "--seconds", f"{s.left() - 45.0:.0f}", "--after", str(trained), *more, quiet=False)
    s.stage("bases", end - (s.seconds - s.left()), grace=40.0, first=training)
    for draft in s.folder.glob("draft_*.safetensors"):  # of bases that were ended by the clock
        base = draft.with_name(draft.name.replace("draft", "base"))
        if not base.exists():
            draft.replace(base)
    trained.touch()
    beside = [s.start("calibrate", "--model", kind, name=f"calibrate_{kind}") for kind in settings.models]
    apart = [
        s.start("others", "--share", f"{i}/6", "--seconds", f"{max(1.0, s.left() - 12.0):.0f}", "--after", str(last),
                name=f"others_{i}")
        for i in range(6)
    ]  # fmt: skip
    s.stage("measured", s.left() - 45.0, *more, first=measuring, grace=10.0)
    last.touch()
    s.join(beside + compiling, 0.0)
    s.join(apart, s.left() - 8.0)
    s.finish()


def on_cpu(s: Supervisor, settings: Settings, *, everything: bool) -> None:
    """Every part on CPU cores, or without `everything` the headline's."""
    s.stage("bases", 0.6 * s.left())
    if not everything:
        s.stage("ptq", s.left())
        return
    beside = [s.start("calibrate", "--model", kind, name=f"calibrate_{kind}") for kind in settings.models]
    s.stage("ptq", s.left())
    s.join(beside, s.left())
    for stage in ("further", "rest", "others"):
        s.stage(stage, s.left())
    s.finish()
