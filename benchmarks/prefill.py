"""Times the emulated prefill (rounded operands, approximate inverses) beside the exact one, on a GPU or a CPU.

    python benchmarks/prefill.py [--tokens 8192] [--batch 1] [--device cuda] [--only REGEX] [--out FOLDER]

Chunk form, GDN and KDA shapes of Qwen3-Next and Kimi Linear: H = 16, HV = 32, K = V = 128, bf16 inputs, a state of
float32. Everything is the reference kernel: it rounds as a low-precision kernel would, and saves no time. "exact" is
the same call without a prefill policy, the other rows are as many times as slow. Every case is first held to its own
float64 run on a short call; if one is off, nothing is timed and the exit code is 1. Times are medians.

Writes `prefill_<device>.md` and `.json` into FOLDER.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import lattn_compile.ops  # noqa: F401 - registers the ops
from lattn_compile.errors import LattnWarning
from lattn_compile.modes import SITES, BlockDoubling, Neumann, NewtonSchulz, Prefill

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
CASES: dict[str, Prefill] = {
    "exact": Prefill(),
    **{f"all sites {fmt}": Prefill(dict.fromkeys(SITES, fmt)) for fmt in ("fp8_e4m3", "int8", "nvfp4")},
    "kk, qk fp8_e4m3": Prefill({"kk": "fp8_e4m3", "qk": "fp8_e4m3"}),
    **{str(i): Prefill(inverse=i) for i in (Neumann(7), NewtonSchulz(4), BlockDoubling(8), BlockDoubling(16))},
}


def inputs(kind: str, batch: int, tokens: int, device: str) -> list[Tensor]:
    """q, k, v, g, beta and a state, leaves of a graph; keys are normalised by the op."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    heads = KEY_HEADS if kind == "gdn" else VALUE_HEADS  # as many as value heads in Kimi Linear
    rows = (batch, tokens)
    gates = (*rows, VALUE_HEADS) if kind == "gdn" else (*rows, VALUE_HEADS, KEY)
    made = [
        *(normal(*rows, heads, KEY).bfloat16() for _ in range(2)),
        normal(*rows, VALUE_HEADS, VALUE).bfloat16(),
        -torch.nn.functional.softplus(normal(*gates) - 2),
        normal(*rows, VALUE_HEADS).sigmoid().bfloat16(),
        normal(batch, VALUE_HEADS, KEY, VALUE),
    ]
    return [x.requires_grad_() for x in made]


def call(x: list[Tensor], prefill: Prefill) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"scale": KEY**-0.5, "qk_l2norm": True, "implementation": "reference"}
    o, state = torch.ops.lattn.chunk(*x, *(None,) * 4, **options, **prefill.op_kwargs())
    return o, state


def off(kind: str, prefill: Prefill, device: str) -> float:
    """How far one chunk in fp32 is from float64, in units of what is allowed: a tenth of what the policy changes, or,
    where it changes next to nothing, 1e-5."""
    x = [leaf.detach() for leaf in inputs(kind, 1, 64, device)]
    narrow = call([leaf.float() for leaf in x], prefill)[0].double()
    wide = call([leaf.double() for leaf in x], prefill)[0]
    exact = call([leaf.double() for leaf in x], CASES["exact"])[0]
    allowed = max(0.1 * float((exact - wide).norm()), 1e-5 * float(exact.norm()))
    return float((narrow - wide).norm()) / allowed


def median_ms(function: Callable[[], Any], device: str, runs: int) -> float:
    def once() -> float:
        if device == "cpu":
            begin = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    once()
    return statistics.median(once() for _ in range(runs))


def measure(cases: dict[str, Prefill], batch: int, tokens: int, device: str, runs: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("gdn", "kda"):
        x = inputs(kind, batch, tokens, device)

        def train(x: list[Tensor], prefill: Prefill) -> None:
            o, state = call(x, prefill)
            torch.autograd.grad([o, state], x, [torch.ones_like(o), torch.ones_like(state)])

        for name, prefill in cases.items():
            with torch.no_grad():
                forward = median_ms(lambda x=x, p=prefill: call(x, p), device, runs)
            whole = median_ms(lambda x=x, p=prefill: train(x, p), device, runs)
            rows.append({"kind": kind, "case": name, "forward_ms": forward, "train_ms": whole})
            print(f"{kind} {name}: forward {forward:.2f} ms, forward + backward {whole:.2f} ms", flush=True)
    return rows


def table(rows: list[dict[str, Any]], head: str) -> str:
    exact = {r["kind"]: r for r in rows if r["case"] == "exact"}
    lines = [
        head,
        "",
        "| | case | forward ms | / exact | forward + backward ms | / exact |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratios = [f"{r[n] / exact[r['kind']][n]:.2f}" if r["kind"] in exact else "" for n in ("forward_ms", "train_ms")]
        lines.append(
            f"| {r['kind']} | {r['case']} | {r['forward_ms']:.2f} | {ratios[0]} | {r['train_ms']:.2f} | {ratios[1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="a regular expression, for example 'exact|fp8'")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", LattnWarning)  # random keys break the short series; this is about time
    cases = {name: prefill for name, prefill in CASES.items() if re.search(args.only, name)}
    broken = [f"{k} {n}: {e:.2f} of the bound" for k in ("gdn", "kda") for n, p in cases.items()
              if not (e := off(k, p, args.device)) <= 1.0]  # fmt: skip
    if broken:
        print("Not timed, because these are wrong:", *broken, sep="\n  ")
        return 1
    rows = measure(cases, args.batch, args.tokens, args.device, args.runs)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    text = table(rows, f"Emulated prefill on {device}, torch {torch.__version__}, B = {args.batch}, T = {args.tokens}.")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "prefill_" + re.sub(r"\W+", "_", device.lower())
        (args.out / f"{name}.md").write_text(text, encoding="utf-8")
        (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
