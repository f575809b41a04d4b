"""What `lc.calibrate` measures at one site is what its policies do to the outputs, over the whole horizon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.calibration.measure import Errors
from tests.calibrate_nets import HV, H, K, V

INT8, NVFP4 = lc.Policy(lc.Int8()), lc.Policy(lc.Nvfp4())
FEEDBACK, REPLAY = lc.Policy(lc.Int8(), feedback="int4"), lc.Policy(lc.Int8(), write=lc.Replay(4))


def deviation(o: Tensor, exact: Tensor) -> float:
    """The error of docs/calibrate.md, from `[B, T, HV, V]`."""
    ratio = (o - exact).double().square().sum((0, 1, 3)) / exact.double().square().sum((0, 1, 3))
    return math.sqrt(ratio.mean())


def _call(batch: int, tokens: int, seed: int = 0, K: int = K, V: int = V, **more: Any) -> dict[str, Any]:
    """Arguments of an op, as a rewritten graph has them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator)

    k = nn.functional.normalize(randn(H, K), dim=-1)
    inputs = {"q": randn(H, K), "k": k, "v": randn(HV, V), "g": -randn(HV).abs() / 20, "beta": randn(HV).sigmoid()}
    lengths = dict.fromkeys(("cu_seqlens", "prefix_lengths", "sequence_lengths", "initial_state"))
    return {**inputs, **lengths, "rule": "delta", "scale": 0.3, "qk_l2norm": False, "site_id": 0, **more}


def _direct(call: Mapping[str, Any], policy: lc.Policy | None, repeat: int, horizon: int) -> Tensor:
    tokens = {name: call[name].repeat(1, repeat, *(1,) * (call[name].dim() - 2))[:, :horizon] for name in "qkvg"}
    beta = call["beta"].repeat(1, repeat, 1)[:, :horizon]
    return lc.linear_attention(**tokens, beta=beta, scale=0.3, policy=policy, initial_state=call["initial_state"])[0]


@pytest.mark.parametrize("policy", [INT8, FEEDBACK, REPLAY, NVFP4], ids=str)
@pytest.mark.parametrize("horizon", [5, 12, 40])
def test_a_horizon_beyond_the_recorded_tokens_repeats_them_and_one_below_takes_the_first(
    policy: lc.Policy, horizon: int
) -> None:
    errors, call = Errors("site", horizon), _call(2, 12, initial_state=torch.ones(2, HV, K, V))
    errors.add(call, [policy])
    exact, got = (_direct(call, p, 4, horizon) for p in (None, policy))
    drift = errors.drift(policy)
    assert drift.error == pytest.approx(deviation(got, exact), rel=1e-3)
    quarters = [torch.arange(horizon) * 4 // horizon == i for i in (0, 3)]
    first, last = (deviation(got[:, at], exact[:, at]) for at in quarters)
    assert drift.growth == pytest.approx(last / first, rel=1e-2)
    usual = exact.double().square().sum(-1).mean((0, 1))
    of_tokens = ((got - exact).double().square().sum(-1) / usual).mean(-1).sqrt().flatten().sort().values
    assert drift.p95 == pytest.approx(of_tokens[math.ceil(0.95 * len(of_tokens)) - 1].item(), rel=0.025)


def test_batches_add_up_and_half_precision_inputs_are_not_taken_for_an_error() -> None:
    first, second = _call(2, 12, seed=1), _call(2, 12, seed=2)
    both = {n: torch.cat([first[n], second[n]]) if isinstance(first[n], Tensor) else first[n] for n in first}
    apart, at_once = Errors("site", 12), Errors("site", 12)
    apart.add(first, [INT8])
    apart.add(second, [INT8])
    at_once.add(both, [INT8])
    assert apart.drift(INT8).error == pytest.approx(at_once.drift(INT8).error, rel=1e-6)
    half = {n: x.bfloat16() if isinstance(x, Tensor) else x for n, x in first.items()}
    full = {n: x.float() if isinstance(x, Tensor) else x for n, x in half.items()}
    found = []
    for call in (half, full):
        errors = Errors("site", 12)
        errors.add(call, [INT8])
        found.append(errors.drift(INT8))
    assert found[0] == found[1]


def test_a_long_horizon_shows_that_nvfp4_runs_away_in_token_mode_and_does_not_in_replay() -> None:
    call, replayed = _call(1, 64, K=32, V=16), lc.Policy(lc.Nvfp4(), write=lc.Replay(16))
    call["g"] = torch.full_like(call["g"], -1e-3)
    short, long = Errors("site", 32), Errors("site", 1024)
    for errors in (short, long):
        errors.add(call, [NVFP4, replayed])
    assert short.drift(NVFP4).error < 1 < long.drift(NVFP4).error
    assert long.drift(NVFP4).growth > 4 > 2 > long.drift(replayed).growth


@pytest.mark.parametrize("packed", [False, True])
def test_prefix_and_padding_are_not_measured_and_sequences_do_not_mix(packed: bool) -> None:
    call = _call(2, 12)
    sequences = [
        {n: x[i : i + 1, :length] if isinstance(x, Tensor) else x for n, x in call.items()}
        for i, length in enumerate((12, 9))
    ]
    if packed:
        joined = {n: torch.cat([s[n] for s in sequences], 1) if isinstance(x, Tensor) else x for n, x in call.items()}
        joined |= {"cu_seqlens": torch.tensor([0, 12, 21])}
    else:
        joined = {n: x.clone() if isinstance(x, Tensor) else x for n, x in call.items()}
        for name in ("q", "k", "v", "g", "beta"):
            joined[name][1, 9:] = math.nan
        joined |= {"sequence_lengths": torch.tensor([12, 9])}
    joined["prefix_lengths"] = torch.tensor(3)
    together, apart = Errors("site", 8), Errors("site", 8)
    together.add(joined, [INT8])
    for sequence in sequences:
        apart.add(sequence | {"prefix_lengths": torch.tensor(3)}, [INT8])
    assert together.drift(INT8) == pytest.approx(apart.drift(INT8), rel=1e-6)
    assert (together.sequences, together.shortest, together.longest) == (2, 6, 9)
