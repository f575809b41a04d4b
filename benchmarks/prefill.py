"""Times the prefill with rounded operands and approximate inverses beside the exact one, on a GPU.

    python benchmarks/prefill.py [--batches 1 8] [--train-batches 1] [--only REGEX] [--by-kernel] [--out FOLDER]

Chunk form, GDN and KDA shapes of Qwen3-Next and Kimi Linear: H = 16 (KDA: 32), HV = 32, K = V = 128, bf16 inputs, a
state of float32. "exact" is the Triton chunk kernel without a prefill policy, and the bar of the other rows; where it
is installed, flash-linear-attention's exact kernel is beside it. Every case is first held to float64 on a short call;
a case that is off is not timed, and the exit code is 1. Times are medians of CUDA graph replays; where something
cannot be recorded, of plain calls, and the table says so.

Writes `prefill_<gpu>.md` and `.json` into FOLDER, anew after every number.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels_chunk import FLA, Call, by_kernel, fewer_choices, fla_calls, replayed

from lattn_compile.kernels import chunk, prefill
from lattn_compile.kernels.reference import chunk as reference
from lattn_compile.modes import SITES, BlockDoubling, Neumann, NewtonSchulz, Prefill

CASES: dict[str, Prefill | None] = {
    "exact": None,
    **{f"all sites {fmt}": Prefill(dict.fromkeys(SITES, fmt)) for fmt in ("fp8_e4m3", "int8", "nvfp4")},
    "all sites fp8_e4m3, block_doubling(8)": Prefill(dict.fromkeys(SITES, "fp8_e4m3"), inverse=BlockDoubling(8)),
    "kk, qk fp8_e4m3": Prefill({"kk": "fp8_e4m3", "qk": "fp8_e4m3"}),
    "ws, qs, av, kv fp8_e4m3": Prefill(dict.fromkeys(("ws", "qs", "av", "kv"), "fp8_e4m3")),
    **{str(i): Prefill(inverse=i) for i in (Neumann(7), NewtonSchulz(4), BlockDoubling(8), BlockDoubling(16))},
}
KINDS = ("gdn", "kda")


class Timed(Call):
    """A call of `kernels_chunk.py` under a prefill policy, None for the exact kernel."""

    def __init__(self, kind: str, policy: Prefill | None, batch: int, tokens: int) -> None:
        super().__init__(kind, None, batch, tokens)
        self.batch, self.kernel = batch, chunk if policy is None else prefill
        if policy is not None:
            self.options["prefill"] = policy

    def forward(self) -> Tensor:
        final: Tensor = self.kernel.forward(*self.inputs(), self.o, **self.options)
        return final

    def backward(self) -> Tensor:
        dstate: Tensor = self.kernel.backward(self.grad_o, self.grad_final, *self.inputs(), self.grads, **self.options)
        return dstate


def off(kind: str, policy: Prefill | None) -> float:
    """How far short sequences are from float64, in units of what is allowed: a tenth of what the policy changes, or,
    where it changes next to nothing, 2e-5; and what bf16 outputs lose."""
    call = Timed(kind, policy, 2, 150)
    inputs, rest = [x.double() for x in call.inputs()[:6]], (call.starts, call.lengths, None)
    states, outputs = [], []
    for chosen in (policy, None):
        outputs.append(torch.zeros_like(call.o, dtype=torch.float64))
        options = {**call.options, "prefill": chosen}
        states.append(reference.forward(*inputs, *rest, outputs[-1], **options))
    final = call.forward().double()
    worst = 0.0
    for ours, (want, exact), least in ((final, states, 2e-5), (call.o.double(), outputs, 3e-3)):
        allowed = 0.1 * float((exact - want).norm()) + least * float(want.norm())
        worst = max(worst, float((ours - want).norm()) / allowed)
    return worst


def checked(cases: dict[str, Prefill | None]) -> dict[tuple[str, str], float]:
    """What `off` says of every case; says which are wrong."""
    found = {(kind, name): off(kind, policy) for kind in KINDS for name, policy in cases.items()}
    for (kind, name), error in found.items():
        if not error <= 1.0:
            print(f"Not timed, because it is wrong: {kind} {name}, {error:.2f} of the bound", flush=True)
    return found


def measure(
    cases: dict[str, Prefill | None],
    errors: dict[tuple[str, str], float],
    args: argparse.Namespace,
    found: dict[str, Any],
) -> None:
    """Times what is right, and FLA's, until the time is over."""
    end = time.time() + args.seconds
    for batch in args.batches:
        for kind, (name, policy) in itertools.product(KINDS, cases.items()):
            if time.time() < end and errors[kind, name] <= 1.0:
                row = {"kind": kind, "case": name, "batch": batch, "off": errors[kind, name]}
                _timed(row, Timed(kind, policy, batch, args.tokens), args)
                _add(row, found, args.out)
        for kind in FLA:
            row = {"kind": kind, "case": f"FLA `{FLA[kind][1]}`", "batch": batch}
            for what, function in fla_calls(Timed(kind, None, batch, args.tokens), batch, row).items():
                if time.time() < end and (what == "forward_ms" or batch in args.train_batches):
                    try:
                        row[what], row[what.replace("_ms", "_as")] = replayed(function)
                    except Exception as error:
                        row["refused"] = f"{what}: {str(error).splitlines()[0][:160]}"
            _add(row, found, args.out)


