"""Times the Triton chunk kernels on this machine's GPU, beside flash-linear-attention's where it is installed.

    python benchmarks/kernels_chunk.py [--tokens 8192] [--batch 1] [--cases gdn kda ...] [--by-kernel] [--out FOLDER]

Chunk form, GDN and KDA shapes of Qwen3-Next and Kimi Linear: H = 16, HV = 32, K = V = 128, bf16 inputs, a state of
float32; exact, and rounding the state every 64 tokens. Every kernel is first held to float64 on a short run; if one is
off, nothing is timed and the exit code is 1. Times are medians of CUDA graph replays, of ours and of FLA's; where
something cannot be recorded, of plain calls, and the table says so. "floor" is what a plain copy of the inputs, outputs
and states, each once, takes on this machine.

Writes `kernels_chunk_<gpu>.md` and `.json` into FOLDER.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from lattn_compile.bench.timing import copy_bandwidth
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import chunk
from lattn_compile.kernels.reference import chunk as reference

DEVICE = "cuda"
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
CASES = (("gdn", None), ("kda", None), ("gdn", "int8/*x32"), ("gdn", "int8"), ("kda", "int8/*x32"), ("kda", "int8"))
FLA = {
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
}
NAMES = ("q", "k", "v", "g", "beta")


class Call:
    """One call of the chunk kernel at the benchmark's shapes: B sequences of T tokens, all tensors on the GPU."""

    def __init__(self, kind: str, spec: str | None, batch: int, tokens: int) -> None:
        rng = torch.Generator(DEVICE).manual_seed(0)
        rows = batch * tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=DEVICE).bfloat16()

        # FLA's KDA has as many key heads as value heads.
        self.kind, self.key_heads = kind, KEY_HEADS if kind == "gdn" else VALUE_HEADS
        gates = (rows, VALUE_HEADS) if kind == "gdn" else (rows, VALUE_HEADS, KEY)
        self.q, self.k = normal(rows, self.key_heads, KEY), normal(rows, self.key_heads, KEY)
        self.v = normal(rows, VALUE_HEADS, VALUE)
        self.g = -torch.nn.functional.softplus(torch.randn(gates, generator=rng, device=DEVICE) - 2)
        self.beta = torch.rand(rows, VALUE_HEADS, generator=rng, device=DEVICE).bfloat16()
        self.quantize = None if spec is None else Quantizer(parse(spec))
        self.state = torch.randn(batch, VALUE_HEADS, KEY, VALUE, generator=rng, device=DEVICE)
        self.starts = torch.arange(batch, device=DEVICE) * tokens
        self.lengths = torch.full((batch,), tokens, device=DEVICE)
        self.o, self.grad_o = torch.zeros_like(self.v), normal(*self.v.shape)
        self.grad_final = torch.randn_like(self.state)
        self.grads = {f"d{name}": torch.zeros_like(getattr(self, name)) for name in NAMES}
        self.options = {
            "rule": "delta",
            "scale": KEY**-0.5,
            "qk_l2norm": True,
            "chunk_size": 64,
            "quantize": self.quantize,
            "readout": "before_write",
        }

    def inputs(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state, self.starts, self.lengths, None)

    def forward(self) -> Tensor:
        return chunk.forward(*self.inputs(), self.o, **self.options)

    def backward(self) -> Tensor:
        return chunk.backward(self.grad_o, self.grad_final, *self.inputs(), self.grads, **self.options)

    def train(self) -> Tensor:
        self.forward()
        return self.backward()

    def forward_bytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.g, self.beta, self.o)) + 2 * self.state.nbytes


