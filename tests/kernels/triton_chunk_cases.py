"""The Triton chunk kernels in Triton's interpreter. Run by `test_triton_chunk.py` with TRITON_INTERPRET=1.

The interpreter multiplies no bf16, so here bf16 parts of an operand, and inputs, are float32 tensors that hold its
numbers; fp16 parts are what they are. It finds wrong indices, masks, orders and formulas, and says nothing about
layouts, races or what a GPU rounds.
"""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lattn_compile.kernels import (
    chunk,
    chunk_call,
    chunk_channel,
    chunk_channel_cuda,
    chunk_fine,
    chunk_keys_cuda,
    chunk_levels,
    chunk_levels_cuda,
    chunk_math,
    chunk_pairs,
    chunk_rows,
    chunk_state_cuda,
    chunk_tiles,
)
from lattn_compile.kernels.reference import chunk as reference
from tests.kernels.chunk_calls import Call, make_call
from tests.kernels.decode_calls import Given
from tests.kernels.gluon_stand_in import interpreted


@triton.jit
def _pairs(x):  # type: ignore[no-untyped-def]
    """bf16's numbers, halves rounded away from zero, in float32."""
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _exact_operand(x):  # type: ignore[no-untyped-def]
    return (x.to(tl.float32),)


@triton.jit
def _exp2(x):  # type: ignore[no-untyped-def]
    return tl.exp2(x)


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    return x.to(tl.float16)


@pytest.fixture(autouse=True)
def _parts_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_math, "_pairs", _pairs)
    monkeypatch.setattr(chunk_call, "PART", torch.float32)
    for module in (chunk_math, chunk_levels, chunk_tiles):
        monkeypatch.setattr(module, "exact_operand", _exact_operand)
    for module in (chunk_math, chunk_channel, chunk_tiles):
        monkeypatch.setattr(module, "exp2", _exp2)
    for module in (chunk_math, chunk_channel, chunk_pairs, chunk_rows):
        monkeypatch.setattr(module, "half", _half)


