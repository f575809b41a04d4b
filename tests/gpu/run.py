"""The checks of the Triton kernels on this machine's GPU, several processes at a time: compiling takes longest.

    python -m tests.gpu.run [--forms decode chunk] [--jobs 12] [--only REGEX ...] [--seconds 100] [--out FILE.json]
    python -m tests.gpu.run --sanitize [--tool memcheck]            few and small checks, under compute-sanitizer

`tests/gpu/<form>_checks.py` has the checks of a form; names of others than decode begin with the form. With --only,
checks whose name a regular expression is found in, those of the first one first. Prints a line for each check as it
ends, and for a broken one what broke; FILE.json is complete after every line. Exit 1 if any is broken. Without the
sanitizer, which comes with the CUDA toolkit, nothing is sanitized, and a line says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FORMS = ("decode", "chunk", "prefill", "replay", "packed", "lowering", "generate")
_MARK = "@@check "
_BROKEN = 99
"""Exit code of the sanitizer where it found something."""


def checks(form: str) -> dict[str, Callable[[], list[tuple[str, float, float]]]]:
    """The checks of a form by their names."""
    found = importlib.import_module(f"tests.gpu.{form}_checks").CHECKS
    if form == "decode":
        return dict(found)
    return {name if name.startswith(f"{form} ") else f"{form} {name}": check for name, check in found.items()}


def _check(name: str) -> Callable[[], list[tuple[str, float, float]]]:
    form = name.partition(" ")[0]
    return checks(form if form in FORMS[1:] else "decode")[name]


def _work() -> None:
    """In a process of its own: for every name on stdin, runs that check and prints a JSON line."""
    import torch

    for line in sys.stdin:
        name, began = line.strip(), time.time()
        found: dict[str, Any] = {"name": name, "rows": [], "error": None}
        try:
            found["rows"] = _check(name)()
            torch.cuda.synchronize()
        except Exception:
            found["error"] = traceback.format_exc()[-3000:]
        found["seconds"] = time.time() - began
        print(_MARK + json.dumps(found), flush=True)


class _Run:
    """Checks spread over processes; `found` and the file grow as they end."""

    def __init__(self, names: list[str], before: list[str], more: dict[str, str], out: Path | None) -> None:
        self._names, self._out = iter(names), out
        self._command = [*before, sys.executable, "-u", "-m", "tests.gpu.run", "--work"]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        self._lock, self._processes = threading.Lock(), list[subprocess.Popen[str]]()
        self.found: list[dict[str, Any]] = []
        self.broken, self.over = 0, False

    def run(self, jobs: int, seconds: float) -> None:
        """Until all is done or the time is over; then processes are killed, and what they were at is not counted."""
        threads = [threading.Thread(target=self._serve) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        end = time.time() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.time()))
        with self._lock:
            self.over = True
            for process in self._processes:
                process.kill()
        for thread in threads:
            thread.join()

    def _start(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self.over:
                return None
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
            )
            self._processes.append(process)
            return process

    def _next(self) -> Iterator[str]:
        while True:
            with self._lock:
                name = None if self.over else next(self._names, None)
            if name is None:
                return
            yield name

    def _serve(self) -> None:
        process: subprocess.Popen[str] | None = None
        mine: list[dict[str, Any]] = []
        for name in self._next():
            process = process or self._start()
            if process is None:
                return
            assert process.stdin is not None and process.stdout is not None
            said, check = [], None
            try:
                process.stdin.write(name + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    if line.startswith(_MARK):
                        check = json.loads(line[len(_MARK) :])
                        break
                    said.append(line)
            except BrokenPipeError:
                said.append("the process had died")
            if check is None:
                process.kill()
                if self.over:
                    return
                # A crash spoils the process, so the next check gets a new one.
                check = {"name": name, "rows": [], "error": f"process died\n{''.join(said)[-2000:]}", "seconds": 0.0}
                process = None
            mine.append(check)
            self._report(check)
        if process is not None:
            output, _ = process.communicate()
            if process.returncode == _BROKEN:
                told = [line for line in output.splitlines() if line.startswith("=========")]
                where = ", ".join(check["name"] for check in mine)
                error = "\n".join(["the sanitizer found, in one of these checks:", *told[:40]])
                self._report({"name": where, "rows": [], "error": error, "seconds": 0.0})

    def _report(self, check: dict[str, Any]) -> None:
        bad = [row for row in check["rows"] if not row[1] <= row[2]]
        worst = max((m / b if b else float(m > 0) for _, m, b in check["rows"]), default=0.0)
        lines = [
            f"{'BROKEN' if bad or check['error'] else 'ok    '} {check['name']:28} {worst:8.3f} of its bound "
            f"{len(check['rows']):4} numbers {check['seconds']:6.1f} s"
        ]
        lines += [f"         {what}: {measured:.3g} > {bound:.3g}" for what, measured, bound in bad[:6]]
        if check["error"]:
            lines.append("         " + check["error"].strip().replace("\n", "\n         ")[-1500:])
        with self._lock:
            self.broken += bool(bad or check["error"])
            self.found.append(check)
            print("\n".join(lines), flush=True)
            if self._out:
                self._out.write_text(json.dumps(self.found, indent=1) + "\n")


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on PATH, in a CUDA toolkit, or in NVIDIA's package."""
    if (found := shutil.which("compute-sanitizer")) is not None:
        return found
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [Path(x) for x in (*toolkits, "/usr/local/cuda")]
    folders += [x for packages in site.getsitepackages() for x in Path(packages).glob("nvidia/*")]
    for folder in folders:
        for place in ("bin", "compute-sanitizer"):
            if (path := folder / place / "compute-sanitizer").is_file():
                return str(path)
    return None


def _chosen(names: list[str], patterns: list[str]) -> list[str]:
    """Names that a pattern is found in, those of the first pattern first."""
    found: dict[str, None] = {}
    for pattern in patterns:
        found |= dict.fromkeys(name for name in names if re.search(pattern, name))
    return list(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=[""], metavar="REGEX")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--sanitize", action="store_true", help="small checks under compute-sanitizer")
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        _work()
        return 0
    before: list[str] = []
    more: dict[str, str] = {}
    if args.sanitize:
        path = sanitizer()
        if path is None:
            print("SKIPPED: no compute-sanitizer on PATH, in CUDA_HOME, /usr/local/cuda or site-packages/nvidia")
            return 0
        before = [path, "--tool", args.tool, "--error-exitcode", str(_BROKEN), "--target-processes", "all"]
        # Else an access beyond one tensor's end lands in the allocator's next.
        more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.time()
    if args.sanitize:
        small = [importlib.import_module(f"tests.gpu.{form}_checks") for form in ("decode", "chunk")]
        names = [name for found in small for name in found.SMALL]
    else:
        names = [name for form in args.forms for name in checks(form)]
    names = _chosen(names, args.only)
    run = _Run(names, before, more, args.out)
    run.run(min(args.jobs, len(names)), args.seconds)
    what = f" under {args.tool}" if args.sanitize else ""
    late = len(names) - len(run.found) if run.over else 0
    print(
        f"{len(run.found)} checks{what}, {run.broken} broken, {max(late, 0)} not reached, {time.time() - began:.0f} s"
    )
    return int(run.broken > 0)


if __name__ == "__main__":
    sys.exit(main())
