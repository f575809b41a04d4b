"""A hybrid model end to end: decode steps, prefill and a training step, transformers (with flash-linear-attention where
it is installed) beside this backend.

    python benchmarks/model_decode.py --out rows.jsonl [--only decode/ours floor] [--budget 500] [--limit 90]
    python benchmarks/model_decode.py --out rows.jsonl --table            what the rows say
    python benchmarks/model_decode.py --out rows.jsonl --tiny --device cpu   the script itself, in a minute or three

The model has Qwen3-Next's shape: 894 M parameters in bf16, hidden size 2,048, 12 layers of which 9 are linear attention
(H = 16, HV = 32, K = V = 128), no experts, random weights; decoding goes through transformers' `StaticCache`. It is
made of parts, each a process of its own that adds one line to the file: a part that is there is not run again, so a run
that was cut goes on where it was. Inductor's caches outlive a part, so one that hit its limit while compiling has less
to do.

Arms: `eager` (transformers as it is), `compile` and `compile-ro` (plain torch.compile, default and reduce-overhead),
`ours` and `ours-ro` (this backend, policy exact). `--lower decode` lets Inductor launch what is not
proven on a GPU yet (`lattn_compile/lowering/gpu.py`: PROVEN). The floor of a step is the time to read the weights once
and to read and write the states once, at the bandwidth of a copy that is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# transformers looks for a package named `kernels` and must not find the script beside this one.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

ARMS = ("eager", "compile", "compile-ro", "ours", "ours-ro")
ROOT = Path(__file__).resolve().parents[1]


class Sizes:
    """What is run, full size or tiny."""

    def __init__(self, tiny: bool) -> None:
        self.layers, self.hidden, self.mlp, self.vocab = (4, 64, 96, 97) if tiny else (12, 2048, 5120, 32000)
        self.heads, self.value_heads, self.dim = (2, 4, 16) if tiny else (16, 32, 128)
        self.attention, self.head_dim = (4, 16) if tiny else (16, 256)
        self.batches = (1, 2) if tiny else (1, 8, 64)
        self.prompt, self.room = (8, 256) if tiny else (64, 1024)
        self.prefill, self.train = (40, 24) if tiny else (8192, 4096)
        self.steps, self.rounds = (3, 2) if tiny else (20, 5)
        self.bf16 = not tiny

    @property
    def linear_layers(self) -> int:
        return self.layers // 4 * 3

    @property
    def state_bytes(self) -> int:
        """Of one sequence, in float32."""
        return 4 * self.linear_layers * self.value_heads * self.dim * self.dim


def parts(sizes: Sizes) -> list[str]:
    """Names of all parts, the cheap ones first."""
    names = ["floor"]
    names += [f"decode/{arm}/{batch}" for batch in sizes.batches for arm in ARMS]
    middle = sizes.batches[1]
    names += [f"kernels/{arm}/{middle}" for arm in ("ours", "compile", "eager")]
    return names + [f"{what}/{arm}/1" for what in ("prefill", "train") for arm in ("eager", "ours")]


def build(sizes: Sizes, device: str, *, training: bool = False) -> Any:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.attention,
        num_key_value_heads=2,
        head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.dim,
        linear_value_head_dim=sizes.dim,
        linear_conv_kernel_dim=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (sizes.layers // 4),
        mlp_only_layers=list(range(sizes.layers)),
        num_experts=0,
        max_position_embeddings=2 * sizes.prefill,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    with torch.device(device):
        model = Qwen3NextForCausalLM(config)
    model = model.to(torch.bfloat16 if sizes.bf16 else torch.float32)
    return model.train() if training else model.eval().requires_grad_(False)


def compiled(model: Any, arm: str, kernel: str) -> Callable[..., Any]:
    """`model` as the arm calls it."""
    import torch

    if arm == "eager":
        return model  # type: ignore[no-any-return]
    fast = arm.endswith("-ro")
    if arm.startswith("compile"):
        return torch.compile(model, mode="reduce-overhead" if fast else "default")
    import lattn_compile as lc

    options: dict[str, Any] = {"policy": lc.Policy(write=lc.Exact(), kernel=kernel)}  # type: ignore[arg-type]
    if fast:
        options["mode"] = "reduce-overhead"
    return torch.compile(model, backend="lattn_compile", options=options)


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], sizes: Sizes, device: str, *, steps: int | None = None) -> float:
    """Milliseconds of a call: the median over rounds of the mean over a round's calls."""
    steps, times = steps or sizes.steps, []
    for _ in range(sizes.rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began) / steps)
    return statistics.median(times)


