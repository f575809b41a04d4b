"""The checks of `*_checks.py` on gloo processes: DTensors, tensor parallelism, training, context parallelism, two
dimensions at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.distributed import ranks

RANKS = {"sharding": 2, "training": 2, "context": 3, "tensor_parallel": 2, "mesh": 4}


def test_every_check_passes_on_every_rank(tmp_path: Path) -> None:
    areas = dict(RANKS)
    if importlib.util.find_spec("transformers") is None:
        del areas["tensor_parallel"], areas["mesh"]
    failed = [
        f"{area}, rank {rank}, {name}: {said}"
        for area, found in ranks.run(areas, tmp_path).items()
        for rank, checks in enumerate(found)
        for name, said in checks.items()
        if said
    ]
    assert not failed, "\n".join(failed)