CASES: dict[str, dict[str, Any]] = {
    "head decay, shared keys, ragged": {"lengths": (66, 0), "key_dim": 20, "value_dim": 20},
    "channel decay, shared keys, ragged": {"lengths": (34, 0), "decay": "channel", "key_dim": 20, "value_dim": 20},
    "no decay, channels in two slices": {"lengths": (20,), "ratio": 1, "decay": None, "key_dim": 40},
    "additive, head decay": {"lengths": (40,), "rule": "additive", "beta": False, "qk_l2norm": False, "ratio": 1},
    "additive, channel decay": {"lengths": (36,), "rule": "additive", "decay": "channel", "ratio": 1},
    "a few tokens": {"lengths": (9, 0, 2), "gap": 0, "ratio": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_are_the_float64_reference(name: str) -> None:
    call = make_call(**CASES[name])
    errors = call.both(chunk).errors(call.exact().both(reference))
    assert max(errors.values()) <= 5e-6, errors


@pytest.mark.parametrize("g", [0.0, -0.01])
def test_one_repeated_key_holds_the_bounds_of_semantics_8(g: float) -> None:
    """What an inverse makes of it alternates in sign and cancels: kept in 24 bits only, gradients exceed them."""
    call = make_call(lengths=(66,), gap=0, ratio=1, one_key=True, strength=1.9)
    assert call.g is not None
    call.g.fill_(g)
    for name, error in call.both(chunk).errors(call.exact().both(reference)).items():
        assert error <= (5e-6 if name in ("o", "final") else 1e-5), (name, error)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_reset_clears_the_state_and_leaves_gradients_finite(decay: str) -> None:
    call = make_call(lengths=(33,), ratio=1, decay=decay)
    assert call.g is not None
    call.g[3::7] = -math.inf
    errors = call.both(chunk).errors(call.exact().both(reference))
    assert max(errors.values()) <= 5e-6, errors


@pytest.fixture(params=["registers", "spread"])
def bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """float32 inputs are taken for bf16; both loops over blocks, see `chunk_fine.is_spread`."""
    monkeypatch.setattr(chunk_call, "LOW", (torch.float32,))
    if request.param == "spread":
        found = types.SimpleNamespace()
        for module in (chunk_state_cuda, chunk_channel_cuda, chunk_keys_cuda, chunk_levels_cuda):
            vars(found).update(vars(interpreted(module, tmp_path)))
        monkeypatch.setattr(chunk_fine, "is_spread", lambda device: True)
        monkeypatch.setattr(chunk_fine, "gluon", lambda: found)


def _bf16(call: Call) -> Call:
    """The same with q, k and v that bf16 holds, in float32, which the kernels are told to take for it."""
    return dataclasses.replace(call, **{n: getattr(call, n).bfloat16().float() for n in ("q", "k", "v")})


BF16: dict[str, dict[str, Any]] = {
    "head decay, shared keys, ragged": {"lengths": (66, 0, 130), "value_dim": 36, "key_dim": 70},
    "channel decay, shared keys, ragged": {"lengths": (66, 0), "decay": "channel", "key_dim": 40},
    "channel decay, three blocks": {"lengths": (140,), "decay": "channel", "key_dim": 70, "value_dim": 36, "ratio": 1},
    "no decay": {"lengths": (20,), "ratio": 1, "decay": None, "gap": 0},
    "additive, head decay": {"lengths": (33, 0), "rule": "additive", "beta": False, "qk_l2norm": False},
    "additive, channel decay": {"lengths": (36,), "rule": "additive", "decay": "channel", "ratio": 1},
    "a few tokens": {"lengths": (9, 0, 2), "ratio": 1},
}


@pytest.mark.parametrize("name", BF16)
def test_bf16_inputs_keep_what_is_float32(name: str, bf16: None) -> None:
    """States to 22 bits; outputs, which bf16 rounds to 8, to 11; gradients of keys to sixteen."""
    call = _bf16(make_call(**BF16[name]))
    bounds = {"final": 5e-7, "dstate": 5e-6, "dv": 1e-6, "dbeta": 2e-6, "o": 6e-4}
    for name, error in call.both(chunk).errors(call.exact().both(reference)).items():
        assert error <= bounds.get(name, 1e-5), (name, error)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_bf16_inputs_of_any_range_fit_fp16(scale: float, bf16: None) -> None:
    call = make_call(lengths=(40,), ratio=1, gap=0, key_dim=64, value_dim=32)
    call = _bf16(dataclasses.replace(call, v=call.v * scale, state=call.state * scale, q=call.q * 1e6))
    call.v[::2] *= 1e-3
    errors = call.both(chunk).errors(call.exact().both(reference))
    assert errors["final"] <= 5e-7 and errors["dstate"] <= 1e-5 and errors["o"] <= 6e-4, errors


def test_a_block_of_zero_keys_leaves_a_small_state_as_it_is(bf16: None) -> None:
    """What keys of a block have in common is 1 then, not the power of two of nothing."""
    call = make_call(lengths=(140,), gap=0, ratio=1, key_heads=1, key_dim=64, value_dim=32)
    call = dataclasses.replace(call, v=call.v * 2.0**-40, state=call.state * 2.0**-40)
    for name in ("k", "v", "g", "beta"):
        getattr(call, name)[64:134] = 0.0
    errors = _bf16(call).both(chunk).errors(_bf16(call).exact().both(reference))
    assert errors["final"] <= 1e-6 and errors["dstate"] <= 5e-6 and errors["o"] <= 6e-4, errors


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_one_repeated_bf16_key_cancels_no_more_than_this(decay: str, bf16: None) -> None:
    """Gradients of gates are sums that cancel there: without 27 bits of the inverse they are 1.1e-5 and 3.5e-5 off.

    By channel 2.3e-5 is left at these sizes, 2.1e-5 by loops in registers; at K = V = 128, on a GPU, 1.9e-5, where
    semantics §8 allows 2e-5.
    """
    options = {"lengths": (128,), "gap": 0, "ratio": 1, "key_heads": 1, "key_dim": 64, "value_dim": 32}
    call = make_call(one_key=True, strength=1.9, decay=decay, **options)
    assert call.g is not None
    call.g.fill_(-0.01)
    errors = _bf16(call).both(chunk).errors(_bf16(call).exact().both(reference))
    assert errors["final"] <= (1e-5 if decay == "head" else 6e-6) and errors["dstate"] <= 5e-6, errors
    assert errors["dg"] <= (1e-5 if decay == "head" else 3.2e-5), errors


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("gate", [math.nan, 0.5])
def test_a_gate_that_is_no_decay_is_seen(gate: float, decay: str, bf16: None) -> None:
    """NaN, or above 0, in one head's gate: nothing finite behind it there, all finite in the other head."""
    call = _bf16(make_call(lengths=(20,), gap=0, key_heads=2, ratio=1, key_dim=64, value_dim=32, decay=decay))
    assert call.g is not None
    call.g[12, 0] = gate
    got = call.forward(chunk).tensors
    assert not got["o"][12:, 0].isfinite().any() and not got["final"][0, 0].isfinite().any()
    assert got["o"][:, 1].isfinite().all() and got["final"][0, 1].isfinite().all()


def test_keys_that_leave_fp16_are_seen(bf16: None) -> None:
    """beta |k|^2 of 10^9 without a norm, where a state grows as much with every token: NaN, not a wrong number."""
    call = make_call(lengths=(3,), gap=0, ratio=1, key_heads=1, key_dim=64, value_dim=32, qk_l2norm=False)
    call.k.fill_(3000.0)
    got, want = (_bf16(call).forward(kernel).tensors["final"] for kernel in (chunk, reference))
    assert (got.isnan() | ((got - want).abs() <= 1e-3 * want.abs())).all()


@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
def test_many_spans_are_one_call(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(lengths=(66,), ratio=1)
    if inputs == "bfloat16":
        monkeypatch.setattr(chunk_call, "LOW", (torch.float32,))
        call = _bf16(call)
    whole = call.both(chunk)
    for name, value in (("LEAST_BUDGET", 1), ("GIVEN", 0), ("LEAST_SPAN", 1)):
        monkeypatch.setattr(chunk_call, name, value)
    assert whole.same_bits(call.both(chunk)) == []


def test_strides_of_any_kind_are_read() -> None:
    call = make_call(lengths=(12,), gap=0, key_heads=2, ratio=1)
    strided = call.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    assert not strided.q.is_contiguous()
    assert call.both(chunk).same_bits(strided.both(chunk)) == []


def test_no_tokens_and_no_sequences() -> None:
    call = make_call(lengths=(0, 0), gap=0)
    final = call.forward(chunk).tensors["final"]
    assert final.equal(call.state) and final.data_ptr() != call.state.data_ptr()
    assert make_call(lengths=(), gap=0).both(chunk).tensors["final"].shape[0] == 0


WRITES: dict[str, dict[str, Any]] = {
    "int8, a tile of two pieces": {"state_format": "int8", "chunk_size": 16, "value_dim": 64},
    "int8, all columns": {"state_format": "int8/*x*", "chunk_size": 32, "value_dim": 40},
    "int8, read after the write": {
        "state_format": "int8/*x16", "chunk_size": 24, "decay": "channel", "readout": "after_write"
    },
    "nvfp4": {"state_format": "nvfp4", "chunk_size": 33, "value_dim": 64, "readout": "after_write"},
    "fp8 in small tiles": {"state_format": "fp8/8x8", "chunk_size": 16, "readout": "after_write"},
    "fp16, chunks smaller than a block": {"state_format": "fp16", "chunk_size": 11},
}  # fmt: skip


@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITES)
def test_written_states_are_the_references_and_gradients_pass_straight_through_them(
    name: str, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(lengths=(34,), gap=0, ratio=1, **WRITES[name])
    if inputs == "bfloat16":
        monkeypatch.setattr(chunk_call, "LOW", (torch.float32,))
        call = _bf16(call)
    want = call.forward(reference)
    errors = call.forward(chunk).errors(want)
    assert errors["final"] <= 1e-4, errors  # a code may fall the other way
    assert errors["o"] <= (1e-4 if inputs == "float32" else 6e-4), errors
    errors = call.backward(chunk).errors(_at_its_states(call))
    assert max(errors.values()) <= 1e-5, errors


def _at_its_states(call: Call) -> Any:
    """Gradients of the float64 reference where every write gives what the kernel wrote there."""
    size, state, states = call.options["chunk_size"], call.state, []
    for begin in range(0, int(call.lengths[0]) - size + 1, size):
        lengths = torch.full_like(call.lengths, size)
        part = dataclasses.replace(call, state=state, starts=call.starts + begin, lengths=lengths)
        state = part.forward(chunk).tensors["final"]
        states.append(state.double())
    exact = call.exact()
    given = Given(call.options["quantize"].fmt).using(states)
    return dataclasses.replace(exact, options=exact.options | {"quantize": given}).backward(reference)


@pytest.mark.parametrize(("spec", "decay"), [("int8", "head"), ("fp8/*x32", "channel"), ("nvfp4", "head")])
def test_bf16_inputs_write_what_the_reference_writes(spec: str, decay: str, bf16: None) -> None:
    options = {"chunk_size": 64, "lengths": (134,), "gap": 0, "key_heads": 1, "ratio": 1}
    options |= {"key_dim": 70, "value_dim": 64}
    call = _bf16(make_call(state_format=spec, decay=decay, **options))
    errors = call.forward(chunk).errors(call.forward(reference))
    assert errors["final"] <= 1e-4 and errors["o"] <= 6e-4, errors
    errors = call.backward(chunk).errors(_at_its_states(call))
    assert max(errors.values()) <= 1e-5, errors


def test_a_run_cut_on_its_grid_is_the_uncut_one() -> None:
    call = make_call(state_format="int8/*x16", chunk_size=20, lengths=(70,), offsets=(7,), gap=0, ratio=1)
    whole = call.forward(chunk).tensors
    first = dataclasses.replace(call, lengths=call.lengths * 0 + 33).forward(chunk).tensors
    rest = dataclasses.replace(
        call, state=first["final"], starts=call.starts + 33, lengths=call.lengths - 33, offsets=call.lengths * 0
    ).forward(chunk)  # fmt: skip
    assert rest.tensors["final"].equal(whole["final"])
    assert rest.tensors["o"][33:].equal(whole["o"][33:])
