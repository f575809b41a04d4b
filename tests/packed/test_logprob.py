"""The short form of `benchmarks/logprob.py`: what packed states change in log-probabilities;
tokens in calls of many are tokens one by one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from tests import tiny_models

pytest.importorskip("transformers")


@pytest.fixture
def logprob(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("logprob")


def test_each_policy_changes_what_it_may_and_the_control_arm_nothing(logprob: Any) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    ids = torch.randint(2, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    policies = {
        name: logprob.POLICIES[name]
        for name in (logprob.CONTROL, "int8 token", "int8 replay 8", "nvfp4 replay 16", "fp8 two-precision 16")
    }
    rows = logprob.measure(model, ids, policies, prefix=32, block=32)
    control, int8 = rows[logprob.CONTROL], rows["int8 token"]
    assert control["worst"] <= 1e-4 and control["argmax"] == 1
    assert all(10 * control["change"] < row["change"] < 0.05 for name, row in rows.items() if name != logprob.CONTROL)
    assert int8["of_fp32"] < 0.3 < control["of_fp32"]
    assert "| int8 token | 0.2" in logprob.table(rows)


def test_drafts_in_calls_of_many_are_tokens_one_by_one(logprob: Any) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    for policy in (lc.PRESETS["int8"], lc.Policy(lc.Int8(), write=lc.Replay(4, factors="int8"))):
        many, _ = logprob.log_probs(model, ids, policy, prefix=16, block=8)
        single, _ = logprob.log_probs(model, ids, policy, prefix=16, block=1)
        assert (many - single).abs().max() <= 1e-4