def check(kind: str, spec: str | None) -> list[str]:
    """What is off on three short sequences, in words. Quantized, over one chunk: later ones depend on ties too much."""
    call = Call(kind, spec, 3, 150 if spec is None else 64)
    exact = [x.double() for x in call.inputs()[:6]]
    rest = (call.starts, call.lengths, None)
    o, grads = torch.zeros_like(call.o, dtype=torch.float64), {}
    for name, x in call.grads.items():
        grads[name] = torch.zeros_like(x, dtype=torch.float64)
    final = reference.forward(*exact, *rest, o, **call.options)
    dstate = reference.backward(call.grad_o.double(), call.grad_final.double(), *exact, *rest, grads, **call.options)
    pairs = {"final": (call.forward(), final), "dstate": (call.backward(), dstate), "o": (call.o, o)}
    found = []
    for name, (ours, want) in (pairs | {n: (call.grads[n], x) for n, x in grads.items()}).items():
        error = float((ours.double() - want).norm() / want.norm())
        # bf16 results are within 2^-9 of float64's; a state that was rounded has a few codes rounded the other way.
        bound = 3e-3 if ours.dtype is torch.bfloat16 or (name == "final" and spec is not None) else 2e-5
        if not error <= bound:
            found.append(f"{kind} {spec}: {name} is off by {error:.2g} (bound {bound:.0e})")
    return found


