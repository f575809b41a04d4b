"""The Hadamard rotation: its order, its bits, and what it may be applied to."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lattn_compile.errors import PolicyError
from lattn_compile.formats.rotation import check_rotation, rotate
from tests.formats.states import randn, said, same

both = pytest.mark.parametrize("rotation", ["hadamard_k", "hadamard_v"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def sylvester(n: int) -> Tensor:
    """The unnormalised matrix: `H[i, j] = (-1)^popcount(i & j)`."""
    i = range(n)
    return torch.tensor([[(-1.0) ** (a & b).bit_count() for b in i] for a in i], dtype=torch.float64)


def along(x: Tensor, rotation: str) -> Tensor:
    """`x` with the rotated axis in front of the last: both rotations have one way to be computed."""
    return x if rotation == "hadamard_k" else x.mT


@both
@pytest.mark.parametrize("n", SIZES)
def test_it_is_the_product_with_sylvesters_matrix(rotation: str, n: int) -> None:
    S = randn(2, 3, *((n, 5) if rotation == "hadamard_k" else (5, n)), dtype=torch.float64)
    want = along(torch.einsum("ij,...jv->...iv", sylvester(n) / math.sqrt(n), along(S, rotation)), rotation)
    got = rotate(S, rotation)
    assert got.is_contiguous() and got.shape == S.shape
    assert float((got - want).norm()) <= 1e-14 * float(want.norm())


@both
@dtypes
@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
def test_every_bit_is_that_of_the_butterflies_in_order(rotation: str, dtype: torch.dtype, n: int) -> None:
    S = randn(*((n, 3) if rotation == "hadamard_k" else (3, n)), seed=n, dtype=dtype)
    # numpy's elementwise sums are IEEE's, one rounding each.
    x = along(S, rotation).numpy().copy()
    stride = 1
    while stride < n:
        for i in range(n):
            if not i & stride:
                x[i], x[i + stride] = x[i] + x[i + stride], x[i] - x[i + stride]
        stride *= 2
    x = x * x.dtype.type(math.sqrt(1.0 / n))
    assert same(rotate(S, rotation), along(torch.from_numpy(x), rotation).contiguous())


@dtypes
@pytest.mark.parametrize("n", SIZES)
def test_the_factor_is_the_inverse_root_rounded_once(dtype: torch.dtype, n: int) -> None:
    S = torch.zeros(n, 1, dtype=dtype)
    S[0] = 1.0
    got = Fraction(rotate(S, "hadamard_k")[0].item())
    digits = 24 if dtype == torch.float32 else 53
    unit = Fraction(2) ** (math.frexp(float(got))[1] - digits)
    # |got - 1/sqrt(n)| <= unit / 2, squared so that it can be asked of rationals.
    assert (got - unit / 2) ** 2 * n <= 1 <= (got + unit / 2) ** 2 * n


@both
def test_the_same_function_undoes_it_up_to_rounding(rotation: str) -> None:
    S = randn(2, 64, 128, seed=1)
    back = rotate(rotate(S, rotation), rotation)
    assert float((back - S).norm()) <= 4 * 2.0**-24 * float(S.norm())


@both
def test_an_outlier_is_spread_over_its_axis(rotation: str) -> None:
    S = torch.zeros(64, 64)
    S[3, 5] = 8.0
    out = rotate(S, rotation)
    line = along(out, rotation)[:, 5 if rotation == "hadamard_k" else 3]
    assert bool((line.abs() == 1.0).all()) and int((out != 0).sum()) == 64


@both
def test_strides_do_not_matter_and_the_state_stays(rotation: str) -> None:
    S = randn(2, 3, 16, 16)
    before = S.clone()
    want = rotate(S, rotation)
    assert same(S, before)
    for view in (S.mT.contiguous().mT, S.transpose(0, 1).contiguous().transpose(0, 1)):
        assert same(rotate(view, rotation), want)
    assert same(rotate(S[:1].expand(3, -1, -1, -1), rotation)[2], want[0])
    assert rotate(S[:0], rotation).shape == (0, 3, 16, 16)
    assert rotate(S, None) is S


@both
def test_a_nan_spreads_over_its_line_and_no_further(rotation: str) -> None:
    S = randn(16, 16)
    S[2, 3] = torch.nan
    nan = torch.zeros(16, 16, dtype=torch.bool)
    nan[(slice(None), 3) if rotation == "hadamard_k" else (2, slice(None))] = True
    assert torch.equal(rotate(S, rotation).isnan(), nan)


def test_a_size_that_is_no_power_of_two_is_refused_as_a_policy_refuses_it() -> None:
    from lattn_compile.site_policy import Policy

    for rotation, K, V in (("hadamard_k", 12, 16), ("hadamard_v", 16, 12)):
        with pytest.raises(PolicyError) as error:
            rotate(torch.zeros(K, V), rotation)
        with pytest.raises(PolicyError) as policy:
            Policy(rotation=rotation).check_shape(K, V)
        assert said(error.value) == said(policy.value)
        check_rotation(rotation, V, K)
    check_rotation(None, 3, 3)
    with pytest.raises(PolicyError, match="V = 0"):
        check_rotation("hadamard_v", 4, 0)
