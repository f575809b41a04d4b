"""Failures of quantized, replayed and rolled recurrent states that were reported elsewhere, at `lc.linear_attention`.

Each stands for a kind; the report's id is in a comment. The judge is the exact recurrence in float64.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.recurrence.gates import lower_bound_gate


def tokens(count: int, *, decay: float = -1e-3, channel: bool = False, seed: int = 0, batch: int = 1) -> list[Tensor]:
    """q, k, v, g, beta in float64 of a small GDN or KDA layer with a slow, constant decay."""
    rng = torch.Generator().manual_seed(seed)
    B, H, HV, K, V = batch, 1, 2, 32, 32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(B, count, H, K), dim=-1) for _ in range(2))
    g = torch.full((B, count, HV, *((K,) if channel else ())), decay, dtype=torch.float64)
    return [q, k, normal(B, count, HV, V), g, normal(B, count, HV).sigmoid()]


def run(x: list[Tensor], policy: lc.Policy | str | None, state: Any = None, **more: Any) -> tuple[Tensor, Any]:
    return lc.linear_attention(*x, policy=policy, initial_state=state, output_final_state=True, **more)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def float32(x: list[Tensor]) -> list[Tensor]:
    return [t.float() for t in x]


# B62: a coarse int8 scale, one a head, drifts over a long slow horizon; a residual carried along bends it back.
def test_error_feedback_bends_the_drift_of_a_coarse_int8_state() -> None:
    x = tokens(600)
    exact = run(x, None)
    coarse = lc.Int8(block_v=None)
    drift = {
        f: off(run(float32(x), lc.Policy(coarse, feedback=f))[1].dense(), exact[1]) for f in (None, "int4", "int8")
    }
    assert drift[None] > 0.01, "the report's failure is there without feedback"
    assert drift["int4"] < drift[None] / 4 and drift["int8"] < drift["int4"]


def test_the_default_policy_is_not_coarse_int8() -> None:
    default = lc.Policy()
    assert isinstance(default.state, lc.Fp8) and default.state.block_v == 64


# B63: every flush of an 8-bit anchor injects an error; longer windows inject less often.
def test_drift_falls_with_the_window_and_error_feedback_bends_it() -> None:
    x = tokens(1024)
    exact = run(x, None)
    errors = [
        off(run(float32(x), lc.Policy(lc.Fp8(), write=lc.Replay(w), feedback=f))[1].dense(), exact[1])
        for w, f in ((4, None), (16, None), (64, None), (16, "int8"))
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[3] < errors[1] / 4


# B69: outputs degenerated until the fold replayed raw inputs exactly.
@pytest.mark.parametrize("channel", [False, True], ids=["gdn", "kda"])
def test_the_anchor_of_two_precision_is_the_exact_recurrence_over_a_thousand_tokens(channel: bool) -> None:
    x = tokens(1024, channel=channel)
    exact = run(x, None)
    for read in (lc.Fp8(block_k=128, block_v=1), lc.Nvfp4()):
        _, state = run(float32(x), lc.Policy(write=lc.TwoPrecision(16, read=read)))
        # Semantics §8, exact mode: 5e-6 + 2^-24 min(T, 1 / |g|).
        assert off(state.dense(), exact[1]) < 5e-6 + 2.0**-24 * 1000


# B70: a cached update u in bf16 costs accuracy that cached raw inputs do not.
def test_raw_records_keep_the_state_where_rounded_updates_do_not() -> None:
    x = tokens(16 * 16)
    exact = run(x, None)[1]
    rounded = run(float32(x), lc.Policy(lc.Fp32(), write=lc.Replay(16, factors="bf16")))[1]
    raw = run(float32(x), lc.Policy(write=lc.TwoPrecision(16)))[1]
    assert off(raw.dense(), exact) < 1e-5 < 1e-4 < off(rounded.dense(), exact) < 1e-2


# B26: positions computed together were rounded once, one by one at every token.
@pytest.mark.parametrize(
    "policy",
    [lc.Policy(lc.Int8()), lc.Policy(lc.Bf16(), rounding="stochastic", seed=4), lc.Policy(lc.Fp8(), feedback="int4")],
    ids=str,
)
def test_tokens_that_come_together_are_written_one_by_one(policy: lc.Policy) -> None:
    x = float32(tokens(12))
    whole, end = run(x, policy)
    state, rows = None, []
    for t in range(12):
        o, state = run([y[:, t : t + 1] for y in x], policy, state)
        rows.append(o)
    assert torch.equal(torch.cat(rows, 1), whole)
    assert torch.equal(state.dense(), end.dense())


# B73: a blob saved in the middle of a window held the optimistic state, or groups of a longer batch.
@pytest.mark.parametrize("policy", ["int8-replay", "fp8-two-precision", "nvfp4"])
def test_a_blob_saved_in_mid_window_holds_anchor_ring_and_cursors(policy: str) -> None:
    x = tokens(21, batch=3)
    want, end = run(x, policy)
    _, state = run([y[:, :13] for y in x], policy)
    state = pickle.loads(pickle.dumps(state))
    got, last = run([y[:, 13:] for y in x], policy, state)
    assert off(got, want[:, 13:]) < 1e-12 and off(last.dense(), end.dense()) < 1e-12
    # Two sequences end, one goes on: nothing of theirs is left in it.
    alone = state.index_select(torch.tensor([1]))
    got, last = run([y[1:2, 13:] for y in x], policy, alone)
    assert off(got, want[1:2, 13:]) < 1e-12 and last.cursor.tolist() == end.cursor.tolist()[1:2]


# B76, B77: keys decayed in advance overflow once (W - 1) |lower bound| passes 80; verify and replay had another gate.
@pytest.mark.parametrize("window", [16, 18, 64])
@pytest.mark.parametrize("write", [lc.Replay, lc.TwoPrecision])
def test_a_bounded_gate_at_its_bound_replays_over_any_window(write: Any, window: int) -> None:
    x = tokens(70, channel=True)
    raw = torch.full_like(x[3], 30.0)  # sigmoid(30) = 1: the gate stands at its bound
    raw[..., ::2] = -30.0  # beside channels that do not decay at all
    x[3] = lower_bound_gate(raw, torch.zeros(2, dtype=torch.float64), lower_bound=-5.0)
    assert x[3].min() == -5.0
    exact = run(x, None)
    fp32 = {lc.Replay: lc.Policy(lc.Fp32(), write=lc.Replay(window))}
    policy = fp32.get(write, lc.Policy(write=lc.TwoPrecision(window, read=lc.Fp32())))
    got = run(float32(x), policy)
    assert off(got[0], exact[0]) < 1e-5 and off(got[1].dense(), exact[1]) < 1e-5
    leaves = [y.float().requires_grad_() for y in x]
    run(leaves, policy)[0].square().sum().backward()
    assert all(y.grad is not None and y.grad.isfinite().all() for y in leaves)


# B81: rounding must be unbiased and repeatable, or users refuse the mode.
@pytest.mark.parametrize("fmt", [lc.Int8(), lc.Fp8(), lc.Fp16()], ids=str)
def test_stochastic_rounding_is_unbiased_where_nearest_is_not_and_repeats(fmt: Any) -> None:
    S = run(float32(tokens(20)), None)[1]
    no_tokens = [y[:, :1] for y in float32(tokens(1))]
    no_tokens[3], no_tokens[4] = torch.zeros_like(no_tokens[3]), torch.zeros_like(no_tokens[4])  # a masked token

    def stored(seed: int) -> Tensor:
        return run(no_tokens, lc.Policy(fmt, rounding="stochastic", seed=seed), S)[1].dense()

    assert torch.equal(stored(1), stored(1)) and not torch.equal(stored(1), stored(2))
    draws = torch.stack([stored(seed) for seed in range(128)]).double()
    bias = draws.mean(0) - S.double()
    spread = draws.std(0).norm() / 128**0.5
    assert bias.norm() < 1.3 * spread
    nearest = run(no_tokens, lc.Policy(fmt), S)[1].dense()
    assert (nearest - S).norm() > 5 * bias.norm()


# B82: memory is planned from a formula that forgot ring and scales.
def test_the_memory_formula_counts_ring_scales_and_residual() -> None:
    x = float32(tokens(5, batch=2))
    for policy in (
        lc.Policy(lc.Int8(), write=lc.Replay(8, factors="fp8_e4m3"), feedback="int4"),
        lc.Policy(write=lc.TwoPrecision(4, read=lc.Nvfp4(), anchor="bf16")),
        lc.Policy(lc.Nvfp4(), write=lc.Replay(16)),
    ):
        assert run(x, policy)[1].nbytes == 2 * policy.nbytes(1, 2, 32, 32)
