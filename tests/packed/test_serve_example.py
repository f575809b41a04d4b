"""`examples/serve.py` runs, and its table is what the policies promise."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")


def test_the_table_and_the_measured_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    serve = importlib.import_module("serve")
    serve.main(["--tokens", "4"])
    out = capsys.readouterr().out
    for name, policy in serve.POLICIES.items():
        row = re.search(rf"^{re.escape(name)} +([\d,]+) ", out, re.M)
        assert row is not None
        held = int(row[1].replace(",", ""))
        # The cursor, 4 bytes, is in what replay modes promise already.
        assert held - policy.nbytes(16, 32, 128, 128) in (0, 4)
    dense, packed = (int(x.replace(",", "")) for x in re.findall(r"recurrent states ([\d,]+) bytes", out))
    assert packed <= 0.26 * dense
