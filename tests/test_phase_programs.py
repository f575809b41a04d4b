"""Compiled code, whole models and other processes: spelled-out recurrences in a phase, all the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.testing.backend import recorded
from tests import tiny_models
from tests.passes.spelled import models
from tests.passes.spelled.harness import worst_error
from tests.test_phase_spelled import B, T, compile_, in_a_checkpoint, in_a_shared_region, inputs, op, step

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def test_a_region_with_several_outputs_trains_through_inductor() -> None:
    """Its body says which outputs need a gradient, also where a stack of tokens was put together anew."""

    def want(q: Tensor, *x: Tensor) -> list[Tensor]:
        return [*op(q, *x), *op(q + 1, *x)]

    compiled = compile_(in_a_shared_region)
    before = backend.compile_count()
    for given in (([3, 1],), ([0, T],)):
        with lc.training_phase(*given):
            assert worst_error(step(compiled, inputs()), step(want, inputs())) < 1e-5
    assert backend.compile_count() == before + 1


def test_inductor_trains_a_spelled_out_layer_in_a_phase_without_recompiling() -> None:
    compiled = compile_(in_a_checkpoint(False))
    before = backend.compile_count()
    for given in ([3, 5], [0, T], [T, 1]):
        with lc.training_phase(given):
            assert worst_error(step(compiled, inputs()), step(op, inputs())) < 1e-5, given
    assert backend.compile_count() == before + 1


def test_a_model_with_its_own_copy_of_a_librarys_function_trains_as_with_the_librarys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    model, _ = tiny_models.build("qwen3_next", layers=3)
    model.train()
    ids = models.ids(B, 9)

    def train() -> list[Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        compiled = compile_(model)
        for given in (([2, 7],), ([5, 0],)):
            with lc.training_phase(*given):
                compiled(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with recorded() as record:
        want = train()
        layer = type(model.get_submodule("model.layers.0.linear_attn"))
        monkeypatch.setattr(layer, "forward", models.with_own_functions(layer.forward))
        record.graphs.clear()
        got = train()
        assert [(s.form, s.op) for s in record.report.sites] == [("chunk", "lattn::decode")] * 2
        assert len(record.graphs) == 1
    assert worst_error(got, want) < 1e-5


_CHILD = """
import json, sys, torch
import lattn_compile as lc
from torch._dynamo.utils import counters
from tests.test_phase_spelled import compile_, inputs, loop, op

x = inputs(grad=False)
errors = []
with torch.no_grad():
    compiled = compile_(loop)
    for given in json.loads(sys.argv[1]):
        with lc.training_phase(*given):
            errors.append(float((compiled(*x)[0] - op(*x)[0]).abs().max()))
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps({"errors": errors, "hits": hits, "misses": counters["inductor"]["fxgraph_cache_miss"]}))
"""


def test_other_lengths_hit_the_cache_of_another_process_and_other_kinds_do_not(cold_cache: Path) -> None:
    def child(*given: object) -> dict[str, object]:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cold_cache), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, json.dumps(given)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        made: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        assert max(made.pop("errors")) < 1e-6  # type: ignore[call-overload]
        return made

    assert child([[2, 4]])["misses"] == 1
    other_values = child([[0, T]], [[5, 1]])
    assert other_values["misses"] == 0 and other_values["hits"]
    assert child([3], [[1, 2], [3, 4]])["misses"] == 2
