"""One rank of a part of `distributed.py`: training steps and decode steps of one GPU and of two.

    python benchmarks/distributed_parts.py --part "[warm] train|decode POLICY" --folder FOLDER --rank 0|1

What the first rank found is in the folder's `found.json`, what a rank stopped at in `errorRANK.txt`. "warm" runs every
step once and times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

# transformers looks for a package named `kernels` and must not find the script beside this one.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    hidden: int
    layers: int
    mlp: int
    key_heads: int
    value_heads: int
    dim: int
    vocab: int
    batch: int
    tokens: int
    prefix: int
    calls: int


TRAIN = Sizes(1024, 12, 4096, 8, 16, 128, 32000, batch=8, tokens=2048, prefix=256, calls=3)
DECODE = Sizes(4096, 4, 8192, 16, 64, 128, 32, batch=256, tokens=2, prefix=0, calls=20)
WIDE = replace(DECODE, key_heads=32, value_heads=128)
TINY = Sizes(32, 4, 32, 2, 4, 8, 64, batch=2, tokens=12, prefix=4, calls=2)


class Rig:
    """One rank of a part: its device, what it found, and turns."""

    def __init__(self, folder: Path, rank: int, device: str, tiny: bool, warm: bool) -> None:
        import torch
        import torch.distributed as dist

        self.folder, self.rank, self.device, self.tiny, self.warm = folder, rank, device, tiny, warm
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        self.store = dist.distributed_c10d._get_default_store()
        self.found: dict[str, Any] = {}
        self.turns = 0

    def say(self, **found: Any) -> None:
        """Keeps it, and writes all that the first rank has."""
        self.found |= found
        if self.rank == 0:
            (self.folder / "found.json").write_text(json.dumps(self.found))

    def alone(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on the first rank, while the other one waits without its GPU."""
        self.turns += 1
        key, found = f"turn{self.turns}", None
        if self.rank == 0:
            found = act()
            self.store.set(key, "done")
        self.store.wait([key], timedelta(seconds=60))
        return found

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], calls: int, together: bool) -> dict[str, float]:
        """Of a call: the median of rounds of that many, and the fastest and slowest; of two ranks the slower one's."""
        import torch
        import torch.distributed as dist

        def timed(calls: int) -> float:
            if together:
                dist.barrier()
            self.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            self.synchronize()
            return 1e3 * (time.perf_counter() - began) / calls

        def slowest(times: list[float]) -> list[float]:
            row = torch.tensor(times, device=self.device)
            if together:
                dist.all_reduce(row, dist.ReduceOp.MAX)
            return row.tolist()

        timed(1)
        if self.warm:
            return {}
        (once,) = slowest([timed(1)])
        calls = max(1, min(calls, int(1500 / once)))  # no arm takes the time of another
        times = [timed(calls) for _ in range(ROUNDS if once * calls < 1500 else 2)]
        found = slowest([statistics.median(times), min(times), max(times)])
        return dict(zip(("ms", "fastest", "slowest"), (round(x, 3) for x in found), strict=True))


