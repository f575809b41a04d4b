"""Training computes a forward more than once, later, and on other threads: always under the phase it first had.

Activation checkpoints (reentrant and not, eager, compiled around and compiled inside), gradient accumulation, backwards
behind the `with`, and stochastic rounding, whose bits are the same every time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lattn_compile as lc
from lattn_compile import phase
from lattn_compile.testing.backend import recorded
from tests.test_phase_spelled import B, inputs, loop

pytestmark = [pytest.mark.filterwarnings("ignore")]

MINE: tuple[Any, ...] = ([2, 5], [6, 5])
OTHER: tuple[Any, ...] = ([4, 0], [5, 6])

STOCHASTIC = lc.Policy(lc.Int8(), rounding="stochastic", seed=3)
POLICIES = [
    lc.Policy(lc.Int8()),
    STOCHASTIC,
    lc.Policy(lc.Fp8(), write=lc.Chunk(4), rounding="stochastic", readout="after_write"),
    lc.Policy(lc.Int8(), write=lc.Replay(3, factors="int8")),
    lc.Policy(lc.Fp8(), write=lc.TwoPrecision()),
    lc.Policy(lc.Int8(), feedback="int4", rotation="hadamard_k"),
]
reentrant = pytest.mark.parametrize("use_reentrant", [True, False])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert phase.current() == (None, None)


def layer(policy: Any) -> Callable[..., Tensor]:
    """A layer whose last op is not ours: its backward is what asks for the recompute."""

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        o, _ = lc.linear_attention(q * 1.5, k, v, g, beta, policy=policy, use_qk_l2norm_in_kernel=True)
        return o.sin() @ torch.ones(o.shape[-1], 3)

    return forward


def spelled(*x: Tensor) -> Tensor:
    return loop(x[0] * 1.5, *x[1:5], torch.zeros(B, *x[0].shape[2:], x[2].shape[-1]))[0].sin()


def leaves() -> tuple[Tensor, ...]:
    return inputs()[:5]


def grads(x: tuple[Tensor, ...]) -> list[Tensor]:
    found = [y.grad for y in x]
    assert all(d is not None for d in found)
    return found  # type: ignore[return-value]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_a_thread(f: Callable[[], Any]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            f()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def backward_inside(run: Callable[[], Tensor]) -> None:
    with lc.training_phase(*MINE):
        run().square().sum().backward()


def backward_behind(run: Callable[[], Tensor]) -> None:
    with lc.training_phase(*MINE):
        o = run()
    o.square().sum().backward()


def backward_in_another(run: Callable[[], Tensor]) -> None:
    with lc.training_phase(*MINE):
        o = run()
    with lc.training_phase(*OTHER):
        o.square().sum().backward()
        assert phase.current()[0].tolist() == OTHER[0]  # type: ignore[union-attr]


def backward_on_a_thread(run: Callable[[], Tensor]) -> None:
    with lc.training_phase(*MINE):
        o = run()
    with lc.training_phase(*OTHER):  # as autograd's own threads do for a GPU
        on_a_thread(lambda: o.square().sum().backward())


WHEN = [backward_inside, backward_behind, backward_in_another, backward_on_a_thread]
when = pytest.mark.parametrize("when", WHEN)


def trained(f: Callable[..., Tensor], when: Callable[[Callable[[], Tensor]], None] = backward_inside) -> list[Tensor]:
    x = leaves()
    when(lambda: f(*x))
    return grads(x)


# --- activation checkpoints -------------------------------------------------------------------------------------------


@when
@reentrant
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_checkpointed_layer_recomputes_under_the_phase_of_its_forward(
    policy: lc.Policy, use_reentrant: bool, when: Any
) -> None:
    f = layer(policy)
    got = trained(lambda *x: checkpoint(f, *x, use_reentrant=use_reentrant), when)  # type: ignore[arg-type, return-value]
    assert same(got, trained(f))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_phases_used_here_are_not_the_same_to_a_layer(policy: lc.Policy) -> None:
    f = layer(policy)
    outputs = []
    for given in (MINE, OTHER, None):
        with contextlib.nullcontext() if given is None else lc.training_phase(*given):
            outputs.append(f(*leaves()))
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@when
@reentrant
@pytest.mark.parametrize("f", [layer(None), spelled], ids=["captured", "spelled out"])
def test_a_checkpoint_around_compiled_code_recomputes_under_the_phase_of_its_forward(
    f: Any, use_reentrant: bool, when: Any
) -> None:
    with recorded() as record:
        compiled = torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC})
        plain = trained(compiled)
        graphs = len(record.graphs)
        got = trained(lambda *x: checkpoint(compiled, *x, use_reentrant=use_reentrant), when)  # type: ignore[arg-type]
        assert {c.arguments["rounding"] for c in record.calls} == {"stochastic"}
        # A reentrant checkpoint runs its forward without gradients, which is another graph.
        assert len(record.graphs) == graphs + use_reentrant
    assert same(got, plain)


@pytest.mark.parametrize("when", [backward_behind, backward_in_another])
@reentrant
@pytest.mark.parametrize("f", [layer(None), spelled], ids=["captured", "spelled out"])
def test_a_checkpoint_inside_compiled_code_keeps_its_lengths(f: Any, use_reentrant: bool, when: Any) -> None:
    def forward(*x: Tensor) -> Tensor:
        return checkpoint(f, *x, use_reentrant=use_reentrant)  # type: ignore[return-value]

    with recorded():
        plain = trained(torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC}))
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC})
        assert same(trained(compiled, when), plain)


def test_inductor_recomputes_with_the_lengths_of_its_forward() -> None:
    f = layer(None)

    def forward(*x: Tensor) -> Tensor:
        return checkpoint(f, *x, use_reentrant=False)  # type: ignore[return-value]

    results = [
        trained(torch.compile(g, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC}), how)
        for g, how in ((f, backward_inside), (forward, backward_in_another))
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@reentrant
def test_a_forward_outside_of_a_phase_is_recomputed_outside_of_one(use_reentrant: bool) -> None:
    f = layer(POLICIES[0])
    plain, x = leaves(), leaves()
    f(*plain).sum().backward()
    o = checkpoint(f, *x, use_reentrant=use_reentrant)
    with lc.training_phase(*MINE):
        o.sum().backward()  # type: ignore[union-attr]
    assert same(grads(x), grads(plain))


@reentrant
def test_a_phase_inside_a_checkpointed_function_is_entered_again(use_reentrant: bool) -> None:
    f = layer(POLICIES[0])

    def own(*x: Tensor) -> Tensor:
        with lc.training_phase(*MINE):
            return f(*x)

    x = leaves()
    with lc.training_phase(*OTHER):
        o = checkpoint(own, *x, use_reentrant=use_reentrant)
        on_a_thread(lambda: o.square().sum().backward())  # type: ignore[union-attr]
    assert same(grads(x), trained(f))


def test_threads_that_recompute_under_one_phase_do_not_wait_for_one_another() -> None:
    """As autograd's threads of several devices do; a lock would let them wait for one another's backwards for ever."""
    together = threading.Barrier(2)
    wait = [False]

    def f(*x: Tensor) -> Tensor:
        if wait[0]:
            together.wait(timeout=20)
        return layer(POLICIES[0])(*x)

    with lc.training_phase(*MINE):
        runs = [checkpoint(f, *leaves(), use_reentrant=False).sum() for _ in range(2)]  # type: ignore[union-attr]
        wait[0] = True
        threads = [threading.Thread(target=o.backward) for o in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not together.broken


def test_a_checkpoint_gives_no_other_thread_a_phase_of_its_own() -> None:
    def own(*x: Tensor) -> Tensor:
        with lc.training_phase(*MINE):
            return layer(POLICIES[0])(*x)

    with lc.training_phase(*OTHER), pytest.raises(lc.LattnError, match="another thread's phase is active"):
        on_a_thread(lambda: checkpoint(own, *leaves(), use_reentrant=False))


def test_checkpoints_in_checkpoints_and_sequences_of_them() -> None:
    first, second = layer(STOCHASTIC), layer(POLICIES[3])

    def both(x: tuple[Tensor, ...]) -> Tensor:
        o = first(*x)
        return second(x[0], x[1], torch.cat([o, o], -1)[..., : x[2].shape[-1]], *x[3:])

    def nested(*x: Tensor) -> Tensor:
        inner = checkpoint(lambda *y: (*y[:2], torch.cat([first(*y)] * 2, -1), *y[3:]), *x, use_reentrant=False)
        return second(*inner)  # type: ignore[misc]

    plain = trained(lambda *x: both(x))
    assert same(trained(lambda *x: checkpoint(nested, *x, use_reentrant=False), backward_in_another), plain)  # type: ignore[arg-type, return-value]

    weight = torch.eye(3).requires_grad_()
    stages = [lambda o: (o @ weight).tanh(), lambda o: o * 2, lambda o: o @ weight]

    def run(sequential: bool) -> list[Tensor]:
        x = leaves()
        with lc.training_phase(*MINE):
            stage = [lambda v: first(*x[:2], v, *x[3:]), *stages]
            if sequential:
                o = checkpoint_sequential(stage, 2, x[2], use_reentrant=False)
            else:
                o = x[2]
                for s in stage:
                    o = s(o)
        o.square().sum().backward()
        return grads(x)

    assert same(run(True), run(False))


def test_an_error_in_a_recompute_leaves_the_phase_as_it_was() -> None:
    fail = [False]

    def f(*x: Tensor) -> Tensor:
        if fail[0]:
            raise ZeroDivisionError
        return layer(POLICIES[0])(*x)

    with lc.training_phase(*MINE):
        o = checkpoint(f, *leaves(), use_reentrant=False)
    fail[0] = True
    with lc.training_phase(*OTHER):
        before = phase.current()
        with pytest.raises(ZeroDivisionError):
            o.sum().backward()  # type: ignore[union-attr]
        assert phase.current() == before


def test_a_function_is_bound_to_one_phase_and_not_changed_otherwise() -> None:
    def f(a: int, *, b: int = 2) -> tuple[int, int, Any]:
        """Doc."""
        return a, b, phase.current()[0]

    with lc.training_phase(3):
        bound, inside = phase.bound(f), phase.current()[0]
        assert bound(1)[2] is inside
    assert (bound.__name__, bound.__doc__) == ("f", "Doc.")
    assert bound(1, b=5)[:2] == (1, 5)
    assert bound(1)[2] is inside and phase.current()[0] is None and phase.kind() == ""
    outside = phase.bound(f)
    with lc.training_phase(4):
        kind = phase.kind()
        assert outside(1)[2] is None and bound(1)[2] is inside
        assert phase.kind() == kind
        with lc.training_phase([1, 2]):
            pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="backwards of a GPU run on a thread of their own")
@reentrant
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_thread_of_a_gpu_recomputes_under_the_phase_of_the_forward(use_reentrant: bool, compiled: bool) -> None:
    def run(checkpointed: bool, when: Any) -> list[Tensor]:
        x = tuple(y.detach().cuda().requires_grad_() for y in leaves())

        def f(*x: Tensor) -> Tensor:
            return lc.linear_attention(*x, policy=STOCHASTIC)[0].sin()

        f = torch.compile(f, backend="lattn_compile", fullgraph=True) if compiled else f
        when(lambda: checkpoint(f, *x, use_reentrant=use_reentrant) if checkpointed else f(*x))
        return grads(x)

    assert same(run(True, backward_in_another), run(False, backward_inside))


# --- gradient accumulation --------------------------------------------------------------------------------------------

MICRO = [([2, 5], [6, 5]), ([0, 6], [4, 6]), ([6, 1], [6, 6])]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
@pytest.mark.parametrize("threads", [False, True], ids=["", "threads"])
def test_micro_batches_with_lengths_of_their_own_add_up(compiled: bool, order: list[int], threads: bool) -> None:
    """All forwards first, then the backwards in any order, on any thread: the sum of separate steps, bit for bit."""
    f: Any = layer(None if compiled else STOCHASTIC)
    with recorded() as record:
        if compiled:
            f = torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC})
        apart = []
        for i, given in enumerate(MICRO):
            x = leaves()
            with lc.training_phase(*given, sequence_ids=[2 * i, 2 * i + 1], position=i):
                f(*x).square().sum().backward()
            apart.append(grads(x))
        x, losses = leaves(), []
        for i, given in enumerate(MICRO):
            with lc.training_phase(*given, sequence_ids=[2 * i, 2 * i + 1], position=i):
                losses.append(f(*x).square().sum())
        for i in order:
            run = losses[i].backward
            on_a_thread(run) if threads else run()
        want = apart[order[0]]
        for i in order[1:]:
            want = [a + b for a, b in zip(want, apart[i], strict=True)]
        assert same(grads(x), want)
        assert len(record.graphs) == int(compiled)


# --- stochastic rounding ----------------------------------------------------------------------------------------------


def test_ids_and_positions_key_the_bits_and_are_data() -> None:
    x = inputs(grad=False)[:5]
    for f in (layer(None), spelled):
        torch._dynamo.reset()
        outputs = []
        with recorded() as record, torch.no_grad():
            compiled = torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": STOCHASTIC})
            for ids, position in (([7, 2**40], 5), ([7, 2**40], 5), ([8, 2**40], 5), ([7, 0], 5), ([7, 2**40], 6)):
                with lc.training_phase([0, 0], sequence_ids=ids, position=position):
                    outputs.append(compiled(*x))
            assert len(record.graphs) == 1
        first, again, other, high, later = outputs
        assert torch.equal(first, again)
        assert not torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])
        assert torch.equal(first[0], high[0]) and not torch.equal(first[1], high[1])
        assert not torch.equal(first[0], later[0])


def test_a_sequence_meets_the_same_bits_in_any_batch() -> None:
    x, f = inputs(grad=False)[:5], layer(STOCHASTIC)
    with torch.no_grad():
        with lc.training_phase([2, 3], sequence_ids=[11, 12], position=[4, 9]):
            both = f(*x)
        with lc.training_phase([3, 2], sequence_ids=[12, 11], position=[9, 4]):
            turned = f(*(y.flip(0) for y in x)).flip(0)
        with lc.training_phase([3], sequence_ids=[12], position=[9]):
            alone = f(*(y[1:] for y in x))
    assert torch.equal(both, turned)
    assert torch.equal(both[1:], alone)


def test_the_phase_names_sequences_for_lc_linear_attention_and_its_own_arguments_win() -> None:
    x = inputs(grad=False)[:5]

    def run(**named: Any) -> Tensor:
        return lc.linear_attention(*x, policy=STOCHASTIC, **named)[0]

    with torch.no_grad():
        want = run(sequence_ids=[5, 6], position=3)
        with lc.training_phase(0, sequence_ids=[5, 6], position=3):
            assert torch.equal(run(), want)
            assert torch.equal(run(sequence_ids=[1, 2], position=0), run(sequence_ids=[1, 2], position=torch.tensor(0)))
            assert not torch.equal(run(sequence_ids=[1, 2]), want)
        assert not torch.equal(run(), want)
