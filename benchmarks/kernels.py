"""Times the Triton kernels on this machine's GPU, beside flash-linear-attention's where it is installed.

    python benchmarks/kernels.py [--batch 4] [--tokens 4096] [--out FOLDER]

Decode form (token by token), GDN and KDA shapes of Qwen3-Next: H = 16, HV = 32, K = V = 128, bf16 inputs, a state of
float32. Every kernel is first held to float64 on a short run; if one is off, nothing is timed and the exit code is 1.
Times are medians of CUDA graph replays. "bandwidth" is the bytes of inputs, outputs and states, each counted once, over
that time and over what a plain copy moves on this machine: a token loop is bound by latency and arithmetic, not by it.

Writes `kernels_<gpu>.md` and `.json` into FOLDER.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import decode
from lattn_compile.kernels.reference import decode as reference

DEVICE = "cuda"
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
CASES = (
    ("gdn", None),
    ("gdn", "int8/*x16"),
    ("gdn", "int8/*x32"),
    ("gdn", "int8/*x64"),
    ("gdn", "int8/*x*"),
    ("gdn", "fp8_e4m3/*x64"),
    ("gdn", "nvfp4"),
    ("kda", None),
    ("kda", "int8/*x32"),
)
NAMES = ("q", "k", "v", "g", "beta")


class Call:
    """One call of the decode kernel at the benchmark's shapes: B sequences of T tokens, all tensors on the GPU."""

    def __init__(self, kind: str, spec: str | None, batch: int, tokens: int, every: int) -> None:
        rng = torch.Generator(DEVICE).manual_seed(0)
        rows = batch * tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=DEVICE).bfloat16()

        gates = (rows, VALUE_HEADS) if kind == "gdn" else (rows, VALUE_HEADS, KEY)
        self.q, self.k = normal(rows, KEY_HEADS, KEY), normal(rows, KEY_HEADS, KEY)
        self.v = normal(rows, VALUE_HEADS, VALUE)
        self.g = -torch.nn.functional.softplus(torch.randn(gates, generator=rng, device=DEVICE) - 2)
        self.beta = torch.rand(rows, VALUE_HEADS, generator=rng, device=DEVICE).bfloat16()
        self.quantize = None if spec is None else Quantizer(parse(spec))
        state = torch.randn(batch, VALUE_HEADS, KEY, VALUE, generator=rng, device=DEVICE)
        self.state = state if self.quantize is None else self.quantize.qdq(state)
        self.starts = torch.arange(batch, device=DEVICE) * tokens
        self.lengths = torch.full((batch,), tokens, device=DEVICE)
        self.every, self.tokens = every, tokens
        self.marks = torch.zeros(rows // every + batch, *state.shape[1:], device=DEVICE)
        self.o, self.grad_o = torch.zeros_like(self.v), normal(*self.v.shape)
        self.grad_final = torch.randn_like(self.state)
        self.grads = {f"d{name}": torch.zeros_like(getattr(self, name)) for name in NAMES}
        self.options = {
            "rule": "delta",
            "scale": KEY**-0.5,
            "qk_l2norm": True,
            "quantize": self.quantize,
            "readout": "before_write",
        }

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state, self.starts, self.lengths)

    def forward(self) -> Tensor:
        return decode.forward(*self.inputs(), self.o, None, 0, **self.options)

    def train(self) -> Tensor:
        decode.forward(*self.inputs(), self.o, self.marks, self.every, **self.options)
        return decode.backward(
            self.grad_o, self.grad_final, *self.inputs(), self.marks, self.every, self.grads,
            longest=self.tokens, **self.options,
        )  # fmt: skip

    def forward_bytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.g, self.beta, self.o)) + 2 * self.state.nbytes

    def train_bytes(self) -> int:
        """Forward; the backward reads the inputs again and the outputs' gradients, and writes the inputs'."""
        again = sum(x.nbytes for x in (self.q, self.k, self.v, self.g, self.beta, self.grad_o))
        return self.forward_bytes() + again + sum(x.nbytes for x in self.grads.values()) + 2 * self.state.nbytes


