"""What a first user ran into."""

from __future__ import annotations

import warnings

import pytest
import torch

import lattn_compile as lc
from lattn_compile.lowering._torch_private import module_path
from lattn_compile.testing.backend import recorded
from tests import tiny_models


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self'].model.layers.3.linear_attn", "model.layers.3.linear_attn"),
        ("L['args'][0].model.layers.0.linear_attn", "model.layers.0.linear_attn"),
        ("L['kwargs']['self'].model.layers.0.self_attn", "model.layers.0.self_attn"),
        ("L['self']._modules['model']._modules['layers']._modules['0'].attn", "model.layers.0.attn"),
        ("L['layers'][2].attn", "2.attn"),
        ("G['model'].layers.0", "layers.0"),
        ("L['self']._orig_mod.layers.0", "layers.0"),
        ("L['self']", ""),
    ],
)
def test_a_module_path_is_that_of_named_modules(raw: str, path: str) -> None:
    assert module_path(raw) == path


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_rule_by_path_meets_the_layers_of_every_model(name: str) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, linear_layers = tiny_models.build(name, layers=3)
    recipe = lc.Recipe(rules=[("model.layers.*.linear_attn", lc.Policy()), ("model.layers.*.self_attn", lc.Policy())])
    with torch.no_grad(), recorded() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of the two rules is for another model
        torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": recipe})(
            torch.randint(2, 97, (1, 9)), use_cache=False
        )
    assert len(record.report.rewritten) == linear_layers


def test_attached_regions_are_compiled_without_false_alarms_and_merge_into_one_report() -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, linear_layers = tiny_models.build("qwen3_next", layers=4)
    rules = [("model.layers.0.*", None), ("model.layers.1.*", lc.Policy(lc.Int8())), ("*", lc.Policy())]
    with warnings.catch_warnings():
        warnings.simplefilter("error", lc.LattnWarning)
        lc.attach(model, lc.Recipe(rules=rules))
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="lattn_compile", fullgraph=True)
        before = len(lc.reports())
        with torch.no_grad(), recorded():
            model(torch.randint(2, 97, (1, 9)), use_cache=False)
    merged = lc.Report.merge(lc.reports()[before:])
    assert [(s.path, s.verdict) for s in merged.sites] == [
        ("model.layers.0.linear_attn", "left"),
        ("model.layers.1.linear_attn", "rewritten"),
        ("model.layers.2.linear_attn", "rewritten"),
    ]
    assert len(merged.sites) == linear_layers


def test_attach_warns_of_a_rule_that_can_never_apply() -> None:
    recipe = lc.Recipe(rules=[("encoder.*", lc.Policy()), ("*", lc.Policy(write=lc.Exact()))])
    with pytest.warns(lc.LattnWarning, match="matches no module"):
        lc.attach(torch.nn.Sequential(torch.nn.Linear(2, 2)), recipe)


def test_a_prefill_program_remembers_the_policy_it_was_given(tmp_path: object) -> None:
    pytest.importorskip("transformers")
    model, linear_layers = tiny_models.build("qwen3_next", layers=3)
    with torch.no_grad(), lc.capture():
        program = torch.export.export(model, (torch.randint(2, 97, (1, 9)),), {"use_cache": False}, strict=False)
    rewritten = lc.rewrite(program, "int8").module
    file = f"{tmp_path}/rewritten.pt2"
    torch.export.save(rewritten, file)
    policies = [s.policy for s in lc.inspect(file).sites]
    assert len(policies) == linear_layers
    assert all(p is not None and p["state"]["format"] == "int8" and p["write"]["mode"] == "token" for p in policies)
