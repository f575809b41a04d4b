"""Where `lc.training_phase` cannot reach a spelled-out recurrence it says so, and never computes something else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.errors import PhaseError, SequenceError
from lattn_compile.testing.backend import recorded
from tests import tiny_models
from tests.passes.spelled.chunk_spellings import CHUNKED
from tests.passes.spelled.harness import worst_error
from tests.test_phase_spelled import B, H, K, Layer, T, V, compile_, inputs, loop, op, token

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())
    yield


# --- what cannot be counted is refused by name ------------------------------------------------------------------------


def _stepped_while(*x: Tensor) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.while_loop import while_loop

    q, k, v, g, beta, S = x

    def body(t: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        now = (y.index_select(1, t.reshape(1)).squeeze(1) for y in (q, k, v, g, beta))
        return t + 1, token(*now, S)[1]

    return while_loop(lambda t, S: t < T, body, (torch.zeros((), dtype=torch.int64), S))  # type: ignore[no-any-return]


def _carried_with_a_second_state(*x: Tensor) -> tuple[Tensor, ...]:
    from torch._higher_order_ops.scan import scan

    def both(carry: Any, now: Any) -> Any:
        o, S = token(*now, carry[0])
        return (S.clone(), torch.tanh(carry[1] + now[1])), o

    (S, n), o = scan(both, (x[5], torch.zeros(B, H, K)), tuple(y.transpose(0, 1) for y in x[:5]))
    return o, S, n


def _chunks_and_then_tokens(*x: Tensor) -> tuple[Tensor, Tensor]:
    """The first token behind the chunk form is not recognised: the state of the loop behind it is just a value."""
    q, k, v = (y.repeat(1, 4, 1, 1) for y in x[:3])
    g = x[3].repeat(1, 4, 1)[..., None] * torch.linspace(0.1, 1, K)
    o, S = CHUNKED["gla_slices"][0](*(y[:, :16] for y in (q, k, v, g, g)), x[5])
    out = [o]
    for t in range(16, 20):
        S = S * g[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S)[:, None])
    return torch.cat(out, 1), S


@torch.compiler.nested_compile_region
def _segment(*x: Tensor) -> tuple[Tensor, Tensor]:
    return loop(*x)


def _segments_of_one_region(*x: Tensor) -> tuple[Tensor, Tensor]:
    o, S = _segment(*(y[:, :3] for y in x[:5]), x[5])
    p, S = _segment(*(y[:, 3:] for y in x[:5]), S)
    return torch.cat([o, p], 1), S


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (_stepped_while, "one token in the body of a while_loop that is kept"),
        (_carried_with_a_second_state, "one token in the body of a scan that is kept"),
        (_segments_of_one_region, "gdn#0 in a region that serves several places, after different numbers of tokens"),
        (_chunks_and_then_tokens, "whose first state is computed from several values"),
    ],
    ids=["while_loop", "scan", "regions", "computed"],
)
def test_tokens_that_no_graph_can_count_are_refused_inside_a_phase_only(f: Any, text: str) -> None:
    x = inputs(grad=False)
    with recorded(), torch.no_grad():
        compiled = compile_(f)
        outside = compiled(*x)
        for _ in range(2):
            with pytest.raises(PhaseError, match=text), lc.training_phase(3):
                compiled(*x)
        assert worst_error(compiled(*x), outside) == 0
        exact = compile_(f, "exact")
        with lc.training_phase(3):
            assert worst_error(exact(*x), f(*x)) < 1e-4  # nothing is quantized, so nothing has to be counted
        with pytest.raises(PhaseError, match=text), lc.training_phase(3, 5):
            exact(*x)


def test_a_recurrence_behind_a_graph_break_is_refused() -> None:
    def f(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, S = loop(*(y[:, :3] for y in x[:5]), x[5])
        torch._dynamo.graph_break()
        p, S = loop(*(y[:, 3:] for y in x[:5]), S)
        return torch.cat([o, p], 1), S

    x = inputs(grad=False)
    with recorded(), torch.no_grad():
        compiled = torch.compile(f, backend="lattn_compile", options={"policy": "int8"})
        with pytest.raises(PhaseError, match="comes from before a graph break"), lc.training_phase(4):
            compiled(*x)
        assert worst_error(compiled(*x), op(*x)) < 1e-5


def test_a_break_before_the_recurrence_is_no_harm() -> None:
    def f(q: Tensor, *x: Tensor) -> tuple[Tensor, Tensor]:
        q = q.sin()
        torch._dynamo.graph_break()
        return loop(q, *x[:4], torch.zeros(B, H, K, V))

    x = inputs(grad=False)
    with recorded(), torch.no_grad(), lc.training_phase([3, 5]):
        got = torch.compile(f, backend="lattn_compile", options={"policy": "int8"})(*x)
        assert worst_error(got, op(x[0].sin(), *x[1:5], torch.zeros(B, H, K, V))) < 1e-5


def test_as_many_lengths_as_sequences() -> None:
    flat = tuple(y.transpose(1, 2).flatten(0, 1)[:, :, None] for y in inputs(grad=False)[:5])
    x = (*flat, inputs(grad=False)[5].flatten(0, 1)[:, None])
    with recorded(), torch.no_grad():
        compiled = compile_(loop)
        with pytest.raises(SequenceError, match="keep batch and heads on axes of their own"), lc.training_phase([3, 5]):
            compiled(*x)
        ids = {"sequence_ids": [1, 2]}
        with pytest.raises(SequenceError, match=r"sequence_ids: .*Give one a") as error, lc.training_phase(3, **ids):
            compiled(*x)
        assert "one int for all" not in str(error.value)
        with lc.training_phase(3):  # one for all goes
            assert worst_error(compiled(*x), op(*x)) < 1e-5
        torch._dynamo.reset()
        compiled = compile_(loop)
        with lc.training_phase([3, 5]):
            compiled(*inputs(grad=False))
        with (
            pytest.raises(SequenceError, match=r"3 numbers in lc\.training_phase; want 2"),
            lc.training_phase([3, 5, 1]),
        ):
            compiled(*inputs(grad=False))


class _Checkpointed(nn.Module):
    def forward(self, *x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(_own_call, *x, use_reentrant=False)


def _own_call(*x: Tensor) -> tuple[Tensor, Any]:
    return lc.linear_attention(*x[:5], initial_state=x[5], scale=1.0, policy="int8")


def _spelled(*x: Tensor) -> tuple[Tensor, Tensor]:
    return loop(*x)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("layer", [_spelled, _own_call, _Checkpointed()], ids=["spelled", "own call", "checkpoint"])
def test_lengths_of_another_batch_are_forgotten_with_the_call_that_was_refused(layer: Any, fullgraph: bool) -> None:
    def inputs_of(batch: int) -> tuple[Tensor, ...]:
        return tuple(y[:1].expand(batch, *y.shape[1:]).clone() for y in inputs(grad=False))

    compiled = torch.compile(layer, backend="lattn_compile", fullgraph=fullgraph, options={"policy": "int8"})
    with recorded() as record, torch.no_grad():
        for batch, wrong, right in [(2, [3], [3, 5]), (3, [3, 5], [3, 5, 1]), (4, [3, 5], [3, 5, 1, 0])]:
            x = inputs_of(batch)
            with pytest.raises(SequenceError, match="prefix_lengths") as error, lc.training_phase(wrong):
                compiled(*x)
            assert re.search(rf"got .*{len(wrong)}\D.*want .*{batch}\D", str(error.value)), error.value
            with lc.training_phase(right):
                assert worst_error(compiled(*x)[:1], op(*x)[:1]) < 1e-5
    assert not record.report.graph_breaks and not record.report.skipped_frames


def test_a_model_trains_on_after_lengths_of_another_batch() -> None:
    """A library's function knows nothing of a phase: run eagerly, in place of a refusal, it would train exactly."""
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.arange(2 * T).reshape(2, T)
    compiled = torch.compile(model, backend="lattn_compile", options={"policy": "int8"})
    with recorded() as record:
        with (
            pytest.raises(SequenceError, match=r"prefix_lengths: got shape \[1\]; want .*\[2\]"),
            lc.training_phase([3]),
        ):
            compiled(ids, use_cache=False)
        with lc.training_phase([3, 5]):
            compiled(ids, use_cache=False).logits.sum().backward()
    assert [call.op for call in record.calls if call.op == "lattn::decode"]
    assert not record.report.graph_breaks and not record.report.skipped_frames


