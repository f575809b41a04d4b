"""The Triton decode kernel in Triton's interpreter. Run by `test_triton_decode.py` with TRITON_INTERPRET=1.

It runs the kernels' own Python on the CPU: it finds wrong indices, masks, orders and formulas. It says nothing about
layouts, bits or bf16, which the interpreter does not round as a GPU does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lattn_compile.formats import parse
from lattn_compile.kernels.reference import decode as reference
from tests.kernels.decode_calls import at_its_states, make_call

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
