"""A stub of a serving engine drives the pool as engines do: continuous batching in one recorded batch size, raw packed
qkv, value-first pools, padding by a sentinel, fresh slots, shared prefixes, swapping, cancelling.

Its requests are streams of tokens, and each has to get what `lc.linear_attention` gives it alone, bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.packed.layout import Heads
from lattn_compile.policy import Policy, Replay, TwoPrecision
from tests.packed.cases import rubbish, same

H, HV, K, V = 2, 4, 16, 24
LAYERS = ("layers.0", "layers.1")
BATCH = 4
SENTINEL = 2**31 - 1  # what this engine pads its slots with
POLICIES = {
    "token": Policy(lc.Int8(8)),
    "token, stochastic": Policy(lc.Fp8(8), rounding="stochastic", seed=5),
    "replay": Policy(lc.Int8(8), write=Replay(4, factors="fp8_e4m3")),
    "two precisions": Policy(write=TwoPrecision(3)),
}


@dataclasses.dataclass(eq=False)
class Request:
    """`prompt` tokens of exact prefill, then decode; `streams`: raw qkv, gates and betas of every layer."""

    id: int
    prompt: int
    streams: dict[str, tuple[Tensor, Tensor, Tensor]]
    slot: int | None = None
    done: int = 0
    outputs: dict[str, list[Tensor]] = dataclasses.field(default_factory=lambda: {name: [] for name in LAYERS})


def request(number: int, prompt: int, tokens: int = 40) -> Request:
    rng = torch.Generator().manual_seed(number)
    streams = {}
    for name in LAYERS:
        qkv = torch.randn(tokens, 2 * H * K + HV * V, generator=rng)
        g = -torch.rand(tokens, HV, generator=rng) * 0.2
        streams[name] = (qkv, g, torch.rand(tokens, HV, generator=rng))
    return Request(number, prompt, streams)


def unpacked(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of the projection's output `[B, T, 2 H K + HV V]`."""
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


class Engine:
    def __init__(self, policy: Policy, slots: int) -> None:
        heads = Heads(H, HV, K, V, "head", True)
        self.pool = lc.StatePool(dict.fromkeys(LAYERS, (policy, heads)), slots, v_first=True)
        for name in LAYERS:
            codes = self.pool[name].tensors["codes"]
            assert codes.transpose(-1, -2).is_contiguous(), "[slots, HV, V, K]"
            rubbish(self.pool[name].tensors)
        # The buffers of a recorded step: filled, never made anew.
        self.slots = torch.empty(BATCH, dtype=torch.int32)
        self.has = torch.empty(BATCH, dtype=torch.bool)
        self.inputs = [torch.empty(BATCH, 1, 2 * H * K + HV * V), torch.empty(BATCH, 1, HV), torch.empty(BATCH, 1, HV)]

    def admit(self, r: Request) -> None:
        """A slot, and the prompt by the engine's own prefill, which leaves value-first states."""
        r.slot = self.pool.allocate(sequence_id=r.id)
        if r.prompt:
            left = {name: self.prefill(r, name).transpose(-1, -2).contiguous() for name in LAYERS}
            self.pool.stage(r.slot, {name: x.transpose(-1, -2) for name, x in left.items()}, seen=r.prompt)
        else:
            for name in LAYERS:  # an engine that keeps no cursors of its own: `has` alone says that the slot is fresh
                self.pool[name].cursor[r.slot] = 0  # type: ignore[index]
        r.done = r.prompt

    def prefill(self, r: Request, name: str) -> Tensor:
        qkv, g, beta = (x[None, : r.prompt] for x in r.streams[name])
        o, state = lc.linear_attention(*unpacked(qkv), g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        r.outputs[name] += o[0].unbind(0)
        assert isinstance(state, Tensor)
        return state[0]

    def step(self, live: list[Request]) -> None:
        """One token of each of up to BATCH requests."""
        self.pool.indices([r.slot for r in live], out=self.slots)
        self.slots.masked_fill_(self.slots == -1, SENTINEL)
        self.has.copy_(torch.tensor([r.done > 0 for r in live] + [False] * (BATCH - len(live))))
        for name in LAYERS:
            for i, buffer in enumerate(self.inputs):
                buffer.fill_(torch.nan)
                for row, r in enumerate(live):
                    buffer[row, 0] = r.streams[name][i][r.done]
            qkv, g, beta = self.inputs
            o = self.pool[name].step(
                *unpacked(qkv),
                g,
                beta,
                use_qk_l2norm_in_kernel=True,
                state_indices=self.slots,
                has_initial_state=self.has,
                padding_slot=SENTINEL,
            )
            assert not o[len(live) :].any()
            for row, r in enumerate(live):
                r.outputs[name].append(o[row, 0].clone())
        for r in live:
            r.done += 1

    def leave(self, r: Request) -> None:
        assert r.slot is not None
        self.pool.free(r.slot)
        r.slot = None


def alone(r: Request, policy: Policy, name: str) -> Tensor:
    """What the request gets by itself: its prompt exact, then token by token."""
    site = LAYERS.index(name)
    qkv, g, beta = (x[None] for x in r.streams[name])
    outs, state = [], None
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "sequence_ids": [r.id]}
    cuts = [0, r.prompt, *range(r.prompt + 1, r.done + 1)] if r.prompt else list(range(r.done + 1))
    for a, b in itertools.pairwise(cuts):
        prefix = r.prompt if a < r.prompt else 0
        o, state = lc.linear_attention(
            *unpacked(qkv[:, a:b]), g[:, a:b], beta[:, a:b], policy=policy, prefix_lengths=prefix,
            initial_state=state, position=a, site_id=site, **options,
        )  # fmt: skip
        outs.append(o[0])
    return torch.cat(outs)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_request_gets_what_it_gets_alone(policy: Policy) -> None:
    engine = Engine(policy, slots=5)
    a, b, c, d = request(1, 7), request(2, 0), request(3, 12), request(4, 5)
    engine.admit(a), engine.admit(b)
    for _ in range(3):
        engine.step([b, a])
    engine.admit(c)
    engine.step([a, b, c])
    # A second request with c's beginning goes on from a snapshot, also after c has moved on.
    shared = engine.pool.snapshot(c.slot)  # type: ignore[arg-type]
    twin = dataclasses.replace(c, streams=c.streams, outputs={n: list(x) for n, x in c.outputs.items()})
    for _ in range(2):
        engine.step([c, a])
    # b makes room for others and comes back into another slot.
    old, out = b.slot, engine.pool.swap_out(b.slot)  # type: ignore[arg-type]
    engine.admit(d)
    assert d.slot == old
    twin.slot = engine.pool.allocate(sequence_id=twin.id)
    engine.pool.restore(shared, twin.slot)
    for _ in range(4):
        engine.step([twin, d, a, c])
    engine.leave(a)  # cancelled in mid-window
    b.slot = engine.pool.swap_in(out)
    assert b.slot != old
    for _ in range(6):
        engine.step([b, d, twin])
    for r in (a, b, c, d, twin):
        for name in LAYERS:
            got, want = torch.stack(r.outputs[name]), alone(r, policy, name)
            assert len(got) == r.done
            assert same(got[r.prompt :], want[r.prompt :]), (r.id, name)
    assert len(engine.pool) == 4
