"""A training program on two ranks, the second of which fails: `python -m tests.distributed.fault_program HOW FOLDER`.

HOW is "raises" (in a step), "dies" (in a step, without a word) or "dies saving". The first rank writes what it heard,
and after how many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lattn_compile import distributed as lcd
from lattn_compile.errors import DistributedError
from tests.distributed.nets import loss_of, net


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = torch.nn.parallel.DistributedDataParallel(net(None))
    lcd.check_same_recipe(model)
    lcd.save(model, folder / "ckpt")
    began = time.monotonic()
    try:
        with lcd.together():
            for step in range(3):
                if rank == 1 and step == 2 and how != "dies saving":
                    if how == "raises":
                        raise ValueError("no such batch")
                    die()
                loss_of(model, step)
            if rank == 1:
                dcp.FileSystemWriter.write_data = die
            lcd.save(model, folder / "ckpt", seconds=20)
    except DistributedError as error:
        files = sorted(path.name for path in folder.glob("ckpt*"))
        said = {"error": str(error), "seconds": time.monotonic() - began, "files": files}
        (folder / "heard.json").write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