class Decoding:
    """One sequence of steps of a model with a cache of its own."""

    def __init__(self, model: Any, step: Callable[..., Any], sizes: Sizes, batch: int, device: str) -> None:
        import torch
        from transformers import StaticCache

        prompt = torch.arange(batch * sizes.prompt, device=device).view(batch, -1) % (sizes.vocab - 1) + 1
        self.cache = StaticCache(config=model.config, max_cache_len=sizes.room)
        self.step, self.token = step, prompt[:, -1:].clone()
        model(input_ids=prompt, past_key_values=self.cache, use_cache=True)

    def __call__(self) -> Any:
        import torch

        torch.compiler.cudagraph_mark_step_begin()
        return self.step(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits


def decode(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    import torch

    model = build(sizes, device)
    with torch.no_grad():
        began = time.perf_counter()
        run = Decoding(model, compiled(model, arm, kernel), sizes, batch, device)
        logits = run().float().clone()
        synchronize(device)
        first = time.perf_counter() - began
        row = {"first_s": round(first, 2), "error": None}
        if arm != "eager":
            want = Decoding(model, model, sizes, batch, device)().float()
            row["error"] = float((logits - want).abs().max() / want.std())
        for _ in range(3):
            run()
        row["ms"] = timed(run, sizes, device)
    return row


def kernels(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    """How many kernels a step launches, and which take the time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = build(sizes, device)
    with torch.no_grad():
        run = Decoding(model, compiled(model, arm, kernel), sizes, batch, device)
        for _ in range(3):
            run()
        synchronize(device)
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as seen:
            run()
            synchronize(device)
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if device != "cuda" or (str(event.device_type).endswith("CUDA") and not event.name.startswith(("Mem", "cuda"))):
            found.setdefault(event.name, []).append(event.device_time if device == "cuda" else event.cpu_time)
    most = sorted(found.items(), key=lambda x: -sum(x[1]))
    return {
        "kernels": sum(len(x) for x in found.values()),
        "device_us": sum(sum(x) for x in found.values()),
        "most": [[name[:80], len(x), round(sum(x), 1)] for name, x in most[:25]],
    }


def prefill(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    import torch

    model = build(sizes, device)
    ids = torch.arange(batch * sizes.prefill, device=device).view(batch, -1) % (sizes.vocab - 1) + 1
    step = compiled(model, arm, kernel)
    with torch.no_grad():
        began = time.perf_counter()
        logits = step(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float().clone()
        synchronize(device)
        first = time.perf_counter() - began
        error = None
        if arm != "eager":
            want = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float()
            error = float((logits - want).abs().max() / want.std())
        ms = timed(lambda: step(input_ids=ids, use_cache=False, logits_to_keep=1), sizes, device, steps=2)
    return {"first_s": round(first, 2), "error": error, "ms": ms, "tokens": sizes.prefill}


def train(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    """Forward, loss and backward."""
    import torch

    model = build(sizes, device, training=True)
    ids = torch.arange(batch * sizes.train, device=device).view(batch, -1) % (sizes.vocab - 1) + 1
    step = compiled(model, arm, kernel)

    def call() -> Any:
        model.zero_grad(set_to_none=True)
        loss = step(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    began = time.perf_counter()
    loss = float(call())
    synchronize(device)
    first = time.perf_counter() - began
    return {
        "first_s": round(first, 2),
        "loss": loss,
        "ms": timed(call, sizes, device, steps=2),
        "tokens": sizes.train,
    }


def floor(sizes: Sizes, device: str) -> dict[str, Any]:
    """Bandwidth of a copy, and what the bytes of a decode step take at it."""
    import torch

    with torch.device("meta"):
        model = build(sizes, "meta")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= model.model.embed_tokens.weight.numel() * model.model.embed_tokens.weight.element_size()
    source = torch.empty((1 << 30) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = timed(lambda: target.copy_(source), sizes, device)
    rate = 2 * source.numel() / ms / 1e3  # bytes a microsecond
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "copy_TBps": rate / 1e6,
        "floor_ms": {str(b): (weights + 2 * b * sizes.state_bytes) / rate / 1e3 for b in sizes.batches},
    }


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part, in this process."""
    import torch

    sizes = Sizes(args.tiny)
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.lower:
        from lattn_compile.lowering import gpu

        gpu.PROVEN = gpu.PROVEN | frozenset(args.lower)
    if name == "floor":
        row = floor(sizes, args.device)
    else:
        what, arm, batch = name.split("/")
        call = {"decode": decode, "kernels": kernels, "prefill": prefill, "train": train}[what]
        row = call(arm, int(batch), sizes, args.device, args.kernel)
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "fla": _version("fla")}
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return (
        {"part": name, "machine": machine, "tiny": args.tiny, "kernel": args.kernel, "lower": args.lower}
        | row
        | versions
    )


def _version(package: str) -> str | None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        return None
    return str(getattr(__import__(package), "__version__", "?"))


def _rows(file: Path) -> dict[str, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["part"]: row for row in map(json.loads, lines)}


def run_all(args: argparse.Namespace) -> None:
    """Every part that is asked for and not in the file, each in a process of its own."""
    began, sizes = time.monotonic(), Sizes(args.tiny)
    wanted = [p for p in parts(sizes) if not args.only or any(p.startswith(x) for x in args.only)]
    caches = args.out.with_suffix(".caches").resolve()
    mine = "-".join([args.kernel, *sorted(args.lower)])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / mine),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    for name in wanted:
        if name in _rows(args.out):
            continue
        if args.budget and time.monotonic() - began + args.limit > args.budget:
            print(f"stopped before {name}: {args.budget} s would not do", flush=True)
            return
        command = [sys.executable, __file__, "--part", name, "--out", str(args.out), "--device", args.device]
        command += ["--kernel", args.kernel, *(["--tiny"] if args.tiny else [])]
        command += ["--lower", *args.lower] if args.lower else []
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.limit)
            row, text = _rows(args.out).get(name), (done.stderr.strip().splitlines() or ["?"])[-1]
        except subprocess.TimeoutExpired:
            print(f"{name}: cut after {args.limit} s; run again", flush=True)
            continue
        if row is None:
            # What an arm refuses is a result.
            row = {"part": name, "refused": text[:400]}
            _add(args.out, row)
        shown = {k: v for k, v in row.items() if k not in ("part", "machine", "most", "torch", "transformers", "fla")}
        print(name, json.dumps(shown), flush=True)


