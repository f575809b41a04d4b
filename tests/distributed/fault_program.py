"""A training program on two ranks, the second of which fails: `python -m tests.distributed.fault_program FOLDER`.

Several of them run beside one another: the second rank raises in a step, dies in a step without a word, dies while it
writes a checkpoint, or dies while the first one is in no collective of gloo. The first rank writes what it heard, and
after how many seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.distributed.ranks import DEVICE, IMPORTED, join, started

HOW = {
    "raises": "rank 1: ValueError: no such batch",
    "dies": "a rank that is gone",
    "dies saving": "a rank that is gone",
    "dies unheard": "rank 1 is gone",
}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever() -> None:
    """As a rank waits for NCCL, on a GPU; on a CPU nothing else does, and a nap is what the watch is seen to end."""
    import torch

    if DEVICE == "cuda":
        x = torch.ones(4, device=DEVICE)
        torch.distributed.all_reduce(x)
        torch.cuda.synchronize()
    else:
        time.sleep(3)


def train(how: str, folder: Path, rank: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from lattn_compile import distributed as lcd
    from lattn_compile.errors import DistributedError
    from tests.distributed.nets import loss_of, net

    join(folder, rank, 2)
    model = torch.nn.parallel.DistributedDataParallel(net(None))
    lcd.check_same_recipe(model)
    lcd.save(model, folder / "ckpt")
    began = time.monotonic()
    try:
        with lcd.together(watch=True if how == "dies unheard" else None):
            for step in range(3):
                if rank == 1 and step == 2 and how != "dies saving":
                    if how == "raises":
                        raise ValueError("no such batch")
                    die()
                if step == 2 and how == "dies unheard":
                    wait_for_ever()
                loss_of(model, step)
            if rank == 1:
                dcp.FileSystemWriter.write_data = die
            lcd.save(model, folder / "ckpt", seconds=20)
    except DistributedError as error:
        files = sorted(path.name for path in folder.glob("ckpt*"))
        said = {"error": str(error), "seconds": time.monotonic() - began, "files": files}
        (folder / "heard.json").write_text(json.dumps(said))
    os._exit(0)


def main(folder: Path) -> None:
    for module in (name for name in IMPORTED if DEVICE == "cpu" and "transformers" not in name):
        importlib.import_module(module)
    processes: list[Any] = []
    for how in HOW:
        (folder / how).mkdir()
        processes += started(train, how, folder / how, ranks=2)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