@pytest.mark.parametrize("grad", [True, False])
def test_a_state_from_outside_is_a_reason_to_say_where_tokens_are_counted_from(grad: bool) -> None:
    compiled = compile_(loop)
    with recorded(), lc.training_phase(3), pytest.warns(lc.LattnWarning, match="count from its own first one"):
        compiled(*inputs(grad=grad))


def test_a_site_that_is_left_as_it_is_spelled_needs_nothing_of_the_phase() -> None:
    """Its state leaves the graph dense, which stochastic rounding does not survive (DENSE_CACHE)."""
    x = inputs(grad=False)
    with recorded() as record, torch.no_grad():
        compiled = compile_(loop, lc.Policy(lc.Int8(), rounding="stochastic"))
        for given in (None, (3,), ([1, 2], [3, 4])):
            with contextlib.nullcontext() if given is None else lc.training_phase(*given):
                assert worst_error(compiled(*x), loop(*x)) < 1e-6
        assert [s.reason.code for s in record.report.left if s.reason] == ["DENSE_CACHE"]
        assert record.lattn_ops == 0


# --- graphs that no backend runs --------------------------------------------------------------------------------------


def _exported() -> torch.export.ExportedProgram:
    return torch.export.export(Layer(), inputs(grad=False), strict=False)


