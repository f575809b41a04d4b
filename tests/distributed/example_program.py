"""The examples for torchrun, small and without Inductor, one after another in one launch:

torchrun --standalone --nproc-per-node 2 -m tests.distributed.example_program FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from lattn_compile import demo
from lattn_compile.testing.backend import recorded

SIZES = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}


def main(folder: Path) -> None:
    demo.SIZES |= SIZES | {"intermediate_size": 32}
    demo.BATCH, demo.LENGTH, demo.PREFIX = 2, 24, 8
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import serve_tp
    import train_fsdp

    with recorded():
        for steps in ("2", "3"):  # the second one goes on from the first
            train_fsdp.main(["--save", str(folder), "--every", "2", "--steps", steps])
    serve_tp.main(["--tokens", "6"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