def _timed(row: dict[str, Any], call: Timed, args: argparse.Namespace) -> None:
    row["forward_ms"], row["forward_as"] = replayed(call.forward)
    if call.batch in args.train_batches:
        row["train_ms"], row["train_as"] = replayed(call.train)
    if args.by_kernel:
        row["kernels_ms"] = by_kernel(call.forward)
        if call.batch in args.train_batches:
            row["train_kernels_ms"] = by_kernel(call.train)


def _add(row: dict[str, Any], found: dict[str, Any], out: Path | None) -> None:
    found["rows"].append(row)
    print(row, flush=True)
    save(found, out)
    torch.cuda.empty_cache()


def save(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        name = f"prefill_{re.sub(r'[^a-z0-9]+', '_', found['gpu'].lower())}"
        (out / f"{name}.md").write_text(table(found), encoding="utf-8")
        (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def table(found: dict[str, Any]) -> str:
    exact = {(r["kind"], r["batch"]): r for r in found["rows"] if r["case"] == "exact"}

    def cells(row: dict[str, Any], what: str) -> str:
        if what not in row:
            return "- | -"
        bar = exact.get((row["kind"], row["batch"]), {}).get(what)
        plain = " (plain calls)" if row[what.replace("_ms", "_as")] == "eager" else ""
        return f"{row[what]:.3f}{plain} | " + (f"{bar / row[what]:.2f}" if bar else "-")

    lines = [
        f"# Prefill on {found['gpu']}",
        "",
        f"`python benchmarks/prefill.py`, torch {found['torch']}, Triton {found['triton']}, T = {found['tokens']}, "
        "H = 16 (KDA: 32), HV = 32, K = V = 128, bf16 inputs. Medians of CUDA graph replays. Times over the exact "
        "kernel's: above 1 is faster.",
        "",
        "| | case | B | forward ms | exact / this | forward + backward ms | exact / this |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['kind']} | {r['case']} | {r['batch']} | {cells(r, 'forward_ms')} | {cells(r, 'train_ms')} |"
        for r in found["rows"]
    ]
    parts = (("kernels_ms", "forward"), ("train_kernels_ms", "forward + backward"))
    for r, (key, what) in itertools.product(found["rows"], parts):
        if key in r:
            times = ", ".join(f"{name} {ms:.3f}" for name, ms in r[key].items())
            lines += ["", f"{r['kind']}, {r['case']}, B = {r['batch']}, {what} by kernel, ms: {times}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--train-batches", type=int, nargs="*", default=[1], help="time forward + backward of these")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", default="", help="a regular expression, for example '^exact|all sites fp8_e4m3$'")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new number after that")
    parser.add_argument("--by-kernel", action="store_true", help="how long each kernel of a forward takes")
    parser.add_argument("--fla-choices", type=int, help="of each of FLA's kernels, try so many configurations only")
    parser.add_argument("--warm", choices=KINDS, help="only compile what this takes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = {name: policy for name, policy in CASES.items() if re.search(args.only, name)}
    if args.fla_choices:
        fewer_choices(args.fla_choices)
    if args.warm:
        for name, policy in cases.items():
            call = Timed(args.warm, policy, 1, args.tokens)
            call.train()
            torch.cuda.synchronize()
            print("warm:", args.warm, name, flush=True)
        if "exact" in cases:
            for function in fla_calls(Timed(args.warm, None, 1, args.tokens), 1, {}).values():
                with contextlib.suppress(Exception):  # what it refuses, `measure` says
                    function()
        return 0
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens, "rows": [],
        "triton": __import__("triton").__version__,
    }  # fmt: skip
    errors = checked(cases)
    measure(cases, errors, args, found)
    print(table(found))
    return int(any(not error <= 1.0 for error in errors.values()))


if __name__ == "__main__":
    sys.exit(main())
