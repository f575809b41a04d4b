"""Times the Triton replay kernel on this machine's GPU, beside flash-linear-attention's chunk form where there is one.

    python benchmarks/kernels_replay.py [--tokens 8192] [--launch NAME ...] [--by-kernel] [--seconds 600] [--out FOLDER]

Training shapes of Qwen3-Next: B = 1, H = 16, HV = 32, K = V = 128, bf16 inputs, a state of float32 that is rounded
every 16 tokens. FLA's `chunk_kda` and `chunk_gated_delta_rule` round nothing. Every case is first held to float64 on a
short run; one that is off is named and not timed, and the exit code is 1. Times are medians of CUDA graph replays;
those of FLA, whose autograd does not record, of `triton.testing.do_bench`. "memory" is what a call takes beside its
tensors and their gradients, over the bytes of q, k, v, g, beta and o.

Kernels are compiled in several processes first. Each line is printed as it comes, and `replay_<gpu>.md` and `.json` are
written into FOLDER anew with each; after --seconds nothing new is begun.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compiling import compile_in_parallel, only_compile
from lattn_compile.bench.timing import by_kernel, milliseconds
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import replay, replay_launch, replay_run
from lattn_compile.kernels.reference import replay as reference

DEVICE = "cuda"
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
WINDOW = 16
CASES = (
    ("gdn", "int8"),
    ("kda", "int8"),
    ("kda", "fp8"),
    ("gdn", "fp8"),
    ("gdn", "nvfp4"),
    ("gdn", "int8+int8"),
    ("kda", "fp8+fp8_e4m3"),
)
"""Kinds, and formats of anchors, with "+" that of records."""
NAMES = ("q", "k", "v", "g", "beta")


class Call:
    """One call of the replay kernel at the benchmark's shapes: one sequence of T tokens, all tensors on the GPU."""

    def __init__(self, kind: str, spec: str, tokens: int) -> None:
        rng = torch.Generator(DEVICE).manual_seed(0)
        key_heads, value_heads = KEY_HEADS, VALUE_HEADS

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=DEVICE).bfloat16()

        gates = (tokens, value_heads) if kind == "gdn" else (tokens, value_heads, KEY)
        self.q, self.k = normal(tokens, key_heads, KEY), normal(tokens, key_heads, KEY)
        self.v = normal(tokens, value_heads, VALUE)
        self.g = -torch.nn.functional.softplus(torch.randn(gates, generator=rng, device=DEVICE) - 2)
        self.beta = torch.rand(tokens, value_heads, generator=rng, device=DEVICE).bfloat16()
        spec, _, factors = spec.partition("+")
        quantize = Quantizer(parse(spec))
        state = torch.randn(1, value_heads, KEY, VALUE, generator=rng, device=DEVICE)
        self.anchor = quantize.qdq(state)
        zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.where = (zero, zero + tokens, zero)
        self.o, self.grad_o = torch.zeros_like(self.v), normal(*self.v.shape)
        self.grad_anchor = torch.randn_like(self.anchor)
        self.grads = {f"d{name}": torch.zeros_like(getattr(self, name)) for name in NAMES}
        self.options: dict[str, Any] = {
            "rule": "delta",
            "scale": KEY**-0.5,
            "qk_l2norm": True,
            "window": WINDOW,
            "factors": factors or None,
            "anchor_format": None,
            "quantize": quantize,
            "readout": "before_write",
            "identity": None,
        }

    def inputs(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.anchor, None, None, *self.where)

    def forward(self) -> object:
        return replay.forward(*self.inputs(), self.o, **self.options, keep=False)

    def train(self) -> object:
        self.forward()
        return replay.backward(self.grad_o, self.grad_anchor, None, *self.inputs(), self.grads, **self.options)


