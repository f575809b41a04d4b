"""A packed step on a CPU, taken apart by Inductor: what it computes, where it writes, and what the report says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile.errors import LattnError
from lattn_compile.packed.layout import Heads
from lattn_compile.policy import Policy, Replay
from lattn_compile.testing.backend import recorded
from tests.ops.cases import inputs
from tests.packed.cases import rubbish, same

FUSED = {
    "int8": Policy(lc.Int8(8)),
    "int8, whole tiles": Policy(lc.Int8(None)),
    "bf16": Policy(lc.Bf16()),
    "exact": Policy(write=lc.Exact()),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def _tokens(kind: str, seed: int, batch: int = 3) -> list[Any]:
    q, k, v, g, beta = inputs(batch, 1, key_dim=16, value_dim=24, dtype=torch.float32, seed=seed)[:5]
    if kind == "channel":
        g = g[..., None] * torch.rand(16, generator=torch.Generator().manual_seed(seed))
    return [q, k, v, g, beta]


def _compiled() -> Any:
    def step(x: list[Any], state: lc.QuantizedState) -> Any:
        return state.step(*x, use_qk_l2norm_in_kernel=True)

    return torch.compile(step, backend="lattn_compile", fullgraph=True)


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("policy", FUSED.values(), ids=FUSED)
def test_a_fused_step_is_the_op_from_the_same_stored_state(policy: Policy, kind: str) -> None:
    """Within semantics §8 of the op; codes written where they lay; a slot that stores nothing starts at zero."""
    state = lc.QuantizedState(policy).allocate(Heads(2, 4, 16, 24, kind, True), 3)
    rubbish(state.tensors)
    step, where, flips, total = _compiled(), [x.data_ptr() for x in state.held().values()], 0, 0
    with recorded() as record:
        for seed in range(8):
            before = state.clone()
            x = _tokens(kind, seed)
            o, want = step(x, state), before.step(*x, use_qk_l2norm_in_kernel=True)
            assert (o - want).norm() <= 1e-6 * want.norm()
            bound = 2**-9 if policy is FUSED["bf16"] else 2e-6  # a step of a 16-bit float
            assert (state.dense() - before.dense()).norm() <= bound * before.dense().norm()
            assert torch.equal(state.cursor, before.cursor)
            if state.tensors["codes"].dtype is torch.int8:
                mine, theirs = (s.tensors["codes"].short() for s in (state, before))
                flips, total = flips + (mine != theirs).sum().item(), total + mine.numel()
                assert (mine - theirs).abs().max() <= 1
                for name, scale in state.tensors.items():
                    assert name == "codes" or torch.allclose(scale, before.tensors[name], rtol=3e-5, atol=0)
    assert flips <= max(1, 1e-5 * total)
    assert where == [x.data_ptr() for x in state.held().values()]
    (site,) = record.report.sites
    assert (site.op, site.kernel, site.verdict) == ("lattn::decode_packed", "inductor", "rewritten")
    assert site.state_bytes_after == policy.nbytes(2, 4, 16, 24, decay=kind)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(lc.Fp8()),
        Policy(lc.Nvfp4()),
        Policy(lc.Int8(8), readout="after_write"),
        Policy(lc.Int8(8), rounding="stochastic"),
        Policy(lc.Int8(8), feedback="int4"),
        Policy(lc.Int8(8), write=Replay(4)),
    ],
    ids=str,
)
def test_what_is_not_taken_apart_stays_the_op_with_its_bits(policy: Policy) -> None:
    state = lc.QuantizedState(policy).allocate(Heads(2, 4, 16, 24, "head", True), 3)
    plain = state.clone()
    step = torch.compile(lambda x, s: s.step(*x), backend="lattn_compile", fullgraph=True)
    for seed in range(3):
        x = _tokens("head", seed)
        assert same(step(x, state), plain.step(*x))
    assert all(same(x, plain.held()[name]) for name, x in state.held().items())


def test_the_op_is_a_step_on_a_copy() -> None:
    state = lc.QuantizedState(FUSED["int8"]).allocate(Heads(2, 4, 16, 24, "head", True), 3)
    state.step(*_tokens("head", 0))
    before, x = state.clone(), _tokens("head", 1)
    arguments = (*x, list(state.tensors.values()), state.cursor)
    options = {**state.call.op_options(), "scale": 0.25}
    o, stored, cursor = torch.ops.lattn.decode_packed(*arguments, **options)
    assert all(same(y, before.held()[name]) for name, y in state.held().items())
    assert same(o, state.step(*x)) and torch.equal(cursor, state.cursor)  # type: ignore[arg-type]
    assert all(same(y, mine) for y, mine in zip(stored, state.tensors.values(), strict=True))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.lattn.decode_packed.default, arguments, options, test_utils=checks)
    with pytest.raises(LattnError, match="HV"):
        torch.ops.lattn.decode_packed(x[0], x[1], x[2][:, :, :3], *arguments[3:], **options)
