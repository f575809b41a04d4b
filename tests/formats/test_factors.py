"""Rounding of vectors: §3's rule with the vector as tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattn_compile.errors import DtypeError, FormatError
from lattn_compile.formats import factors
from lattn_compile.formats.factors import FACTORS
from lattn_compile.formats.rounding import TINY, divide, rn16
from lattn_compile.modes import Replay
from tests.formats import oracle
from tests.formats.states import bits, randn, rough, said, same, small_states

GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
CODES = {"int8": (127, oracle.int8_code, torch.int8), "fp8_e4m3": (448, oracle.fp8_code, torch.float8_e4m3fn)}
every = pytest.mark.parametrize("name", FACTORS)
scaled = pytest.mark.parametrize("name", list(CODES))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def assert_is_oracle(name: str, x: torch.Tensor) -> None:
    largest, code, code_dtype = CODES[name]
    enc = factors.encode(x, name)
    codes, scales, values = oracle.tiled(x.tolist(), 1, None, largest, code, GRIDS[x.dtype])
    assert enc["codes"].dtype == code_dtype and same(enc["codes"].to(x.dtype), torch.tensor(codes, dtype=x.dtype))
    assert same(enc["scale"], torch.tensor(scales, dtype=x.dtype)[:, 0])
    assert same(factors.decode(enc, name), torch.tensor(values, dtype=x.dtype))
    assert same(factors.qdq(x, name), torch.tensor(values, dtype=x.dtype))


@scaled
@dtypes
def test_codec_equals_exact_rationals(name: str, dtype: torch.dtype) -> None:
    assert_is_oracle(name, rough(34, 70, seed=1, dtype=dtype))


@scaled
@settings(max_examples=100, deadline=None)
@given(x=small_states())
def test_codec_equals_exact_rationals_for_any_numbers(name: str, x: oracle.Rows) -> None:
    assert_is_oracle(name, torch.tensor(x))


@every
@dtypes
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2, 128), (2, 0, 5), (4, 3, 2, 257)], ids=str)
def test_qdq_is_decode_of_encode_by_the_bit(name: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype)
    enc, out = factors.encode(x, name), factors.qdq(x, name)
    assert enc["codes"].shape == shape and all(t.is_contiguous() for t in enc.values())
    assert name not in CODES or enc["scale"].shape == shape[:-1]
    assert same(factors.decode(enc, name, dtype=dtype), out) and out.dtype == dtype and out.shape == shape
    if x.numel():
        rows = x[..., 0].numel()
        used = sum(t.numel() * t.element_size() for t in factors.encode(x.float(), name).values())
        assert used == rows * factors.nbytes(shape[-1], name)


@every
@dtypes
@given(exponent=st.integers(-90, 90), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rounding_twice_is_rounding_once(name: str | None, dtype: torch.dtype, exponent: int, seed: int) -> None:
    once = factors.qdq(randn(50, 3, 17, seed=seed, dtype=dtype) * 2.0**exponent, name)
    assert same(factors.qdq(once, name), once)


@every
def test_a_vector_does_not_depend_on_the_others_nor_on_strides(name: str | None) -> None:
    x = rough(6, 5, 32)
    out = factors.qdq(x, name)
    assert all(same(factors.qdq(x[i, j], name), out[i, j]) for i in range(6) for j in range(5))
    assert same(factors.qdq(x.transpose(0, 1).contiguous().transpose(0, 1), name), out)
    assert same(factors.qdq(x.mT.contiguous().mT, name), out)
    before = x.clone()
    factors.encode(x, name)["codes"].zero_()
    assert same(x, before)


@scaled
def test_edge_rules_are_the_tiles(name: str) -> None:
    x = randn(5, 8)
    x[0], x[1] = 0.0, TINY / 2
    x[2, 3], x[3, 0] = torch.nan, -torch.inf
    enc = factors.encode(x, name)
    assert enc["scale"][:2].tolist() == [1.0, 1.0] and not enc["codes"][:4].view(torch.uint8).any()
    assert torch.equal(bits(enc["scale"][2:4]), bits(torch.full((2,), torch.nan)))
    out = factors.qdq(x, name)
    assert same(out[:2], torch.zeros(2, 8)) and bool(out[2:4].isnan().all()) and bool(out[4].isfinite().all())
    assert same(enc["scale"][4], rn16(divide(x[4].abs().max(), float(CODES[name][0]))))


def test_bf16_is_a_plain_cast_and_none_does_nothing() -> None:
    x = rough(6, 5, 32)
    assert same(factors.encode(x, "bf16")["codes"], x.to(torch.bfloat16))
    assert same(factors.qdq(x, "bf16"), x.to(torch.bfloat16).float())
    assert factors.qdq(x, None) is x and same(factors.encode(x, None)["codes"], x)
    assert factors.encode(x.double(), None)["codes"].dtype == torch.float64
    assert factors.decode(factors.encode(x, "bf16"), "bf16").dtype == torch.float32


@every
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_vectors_are_rounded_in_fp32(name: str | None, half: torch.dtype) -> None:
    x = randn(5, 16).to(half)
    assert same(factors.qdq(x, name), factors.qdq(x.float(), name).to(half))
    want = factors.encode(x.float(), name)
    assert all(same(t, want[key]) for key, t in factors.encode(x, name).items())


def test_nbytes_of_the_usual_vector() -> None:
    assert {name: factors.nbytes(128, name) for name in FACTORS} == {
        None: 512,
        "bf16": 256,
        "fp8_e4m3": 132,
        "int8": 132,
    }


def test_the_names_are_those_of_the_replay_mode() -> None:
    assert all(Replay(factors=name).factors == name for name in FACTORS)


def test_nothing_is_differentiable_but_the_identity() -> None:
    x = randn(3, 8).requires_grad_()
    assert all(not factors.qdq(x, name).requires_grad for name in FACTORS if name is not None)
    assert not any(t.requires_grad for name in FACTORS for t in factors.encode(x, name).values())


def test_misuse_is_refused_by_name() -> None:
    x = randn(3, 8)
    for call in (factors.qdq, factors.encode):
        with pytest.raises(FormatError) as error:
            call(x, "fp8")
        assert said(error.value) == (
            "factors: got 'fp8'\n  want None or 'bf16' or 'fp8_e4m3' or 'int8'\n"
            "  Choose one of these. Did you mean 'fp8_e4m3'?"
        )
        with pytest.raises(DtypeError, match=r"got torch.int32; want a float32"):
            call(torch.zeros(3, dtype=torch.int32), "int8")
    with pytest.raises(FormatError, match=r"enc: got tensors \['codes'\]; want \['codes', 'scale'\]"):
        factors.decode({"codes": x}, "int8")
    with pytest.raises(FormatError, match="factors: got 8"):
        factors.nbytes(4, 8)  # type: ignore[arg-type]
