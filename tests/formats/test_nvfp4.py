"""nvfp4: two levels of scales, packing, edge rules of blocks and groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lattn_compile.formats import Nvfp4
from lattn_compile.formats.rounding import TINY, divide, rn16
from tests.formats import oracle
from tests.formats.states import randn, rough, same, small_states

FMT = Nvfp4()
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def unpacked(codes: Tensor, K: int) -> list[list[float]]:
    """Code values of packed codes, written out: even key channels in the low half of a byte."""
    table = E2M1 + [-m for m in E2M1]
    rows = codes.tolist()
    return [[table[byte >> 4 if k % 2 else byte & 15] for byte in rows[k // 2]] for k in range(K)]


def assert_is_oracle(S: Tensor) -> None:
    codes, blocks, groups, values = oracle.nvfp4(S.tolist(), GRIDS[S.dtype])
    enc = FMT.encode(S)
    as_tensor = lambda rows: torch.tensor(rows, dtype=S.dtype)  # noqa: E731
    assert same(enc["group_scale"], as_tensor(groups))
    assert same(enc["block_scale"].to(S.dtype), as_tensor(blocks))
    assert same(as_tensor(unpacked(enc["codes"], S.shape[0])), as_tensor(codes))
    assert same(FMT.decode(enc, shape=S.shape), as_tensor(values))
    assert same(FMT.qdq(S), as_tensor(values))


@dtypes
@pytest.mark.parametrize("shape", [(32, 128), (33, 70), (15, 65), (1, 1)], ids=str)
def test_codec_equals_exact_rationals(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    assert_is_oracle(rough(*shape, seed=5, dtype=dtype))
    assert_is_oracle(randn(*shape, seed=6, dtype=dtype))


@settings(max_examples=150, deadline=None)
@given(S=small_states(max_k=20))
def test_codec_equals_exact_rationals_for_any_numbers(S: oracle.Rows) -> None:
    assert_is_oracle(torch.tensor(S))


def test_codes_are_packed_in_pairs_of_key_channels() -> None:
    S = torch.tensor([[6.0], [0.5], [-4.0], [-0.0], [3.0]]) * 448  # group scale 1, block scale 448
    enc = FMT.encode(S)
    assert enc["group_scale"].tolist() == [1.0] and enc["block_scale"].float().tolist() == [[448.0]]
    assert enc["codes"].tolist() == [[0x17], [0x8E], [0x05]]
    assert same(FMT.decode(enc, shape=(5, 1)), S)
    assert FMT.decode(enc).shape == (6, 1)  # an odd K has to be said


@dtypes
def test_decoded_values_are_fixed_points(dtype: torch.dtype) -> None:
    once = FMT.qdq(
        randn(40, 33, 70, seed=7, dtype=dtype) * 2.0 ** torch.linspace(-20, 20, 40, dtype=dtype)[:, None, None]
    )
    assert torch.equal(FMT.qdq(once), once)


def test_step_and_values_are_exact_in_fp32() -> None:
    scales = torch.arange(1 << 15, 1 << 16) / 2.0**15
    blocks = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    step = scales[:, None] * blocks
    assert torch.equal(step.double(), scales.double()[:, None] * blocks.double())
    for m in E2M1:
        assert torch.equal((step * m).double(), step.double() * m)


@dtypes
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e30, 3e38, 3.4028234663852886e38])
def test_edge_magnitudes(dtype: torch.dtype, amax: float) -> None:
    S = randn(32, 64, seed=3, dtype=dtype).clamp_(-1, 1)
    S[3, 7], S[5, 5] = -1.0, -0.0
    S = S * torch.tensor(amax, dtype=dtype)
    enc, out = FMT.encode(S), FMT.qdq(S)
    assert bool(out.isfinite().all())
    if amax < TINY:
        assert same(out, torch.zeros_like(S)) and not enc["codes"].any()
        assert bool((enc["block_scale"].float() == 1.0).all()) and bool((enc["group_scale"] == 1.0).all())
    else:
        assert enc["block_scale"].float()[0, 7].item() == 448.0
        assert torch.allclose(out, S, rtol=0.26, atol=amax / 20)
        assert out.signbit()[5, 5]


def test_blocks_far_below_their_group_take_the_smallest_normal_scale() -> None:
    S = torch.ones(16, 2)
    S[:, 1] = 1e-9
    enc = FMT.encode(S)
    assert enc["block_scale"].float().tolist() == [[448.0, 2.0**-6]] and FMT.qdq(S)[0, 1].item() == 0.0


def test_a_tiny_block_in_a_live_group_is_positive_zero() -> None:
    S = torch.ones(32, 1)
    S[16:] = -TINY / 2
    enc = FMT.encode(S)
    assert enc["block_scale"].float().tolist() == [[448.0], [1.0]]
    assert same(FMT.qdq(S)[16:], torch.zeros(16, 1)) and not enc["codes"][8:].any()


@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_nan_or_inf_costs_its_block_and_leaves_the_group_scale(dtype: torch.dtype, poison: float) -> None:
    S = randn(40, 70, seed=8, dtype=dtype)
    S[20, 3] = 0.0
    clean, enc_clean = FMT.qdq(S), FMT.encode(S)
    S[20, 3] = poison
    enc, out = FMT.encode(S), FMT.qdq(S)
    nan = torch.zeros_like(S, dtype=torch.bool)
    nan[16:32, 3] = True
    assert same(out, torch.where(nan, torch.nan, clean))
    assert same(enc["group_scale"], enc_clean["group_scale"])
    assert enc["block_scale"].view(torch.uint8)[1, 3].item() == 0x7F and not enc["codes"][8:16, 3].any()


def test_finite_values_beside_a_nan_still_form_the_group_scale() -> None:
    S = torch.full((32, 1), 1.0)
    S[0], S[1] = torch.nan, 1000.0
    assert same(FMT.encode(S)["group_scale"], rn16(divide(torch.tensor([1000.0]), 2688.0)))
    S.fill_(torch.nan)
    assert FMT.encode(S)["group_scale"].tolist() == [1.0] and bool(FMT.qdq(S).isnan().all())


def test_groups_are_64_columns_over_all_key_channels() -> None:
    S = torch.ones(32, 130)
    S[31, 64] = 64.0
    enc = FMT.encode(S)
    assert enc["group_scale"].shape == (3,)
    assert same(enc["group_scale"], rn16(divide(torch.tensor([1.0, 64.0, 1.0]), 2688.0)))


def test_block_scales_come_from_true_divisions() -> None:
    # Within a few units of a tie of E4M3, products with reciprocals would give the other scale. (One division by
    # 6 · s_g would not: tried for every s_g.)
    group = rn16(randn(4000, 1, seed=9).abs() + 1)
    ties = torch.arange(17, 33, 2) / 16.0
    near = [((6.0 * group * ties).view(torch.int32) + ulps).view(torch.float32) for ulps in range(-3, 4)]
    S = torch.cat((2688.0 * group, *near), 1)[:, None, :]  # one key channel: each column is a block
    ratio = divide(divide(S, 6.0), group[:, None])
    products = S * torch.tensor(1 / 6.0) * (1.0 / group[:, None])
    enc = FMT.encode(S)
    assert same(enc["group_scale"], group)
    want, wrong = ratio.to(torch.float8_e4m3fn), products.to(torch.float8_e4m3fn)
    assert int((wrong.float() != want.float()).sum()) > 1000
    assert same(enc["block_scale"], want)