def check(kind: str, spec: str) -> list[str]:
    """What is off on two windows, in words; few tokens, because later ones depend on ties too much."""
    call = Call(kind, spec, 20)
    call.train()
    exact = [x if x is None or x.dtype is torch.int64 else x.double() for x in call.inputs()]
    o = torch.zeros_like(call.o, dtype=torch.float64)
    reference.forward(*exact, o, **call.options, keep=False)
    grads = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in call.grads.items()}
    danchor, *_ = reference.backward(
        call.grad_o.double(), call.grad_anchor.double(), None, *exact, grads, **call.options
    )
    ours: Any = call.train()
    pairs = {"o": (call.o, o), "danchor": (ours[0], danchor)} | {n: (call.grads[n], x) for n, x in grads.items()}
    found = []
    for name, (got, want) in pairs.items():
        error = float((got.double() - want).norm() / want.norm())
        # bf16 results are within 2^-9 of float64's.
        if not error <= 4e-3:
            found.append(f"{kind} {spec}: {name} is off by {error:.2g} (bound 4e-3)")
    return found


def memory(call: Call) -> float:
    """Bytes that forward and backward take beside their tensors, over those of the tokens and outputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.train()
    torch.cuda.synchronize()
    given = sum(getattr(call, name).nbytes for name in (*NAMES, "o"))
    return (torch.cuda.max_memory_allocated() - before) / given


def fla(kind: str, tokens: int) -> dict[str, float] | None:
    """FLA's chunk form, forward + backward and forward, on the same tokens; None where it cannot run, said aloud."""
    from triton.testing import do_bench

    call = Call(kind, "int8", tokens)
    leaves = [getattr(call, name)[None].detach().requires_grad_() for name in NAMES]
    options: dict[str, Any] = {"scale": KEY**-0.5, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    try:
        if kind == "kda":
            rule = importlib.import_module("fla.ops.kda").chunk_kda
        else:
            rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

        def forward() -> Tensor:
            q, k, v, g, beta = leaves
            return rule(q, k, v, g=g, beta=beta, initial_state=call.anchor, **options)[0]  # type: ignore[no-any-return]

        def train() -> None:
            torch.autograd.grad(forward(), leaves, call.grad_o[None])

        found = {"train_ms": do_bench(train, return_mode="median")}
        with torch.no_grad():
            found["forward_ms"] = do_bench(forward, return_mode="median")
    except Exception as error:
        print(f"without FLA {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    return found


def warm(ways: list[str], cases: list[tuple[str, str]], mine: int, processes: int) -> None:
    """Compiles every `processes`-th kernel that the benchmark launches, and launches none."""
    only_compile(mine, processes)
    replay_run._SHARE, replay_run._SMALL = 0.0, 0  # a window a stretch, so that there are several
    for way in ways:
        replay_launch.CHOSEN = way
        for kind, spec in cases:
            Call(kind, spec, 2 * WINDOW).train()


class Found:
    """What was measured so far, printed and written as it comes."""

    def __init__(self, tokens: int, out: Path | None) -> None:
        self.out, self.broken, self.rows = out, list[str](), list[dict[str, Any]]()
        self.fla: dict[str, dict[str, float] | None] = {"gdn": None, "kda": None}
        shape = {"B": 1, "T": tokens, "H": KEY_HEADS, "HV": VALUE_HEADS, "K": KEY, "V": VALUE, "window": WINDOW}
        self.machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__,
            "shape": shape,
        }

    def wrong(self, *lines: str) -> None:
        self.broken += lines
        print("WRONG", *lines, sep="\n  ", flush=True)

    def write(self) -> None:
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            name = f"replay_{str(self.machine['gpu']).lower().replace(' ', '_')}"
            (self.out / f"{name}.md").write_text(self.table())
            found = {**self.machine, "fla": self.fla, "rows": self.rows, "broken": self.broken}
            (self.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")

    def table(self) -> str:
        kda = self.fla["kda"]

        def cells(times: dict[str, Any]) -> str:
            found = []
            for what in ("forward_ms", "train_ms"):
                found.append(f"{times[what]:.2f}" if what in times else "-")
                found.append("-" if kda is None or what not in times else f"{times[what] / kda[what]:.2f}")
            return " | ".join(found)

        lines = [
            f"# Replay kernel on {self.machine['gpu']}",
            "",
            f"`python benchmarks/kernels_replay.py`, torch {self.machine['torch']}, Triton {self.machine['triton']}; "
            + ", ".join(f"{name} = {value}" for name, value in self.machine["shape"].items())  # type: ignore[attr-defined]
            + ", bf16 inputs.",
            "",
            "| | state | launch | forward ms | / FLA chunk_kda | forward + backward ms | / FLA chunk_kda | memory |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [f"| FLA {kind} | exact | | {cells(x)} | - |" for kind, x in self.fla.items() if x is not None]
        for r in self.rows:
            memory = f"{r['memory']:.2f}" if "memory" in r else "-"
            lines.append(f"| {r['kind']} | {r['format']} | {r['launch']} | {cells(r)} | {memory} |")
        for r in self.rows:
            if "kernels_ms" in r:
                parts = ", ".join(f"{name} {ms:.2f}" for name, ms in r["kernels_ms"].items())
                lines += ["", f"{r['kind']} {r['format']} {r['launch']}, forward + backward by kernel, ms: {parts}."]
        return "\n".join(lines) + "\n"


def measure(
    found: Found,
    tokens: int,
    ways: list[str],
    cases: list[tuple[str, str]],
    until: float,
    *,
    profiled: bool,
    others: bool,
) -> None:
    """others: FLA too."""
    for way in ways:
        for kind, spec in cases if way == ways[0] else cases[:2]:
            if time.time() > until:
                print(f"no time for {way} {kind} {spec}", flush=True)
                continue
            if others and (kind, spec) == cases[min(2, len(cases) - 1)] and way == ways[0]:
                # Behind what matters most, because it tunes itself for long.
                found.fla["kda"] = fla("kda", tokens)
                print("FLA kda", found.fla["kda"], flush=True)
                found.write()
            replay_launch.CHOSEN = way
            row: dict[str, Any] = {"launch": way, "kind": kind, "format": spec}
            try:
                wrong = check(kind, spec)
                if wrong:
                    found.wrong(*wrong)
                    continue
                call = Call(kind, spec, tokens)
                row["train_ms"] = milliseconds(call.train, 5)
                print(row, flush=True)
                row["forward_ms"] = milliseconds(call.forward)
                row["memory"] = memory(call)
                if profiled and spec == "int8":
                    row["kernels_ms"] = by_kernel(call.train, 10)
                found.rows.append(row)
                print(row, flush=True)
                found.write()
                del call
                torch.cuda.empty_cache()
            except Exception as error:
                found.wrong(f"{way} {kind} {spec}: {type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    return
    if others and time.time() < until:
        found.fla["gdn"] = fla("gdn", tokens)
        print("FLA gdn", found.fla["gdn"], flush=True)
    found.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--launch", nargs="+", default=[replay_launch.CHOSEN], choices=list(replay_launch.LAUNCHES))
    every = ["/".join(case) for case in CASES]
    parser.add_argument("--cases", nargs="+", default=every, help="kind/format of anchors[+format of records]")
    parser.add_argument("--by-kernel", action="store_true")
    parser.add_argument("--without-fla", action="store_true", help="which tunes itself for half a minute")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [(kind, spec) for kind, _, spec in (case.partition("/") for case in args.cases)]
    if args.warm:
        warm(args.launch, cases, *args.warm)
        return 0
    until = time.time() + args.seconds
    asked = ["--launch", *args.launch, "--cases", *("/".join(case) for case in cases)]
    compile_in_parallel([__file__, *asked], args.processes, until)
    print(f"compiled, {until - time.time():.0f} s left", flush=True)
    found = Found(args.tokens, args.out)
    measure(found, args.tokens, args.launch, cases, until, profiled=args.by_kernel, others=not args.without_fla)
    print(found.table(), flush=True)
    return int(bool(found.broken))


if __name__ == "__main__":
    sys.exit(main())