def milliseconds(call: Callable[[], object], seconds: float = 0.25) -> float:
    """Median time of a call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (len(times) < 30 and sum(times) < seconds * 1e3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def replayed(call: Callable[[], object]) -> tuple[float, str]:
    """Median time of a call in a CUDA graph, and "graph"; where it cannot be recorded, of plain calls, and "eager"."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return milliseconds(graph.replay), "graph"
    except Exception:
        torch.cuda.synchronize()
        return milliseconds(call), "eager"


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one call by kernel."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    times = {e.key: e.device_time_total / 1e3 for e in trace.key_averages() if e.device_time_total > 0}
    found = {name: ms for name, ms in times.items() if name.isidentifier()}
    found["torch's"] = sum(times.values()) - sum(found.values())
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def fla_calls(call: Call, batch: int, said: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """FLA's forward, and forward and backward, on the same tokens; where it is not there nothing, and why in `said`."""
    module, name = FLA[call.kind]
    try:
        rule = getattr(importlib.import_module(module), name)
    except ImportError as error:
        said["refused"] = f"not installed: {error}"
        return {}
    inputs = [getattr(call, n).unflatten(0, (batch, -1)).detach().clone().requires_grad_() for n in NAMES]
    q, k, v, g, beta = inputs
    grad_o = call.grad_o.unflatten(0, (batch, -1))

    def run() -> Tensor:
        out: Tensor = rule(
            q, k, v, g=g, beta=beta, scale=KEY**-0.5, initial_state=call.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip
        return out

    def inference() -> object:
        with torch.no_grad():
            return run()

    def train() -> None:
        for x in inputs:
            x.grad = None
        run().backward(grad_o)

    return {"forward_ms": inference, "train_ms": train}


def fewer_choices(count: int) -> None:
    """Lets FLA's kernels choose among `count` of their configurations only: to compile all takes minutes."""
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs

    def some(self: Any, given: Any) -> Any:
        configs = list(every(self, given))
        return configs[:: -(-len(configs) // count)]

    Autotuner.prune_configs = some


def measure(
    batch: int,
    tokens: int,
    cases: list[tuple[str, str | None]],
    others: list[str],
    profiled: bool,
    seconds: float,
    commit: str,
    save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """What there is after `seconds`; `save` is called after every number."""
    end = time.time() + seconds
    found: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "shape": {"B": batch, "T": tokens, "HV": VALUE_HEADS, "K": KEY, "V": VALUE},
        "copy_bytes_per_second": copy_bandwidth(),
        "fla": {},
        "rows": [],
    }
    rows = found["rows"]
    for kind, spec in cases:
        call = Call(kind, spec, batch, tokens)
        rows.append({"kind": kind, "format": spec or "exact"})
        rows[-1]["floor_ms"] = call.forward_bytes() / found["copy_bytes_per_second"] * 1e3
        for what, function in (("forward_ms", call.forward), ("train_ms", call.train)):
            if time.time() < end:
                rows[-1][what], rows[-1][what.replace("_ms", "_as")] = replayed(function)
        if profiled and spec is None:
            rows[-1]["kernels_ms"] = by_kernel(call.train)
        print(rows[-1], flush=True)
        save(found)
        del call
        torch.cuda.empty_cache()
    for kind in others:
        found["fla"][kind] = times = {}
        for what, function in fla_calls(Call(kind, None, batch, tokens), batch, times).items():
            if time.time() < end:
                try:
                    times[what], times[what.replace("_ms", "_as")] = replayed(function)
                except Exception as error:
                    times["refused"] = f"{what}: {str(error).splitlines()[0][:160]}"
                print("fla", kind, times, flush=True)
                save(found)
        torch.cuda.empty_cache()
    return found


def table(found: dict[str, Any], choices: int | None) -> str:
    def number(x: float | None) -> str:
        return "-" if x is None else f"{x:.2f}"

    def timed(row: dict[str, Any], what: str) -> str:
        calls = " (plain calls)" if row.get(what.replace("_ms", "_as")) == "eager" else ""
        return number(row.get(what)) + calls

    def ratio(row: dict[str, Any], what: str) -> str:
        other = found["fla"].get(row["kind"], {}).get(what)
        return number(row[what] / other if other and what in row else None)

    lines = [
        f"# Chunk kernels on {found['gpu']}",
        "",
        f"`python benchmarks/kernels_chunk.py`, commit {found['commit']}, "
        f"torch {found['torch']}, Triton {found['triton']}; "
        + ", ".join(f"{name} = {value}" for name, value in found["shape"].items())
        + f", H = {KEY_HEADS} for GDN and {VALUE_HEADS} for KDA, bf16 inputs, rounding every 64 tokens. "
        + f"Medians of CUDA graph replays. A copy moves {found['copy_bytes_per_second'] / 1e12:.2f} TB/s.",
        "",
        "| FLA"
        + (f", the best of {choices} configurations a kernel" if choices else "")
        + " | forward ms | forward + backward ms | |",
        "|---|---|---|---|",
    ]
    for kind, times in found["fla"].items():
        numbers = (timed(times, what) for what in ("forward_ms", "train_ms"))
        lines.append(f"| {kind} `{FLA[kind][1]}` | " + " | ".join(numbers) + f" | {times.get('refused', '')} |")
    lines += [
        "",
        "| | state | forward ms | / FLA | forward + backward ms | / FLA | floor of the forward ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        lines.append(
            f"| {r['kind']} | {r['format']} | {timed(r, 'forward_ms')} | {ratio(r, 'forward_ms')} "
            f"| {timed(r, 'train_ms')} | {ratio(r, 'train_ms')} | {r['floor_ms']:.2f} |"
        )
    for r in found["rows"]:
        if "kernels_ms" in r:
            parts = ", ".join(f"{name} {ms:.2f}" for name, ms in r["kernels_ms"].items())
            lines += ["", f"{r['kind']} {r['format']}, forward + backward by kernel, ms: {parts}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new number after that")
    parser.add_argument("--by-kernel", action="store_true", help="how long each kernel of the exact cases takes")
    parser.add_argument("--fla-choices", type=int, help="of each of FLA's kernels, try so many configurations only")
    kinds = [" ".join(filter(None, case)) for case in CASES] + [f"fla {kind}" for kind in FLA]
    parser.add_argument("--cases", nargs="+", default=kinds, choices=kinds, metavar="CASE", help="; ".join(kinds))
    parser.add_argument("--commit", default="not told", help="of this checkout, for the results")
    parser.add_argument("--warm", choices=kinds, help="only compile what this takes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.fla_choices:
        fewer_choices(args.fla_choices)
    if args.warm:
        _, kind, spec = ("ours " * ("fla" not in args.warm) + args.warm + " ").split(" ", 2)
        call = Call(kind, spec.strip() or None, args.batch, args.tokens)
        for function in fla_calls(call, args.batch, {}).values() if "fla" in args.warm else (call.train,):
            function()
            torch.cuda.synchronize()
            print("warm:", args.warm, flush=True)
        return 0
    cases = [case for case in CASES if " ".join(filter(None, case)) in args.cases]
    broken = [line for case in cases for line in check(*case)]
    if broken:
        print("Not timed, because these are wrong:", *broken, sep="\n  ")
        return 1
    print("checked", flush=True)

    def save(found: dict[str, Any]) -> None:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            name = f"kernels_chunk_{found['gpu'].lower().replace(' ', '_')}"
            (args.out / f"{name}.md").write_text(table(found, args.fla_choices))
            (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")

    others = [kind for kind in FLA if f"fla {kind}" in args.cases]
    found = measure(args.batch, args.tokens, cases, others, args.by_kernel, args.seconds, args.commit, save)
    print(table(found, args.fla_choices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
