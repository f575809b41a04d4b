"""Error feedback: what is stored of the error, its tile and edge rules, and the drift that it takes away."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.errors import FormatError, PolicyError
from lattn_compile.formats import REGISTRY, Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4, parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.formats.residual import FEEDBACKS, Int4, Residual
from lattn_compile.formats.rounding import TINY, divide, rn16
from tests.formats import oracle
from tests.formats.states import QUANTIZED, bits, randn, rough, same, small_states

GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
WORDS = [word for word in FEEDBACKS if word is not None]
quantized = pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
words = pytest.mark.parametrize("feedback", WORDS)
scaled = pytest.mark.parametrize("feedback", ["int4", "int8"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def assert_is_oracle(fmt: Format, feedback: str, S: Tensor) -> None:
    bits, grid = {"int4": 4, "int8": 8}[feedback], GRIDS[S.dtype]
    assert fmt.residual_tile is not None
    values = oracle.fed_back(S.tolist(), fmt.qdq(S).tolist(), fmt.residual_tile, bits, grid)
    assert same(Quantizer(fmt, feedback=feedback).qdq(S), torch.tensor(values, dtype=S.dtype))


@quantized
@scaled
@dtypes
def test_the_sum_equals_exact_rationals(fmt: Format, feedback: str, dtype: torch.dtype) -> None:
    assert_is_oracle(fmt, feedback, rough(34, 70, seed=1, dtype=dtype))
    assert_is_oracle(fmt, feedback, randn(20, 33, seed=2, dtype=dtype))


@scaled
@settings(max_examples=100, deadline=None)
@given(S=small_states(max_k=18), fmt=st.sampled_from([Int8(), Int8(3, block_k=2), Fp8(1), Nvfp4()]))
def test_the_sum_equals_exact_rationals_for_any_numbers(feedback: str, S: oracle.Rows, fmt: Format) -> None:
    assert_is_oracle(fmt, feedback, torch.tensor(S))


@quantized
def test_bf16_feedback_is_a_plain_cast(fmt: Format) -> None:
    S = rough(34, 70, seed=3)
    stored = fmt.qdq(S)
    error = (S - stored).to(torch.bfloat16)
    enc = Quantizer(fmt, feedback="bf16").encode(S)
    assert same(enc["residual"], error) and "residual_scale" not in enc
    assert same(Quantizer(fmt, feedback="bf16").qdq(S), stored + error.float())


@quantized
@words
def test_the_codes_are_those_without_feedback(fmt: Format, feedback: str) -> None:
    S = rough(2, 3, 33, 70)
    q = Quantizer(fmt, feedback=feedback)
    enc, alone = q.encode(S), fmt.encode(S)
    assert tuple(enc) == q.keys == fmt.keys + (("residual",) if feedback == "bf16" else ("residual", "residual_scale"))
    assert all(same(enc[key], alone[key]) for key in fmt.keys)
    assert all(t.is_contiguous() and t.shape[:2] == (2, 3) for t in enc.values())


@pytest.mark.parametrize("K", [1, 2, 15, 16, 17, 63, 100, 255, 256])
@pytest.mark.parametrize("V", [1, 63, 64, 65, 129, 256])
def test_any_head_size_works_and_nbytes_is_what_it_takes(K: int, V: int) -> None:
    S = randn(K, V)
    for fmt in QUANTIZED:
        for feedback in WORDS:
            q = Quantizer(fmt, feedback=feedback)
            enc, out = q.encode(S), q.qdq(S)
            assert same(q.decode(enc, shape=(K, V)), out)
            assert q.nbytes(K, V) == sum(t.numel() * t.element_size() for t in enc.values())
            # Half a step of the residual, whose largest value is the largest error; and the rounding of the sum.
            finer = {"int4": 14, "int8": 254, "bf16": 256}[feedback]
            bound = float((fmt.qdq(S) - S).abs().max()) / finer * (1 + 2.0**-15) + 2.0**-24 * float(S.abs().max())
            assert float((out - S).abs().max()) <= bound


def test_nbytes_of_the_usual_head() -> None:
    sizes = {
        f"{fmt}+{feedback}": Quantizer(fmt, feedback=feedback).nbytes(128, 128)
        for fmt in (Int8(), Fp8(1, block_k=128), Nvfp4())
        for feedback in WORDS
    }
    assert sizes == {
        "int8/*x64+int4": 16392 + 8192 + 8,
        "int8/*x64+int8": 16392 * 2,
        "int8/*x64+bf16": 16392 + 32768,
        "fp8_e4m3/128x1+int4": 16896 + 8192 + 512,
        "fp8_e4m3/128x1+int8": 16896 * 2,
        "fp8_e4m3/128x1+bf16": 16896 + 32768,
        "nvfp4+int4": 9224 + 8192 + 8,
        "nvfp4+int8": 9224 + 16392,
        "nvfp4+bf16": 9224 + 32768,
    }


def test_the_residuals_tile_is_the_codes_and_nvfp4s_is_its_group() -> None:
    S = randn(40, 130)
    shapes = {
        str(fmt): list(Quantizer(fmt, feedback="int4").encode(S)["residual_scale"].shape)
        for fmt in (Int8(), Int8(5, block_k=7), Fp8(1, block_k=16), Nvfp4())
    }
    assert shapes == {"int8/*x64": [1, 3], "int8/7x5": [6, 26], "fp8_e4m3/16x1": [3, 130], "nvfp4": [1, 3]}


def test_int4_packs_two_values_in_a_byte_with_the_even_row_low() -> None:
    S = torch.tensor([[7.0], [-7.0], [-1.0], [3.0], [-4.0]])  # scale 1
    enc = Int4().encode(S)
    assert enc["codes"].tolist() == [[0x97], [0x3F], [0x0C]] and enc["state_scale"].item() == 1.0
    assert same(Int4().decode(enc, shape=(5, 1)), S) and Int4().decode(enc).shape == (6, 1)
    assert Int4().nbytes(5, 1) == 3 + 4


def test_every_int4_code_under_every_scale_is_a_fixed_point() -> None:
    scales = torch.arange(1 << 15, 1 << 16) / 2.0**15
    codes = torch.arange(-7.0, 8.0)
    stored = scales[:, None, None] * codes[:, None]
    enc = Int4().encode(stored)
    assert same(enc["state_scale"].flatten(), scales)
    assert same(Int4().decode(enc, shape=(15, 1)), stored) and same(Int4().qdq(stored), stored)


@dtypes
def test_int4s_scale_is_a_true_division_by_seven(dtype: torch.dtype) -> None:
    S = randn(4000, 3, 5, seed=4, dtype=dtype)
    assert same(Int4().encode(S)["state_scale"].flatten(), rn16(divide(S.abs().amax((1, 2)), 7.0)))


@scaled
def test_a_residual_below_the_threshold_is_zero_with_scale_one(feedback: str) -> None:
    # All of a tiny tile is its residual, which is tiny too; and so is that of a tile that is stored exactly.
    for S in (torch.full((4, 4), TINY / 2), torch.zeros(4, 4), torch.full((4, 4), 127.0)):
        enc = Quantizer(Int8(), feedback=feedback).encode(S)
        assert not enc["residual"].any() and enc["residual_scale"].item() == 1.0
        assert same(Quantizer(Int8(), feedback=feedback).qdq(S), Int8().qdq(S))


@words
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_nan_or_inf_makes_its_tile_nan_and_no_other(feedback: str, poison: float) -> None:
    for fmt, rows, columns in (
        (Int8(16, block_k=8), slice(8, 16), slice(16, 32)),
        (Fp8(), slice(0, 20), slice(0, 64)),
        (Nvfp4(), slice(0, 20), slice(0, 64)),
    ):
        S = randn(2, 3, 20, 100, seed=4)
        q = Quantizer(fmt, feedback=feedback)
        clean = q.qdq(S)
        S[1, 2, 9, 17] = poison
        nan = torch.zeros_like(S, dtype=torch.bool)
        nan[1, 2, rows, columns] = True
        if feedback == "bf16":  # has no tile
            nan = fmt.qdq(S).isnan()
        enc, out = q.encode(S), q.qdq(S)
        assert torch.equal(out.isnan(), nan) and same(out[~nan], clean[~nan])
        assert same(q.decode(enc, shape=(20, 100)), out)
        if feedback != "bf16":
            scale = enc["residual_scale"]
            assert int(scale.isnan().sum()) == 1
            assert torch.equal(bits(scale[scale.isnan()]), bits(torch.tensor(torch.nan)))  # canonical


@words
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 1e-29, 1e-20, 1e-5, 1.0, 1e30, 3e38])
def test_edge_magnitudes(feedback: str, amax: float) -> None:
    S = randn(16, 64, seed=3).clamp_(-1, 1)
    S[3, 7], S[5, 5] = -1.0, -0.0
    S = S * amax
    for fmt in QUANTIZED:
        out = Quantizer(fmt, feedback=feedback).qdq(S)
        assert bool(out.isfinite().all())
        # bf16 keeps what lies below the threshold of tiles; integers store zeros there.
        assert bool(((out - S).abs() <= torch.maximum((fmt.qdq(S) - S).abs(), torch.tensor(amax / 200))).all())


def test_a_half_precision_state_has_its_residual_in_fp32() -> None:
    S = randn(16, 64).to(torch.bfloat16)
    q = Quantizer(Int8(), feedback="int4")
    enc, want = q.encode(S), q.encode(S.float())
    assert all(same(enc[key], want[key]) for key in enc)
    assert same(q.qdq(S), q.qdq(S.float()).to(torch.bfloat16))


def drift(q: Quantizer, tokens: int, decay: float) -> float:
    """Relative error of a state that is rounded after every token, against the same state in float64."""
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 2, 32, 32, generator=gen, dtype=torch.float64)
    stored = q.qdq(exact.float())
    for _ in range(tokens):
        k, v = torch.randn(2, 1, 2, 32, generator=gen, dtype=torch.float64) / 32**0.5
        write = k[..., :, None] * v[..., None, :] * 0.5
        exact = decay * exact + write
        stored = q.qdq((decay * stored.double() + write).float())
    return float((stored.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("fmt", "int4"), [(Int8(), 10), (Fp8(), 10), (Nvfp4(), 4)], ids=str)
def test_feedback_bends_the_drift_of_a_slowly_moving_state(fmt: Format, int4: int) -> None:
    # A residual is finer than the largest error by 14 (int4), 254 (int8) and 256 (bf16), and the drift goes down with
    # it; less so for nvfp4, where one tile of residuals holds blocks of very different steps.
    without = drift(Quantizer(fmt), 400, 0.999)
    for word, times in (("int4", int4), ("int8", 50), ("bf16", 300)):
        assert drift(Quantizer(fmt, feedback=word), 400, 0.999) < without / times, word


def test_without_feedback_a_slow_decay_stands_still_and_with_it_the_state_decays() -> None:
    S = torch.full((1, 1, 2, 1), 40.0)
    S[0, 0, 1] = 127.0
    near, fed = Quantizer(Int8()), Quantizer(Int8(), feedback="int8")
    a, b, c = S, S, S.double()
    for _ in range(100):
        keep = torch.tensor([0.99, 1.0]).view(1, 1, 2, 1)
        a, b, c = near.qdq(a * keep), fed.qdq(b * keep), c * keep
    assert a[0, 0, 0].item() == 40.0 and c[0, 0, 0].item() < 15
    assert abs(b[0, 0, 0].item() - c[0, 0, 0].item()) < 0.2


@pytest.mark.parametrize("fmt", [Fp32(), Bf16(), Fp16()], ids=str)
@words
def test_plain_formats_have_no_residual(fmt: Format, feedback: str) -> None:
    assert fmt.residual_tile is None
    with pytest.raises(PolicyError, match="no scale for a residual"):
        Residual(fmt, feedback)


def test_int4_is_no_state_format() -> None:
    assert Int4 not in REGISTRY
    with pytest.raises(FormatError, match="got 'int4'"):
        parse("int4")