def _add(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def table(rows: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    """Decode steps beside their floor, then the rest."""
    floors = rows.get("floor", {}).get("floor_ms", {})
    lines = ["| B | floor ms | " + " | ".join(ARMS) + " |", "|---|" + "---|" * (len(ARMS) + 1)]
    for batch in sizes.batches:
        low = floors.get(str(batch))
        cells = []
        for arm in ARMS:
            row = rows.get(f"decode/{arm}/{batch}", {})
            text = f"{row['ms']:.2f}" if "ms" in row else row.get("refused", "–")[:40]
            cells.append(text + (f" ({row['ms'] / low:.1f} ×)" if low and "ms" in row else ""))
        lines.append(f"| {batch} | {'–' if low is None else f'{low:.2f}'} | " + " | ".join(cells) + " |")
    for name, row in rows.items():
        if name.startswith(("prefill", "train", "kernels")):
            said = {k: row[k] for k in ("ms", "kernels", "device_us", "loss", "error", "refused") if k in row}
            lines.append(f"\n{name}: {said}")
            lines += [f"    {count:4d} × {name}: {us} µs" for name, count, us in row.get("most", [])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON, one a part")
    parser.add_argument("--part", help="one part, in this process")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of parts")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernel", default="auto", choices=("auto", "triton", "reference"), help="of the policy")
    parser.add_argument("--lower", nargs="+", default=[], help="take as proven: decode, chunk, replay")
    parser.add_argument("--budget", type=float, help="seconds for all parts of this call")
    parser.add_argument("--limit", type=float, default=90, help="seconds for a part")
    args = parser.parse_args()
    if args.table:
        print(table(_rows(args.out), Sizes(args.tiny)))
    elif args.part:
        _add(args.out, run_part(args.part, args))
    else:
        run_all(args)


if __name__ == "__main__":
    main()
