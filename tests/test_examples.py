"""The examples, small and run eagerly: they are what a newcomer copies, so every line of them has to run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile import demo, phase
from lattn_compile.testing.backend import Record, recorded

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps", "2", "--pretrain", "2", "--lr", "0.01"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Two short sequences and two layers, as in the demo's own tests, and no Inductor."""
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}
    monkeypatch.setattr(demo, "SIZES", demo.SIZES | sizes | {"intermediate_size": 32})
    for name, value in {"BATCH": 2, "LENGTH": 24, "PREFIX": 8}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "load_text", lambda load=demo.load_text: load(batches=1))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    torch._dynamo.reset()
    with recorded() as record:
        yield record
    assert phase.current() == (None, None)
    for name in ("_shared", "qat", "qad", "trainer"):
        sys.modules.pop(name, None)


def _run(name: str, *arguments: str) -> None:
    importlib.import_module(name).main([*TINY, *arguments])


def _table(out: str) -> list[tuple[float, float]]:
    """(quantized, exact) of the rows that follow the table's head."""
    rows = out[out.index("quantized") :].splitlines()[1:]
    found = (re.search(r"(\d+\.\d{4}) +(\d+\.\d{4}) +[+-]\d+\.\d{4} ± ", row) for row in rows)
    return [(float(m[1]), float(m[2])) for m in found if m]


@pytest.mark.parametrize(("name", "rows"), [("qat", 3), ("qad", 2), ("qad --teacher self", 2)])
def test_an_example_trains_saves_and_restores_the_same_bits(
    small: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, rows: int
) -> None:
    name, *options = name.split()
    _run(name, *options, "--save", str(tmp_path))
    out = capsys.readouterr().out
    table = _table(out)
    assert len(table) == rows and all(2 < bits < 9 for row in table for bits in row)
    assert len(set(table)) == rows, "training changed the model"
    assert "1 of 1 site rewritten" in out
    assert "lattn_recipe.json" in out and "same bits: True" in out
    # Coarse enough, by default, that there is something to win back.
    assert json.loads((tmp_path / "lattn_recipe.json").read_text())["rules"][0]["policy"]["state"]["format"] == "nvfp4"
    assert {c.arguments["state_format"] for c in small.calls} == {"nvfp4"}
    assert len(small.graphs) == 2, "one graph for all of the training, and one for the restored model"


def test_a_policy_is_a_preset_a_path_or_json(small: Record) -> None:
    shared = importlib.import_module("_shared")
    for text in ("int8", "some/recipe.json", '{"state": "fp8", "write": "token"}'):
        policy = shared.arguments(shared.parser("", steps=1, lr=1.0), ["--policy", text]).policy
        assert policy == (json.loads(text) if text.startswith("{") else text)
    lc.Recipe(rules=[("*", lc.Policy.from_dict(policy))])


def test_a_restored_model_with_other_numbers_fails_the_example(small: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("qad")
    shared = sys.modules["_shared"]
    measure = shared.measure
    monkeypatch.setattr(shared, "measure", lambda *args: measure(*args) + 1e-3)  # only the restored one's
    with pytest.raises(SystemExit, match="not the saved one"):
        _run("qad", "--policy", "int8")


def test_the_trainers_example_trains_logs_and_restores(
    small: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    _run("trainer", "--save", str(tmp_path), "--policy", "int8", "--qad", "0.5")
    out = capsys.readouterr().out
    assert "same numbers: True" in out and "state_error/model.layers.0.linear_attn/gdn#0" in out
    assert "2 steps of QAD" in out
    assert lc.Recipe.from_pretrained(tmp_path) == lc.Recipe(rules=[("*", "int8")])


def test_every_example_has_a_help_text_that_names_what_it_does(capsys: Any, small: Record) -> None:
    for name in ("qat", "qad"):
        with pytest.raises(SystemExit):
            importlib.import_module(name).main(["--help"])
        text = capsys.readouterr().out
        assert "uantization-aware" in text and "--steps" in text and "--save" in text
