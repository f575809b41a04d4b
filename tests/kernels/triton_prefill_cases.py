"""The Triton prefill kernels in Triton's interpreter. Run by `test_triton_prefill.py` with TRITON_INTERPRET=1.

As in `triton_chunk_cases.py`, the parts of an exact operand are float32 tensors here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lattn_compile.kernels import (
    chunk_math,
    prefill,
    prefill_call,
    prefill_channels,
    prefill_codec,
    prefill_gradients,
)
from lattn_compile.kernels.common.codec import round_codes
from lattn_compile.kernels.reference import chunk as reference
from lattn_compile.modes import SITES, BlockDoubling, Prefill
from tests.kernels.prefill_calls import ALL, INVERSES, ONE, call_of, off
from tests.kernels.triton_chunk_cases import _exact_operand, _pairs


@triton.jit
def _e4m3(y):  # type: ignore[no-untyped-def]
    code, _ = round_codes(y, "fp8_e4m3")
    return code.to(tl.float16)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(1.0, x)


@triton.jit
def _quotient(x, y, inverse):  # type: ignore[no-untyped-def]
    return tl.div_rn(x, y)


@pytest.fixture(autouse=True)
def _parts_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_math, "_pairs", _pairs)
    for module in (chunk_math, prefill_channels, prefill_gradients):
        monkeypatch.setattr(module, "exact_operand", _exact_operand)
    monkeypatch.setattr(prefill_call, "PART", torch.float32)
    monkeypatch.setattr(prefill_call, "LEAST", 32)
    # The interpreter has neither PTX, nor an fma that rounds once, nor E4M3.
    monkeypatch.setattr(prefill_codec, "reciprocal", _reciprocal)
    monkeypatch.setattr(prefill_codec, "quotient", _quotient)
    monkeypatch.setattr(prefill_codec, "e4m3", _e4m3)
    monkeypatch.setitem(prefill_call.CODES, "fp8_e4m3", torch.float16)


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | float) -> torch.Tensor:
    # Exact in float64 but for its last bits, which no case here hangs on.
    return (x.double() * y.double() + z).float()


def test_scales_without_divisions_are_those_with_them() -> None:
    """What `reciprocal` and `quotient` do on a GPU, of every significand and estimate that there may be."""
    step = torch.arange(1 << 19, 1 << 20, dtype=torch.float64).mul(2.0**-19).float()
    want = 1 / step
    for units in (-1, 0, 1):
        y = (want.view(torch.int32) + units).view(torch.float32)
        assert _fma(_fma(-step, y, 1.0), y, y).equal(want), units
    amax = torch.arange(1 << 23, 1 << 24, dtype=torch.float64).mul(2.0**-23).float()
    for largest in (127.0, 448.0, 6.0 * 448.0, 6.0):
        inverse = torch.tensor(1.0 / largest)
        q = amax * inverse
        assert _fma(_fma(-q, torch.tensor(largest), amax), inverse, q).equal(amax / largest), largest


EVERY = "LATTN_COMPILE_ALL" in os.environ
CASES: dict[str, dict[str, Any]] = {
    "head decay, shared keys, ragged": {"lengths": (66, 0, 3), "key_dim": 16, "value_dim": 20},
    # With seed 0 one code of the kernels falls the other way, with seed 3 one of the float32 reference.
    "channel decay, shared keys, ragged": {
        "lengths": (70, 0),
        "decay": "channel",
        "key_dim": 48,
        "value_dim": 20,
        "seed": 1,
    },
    "no decay": {"lengths": (20,), "ratio": 1, "decay": None, "key_dim": 48},
}
ADDITIVE: dict[str, dict[str, Any]] = {
    "additive, head decay": {"lengths": (40,), "rule": "additive", "beta": False, "qk_l2norm": False, "ratio": 1},
    "additive, channel decay": {"lengths": (36,), "rule": "additive", "decay": "channel", "ratio": 1},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fmt", ALL)
def test_all_sites_round_as_the_reference_does(name: str, fmt: str) -> None:
    errors = off(call_of(ALL[fmt], **CASES[name]))
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("site", SITES)
def test_each_site_rounds_by_itself(site: str, decay: str) -> None:
    errors = off(call_of(ONE[site], lengths=(66,), decay=decay, key_dim=32, ratio=1))
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_sites_of_different_formats_with_an_approximate_inverse(decay: str) -> None:
    sites = {"kk": "int8", "qk": "fp8_e4m3", "w": "nvfp4", "ws": "fp8_e4m3", "kv": "int8"}
    call = call_of(Prefill(sites, inverse=BlockDoubling(8)), lengths=(66,), decay=decay, key_dim=32, ratio=1)
    errors = off(call) | off(call, backward=True)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("name", ADDITIVE)
def test_a_rule_that_erases_nothing_has_the_other_sites(name: str) -> None:
    policy = Prefill({"qk": "int8", "qs": "fp8_e4m3", "av": "nvfp4", "kv": "int8"})
    errors = off(call_of(policy, **ADDITIVE[name]))
    assert max(errors.values()) <= 1, errors


DECAYS = ("head", "channel")


@pytest.mark.parametrize(
    ("inverse", "decay"),
    [(x, d) for i, x in enumerate(INVERSES) for j, d in enumerate(DECAYS) if EVERY or i % 2 == j],
    ids=str,
)
def test_inverses_and_their_residuals_are_the_references(inverse: Any, decay: str) -> None:
    call = call_of(Prefill(inverse=inverse), lengths=(70, 0, 20), decay=decay, ratio=1)
    ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
    for kernel, c, found in ((prefill, call, ours), (reference, call.exact(), theirs)):
        kernel_call = dataclasses.replace(c, options=c.options | {"measured": found.append})
        kernel_call.forward(kernel)
    errors = off(call)
    assert max(errors.values()) <= 1, errors
    mine, want = torch.cat(ours).flatten(), torch.cat(theirs).flatten()
    mine = mine[mine >= 0]
    assert mine.numel() == want.numel()
    torch.testing.assert_close(mine.double().sort().values, want.sort().values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("g", [0.0, -0.01])
def test_one_repeated_key_with_operands_of_the_state_rounded(g: float) -> None:
    """The exact inverse is substitution here too."""
    call = call_of(Prefill({"qs": "int8"}), lengths=(66,), gap=0, ratio=1, one_key=True, strength=1.9)
    assert call.g is not None
    call.g.fill_(g)
    errors = off(call)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_hostile_inputs(decay: str) -> None:
    """A reset, zeros, and a NaN, which stays where it is visible."""
    for name in ALL:
        call = call_of(ALL[name], lengths=(33, 70), ratio=1, decay=decay, key_dim=16)
        assert call.g is not None
        call.g[3::7] = -math.inf
        call.k[2::5] = 0.0
        errors = off(call)
        assert max(errors.values()) <= 1, (name, errors)
        call.v[int(call.starts[1]) + 5] = math.nan
        want, got = call.exact().forward(reference).tensors["o"], call.forward(prefill).tensors["o"]
        assert got.isnan().equal(want.isnan()), name


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_gate_above_0_is_nan_in_its_head_from_its_chunk_on(decay: str) -> None:
    call = call_of(ALL["int8"], lengths=(70, 3), ratio=2, decay=decay, key_dim=16)
    assert call.g is not None
    want, first = call.forward(prefill).tensors, int(call.starts[0])
    call.g[first + 66, 1] = 0.5
    got = call.forward(prefill).tensors
    assert got["o"][first + 66 : first + 70, 1].isnan().all() and got["final"][0, 1].isnan().all()
    for x in (want, got):
        x["o"][first + 64 : first + 70, 1], x["final"][0, 1] = 0.0, 0.0
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True)


def test_exact_operands_of_bf16_inputs_keep_24_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_call, "LOW", (torch.float32,))
    call = call_of(Prefill({"kk": "int8"}), lengths=(66, 0), value_dim=36)
    call = dataclasses.replace(call, **{n: getattr(call, n).bfloat16().float() for n in ("q", "k", "v")})
    errors = call.forward(prefill).errors(call.exact().forward(reference))
    assert max(errors.values()) <= 5e-6, errors


def test_many_spans_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(ALL["int8"], lengths=(140, 70), ratio=1, key_dim=16)
    whole = call.forward(prefill)
    monkeypatch.setattr(prefill_call, "BUDGET", 1)
    monkeypatch.setattr(prefill_call, "LEAST_SPAN", 1)
    assert whole.same_bits(call.forward(prefill)) == []


def test_no_tokens_and_no_sequences() -> None:
    call = call_of(ALL["int8"], lengths=(0, 0), gap=0, key_dim=16)
    final = call.forward(prefill).tensors["final"]
    assert final.equal(call.state) and final.data_ptr() != call.state.data_ptr()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fmt", ALL)
def test_gradients_pass_straight_through_all_sites(name: str, fmt: str) -> None:
    errors = off(call_of(ALL[fmt], **CASES[name]), backward=True)
    assert max(errors.values()) <= 0.1, errors


@pytest.mark.parametrize(
    ("site", "decay"), [(s, d) for i, s in enumerate(SITES) for j, d in enumerate(DECAYS) if EVERY or i % 2 == j]
)
def test_gradients_at_each_site(site: str, decay: str) -> None:
    errors = off(call_of(ONE[site], lengths=(66,), decay=decay, key_dim=32, ratio=1), backward=True)
    assert max(errors.values()) <= 0.1, errors


@pytest.mark.parametrize("name", ADDITIVE)
def test_gradients_of_a_rule_that_erases_nothing(name: str) -> None:
    policy = Prefill({"qk": "int8", "qs": "fp8_e4m3", "av": "nvfp4", "kv": "int8"})
    errors = off(call_of(policy, **ADDITIVE[name]), backward=True)
    assert max(errors.values()) <= 0.1, errors


@pytest.mark.parametrize("inverse", INVERSES, ids=str)
def test_gradients_of_an_approximation_are_those_of_an_inverse(inverse: Any) -> None:
    call = call_of(Prefill({"ws": "int8"}, inverse=inverse), lengths=(70, 0, 20), ratio=2)
    errors = off(call, 2e-5, backward=True)
    assert max(errors.values()) <= 1, errors


def test_gradients_of_many_spans_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(ALL["int8"], lengths=(140, 70), ratio=1, key_dim=16)
    whole = call.backward(prefill)
    monkeypatch.setattr(prefill_call, "BUDGET", 1)
    monkeypatch.setattr(prefill_call, "LEAST_SPAN", 1)
    assert whole.same_bits(call.backward(prefill)) == []


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_reset_leaves_gradients_finite(decay: str) -> None:
    call = call_of(ALL["fp8_e4m3"], lengths=(33, 70), ratio=1, decay=decay, key_dim=16)
    assert call.g is not None
    call.g[3::7] = -math.inf
    call.k[2::5] = 0.0
    errors = off(call, backward=True)
    assert max(errors.values()) <= 0.1, errors
