"""Random schedules of a pool against a plain model: what each sequence would be, decoded alone and uninterrupted."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile.errors import LattnError
from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.functional import linear_attention
from lattn_compile.packed import layout
from lattn_compile.packed.pool import StatePool
from lattn_compile.policy import Policy, Replay, TwoPrecision
from lattn_compile.testing.inputs import make_inputs
from tests.packed.cases import rubbish, same

CASES = int(os.environ.get("LATTN_SCHEDULES", "240"))
POLICIES = {
    "token": Policy(Int8(4)),
    "token, stochastic": Policy(Fp8(8), rounding="stochastic", feedback="int8"),
    "replay": Policy(Int8(4), write=Replay(3, factors="int8")),
    "two precisions": Policy(write=TwoPrecision(3, read=Int8(4), anchor="bf16")),
    "nvfp4 replay": Policy(Nvfp4(), write=Replay(4), readout="after_write"),
}
H, HV, K, V = 1, 2, 8, 4
SITE, OTHER = "a", "b"  # two sites: their slots must not come apart


@dataclasses.dataclass
class Sequence:
    """A live sequence as the plain model has it: the state that `lc.linear_attention` carries, and how long it is."""

    id: int
    states: dict[str, Any]
    length: int = 0


class Schedule:
    """One random schedule, run on a pool and on the plain model side by side."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.rng, self.policy, self.seed = random.Random(seed), policy, seed
        heads = layout.Heads(H, HV, K, V, "head", True)
        sites = (SITE, OTHER) if seed % 4 == 0 else (SITE,)
        self.pool = StatePool(dict.fromkeys(sites, (policy, heads)), slots=3)
        for site in self.pool:
            rubbish(self.pool[site].tensors, seed)
        self.live: dict[int, Sequence] = {}
        self.out: list[tuple[Any, Sequence]] = []
        self.calls = 0

    def tokens(self, count: int, length: int) -> list[Tensor]:
        self.calls += 1
        x = make_inputs(
            "gdn", batch=count, tokens=length, key_heads=H, value_heads=HV, key_dim=K, value_dim=V,
            dtype=torch.float32, seed=1000 * self.seed + self.calls,
        )  # fmt: skip
        return [x.q, x.k, x.v, x.g, x.beta]  # type: ignore[list-item]

    def plain(self, s: Sequence, site: str, x: list[Tensor]) -> Tensor:
        """The plain model's call: this sequence alone."""
        options: dict[str, Any] = {"site_id": list(self.pool).index(site), "sequence_ids": [s.id]}
        o, s.states[site] = linear_attention(
            *x,
            policy=self.policy,
            initial_state=s.states.get(site),
            output_final_state=True,
            position=s.length,
            **options,
        )
        return o

    def run(self, steps: int) -> None:
        self.start()
        self.append()
        for _ in range(steps):
            name = self.rng.choice(("append",) * 3 + ("verify",) * 2 + ("start",) * 3 + _REST)
            getattr(self, name)()
        self.check()

    def start(self) -> None:
        if len(self.live) == self.pool.slots:
            return self.free()
        s = Sequence(self.rng.randrange(2**40), {})
        slot = self.pool.allocate(sequence_id=s.id)
        assert slot not in self.live
        self.live[slot] = s
        if self.rng.random() < 0.5:  # with a prefill, maybe in two pieces
            exact = {}
            for site in self.pool:
                x, s.length = self.tokens(1, 3), 3
                _, state = linear_attention(*x, output_final_state=True, use_qk_l2norm_in_kernel=True)
                assert isinstance(state, Tensor)
                exact[site] = state[0]
                s.states[site] = state
            self.pool.stage(slot, exact, seen=3)
        return None

    def batch(self) -> list[int | None]:
        chosen: list[int | None] = [slot for slot in self.live if self.rng.random() < 0.7]
        self.rng.shuffle(chosen)
        if self.rng.random() < 0.3:
            chosen.insert(self.rng.randrange(len(chosen) + 1), None)
        return chosen

    def append(self) -> None:
        slots, length = self.batch(), self.rng.choice((0, 1, 1, 1, 2, 5))
        if not slots:
            return
        counts = [self.rng.randint(0, length) for _ in slots]
        for i, slot in enumerate(slots):
            if slot is not None and self.pool.staged(slot):
                counts[i] = length  # a staged sequence is named because it has a token
        if length == 0:
            slots = [None if s is not None and self.pool.staged(s) else s for s in slots]
        indices = self.pool.indices(slots)
        for site in self.pool:
            x = self.tokens(len(slots), length)
            x = [torch.where(_padded(slots, y), torch.nan, y) for y in x]
            o = self.pool[site].step(*x, sequence_lengths=torch.tensor(counts), state_indices=indices)
            self.compare(slots, counts, site, x, o)
        self.grow(slots, counts)

    def compare(self, slots: list[int | None], counts: list[int], site: str, x: list[Tensor], o: Tensor) -> None:
        for i, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            assert not o[i, count:].any()
            if slot is not None and count:
                want = self.plain(self.live[slot], site, [y[i : i + 1, :count] for y in x])
                assert same(want[0], o[i, :count])

    def grow(self, slots: list[int | None], counts: list[int]) -> None:
        for slot, count in zip(slots, counts, strict=True):
            if slot is not None:
                self.live[slot].length += count

    def verify(self) -> None:
        """Drafts, of which any prefix is right; sometimes a request is cancelled meanwhile."""
        slots, length = [s for s in self.batch() if s is None or not self.pool.staged(s)], self.rng.choice((1, 2, 4, 7))
        if not slots:
            return
        accepted = [0 if slot is None else self.rng.randint(0, length) for slot in slots]
        indices = self.pool.indices(slots)
        before = [_bytes(self.pool[site].held()) for site in self.pool]
        drafts = {site: self.tokens(len(slots), length) for site in self.pool}
        outs = {site: self.pool[site].verify(*x, state_indices=indices) for site, x in drafts.items()}
        assert before == [_bytes(self.pool[site].held()) for site in self.pool], "verifying writes nothing"
        cancelled = None
        if self.rng.random() < 0.2 and any(slot is not None for slot in slots):
            cancelled = self.rng.choice([slot for slot in slots if slot is not None])
            accepted[slots.index(cancelled)] = 0
            self.end(cancelled)
        for site, x in drafts.items():
            kept = [accepted, torch.tensor(accepted)][self.rng.random() < 0.5]
            self.pool[site].accept(torch.as_tensor(kept))
            for i, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
                if slot is not None and slot != cancelled and count:
                    want = self.plain(self.live[slot], site, [y[i : i + 1, :count] for y in x])
                    error = (want[0] - outs[site][i, :count]).norm()
                    # One call of all drafts, one of those accepted: inside a window sums may have another order.
                    assert error <= (0 if self.pool[site].call.window is None else 1e-5 * want.norm())
        self.grow([s if s != cancelled else None for s in slots], accepted)

    def refused(self) -> None:
        """A call that nobody should make: it is refused by name and leaves every byte as it was."""
        slots = [slot for slot in self.live if not self.pool.staged(slot)]
        if not slots:
            return
        n, length = len(slots), 2
        state, indices = self.pool[SITE], torch.tensor(slots)
        x = self.tokens(n, length)
        bad: dict[str, Any] = {
            "slot": {"state_indices": torch.where(indices == slots[-1], self.pool.slots, indices)},
            "twice": {"state_indices": torch.cat([indices, indices[:1]])},
            "length": {"sequence_lengths": torch.full((n,), length + 1)},
            "has": {"has_initial_state": torch.ones(n, dtype=torch.int32)},
            "floats": {"state_indices": indices.float()},
        }
        name = self.rng.choice((*bad, "gate", "sizes", "gates", "double"))
        if name == "twice":
            x = self.tokens(n + 1, length)
        elif name == "gate":
            x[3][-1, -1, -1] = 0.5
        elif name == "sizes":
            x[2] = x[2][..., :-1]
        elif name == "gates":
            x = x[:4]
        elif name == "double":
            x[3] = x[3].double()
        before = _bytes(state.held())
        call = self.rng.choice((state.step, state.verify))
        try:
            call(*x, **{"state_indices": indices, **bad.get(name, {})})
        except LattnError:
            assert before == _bytes(state.held()) and state.draft is None, name
            return
        raise AssertionError(f"{call.__name__} took {name!r}")

    def flush(self) -> None:
        slots = [slot for slot in self.live if self.rng.random() < 0.5 and not self.pool.staged(slot)]
        for site in self.pool:
            self.pool[site].flush(torch.tensor(slots, dtype=torch.int64))
            for slot in slots:
                s = self.live[slot]
                state = s.states.get(site)
                if self.policy.write.mode in ("replay", "two_precision") and state is not None:
                    s.states[site] = _flushed(state, s, self.pool[site])

    def copy(self) -> None:
        if len(self.live) < 2:
            return
        source, target = self.rng.sample(sorted(self.live), 2)
        if self.policy.rounding == "stochastic" and self.pool.staged(source):
            return  # its hand-over would draw the target's own numbers
        self.pool.copy(source, target)
        old = self.live[source]
        self.live[target] = Sequence(self.live[target].id, dict(old.states), old.length)

    def free(self) -> None:
        if self.live:
            self.end(self.rng.choice(sorted(self.live)))

    def end(self, slot: int) -> None:
        del self.live[slot]
        self.pool.free(slot)

    def swap(self) -> None:
        if self.out and (len(self.live) < self.pool.slots):
            taken, s = self.out.pop(self.rng.randrange(len(self.out)))
            self.live[self.pool.swap_in(taken)] = s
        elif self.live and len(self.out) < 2:
            slot = self.rng.choice(sorted(self.live))
            self.out.append((self.pool.swap_out(slot), self.live.pop(slot)))

    def check(self) -> None:
        """Every live sequence is stored as the plain model has it, bit for bit."""
        for slot, s in self.live.items():
            for site in self.pool:
                state, want = self.pool[site], s.states.get(site)
                assert state.cursor is not None
                if want is None or self.pool.staged(slot):
                    assert state.cursor[slot] == -1
                elif not isinstance(want, Tensor):
                    assert state.cursor[slot] == want.cursor[0]
                    for name, x in layout.pack(want, state.call).items():
                        assert same(x[0], state.tensors[name][slot]), (name, slot)


