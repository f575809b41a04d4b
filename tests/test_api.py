"""rewrite and inspect on GraphModules and ExportedPrograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc
from lattn_compile.testing.oracle import oracle
from tests import tiny_models

pytest.importorskip("transformers")


class _Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


class _Suffix(torch.nn.Module):
    """A layer that calls the functional op: no phase, so every token is suffix."""

    def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> Any:
        return lc.linear_attention(q, k, v, g, beta, initial_state=S, output_final_state=True)


def _layer_inputs(T: int = 7) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    k = torch.nn.functional.normalize(draw(2, T, 2, 8), dim=-1)
    return draw(2, T, 2, 8), k, draw(2, T, 4, 12), -draw(2, T, 4).abs(), draw(2, T, 4).sigmoid(), draw(2, 4, 8, 12)


def _export(model: torch.nn.Module, *args: Any, strict: bool = False, **options: Any) -> torch.export.ExportedProgram:
    torch._dynamo.reset()
    with torch.no_grad(), lc.capture():
        return torch.export.export(model, args, strict=strict, **options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_an_exported_model_has_one_node_a_layer_for_any_length(name: str, strict: bool) -> None:
    model, linear_layers = tiny_models.build(name, layers=3)
    ids = torch.randint(2, 97, (2, 70))
    dim = torch.export.Dim("T", min=2, max=512)
    program = _export(_Logits(model), ids, strict=strict, dynamic_shapes={"ids": {1: dim}})
    report = lc.inspect(program)
    assert len(report.rewritten) == linear_layers
    assert all(s.call and "transformers" in s.call for s in report.sites)
    assert all(s.path.startswith("model.model.layers.") for s in report.sites)
    for T in (70, 5, 129):
        ids = torch.randint(2, 97, (2, T))
        assert (program.module()(ids) - model(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("strict", [False, True])
def test_save_load_run_gives_the_same_numbers(strict: bool, tmp_path: Path) -> None:
    inputs = _layer_inputs()
    program = _export(_Suffix(), *inputs, strict=strict)
    before = str(program.graph)
    result = lc.rewrite(program, "int8")
    assert str(program.graph) == before, "the input is never changed"
    o, S = result.module.module()(*inputs)
    want = oracle(*inputs, write="token", state_format="int8/*x64")
    exact = oracle(*inputs)
    assert (o.double() - want.o).norm() <= 0.1 * (exact.o - want.o).norm()
    assert (S.double() - want.final_state).norm() <= 0.1 * (exact.final_state - want.final_state).norm()

    file = tmp_path / "rewritten.pt2"
    torch.export.save(result.module, file)
    loaded = torch.export.load(file)
    assert all(torch.equal(a, b) for a, b in zip(loaded.module()(*inputs), (o, S), strict=True))
    (site,) = lc.inspect(file).sites
    assert site.policy is not None
    assert site.policy["state"]["format"] == "int8"
    assert site.verdict == "rewritten"
    (again,) = lc.rewrite(loaded, "fp8").report.sites
    assert again.reason is not None
    assert again.reason.code == "EXPLICIT_POLICY", "a policy that is in the program is not overridden silently"


def test_a_rewritten_program_trains() -> None:
    inputs = tuple(x.requires_grad_() for x in _layer_inputs())
    with lc.capture():
        program = torch.export.export(_Suffix(), inputs, strict=False)
    o, S = lc.rewrite(program, "fp8").module.module()(*inputs)
    got = torch.autograd.grad(o.square().sum() + S.sum(), inputs)
    want_o, want_S, *_ = oracle(*inputs, write="token", state_format="fp8_e4m3/*x64")
    want = torch.autograd.grad(want_o.square().sum() + want_S.sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < 0.05


def test_decompositions_keep_the_op() -> None:
    inputs = _layer_inputs()
    program = lc.rewrite(_export(_Suffix(), *inputs), "int8").module
    decomposed = program.run_decompositions()
    assert sum("lattn" in str(n.target) for n in decomposed.graph.nodes) == 1
    for a, b in zip(decomposed.module()(*inputs), program.module()(*inputs), strict=True):
        assert torch.equal(a, b)


def test_a_graph_module_is_copied_and_rewritten() -> None:
    inputs = _layer_inputs()
    gm = _export(_Suffix(), *inputs).module()
    before = str(gm.graph)
    result = lc.rewrite(gm, "int8")
    assert str(gm.graph) == before
    assert result.report.sites[0].op == "lattn::decode"
    assert not torch.equal(result.module(*inputs)[0], gm(*inputs)[0])


def test_inspect_takes_a_module_and_its_arguments() -> None:
    model, linear_layers = tiny_models.build("olmo_hybrid", layers=3)
    report = lc.inspect(_Logits(model), (torch.randint(2, 97, (1, 6)),), policy="int8")
    assert len(report.rewritten) == linear_layers
    assert "exact prefill" in " ".join(report.notes)


def test_inspect_takes_a_model_that_returns_a_cache_and_leaves_it_as_it_was() -> None:
    model, linear_layers = tiny_models.build("qwen3_next", layers=3)
    ids = torch.randint(2, 97, (1, 6))
    report = lc.inspect(model, (ids,), policy="int8")
    assert len(report.rewritten) == linear_layers
    assert "nothing was changed: 'rewritten' is what" in report.notes[-1]
    assert model(ids, use_cache=True).logits.shape == (1, 6, 97), "its own output again"


class _Bag:
    def __init__(self, x: torch.Tensor) -> None:
        self.first, self.more = x, {"more": [x + 1], "me": self}


def test_inspect_finds_a_recurrence_of_which_an_object_keeps_the_outputs() -> None:
    class Keeps(torch.nn.Module):
        def forward(self, *x: torch.Tensor) -> Any:
            o, state = lc.linear_attention(*x, output_final_state=True)
            return {"o": _Bag(o), "n": 3, "state": _Bag(state)}

    inputs = _layer_inputs()
    (site,) = lc.inspect(Keeps(), inputs[:5], policy="int8").sites
    assert site.policy


def test_inspect_says_which_argument_no_export_takes() -> None:
    class Takes(torch.nn.Module):
        def forward(self, x: Any, *, cache: Any) -> Any:
            return x + cache["a"].first

    with pytest.raises(lc.LattnError, match=r"kwargs\['cache'\]\['a'\]: got an object of class _Bag; want tensors"):
        lc.inspect(Takes(), (torch.ones(2),), {"cache": {"a": _Bag(torch.ones(2))}})


def test_a_rule_that_hits_nothing_is_said() -> None:
    program = _export(_Suffix(), *_layer_inputs())
    with pytest.warns(lc.LattnWarning, match="matched no site"):
        lc.rewrite(program, lc.Recipe(rules=[("nowhere.*", lc.Policy()), ("*", None)]))


def test_what_is_not_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lc.LattnError, match="GraphModule"):
        lc.rewrite(torch.nn.Linear(2, 2), "int8")  # type: ignore[arg-type]
    with pytest.raises(lc.LattnError, match="no such file"):
        lc.inspect(tmp_path / "missing.pt2")
    garbage = tmp_path / "garbage.pt2"
    garbage.write_bytes(b"PK\x03\x04 not a program")
    with pytest.raises(lc.LattnError, match="not a zip archive"):
        lc.inspect(garbage)
    archive = tmp_path / "weights.pt2"
    torch.save({"w": torch.ones(2)}, archive)
    with pytest.raises(lc.LattnError, match=r"torch\.export\.save"):
        lc.inspect(archive)


def test_a_trace_whose_nodes_have_a_fake_mode_each_is_rewritten() -> None:
    """As `make_fx` of real tensors leaves them."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lc.linear_attention(q, k, v, None, None)[0]  # type: ignore[return-value]

    traced = make_fx(layer)(*(torch.randn(1, 3, 2, 4) for _ in range(3)))
    for node in traced.graph.nodes:
        if isinstance(x := node.meta.get("val"), torch.Tensor):
            with FakeTensorMode():
                node.meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    assert len(lc.rewrite(traced, "int8").report.rewritten) == 1
