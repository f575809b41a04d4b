"""Stochastic rounding: which code, with which odds, and everything that it must not change."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.formats import Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4
from lattn_compile.formats.philox import philox, stream_key, uniform
from lattn_compile.formats.plain import PlainFormat
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.formats.rounding import round_at_random, round_to_minifloat_
from lattn_compile.formats.tiled import TiledFormat
from tests.formats import oracle
from tests.formats.states import randn, rough, same, small_states

FORMATS: tuple[Format, ...] = (Bf16(), Fp16(), Int8(), Int8(5, block_k=7), Fp8(), Fp8(1, block_k=128), Nvfp4())
GRIDS = {torch.float32: oracle.FP32, torch.float64: oracle.FP64}
KINDS = {Bf16: (oracle.BF16, 255.0 * 2.0**120), Fp16: (oracle.FP16, 65504.0)}
CODES = {Int8: (127, oracle.int8_code), Fp8: (448, oracle.fp8_code)}
LAST = 1 - 2.0**-24  # the largest random number
every = pytest.mark.parametrize("fmt", FORMATS, ids=str)
halves = pytest.mark.parametrize("fmt", [Bf16(), Fp16()], ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 2^-24 in [0, 1), both ends now and then."""
    gen = torch.Generator().manual_seed(seed)
    n = torch.randint(0, 1 << 24, shape, generator=gen)
    pick = torch.randint(0, 8, shape, generator=gen)
    return torch.where(pick == 0, 0, torch.where(pick == 1, (1 << 24) - 1, n)).float() * 2.0**-24


def want(fmt: Format, S: Tensor, r: Tensor) -> Tensor:
    """`fmt.qdq(S, r)` in exact rationals; `S [K, V]`, whatever numbers tiles are made of, plain formats finite."""
    grid, rows, numbers = GRIDS[S.dtype], S.tolist(), r.tolist()
    if isinstance(fmt, TiledFormat):
        values = oracle.tiled(rows, fmt.block_k, fmt.block_v, *CODES[type(fmt)], grid, numbers)[-1]
    elif isinstance(fmt, Nvfp4):
        values = oracle.nvfp4(rows, grid, numbers)[-1]
    else:
        kind, largest = KINDS[type(fmt)]
        # bf16's odds are the same in fp32 and fp64; fp16's are those of the state's dtype.
        values = [
            [
                oracle.plain(x, kind, largest, oracle.at_random(n, grid))
                if abs(x) <= largest
                else torch.tensor(x, dtype=S.dtype).to(fmt.dtype).item()  # type: ignore[attr-defined]
                for x, n in zip(*pair, strict=True)
            ]
            for pair in zip(rows, numbers, strict=True)
        ]
    return torch.tensor(values, dtype=S.dtype)


@every
@dtypes
def test_the_code_is_the_one_that_exact_rationals_choose(fmt: Format, dtype: torch.dtype) -> None:
    for S in (rough(34, 70, seed=1, dtype=dtype), randn(20, 33, seed=2, dtype=dtype)):
        r = draws(*S.shape)
        assert same(fmt.qdq(S, r), want(fmt, S, r))
        assert same(fmt.decode(fmt.encode(S, r), shape=S.shape, dtype=dtype), fmt.qdq(S, r))


@every
@settings(max_examples=60, deadline=None)
@given(S=small_states(max_k=18), n=st.integers(0, 2**32))
def test_the_code_is_the_one_that_exact_rationals_choose_for_any_numbers(fmt: Format, S: oracle.Rows, n: int) -> None:
    state = torch.tensor(S)
    r = draws(*state.shape, seed=n)
    assert same(fmt.qdq(state, r), want(fmt, state, r))


def values_of(fmt: Format) -> Tensor:
    """Every finite number that a code stands for, at scale 1."""
    if isinstance(fmt, Int8):
        return torch.arange(-127.0, 128.0)
    if isinstance(fmt, Fp8):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    elif isinstance(fmt, PlainFormat):
        codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(fmt.dtype).float()
    else:
        codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = torch.cat((codes, -codes))
    return codes[codes.isfinite()]


