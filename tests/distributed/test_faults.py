"""A rank that fails: the other one says so within seconds, and the last whole checkpoint is still there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed import ranks
from tests.distributed.fault_program import HOW


def test_the_other_rank_says_so_within_seconds_and_the_checkpoint_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.fault_program", str(tmp_path)]
    subprocess.run(command, env=ranks.environment(), cwd=ranks.ROOT, stderr=subprocess.DEVNULL, timeout=240)
    for how, says in HOW.items():
        file = tmp_path / how / "heard.json"
        assert file.is_file(), f"{how}: the rank that was left did not raise a DistributedError"
        said = json.loads(file.read_text())
        assert says in said["error"], (how, said)
        assert said["seconds"] < 40, how  # of a machine with six such processes; what it waits for takes at most 20
        assert said["files"] == ["ckpt"], how
