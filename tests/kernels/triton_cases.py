"""The Triton decode kernel in Triton's interpreter. Run by `test_triton_decode.py` with TRITON_INTERPRET=1.

It runs the kernels' own Python on the CPU: it finds wrong indices, masks, orders and formulas. It says nothing about
layouts, bits or bf16, which the interpreter does not round as a GPU does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lattn_compile.formats import parse
from lattn_compile.kernels.reference import decode as reference
from tests.kernels.decode_calls import Outcome, at_its_states, make_call

pytest.importorskip("triton")

from lattn_compile.kernels import decode
from tests.kernels.codec_kernels import exponentials, qdq, tiles

CASES: dict[str, dict[str, Any]] = {
    "gdn": {},
    "gdn-int8": {"state_format": "int8", "key_dim": 20, "value_dim": 20},
    "gdn-int8-16x8-tiles": {"state_format": "int8/16x8", "key_dim": 40, "value_dim": 12, "ratio": 1, "seed": 1},
    "kda-fp8-after": {"state_format": "fp8", "decay": "channel", "readout": "after_write", "key_dim": 12},
    "kda-odd": {"decay": "channel", "key_dim": 7, "value_dim": 5, "qk_l2norm": False, "lengths": (2, 0)},
    "additive-nvfp4": {
        "state_format": "nvfp4",
        "rule": "additive",
        "beta": False,
        "value_dim": 72,
        "ratio": 1,
        "lengths": (2,),
    },
    "delta-columns-fp8": {"state_format": "fp8/*x1", "decay": None, "value_dim": 6, "lengths": (3,)},
    "large-keys": {"key_dim": 130, "value_dim": 9, "state_format": "int8/*x*", "ratio": 1, "lengths": (2,)},
    "fp16": {"state_format": "fp16", "readout": "after_write", "lengths": (2,), "value_dim": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_are_the_float64_loop(name: str) -> None:
    call = make_call(**CASES[name])
    want = call.exact().both(reference, 2)
    errors = call.both(decode, 2).errors(want)
    assert max(errors.values()) <= 1e-5, errors


ENCODED: dict[str, dict[str, Any]] = {
    "int8": {"state_format": "int8", "value_dim": 12, "key_dim": 12},
    "int8-tiles": {"state_format": "int8/8x8", "value_dim": 12, "key_dim": 20, "readout": "after_write"},
    "int8-small-tiles": {"state_format": "int8/4x4", "value_dim": 6, "key_dim": 7, "decay": "channel"},
    "fp8-columns": {"state_format": "fp8/*x1", "value_dim": 5, "key_dim": 9},
    "nvfp4": {"state_format": "nvfp4", "value_dim": 8, "key_dim": 17, "decay": None, "readout": "after_write"},
    "bf16": {"state_format": "bf16", "value_dim": 5, "key_dim": 7},
    "fp16": {"state_format": "fp16", "value_dim": 8, "key_dim": 8},
    "exact": {"value_dim": 8, "key_dim": 8},
}


@pytest.mark.parametrize("name", [name for name in ENCODED if name not in ("int8-tiles", "fp16")])
def test_encoded_checkpoints_give_the_bits_of_fp32_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_WHOLE", 2)
    call = make_call(ratio=1, lengths=(5, 0, 1), **ENCODED[name])
    want = Outcome(_without_checkpoints(call.both(decode, 4)))
    assert want.same_bits(call.trained(decode, 4)) == []


@pytest.mark.parametrize("name", ENCODED)
def test_a_row_is_what_torch_would_store(name: str) -> None:
    call = make_call(ratio=2, lengths=(3, 2), gap=0, **ENCODED[name])
    assert call.g is None or call.g[1].fill_(-torch.inf) is not None  # zeros, but for the write
    rows, theirs = call.rows(2), call.rows(2)
    decode.forward(*call.arguments(), None, rows, 2, **call.options)
    states = call.forward(decode, 2).tensors["checkpoints"]
    used = torch.tensor([0, 1, 2])
    theirs.index_copy_(0, used, states[used])
    assert rows.buffer.nan_to_num().equal(theirs.buffer.nan_to_num())  # and nothing where no checkpoint is
    assert rows.index_select(0, used).equal(states[used])


def test_the_first_state_is_the_given_one_even_if_no_code_stands_for_it() -> None:
    call = make_call(ratio=1, lengths=(3,), **ENCODED["int8"])
    call = dataclasses.replace(call, state=torch.randn_like(call.state))
    want = Outcome(_without_checkpoints(call.both(decode, 2)))
    assert want.same_bits(call.trained(decode, 2)) == []


@pytest.mark.parametrize("name", ["int8", "int8-small-tiles", "nvfp4"])
def test_a_row_keeps_a_nan_where_torch_does(name: str) -> None:
    call = make_call(ratio=1, lengths=(1,), gap=0, **ENCODED[name])
    call.state[0, 0, 1, 2] = torch.nan
    rows = call.rows(1)
    decode.forward(*call.arguments(), None, rows, 1, **call.options)
    want = call.options["quantize"].qdq(call.state)
    got = rows.index_select(0, torch.tensor([0]))
    assert want.isnan().any() and torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("name", ["int8", "exact", "nvfp4"])
def test_a_forward_in_segments_has_the_bits_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvfp4's checkpoints are then encoded by another kernel than a loop over all tokens has for it."""
    monkeypatch.setattr(decode, "_SEGMENTS", 2)
    call = make_call(ratio=1, lengths=(5, 5), gap=0, **ENCODED[name])
    if name == "nvfp4":
        call.state[1, 0, 3, 2] = torch.nan
        call.state.copy_(call.options["quantize"].qdq(call.state))
    o, rows, theirs = torch.full_like(call.v, torch.nan), call.rows(1), call.rows(1)
    final = decode.forward(*call.arguments(), o, rows, 1, **call.options)
    want = call.forward(decode, 1).tensors
    used = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    for ours, expected in (
        (o, want["o"]),
        (final, want["final"]),
        (rows.index_select(0, used), want["checkpoints"][used]),
    ):
        assert ours.isnan().equal(expected.isnan()) and ours.nan_to_num().equal(expected.nan_to_num())
    theirs.index_copy_(0, used, want["checkpoints"][used])
    assert rows.buffer.nan_to_num().equal(theirs.buffer.nan_to_num())


