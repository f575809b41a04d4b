"""`StatePool`: slots that are reused, shared, staged and swapped, with several sites behind one number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import PolicyError, StateError
from lattn_compile.packed.layout import Heads
from lattn_compile.policy import Policy, Replay, TwoPrecision
from tests.ops.cases import inputs
from tests.packed.cases import rubbish, same

HEADS = Heads(2, 4, 16, 24, "head", True)
SITES = {
    "a": (Policy(lc.Int8(8), storage="packed"), HEADS),
    "b": (Policy(write=Replay(4, factors="int8")), HEADS),
    "c": (Policy(write=TwoPrecision(3)), HEADS),
    "d": (Policy(lc.Nvfp4(), rounding="stochastic"), HEADS),
}


def pool(slots: int = 3) -> lc.StatePool:
    made = lc.StatePool(SITES, slots)
    for site in made:
        rubbish(made[site].tensors)
    return made


def tokens(batch: int, count: int, seed: int = 0) -> list[Tensor]:
    return inputs(batch, count, key_dim=16, value_dim=24, dtype=torch.float32, seed=seed)[:5]


def step(p: lc.StatePool, slots: list[int | None], seed: int, count: int = 1) -> list[Tensor]:
    indices, x = p.indices(slots), tokens(len(slots), count, seed)
    return [p[site].step(*x, state_indices=indices) for site in p]


def rows(p: lc.StatePool, slot: int) -> list[Tensor]:
    return [x[slot].clone() for site in p for name, x in p[site].held().items() if name != "sequence_ids"]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def test_a_slot_full_of_nan_and_rubbish_starts_a_sequence_at_zero() -> None:
    mine, clean = pool(), lc.StatePool(SITES, 3)
    for p in (mine, clean):
        assert [p.allocate() for _ in range(3)] == [0, 1, 2]
    assert alike(step(mine, [2, None, 0], 1), step(clean, [2, None, 0], 1))
    assert alike(rows(mine, 2), rows(clean, 2)) and alike(rows(mine, 0), rows(clean, 0))


def test_a_reused_slot_remembers_nothing() -> None:
    p = pool(1)
    first = p.allocate(sequence_id=7)
    o = step(p, [first], 1, 6)
    p.free(first)
    assert len(p) == 0
    again = p.allocate(sequence_id=7)
    assert again == first and len(p) == 1
    assert alike(step(p, [again], 1, 6), o)


def test_a_staged_prefill_is_exact_until_the_sequence_is_named_in_a_step() -> None:
    p = pool()
    empty = p.nbytes
    slot = p.allocate(sequence_id=5)
    exact = {
        site: inputs(1, 1, key_dim=16, value_dim=24, dtype=torch.float32, seed=i)[5][0] for i, site in enumerate(p)
    }
    p.stage(slot, exact, seen=11)
    assert p.nbytes == empty + 4 * exact["a"].numel() * 4
    assert all(torch.equal(p.staged(slot)[site], exact[site]) for site in p)
    o = step(p, [slot], 3)
    assert p.staged(slot) == {} and p.nbytes == empty
    for number, site in enumerate(p):
        policy = Policy.from_dict({**SITES[site][0].to_dict(), "storage": "emulated"})
        options: dict[str, Any] = {"position": 11, "sequence_ids": [5], "site_id": number}
        want, _ = lc.linear_attention(*tokens(1, 1, 3), policy=policy, initial_state=exact[site][None], **options)
        assert same(o[number], want)


def test_a_shared_prefix_goes_on_in_several_slots() -> None:
    p = pool()
    a, b = p.allocate(), p.allocate()
    step(p, [a], 1, 5)
    taken = p.snapshot(a)
    p.copy(a, b)
    assert alike(rows(p, a), rows(p, b))
    o = step(p, [a, b, None], 2, 3)
    assert all(same(x[0], y[0]) for x, y in zip(o, step_alone(p, taken, a, 2, 3), strict=True))


def step_alone(p: lc.StatePool, taken: Any, slot: int, seed: int, count: int) -> list[Tensor]:
    """What the snapshot gives, as often as it is restored."""
    outs = []
    for _ in range(2):
        p.restore(taken, slot)
        outs = step(p, [slot, None, None], seed, count)
    return outs


def test_a_sequence_swapped_out_and_in_goes_on_in_another_slot() -> None:
    p, plain = pool(2), pool(2)
    for q in (p, plain):
        q.allocate(), q.allocate(sequence_id=9)
        step(q, [0, 1], 1, 5)
    taken = p.swap_out(1)
    assert taken.nbytes > 0 and len(p) == 1
    p.free(0)
    assert p.swap_in(taken) == 0 and p.allocate() == 1
    assert alike([x[0] for x in step(p, [0, 1], 2)], [x[1] for x in _swapped(plain, 2)])
    assert alike(rows(p, 0), rows(plain, 1))


def _swapped(p: lc.StatePool, seed: int) -> list[Tensor]:
    """A step of slots 0 and 1 in which slot 1 has the first sequence's tokens."""
    indices, x = p.indices([0, 1]), [y.flip(0) for y in tokens(2, 1, seed)]
    return [p[site].step(*x, state_indices=indices) for site in p]