@every
@dtypes
def test_a_value_on_a_code_stays_there_whatever_the_random_number(fmt: Format, dtype: torch.dtype) -> None:
    values = values_of(fmt).to(dtype)[:, None]
    if isinstance(fmt, Nvfp4):
        # Scales that are powers of two: b = 448 in the block that makes s_g = 1, and b = 256 in the others.
        values = torch.cat((values * 256, torch.full((16, 1), 2688.0, dtype=dtype)))
    elif not fmt.is_plain:
        # The largest code in every tile, so that the scale is 1.
        block = getattr(fmt, "block_k", None) or values.shape[0]
        values = torch.cat([torch.cat((part, values.abs().max()[None, None])) for part in values.split(block - 1)])
    for r in (0.0, 0.5, LAST):
        assert same(fmt.qdq(values, torch.full_like(values, r, dtype=torch.float32)), values), r


@every
def test_the_smallest_number_takes_every_value_up_and_the_largest_down(fmt: Format) -> None:
    S = randn(40, 70, seed=3)
    up, down = fmt.qdq(S, torch.zeros(S.shape)), fmt.qdq(S, torch.full(S.shape, LAST))
    nearest = fmt.qdq(S)
    assert bool((down <= nearest).all()) and bool((nearest <= up).all())
    assert bool(((nearest == up) | (nearest == down)).all())  # they are the two neighbours
    assert float((up > down).float().mean()) > 0.9


@every
def test_scales_are_those_of_nearest_rounding(fmt: Format) -> None:
    S = rough(2, 33, 70, seed=4)
    r = draws(*S.shape)
    near, enc = fmt.encode(S), fmt.encode(S, r)
    assert tuple(enc) == fmt.keys and all(t.is_contiguous() for t in enc.values())
    assert all(same(enc[key], near[key]) for key in fmt.keys if key != "codes")
    assert not same(enc["codes"], near["codes"])


@every
@dtypes
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e30, 3e38, 3.4028234663852886e38])
def test_edge_rules_are_those_of_nearest_rounding(fmt: Format, dtype: torch.dtype, amax: float) -> None:
    S = randn(16, 64, seed=3, dtype=dtype).clamp_(-1, 1)
    S[3, 7], S[5, 5] = -1.0, -0.0
    S = S * torch.tensor(amax, dtype=dtype)
    for r in (0.0, LAST):
        out = fmt.qdq(S, torch.full(S.shape, r))
        if amax < 2.0**-100 and not fmt.is_plain:
            assert same(out, torch.zeros_like(S))
        else:
            assert torch.equal(out.isfinite(), fmt.qdq(S).isfinite())
            step = amax / 10 + 2.0 ** (-24 if isinstance(fmt, Fp16) else -133)  # at zero, of the coarsest
            assert torch.allclose(out, fmt.qdq(S), rtol=0.5, atol=step, equal_nan=True)
            assert bool(out[5, 5].signbit()) == (not isinstance(fmt, Int8))


@every
@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_nan_or_inf_costs_what_it_costs_to_nearest(fmt: Format, dtype: torch.dtype, poison: float) -> None:
    S = randn(2, 3, 20, 40, seed=4, dtype=dtype)
    r = draws(*S.shape)
    S[1, 2, 9, 17] = poison
    out, near = fmt.qdq(S, r), fmt.qdq(S)
    assert torch.equal(out.isnan(), near.isnan()) and torch.equal(out.isinf(), near.isinf())
    for key, tensor in fmt.encode(S, r).items():
        if key != "codes":
            assert same(tensor, fmt.encode(S)[key])


@halves
@dtypes
def test_what_overflows_is_what_overflows_to_nearest(fmt: PlainFormat, dtype: torch.dtype) -> None:
    largest = torch.finfo(fmt.dtype).max
    step = largest - float(torch.nextafter(torch.tensor(largest, dtype=fmt.dtype), torch.tensor(0.0, dtype=fmt.dtype)))
    S = torch.tensor([largest, largest + step / 4, largest + step / 2, largest + 0.75 * step], dtype=dtype)
    S = torch.stack((S, -S))
    assert fmt.qdq(S).isinf().tolist() == [[False, False, True, True]] * 2
    for r in (0.0, 0.5, LAST):
        assert same(fmt.qdq(S, torch.full(S.shape, r)), fmt.qdq(S)), r
    below = torch.tensor([[largest - step / 4, step / 4 - largest]], dtype=dtype)
    assert fmt.qdq(below, torch.zeros(1, 2)).tolist() == [[largest, step - largest]]
    assert fmt.qdq(below, torch.full((1, 2), LAST)).tolist() == [[largest - step, -largest]]


