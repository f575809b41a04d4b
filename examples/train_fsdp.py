"""Quantization-aware training on several devices: FSDP2, compiled layers, activation checkpoints, resumed where it was.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --save DIR [--steps 40] [--policy int8]

On GPUs with NCCL where there is one a process, else on the CPU with gloo. Each rank trains on batches and prefix
lengths of its own. Started again with the same DIR, on any number of processes, it goes on behind the last checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _shared import arguments, nats, parser, schedule, start
from torch.distributed.fsdp import fully_shard

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile import distributed as lcd


def spread(model: Any, policy: Any) -> Any:
    """Layers compiled, checkpointed and cut over all ranks. The order matters: a recipe is found by paths, so it comes
    first, and what is compiled is what FSDP gathers."""
    lc.attach(model, policy)
    newer = getattr(model, "activation_checkpointing_enable", None)  # of transformers, under its present name
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(backend="lattn_compile", dynamic=False)
        fully_shard(layer)
    return fully_shard(model)


def latest(folder: Path) -> tuple[int, Path | None]:
    """How many steps were trained, and where they are. `lcd.save` leaves whole checkpoints or none."""
    found = sorted(folder.glob("step-[0-9]*[0-9]"))
    return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else (0, None)


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__ or "", steps=40, lr=3e-3)
    made.set_defaults(policy="int8")
    made.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    options = arguments(made, argv)
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options.save = lcd.meet(options.save)[0]  # where none is given each rank made up its own
    text = demo.load_text()
    model = spread(demo.build_model(options.model, options.seed).to(device), options.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    lcd.check_same_recipe(model)  # ranks with unlike recipes would train nobody's model

    done, folder = latest(Path(options.save))
    if folder is not None:
        lcd.load(model, folder, optimizer=optimizer)
        print(f"goes on from {folder.name}", flush=True)
    with lcd.together():  # a rank that fails is an error on the others, within seconds
        for step in range(done, options.steps):
            generator = torch.Generator().manual_seed(options.seed + ranks * step + rank)
            windows = text.batch(generator).to(device)
            # How long prompts are is each rank's own affair: a length is data, and no other one recompiles.
            prefix = int(torch.randint(demo.PREFIX // 2, demo.PREFIX + 1, (), generator=generator))
            schedule(optimizer, step, options.steps, options.lr)
            with lc.training_phase(prefix):
                loss = nats(model, windows).mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                mean = sum(lcd.meet(float(loss.detach()))) / ranks
                print(f"  step {step}: {mean / math.log(2):.4f} bits/byte on {ranks} ranks", flush=True)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                lcd.save(model, Path(options.save) / f"step-{step + 1:06}", optimizer=optimizer)
                print(f"saved step-{step + 1:06}", flush=True)
    print(lc.Report.merge(lc.reports()), flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
