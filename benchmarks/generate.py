"""What `model.generate()` takes: tokens a second and peak memory, a state policy beside transformers as it is.

    python -m benchmarks.generate --out rows.jsonl --checkpoint base_gdn_0.safetensors [--seconds 110] [--only trained]
    python -m benchmarks.generate --out rows.jsonl --tiny --device cpu      the script itself

Two models in bf16: `shaped`, Qwen3-Next's shape with random weights (894 M parameters,
`benchmarks/model_decode.py`), and `trained`, a base of `benchmarks/quality`. Arms: `eager`, transformers as it is,
with flash-linear-attention's kernels where it is installed; `compile`, its static cache and its own
`torch.compile(mode="reduce-overhead")` of decode steps; and this backend in the same place
(`CompileConfig(backend="lattn_compile")`), with `quantize_cache` storing packed states for every policy but exact.
Prefill is transformers' own in every arm.

Every part is a process: they compile side by side, `--jobs` at a time, then measure one after another. Decoding is
what the tokens from the 16th to the 80th of one call take, by the clock when the device is done with each of the two,
so that prefill, set-up and the recording of CUDA graphs are not in it; the median of up to five calls. Peak memory is
what torch has allocated at most while decoding, weights included. Prefill is not measured: kernels of
flash-linear-attention that would be tuned for minutes take their first configuration (none of a decode step is tuned),
and this backend's arms leave the prefill to transformers' torch code.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.model_decode import TURNS, Sizes, add_row, build, read_rows, synchronize, turn, version

PROMPT = 64
SHORT, LONG = 16, 80
"""Generated tokens at which the clock is read."""
SLOW = 8, 24
"""Of eager code, a token of which takes 70 to 160 ms."""
SECONDS = 4.0
"""For the calls of a part: five at most, three at least."""


def policies() -> dict[str, Any]:
    """Arms of this backend."""
    import lattn_compile as lc

    return {
        "exact": lc.Policy(write=lc.Exact()),
        "int8 token": lc.Policy(lc.Int8()),
        "fp8 token": lc.Policy(lc.Fp8()),
        "nvfp4 token": lc.Policy(lc.Nvfp4()),
        "int8 replay 8": lc.Policy(lc.Int8(), write=lc.Replay(8)),
        "fp8 two-precision 16": lc.Policy(write=lc.TwoPrecision(16)),
    }


def parts(tiny: bool) -> list[str]:
    batches = {"shaped": (1, 2), "trained": (1, 2)} if tiny else {"shaped": (1, 64, 256), "trained": (1, 64, 256)}
    arms = ("eager", "compile", *policies())
    return [f"{model}/{arm}/{batch}" for model in batches for arm in arms for batch in batches[model]]


def load(model: str, args: argparse.Namespace) -> Any:
    """In bf16 on the device, without gradients."""
    import torch

    if model == "shaped":
        return build(Sizes(args.tiny), args.device)
    from benchmarks.quality.config import FULL, TINY
    from benchmarks.quality.models import build as small

    made = small("gdn", (TINY if args.tiny else FULL).size, 0)
    if args.checkpoint is not None:
        from safetensors.torch import load_file

        made.load_state_dict({name: x.float() for name, x in load_file(args.checkpoint).items()}, strict=False)
    elif not args.tiny:
        raise SystemExit("--checkpoint: the trained model's file, base_gdn_0.safetensors of benchmarks.quality")
    made = made if args.tiny else made.to(torch.bfloat16)
    return made.to(args.device).eval().requires_grad_(False)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part, in this process."""
    import torch

    torch.set_num_threads(1)
    which, arm, count = name.split("/")
    batch, device = int(count), args.device
    if arm in ("eager", "compile") and device == "cuda":
        _tune_nothing()
    else:
        sys.modules["fla"] = None  # type: ignore[assignment]
    import transformers

    class Stop(transformers.StoppingCriteria):  # type: ignore[misc]
        """Not another limit: the static cache is as long as the limit, and another length would be another graph."""

        def __init__(self, tokens: int, begin: int = 0) -> None:
            self.tokens, self.begin, self.made, self.clock = tokens, begin, 0, list[float]()

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.made += 1
            if self.made == 2 and device == "cuda":  # behind the prefill, and what it left in fp32 is packed
                torch.cuda.reset_peak_memory_stats()
            if self.made in (self.begin, self.tokens):
                synchronize(device)
                self.clock.append(time.perf_counter())
            return torch.full((batch,), self.made >= self.tokens, device=device)

    model = load(which, args)
    ids = torch.arange(batch * PROMPT, device=device).view(batch, PROMPT) % (model.config.vocab_size - 1) + 1
    options: dict[str, Any] = {"use_cache": True, "do_sample": False, "pad_token_id": 0, "max_new_tokens": LONG}
    if arm != "eager":
        compile_: dict[str, Any] = {"mode": "reduce-overhead"}
        if arm != "compile":
            compile_ = {"backend": "lattn_compile", "mode": None, "fullgraph": True}
            compile_["options"] = {"policy": policies()[arm], "mode": "reduce-overhead"}
        config = transformers.CompileConfig(**compile_)
        config._compile_all_devices = True
        options |= {"cache_implementation": "static", "compile_config": config}
    if arm not in ("eager", "compile", "exact"):
        from lattn_compile.integrations.transformers import quantize_cache

        quantize_cache(model, policies()[arm])

    def generate(tokens: int, begin: int = 0) -> float:
        """Seconds of a token from the `begin`-th on."""
        stop = Stop(tokens, begin)
        out = model.generate(ids, stopping_criteria=[stop], **options)
        assert out.shape == (batch, PROMPT + tokens)
        return (stop.clock[-1] - stop.clock[0]) / (tokens - begin)

    cuda = device == "cuda"
    began = time.perf_counter()
    generate(4)
    first = time.perf_counter() - began
    generate(4)
    if cuda:
        torch.cuda.empty_cache()  # others wait with what they hold
    row: dict[str, Any] = {"first_s": round(first, 1)}
    few, many = SLOW if arm == "eager" else (SHORT, LONG)
    with turn():
        took: list[float] = []
        began = time.perf_counter()
        while len(took) < 3 or (len(took) < 5 and time.perf_counter() - began < SECONDS):
            took.append(generate(many, few))
        if cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    step = statistics.median(took)
    row |= {"ms": 1e3 * step, "tokens_per_s": batch / step, "rounds": len(took)}
    row["weights_gb"] = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    row["states_gb_fp32"] = 4e-9 * batch * _values(model)
    out = model.generate(ids, stopping_criteria=[Stop(4)], return_dict_in_generate=True, **options)
    row["states_gb"] = 1e-9 * _state_bytes(out)
    if arm not in ("eager", "compile"):
        import lattn_compile as lc

        report = lc.last_report()
        row["sites"] = [] if report is None else sorted({f"{x.op}, {x.kernel}" for x in report.sites})
    machine = torch.cuda.get_device_name() if cuda else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "fla": version("fla")}
    return {"part": name, "machine": machine, "tiny": args.tiny, "commit": args.commit, **row, **versions}


