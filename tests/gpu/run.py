"""Every check of `tests/gpu` on this machine's GPU, several processes at a time, because compiling takes longest.

    python -m tests.gpu.run [--jobs 12] [--only WORD] [--out FILE.json]

Prints a line for each check, and for a broken one what broke. Exit 1 if any is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MARK = "@@check "


def _work(names: list[str]) -> None:
    """In a process of its own: runs checks, prints a JSON line for each."""
    import torch

    from tests.gpu.decode_checks import CHECKS

    for name in names:
        began = time.time()
        found: dict[str, Any] = {"name": name, "rows": [], "error": None}
        try:
            found["rows"] = CHECKS[name]()
            torch.cuda.synchronize()
        except Exception:
            found["error"] = traceback.format_exc()[-3000:]
        found["seconds"] = time.time() - began
        print(_MARK + json.dumps(found), flush=True)


def _gather(jobs: int, only: str) -> list[dict[str, Any]]:
    from tests.gpu.decode_checks import CHECKS

    names = [name for name in CHECKS if only in name]
    queues = [names[i::jobs] for i in range(jobs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        (queue, subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.run", "--work", *queue],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ))
        for queue in queues
        if queue
    ]  # fmt: skip
    found = []
    for queue, process in processes:
        output, _ = process.communicate()
        lines = [json.loads(line[len(_MARK) :]) for line in output.splitlines() if line.startswith(_MARK)]
        found += lines
        # A crash of the process takes what it had not reached with it: that is not silence.
        for name in queue[len(lines) :]:
            found.append({"name": name, "rows": [], "error": f"process died\n{output[-2000:]}", "seconds": 0.0})
    return sorted(found, key=lambda check: names.index(check["name"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--only", default="", help="checks whose name has this word")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        _work(args.work)
        return 0
    began, broken = time.time(), 0
    found = _gather(args.jobs, args.only)
    for check in found:
        bad = [row for row in check["rows"] if not row[1] <= row[2]]
        broken += bool(bad or check["error"])
        worst = max((m / b if b else float(m > 0) for _, m, b in check["rows"]), default=0.0)
        print(f"{'BROKEN' if bad or check['error'] else 'ok    '} {check['name']:28} {worst:8.3f} of its bound "
              f"{len(check['rows']):4} numbers {check['seconds']:6.1f} s")  # fmt: skip
        for what, measured, bound in bad[:6]:
            print(f"         {what}: {measured:.3g} > {bound:.3g}")
        if check["error"]:
            print("         " + check["error"].strip().replace("\n", "\n         ")[-1500:])
    print(f"{len(found)} checks, {broken} broken, {time.time() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
