"""A decode step of one layer on a CPU: time, and bytes that its states really take, packed and as a dense tensor.

    python benchmarks/packed_cpu.py [--batch 1 8] [--out FILE.json]

Gated DeltaNet with the sizes of Qwen3-Next-80B (H = 16, HV = 32, K = V = 128), one thread, compiled with
`backend="lattn_compile"`. What is fused is loops that Inductor wrote; what is not is a call of the op, in torch's own
operations. Steps of all rows take turns; medians. Bytes are those of the storages behind the tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.packed.layout import Heads

HEADS = Heads(16, 32, 128, 128, "head", True)
POLICIES: dict[str, lc.Policy] = {
    "packed fp32": lc.PRESETS["exact"],
    "packed bf16 token": lc.Policy(lc.Bf16()),
    "packed int8 token": lc.PRESETS["int8"],
    "packed nvfp4 token": lc.Policy(lc.Nvfp4()),
    "packed int8 replay 8": lc.PRESETS["int8-replay"],
}


def tokens(batch: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    H, HV, K, V = HEADS[:4]
    q, k = (torch.randn(batch, 1, H, K, generator=rng) for _ in range(2))
    gates = torch.rand(2, batch, 1, HV, generator=rng)
    return [q, k, torch.randn(batch, 1, HV, V, generator=rng), -0.05 * gates[0], gates[1]]


def compiled(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(step, backend="lattn_compile", fullgraph=True)


def dense_step(x: list[Tensor], state: Tensor) -> Tensor:
    o, new = lc.linear_attention(*x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert isinstance(new, Tensor)
    state.copy_(new)
    return o


def packed_step(x: list[Tensor], state: lc.QuantizedState) -> Tensor:
    return state.step(*x, use_qk_l2norm_in_kernel=True)


@torch.no_grad()
def measure(batch: int, rounds: int) -> list[dict[str, Any]]:
    x = tokens(batch)
    torch._dynamo.reset()
    state = torch.zeros(batch, HEADS.HV, HEADS.K, HEADS.V)
    cases: list[tuple[str, Callable[..., Tensor], Any, int]] = [
        ("fp32 tensor", compiled(dense_step), state, state.untyped_storage().nbytes())
    ]
    for name, chosen in POLICIES.items():
        packed = lc.QuantizedState(chosen).allocate(HEADS, batch)
        held = sum(y.untyped_storage().nbytes() for y in packed.held().values())
        cases.append((name, compiled(packed_step), packed, held))
    times: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for i in range(rounds + 3):
        for name, step, state, _ in cases:
            start = time.perf_counter()
            step(x, state)
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    dense = cases[0][3]
    return [
        {
            "state": name,
            "batch": batch,
            "us": 1e6 * statistics.median(times[name]),
            "bytes": held,
            "of_fp32": held / dense,
        }
        for name, _, _, held in cases
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packed_cpu.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    rows = [row for batch in args.batch for row in measure(batch, args.rounds)]
    about = {
        "heads": list(HEADS[:4]),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = ["| state | batch | a step | bytes | fp32 = 1 |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['state']} | {r['batch']} | {r['us']:,.0f} µs | {r['bytes']:,} | {r['of_fp32']:.3f} |" for r in rows
    ]
    args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
