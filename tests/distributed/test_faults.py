"""A rank that fails: the other one says so within seconds, and the last whole checkpoint is still there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import ranks

HOW = {
    "raises": "rank 1: ValueError: no such batch",
    "dies": "a rank that is gone",
    "dies saving": "a rank that is gone",
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folders = {how: tmp_path_factory.mktemp("fault") for how in HOW}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.distributed.fault_program", how, str(folder)],
            env=ranks.environment(rank, 2),
            cwd=ranks.ROOT,
            stderr=subprocess.DEVNULL,
        )
        for how, folder in folders.items()
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.wait(timeout=120)
        yield {how: _read(folder) for how, folder in folders.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read(folder: Path) -> dict[str, Any] | None:
    file = folder / "heard.json"
    return json.loads(file.read_text()) if file.is_file() else None


@pytest.mark.parametrize("how", HOW)
def test_the_other_rank_says_so_within_seconds_and_the_checkpoint_is_whole(how: str, heard: dict[str, Any]) -> None:
    said = heard[how]
    assert said is not None, "the rank that was left did not raise a DistributedError"
    assert HOW[how] in said["error"]
    assert said["seconds"] < 40  # of a machine with six such processes; what it waits for takes at most 20
    assert said["files"] == ["ckpt"]
