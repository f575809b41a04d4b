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
from _shared import start
from torch.distributed.device_mesh import init_device_mesh

from lattn_compile import distributed as lcd
from lattn_compile.demo import MODELS, build_model
from lattn_compile.integrations.tensor_parallel import parallelize
from lattn_compile.integrations.transformers import cache_bytes, quantize_cache


def generate(model: Any, tokens: int) -> tuple[torch.Tensor, dict[str, int]]:
    """Tokens behind the prompts, and the bytes of the cache in which they were decoded."""
    prompt = torch.randint(2, 200, (4, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    out = model.generate(
        prompt,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
    )
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    return out.sequences[:, prompt.shape[1] :], cache_bytes(cache)


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
    same = min(lcd.meet(float((want == found).float().mean())))
    print(f"{'a rank holds':14} {'weights':>12} {'states':>12} {'convolutions':>13} {'keys, values':>13}")
    for name, size, of in (("all of 1", whole, held), (f"1 of {ranks}", weights(model), part)):
        print(f"{name:14} {size:12,} {of['recurrent']:12,} {of['conv']:13,} {of['attention']:13,}")
    print(f"{same:.0%} of the tokens are the same on every rank.", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
