"""Whole models, exported or compiled with no library call captured: every recurrence found by meaning, nothing else.

Exporting costs seconds a model, so each program is made and rewritten once for all tests.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

import lattn_compile as lc
from lattn_compile.passes.context import nodes_of
from lattn_compile.passes.recognize import module_path_of
from lattn_compile.report import Report
from lattn_compile.testing.backend import recorded

from . import models

pytest.importorskip("transformers")

BATCH = 2
PROMPT = 6

# What only the recurrence of a layer needs; the rest is projections, a convolution, norms and gates.
STATE_PATH = {"linalg_solve_triangular", "cumsum", "triu", "tril", "eye", "ones", "zeros", "zeros_like", "full"}
STATE_PATH |= {"masked_fill", "matmul", "bmm", "baddbmm", "einsum", "stack", "select_scatter", "slice_scatter"}
KINDS = {"qwen3_next": "gdn", "qwen3_5": "gdn", "kimi_linear": "kda"}
MAMBAS = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid")


class Case:
    """A program, its rewrite under the policy `exact`, and what both are called with."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], layers: list[str]) -> None:
        self.module, self.inputs = module, inputs
        self.layers = [f"model.{n}" for n in layers]
        with torch.no_grad():
            self.program: ExportedProgram = torch.export.export(module, self.fresh(), strict=False)
        self.result = lc.rewrite(self.program, "exact")
        self.report: Report = self.result.report

    def fresh(self) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in self.inputs)

    @property
    def error(self) -> float:
        """Largest difference to eager over outputs, inputs and buffers written to, each relative to its largest element
        if that is above 1."""
        eager, rewritten = copy.deepcopy(self.module), self.result.module.module()
        want, got = self.fresh(), self.fresh()
        with torch.no_grad():
            outputs = eager(*want), rewritten(*got)
        buffers = dict(rewritten.named_buffers())
        pairs = [*zip(_flat(outputs[0]), _flat(outputs[1]), strict=True), *zip(want, got, strict=True)]
        pairs += [(b, buffers[n]) for n, b in eager.named_buffers() if n in buffers]
        return max(_difference(a, b) for a, b in pairs if a.is_floating_point())

    def layer_nodes(self, program: ExportedProgram, layer: str) -> list[fx.Node]:
        return [
            n for n in nodes_of(program.graph_module) if n.op == "call_function" and module_path_of(n).startswith(layer)
        ]


def _difference(want: Tensor, got: Tensor) -> float:
    return float((want - got).abs().max() / want.abs().max().clamp(min=1))


