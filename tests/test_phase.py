from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lattn_compile import phase
from lattn_compile.errors import DtypeError, LattnError, SequenceError, UnsupportedError
from lattn_compile.phase import training_phase
from tests.ops.cases import OPS, inputs, ints, options


def _values(lengths: torch.Tensor | None) -> Any:
    return None if lengths is None else lengths.tolist()


@pytest.mark.parametrize(
    ("given", "want"),
    [(3, 3), ([3, 0], [3, 0]), ((3, 0), [3, 0]), (torch.tensor(3), 3), (torch.tensor([3, 0]), [3, 0])],
)
def test_an_int_is_a_scalar_and_a_list_one_length_a_sequence(given: Any, want: Any) -> None:
    with training_phase(given, given):
        prefix, sequence = phase.current()
        assert prefix is not None and prefix.dtype == torch.int32
        assert _values(prefix) == _values(sequence) == want
    assert phase.current() == (None, None)


def test_sequence_lengths_are_optional() -> None:
    with training_phase(5):
        assert phase.current()[1] is None


def test_nested_phases_restore_the_outer_one_also_after_an_error() -> None:
    with training_phase(1):
        outer = phase.current()
        with pytest.raises(ZeroDivisionError), training_phase(2, 3):
            assert _values(phase.current()[0]) == 2
            raise ZeroDivisionError
        assert phase.current() is not None and phase.current()[0] is outer[0]
    assert phase.current() == (None, None)


def test_a_phase_object_can_be_entered_again() -> None:
    twice = training_phase(4)
    with twice, twice:
        pass
    with twice:
        assert _values(phase.current()[0]) == 4
    assert phase.current() == (None, None)


def test_a_callers_tensor_is_copied() -> None:
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    with training_phase(lengths, lengths):
        prefix, sequence = phase.current()
        lengths.zero_()
        assert _values(prefix) == _values(sequence) == [1, 2]
        assert prefix is not sequence  # Dynamo would otherwise guard on their being one tensor


@pytest.mark.parametrize(
    ("prefix", "sequence", "error", "text"),
    [
        (True, None, DtypeError, "prefix_lengths: got True; want an int, a list of ints or an int tensor"),
        (1.0, None, DtypeError, "prefix_lengths: got 1.0"),
        (None, None, DtypeError, "prefix_lengths: got None"),
        (-1, None, SequenceError, "prefix_lengths: got -1; want lengths >= 0"),
        ([], None, SequenceError, "prefix_lengths: got []"),
        ([2, "3"], None, DtypeError, "prefix_lengths: got [2, '3']"),
        (torch.tensor([0.5]), None, DtypeError, "prefix_lengths: got torch.float32; want an int tensor"),
        (torch.zeros(2, 2, dtype=torch.int32), None, SequenceError, "prefix_lengths: got shape [2, 2]; want [] or [N]"),
        (torch.tensor([-2, 1]), None, SequenceError, "prefix_lengths: got [-2, 1]; want lengths >= 0"),
        (1, [4, -4], SequenceError, "sequence_lengths: got [4, -4]"),
        ([1, 2], [4, 4, 4], SequenceError, "sequence_lengths: got 3 lengths; want 2, as many as prefix_lengths"),
        ([1, 5], [4, 4], SequenceError, "prefix_lengths: got [1, 5]; want at most sequence_lengths = [4, 4]"),
    ],
)
def test_bad_lengths_are_refused_on_entry(prefix: Any, sequence: Any, error: type[LattnError], text: str) -> None:
    with pytest.raises(error) as caught, training_phase(prefix, sequence):
        raise AssertionError("entered")
    assert text in str(caught.value)
    assert phase.current() == (None, None)


def test_an_int_prefix_may_exceed_a_sequence() -> None:
    with training_phase(54, [20, 3]):
        assert _values(phase.current()[0]) == 54  # the op clamps it to each


def test_other_threads_see_the_phase_and_cannot_start_their_own() -> None:
    seen: list[Any] = []

    def other() -> None:
        seen.append(_values(phase.current()[0]))
        try:
            with training_phase(9):
                seen.append("entered")
        except UnsupportedError as error:
            seen.append(str(error))

    with training_phase(7):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen[0] == 7 and "another thread's phase is active" in seen[1]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[2:] == [None, "entered"]


def _step(*x: torch.Tensor) -> torch.Tensor:
    prefix, sequence = phase.current()
    return OPS["decode"](*x, None, prefix, sequence, None, **options("decode", "token"))[0].sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(3,), (4,), (17,), (0,)], id="int"),
        pytest.param([([3, 5],), ([0, 20],), ([1, 1],)], id="list"),
        pytest.param([(torch.tensor([3, 5]),), (torch.tensor([0, 20]),)], id="tensor"),
        pytest.param([(3, [9, 9]), (4, [20, 5])], id="prefix and sequence"),
    ],
)
def test_new_values_do_not_recompile_and_are_seen(backend: str, lengths: list[tuple[Any, ...]]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_step, backend=counter, fullgraph=True)
    results = []
    for given in lengths:
        tensors = inputs(dtype=torch.float32, grad=True)
        with training_phase(*given):
            got, want = compiled(*tensors), _step(*tensors)
            for a, b in zip(*(torch.autograd.grad(o.sum(), tensors) for o in (got, want)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        results.append(got)
    assert counter.frame_count == 1
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(results))


def test_a_backward_uses_the_phase_of_its_forward() -> None:
    # compiled graphs and the op itself keep the lengths that they were called with
    torch._dynamo.reset()
    compiled = torch.compile(_step, backend="aot_eager", fullgraph=True)
    gradients = []
    for step in (compiled, _step):
        tensors = inputs(dtype=torch.float32, grad=True)
        with training_phase(6):
            o = step(*tensors)
        with training_phase(13):
            gradients.append(torch.autograd.grad(o.sum(), tensors))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_checkpoint_recompute_inside_the_phase_is_bitwise() -> None:
    gradients = []
    for checkpointed in (True, False):
        tensors = inputs(dtype=torch.float32, grad=True)
        with training_phase([6, 2], [20, 11]):
            o = checkpoint(_step, *tensors, use_reentrant=False) if checkpointed else _step(*tensors)
            gradients.append(torch.autograd.grad(o.sum(), tensors))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def _enters(x: torch.Tensor) -> torch.Tensor:
    with training_phase(3):
        return x.sin()


def test_entering_inside_a_compiled_region_says_so() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lc.training_phase must be entered outside the compiled"):
        torch.compile(_enters, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=r"must be entered outside the compiled region"):
        torch.compile(_enters, backend="eager")(torch.ones(2))
    assert phase.current() == (None, None)
    assert torch.equal(_enters(torch.ones(2)), torch.ones(2).sin())


def test_inputs_of_the_graph_are_the_phases_own_tensors() -> None:
    torch._dynamo.reset()
    graphs = []

    def record(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    with training_phase(ints(3, 4)):
        torch.compile(_step, backend=record, fullgraph=True)(*inputs(dtype=torch.float32))
    (node,) = [n for n in graphs[0].graph.nodes if n.target is OPS["decode"]]
    assert node.args[7].op == "placeholder" and node.args[8] is None
