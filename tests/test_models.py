"""The main job on real models: transformers' own hybrid classes, tiny and random, through the backend.

Most tests run the rewritten graph eagerly (`recorded`), which is what a rewrite is about; `test_inductor_*` go all the
way to compiled code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.oracle import oracle

from . import tiny_models

pytest.importorskip("transformers")

NAMES = tiny_models.NAMES
ALL = "LATTN_COMPILE_ALL" in os.environ
"""Every model both generates and trains through Inductor; else one of each kind generates, and one trains in a phase,
which may be all prefix. What is handed to Inductor is compared for all of them, training and generating, by the tests
that run it eagerly."""

KINDS = {"qwen3_next": "gdn", "qwen3_5": "gdn", "kimi_linear": "kda", "olmo_hybrid": "gdn"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


def _ids(batch: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def _compile(model: nn.Module, policy: Any = "exact", **options: Any) -> Any:
    return torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": policy, **options})


def _generate(model: Any, ids: torch.Tensor, tokens: int = 8) -> Any:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True)


def _generate_compiled(model: Any, ids: torch.Tensor, forward: Any, tokens: int = 8) -> Any:
    original, model.forward = model.forward, forward
    try:
        return _generate(model, ids, tokens)
    finally:
        model.forward = original


def _check_generation(model: Any, ids: torch.Tensor, forward: Any) -> None:
    want = _generate(model, ids)
    got = _generate_compiled(model, ids, forward)
    assert torch.equal(got.sequences, want.sequences)
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert (a - b).abs().max() < 1e-5, f"logits of generated token {step}"


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_training_equal_eager_and_every_linear_layer_is_rewritten(name: str) -> None:
    model, linear_layers = tiny_models.build(name, layers=3)
    ids = _ids()
    with recorded() as record:
        compiled = _compile(model)
        with torch.no_grad():
            want = model(ids).logits
            got = compiled(ids).logits
        assert (got - want).abs().max() < 1e-5
        assert record.lattn_ops == linear_layers == len(record.report.rewritten)
        assert {s.kind for s in record.report.sites} == {KINDS[name]}

        model.train()
        model(ids, labels=ids).loss.backward()
        want_grads = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        loss = compiled(ids, labels=ids).loss
        loss.backward()
        for n, p in model.named_parameters():
            if want_grads[n] is not None:
                assert (p.grad - want_grads[n]).abs().max() < 1e-5, n
        assert len(record.report.rewritten) == linear_layers
        assert record.report.graph_breaks == []
        assert record.report.skipped_frames == []


@pytest.mark.parametrize("name", NAMES)
def test_generation_equals_eager_and_recompiles_as_little_as_promised(name: str) -> None:
    model, linear_layers = tiny_models.build(name, layers=3)
    ids = _ids()
    with recorded() as record, torch.no_grad():
        forward = _compile(model.forward)  # type: ignore[arg-type]
        _check_generation(model, ids, forward)
        assert len(record.graphs) <= 3, "first generate"
        assert record.lattn_ops == linear_layers
        assert {c.op for c in record.calls} == {"lattn::chunk", "lattn::decode"}

        counts = [len(record.graphs)]
        for other in (ids[:, :50], torch.cat([ids, ids[:1]]), ids[:, :61], ids):
            _check_generation(model, other, forward)
            counts.append(len(record.graphs))
        new_length, new_batch, again, first = (b - a for a, b in pairwise(counts))
        assert new_length <= 1
        assert new_batch <= 2
        assert (again, first) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_phase_quantizes_the_suffix_as_the_oracle_says_and_leaves_the_prefix_exact(name: str) -> None:
    model, linear_layers = tiny_models.build(name, layers=3)
    ids, prefix = _ids(), 54
    with recorded() as record, torch.no_grad():
        exact = model(ids).logits
        compiled = _compile(model, "int8")
        with lc.training_phase(prefix):
            logits = compiled(ids).logits
        assert (logits[:, :prefix] - exact[:, :prefix]).abs().max() < 1e-5
        assert (logits[:, prefix:] - exact[:, prefix:]).abs().max() > 1e-4, "quantization must be visible"
        assert len(record.calls) == linear_layers
        for call in record.calls:
            assert call.op == "lattn::decode"
            assert call.arguments["state_format"] == "int8/*x64"
            q = oracle(**call.arguments)
            plain = oracle(**{**call.arguments, "write": "exact"})
            effect = (plain.o - q.o).norm()
            assert effect > 0
            # Free-running token mode, 16 tokens: the bound of semantics §8.
            assert (call.outputs[0].double() - q.o).norm() <= 0.1 * effect

        graphs = len(record.graphs)
        with lc.training_phase(20):
            compiled(ids)
        with lc.training_phase(ids.shape[1]):
            all_prefix = compiled(ids).logits
        assert (all_prefix - exact).abs().max() < 1e-5, "a phase that is all prefix quantizes nothing"
        assert len(record.graphs) == graphs, "prefix lengths are data"


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_training_under_a_phase_reaches_prefix_and_suffix(name: str) -> None:
    model, _ = tiny_models.build(name, layers=3)
    model.train()
    ids = _ids()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()  # type: ignore[operator]
    with recorded(), lc.training_phase([30, 50]):
        logits = _compile(model, "fp8")(inputs_embeds=embedded).logits
        logits[:, 60:].logsumexp(-1).sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()
    assert (embedded.grad[:, :30].abs().amax((1, 2)) > 0).all(), "suffix loss reaches prefix tokens"
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_training_without_a_phase_warns_once_that_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_SAID", set())
    model, _ = tiny_models.build("qwen3_next", layers=3)
    model.train()
    ids = _ids(1, 9)
    compiled = _compile(model, "int8")
    with recorded() as record, pytest.warns(lc.LattnWarning, match="training without a phase: 2 chunk-form"):
        loss = compiled(ids, labels=ids, use_cache=False).loss
    assert {c.op for c in record.calls} == {"lattn::chunk"}
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)


def test_prefill_in_int8_is_exact_and_decode_is_quantized() -> None:
    model, linear_layers = tiny_models.build("qwen3_next", layers=3)
    ids = _ids()
    with recorded() as record, torch.no_grad():
        forward = _compile(model.forward, "int8")  # type: ignore[arg-type]
        want, got = _generate(model, ids, 4), _generate_compiled(model, ids, forward, 4)
        assert (got.logits[0] - want.logits[0]).abs().max() < 1e-5, "prefill has no suffix"
        assert (got.logits[2] - want.logits[2]).abs().max() > 1e-5, "decode stores its state in int8"
    decode = [c for c in record.calls if c.op == "lattn::decode"]
    assert len(decode) == 3 * linear_layers
    for call in decode:
        assert call.arguments["state_format"] == "int8/*x64"
        want_o = oracle(**call.arguments).o
        assert (call.outputs[0].double() - want_o).norm() / want_o.norm() < 1e-5


def test_changing_the_batch_sequence_by_sequence_equals_running_alone() -> None:
    """Lengths per sequence are data, and a padded row is nobody's business (tokens beyond n vanish)."""
    model, _ = tiny_models.build("qwen3_next", layers=3)
    ids = _ids()
    with recorded(), torch.no_grad():
        compiled = _compile(model, "int8")
        with lc.training_phase([10, 60], sequence_lengths=[40, 70]):
            both = compiled(ids).logits
        with lc.training_phase([10], sequence_lengths=[40]):
            alone = compiled(ids[:1]).logits
    assert (both[0, :40] - alone[0, :40]).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES if ALL else NAMES[::2])