def check(kind: str, spec: str | None) -> list[str]:
    """What is off on three short sequences, in words. Quantized, over 4 tokens: later ones depend on ties too much."""
    call = Call(kind, spec, 3, 40 if spec is None else 4, 16)
    call.train()
    exact = [x.double() for x in call.inputs()[:6]]
    o, marks = torch.zeros_like(call.o, dtype=torch.float64), call.marks.double().zero_()
    rest = (call.starts, call.lengths)
    reference.forward(*exact, *rest, o, marks, 16, **call.options)
    grads = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in call.grads.items()}
    dstate = reference.backward(
        call.grad_o.double(), call.grad_final.double(), *exact, *rest, marks, 16, grads, **call.options
    )
    pairs = {"o": (call.o, o), "dstate": (call.train(), dstate)} | {n: (call.grads[n], x) for n, x in grads.items()}
    found = []
    for name, (ours, want) in pairs.items():
        error = float((ours.double() - want).norm() / want.norm())
        # bf16 results are within 2^-9 of float64's; float32 ones (a few codes rounded the other way) far closer.
        bound = 3e-3 if ours.dtype is torch.bfloat16 else (1e-5 if spec is None else 3e-3)
        if not error <= bound:
            found.append(f"{kind} {spec}: {name} is off by {error:.2g} (bound {bound:.0e})")
    return found


def milliseconds(call: Callable[[], object], replays: int = 9) -> float:
    """Median time of a CUDA graph of one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for i in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy."""
    x = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE).normal_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / (milliseconds(lambda: y.copy_(x)) / 1e3)


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one call by kernel."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    found = {e.key: e.device_time_total / 1e3 for e in trace.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:8])


def fla_forward(call: Call, batch: int) -> Callable[[], object] | None:
    """FLA's recurrent GDN forward on the same tokens, unquantized; None without FLA."""
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    except ImportError as error:
        print(f"without flash-linear-attention: {error}")
        return None
    q, k, v, g, beta = (x.unflatten(0, (batch, -1)) for x in (call.q, call.k, call.v, call.g, call.beta))

    def run() -> object:
        with torch.no_grad():
            return rule(
                q, k, v, g=g, beta=beta, scale=KEY**-0.5, initial_state=call.state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

    return run


def measure(batch: int, tokens: int) -> dict[str, Any]:
    every = 64
    copied = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    fla: float | None = None
    for kind, spec in CASES:
        call = Call(kind, spec, batch, tokens, every)
        if not rows and (run := fla_forward(call, batch)) is not None:
            fla = milliseconds(run)
        forward, train = milliseconds(call.forward), milliseconds(call.train, 5)
        rows.append(
            {
                "kind": kind,
                "format": spec or "exact",
                "forward_ms": forward,
                "train_ms": train,
                "forward_bandwidth": call.forward_bytes() / (forward / 1e3) / copied,
                "train_bandwidth": call.train_bytes() / (train / 1e3) / copied,
                "token_us": forward / tokens * 1e3,
            }
        )
        if spec in (None, "int8/*x32"):
            rows[-1]["kernels_ms"] = by_kernel(call.train)
        print(rows[-1], flush=True)
        del call
        torch.cuda.empty_cache()
    shape = {
        "B": batch,
        "T": tokens,
        "H": KEY_HEADS,
        "HV": VALUE_HEADS,
        "K": KEY,
        "V": VALUE,
        "checkpoint_every": every,
    }
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "shape": shape,
        "copy_bytes_per_second": copied,
        "fla_fused_recurrent_gdn_forward_ms": fla,
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    fla = found["fla_fused_recurrent_gdn_forward_ms"]

    def ratio(row: dict[str, Any], what: str) -> str:
        return "-" if fla is None or row["kind"] != "gdn" else f"{row[what] / fla:.2f}"

    lines = [
        f"# Decode kernels on {found['gpu']}",
        "",
        f"`python benchmarks/kernels.py`, torch {found['torch']}, Triton {found['triton']}; "
        + ", ".join(f"{name} = {value}" for name, value in found["shape"].items())
        + f", bf16 inputs. A copy moves {found['copy_bytes_per_second'] / 1e12:.2f} TB/s.",
        "",
        "FLA fused_recurrent GDN forward, unquantized: " + ("not installed." if fla is None else f"{fla:.2f} ms."),
        "",
        "| | state | forward ms | µs a token | forward / FLA | forward + backward ms | / FLA forward | bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        lines.append(
            f"| {r['kind']} | {r['format']} | {r['forward_ms']:.2f} | {r['token_us']:.2f} | {ratio(r, 'forward_ms')} "
            f"| {r['train_ms']:.2f} | {ratio(r, 'train_ms')} | {100 * r['forward_bandwidth']:.0f} % |"
        )
    for r in found["rows"]:
        if "kernels_ms" in r:
            parts = ", ".join(f"{name} {ms:.2f}" for name, ms in r["kernels_ms"].items())
            lines += ["", f"{r['kind']} {r['format']}, forward + backward by kernel, ms: {parts}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    broken = [line for case in CASES for line in check(*case)]
    if broken:
        print("Not timed, because these are wrong:", *broken, sep="\n  ")
        return 1
    found = measure(args.batch, args.tokens)
    text = table(found)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"kernels_{found['gpu'].lower().replace(' ', '_')}"
        (args.out / f"{name}.md").write_text(text)
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