def test_a_staged_sequence_is_swapped_with_its_exact_state() -> None:
    p = pool(1)
    slot = p.allocate()
    exact = {site: torch.randn(4, 16, 24) for site in p}
    p.stage(slot, exact, seen=3)
    want = [torch.where(torch.tensor(True), x, x) for x in exact.values()]
    slot = p.swap_in(p.swap_out(slot))
    assert all(torch.equal(a, b) for a, b in zip(want, p.staged(slot).values(), strict=True))


def test_a_cancelled_request_does_not_touch_whoever_gets_its_slot() -> None:
    p = pool(2)
    a, b = p.allocate(), p.allocate()
    step(p, [a, b], 1, 2)
    indices, x = p.indices([a, b]), tokens(2, 3, 5)
    for site in p:
        p[site].verify(*x, state_indices=indices)
    p.free(b)
    new = p.allocate()
    assert new == b
    before = rows(p, new)
    for site in p:
        p[site].accept(torch.tensor([2, 0]))
    assert alike(before, rows(p, new))


def test_misuse_of_slots_is_named() -> None:
    with pytest.raises(StateError, match="at least 1"):
        lc.StatePool(SITES, 0)
    p = pool(1)
    slot = p.allocate()
    with pytest.raises(StateError, match=r"swap_out\(slot\)"):
        p.allocate()
    with pytest.raises(StateError, match=r"one for each of \['a', 'b', 'c', 'd'\]"):
        p.stage(slot, {"a": torch.zeros(4, 16, 24)})
    p.free(slot)
    for call in (lambda: p.free(slot), lambda: p.indices([slot]), lambda: p.indices([5]), lambda: p.snapshot(slot)):
        with pytest.raises(StateError, match=r"a slot that allocate\(\) gave"):
            call()


def test_sites_are_a_policy_or_a_preset_and_sizes() -> None:
    assert lc.StatePool({"a": ("int8", HEADS._replace(V=64))}, 1)["a"].policy == lc.PRESETS["int8"]
    with pytest.raises(PolicyError, match=r"sites\['a'\].*want a preset.*Did you mean"):
        lc.StatePool({"a": ("int9", HEADS)}, 1)
    wrong: Any
    for wrong in ("int8", ("int8", 4), ("int8", (2, 4, 16, 24)), (None, HEADS)):
        with pytest.raises(StateError, match=r"sites\['a'\].*Heads"):
            lc.StatePool({"a": wrong}, 1)
    with pytest.raises(StateError, match="want one of a, b, c, d"):
        pool()["nope"]
