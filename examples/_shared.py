"""What the examples have in common and is not what they are about: options, text, pretraining, measuring, a table."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lattn_compile as lc
from lattn_compile import demo


def parser(doc: str, *, steps: int, lr: float) -> argparse.ArgumentParser:
    """What every example can be told; `doc` is its docstring."""
    made = argparse.ArgumentParser(
        description=doc.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--steps", type=int, default=steps, help="training steps with the quantized state")
    made.add_argument("--pretrain", type=int, default=120, help="training steps before that, with an exact state")
    made.add_argument("--lr", type=float, default=lr, help="peak learning rate of --steps")
    made.add_argument("--model", choices=sorted(demo.MODELS), default="qwen3_next")
    made.add_argument(
        "--policy",
        default='{"state": "nvfp4", "write": "token"}',
        help="preset, JSON of a policy or recipe, or path of a recipe",
    )
    made.add_argument("--save", metavar="DIR", help="where the trained model goes (default: a temporary folder)")
    made.add_argument("--seed", type=int, default=0)
    return made


def arguments(made: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    from transformers.utils import logging

    options = made.parse_args(argv)
    if options.policy.lstrip().startswith("{"):
        options.policy = json.loads(options.policy)
    if options.save is None:
        options.folder = tempfile.TemporaryDirectory()  # goes when the program does
        options.save = options.folder.name
    torch.set_num_threads(1)  # matrices this small gain nothing from a second core
    logging.disable_progress_bar()
    return options


def start() -> torch.device:
    """This process's device, of those that torchrun started: a GPU each with NCCL where there are enough, else the CPU
    with gloo. Only the first of them goes on printing."""
    import torch.distributed as dist

    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.device_count() >= here else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    return device


def generate(model: Any, tokens: int) -> tuple[torch.Tensor, dict[str, int]]:
    """Four random prompts with `tokens` more behind each, and the bytes of the cache in which these were decoded."""
    from lattn_compile.integrations.transformers import cache_bytes

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
    return out.sequences, cache_bytes(cache)


def nats(model: Callable[..., Any], windows: torch.Tensor) -> torch.Tensor:
    """Cross entropy `[batch, LENGTH - PREFIX]` of the bytes behind the prefix of `windows` `[batch, LENGTH + 1]`."""
    return cross_entropy(model(input_ids=windows[:, :-1]).logits, windows)


def cross_entropy(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """The same, of the logits of all but the last byte."""
    target = windows[:, 1 + demo.PREFIX :]
    suffix = logits[:, demo.PREFIX :].flatten(0, 1).float()
    return F.cross_entropy(suffix, target.flatten(), reduction="none").view_as(target)


def measure(model: Callable[..., Any], text: demo.Text, prefix: int) -> torch.Tensor:
    """Bits of every held-out byte behind PREFIX: exact with prefix = LENGTH, as decoding does it with PREFIX."""
    # With autograd on, the graph compiled for training serves here too; without it, a second one would be compiled.
    with lc.training_phase(prefix):
        return torch.cat([nats(model, windows).detach() / math.log(2) for windows in text.heldout])


def schedule(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """A short warm-up, then a cosine down to a tenth."""
    warmup, cosine = min(1.0, (step + 1) / max(1, min(20, steps // 6))), 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = peak * warmup * (0.1 + 0.9 * cosine)


def train(
    model: torch.nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    text: demo.Text,
    *,
    steps: int,
    lr: float,
    seed: int,
    decay: float = 0.1,
) -> None:
    """AdamW on `steps` random batches; `loss` gets windows and returns a scalar in nats. Backward stands in `loss`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        schedule(optimizer, step, steps, lr)
        nats_per_byte = loss(text.batch(generator)).item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"  step {step}: {nats_per_byte / math.log(2):.4f} bits/byte", flush=True)


def table(rows: list[tuple[str, torch.Tensor, torch.Tensor | None]]) -> None:
    """`(name, quantized bits, exact bits or None)`: the gap is over the same windows, so its error is a small one."""
    print(f"\n{'':44}{'quantized':>10}{'exact':>10}{'gap':>20}")
    for name, quantized, exact in rows:
        line = f"{name:44}{quantized.mean():10.4f}"
        if exact is not None:
            gap = (quantized - exact).mean(dim=1)
            error = gap.std() / math.sqrt(len(gap)) if len(gap) > 1 else 0.0
            line += f"{exact.mean():10.4f}{f'{gap.mean():+.4f} ± {error:.4f}':>20}"
        print(line)
    print("bits per byte of held-out text, behind the prefix", flush=True)


def check_restored(
    folder: str, compile: Callable[[Any], Callable[..., Any]], text: demo.Text, bits: torch.Tensor
) -> None:
    """Load what `save_pretrained` wrote, as another process would, and measure it: the same numbers, bit for bit."""
    from transformers import AutoModelForCausalLM

    restored = lc.attach(AutoModelForCausalLM.from_pretrained(folder), folder)
    again = measure(compile(restored), text, demo.PREFIX)
    files = ", ".join(sorted(p.name for p in Path(folder).iterdir()))
    print(f"\nsaved {files}\nrestored: {again.mean():.4f} bits/byte, same bits: {torch.equal(again, bits)}", flush=True)
    if not torch.equal(again, bits):
        raise SystemExit("the restored model is not the saved one")