def _tune_nothing() -> None:
    """Triton's autotuner takes a kernel's first configuration from now on."""
    import importlib.util

    if importlib.util.find_spec("fla") is None:
        return
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **options: Any) -> None:
        begin(self, fn, arg_names, configs[:1], *args, **options)

    Autotuner.__init__ = first


def _state_bytes(out: Any) -> int:
    """What the recurrent states of the cache behind `out` really take."""
    from lattn_compile.integrations.transformers import cache_bytes

    return cache_bytes(out["cache"] if out.get("cache") is not None else out["past_key_values"])["recurrent"]


def _values(model: Any) -> int:
    """Of the recurrent states of a sequence."""
    c = model.config
    layers = c.layer_types.count("linear_attention")
    return int(layers * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim)


def run_together(args: argparse.Namespace, wanted: list[str], begin: Callable[..., Any] = subprocess.Popen) -> None:
    """Compiles all parts, some at a time, then lets them measure one after another.

    Those that are not ready when the seconds for compiling are over are cut.
    """
    started = time.monotonic()
    end, late = started + args.seconds, started + min(args.compiling or 0.55 * args.seconds, args.seconds)
    waiting = list(wanted)
    with tempfile.TemporaryDirectory() as folder:
        if args.lock is not None:
            args.lock.touch()
            (Path(folder) / "lock").symlink_to(args.lock.resolve())
        environment = {**os.environ, TURNS: folder, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        running: dict[str, Any] = {}

        def start(name: str) -> None:
            log = (Path(folder) / f"{name.replace('/', '-')}.log").open("w+")
            command = [sys.executable, "-m", "benchmarks.generate", "--part", name, "--out", str(args.out)]
            command += ["--device", args.device, "--commit", args.commit, *(["--tiny"] if args.tiny else [])]
            command += ["--checkpoint", str(args.checkpoint)] if args.checkpoint is not None else []
            running[name] = begin(command, env=environment, stdout=log, stderr=log), log

        def is_ready(process: Any) -> bool:
            return (Path(folder) / f"{process.pid}.ready").exists()

        go = Path(folder) / "go"
        while (running or waiting) and time.monotonic() < end:
            compiling = [name for name, (process, _) in running.items() if not is_ready(process)]
            while waiting and len(compiling) < args.jobs:
                compiling.append(waiting.pop(0))
                start(compiling[-1])
            if not go.exists() and (not compiling or time.monotonic() > late):
                for name in compiling:
                    process, _ = running.pop(name)
                    process.kill()
                    process.wait()
                if compiling or waiting:
                    print(f"not ready: {', '.join(compiling + waiting)}", flush=True)
                waiting.clear()
                go.touch()
            for name, (process, log) in list(running.items()):
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().strip().splitlines()
                    if (row := read_rows(args.out).get(name)) is None:
                        add_row(args.out, row := {"part": name, "refused": "\n".join(said[-3:])[-600:]})
                    shown = {k: row[k] for k in ("ms", "tokens_per_s", "peak_gb", "first_s", "refused") if k in row}
                    print(name, json.dumps(shown), flush=True)
                    del running[name]
            time.sleep(0.1)
        for name, (process, log) in running.items():
            process.kill()
            process.wait()
            log.seek(0)
            print(f"{name}: cut after {args.seconds:.0f} s; {log.read()[-300:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON, one a part")
    parser.add_argument("--part", help="one part, in this process")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of parts, in that order")
    parser.add_argument("--checkpoint", type=Path, help="of the trained model")
    parser.add_argument("--commit", default="", help="of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lock", type=Path, help="a file that is locked while something is timed, also by others")
    parser.add_argument("--seconds", type=float, default=110.0, help="for all parts")
    parser.add_argument("--compiling", type=float, help="of them for compiling, at most; 0.55 by default")
    parser.add_argument("--jobs", type=int, default=64, help="parts that compile at a time")
    args = parser.parse_args()
    if args.part:
        add_row(args.out, measure(args.part, args))
        return
    there = {name for name, row in read_rows(args.out).items() if "refused" not in row}
    wanted = [p for beginning in args.only or [""] for p in parts(args.tiny) if p.startswith(beginning)]
    run_together(args, [p for p in dict.fromkeys(wanted) if p not in there])


if __name__ == "__main__":
    main()
