"""int8 and fp8_e4m3: codes, scales and values by the bit, edge rules, idempotence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.formats import Fp8, Int8
from lattn_compile.formats.rounding import TINY, divide, rn16
from lattn_compile.formats.tiled import TiledFormat
from tests.formats import oracle
from tests.formats.states import bits, randn, rough, same, small_states

FORMATS = (Int8, Fp8)
CODES = {Int8: (127, oracle.int8_code), Fp8: (448, oracle.fp8_code)}
GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
both = pytest.mark.parametrize("cls", FORMATS, ids=["int8", "fp8"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
blocks = st.one_of(st.none(), st.integers(1, 12))


def code_values(cls: type[TiledFormat]) -> Tensor:
    """Every number that a code of the format stands for, NaN excluded."""
    if cls is Int8:
        return torch.arange(-127.0, 128.0)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return values[values.isfinite()]


def scales() -> Tensor:
    """All 2^15 numbers of 16 significant bits in [1, 2)."""
    return torch.arange(1 << 15, 1 << 16) / 2.0**15


def assert_is_oracle(fmt: TiledFormat, S: Tensor) -> None:
    largest, code = CODES[type(fmt)]
    codes, scale, values = oracle.tiled(S.tolist(), fmt.block_k, fmt.block_v, largest, code, GRIDS[S.dtype])
    enc = fmt.encode(S)
    assert enc["codes"].dtype == fmt.code_dtype
    assert same(enc["codes"].to(S.dtype), torch.tensor(codes, dtype=S.dtype))
    assert same(enc["state_scale"], torch.tensor(scale, dtype=S.dtype))
    assert same(fmt.decode(enc), torch.tensor(values, dtype=S.dtype))
    assert same(fmt.qdq(S), torch.tensor(values, dtype=S.dtype))


@both
@dtypes
@pytest.mark.parametrize("tile", [(None, 64), (128, 1), (16, 16), (7, 5), (None, None)], ids=str)
def test_codec_equals_exact_rationals(cls: type, dtype: torch.dtype, tile: tuple[int | None, int | None]) -> None:
    fmt = cls(tile[1], block_k=tile[0])
    assert_is_oracle(fmt, rough(34, 70, seed=1, dtype=dtype))
    assert_is_oracle(fmt, randn(20, 33, seed=2, dtype=dtype))


@both
@settings(max_examples=150, deadline=None)
@given(S=small_states(), block_v=blocks, block_k=blocks)
def test_codec_equals_exact_rationals_for_any_numbers(
    cls: type, S: oracle.Rows, block_v: int | None, block_k: int | None
) -> None:
    assert_is_oracle(cls(block_v, block_k=block_k), torch.tensor(S))


@both
def test_a_fp64_state_is_quantized_in_fp64(cls: type) -> None:
    # An amax that fp32 would round onto a tie of RN16 (and so to the even scale): fp64 still sees it above.
    step = (1 << 16) + 1
    S = torch.tensor([[step * cls.largest * (1 + 2.0**-40)]], dtype=torch.float64)
    assert cls().encode(S)["state_scale"].item() == step + 1
    assert cls().encode(S.float())["state_scale"].item() == step - 1
    # And a value that fp32 would round onto a tie of two codes: 2.5 (int8) or 17 (fp8) and a little, with scale 1.
    tie, above = (2.5, 3.0) if cls is Int8 else (17.0, 18.0)
    S = torch.tensor([[cls.largest], [tie * (1 + 2.0**-40)]], dtype=torch.float64)
    assert cls().qdq(S)[1].item() == above and cls().qdq(S.float())[1].item() < above


@both
def test_every_single_value_tile_is_a_fixed_point(cls: type) -> None:
    # A tile of one number for every fp32 mantissa: the whole of what amax -> scale -> amax can do.
    for part in torch.arange(1 << 23, dtype=torch.int32).view(8, -1, 1, 1):
        once = cls().qdq((part | 0x3F800000).view(torch.float32))
        assert same(cls().qdq(once), once)


@both
def test_every_code_under_every_scale_is_a_fixed_point(cls: type) -> None:
    codes = code_values(cls)
    for part in scales().view(8, -1):
        stored = part[:, None, None] * codes[:, None]  # one tile a scale, all codes in it, the largest included
        enc = cls().encode(stored)
        assert same(enc["state_scale"].flatten(), part)
        assert same(enc["codes"].float(), codes[:, None].expand_as(stored))
        assert same(cls().qdq(stored), stored)


@both
@pytest.mark.parametrize("exponent", [-93, -20, 0, 40, 119])
def test_encoding_a_stored_state_again_changes_nothing(cls: type, exponent: int) -> None:
    once = cls(8).qdq(randn(1000, 16, 64, seed=exponent) * 2.0**exponent)
    enc, again = cls(8).encode(once), cls(8).encode(cls(8).qdq(once))
    assert same(cls(8).qdq(once), once)
    assert all(same(enc[key], again[key]) for key in enc)


@both
def test_code_times_scale_is_exact_in_fp32(cls: type) -> None:
    exact = scales().double()[:, None] * code_values(cls).double()
    assert torch.equal((scales()[:, None] * code_values(cls)).double(), exact)


@both
@dtypes
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e30, 3e38, 3.4028234663852886e38])
def test_edge_magnitudes(cls: type, dtype: torch.dtype, amax: float) -> None:
    S = randn(16, 64, seed=3, dtype=dtype).clamp_(-1, 1)
    S[3, 7], S[5, 5] = -1.0, -0.0
    S = S * torch.tensor(amax, dtype=dtype)
    enc, out = cls().encode(S), cls().qdq(S)
    assert bool(out.isfinite().all()) and bool(enc["state_scale"].isfinite().all())
    if amax < TINY:
        assert same(out, torch.zeros_like(S))
        assert bool((enc["codes"].view(torch.uint8) == 0).all()) and enc["state_scale"].item() == 1.0
    else:
        assert enc["codes"][3, 7].float().item() == -cls.largest
        assert torch.allclose(out, S, rtol=2.0**-4, atol=amax / cls.largest)
    assert same(cls().qdq(out), out)


@both
@dtypes
def test_threshold_of_tiny_tiles_is_sharp(cls: type, dtype: torch.dtype) -> None:
    at = torch.tensor([[TINY]], dtype=dtype)
    below = torch.nextafter(at, torch.zeros_like(at))
    assert same(cls().qdq(below), torch.zeros_like(at)) and cls().qdq(at).item() > 0.99 * TINY


@both
@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_one_nan_or_inf_makes_its_whole_tile_nan_and_no_other(cls: type, dtype: torch.dtype, poison: float) -> None:
    S = randn(2, 3, 20, 40, seed=4, dtype=dtype)
    fmt = cls(16, block_k=8)
    clean = fmt.qdq(S)
    S[1, 2, 9, 17] = poison
    enc, out = fmt.encode(S), fmt.qdq(S)
    nan = torch.zeros_like(S, dtype=torch.bool)
    nan[1, 2, 8:16, 16:32] = True
    assert bool((enc["codes"].view(torch.uint8)[nan] == 0).all())
    assert torch.equal(bits(enc["state_scale"][1, 2, 1, 1]), bits(torch.tensor(torch.nan, dtype=dtype)))  # canonical
    assert same(out, torch.where(nan, torch.nan, clean))


def test_casts_that_would_hide_an_overflow_are_never_reached() -> None:
    # int8(NaN) = 0 and a saturating fp8(Inf) = 448 must not turn a broken state into a healthy one.
    for fmt in (Int8(), Fp8()):
        assert bool(fmt.qdq(torch.full((4, 4), torch.inf)).isnan().all())
        assert bool(fmt.qdq(torch.full((4, 4), torch.nan)).isnan().all())


@dtypes
def test_fp8_keeps_the_sign_of_zero_and_int8_does_not(dtype: torch.dtype) -> None:
    S = torch.tensor([[1.0, -0.0, 0.0, -1e-9]], dtype=dtype)
    assert Fp8().qdq(S).signbit().tolist() == [[False, True, False, True]]
    assert Fp8().encode(S)["codes"].view(torch.uint8).tolist() == [[0x7E, 0x80, 0x00, 0x80]]
    assert Int8().qdq(S).signbit().tolist() == [[False] * 4]


def test_smaller_last_tiles_have_their_own_scale() -> None:
    S = torch.ones(5, 7)
    S[4, :] = 100.0
    S[:, 6] = 1000.0
    enc = Int8(3, block_k=2).encode(S)
    assert enc["state_scale"].shape == (3, 3)
    want = rn16(divide(torch.tensor([[1.0, 1.0, 1000.0], [1.0, 1.0, 1000.0], [100.0, 100.0, 1000.0]]), 127.0))
    assert same(enc["state_scale"], want)


def test_codes_are_rounded_from_the_fp32_product_with_the_inverse() -> None:
    # Within a few units of a tie, a true division or an unrounded product would give the other code.
    scale = rn16(divide(randn(4000, 1, 1, seed=9).abs() + 1, 127.0))
    ties = (torch.arange(0, 126) + 0.5)[:, None] * scale
    near = torch.cat([(ties.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)], 1)
    S = torch.cat((127.0 * scale, near), 1)
    inv = 1.0 / scale
    assert same(Int8().encode(S)["state_scale"], scale)
    want = (S * inv).round()
    for wrong in ((S / scale).round(), (S.double() * inv.double()).round().float()):
        assert int((wrong != want).sum()) > 1000
    assert torch.equal(Int8().encode(S)["codes"].float(), want)
