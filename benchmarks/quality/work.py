"""One process of a run: `python -m benchmarks.quality.work STAGE --folder DIR --seconds N ...`; see `supervise.py`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import torch

from benchmarks.quality import stages
from benchmarks.quality.lab import NAMED, Lab
from benchmarks.quality.smoke import smoke

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "stage",
        choices=("bases", "ptq", "rows", "others", "further", "calibrate", "ahead", "smoke"),
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", choices=sorted(NAMED), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nothing new is begun")
    parser.add_argument("--after", type=Path, help="a file to wait for")
    parser.add_argument("--share", default="0/1", help="i/n: the i-th of n processes that do this")
    parser.add_argument("--model", default="gdn", help="of rows, others, further and calibrate")
    parser.add_argument("--together", type=int, default=6, help="of further: trainings side by side")
    parser.add_argument("--steps", type=int, help="of further trainings, instead of the settings'")
    parser.add_argument("--methods", nargs="*", default=(), help="of further and ahead: these trainings only")
    parser.add_argument("--only", nargs="*", help="of smoke: measurements whose names begin so")
    parser.add_argument("--first", nargs="*", help="of ahead: these jobs before others")
    args = parser.parse_args(argv)
    until = time.perf_counter() + args.seconds
    torch.set_num_threads(1)
    settings = dataclasses.replace(NAMED[args.settings], methods=tuple(args.methods))
    if args.steps is not None:
        settings = dataclasses.replace(settings, steps=args.steps)
    lab = Lab(settings, args.folder, "cpu" if args.stage == "calibrate" else args.device)
    share, shares = map(int, args.share.split("/"))
    if args.stage == "bases":
        stages.bases(lab, until, args.after)
    elif args.stage == "rows":
        stages.rows(lab, until, args.model, args.after)
    elif args.stage == "others":
        stages.others(lab, until, args.model, share, shares, args.after)
    elif args.stage == "further":
        stages.further(lab, until, args.model, args.after, args.together)
    elif args.stage == "ahead":
        stages.ahead(lab, share, shares, args.first)
    elif args.stage == "calibrate":
        lab.attempt(f"calibrate {args.model}", lambda: stages.calibrate(lab, args.model))
    elif args.stage == "smoke":
        smoke(lab, until, args.only)
    else:
        getattr(stages, args.stage)(lab, until)


if __name__ == "__main__":
    main()
