"""Decoding on several devices: each holds its heads' part of the weights and of the quantized states.

    torchrun --standalone --nproc-per-node 2 examples/serve_tp.py [--policy int8] [--model qwen3_next] [--tokens 32]

On GPUs with NCCL where there is one a process, else on the CPU with gloo. A small random model generates with a packed
cache, whole on every rank; then it is cut by heads and generates again: the same tokens, from a part of the bytes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from _shared import generate, start
from torch.distributed.device_mesh import init_device_mesh

from lattn_compile import distributed as lcd
from lattn_compile.demo import MODELS, build_model
from lattn_compile.integrations.tensor_parallel import parallelize
from lattn_compile.integrations.transformers import quantize_cache


def weights(model: Any) -> int:
    """Bytes that this rank holds."""
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(x.numel() * x.element_size() for x in local)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3_next")
    parser.add_argument("--policy", default="int8", help="preset, or path of a recipe")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    device = start()
    torch.set_num_threads(1)
    ranks = dist.get_world_size()

    with torch.no_grad(), lcd.together():
        model = build_model(args.model).to(device).eval()  # every rank has the same weights
        whole = weights(model)
        with quantize_cache(model, args.policy):
            want, held = generate(model, args.tokens)
        parallelize(model, init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",)))
        quantize_cache(model, args.policy)  # each rank packs the heads that it has
        found, part = generate(model, args.tokens)
    behind = (want == found)[:, -args.tokens :].float()
    same = min(lcd.meet(float(behind.mean())))
    print(f"{'a rank holds':14} {'weights':>12} {'states':>12} {'convolutions':>13} {'keys, values':>13}")
    for name, size, of in (("all of 1", whole, held), (f"1 of {ranks}", weights(model), part)):
        print(f"{name:14} {size:12,} {of['recurrent']:12,} {of['conv']:13,} {of['attention']:13,}")
    print(f"{same:.0%} of the tokens are the same on every rank.", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
