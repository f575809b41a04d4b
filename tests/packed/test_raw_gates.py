"""Steps that take gates as projections left them, and ops that a CUDA graph may record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import LattnError, ShapeError, UnsupportedError
from lattn_compile.policy import Policy, Replay
from lattn_compile.recurrence import gates
from tests.ops.cases import inputs
from tests.packed.cases import same

SIZES: dict[str, Any] = {"key_dim": 16, "value_dim": 24, "dtype": torch.float32}


def raw_tokens(seed: int, channel: bool) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Raw q, k, v, g, beta of two sequences, what makes gates of them, and the tokens with gates that were made."""
    q, k, v, g, beta = inputs(2, 3, seed=seed, **SIZES)[:5]
    rng = torch.Generator().manual_seed(seed)
    heads, size = v.shape[2], g.shape[2:] if not channel else (v.shape[2], q.shape[3])
    raw, bias = torch.randn(2, 3, *size, generator=rng), torch.randn(size, generator=rng)
    a_log, raw_beta = torch.rand(heads, generator=rng), torch.randn(beta.shape, generator=rng)
    own = {"A_log": a_log, "dt_bias": bias, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    made = [gates.softplus_gate(raw, a_log, bias), gates.write_strength(raw_beta, allow_neg_eigval=True)]
    return [q, k, v, raw, raw_beta], {**own, "allow_neg_eigval": True}, [q, k, v, *made]


@pytest.mark.parametrize("channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(
    "policy", [Policy("int8"), Policy("int8", write=Replay(3), gate="bf16")], ids=["token", "replay"]
)
def test_raw_gates_are_made_as_the_recurrence_has_them(policy: Policy, channel: bool) -> None:
    ours, theirs = (lc.QuantizedState(policy) for _ in range(2))
    for seed in range(3):
        raw, own, made = raw_tokens(seed, channel)
        stored = {"A_log": own["A_log"][None, None, :, None], "dt_bias": own["dt_bias"].flatten()}
        assert same(ours.step(*raw, **{**own, **stored}), theirs.step(*made))
    raw, own, made = raw_tokens(9, channel)
    ours.verify(*raw, **own)
    theirs.verify(*made)
    for state in (ours, theirs):
        state.accept(2)
    assert all(same(x, theirs.held()[name]) for name, x in ours.held().items())
    bound = {**own, "A_log": None, "lower_bound": -5.0}
    made[3] = gates.lower_bound_gate(raw[3], None, -5.0, own["dt_bias"])
    assert same(ours.step(*raw, **bound), theirs.step(*made))


@pytest.mark.parametrize(
    ("change", "wrong", "says"),
    [
        ({"A_log": None}, UnsupportedError, "a_log"),
        ({"A_log": torch.zeros(3)}, ShapeError, "a_log"),
        ({"lower_bound": 5.0}, UnsupportedError, "lower_bound"),
        ({"lower_bound": float("nan")}, UnsupportedError, "lower_bound"),
        ({"dt_bias": torch.zeros(4, 2)}, ShapeError, "dt_bias"),
        ({"use_gate_in_kernel": False}, UnsupportedError, "a_log"),
        ({"use_gate_in_kernel": False, "A_log": None}, UnsupportedError, "dt_bias"),
        ({"use_beta_sigmoid_in_kernel": False}, UnsupportedError, "allow_neg_eigval"),
        ({"A_log": torch.zeros(4, requires_grad=True)}, UnsupportedError, "gradient"),
    ],
)
def test_gates_that_cannot_be_made_are_refused_by_name(change: Any, wrong: type[LattnError], says: str) -> None:
    raw, own, _ = raw_tokens(0, False)
    state = lc.QuantizedState(Policy("int8"))
    state.step(*raw, **own)
    before = {name: x.clone() for name, x in state.held().items()}
    with pytest.raises(wrong, match=says):
        state.step(*raw, **{**own, **change})
    with pytest.raises(UnsupportedError, match="said to be raw"):
        lc.QuantizedState(Policy("int8")).step(*raw[:3], None, raw[4], **own)
    assert all(same(x, before[name]) for name, x in state.held().items())


@pytest.mark.parametrize("name", ["decode_", "replay_", "flush_"])
def test_a_graph_may_record_what_kernels_serve_and_nothing_else(name: str) -> None:
    unsafe = torch.Tag.cudagraph_unsafe
    plain, device = (getattr(torch.ops.lattn, x).default for x in (name, f"{name}device_"))
    assert unsafe in plain.tags and unsafe not in device.tags
    assert str(plain._schema).partition("(")[2] == str(device._schema).partition("(")[2]
