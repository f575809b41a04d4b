"""`lattn-compile bench` from a checkout, without the command line's own dependencies.

python benchmarks/kernels.py [--batch 4] [--tokens 4096] [--only REGEX] [--seconds 60] [--out FOLDER]
python benchmarks/kernels.py --plot RESULTS.json                       draws what an earlier run wrote
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="a regular expression, for example 'exact|int8'")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case is begun after that")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, metavar="RESULTS.json")
    args = parser.parse_args()
    from lattn_compile.bench import run, tables

    if args.plot is not None:
        return 0 if tables.plot(json.loads(args.plot.read_text()), args.plot.with_suffix(".png")) else 1
    return run(batch=args.batch, tokens=args.tokens, only=args.only, out=args.out, seconds=args.seconds)


if __name__ == "__main__":
    sys.exit(main())
