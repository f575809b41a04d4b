"""Two GPUs and NCCL: whether ranks agree, how a training step scales, and what tensor parallelism wins in decoding.

    python benchmarks/distributed.py --out FOLDER [--seconds 150]
    python benchmarks/distributed.py --markdown FOLDER/distributed_<gpu>.json     the table again, from the results
    python benchmarks/distributed.py --out FOLDER --device cpu --tiny             the script itself, with gloo

First, side by side: the checks of `tests/distributed` (DTensors, FSDP2 and DDP, checkpoints, tensor and context
parallelism: all against one device), the examples under torchrun, ranks that die, and once what is timed later, so that
it is compiled. Then, one after another with nothing beside them:

train: a Qwen3-Next of 0.3 B parameters in bf16, its layers compiled by this backend; forward, loss, backward, AdamW of
    the same batch a GPU on one GPU, on two under DDP, and on two under FSDP2. Weak scaling is tokens a second of two
    over those of one; the other GPU idles while one is timed. Exact states, and int8 at every token.
decode: a step of 4 layers of Qwen3-Next's kind with hidden size 4,096, batch 256, compiled as one graph; one GPU, and
    two by `integrations.tensor_parallel`. 64 value heads, or 128 ("wide"). States lie in fp32 (int8 is emulated).
    Beside it the time of the step's all-reduces alone, and of its kernels.

Every part is processes of its own under a watchdog. The results file is written after each of them, and a part writes
what it has after each number, so that a part that is cut short leaves what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# transformers looks for a package named `kernels` and must not find the script beside this one.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

AREAS = ("sharding", "training", "context", "tensor_parallel", "mesh")
EXAMPLES = {"train_fsdp": ["--steps", "3", "--every", "2"], "serve_tp": []}
FIRST = [
    *(f"checks {area}" for area in AREAS),
    *(f"example {name}" for name in EXAMPLES),
    "faults",
    *(f"warm {name}" for name in ("train int8", "train exact", "decode wide", "decode exact", "decode int8")),
]
THEN = ["train int8", "decode wide", "decode exact", "decode int8", "train exact"]
WATCHDOG = {"checks": 75, "example": 75, "faults": 60, "warm": 75, "train": 60, "decode": 45}
"""Seconds of a part, by the first word of its name."""


@dataclass
class Part:
    """A part that runs: its processes, and where they write."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    began: float

    @classmethod
    def start(cls, name: str, folder: Path, args: argparse.Namespace) -> Part:
        folder.mkdir()
        kind, _, rest = name.partition(" ")
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "PYTHONPATH": path, "LATTN_RANKS_DEVICE": args.device, "LATTN_TIMES": "1"}
        env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "8"}
        python = [sys.executable, "-W", "ignore"]
        if kind == "checks":
            commands = [[*python, "-m", "tests.distributed.ranks", str(folder), f"{rest}=2"]]
        elif kind == "example":
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            save = ["--save", str(folder / "saved")] if rest.startswith("train") else []
            commands = [[*python, *run, f"examples/{rest}.py", *EXAMPLES[rest], *save]]
        elif kind == "faults":
            commands = [[*python, "-m", "tests.distributed.fault_program", str(folder)]]
        else:
            given = ["--part", name, "--folder", str(folder), "--device", args.device, *(["--tiny"] * args.tiny)]
            program = str(Path(__file__).with_name("distributed_parts.py"))
            commands = [[*python, program, *given, "--rank", str(rank)] for rank in range(2)]
        log = (folder / "log.txt").open("wb")
        processes = [
            subprocess.Popen(c, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True) for c in commands
        ]
        return cls(name, folder, processes, time.monotonic())

    def finish(self, deadline: float) -> dict[str, Any]:
        """What it found; what still runs at `deadline` is ended."""
        late = False
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # the session that it was started as
            process.wait()
        row: dict[str, Any] = {"seconds": round(time.monotonic() - self.began, 1)}
        if late:
            row["cut"] = "by its watchdog"
        row |= self.found()
        if any(process.returncode for process in self.processes) and not late:
            row["ended"] = "with an error"
        return row

    def log(self) -> str:
        """What its processes printed, and what it stopped at."""
        files = (self.folder / "log.txt", *sorted(self.folder.glob("error*.txt")))
        said = [f.read_text(errors="replace")[-6000:] for f in files]
        return "\n".join([f"==== {self.name}", *said])

    def found(self) -> dict[str, Any]:
        kind, _, rest = self.name.partition(" ")
        if kind == "checks":
            from tests.distributed import ranks

            said = [ranks.read(self.folder, rest, rank) for rank in range(2)]
            failed = [name for name in said[0] if any(x[name] for x in said)]
            if failed:
                (self.folder / "error.txt").write_text("\n".join(x[name] for name in failed for x in said))
            return {"passed": len(said[0]) - len(failed), "of": len(said[0]), "failed": failed}
        if kind == "example":
            return {"exit": self.processes[0].returncode}
        if kind == "faults":
            from tests.distributed.fault_program import HOW

            files = {how: self.folder / how / "heard.json" for how in HOW}
            return {how: json.loads(f.read_text()) if f.is_file() else "nothing was heard" for how, f in files.items()}
        file = self.folder / "found.json"
        return json.loads(file.read_text()) if file.is_file() else {}


def entry_point(folder: Path) -> str:
    """What backend="lattn_compile" needs of a checkout that is not installed: a folder for PYTHONPATH; else ""."""
    if metadata.entry_points(group="torch_dynamo_backends", name="lattn_compile"):
        return ""
    about = folder / "lattn_compile-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lattn-compile\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nlattn_compile = lattn_compile.backend:lattn_compile\n"
    )
    return str(folder)