@pytest.mark.parametrize(
    "how", [lc.rewrite, lambda p, policy: lc.inspect(p, policy=policy)], ids=["rewrite", "inspect"]
)
def test_a_program_is_not_rewritten_in_a_phase_that_it_would_not_read(how: Any) -> None:
    program = _exported()
    with lc.training_phase(3), pytest.raises(PhaseError, match="a rewrite of a graph inside a phase"):
        how(program, "int8")
    with lc.training_phase(3):
        how(program, "exact")  # prefix and suffix are the same to it
    how(program, "int8")


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_made_in_a_phase_keeps_its_lengths(strict: bool) -> None:
    class Calls(nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return lc.linear_attention(*x[:5], initial_state=x[5], scale=1.0)[0]

    x = inputs(grad=False)
    with lc.training_phase([2, 5]), lc.capture():
        program = torch.export.export(Calls(), x, strict=strict)
    module = lc.rewrite(program, "int8").module.module()
    with lc.training_phase(1):
        got = module(*x)
    with lc.training_phase([2, 5]):
        assert worst_error([got], op(*x)[:1]) < 1e-5


def test_a_graph_that_was_compiled_without_a_tracer_refuses_other_kinds() -> None:
    taken: list[fx.GraphModule] = []

    def take(gm: fx.GraphModule, _: Any) -> Any:
        taken.append(gm)
        return gm.forward

    x = inputs(grad=False)
    with torch.no_grad():
        torch.compile(loop, backend=take, fullgraph=True)(*x)
        with recorded():
            run = backend.lattn_compile(taken[0], list(x), options={"policy": "int8"})
            want = run(*x)
            with pytest.raises(PhaseError, match="compiled for no phase"), lc.training_phase(3):
                run(*x)
            assert worst_error(run(*x), want) == 0