_REST = ("flush", "copy", "free", "free", "swap", "check", "refused")


def _padded(slots: list[int | None], x: Tensor) -> Tensor:
    return torch.tensor([slot is None for slot in slots]).view(-1, *(1,) * (x.dim() - 1)).expand_as(x)


def _bytes(held: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: x.contiguous().view(torch.uint8).numpy().tobytes() for name, x in held.items()}


def _flushed(state: Any, s: Sequence, of: Any) -> Any:
    """What a flush makes of the plain model's state: its dense value handed over anew, without records."""
    if not bool((state.cursor > 0).any()):
        return state
    made = layout.handed_over(
        state.dense(), of.call, of.heads, rule=of.rule, site_id=of.site_id,
        position=torch.tensor([s.length]), sequence_ids=torch.tensor([s.id]),
    )  # fmt: skip
    return layout.unpack(
        made, of.call, torch.zeros(1, dtype=torch.int32), of.heads, rule=of.rule, position=state.position
    )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_any_schedule_leaves_what_plain_decoding_leaves(policy: Policy) -> None:
    for seed in range(-(-CASES // len(POLICIES))):
        schedule = Schedule(policy, seed)
        try:
            schedule.run(12)
        except Exception as error:
            error.add_note(f"seed {seed}, after {schedule.calls} calls")
            raise
