"""The examples that torchrun starts, in one launch of two gloo processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ranks

pytest.importorskip("transformers")


def test_torchrun_trains_resumes_and_serves(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, "-m", "tests.distributed.example_program", str(tmp_path)],
        env=ranks.environment(),
        cwd=ranks.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    assert process.returncode == 0, out
    assert out.count("bits/byte on 2 ranks") == 1, out  # the first rank alone prints
    assert [out.count(text) for text in ("saved step-000002", "goes on from step-000002", "saved step-000003")] == [
        1
    ] * 3
    assert "int8" in out and "rewritten" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    assert "100% of the tokens are the same on every rank" in out, out
    rows = re.findall(r"^(?:all|1) of \d +(.*)$", out, re.MULTILINE)
    whole, part = ([int(n.replace(",", "")) for n in row.split()] for row in rows)
    assert part[0] < whole[0] and part[2] * 2 == whole[2], out
    assert part[1] * 2 == whole[1] + 4 * 4, out  # of four sequences every rank has all cursors
