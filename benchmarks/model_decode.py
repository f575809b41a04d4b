"""A hybrid model end to end: decode steps, prefill and a training step, transformers (with flash-linear-attention where
it is installed) beside this backend.

    python benchmarks/model_decode.py --out rows.jsonl [--only decode/ours floor] [--budget 500] [--limit 90]
    python benchmarks/model_decode.py --out rows.jsonl --together 140     compile all at once, then measure in turn
    python benchmarks/model_decode.py --out rows.jsonl --table            what the rows say
    python benchmarks/model_decode.py --out rows.jsonl --tiny --device cpu   the script itself, in a minute or three

The model has Qwen3-Next's shape: 894 M parameters in bf16, hidden size 2,048, 12 layers of which 9 are linear attention
(H = 16, HV = 32, K = V = 128), no experts, random weights; decoding goes through transformers' `StaticCache`. It is
made of parts, each a process of its own that adds one line to the file: a part that is there is not run again, so a run
that was cut goes on where it was. Inductor's caches outlive a part, so one that hit its limit while compiling has less
to do. Compiling takes a core for a minute, measuring takes the device for a second: `--together` compiles all parts at
once and lets them measure one after another when all are ready, or when half of its seconds are over.

Arms: `eager` (transformers as it is), `compile` and `compile-ro` (plain torch.compile, default and reduce-overhead),
`ours` and `ours-ro` (this backend, policy exact), `ours-ro-early` (kernels begin before the one in front has ended),
`ours-ro-combo` (Inductor's `combo_kernels`: small kernels that do not depend on each other are one),
`ours-triton` (with kernel="triton": also what is not proven on a GPU yet); and of decode steps `ours-ro-int8` and the
others of PACKED: reduce-overhead with states that are stored as the policy says (`quantize_cache`). Of a training step
also `torch` (transformers' own torch path) and `eager-unguarded`: flash-linear-attention refuses gated backwards on
Hopper with Triton 3.4 to 3.7.0, where it knows its gradients to be wrong; with that guard off, they tell a time and
nothing else.
`--lower convolution` lets Inductor launch what is not proven in its module (`lattn_compile/lowering/gpu.py`: PROVEN).
The floor of a step is the time to read the weights once and to read and write the states once, at the bandwidth of a
copy that is measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

# transformers looks for a package named `kernels` and must not find the script beside this one.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

ARMS = ("eager", "compile", "compile-ro", "ours", "ours-ro", "ours-ro-early", "ours-ro-combo")
PACKED = {
    "ours-ro-int8": "int8",
    "ours-ro-fp8": "fp8",
    "ours-ro-nvfp4": "nvfp4 token",
    "ours-ro-replay": "int8-replay",
    "ours-ro-two": "fp8-two-precision",
}
"""Arms with packed states, and their policies."""
ROOT = Path(__file__).resolve().parents[1]
TURNS = "LATTN_BENCHMARK_TURNS"
WARM = "LATTN_BENCHMARK_WARM"
"""Where it is set, parts end when they are compiled: whoever measures later finds their code in a cache."""


class Sizes:
    """What is run, full size or tiny."""

    def __init__(self, tiny: bool) -> None:
        self.layers, self.hidden, self.mlp, self.vocab = (4, 64, 96, 97) if tiny else (12, 2048, 5120, 32000)
        self.heads, self.value_heads, self.dim = (2, 4, 16) if tiny else (16, 32, 128)
        self.attention, self.head_dim = (4, 16) if tiny else (16, 256)
        self.batches = (1, 2) if tiny else (1, 8, 64, 256)
        self.prompt, self.room = 4, 256
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
    names += [f"decode/{arm}/{batch}" for batch in sizes.batches for arm in (*ARMS, *PACKED)]
    names += [f"{what}/{arm}/1" for what in ("prefill", "train") for arm in ("eager", "ours", "ours-triton")]
    return [*names, "train/torch/1", "train/eager-unguarded/1"]


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
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if sizes.bf16 else torch.float32)
    try:
        with torch.device(device):
            model = Qwen3NextForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.train() if training else model.eval().requires_grad_(False)


def compiled(model: Any, arm: str, kernel: str) -> Callable[..., Any]:
    """`model` as the arm calls it."""
    import torch

    if arm == "torch":
        alone()
    if arm == "eager-unguarded":
        from fla.ops.common import chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    if arm in ("eager", "torch", "eager-unguarded"):
        return model  # type: ignore[no-any-return]
    fast = "-ro" in arm
    if arm.startswith("compile"):
        return torch.compile(model, mode="reduce-overhead" if fast else "default")
    import lattn_compile as lc

    kernel = "triton" if arm.endswith("-triton") else kernel
    exact = lc.Policy(write=lc.Exact(), kernel=kernel)  # type: ignore[arg-type]
    options: dict[str, Any] = {"policy": packed_policy(arm) if arm in PACKED else exact}
    if fast:
        options["mode"] = "reduce-overhead"
    if arm.endswith("-early"):
        options["triton.enable_pdl"] = True
    if arm.endswith("-combo"):
        options["combo_kernels"] = True
    return torch.compile(model, backend="lattn_compile", options=options)


def packed_policy(arm: str) -> Any:
    import lattn_compile as lc

    return lc.Policy(lc.Nvfp4()) if PACKED[arm] == "nvfp4 token" else PACKED[arm]


def alone() -> None:
    """From here on, the model runs transformers' torch path, whatever else is installed."""
    import inspect

    from transformers.models.qwen3_next import modeling_qwen3_next as module

    for name, function in list(vars(module).items()):
        if inspect.isfunction(function):
            setattr(module, name, inspect.unwrap(function))


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Inside, no other part measures. The first time, waits until all parts are ready (`run_together`)."""
    if WARM in os.environ:
        raise SystemExit("compiled")
    folder = os.environ.get(TURNS)
    if folder is None:
        yield
        return
    (Path(folder) / f"{os.getpid()}.ready").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def timed(call: Callable[[], Any], sizes: Sizes, device: str) -> float:
    """Milliseconds of a call: the median over rounds of the mean over a round's calls, a tenth of a second of them."""

    def seconds(calls: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return (time.perf_counter() - began) / calls

    with turn():
        steps = max(2, min(sizes.steps, round(0.1 / seconds(2))))
        return 1e3 * statistics.median(seconds(steps) for _ in range(sizes.rounds))


class Decoding:
    """One sequence of steps of a model with a cache of its own, behind `prompt` tokens taken one by one."""

    def __init__(self, model: Any, step: Callable[..., Any], sizes: Sizes, batch: int, device: str) -> None:
        import torch
        from transformers import StaticCache

        prompt = torch.arange(batch * sizes.prompt, device=device).view(batch, -1) % (sizes.vocab - 1) + 1
        self.cache = StaticCache(config=model.config, max_cache_len=sizes.room)
        self.step, self.token = step, prompt[:, -1:].clone()
        new = {"dtype": model.dtype, "device": device}
        for layer in self.cache.layers:
            if hasattr(layer, "recurrent_states"):  # a state of zeros: nobody has to compile a prefill for a prompt
                channels = (2 * sizes.heads + sizes.value_heads) * sizes.dim
                layer.lazy_initialization(
                    conv_states=torch.zeros(batch, channels, 4, **new),
                    recurrent_states=torch.zeros(batch, sizes.value_heads, sizes.dim, sizes.dim, device=device),
                )
                layer.has_previous_state[0] = True
        for token in prompt.unbind(1):
            model(input_ids=token[:, None], past_key_values=self.cache, use_cache=True)

    def __call__(self) -> Any:
        import torch

        torch.compiler.cudagraph_mark_step_begin()
        return self.step(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits


def decode(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    import torch

    model = build(sizes, device)
    if arm in PACKED:
        from lattn_compile.integrations.transformers import quantize_cache

        quantize_cache(model, packed_policy(arm))
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
        if arm.startswith("ours"):
            row |= kernels(run, device)
    return row


def kernels(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """How many kernels a call launches, and which take the time."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]):  # the first one takes seconds, which nobody has to wait for
        synchronize(device)
    with turn(), profile(activities=[activity]) as seen:
        call()
        synchronize(device)
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if device != "cuda" or (str(event.device_type).endswith("CUDA") and not event.name.startswith(("Mem", "cuda"))):
            found.setdefault(event.name, []).append(event.device_time if device == "cuda" else event.cpu_time)
    most = sorted(found.items(), key=lambda x: -sum(x[1]))
    return {
        "kernels": sum(len(x) for x in found.values()),
        "device_us": sum(sum(x) for x in found.values()),
        "most": [[name[:80], len(x), round(sum(x), 1)] for name, x in most[:30]],
    }


def prefill(arm: str, batch: int, sizes: Sizes, device: str, kernel: str) -> dict[str, Any]:
    import torch

    model = build(sizes, device)
    ids = torch.arange(batch * sizes.prefill, device=device).view(batch, -1) % (sizes.vocab - 1) + 1
    step = compiled(model, arm, kernel)

    def call() -> Any:
        return step(input_ids=ids, use_cache=False, logits_to_keep=1)

    with torch.no_grad():
        began = time.perf_counter()
        logits = call().logits.float().clone()
        synchronize(device)
        first = time.perf_counter() - began
        error = None
        if arm != "eager" and version("fla") is None:  # whose kernels would tune themselves for minutes first
            want = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float()
            error = float((logits - want).abs().max() / want.std())
        ms = timed(call, sizes, device)
        seen = kernels(call, device) if arm.startswith("ours") else {}
    return {"first_s": round(first, 2), "error": error, "ms": ms, "tokens": sizes.prefill} | seen


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
        "ms": timed(call, sizes, device),
        "tokens": sizes.train,
    } | kernels(call, device)


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
        call = {"decode": decode, "prefill": prefill, "train": train}[what]
        row = call(arm, int(batch), sizes, args.device, args.kernel)
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "fla": version("fla")}
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return (
        {"part": name, "machine": machine, "tiny": args.tiny, "kernel": args.kernel, "lower": args.lower}
        | row
        | versions
    )


def version(package: str) -> str | None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        return None
    return str(getattr(__import__(package), "__version__", "?"))


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["part"]: row for row in map(json.loads, lines)}


def _environment(args: argparse.Namespace) -> dict[str, str]:
    caches = args.out.with_suffix(".caches").resolve()
    mine = "-".join([args.kernel, *sorted(args.lower)])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / mine),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def _command(name: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--part", name, "--out", str(args.out), "--device", args.device]
    command += ["--kernel", args.kernel, *(["--tiny"] if args.tiny else [])]
    return command + (["--lower", *args.lower] if args.lower else [])


def _report(name: str, args: argparse.Namespace, said: str) -> None:
    """Prints a part's row. What an arm refuses is a result, too."""
    if (row := read_rows(args.out).get(name)) is None:
        row = {"part": name, "refused": (said.strip().splitlines() or ["?"])[-1][:400]}
        add_row(args.out, row)
    shown = {k: v for k, v in row.items() if k not in ("part", "machine", "most", "torch", "transformers", "fla")}
    print(name, json.dumps(shown), flush=True)


def run_all(args: argparse.Namespace, wanted: list[str]) -> None:
    """Each part in a process of its own, one after another."""
    began = time.monotonic()
    for name in wanted:
        if args.budget and time.monotonic() - began + args.limit > args.budget:
            print(f"stopped before {name}: {args.budget} s would not do", flush=True)
            return
        try:
            done = subprocess.run(
                _command(name, args), env=_environment(args), capture_output=True, text=True, timeout=args.limit
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: cut after {args.limit} s; run again", flush=True)
            continue
        _report(name, args, done.stderr)


def run_together(args: argparse.Namespace, wanted: list[str]) -> None:
    """Parts compile side by side, so many at a time, and measure one after another when all are ready."""
    began = time.monotonic()
    end, late = began + args.together, began + (args.compiling or args.together / 2)
    waiting = list(wanted)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        threads = max(1, (os.cpu_count() or 1) // max(1, len(wanted)))
        more = {TURNS: folder, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": "1"}
        running: dict[str, Any] = {}
        go = Path(folder) / "go"
        quiet = stack.enter_context((args.lock or Path(folder) / "quiet").open("w"))
        while (running or waiting) and time.monotonic() < end:
            compiling = [
                x for x, (process, _) in running.items() if not (Path(folder) / f"{process.pid}.ready").exists()
            ]
            if not go.exists() and ((not compiling and not waiting) or time.monotonic() > late) and _taken(quiet):
                go.touch()
            while waiting and len(compiling) < args.jobs and not go.exists():
                name = waiting.pop(0)
                log = (Path(folder) / f"{name.replace('/', '-')}.log").open("w+")
                environment = {**_environment(args), **more}
                running[name] = subprocess.Popen(_command(name, args), env=environment, stdout=log, stderr=log), log
                compiling.append(name)
            if go.exists() and waiting:
                print(f"not begun: {', '.join(waiting)}", flush=True)
                waiting = []
            for name, (process, log) in list(running.items()):
                if process.poll() is not None:
                    log.seek(0)
                    _report(name, args, log.read())
                    del running[name]
            time.sleep(0.1)
        for name, (process, _) in running.items():
            process.kill()
            process.wait()
            print(f"{name}: cut after {args.together:.0f} s; run again", flush=True)


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def add_row(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def table(rows: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    """Decode steps beside their floor, then the rest."""
    lines = [*_steps(rows, sizes, ARMS), "", *_steps(rows, sizes, ("ours-ro", *PACKED))]
    for name, row in rows.items():
        if "most" in row or name.startswith(("prefill", "train")):
            said = {k: row[k] for k in ("ms", "kernels", "device_us", "loss", "error", "refused") if k in row}
            lines.append(f"\n{name}: {said}")
            lines += [f"    {count:4d} × {name}: {us} µs" for name, count, us in row.get("most", [])]
    return "\n".join(lines) + "\n"


def _steps(rows: dict[str, dict[str, Any]], sizes: Sizes, arms: tuple[str, ...]) -> Iterator[str]:
    """Lines of a table."""
    floors = rows.get("floor", {}).get("floor_ms", {})
    yield "| B | floor ms | " + " | ".join(arms) + " |"
    yield "|---|" + "---|" * (len(arms) + 1)
    for batch in sizes.batches:
        low = floors.get(str(batch))
        cells = []
        for arm in arms:
            row = rows.get(f"decode/{arm}/{batch}", {})
            # Of a row whose time was disturbed, what its kernels take.
            known = f"kernels {row['device_us'] / 1e3:.2f}" if "device_us" in row else row.get("refused", "–")[:40]
            text = f"{row['ms']:.2f}" if "ms" in row else known
            cells.append(text + (f" ({row['ms'] / low:.1f} ×)" if low and "ms" in row else ""))
        yield f"| {batch} | {'–' if low is None else f'{low:.2f}'} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON, one a part")
    parser.add_argument("--part", help="one part, in this process")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of parts, in that order")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernel", default="auto", choices=("auto", "triton", "reference"), help="of the policy")
    parser.add_argument("--lower", nargs="+", default=[], help="take as proven: chunk, convolution, ...")
    parser.add_argument("--jobs", type=int, default=64, help="with --together: parts that compile at a time")
    parser.add_argument("--compiling", type=float, help="with --together: of its seconds, at most; half by default")
    parser.add_argument("--budget", type=float, help="seconds for all parts of this call")
    parser.add_argument("--together", type=float, metavar="SECONDS", help="all parts at once, in so many seconds")
    parser.add_argument("--lock", type=Path, help="with --together: measures while it holds this file's lock")
    parser.add_argument("--limit", type=float, default=90, help="seconds for a part")
    args = parser.parse_args()
    if args.table:
        print(table(read_rows(args.out), Sizes(args.tiny)))
    elif args.part:
        add_row(args.out, run_part(args.part, args))
    else:
        known = parts(Sizes(args.tiny))
        wanted = list(dict.fromkeys(p for x in args.only or [""] for p in known if p.startswith(x)))
        wanted = [p for p in wanted if p not in read_rows(args.out)]
        run_together(args, wanted) if args.together else run_all(args, wanted)


if __name__ == "__main__":
    main()
