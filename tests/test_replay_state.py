"""What replay and two-precision modes carry: it continues, saves, moves and reorders as one (semantics §5)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from lattn_compile.errors import StateError
from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.functional import linear_attention
from lattn_compile.policy import Policy, Replay, Token, TwoPrecision
from lattn_compile.replay_state import ReplayState
from tests.ops.cases import inputs

REPLAY = Policy(Int8(8), write=Replay(4, factors="int8"))
POLICIES = {
    "replay": REPLAY,
    "fp8 factors, after": Policy(Fp8(), write=Replay(5, factors="fp8_e4m3"), readout="after_write"),
    "bf16 factors, stochastic": Policy(Int8(), write=Replay(4, factors="bf16"), rounding="stochastic", seed=5),
    "fp32 factors, nvfp4, feedback": Policy(Nvfp4(), write=Replay(6), feedback="int8", rotation="hadamard_k"),
    "a window of 1": Policy(Int8(8), write=Replay(1)),
    "two precisions": Policy(write=TwoPrecision(4, read=Int8(8))),
    "two precisions, bf16 anchor": Policy(write=TwoPrecision(5, anchor="bf16"), rounding="stochastic"),
}
any_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
LENGTHS = [7, 3, 0]


def tokens(count: int, seed: int = 0, decay: str = "head") -> list[Tensor]:
    return inputs(3, count, key_dim=16, value_dim=24, dtype=torch.float32, seed=seed, decay=decay)[:5]


def run(x: list[Tensor], policy: Policy, state: Any = None, **kwargs: Any) -> tuple[Tensor, ReplayState]:
    o, final = linear_attention(*x, policy=policy, initial_state=state, output_final_state=True, **kwargs)
    assert isinstance(final, ReplayState)
    return o, final


def start() -> Tensor:
    return inputs(3, 1, key_dim=16, value_dim=24, dtype=torch.float32)[5]


def equal(a: ReplayState, b: ReplayState) -> bool:
    """What is stored is the same, bit for bit."""
    mine, theirs = (dict(parts(x)) for x in (a, b))
    names = mine.keys() & theirs.keys() | {n for n in mine.keys() ^ theirs.keys() if "values" not in n}
    waiting = a.cursor < 0  # the exact state of others says nothing
    for of in (mine, theirs):
        if "['anchor']['exact']" in of:
            of["['anchor']['exact']"] = of["['anchor']['exact']"][waiting]
    return all(torch.equal(_bits(mine[n]), _bits(theirs[n])) for n in names)


def parts(state: ReplayState) -> list[tuple[str, Tensor]]:
    return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(state)[0]]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@any_policy
@pytest.mark.parametrize("how", ["copy", "pickle", "file"])
def test_a_state_saved_in_mid_window_continues_as_if_never_stopped(policy: Policy, how: str, tmp_path: Path) -> None:
    _, final = run(tokens(7), policy, start(), prefix_lengths=[5, 3, 0], position=11)
    if how == "copy":
        again = copy.deepcopy(final)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(final))
    else:
        torch.save({"cache": [final]}, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt", weights_only=True)["cache"][0]
    assert equal(final, again)
    assert torch.equal(again.dense(), final.dense())
    more = tokens(9, seed=1)
    mine, theirs = run(more, policy, final), run(more, policy, again)
    assert torch.equal(mine[0], theirs[0]) and equal(mine[1], theirs[1])


@any_policy
def test_bytes_are_those_that_the_policy_promises(policy: Policy) -> None:
    _, final = run(tokens(7), policy, start())
    position = 0 if final.position is None else 3 * 8
    assert final.nbytes - position == 3 * policy.nbytes(2, 4, 16, 24)


@any_policy
def test_one_token_at_a_time_reads_what_one_call_reads(policy: Policy) -> None:
    x = [y.double() for y in tokens(13)]  # inside a window other shapes sum in another order: no code may flip
    whole, want = run(x, policy, start().double())
    state: Any = start().double()
    rows = []
    for t in range(13):
        o, state = run([y[:, t : t + 1] for y in x], policy, state)
        rows.append(o)
    assert (torch.cat(rows, 1) - whole).norm() <= 1e-12 * whole.norm()
    assert state.cursor.tolist() == want.cursor.tolist()
    assert (state.dense() - want.dense()).norm() <= 1e-12 * want.dense().norm()


@any_policy
def test_sequences_reorder_and_drop_with_everything_they_carry(policy: Policy) -> None:
    x, more = tokens(7), tokens(6, seed=1)
    _, final = run(x, policy, start(), prefix_lengths=LENGTHS, sequence_ids=[4, 5, 6], position=2)
    order = torch.tensor([2, 0, 2])
    kwargs = {"sequence_ids": [6, 4, 6]}
    o, state = run([y[order] for y in more], policy, final.index_select(order), **kwargs)
    all_o, all_state = run(more, policy, final, sequence_ids=[4, 5, 6])
    assert torch.equal(o[1], all_o[0]) and torch.equal(state.dense()[1], all_state.dense()[0])
    assert state.cursor.tolist() == [all_state.cursor.tolist()[i] for i in (2, 0, 2)]


@any_policy
def test_a_state_is_a_pytree_of_per_sequence_tensors(policy: Policy) -> None:
    _, final = run(tokens(7), policy, start(), prefix_lengths=LENGTHS)
    leaves, spec = pytree.tree_flatten(final)
    assert {x.shape[0] for x in leaves} == {3}
    assert equal(pytree.tree_unflatten(leaves, spec), final)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert equal(final, final.detach()) and equal(final, final.to("cpu"))


@any_policy
def test_a_call_without_tokens_changes_nothing(policy: Policy) -> None:
    _, final = run(tokens(7), policy, start(), prefix_lengths=LENGTHS)
    o, again = run([x[:, :0] for x in tokens(7)], policy, final)
    assert o.shape[1] == 0 and equal(final, again)
    o, again = run(tokens(7), policy, final, sequence_lengths=0)
    assert not o.any() and equal(final, again)


@any_policy
def test_the_exact_state_waits_for_its_first_suffix_token(policy: Policy) -> None:
    x = tokens(7)
    _, final = run(x, policy, start(), prefix_lengths=7)
    exact = linear_attention(*x, initial_state=start(), output_final_state=True)[1]
    assert final.cursor.tolist() == [-1, -1, -1]
    assert torch.equal(final.dense(), exact) and torch.equal(final.exact, exact)
    late = run(tokens(5, seed=1), policy, final, position=7)
    once = run([torch.cat(p, 1) for p in zip(x, tokens(5, seed=1), strict=True)], policy, start(), prefix_lengths=7)
    assert (late[0] - once[0][:, 7:]).norm() <= 1e-5 * late[0].norm()


@any_policy
def test_a_prefix_after_a_window_starts_from_the_dense_state(policy: Policy) -> None:
    _, final = run(tokens(6), policy, start())
    more = tokens(5, seed=1)
    o, state = run(more, policy, final, prefix_lengths=[2, 5, 0])
    exact = linear_attention(*more, initial_state=final.dense(), prefix_lengths=5, output_final_state=True)
    assert (o[0, :2] - exact[0][0, :2]).norm() <= 1e-6 * o[0, :2].norm()
    assert (state.dense()[1] - exact[1][1]).norm() <= 1e-6 * exact[1][1].norm()
    assert state.cursor[1] == -1 and torch.equal(o[2], run(more, policy, final)[0][2])


@pytest.mark.parametrize(
    "other",
    [
        Policy(Int8(8), write=Token()),
        Policy(Int8(8), write=Replay(5, factors="int8")),
        Policy(Int8(8), write=Replay(4)),
        Policy(Int8(16), write=Replay(4, factors="int8")),
        Policy(Int8(8), write=Replay(4, factors="int8"), feedback="int4"),
        Policy(Int8(8), write=Replay(4, factors="int8"), rotation="hadamard_k"),
        Policy(write=TwoPrecision(4)),
    ],
    ids=str,
)
def test_a_state_of_another_policy_is_refused_and_dense_is_the_way_out(other: Policy) -> None:
    _, final = run(tokens(6), REPLAY, start())
    with pytest.raises(StateError, match=r"initial_state: got ReplayState\(int8/\*x8, replay\(4\), int8 factors") as e:
        linear_attention(*tokens(5), policy=other, initial_state=final)
    assert "initial_state.dense()" in e.value.remedy
    linear_attention(*tokens(5), policy=other, initial_state=final.dense())
    exact = linear_attention(*tokens(5), policy="exact", initial_state=final)[0]
    assert torch.equal(exact, linear_attention(*tokens(5), initial_state=final.dense())[0])  # what a reader sees


@pytest.mark.parametrize("policy", [REPLAY, POLICIES["two precisions"]], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_with_states_in_and_out(policy: Policy, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter, dynamic=False)
    def step(x: list[Tensor], state: Any) -> Any:
        return linear_attention(*x, policy=policy, initial_state=state, output_final_state=True)

    _, state = run(tokens(6), policy, start())
    for seed in (1, 2, 3):  # one token, then over a flush
        x = [y[:, :2] for y in tokens(4, seed=seed)]
        want = run(x, policy, state)
        o, state = step(x, state)
        assert torch.equal(o, want[0]) and equal(state, want[1])
    assert counter.frame_count == 1


def test_gradients_flow_through_anchor_ring_and_read_copy() -> None:
    for policy in (REPLAY, POLICIES["two precisions"]):
        x, more = tokens(6), tokens(5, seed=1)
        whole = [torch.cat(p, 1).double().requires_grad_() for p in zip(x, more, strict=True)]
        state = start().double().requires_grad_()
        once = run(whole, policy, state)[0][:, 6:].square().sum()
        want = torch.autograd.grad(once, [*whole, state])
        first = run([y[:, :6] for y in whole], policy, state)[1]
        cut = run([y[:, 6:] for y in whole], policy, first)[0].square().sum()
        got = torch.autograd.grad(cut, [*whole, state])
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm()
        detached = run([y[:, 6:] for y in whole], policy, first.detach())[0].square().sum()
        assert torch.autograd.grad(detached, state, allow_unused=True) == (None,)
