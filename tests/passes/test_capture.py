"""Known library calls become one node: which ones, under which tracer, and nobody else is affected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile.passes import capture
from lattn_compile.recurrence import KINDS
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import make_inputs
from lattn_compile.testing.oracle import oracle
from tests import tiny_models

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


WITH_FLA = ("tests/passes/fla_cases.py", "tests/passes/fla_models.py", "tests/fla_field_reports.py")
WITH_FLA += ("tests/test_phase_batches.py",)  # its tests of FLA's calls


@pytest.mark.skipif("LATTN_TEST_FLA" not in os.environ, reason="set LATTN_TEST_FLA to a folder with fla-core")
def test_fla_entry_points_models_batches_and_field_reports_with_fla_installed() -> None:
    """In one process: importing it takes longer than most of these tests."""
    env = {k: v for k, v in os.environ.items() if k != "LATTN_TEST_FLA"}
    env["PYTHONPATH"] = os.pathsep.join([os.environ["LATTN_TEST_FLA"], str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-W", "ignore", "-p", "no:cacheprovider", "-k", "fla"]
    done = subprocess.run([*command, *WITH_FLA], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _hf(name: str) -> Any:
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_next import modeling_qwen3_next

    return vars(modeling_kimi_linear if "kimi" in name else modeling_qwen3_next)[name]


HF = {
    "torch_chunk_gated_delta_rule": "gdn",
    "torch_recurrent_gated_delta_rule": "gdn",
    "chunk_kimi_delta_attention": "kda",
    "recurrent_kimi_delta_attention": "kda",
}


@pytest.mark.parametrize("name", HF)
@pytest.mark.parametrize("bare", [False, True], ids=["wrapped", "bare"])
def test_a_transformers_function_is_one_node_and_keeps_packed_sequences_apart(name: str, bare: bool) -> None:
    """The libraries' torch functions ignore cu_seqlens (or refuse it); captured, it is honoured."""
    f = _hf(name).__wrapped__ if bare else _hf(name)
    x = make_inputs(HF[name], lengths=[5, 0, 9], seed=3)
    args = (x.q, x.k, x.v, x.g, x.beta)
    options = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens}
    torch._dynamo.reset()
    with recorded() as record:
        o, S = torch.compile(lambda *a: f(*a, **options), backend="lattn_compile", fullgraph=True)(*args)
    assert record.lattn_ops == 1
    want = oracle(*x.tensors(), rule="delta")
    assert (o.double() - want.o).norm() / want.o.norm() < 2e-6
    assert (S.double() - want.final_state).norm() / want.final_state.norm() < 2e-6


def test_an_option_that_means_different_things_is_left_to_the_original() -> None:
    """transformers' torch function ignores scale=; its FLA twin does not. Neither is guessed."""
    x = make_inputs("gdn", lengths=[6], seed=1)
    f = _hf("torch_chunk_gated_delta_rule").__wrapped__
    torch._dynamo.reset()
    with recorded(), pytest.warns(lc.LattnWarning, match="scale="):
        o, _ = torch.compile(
            lambda: f(x.q, x.k, x.v, x.g, x.beta, scale=1.0), backend="lattn_compile", fullgraph=True
        )()
    assert torch.allclose(o, f(x.q, x.k, x.v, x.g, x.beta)[0], atol=1e-6)


def test_other_backends_in_the_process_trace_the_original() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.randint(2, 97, (1, 9))
    graphs: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad(), recorded() as record:
        ours = torch.compile(model, backend="lattn_compile", fullgraph=True)(ids).logits
        theirs = torch.compile(model, backend=other, fullgraph=True)(ids).logits
        again = torch.compile(model, backend="lattn_compile", fullgraph=True)(ids).logits
    assert record.lattn_ops == 1
    assert not any("lattn" in str(n.target) for gm in graphs for n in gm.graph.nodes)
    assert any("solve_triangular" in str(n.target) for gm in graphs for n in gm.graph.nodes)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(ours, again)


def test_capture_is_undone_on_exit_also_after_an_error() -> None:
    f = _hf("torch_chunk_gated_delta_rule")
    code = f.__code__
    with pytest.raises(RuntimeError, match="boom"), lc.capture():
        assert f.__code__ is not code
        with lc.capture():
            pass
        assert f.__code__ is not code, "an inner capture must not end the outer one"
        raise RuntimeError("boom")
    assert f.__code__ is code
    assert capture._ACTIVE_CAPTURES == 0


def test_a_rule_that_says_none_traces_the_librarys_own_function() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    ids = torch.randint(2, 97, (1, 9))
    recipe = lc.Recipe(rules=[("model.layers.0.*", None), ("*", lc.Policy(write=lc.Exact()))])
    torch._dynamo.reset()
    with torch.no_grad(), recorded() as record:
        got = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": recipe})(ids).logits
        assert torch.allclose(got, model(ids).logits, atol=1e-5)
    assert record.lattn_ops == 1
    assert [str(n.target) for n in record.graphs[-1].graph.nodes].count("solve_triangular") in (0, 2)
    verdicts = {s.path: (s.verdict, s.reason.code if s.reason else None) for s in record.report.sites}
    assert verdicts == {
        "model.layers.0.linear_attn": ("left", "RULE_NONE"),
        "model.layers.1.linear_attn": ("rewritten", None),
    }


def test_every_known_function_exists_in_the_library_it_is_listed_for() -> None:
    """A renamed function would be missed without a word."""
    capture.install()
    found = {(known.call.library, known.call.name) for known in capture._KNOWN.values()}
    listed = {(call.library, call.name) for kind in KINDS for call in kind.calls if call.library == "transformers"}
    _hf("torch_chunk_gated_delta_rule"), _hf("chunk_kimi_delta_attention")
    capture.install()
    found = {(known.call.library, known.call.name) for known in capture._KNOWN.values()}
    assert listed <= found