def test_inductor_generates_what_eager_generates(name: str) -> None:
    model, linear_layers = tiny_models.build(name, layers=2)
    ids = _ids()
    before = backend.compile_count()
    with torch.no_grad():
        # One of any length at once, one as it comes; the others differ in nothing that a compiler sees.
        dynamic = name == "qwen3_next" and not ALL
        compiled = torch.compile(
            model.forward, backend="lattn_compile", fullgraph=True, dynamic=dynamic or None, options={"policy": "exact"}
        )
        _check_generation(model, ids, compiled)
        assert backend.compile_count() - before <= 3
        report = lc.last_report()
        assert report is not None
        assert len(report.rewritten) == linear_layers
        assert report.graph_breaks == []
        if name == "qwen3_next":
            counts = [backend.compile_count()]
            for other in (ids[:, :50], torch.cat([ids, ids[:1]]), ids[:, :61]) if ALL else (ids[:, :50],):
                _check_generation(model, other, compiled)
                counts.append(backend.compile_count())
            new_length, *more = (b - a for a, b in pairwise(counts))
            assert new_length <= (0 if dynamic else 1)
            assert not more or (more[0] <= 2 and more[1] == 0)


@pytest.mark.skipif(not ALL, reason="LATTN_COMPILE_ALL=1; below, one trains in a phase that is all prefix")
@pytest.mark.parametrize("name", NAMES)
def test_inductor_trains_as_eager_trains(name: str) -> None:
    model, linear_layers = tiny_models.build(name, layers=2)
    model.train()
    ids = _ids()
    model(ids, labels=ids).loss.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    before = backend.compile_count()
    compiled = _compile(model)
    compiled(ids, labels=ids).loss.backward()
    for n, p in model.named_parameters():
        if want[n] is not None:
            assert (p.grad - want[n]).abs().max() < 1e-5, n
    report = lc.last_report()
    assert report is not None
    assert len(report.rewritten) == linear_layers
    assert backend.compile_count() - before == 1


def test_inductor_runs_the_phase_without_recompiling_for_other_lengths() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    model.train()
    ids = _ids(1)
    compiled = _compile(model, "int8")
    before = backend.compile_count()
    losses = []
    for prefix in (54, 20, 54, 70):
        model.zero_grad(set_to_none=True)
        with lc.training_phase(prefix):
            loss = compiled(ids, labels=ids).loss
            loss.backward()
        losses.append(loss.item())
    assert backend.compile_count() - before == 1
    assert losses[0] == losses[2], "same lengths, same bits"
    assert len({losses[0], losses[1], losses[3]}) == 3

    got = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    eager = model(ids, labels=ids).loss
    eager.backward()
    assert losses[3] == pytest.approx(eager.item(), abs=1e-5), "all prefix is exact"
    for n, p in model.named_parameters():
        assert p.grad is None or (got[n] - p.grad).abs().max() < 1e-5, n  # type: ignore[operator]