@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_states_written_again_are_those_of_the_loop(decay: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_WHOLE", 5)
    call = make_call(ratio=1, lengths=(14, 5), decay=decay, beta=decay != "channel", value_dim=4, key_dim=8)
    errors = call.trained(decode, 12).errors(Outcome(_without_checkpoints(call.exact().both(reference, 12))))
    assert max(errors.values()) <= 1e-5, errors


def _without_checkpoints(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {name: x for name, x in outcome.tensors.items() if name != "checkpoints"}


@pytest.mark.parametrize("state_format", [None, "int8"])
def test_checkpoints_are_made_where_none_were_kept(state_format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_WHOLE", 2)
    call = make_call(ratio=1, lengths=(7,), state_format=state_format, value_dim=4)
    errors = call.backward(decode).errors(at_its_states(call, decode))
    assert max(errors.values()) <= 1e-5, errors


def test_strides_of_any_kind_are_read() -> None:
    call = make_call(ratio=2, lengths=(2,))
    strided = call.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    assert not strided.q.is_contiguous() or not strided.v.is_contiguous()
    assert call.forward(decode).same_bits(strided.forward(decode)) == []
    assert call.backward(decode).same_bits(strided.backward(decode)) == []


def test_no_tokens_and_no_sequences() -> None:
    call = make_call(lengths=(0, 0), gap=0)
    final = call.forward(decode).tensors["final"]
    assert final.equal(call.state) and final.data_ptr() != call.state.data_ptr()
    assert call.backward(decode).tensors["dstate"].equal(call.cotangents()[1])
    none = make_call(lengths=(), gap=0)
    assert none.forward(decode).tensors["final"].shape[0] == 0


def test_a_reset_clears_the_state() -> None:
    call = make_call(lengths=(3,), state_format="int8")
    assert call.g is not None
    call.g[2] = -torch.inf
    want = call.exact().both(reference, 8)
    errors = call.both(decode, 8).errors(want)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("spec", ["int8", "int8/4x4", "int8/*x*", "fp8", "fp8/*x1", "fp8/32x16", "nvfp4", "fp16"])
def test_the_codec_has_the_bits_of_the_torch_codec(spec: str) -> None:
    states = tiles(20, 24)
    got, want = qdq(states, spec), parse(spec).qdq(states)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))


def test_exponentials_are_nearly_correctly_rounded() -> None:
    x = torch.cat([-torch.logspace(-8, 2.02, 4000), torch.tensor([0.0, -torch.inf, torch.nan, 88.0, 1e-3])])
    got, want = exponentials(x).double(), x.double().exp()
    assert torch.equal(got.isnan(), want.isnan())
    units = (got - want).abs() / torch.exp2(want.log2().floor().clamp(min=-126) - 23)
    assert units[want.isfinite()].max() <= 1.0
    assert units[(x > -0.1) & (x <= 0)].max() <= 0.6