@dtypes
def test_zeros_keep_their_sign_where_codes_have_one(dtype: torch.dtype) -> None:
    # The last one lies in the first step below zero, from where up is zero.
    S = torch.tensor([[127.0, -0.0, 0.0, -1e-3]], dtype=dtype)
    for fmt in (Fp8(), Nvfp4(), Bf16(), Fp16()):
        smallest = {Bf16: -1e-42, Fp16: -1e-10}.get(type(fmt), -1e-6)
        x = torch.tensor([[127.0, -0.0, 0.0, smallest]], dtype=dtype).repeat(16, 1)
        x[0] = 127.0  # nvfp4 has a scale a column
        out = fmt.qdq(x, torch.zeros(16, 4))[1]
        assert out[1:].tolist() == [0.0, 0.0, 0.0] and out.signbit().tolist() == [False, True, False, True], fmt
    assert same(Int8().qdq(S, torch.zeros(1, 4)), torch.tensor([[127.0, 0.0, 0.0, 0.0]], dtype=dtype))


@pytest.mark.parametrize("exponent", [-126, -30, 0, 90])
@pytest.mark.parametrize("sign", [1, -1])
def test_bf16s_odds_are_exact_for_every_mantissa(exponent: int, sign: int) -> None:
    # Every lower half of an fp32 number, under a few upper halves. The odds are that half over 2^16.
    low = torch.arange(1 << 16, dtype=torch.int32)
    high = torch.tensor([0x00, 0x01, 0x2A, 0x7E], dtype=torch.int32)[:, None] << 16
    x = sign * ((exponent + 127) << 23 | high | low).view(torch.float32)
    trunc, step = (x.view(torch.int32) & ~0xFFFF).view(torch.float32), 2.0 ** (exponent - 7)
    part = low.expand(4, -1) / 2.0**16
    odds = part if sign > 0 else 1 - part
    away = torch.where(low > 0, trunc + sign * step, trunc)
    lower, upper = (trunc, away) if sign > 0 else (away, trunc)
    assert torch.equal(Bf16().qdq(x, odds.clamp(max=LAST)), lower)
    assert torch.equal(Bf16().qdq(x, (odds - 2.0**-24).clamp(min=0)), upper)


def test_bf16s_subnormals_have_exact_odds_too() -> None:
    x = (torch.arange(1 << 16, dtype=torch.int32) | 5 << 16).view(torch.float32)[None]  # far below 2^-126
    odds = torch.arange(1 << 16)[None] / 2.0**16
    low, high = torch.tensor([5 << 16, 6 << 16], dtype=torch.int32).view(torch.float32)
    for shift in (0.0, 2.0**-24):
        r = (odds - shift).clamp(0, LAST)
        assert torch.equal(Bf16().qdq(x, r), torch.where(r < odds, high, low))


@pytest.mark.parametrize(("mantissa", "lowest"), [(3, -6), (1, 0), (10, -14)], ids=["e4m3", "e2m1", "fp16"])
def test_minifloats_go_up_exactly_below_their_threshold(mantissa: int, lowest: int) -> None:
    gen = torch.Generator().manual_seed(0)
    exponent = torch.randint(lowest - mantissa, 9, (20000,), generator=gen)
    steps = torch.randint(1 << mantissa, 2 << mantissa, (20000,), generator=gen)
    spacing = 2.0 ** (torch.maximum(exponent, torch.tensor(lowest)) - mantissa).double()
    # A code, and a place between it and the next that fp32 can hold.
    code = torch.where(exponent < lowest, steps % (1 << mantissa), steps) * spacing
    part = torch.randint(1, 1 << 12, (20000,), generator=gen) / 2.0**12
    for sign in (1, -1):
        y = sign * (code + part * spacing)
        assert torch.equal(y.float().double(), y)
        odds = part if sign > 0 else 1 - part
        low, high = (code, code + spacing) if sign > 0 else (-code - spacing, -code)
        for r, up in ((odds, False), (odds - 2.0**-24, True)):
            for dtype in (torch.float32, torch.float64):
                got = round_to_minifloat_(y.to(dtype, copy=True), mantissa=mantissa, min_exponent=lowest, r=r.float())
                assert torch.equal(got.double(), high if up else low)


def test_integers_go_up_exactly_below_their_threshold() -> None:
    y = torch.arange(-127 * 64, 127 * 64 + 1) / 64.0
    odds = y - y.floor()
    assert torch.equal(round_at_random(y, odds), y.floor())
    assert torch.equal(round_at_random(y, (odds - 2.0**-24).clamp(min=0)), y.ceil())
    assert not bool(round_at_random(torch.tensor([-0.0, -0.5]), torch.zeros(2)).signbit().any())


