"""The checks of `*_checks.py` on gloo processes: DTensors, tensor parallelism, training, context parallelism.

A test is an area, not a check: its processes take longer to start than most checks take.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import ranks

RANKS = {"sharding": 2, "tensor_parallel": 2, "training": 2, "context": 3}


@pytest.mark.parametrize("area", RANKS)
def test_every_check_passes_on_every_rank(area: str, tmp_path: Path) -> None:
    if area == "tensor_parallel":
        pytest.importorskip("transformers")
    module = f"tests.distributed.{area}_checks"
    results = ranks.run(module, tmp_path, world=RANKS[area])
    assert ranks.names(module)
    for name in ranks.names(module):
        ranks.require(results, name)
