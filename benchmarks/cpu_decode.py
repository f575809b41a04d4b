"""A decode step on a CPU: transformers' eager torch path, plain Inductor and this backend, side by side in one run.

    python benchmarks/cpu_decode.py [--models qwen3_next kimi_linear] [--steps 100] [--threads 1] [--out DIR]

The models are small and random, from transformers' own classes (three linear-attention layers and one of full
attention, K = V = 32). One token at a time goes through a dynamic cache; the three are called in turn, so that whatever
else the machine does falls on all of them. Times are process CPU microseconds, the median over the steps. Before
anything is timed, the logits of the exact policy must be eager's to 1e-4.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# transformers looks for a package named `kernels` and must not find the script beside this one.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
import transformers  # noqa: E402

import lattn_compile as lc  # noqa: E402

PROMPT = 32
ARMS = ("eager", "inductor", "exact", "int8", "fp8")


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    types = ["linear_attention"] * 3 + ["full_attention"]
    shared: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": types,
        "pad_token_id": 0,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    if name == "qwen3_next":
        config = transformers.Qwen3NextConfig(**shared, mlp_only_layers=list(range(len(types))), num_experts=0)
        return transformers.Qwen3NextForCausalLM(config).eval().float()
    if name == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**shared)).eval().float()
    raise SystemExit(f"--models: {name!r}; known are qwen3_next and qwen3_5")


class Arm:
    """One way to run a model, its cache and the times of its steps."""

    def __init__(self, model: torch.nn.Module, name: str, prompt: torch.Tensor) -> None:
        self.step: Callable[..., Any] = model
        if name == "inductor":
            self.step = torch.compile(model)
        elif name != "eager":
            self.step = torch.compile(model, backend="lattn_compile", options={"policy": name})
        self.cache = model(prompt, use_cache=True).past_key_values
        self.times: list[float] = []

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        began = time.process_time()
        logits = self.step(input_ids=token, past_key_values=self.cache, use_cache=True).logits
        self.times.append(1e6 * (time.process_time() - began))
        return logits


def measure(name: str, steps: int, warm: int = 20) -> dict[str, Any]:
    model = build(name)
    tokens = torch.randint(1, 255, (1, PROMPT + warm + steps))
    with torch.no_grad():
        arms = {arm: Arm(model, arm, tokens[:, :PROMPT]) for arm in ARMS}
        for i in range(PROMPT, tokens.shape[1]):
            logits = {arm: run(tokens[:, i : i + 1]) for arm, run in arms.items()}
            error = (logits["exact"] - logits["eager"]).abs().max().item()
            if error > 1e-4:
                raise SystemExit(f"{name}: the exact policy is off by {error:.3g} at token {i}; nothing was timed")
    times = {arm: statistics.median(run.times[warm:]) for arm, run in arms.items()}
    return {
        "model": name,
        "microseconds": times,
        "over_eager": {arm: times["eager"] / t for arm, t in times.items()},
        "over_inductor": {arm: times["inductor"] / t for arm, t in times.items()},
    }


def table(rows: list[dict[str, Any]], versions: dict[str, Any]) -> str:
    lines = [
        f"{versions['cpu']}, {versions['threads']} thread(s); torch {versions['torch']}, "
        f"transformers {versions['transformers']}; µs of CPU a step, median",
        "",
        "| model | " + " | ".join(ARMS) + " | exact over eager | exact over Inductor |",
        "|---|" + "---|" * (len(ARMS) + 2),
    ]
    for row in rows:
        t = row["microseconds"]
        lines.append(
            f"| {row['model']} | "
            + " | ".join(f"{t[arm]:.0f}" for arm in ARMS)
            + f" | {row['over_eager']['exact']:.1f} × | {row['over_inductor']['exact']:.2f} × |"
        )
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3_next", "qwen3_5"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(name, args.steps) for name in args.models]
    versions = {
        "cpu": _cpu() if Path("/proc/cpuinfo").exists() else platform.processor(),
        "threads": args.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lattn_compile": lc.__version__,
    }
    text = table(rows, versions)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cpu_decode.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
        (args.out / "cpu_decode.md").write_text(text)


if __name__ == "__main__":
    main()
