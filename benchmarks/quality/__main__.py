"""Quality of quantized recurrent states on models that were trained for it, and what training with them brings back.

    python -m benchmarks.quality --out benchmarks/results/quality.json      one GPU, nine minutes
    python -m benchmarks.quality --reduced                                  two CPU cores, five minutes
    python -m benchmarks.quality --smoke --seconds 60                       what a step of everything takes on a GPU
    python -m benchmarks.quality --tiny                                     that everything runs

docs/quality.md says what is measured and what it means; `docs/write_quality.py` makes its tables and plots.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.quality import ahead
from benchmarks.quality.config import METHODS
from benchmarks.quality.lab import NAMED
from benchmarks.quality.reduced import check
from benchmarks.quality.results import collect, restore
from benchmarks.quality.smoke import JOBS
from benchmarks.quality.supervise import PARTS, Supervisor, on_cpu, on_gpu


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="of --smoke: measurements whose names begin so")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, help="for all of it; default: 540, and 1800 of --reduced")
    parser.add_argument("--out", type=Path, help="the results")
    parser.add_argument("--folder", type=Path, help="of parts and checkpoints: a run goes on with those that are there")
    parser.add_argument("--keep", type=Path, help="where the bases' checkpoints are copied to")
    parser.add_argument("--resume", type=Path, help="results to go on from; checkpoints are looked for beside them")
    parser.add_argument("--commit", default="", help="the commit of the results, where there is no git")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="behind the bases; --resume goes on")
    parser.add_argument("--together", type=int, default=6, help="further trainings of each model side by side")
    parser.add_argument("--shares", type=int, default=6, help="processes that compile")
    parser.add_argument("--methods", nargs="+", default=[], choices=METHODS, help="further trainings of these only")
    parser.add_argument("--steps", type=int, help="of further trainings")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = 1800.0 if args.reduced else 540.0  # a slow CPU takes longer, and compares the same
    name = "reduced" if args.reduced else "tiny" if args.tiny else "full"
    here = Path(__file__).resolve().parents[1] / "results"
    published = name == "full" and not args.smoke
    out = args.out or (here / "quality.json" if published else Path(tempfile.gettempdir()) / f"quality-{name}.json")
    folder = args.folder or out.with_suffix("")
    if args.reduced:  # from nothing, every time
        shutil.rmtree(folder, ignore_errors=True)
    if args.resume is not None:
        print(f"{restore(args.resume, folder, NAMED[name])} parts are there already")
        for path in args.resume.parent.glob("base_*.safetensors"):
            shutil.copy(path, folder / path.name)
    device = "cuda" if torch.cuda.is_available() and not args.reduced else "cpu"
    words = (Path(x).name if x.startswith("/") else x for x in (sys.argv[1:] if argv is None else argv))
    said = shlex.join(["python", "-m", "benchmarks.quality", *words])  # without this machine's folders

    def gather(spent: dict[str, float]) -> None:
        collect(folder, out, NAMED[name], command=said, commit=args.commit, spent=spent, device=device)
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("base_*.safetensors"):
                if not (args.keep / path.name).exists():
                    shutil.copy(path, args.keep / path.name)

    s = Supervisor(folder, name, device, args.seconds, gather)
    try:
        if args.smoke:
            if device == "cuda":
                processes = s.ahead(args.shares, "--first", *JOBS)
                until = time.perf_counter() + min(80.0, 0.6 * args.seconds)
                running = lambda: any(p.poll() is None for p in processes)  # noqa: E731
                for job in JOBS[:4]:
                    done = ahead.wait(folder, args.shares, job, running, until)
                    print(f"compiled {job}: {done}, {s.left():.0f} s left", flush=True)
            s.stage("smoke", s.left() - 3.0, *(["--only", *args.only] if args.only else []), tries=2, grace=0.0)
            for log in sorted(folder.glob("ahead_*.log")):
                print(log.name, log.read_text(errors="replace")[-1500:], flush=True)
        elif device == "cuda":
            on_gpu(
                s, NAMED[name], args.shares, args.steps, parts=args.parts, together=args.together, methods=args.methods
            )
        else:
            on_cpu(s, NAMED[name], everything=not args.reduced)
    finally:
        s.finish()
    print(f"results in {out}")
    return check(json.loads(out.read_text(encoding="utf-8"))) if args.reduced else 0


if __name__ == "__main__":
    sys.exit(main())
