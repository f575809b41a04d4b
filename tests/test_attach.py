"""The recipe that lives with the module: bare compiles find it, and regional compiles never mix layers up."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile.attach import attached_recipe
from lattn_compile.testing.backend import Record, recorded
from tests import tiny_models

pytest.importorskip("transformers")

MIXED = lc.Recipe(
    rules=[
        ("model.layers.0.linear_attn", lc.Policy(lc.Int8())),
        ("model.layers.1.linear_attn", lc.Policy(lc.Fp8())),
        ("*", lc.Policy(write=lc.Exact())),
    ]
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _formats(record: Record) -> list[str]:
    return [c.arguments.get("state_format", "fp32") for c in record.calls]


def _run(compiled: Any, prefix: int = 3) -> Any:
    ids = torch.randint(2, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), lc.training_phase(prefix):
        return compiled(ids, use_cache=False).logits


def test_a_bare_compile_uses_the_attached_recipe_with_full_paths() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=4)
    with recorded() as record:
        _run(torch.compile(lc.attach(model, MIXED), backend="lattn_compile", fullgraph=True))
    assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32"]
    assert record.report.recipe == MIXED.to_dict()


def test_options_win_over_an_attached_recipe() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    with recorded() as record:
        lc.attach(model, MIXED)
        _run(torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "fp8"}))
    assert _formats(record) == ["fp8_e4m3/*x64"] * 2


def test_regional_compile_gives_every_layer_its_own_policy() -> None:
    """Layers of one class share compiled code; the attached group is guarded, so a policy never leaks to another."""
    model, _ = tiny_models.build("qwen3_next", layers=5)
    lc.attach(model, MIXED)
    for layer in model.model.layers:
        layer.compile(backend="lattn_compile", fullgraph=True)
    with recorded() as record:
        _run(model)
        assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32", "fp32"]
        graphs = [g for g in record.graphs if any("lattn" in str(n.target) for n in g.graph.nodes)]
        assert len(graphs) == 3, "layers 2 and 3 have one policy and share a graph"
        record.calls.clear()
        _run(model)
        assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32", "fp32"]


def test_regional_compile_without_attach_says_that_a_rule_by_path_cannot_be_met() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    recipe = lc.Recipe(rules=[("model.layers.0.linear_attn", lc.Policy(lc.Int8()))])
    for layer in model.model.layers:
        layer.compile(backend="lattn_compile", fullgraph=True, options={"policy": recipe})
    with recorded() as record, pytest.warns(lc.LattnWarning, match=r"lc\.attach"):
        _run(model)
    assert not record.calls, "no layer may get layer 0's policy"


def test_attaching_another_recipe_recompiles() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    compiled = torch.compile(model, backend="lattn_compile", fullgraph=True)
    with recorded() as record:
        seen = []
        for recipe in (None, "int8", "fp8", "int8"):
            if recipe is not None:
                lc.attach(model, recipe)
            record.calls.clear()
            _run(compiled)
            seen += _formats(record)
    assert seen == ["fp32", "int8/*x64", "fp8_e4m3/*x64", "int8/*x64"]


def test_an_attached_model_copies_and_pickles_with_its_recipe() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    lc.attach(model, MIXED)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attached_recipe(other) == MIXED
    assert attached_recipe(lc.detach(model)) is None


def test_only_a_module_takes_a_recipe() -> None:
    with pytest.raises(lc.LattnError, match=r"nn\.Module"):
        lc.attach("model", MIXED)  # type: ignore[arg-type]
    with pytest.raises(lc.LattnError):
        lc.attach(torch.nn.Linear(1, 1), "int9")
