"""What the passes and lowerings cost: compile time of one decode step and one prefill, plain Inductor and this backend.

    python benchmarks/compile_time.py [--models qwen3_next qwen3_5] [--repeats 3] [--out DIR]

Every compile runs in a fresh process with an empty Inductor cache, after one of a trivial function: what Inductor
imports and precompiles once is nobody's overhead. The arms are run in turn; seconds are CPU time of the process and its
children (the C++ compiler), the least of the repeats, because whatever else the machine does only adds. The models are
those of `cpu_decode.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARMS = ("inductor", "lattn_compile")
GRAPHS = ("decode", "prefill")

CHILD = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import cpu_decode  # takes its folder off the path itself
import lattn_compile as lc
_, _, name, arm, graph = sys.argv
torch.set_num_threads(1)
model = cpu_decode.build(name)
tokens = torch.randint(1, 255, (1, 64))
torch.compile(lambda x: x.sin() + 1)(torch.randn(8))
options = {"policy": "exact"} if arm == "lattn_compile" else None
compiled = torch.compile(model, backend=arm, options=options)
with torch.no_grad():
    given = {"input_ids": tokens}
    if graph == "decode":
        cache = model(tokens, use_cache=True).past_key_values
        given = {"input_ids": tokens[:, :1], "past_key_values": cache}
    before = os.times()
    compiled(**given, use_cache=True)
    after = os.times()
report = lc.last_report() if arm == "lattn_compile" else None
seconds = sum(after[:4]) - sum(before[:4])
print(json.dumps({"seconds": seconds, "sites": 0 if report is None else len(report.rewritten)}))
"""


def once(name: str, arm: str, graph: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        # Workers would be children that outlive the measurement.
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        command = [sys.executable, "-c", CHILD, str(HERE), name, arm, graph]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{name}, {arm}, {graph}: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if arm == "lattn_compile" and not measured["sites"]:
        raise SystemExit(f"{name}, {graph}: nothing was rewritten; nothing is compared")
    return measured


def measure(name: str, graph: str, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            runs[arm].append(once(name, arm, graph)["seconds"])
    least = {arm: min(seconds) for arm, seconds in runs.items()}
    return {"model": name, "graph": graph, "seconds": least, "ratio": least["lattn_compile"] / least["inductor"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3_next", "qwen3_5"])
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(name, graph, args.repeats) for name in args.models for graph in args.graphs]
    lines = ["| model | graph | Inductor, s | lattn_compile, s | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        s = row["seconds"]
        ratio = f"{row['ratio']:.2f}"
        lines.append(f"| {row['model']} | {row['graph']} | {s['inductor']:.1f} | {s['lattn_compile']:.1f} | {ratio} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compile_time.json").write_text(json.dumps(rows, indent=1) + "\n")
        (args.out / "compile_time.md").write_text(text)


if __name__ == "__main__":
    main()