def config_of(sizes: Sizes, layer_types: list[str]) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(2, sizes.hidden // 128),
        num_key_value_heads=2,
        head_dim=min(128, sizes.hidden // 2),
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.dim,
        linear_value_head_dim=sizes.dim,
        layer_types=layer_types,
        num_experts=1,
        mlp_only_layers=list(range(sizes.layers)),
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=None,
    )


def written(policy: str, device: str) -> Any:
    """The policy by Triton's kernels, all of them, on a GPU: no arm may be timed on the reference."""
    import lattn_compile as lc

    return replace(lc.PRESETS[policy], kernel="triton") if device == "cuda" else policy


def compiled() -> list[str]:
    """How the sites were compiled: verdict, op and kernel."""
    import lattn_compile as lc

    sites = lc.Report.merge(lc.reports()).sites
    return sorted({f"{site.verdict}: {site.op} ({site.kernel})" for site in sites})


def train(rig: Rig, policy: str) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Qwen3NextForCausalLM

    import lattn_compile as lc

    sizes = TINY if rig.tiny else TRAIN
    types = (["linear_attention"] * 3 + ["full_attention"]) * (sizes.layers // 4)
    dtype = torch.float32 if rig.tiny else torch.bfloat16
    generator = torch.Generator().manual_seed(rig.rank)
    ids = torch.randint(sizes.vocab, (sizes.batch, sizes.tokens), generator=generator).to(rig.device)
    phase = contextlib.nullcontext if policy == "exact" else lambda: lc.training_phase(sizes.prefix)

    def built() -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device(rig.device):
            model = lc.attach(Qwen3NextForCausalLM(config_of(sizes, types)).to(dtype), written(policy, rig.device))
        for layer in model.model.layers:
            layer.compile(backend="lattn_compile", dynamic=False)
        return model

    def step_of(model: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> Any:
            with phase():
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def measure(name: str, step: Callable[[], Any], together: bool) -> None:
        if rig.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = float(step())  # compiles
        first = time.perf_counter() - began
        times = (
            rig.milliseconds(step, sizes.calls, together)
            if together
            else rig.alone(lambda: rig.milliseconds(step, sizes.calls, together))
        )
        memory = torch.cuda.max_memory_allocated() if rig.device == "cuda" else 0
        rig.say(**{name: {"first_s": round(first, 1), "first_loss": loss, "peak_GB": memory / 1e9, **(times or {})}})

    def one_and_ddp() -> None:
        model = built()
        rig.say(parameters=sum(p.numel() for p in model.parameters()), tokens=sizes.batch * sizes.tokens)
        measure("one", step_of(model), False)
        rig.say(compiled=compiled())
        if not rig.warm:  # its layers are those of one GPU
            measure("ddp", step_of(DistributedDataParallel(model, gradient_as_bucket_view=True)), True)

    def fsdp2() -> None:
        model = built()
        mesh = init_device_mesh(rig.device, (2,), mesh_dim_names=("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        measure("fsdp2", step_of(model), True)

    one_and_ddp()
    gc.collect()
    fsdp2()


def decode(rig: Rig, policy: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.tensor import init_device_mesh
    from transformers import StaticCache
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

    from lattn_compile.integrations.tensor_parallel import parallelize

    sizes = TINY if rig.tiny else WIDE if policy == "wide" else DECODE
    policy = "exact" if policy == "wide" else policy
    config = config_of(sizes, ["linear_attention"] * sizes.layers)
    dtype = torch.float32 if rig.tiny else torch.bfloat16
    plan = {
        f"layers.*.mlp.{name}_proj": how for name, how in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
    }

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Qwen3NextDecoderLayer(config, i) for i in range(sizes.layers))

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            for layer in self.layers:
                x = layer(x, position_embeddings=None, past_key_values=cache)
            return x

    def step_of(cut: bool) -> Callable[[], Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device(rig.device):
            stack = Stack().to(dtype).eval().requires_grad_(False)
            prompt = torch.randn(sizes.batch, sizes.tokens, sizes.hidden, dtype=dtype)
            token = torch.randn(sizes.batch, 1, sizes.hidden, dtype=dtype)
        for module in stack.modules():
            if hasattr(module, "A_log"):
                module.A_log.zero_()  # as models are trained: a decay that keeps most of the state
        if cut:
            parallelize(stack, init_device_mesh(rig.device, (2,), mesh_dim_names=("tp",)), plan)
        cache = StaticCache(config=config, max_cache_len=8)
        stack(prompt, cache)
        step = torch.compile(stack, backend="lattn_compile", fullgraph=True, dynamic=False, options={"policy": policy})
        return lambda: step(token, cache)

    def measure(name: str, call: Callable[[], Tensor], together: bool) -> Tensor:
        began = time.perf_counter()
        out = call().float().clone()  # compiles
        rig.synchronize()
        row = {"first_s": round(time.perf_counter() - began, 1)}
        act: Any = (lambda act: act()) if together else rig.alone
        row |= act(lambda: rig.milliseconds(call, sizes.calls, together)) or {}
        rig.say(**{name: row})
        if rig.device == "cuda" and not rig.warm:
            try:
                graph = captured(call)
                row["graph"] = act(lambda: rig.milliseconds(graph.replay, sizes.calls, together))
            except Exception as error:  # the time above stands
                row["graph"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            rig.say(**{name: row})
        if not rig.warm:
            row["kernels_us"] = kernels(call, rig.device)
            rig.say(**{name: row})
        return out

    with torch.no_grad():
        one = measure("one", step_of(False), False)
        rig.say(compiled=compiled(), batch=sizes.batch)
        two = measure("tp2", step_of(True), True)
        x = torch.zeros(sizes.batch, 1, sizes.hidden, dtype=dtype, device=rig.device)
        times = rig.milliseconds(lambda: [dist.all_reduce(x) for _ in range(2 * sizes.layers)], sizes.calls, True)
        rig.say(all_reduces=times, value_heads=sizes.value_heads)
    rig.say(difference=float((one - two).norm() / one.norm()))


def kernels(call: Callable[[], object], device: str) -> dict[str, float]:
    """Microseconds of a call by kernel, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    of = "device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = {e.key[:60]: round(getattr(e, of), 1) for e in trace.key_averages()}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:14])


def captured(call: Callable[[], Any]) -> Any:
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def rank_main(args: argparse.Namespace) -> None:
    """A part as one of its ranks; what it found is in its folder's `found.json`."""
    import torch
    import torch.distributed as dist

    if args.device == "cpu":
        torch.set_num_threads(1)
    *warm, what, policy = args.part.split()
    rig = Rig(args.folder, args.rank, args.device, args.tiny, bool(warm))
    try:
        {"train": train, "decode": decode}[what](rig, policy)
    except BaseException:
        (args.folder / f"error{args.rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # at once: the other rank is in a collective
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    rank_main(parser.parse_args())


if __name__ == "__main__":
    main()