def _flat(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _operation(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


@functools.cache
def _model(name: str, layers: int = 3) -> tuple[nn.Module, list[str]]:
    return models.build(name, layers)


FULL = os.environ.get("LATTN_CORPUS") == "full"


def _chunks(name: str, call: str) -> int:
    """Tokens of a chunk: 64, as the library has it, is a thousand nodes a layer. One call has those by default."""
    return 64 if FULL or (name, call) == ("qwen3_5", "prefill") else 16


@functools.cache
def _case(name: str, call: str, tokens: int) -> Case:
    """`call`: "forward" over tokens without a cache, "prefill" that returns one, or "cached" tokens that follow one."""
    with models.chunks_of(_chunks(name, call)) if name in KINDS else contextlib.nullcontext():
        return _made(name, call, tokens)


def _made(name: str, call: str, tokens: int) -> Case:
    # Of several layers there is one call.
    model, layers = _model(name, 3 if call == "forward" or tokens == 1 else 2)
    ids = models.ids(BATCH, tokens, seed=2)
    if call == "cached":
        step = models.CachedStep(model)
        return Case(step, (ids, *step.prefill(models.ids(BATCH, PROMPT))), layers)
    return Case(models.Logits(model) if call == "forward" else models.Prefill(model), (ids,), layers)


def _check_every_layer_is_rewritten(case: Case, kind: str, form: str) -> None:
    assert case.layers
    assert [s.path for s in case.report.sites] == case.layers == [s.path for s in case.report.rewritten]
    assert {(s.kind, s.form) for s in case.report.sites} == {(kind, form)}
    assert all(s.evidence["self_check"]["verified"] for s in case.report.sites)
    assert not case.report.unmatched and not case.report.notes
    assert case.error < 1e-5
    for layer in case.layers:
        after = case.layer_nodes(case.result.module, layer)
        assert sum("lattn." in str(n.target) for n in after) == 1


CALLS = [("forward", 5), ("forward", 70), ("forward", 128), ("prefill", 70), ("cached", 1), ("cached", 5)]
HF_CASES = [
    ("qwen3_next", "forward", 5),
    ("qwen3_next", "cached", 5),
    ("qwen3_5", "prefill", 70),
    ("qwen3_5", "cached", 1),
]
HF_CASES += [("kimi_linear", "forward", 5), ("kimi_linear", "prefill", 128), ("kimi_linear", "cached", 1)]
if FULL:
    HF_CASES = sorted({*HF_CASES, *((name, *call) for name in KINDS for call in CALLS)})


@pytest.mark.parametrize(("name", "call", "tokens"), HF_CASES)
def test_an_exported_delta_rule_model_keeps_nothing_of_the_state_path(name: str, call: str, tokens: int) -> None:
    case = _case(name, call, tokens)
    _check_every_layer_is_rewritten(case, KINDS[name], "step" if tokens == 1 else "chunk")
    for layer in case.layers:
        before, after = (case.layer_nodes(p, layer) for p in (case.program, case.result.module))
        left = Counter(map(_operation, after))
        assert not STATE_PATH & left.keys(), left
        assert len(after) <= 110, left
        assert tokens == 1 or len(before) > 14 * _chunks(name, call)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_rewritten_program_trains(name: str) -> None:
    case = _case(name, "forward", 5)
    eager, rewritten = copy.deepcopy(case.module), case.result.module.module()
    for model in (eager, rewritten):
        model.zero_grad()
        model(*case.fresh()).square().mean().backward()
    want = {n: p.grad for n, p in eager.named_parameters()}
    got = {n: p.grad for n, p in rewritten.named_parameters()}
    assert want.keys() == got.keys()
    for name_, gradient in want.items():
        assert gradient is not None and got[name_] is not None, name_
        assert (got[name_] - gradient).norm() <= 1e-4 * gradient.norm(), name_


def test_a_policy_reaches_an_exported_decode_step() -> None:
    case = _case("qwen3_next", "cached", 1)
    result = lc.rewrite(case.program, "int8")
    assert [s.path for s in result.report.rewritten] == case.layers
    exact, rounded = case.fresh(), case.fresh()
    with torch.no_grad():
        case.result.module.module()(*exact)
        result.module.module()(*rounded)
    states = [(a, b) for a, b in zip(exact, rounded, strict=True) if a.shape[1:] == (4, 16, 24)]
    assert len(states) == len(case.layers)
    assert all(1e-4 < (a - b).norm() / a.norm() < 2e-2 for a, b in states)


def test_a_cached_step_of_any_batch() -> None:
    """Sizes stay symbols: the rewritten program runs at others than it was exported with."""
    model, layers = _model("qwen3_next")
    step, batch = models.CachedStep(model), Dim("batch", min=1, max=64)
    inputs = (models.ids(3, 1), *step.prefill(models.ids(3, PROMPT)))
    with torch.no_grad():
        sizes = ({0: batch}, tuple({0: batch} for _ in inputs[1:]))
        program = torch.export.export(step, inputs, dynamic_shapes=sizes, strict=False)
    result = lc.rewrite(program, "exact")
    assert [s.path for s in result.report.rewritten] == [f"model.{n}" for n in layers]
    assert not any(isinstance(s.shapes["B"], int) for s in result.report.sites)
    for size in (1, 5):
        inputs = (models.ids(size, 1), *models.CachedStep(model).prefill(models.ids(size, PROMPT)))
        want, got = ([x.clone() for x in inputs] for _ in range(2))
        with torch.no_grad():
            logits = step(*want)[0], result.module.module()(*got)[0]
        assert max(_difference(a, b) for a, b in [logits, *zip(want[1:], got[1:], strict=True)]) < 1e-5


def test_a_batch_of_any_size_in_chunk_form() -> None:
    model, layers = _model("kimi_linear", 2)
    with torch.no_grad(), models.chunks_of(_chunks("kimi_linear", "forward")):
        program = torch.export.export(
            models.Logits(model), (models.ids(3, 9),), dynamic_shapes=({0: Dim("batch", min=1, max=64)},), strict=False
        )
    result = lc.rewrite(program, "exact")
    assert [s.path for s in result.report.rewritten] == [f"model.{n}" for n in layers]
    with torch.no_grad():
        for size in (1, 5):
            want = model(models.ids(size, 9)).logits
            assert (result.module.module()(models.ids(size, 9)) - want).abs().max() < 1e-5


@pytest.fixture
def own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers call copies of the library's functions, as a user's own model would: no known call."""
    for name in KINDS:
        layer = type(_model(name)[0].get_submodule(_model(name)[1][0]))
        with models.chunks_of(_chunks(name, "compiled")):
            monkeypatch.setattr(layer, "forward", models.with_own_functions(layer.forward))
    torch._dynamo.reset()


def _compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})


def _check_compiled(report: Report, name: str, form: str) -> None:
    assert [s.path for s in report.rewritten] == _model(name)[1] == [s.path for s in report.sites]
    assert {(s.kind, s.form, s.call) for s in report.sites} == {(KINDS[name], form, None)}
    assert not report.unmatched


@pytest.mark.usefixtures("own_copies")
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_compiled_model_with_its_own_copy_of_the_chunk_form_trains(name: str) -> None:
    """Under Dynamo transformers solves a triangular system where its export substitutes row by row."""
    model = copy.deepcopy(_model(name)[0]).train()
    tokens = models.ids(BATCH, 70)
    model(tokens, labels=tokens).loss.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    with recorded() as record:
        _compile(model)(tokens, labels=tokens).loss.backward()
        assert record.lattn_ops == len(_model(name)[1])
        _check_compiled(record.report, name, "chunk")
    for n, p in model.named_parameters():
        gradient = want[n]
        assert gradient is not None and p.grad is not None, n
        assert (p.grad - gradient).norm() <= 1e-4 * gradient.norm(), n


@pytest.mark.usefixtures("own_copies")
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_compiled_decode_step_with_its_own_copy_of_the_recurrence(name: str) -> None:
    model, _ = _model(name)
    step = models.CachedStep(model)
    step.prefill(models.ids(BATCH, PROMPT))
    want, got = copy.deepcopy(step.pattern), copy.deepcopy(step.pattern)
    compiled = _compile(model)
    with torch.no_grad(), recorded() as record:
        for i in range(2):
            token = models.ids(BATCH, 1, seed=i)
            eager = model(token, use_cache=True, **{step.argument: want}).logits
            logits = compiled(token, use_cache=True, **{step.argument: got}).logits
            assert _difference(eager, logits) < 1e-5
        _check_compiled(record.report, name, "step")
    for (*_, a), (*_, b) in zip(models.slots(want), models.slots(got), strict=True):
        assert _difference(a, b) < 1e-5


@pytest.mark.parametrize("name", MAMBAS)
@pytest.mark.parametrize(("call", "tokens"), [("forward", 20), ("cached", 1)])
def test_mamba_2_is_an_additive_recurrence_with_a_decay_a_head(name: str, call: str, tokens: int) -> None:
    _check_every_layer_is_rewritten(_case(name, call, tokens), "retention", "step" if tokens == 1 else "chunk")


@pytest.mark.parametrize(("call", "tokens"), [("prefill", 8), ("prefill", 20), ("cached", 5), ("cached", 8)])
def test_mamba_2_continues_a_state_and_returns_it(call: str, tokens: int) -> None:
    """The states of its chunks are mixed by one product; the last of them goes into the cache."""
    _check_every_layer_is_rewritten(_case("mamba2", call, tokens), "retention", "chunk")


def test_a_decode_step_of_lightning_attention() -> None:
    _check_every_layer_is_rewritten(_case("minimax", "cached", 1), "retention", "step")


@pytest.mark.parametrize("tokens", [5, 20])
def test_lightning_attention_whose_decay_is_a_table(tokens: int) -> None:
    """Its decay stands in four buffers. That they are powers of one number is in their values, not in the graph."""
    _check_every_layer_is_rewritten(_case("minimax", "prefill", tokens), "retention", "chunk")


@pytest.mark.parametrize("tokens", [1, 24])
def test_retention_token_by_token(tokens: int) -> None:
    case = _retention(models.RetentionRecurrent, tokens)
    [site] = case.report.sites
    assert (site.verdict, site.kind, site.form) == ("rewritten", "retention", "step" if tokens == 1 else "loop")
    assert not case.report.unmatched
    assert case.error < 1e-5


@pytest.mark.parametrize("tokens", [8, 24])
def test_retention_by_chunks(tokens: int) -> None:
    """Powers of one decay, computed from its logarithm by a product with positions."""
    case = _retention(models.RetentionChunk, tokens)
    [site] = case.report.sites
    assert (site.verdict, site.kind, site.form) == ("rewritten", "retention", "chunk")
    assert not case.report.unmatched
    assert case.error < 1e-5


def _retention(layer: type[models.Retention], tokens: int) -> Case:
    torch.manual_seed(0)
    return Case(layer(), (torch.randn(BATCH, tokens, 32), torch.randn(BATCH, 4, 8, 12)), [])


def test_a_selective_scan_with_a_decay_a_value_channel_is_left_with_a_reason() -> None:
    """Mamba 1: each channel decays on its own, which no op here says."""
    case = _case("mamba", "cached", 1)
    assert case.error == 0 and not case.report.sites
    assert {u.reason.code for u in case.report.unmatched} == {"DECAY_AXIS"}
    assert {u.path for u in case.report.unmatched} == {"model.backbone.layers.0.mixer"}


@pytest.mark.parametrize("name", models.without_recurrence())
def test_nothing_is_found_where_nothing_is(name: str) -> None:
    module, inputs = models.without_recurrence()[name]()
    case = Case(module, inputs, [])
    assert not case.report.sites
    assert not case.report.unmatched
    assert not [n for n in case.report.notes if not n.startswith("no recurrence was found")]
    assert case.error == 0


@pytest.mark.filterwarnings("ignore::lattn_compile.LattnWarning")
@pytest.mark.parametrize("name", models.without_recurrence())
def test_nothing_is_found_in_a_compiled_graph_where_nothing_is(name: str) -> None:
    module, inputs = models.without_recurrence()[name]()
    eager = copy.deepcopy(module)
    want, got = ([x.clone() for x in inputs] for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad(), recorded() as record:
        outputs = eager(*want), torch.compile(module, backend="lattn_compile", options={"policy": "int8"})(*got)
    assert record.graphs
    for report in lc.reports()[-len(record.graphs) :]:
        assert not report.sites and not report.unmatched and not report.notes
    for a, b in zip(_flat(outputs[0]), _flat(outputs[1]), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(b, dict(module.named_buffers())[n]) for n, b in eager.named_buffers())
