"""What pools and packed states are given by mistake: refused by name, and the state as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import DtypeError, LattnError, PolicyError, SequenceError, ShapeError, StateError
from lattn_compile.packed.files import save_states
from lattn_compile.testing.inputs import make_inputs

HEADS = lc.Heads(2, 4, 8, 16, "head", True)


def tokens(count: int = 1, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    x = make_inputs("gdn", batch=batch, tokens=count, key_dim=8, value_dim=16, key_heads=2, seed=seed)
    return {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta")}


def make_pool(policy: Any = "int8", slots: int = 3) -> lc.StatePool:
    return lc.StatePool({"a": (policy, HEADS), "b": (policy, HEADS)}, slots=slots)


def exact(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 8, 16, generator=rng) for name in ("a", "b")}


@pytest.mark.parametrize("call", ["step", "verify"])
@pytest.mark.parametrize("how", ["as it is", "deepcopy", "pickle"])
def test_a_freed_slot_is_refused_where_slots_lie_on_the_host(call: str, how: str) -> None:
    pool = make_pool()
    slot = pool.allocate()
    indices = pool.indices([slot])
    pool["a"].step(**tokens(), state_indices=indices)
    pool.free(slot)
    pool = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}.get(how, lambda x: x)(pool)
    with pytest.raises(StateError, match=r"state_indices: got slot \d, which is nobody's"):
        getattr(pool["a"], call)(**tokens(), state_indices=indices)
    assert pool.allocate() == slot
    getattr(pool["a"], call)(**tokens(), state_indices=indices)


def test_a_slot_that_was_never_allocated_is_an_engines_own_business_until_one_is() -> None:
    pool = make_pool()
    pool["a"].step(**tokens(), state_indices=torch.tensor([1]), has_initial_state=torch.tensor([False]))
    pool.allocate()
    with pytest.raises(StateError, match="nobody's"):
        pool["a"].step(**tokens(), state_indices=torch.tensor([1]))


def test_a_staged_state_is_not_passed_over() -> None:
    pool = make_pool("int8-replay")
    slot = pool.allocate()
    pool.stage(slot, exact())
    with pytest.raises(StateError, match="was not handed over"):
        pool["a"].step(**tokens(), state_indices=torch.tensor([slot]))
    o = pool["a"].step(**tokens(), state_indices=pool.indices([slot]))
    alone = lc.QuantizedState("int8-replay").stage(exact()["a"][None])
    assert torch.equal(o, alone.step(**tokens()))


@pytest.mark.parametrize("named", [True, False], ids=["slots by index", "all slots"])
def test_drafts_of_a_sequence_that_was_freed_reach_nobody(named: bool) -> None:
    pool = make_pool("int8-replay", slots=2)
    first, second = pool.allocate(), pool.allocate()
    options = {"state_indices": pool.indices([first, second])} if named else {}
    order = [0, 1] if named else [first, second]
    state = pool["a"]
    state.step(**tokens(2, batch=2), **options)
    state.verify(**tokens(3, batch=2, seed=1), **options)
    pool.free(first)
    assert pool.allocate() == first  # somebody else's now
    state.accept(2)
    assert state.cursor is not None and state.cursor[first] == -1, "nothing is stored for the new sequence"
    alone = lc.QuantizedState("int8-replay")
    row = order.index(second) if not named else 1
    alone.step(**{n: x[row : row + 1] for n, x in tokens(2, batch=2).items()})
    alone.step(**{n: x[row : row + 1, :2] for n, x in tokens(3, batch=2, seed=1).items()})
    torch.testing.assert_close(state.dense()[second : second + 1], alone.dense(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        ((2, 3, 8, 16), "HV"),
        ((0, 4, 8, 16), "H"),
        ((2, 4, 8.0, 16), "K"),
        (("2", 4, 8, 16), "H"),
        ((2, 4, 8, np.int64(16)), "V"),
        ((2, 4, 8, 16, "foo"), "decay"),
        ((2, 4, 8, 16, "head", 1), "has_beta"),
    ],
    ids=str,
)
def test_sizes_that_no_layer_has_are_refused_when_a_pool_is_made(heads: tuple[Any, ...], name: str) -> None:
    with pytest.raises(StateError, match=rf"sites\['a'\]\[1\]\.{name}: got"):
        lc.StatePool({"a": ("int8", lc.Heads(*heads))}, slots=2)
    with pytest.raises(StateError, match=rf"heads\.{name}: got"):
        lc.QuantizedState("int8").allocate(lc.Heads(*heads), 2)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sites", lambda: lc.StatePool([("int8", HEADS)], slots=2)),  # type: ignore[arg-type]
        ("sites", lambda: lc.StatePool({}, slots=2)),
        ("rules", lambda: lc.StatePool({"a": ("int8", HEADS)}, slots=2, rules={"typo": "additive"})),
        (r"rules\['a'\]", lambda: lc.StatePool({"a": ("int8", HEADS)}, slots=2, rules={"a": "foo"})),
        ("rules", lambda: lc.StatePool({"a": ("int8", HEADS)}, slots=2, rules="additive")),  # type: ignore[arg-type]
        ("dtype", lambda: lc.StatePool({"a": ("int8", HEADS)}, slots=2, dtype=torch.float16)),
        ("rule", lambda: lc.QuantizedState("int8").allocate(HEADS, 2, rule="foo")),
        ("slots", lambda: lc.QuantizedState("int8").allocate(HEADS, -1)),
        ("heads", lambda: lc.QuantizedState("int8").allocate((2, 4, 8, 16), 2)),  # type: ignore[arg-type]
        ("slots", lambda: make_pool().indices(0)),  # type: ignore[arg-type]
        ("snapshot", lambda: (p := make_pool()).restore(None, p.allocate())),  # type: ignore[arg-type]
        ("states", lambda: save_states([], "nowhere")),  # type: ignore[arg-type]
        (r"states\['a'\]", lambda: save_states({"a": torch.zeros(1)}, "nowhere")),  # type: ignore[dict-item]
    ],
)
def test_a_pool_refuses_what_it_cannot_be_made_of(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(StateError, match=f"{name}: got"):
        make()


@pytest.mark.parametrize("seen", ["3", -5, None, 2.5, True, 2**70, np.int64(2), torch.tensor(2.0), [1, 2]], ids=str)
def test_tokens_seen_are_a_count(seen: Any) -> None:
    pool = make_pool(lc.Policy(lc.Int8(), rounding="stochastic"))
    slot = pool.allocate()
    with pytest.raises(SequenceError, match="seen: got"):
        pool.stage(slot, exact(), seen=seen)
    with pytest.raises(SequenceError, match="seen: got"):
        lc.QuantizedState(lc.Policy(lc.Int8(), rounding="stochastic")).stage(exact()["a"][None], seen=seen)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (DtypeError, "state_indices", {"state_indices": [0]}),
        (DtypeError, "has_initial_state", {"has_initial_state": [True]}),
        (DtypeError, "sequence_lengths", {"sequence_lengths": [1]}),
        (DtypeError, "cu_seqlens", {"cu_seqlens": [0, 1]}),
        (PolicyError, "padding_slot", {"padding_slot": "x"}),
        (PolicyError, "padding_slot", {"padding_slot": None}),
        (PolicyError, "use_gate_in_kernel", {"use_gate_in_kernel": 1}),
        (PolicyError, "lower_bound", {"lower_bound": "x"}),
        (PolicyError, "scale", {"scale": torch.tensor(1.0)}),
        (PolicyError, "rule", {"rule": None}),
        (DtypeError, "A_log", {"A_log": "x", "use_gate_in_kernel": True}),
        (DtypeError, "q", {"q": None}),
        (DtypeError, "v", {"v": np.zeros(3)}),
        (ShapeError, "q", {"q": torch.zeros(1, 2, 8)}),
        (ShapeError, "v", {"v": torch.zeros(1, 4, 16)}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_step_refuses_other_kinds_by_name_and_writes_nothing(
    error: type[LattnError], name: str, options: dict[str, Any]
) -> None:
    pool = make_pool("int8-replay")
    indices = pool.indices([pool.allocate()])
    pool["a"].step(**tokens(), state_indices=indices)
    before = {n: x.clone() for n, x in pool["a"].held().items()}
    with pytest.raises(error, match=f"{name}: got"):
        pool["a"].step(**{**tokens(), "state_indices": indices, **options})
    assert all(torch.equal(x, before[n]) for n, x in pool["a"].held().items())


def test_sequences_that_there_are_none_of_are_not_selected() -> None:
    state = lc.QuantizedState("int8").allocate(HEADS, 2)
    with pytest.raises(StateError, match=r"index: got \[5\]"):
        state.index_select(0, torch.tensor([5]))
    with pytest.raises(DtypeError, match="index: got"):
        state.index_select(0, [0])  # type: ignore[arg-type]
    with pytest.raises(StateError, match="repeats: got -1"):
        state.repeat_interleave(-1)


@pytest.mark.parametrize("call", ["step", "verify"])
def test_a_step_of_all_slots_does_not_pass_over_what_was_staged(call: str) -> None:
    pool = make_pool(slots=2)
    slots = [pool.allocate() for _ in range(2)]
    pool.stage(slots[1], exact())
    with pytest.raises(StateError, match=r"state_indices: got none, .* staged in \[1\] waits"):
        getattr(pool["a"], call)(**tokens(batch=2))
    pool.indices(slots)
    getattr(pool["a"], call)(**tokens(batch=2))


@pytest.mark.parametrize("staged", [0, 1])
def test_a_copy_that_is_refused_leaves_both_slots_as_they_were(staged: int) -> None:
    """The source's staged state, or the target's, while a third sequence's drafts wait."""
    pool = make_pool()
    source, target, third = pair = [pool.allocate() for _ in range(3)]
    pool["a"].verify(**tokens(2), state_indices=pool.indices([third]))
    pool.stage(pair[staged], exact())
    with pytest.raises(StateError, match="drafts wait"):
        pool.copy(source, target)
    assert [bool(pool.staged(slot)) for slot in pair] == [staged == 0, staged == 1, False]
    pool["a"].accept(0)
    pool.copy(source, target)
    assert bool(pool.staged(target)) == (staged == 0)