def every_seed(seeds: Tensor, heads: int, K: int, V: int) -> Tensor:
    """`uniform` of one write under many seeds (below 2^32), `[seeds, heads, K, V]`."""
    place = (torch.arange(heads).view(-1, 1, 1) << 16 | torch.arange(K // 4).view(-1, 1) << 8) | torch.arange(V)
    zero = torch.zeros((), dtype=torch.int64)
    words = philox((zero + 5, zero + 9, place, zero), (seeds.view(-1, 1, 1, 1), zero))
    return (torch.stack(words, -2).flatten(-3, -2) >> 8).float() * 2.0**-24


@every
@dtypes
def test_the_mean_over_4096_seeds_is_the_value(fmt: Format, dtype: torch.dtype) -> None:
    heads, K, V, count = 2, 16, 8, 4096
    r = every_seed(torch.arange(count), heads, K, V)
    identity = Identity(torch.tensor([5]), torch.tensor([9]))
    for seed in (0, 1, 4095):
        assert stream_key(seed, 0) == (seed, 0)
        assert same(r[seed], uniform(identity, heads, K, V, seed, 0)[0])
    S = randn(heads, K, V, seed=11, dtype=dtype) * 2.0 ** torch.arange(-4, 4, dtype=dtype)
    out = fmt.qdq(S.expand(count, -1, -1, -1), r)
    assert same(out[3], Quantizer(fmt, "stochastic", seed=3).qdq(S[None], identity)[0])
    low, high = fmt.qdq(S, torch.full(S.shape, LAST)), fmt.qdq(S, torch.zeros(S.shape))
    # A value beyond the largest code is clamped to it by as much as RN16 rounded the scale: half of 2^-15. nvfp4's
    # block scale has four bits, so there a block's largest value may lie 1/16 outside.
    freedom = S.abs() * (2.0**-4 if isinstance(fmt, Nvfp4) else 2.0**-16)
    inside = (low <= S) & (high >= S)
    assert bool((inside | ((out.mean(0) - S).abs() <= freedom)).all())
    sigma = ((high - S) * (S - low)).clamp(min=0).sqrt() / count**0.5
    # 512 values, 5 sigma each.
    error = (out.double().mean(0) - S.double()).abs()
    assert bool((error[inside] <= (5 * sigma + 2.0**-22 * S.abs())[inside]).all())
    # And together they are not pushed one way: the sum of independent errors, in sigmas.
    moved = inside & (high > low)
    total = ((out.double().mean(0) - S.double())[moved] / sigma.double()[moved]).sum()
    assert abs(float(total)) < 5 * int(moved.sum()) ** 0.5 and int(moved.sum()) > 200


def test_nearest_rounding_has_the_bias_that_stochastic_rounding_has_not() -> None:
    # A state that moves by less than half a step a token: nearest never leaves its code.
    S, fmt = torch.full((1, 1, 2, 1), 10.0), Int8()
    S[0, 0, 1] = 127.0  # scale 1
    near, stochastic = Quantizer(fmt), Quantizer(fmt, "stochastic")
    a, b = S, S
    for t in range(200):
        push = torch.tensor([0.25, 0.0]).view(1, 1, 2, 1)
        a = near.qdq(a + push)
        b = stochastic.qdq(b + push, Identity(torch.tensor([t]), torch.tensor([0])))
    assert a[0, 0, 0].item() == 10.0
    assert abs(b[0, 0, 0].item() - 60.0) < 5 * (200 * 3 / 16) ** 0.5


@dtypes
def test_plain_fp32_has_nothing_to_round(dtype: torch.dtype) -> None:
    S = rough(4, 5, dtype=dtype)
    assert same(Fp32().qdq(S, draws(4, 5)), S) and same(Fp32().encode(S, draws(4, 5))["codes"], S)


@given(y=st.floats(-8, 8, width=32), n=st.integers(0, (1 << 24) - 1))
def test_the_oracle_and_the_codec_agree_on_one_number(y: float, n: int) -> None:
    r = n / 2.0**24
    for dtype, grid in GRIDS.items():
        got = round_at_random(torch.tensor(y, dtype=dtype), torch.tensor(r)).item()
        assert got == oracle.at_random(r, grid)(Fraction(y))
