"""Runs the parts one after another under a clock, side by side where they do not wait for the same device.

Whatever happens to a part, its results are on the disk, and `FILE.json` is made of them after every part.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import ahead
from benchmarks.quality.config import Settings

__all__ = ["PARTS", "Supervisor", "on_cpu", "on_gpu"]

_WORK = ["-m", "benchmarks.quality.work"]
PARTS = ("further", "rows", "others")
"""Of a run, behind the bases: further trainings, what is measured on the bases, what the torch reference computes."""
_OTHERS = 6
"""Processes that share what the torch reference computes of a model: each waits for its own launches."""


class Supervisor:
    """Starts processes of `work.py`, and ends those that it started."""

    def __init__(
        self, folder: Path, settings: str, device: str, seconds: float, collect: Callable[[dict[str, float]], Any]
    ) -> None:
        self.folder, self.settings, self.device, self.collect = folder, settings, device, collect
        self.began, self.seconds = time.perf_counter(), seconds
        self.spent: dict[str, float] = {}
        self.running: list[subprocess.Popen[bytes]] = []
        self.begun: dict[int, tuple[list[str], Path | None]] = {}
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
        command = [sys.executable, "-u", *self.command(stage, *more)]
        return self._begin(command, self.folder / f"{name or stage}.log" if quiet else None)

    def _begin(self, command: list[str], log: Path | None) -> subprocess.Popen[bytes]:
        if log is None:
            process = subprocess.Popen(command, env=_environment())
        else:
            with open(log, "ab") as file:
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=_environment())
        self.running.append(process)
        self.begun[process.pid] = (command, log)
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

    def join(self, processes: list[subprocess.Popen[bytes]], seconds: float, tries: int = 3) -> None:
        """Waits for processes, begins those again that died of something, and ends them when the time is over. What is
        there is put together now and then: who started this may end it without notice."""
        end = time.perf_counter() + max(0.0, min(seconds, self.left()))
        left = dict.fromkeys(processes, tries - 1)
        collected = time.perf_counter()
        while any(process.poll() is None for process in left) and time.perf_counter() < end:
            time.sleep(0.1)
            if time.perf_counter() > collected + 15.0:
                self.collect(self.spent)
                collected = time.perf_counter()
            for process in [p for p, again in left.items() if p.poll() not in (None, 0) and again]:
                print(f"exit {process.returncode}, begun again: {self.begun[process.pid][0][3]}", flush=True)
                left[self._begin(*self.begun[process.pid])] = left.pop(process) - 1
        for process in left:
            if process.poll() is None:
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


def on_gpu(
    s: Supervisor, settings: Settings, shares: int, steps: int | None, *, parts: Sequence[str], together: int,
    methods: Sequence[str] = (),
) -> None:  # fmt: skip
    """The order of a run on one GPU, and how its time is divided. What runs beside is on other cores.

    Args:
        parts: of PARTS; another run goes on with the others (`--resume`).
        methods: further trainings of these only; none: all.
        together: further trainings of each model side by side, about 5 GB each.
    """
    compiled, trained = (s.folder / f"go_{name}" for name in ("bases", "rows"))
    for path in (compiled, trained):
        path.unlink(missing_ok=True)
    bases = [(kind, seed) for kind in settings.models for seed in range(settings.seeds)]
    missing = not all((s.folder / f"base_{kind}_{seed}.safetensors").exists() for kind, seed in bases)
    those = ["--methods", *methods]
    compiling = s.ahead(shares, *those)
    # Libraries load for up to a minute on a machine that has not seen them yet: everything starts at once, the first to
    # need them first, and what comes later waits for the bases.
    end = (0.35 if "further" in parts else 0.64) * s.left() if missing else 0.0
    first = s.start("bases", "--seconds", f"{end:.1f}", "--after", str(compiled), quiet=False) if missing else None
    more = ["--seconds", f"{s.left() - 12.0:.0f}", "--after", str(trained)]
    options = {
        "rows": [[]],
        "further": [[*those, "--together", str(together), *([] if steps is None else ["--steps", str(steps)])]],
        "others": [["--share", f"{i}/{_OTHERS}"] for i in range(_OTHERS)],
    }
    waiting = [
        s.start(part, "--model", kind, *more, *option, name=f"{part}_{kind}_{i}")
        for part, kind in itertools.product(parts, settings.models)
        for i, option in enumerate(options[part])
    ]
    if missing:
        until = time.perf_counter() + 0.15 * s.left()
        for kind in settings.models:
            ahead.wait(s.folder, shares, f"base {kind}", lambda: any(p.poll() is None for p in compiling), until)
        print(f"compiled what the bases need, {s.left():.0f} s left", flush=True)
        compiled.touch()
        s.stage("bases", end - (s.seconds - s.left()), grace=40.0, first=first)
        for draft in s.folder.glob("draft_*.safetensors"):  # of bases that were ended by the clock
            base = draft.with_name(draft.name.replace("draft", "base"))
            if not base.exists():
                draft.replace(base)
    trained.touch()
    waiting += [s.start("calibrate", "--model", kind, name=f"calibrate_{kind}") for kind in settings.models]
    s.join(waiting, s.left() - 6.0)
    s.spent["rows and further trainings"] = s.seconds - s.left()
    s.finish()


def on_cpu(s: Supervisor, settings: Settings, *, everything: bool) -> None:
    """Every part on CPU cores, or without `everything` the headline's."""
    s.stage("bases", 0.6 * s.left())
    if not everything:
        s.stage("ptq", s.left())
        return
    s.join([s.start("calibrate", "--model", kind, name=f"calibrate_{kind}") for kind in settings.models], s.left())
    for stage in PARTS:
        for kind in settings.models:
            s.stage(stage, s.left(), "--model", kind)
    s.finish()
