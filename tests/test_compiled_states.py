"""A compiled call returns the state that the eager one returns, whatever its policy, and goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import make_inputs

POLICIES: dict[str, Any] = {
    "exact": None,
    "token": "int8",
    "chunk": lc.Policy(lc.Int8(), write=lc.Chunk(4)),
    "replay": "int8-replay",
    "replay, encoded factors": lc.Policy(lc.Int8(), write=lc.Replay(4, factors="fp8_e4m3")),
    "two precisions": "fp8-two-precision",
    "stochastic": lc.Policy(lc.Int8(), rounding="stochastic"),
    "feedback": lc.Policy(lc.Int8(), feedback="int4"),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def tokens(count: int) -> tuple[Tensor, ...]:
    x = make_inputs("gdn", batch=2, tokens=count, key_heads=1, value_heads=2, key_dim=8, value_dim=4)
    return x.q, x.k, x.v, x.g, x.beta  # type: ignore[return-value]


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, id=n) for n, p in POLICIES.items()],
)
def test_a_compiled_call_carries_its_state_as_an_eager_one(policy: Any) -> None:
    def attend(*x: Tensor, S: Any = None) -> Any:
        return lc.linear_attention(*x, policy=policy, initial_state=S, output_final_state=True)

    compiled = torch.compile(attend, backend="lattn_compile", fullgraph=True)
    state = want_state = None
    with recorded(), torch.no_grad():
        for count in (5, 1, 9):
            o, state = compiled(*tokens(count), S=state)
            want, want_state = attend(*tokens(count), S=want_state)
            assert torch.equal(o, want)
            got, dense = (s if isinstance(s, Tensor) else s.dense() for s in (state, want_state))
            assert torch.equal(got, dense)
            if not isinstance(state, Tensor):
                assert torch.equal(state.cursor, want_state.cursor) and state.nbytes == want_state.nbytes
