"""Single roundings: exact against rationals, against torch's own casts, and for every mantissa."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lattn_compile.formats.rounding import TINY, divide, invert, keep_where, rn16, round_to_minifloat_
from tests.formats import oracle
from tests.formats.states import bits, same

GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def mantissas(step: int = 1) -> torch.Tensor:
    """fp32 numbers in [1, 2): all of them, or each `step`-th."""
    return (torch.arange(0, 1 << 23, step, dtype=torch.int32) | 0x3F800000).view(torch.float32)


@dtypes
@given(x=st.floats(width=32, min_value=2**-100, max_value=2.0**127), odd=st.integers(0, 2**15 - 1))
def test_rn16_keeps_16_significant_bits_with_ties_to_even(dtype: torch.dtype, x: float, odd: int) -> None:
    tie = float((1 << 16) + 2 * odd + 1)  # 17 bits, the last one set
    for value in (x, tie):
        want = float(oracle.rounded(Fraction(value), oracle.RN16))
        assert rn16(torch.tensor(value, dtype=dtype)).item() == want


@pytest.mark.parametrize("divisor", [6.0, 127.0, 448.0, 2688.0])
def test_division_is_correctly_rounded_for_every_mantissa(divisor: float) -> None:
    a = mantissas(step=3)
    got = divide(a, divisor)
    # q is correctly rounded iff |a - q·d| <= ulp(q)·d/2; these products and differences are exact in fp64.
    residual = a.double() - got.double() * divisor
    ulp = torch.nextafter(got, torch.tensor(torch.inf)).double() - got.double()
    assert bool((residual.abs() <= ulp * divisor / 2).all())


def test_division_is_not_a_product_with_the_reciprocal() -> None:
    a = mantissas(step=3)
    for divisor in (6.0, 127.0, 448.0, 2688.0):
        assert not same(divide(a, divisor), a * torch.tensor(1.0 / divisor))


@dtypes
@given(a=st.floats(width=32, min_value=2**-90, max_value=2**90), b=st.floats(width=32, min_value=2**-30, max_value=64))
def test_quotients_and_inverses_equal_rationals(dtype: torch.dtype, a: float, b: float) -> None:
    x, y = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    assert divide(x, y).item() == float(oracle.rounded(Fraction(a) / Fraction(b), GRIDS[dtype]))
    assert divide(x, 127.0).item() == float(oracle.rounded(Fraction(a) / 127, GRIDS[dtype]))
    assert invert(x).item() == float(oracle.rounded(1 / Fraction(a), GRIDS[dtype]))
    assert divide(x, y).dtype == invert(x).dtype == dtype


def fp32_patterns(limit: float) -> torch.Tensor:
    """fp32 numbers up to ±limit: each combination of the upper 20 bits, with low bits at, around and off the ties."""
    upper = torch.arange(-(1 << 19), 1 << 19, dtype=torch.int32) << 12
    x = torch.cat([(upper | low).view(torch.float32) for low in (0, 1, 0x7FF, 0x800, 0x801, 0xFFF)])
    return x[x.abs() <= limit]


def test_minifloat_rounding_equals_the_cast_to_fp8() -> None:
    x = fp32_patterns(448.0)
    want = x.to(torch.float8_e4m3fn).float()
    assert same(round_to_minifloat_(x.clone(), mantissa=3, min_exponent=-6), want)
    assert same(round_to_minifloat_(x.double(), mantissa=3, min_exponent=-6).float(), want)


def test_minifloat_rounding_from_fp64_rounds_once() -> None:
    above_a_tie = torch.tensor([1.0625 + 2.0**-40, -17.0 - 2.0**-40], dtype=torch.float64)
    assert round_to_minifloat_(above_a_tie.clone(), mantissa=3, min_exponent=-6).tolist() == [1.125, -18.0]
    assert above_a_tie.to(torch.float8_e4m3fn).tolist() == [1.0, -16.0]  # what the plain cast would do


@dtypes
def test_e2m1_ties_go_to_the_even_code_and_zero_keeps_its_sign(dtype: torch.dtype) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.tensor([*ties, *(-t for t in ties), -1e-30, -0.0, 6.0], dtype=dtype)
    expected = torch.tensor([*want, *(-w for w in want), -0.0, -0.0, 6.0], dtype=dtype)
    assert same(round_to_minifloat_(x, mantissa=1, min_exponent=0), expected)


@dtypes
def test_keep_where_gives_positive_zero_whatever_stood_there(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.nan, -torch.inf, -0.0, -1.5, 3.0], dtype=dtype)
    keep = torch.tensor([False, False, False, False, True])
    assert same(keep_where(keep, x), torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0], dtype=dtype))
    assert same(keep_where(~keep[:1], x), x)


def test_tiny_keeps_every_scale_and_inverse_normal() -> None:
    smallest_normal = torch.finfo(torch.float32).tiny
    for amax in (TINY, torch.finfo(torch.float32).max):
        for largest in (127.0, 448.0, 2688.0):
            scale = rn16(divide(torch.tensor(amax), largest))
            assert smallest_normal < float(scale) / 64 and smallest_normal < float(invert(scale)) < torch.inf
            assert float(scale * largest) < torch.inf  # not even the largest float overflows when decoded
    assert bits(torch.tensor(TINY)).tolist() == [0, 0, 128, 13]
