"""Serving with the state really stored in few bits: how many sequences fit, and `generate()` on packed caches.

    python examples/serve.py

The table is of a model with the layers of Qwen3-Next-80B-A3B: bytes as they are allocated, with scales, rings and
cursors, and how many sequences' recurrent states fit in 80 GB. Weights and the attention layers' keys and values come
on top and are the same under every policy. Then a small random model generates with its cache dense and packed; the
cache is measured, storage by storage.
"""

from __future__ import annotations

import argparse

import torch
from _shared import generate

import lattn_compile as lc
from lattn_compile.demo import MODELS, build_model
from lattn_compile.integrations.transformers import quantize_cache

LAYERS = 36  # of 48; every fourth is full attention
HEADS = lc.Heads(H=16, HV=32, K=128, V=128, decay="head", has_beta=True)
BUDGET = 80e9

POLICIES: dict[str, lc.Policy] = {
    "exact fp32": lc.PRESETS["exact"],
    "bf16 token": lc.Policy(lc.Bf16()),
    "int8 token": lc.PRESETS["int8"],
    "fp8 token": lc.PRESETS["fp8"],
    "int8 replay 8": lc.PRESETS["int8-replay"],
    "int8 replay 8, fp8 factors": lc.Policy(lc.Int8(), write=lc.Replay(8, factors="fp8_e4m3")),
    "nvfp4 token": lc.Policy(lc.Nvfp4()),
    "nvfp4 replay 16, fp8 factors": lc.Policy(lc.Nvfp4(), write=lc.Replay(16, factors="fp8_e4m3")),
    "fp8 two-precision 16": lc.PRESETS["fp8-two-precision"],
}


def table() -> None:
    print(f"{'policy':30} {'bytes a layer':>14} {'of fp32':>8} {'MB a sequence':>14} {'sequences in 80 GB':>19}")
    fp32 = HEADS.HV * HEADS.K * HEADS.V * 4
    for name, policy in POLICIES.items():
        # Allocated, not computed: two slots of one layer.
        layer = lc.StatePool({"layer": (policy, HEADS)}, slots=2).nbytes // 2
        fit = int(BUDGET // (LAYERS * layer))
        print(f"{name:30} {layer:14,} {layer / fp32:8.3f} {LAYERS * layer / 1e6:14.1f} {fit:19,}")
    print("Two-precision reads fewer bytes a step and holds more: it saves bandwidth, not memory.\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3_next")
    parser.add_argument("--policy", default="int8", help="preset, or path of a recipe")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)

    table()
    model = build_model(args.model).eval()
    with torch.no_grad():
        dense, of_dense = generate(model, args.tokens)
        quantize_cache(model, args.policy)  # the only line that serving needs
        packed, of_packed = generate(model, args.tokens)
    for name, held in (("dense", of_dense), (args.policy, of_packed)):
        kinds = {"recurrent": "recurrent states", "conv": "convolutions", "attention": "keys and values"}
        print(f"{name:12} " + ", ".join(f"{text} {held[kind]:,} bytes" for kind, text in kinds.items()))
    same = (dense == packed).float().mean().item()
    print(f"{same:.0%} of the tokens are the same.")


if __name__ == "__main__":
    main()
