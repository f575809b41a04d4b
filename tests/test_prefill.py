"""A policy with rounded prefill operands, from the recipe to the op: eager, compiled, exported, in a model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.ops.residuals import inverse_residuals, record, reset_inverse_residuals
from lattn_compile.testing.backend import recorded
from tests.kernels.reference.prefill_oracle import prefill_oracle
from tests.ops.cases import assert_close, inputs

ROUNDED = lc.Prefill({"kk": "int8", "qk": "fp8_e4m3", "ws": lc.Nvfp4(), "kv": "int8"}, inverse=lc.BlockDoubling(8))
POLICY = lc.Policy(lc.Int8(block_v=8), prefill=ROUNDED)
EXACT = lc.Policy(write=lc.Exact(), prefill=ROUNDED)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reset_inverse_residuals()
    yield


def call(x: list[Any], policy: Any, **more: Any) -> Any:
    q, k, v, g, beta, state = x
    return lc.linear_attention(q, k, v, g, beta, initial_state=state, output_final_state=True, policy=policy, **more)


def test_a_recipe_keeps_it_in_json_and_in_its_fingerprint(tmp_path: Path) -> None:
    recipe = lc.Recipe([("a.*", POLICY), ("*", "int8")])
    recipe.save(tmp_path / "r.json")
    assert lc.Recipe.load(tmp_path / "r.json") == recipe
    other = dataclasses.replace(POLICY, prefill=dataclasses.replace(ROUNDED, inverse=lc.Neumann(7)))
    assert lc.Recipe([("a.*", other), ("*", "int8")]).fingerprint() != recipe.fingerprint()
    data = json.loads((tmp_path / "r.json").read_text())
    del data["rules"][0]["policy"]["prefill"]["gradient"]  # as it was written before there was one
    del data["rules"][1]["policy"]["prefill"]
    assert lc.Recipe.from_dict(data) == recipe


@pytest.mark.parametrize("policy", [POLICY, EXACT], ids=["token", "exact"])
def test_linear_attention_rounds_the_tokens_before_p(policy: lc.Policy) -> None:
    x = inputs(2, 70, 1, 2, 16, 8)
    o, state = call(x, policy, prefix_lengths=70)
    want = prefill_oracle(*x, [70, 70], ROUNDED, scale=16**-0.5)
    assert_close(o, want[0], "o")
    assert_close(state if isinstance(state, Tensor) else state.dense(), want[1], "state")


def test_without_a_phase_no_token_of_linear_attention_is_prefix() -> None:
    x = inputs(2, 20, 1, 2, 16, 8)
    for policy, plain in ((EXACT, "exact"), (POLICY, lc.Policy(lc.Int8(block_v=8)))):
        assert torch.equal(call(x, policy)[0], call(x, plain)[0])


def test_calibration_which_measures_decoding_takes_no_candidate_with_it() -> None:
    with pytest.raises(lc.LattnError, match=r"candidates\[0\]: got prefill="):
        lc.calibrate(nn.Linear(1, 1), [torch.zeros(1, 1)], max_error=0.1, candidates=[POLICY])


def test_a_prefill_that_changes_nothing_is_no_prefill() -> None:
    policy = lc.Policy(lc.Int8(), prefill=lc.Prefill(max_residual=0.5))
    assert policy == lc.Policy(lc.Int8()) and policy.op_kwargs() == lc.Policy(lc.Int8()).op_kwargs()


@pytest.mark.parametrize(
    ("policy", "key_dim", "rule", "error"),
    [
        (dataclasses.replace(POLICY, kernel="triton"), 16, "delta", "Use 'reference'"),
        (POLICY, 60, "delta", "nvfp4 at ws with K = 60"),
        (POLICY, 8, "delta", "multiple of 16"),
        (POLICY, 16, "additive", "for the additive rule"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_eager_and_compiled(
    policy: Any, key_dim: int, rule: str, error: str
) -> None:
    def forward(x: list[Any]) -> Tensor:
        return call(x, policy, prefix_lengths=3, rule=rule)[0]  # type: ignore[no-any-return]

    tensors = inputs(1, 5, 1, 1, key_dim)
    for run in (forward, torch.compile(forward, backend="lattn_compile", fullgraph=True)):
        with pytest.raises(lc.LattnError, match=error):
            run(tensors)


def test_lengths_are_data_for_a_compiled_call() -> None:
    x = inputs(2, 70, 1, 2, 16, 8)

    def forward(x: list[Any], p: Tensor, n: Tensor) -> Tensor:
        return call(x, POLICY, prefix_lengths=p, sequence_lengths=n)[0]  # type: ignore[no-any-return]

    with recorded() as record:
        compiled = torch.compile(forward, backend="lattn_compile", fullgraph=True)
        for p, n in (([66, 3], [70, 9]), ([0, 20], [1, 70])):
            got = compiled(x, torch.tensor(p), torch.tensor(n))
            assert torch.equal(got, forward(x, torch.tensor(p), torch.tensor(n)))
        assert record.report.compiles == 1
    arguments = record.calls[0].arguments
    assert arguments["prefill_operands"] == "kk=int8,qk=fp8_e4m3,ws=nvfp4,kv=int8"
    assert arguments["prefill_inverse"] == "block_doubling(8)"


class Layer(nn.Module):
    def forward(self, *x: Tensor) -> tuple[Tensor, Tensor]:
        o, state = call(list(x), EXACT, prefix_lengths=30)
        return o, state


def test_an_exported_program_keeps_it_and_says_so(tmp_path: Path) -> None:
    x = tuple(inputs(1, 20, 1, 2, 16, 8))
    dynamic = ({1: torch.export.Dim("tokens", min=2, max=200)},) * 5 + (None,)
    program = torch.export.export(Layer(), x, dynamic_shapes=(dynamic,))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")
    longer = tuple(inputs(1, 70, 1, 2, 16, 8))
    for a, b in zip(loaded.module()(*longer), Layer()(*longer), strict=True):
        assert torch.equal(a, b)
    (site,) = lc.inspect(loaded).sites
    assert lc.Policy.from_dict(site.policy) == EXACT


def test_a_program_without_the_arguments_means_what_it_meant() -> None:
    x = inputs(1, 20, 1, 2, 16, 8)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(6)]
    node = graph.call_function(torch.ops.lattn.chunk.default, (*nodes, *(None,) * 4), {"scale": 0.25})
    graph.output(node)
    old = torch.fx.GraphModule(nn.Module(), graph)
    for a, b in zip(old(*x), call(x, "exact"), strict=True):
        assert torch.equal(a, b)


def test_residuals_of_chunks_that_are_not_there_count_nothing() -> None:
    norms = torch.tensor([[0.5, -1.0], [1e-9, -1.0]], dtype=torch.float64)
    with pytest.warns(lc.LattnWarning, match="in the worst of 2 chunks and heads, 1 of them over"):
        record(3, "neumann(7)", 1e-3, norms)
    (found,) = inverse_residuals()
    assert (found.chunks, found.over, found.largest) == (2, 1, 0.5)
    record(3, "neumann(7)", 1e-3, torch.tensor([torch.nan, -1.0], dtype=torch.float64))
    assert inverse_residuals()[0][3:5] == (3, 2)


# In a model


def _model(name: str) -> tuple[nn.Module, int, Tensor]:
    pytest.importorskip("transformers")
    from tests import tiny_models

    model, linear_layers = tiny_models.build(name, layers=3)
    return model.double(), linear_layers, torch.randint(2, 97, (2, 70), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "phase"), [("qwen3_next", True), ("qwen3_next", False), ("kimi_linear", True)],
    ids=["qwen3_next in a phase", "qwen3_next without one", "kimi_linear in a phase"],
)  # fmt: skip
def test_a_model_trains_a_step_on_the_oracles_prefill(name: str, phase: bool) -> None:
    model, linear_layers, ids = _model(name)
    policy = POLICY if phase else EXACT
    exact = model(ids, use_cache=False).logits
    prefix = torch.tensor([70, 66])
    with recorded() as record, warnings.catch_warnings():
        warnings.simplefilter("error", lc.LattnWarning)  # this inverse holds
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": policy})
        if phase:
            with lc.training_phase(prefix):
                logits = compiled(ids, use_cache=False).logits
        else:
            logits = compiled(ids, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        sites = record.report.sites
    assert [site.verdict for site in sites] == ["rewritten"] * linear_layers
    assert all(lc.Policy.from_dict(site.policy) == policy and site.kernel == "reference" for site in sites)
    assert (logits[0] - exact[0]).abs().max() > 1e-4, "rounding must be visible"
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    forwards = [c for c in record.calls if not c.op.endswith("_backward")]
    assert len(forwards) == linear_layers
    for found in forwards:
        a = found.arguments
        tokens = [a[n].double() for n in ("q", "k", "v", "g", "beta")]
        zeros = tokens[2].new_zeros(2, a["v"].shape[2], a["k"].shape[3], a["v"].shape[3])
        options = {"scale": a["scale"], "qk_l2norm": a["qk_l2norm"]}
        want = prefill_oracle(*tokens, zeros, [70, 66], ROUNDED, **options)[0]
        assert_close(found.outputs[0][0].detach(), want[0].detach(), "o")
        assert_close(found.outputs[0][1, :66].detach(), want[1, :66].detach(), "o of the prefix")
    before = [p.detach().clone() for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(model.parameters(), 1e-3).step()
    after = [p for p in model.parameters() if p.grad is not None]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    measured = inverse_residuals()
    assert [m.site_id for m in measured] == list(range(linear_layers)) and not any(m.over for m in measured)