def hardware(device: str) -> dict[str, Any]:
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "gpu": "CPU", "gpus": 2}
    if device == "cuda":
        import triton

        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "triton": triton.__version__}
        found |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "peer": torch.cuda.can_device_access_peer(0, 1),
        }
    return found


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    end = began + args.seconds
    # In a process of its own: CUDA's context would stay in this one.
    code = f"import json, benchmarks.distributed as d; print(json.dumps(d.hardware({args.device!r})))"
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    results: dict[str, Any] = {"hardware": json.loads(said.stdout.splitlines()[-1]), "parts": {}}
    if args.add is not None:  # what an earlier run found
        results["parts"] |= json.loads(args.add.read_text())["parts"]
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.out / f"distributed_{results['hardware']['gpu'].lower().replace(' ', '_')}"

    def keep(part: Part, deadline: float) -> None:
        results["parts"][part.name] = row = part.finish(deadline)
        results["seconds"] = round(time.monotonic() - began, 1)
        name.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        name.with_suffix(".md").write_text(markdown(results))
        with name.with_suffix(".log").open("a") as log:
            log.write(part.log())
        print(f"{results['seconds']:6.1f} s  {part.name}: {json.dumps(row)[:300]}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (entry_point(Path(folder)), os.environ.get("PYTHONPATH")))
        )
        first = [n for n in FIRST if re.search(args.only, n)]
        parts = [Part.start(n, Path(folder) / n.replace(" ", "_"), args) for n in first]
        for part in parts:
            keep(part, min(end, part.began + WATCHDOG[part.name.split()[0]] * args.patience))
        for n in (n for n in THEN if re.search(args.only, n)):
            if time.monotonic() < end - 15:
                part = Part.start(n, Path(folder) / n.replace(" ", "_"), args)
                keep(part, min(end, part.began + WATCHDOG[n.split()[0]] * args.patience))
    print(markdown(results))
    return 0


def markdown(results: dict[str, Any]) -> str:
    """What the results say, and what they do not."""
    about = results["hardware"]
    lines = ["# Two GPUs", "", f"Two {about['gpu']}; {', '.join(f'{k} {v}' for k, v in about.items() if k != 'gpu')}."]
    lines += [f"`python benchmarks/distributed.py`, {results['seconds']} s.", ""]
    parts = results["parts"]
    checks = {n.partition(" ")[2]: row for n, row in parts.items() if n.startswith("checks")}
    if checks:
        lines += ["| checks on two ranks against one device | passed | of |", "|---|---|---|"]
        lines += [f"| {n} | {row['passed']} | {row['of']} |" for n, row in checks.items()] + [""]
        lines += [f"Not right: {n}: {', '.join(row['failed'])}" for n, row in checks.items() if row["failed"]] + [""]
    lines += [f"* {n}: exit code {row['exit']}" for n, row in parts.items() if n.startswith("example")]
    for how, said in parts.get("faults", {}).items():
        if isinstance(said, dict) and "seconds" in said:
            lines += [
                f"* a rank that {how}: heard after {said['seconds']:.1f} s; files {said['files']}: {said['error']}"
            ]
        elif said == "nothing was heard":
            lines += [f"* a rank that {how}: {said}"]
    for what, arms, title in (
        ("train", ("ddp", "fsdp2"), "training step: tokens a second of two GPUs over one"),
        ("decode", ("tp2",), "decode step: time of one GPU over two"),
    ):
        rows = {n.partition(" ")[2]: row for n, row in parts.items() if n.startswith(what)}
        if not rows:
            continue
        lines += [
            "",
            f"| {title} | one, ms | arm | two, ms (fastest, slowest) | ratio | kernels |",
            "|---|---|---|---|---|---|",
        ]
        for policy, row in rows.items():
            for arm in arms:
                for graph in ("", "graph"):
                    one, two = (row.get(key, {}) for key in ("one", arm))
                    one, two = (x.get("graph", {}) if graph else x for x in (one, two))
                    if not (isinstance(one, dict) and isinstance(two, dict) and "ms" in one and "ms" in two):
                        continue
                    ratio = one["ms"] / two["ms"] * (2 if what == "train" else 1)
                    times = f"{two['ms']:.2f} ({two['fastest']:.2f}, {two['slowest']:.2f})"
                    lines += [
                        f"| {policy} | {one['ms']:.2f} | {arm} {graph} | {times} | {ratio:.2f} | "
                        f"{'; '.join(row.get('compiled', ()))} |"
                    ]
        lines += [""]
        lines += [
            f"* {policy}: {row['value_heads']} value heads; the all-reduces alone: {row['all_reduces']['ms']:.2f} ms"
            for policy, row in rows.items()
            if row.get("all_reduces")
        ]
        lines += [
            f"* {policy}: outputs of two GPUs differ by {row['difference']:.1e}"
            for policy, row in rows.items()
            if "difference" in row
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="what still runs then is ended")
    parser.add_argument("--only", default="", help="a regular expression that is found in parts' names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of every part's watchdog")
    parser.add_argument("--add", type=Path, metavar="RESULTS.json", help="of an earlier run: parts not run again stay")
    parser.add_argument("--markdown", type=Path, metavar="RESULTS.json")
    args = parser.parse_args()
    if args.markdown is not None:
        args.markdown.with_suffix(".md").write_text(markdown(json.loads(args.markdown.read_text())))
        return 0
    if args.out is None:
        parser.error("--out FOLDER is needed")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
