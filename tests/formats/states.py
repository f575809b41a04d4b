"""States to encode, and comparison by bits."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.errors import LattnError
from lattn_compile.formats import Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4

ALL: tuple[Format, ...] = (
    Fp32(),
    Bf16(),
    Fp16(),
    Int8(),
    Int8(None),
    Int8(5, block_k=7),
    Fp8(),
    Fp8(1, block_k=128),
    Nvfp4(),
)
QUANTIZED = tuple(fmt for fmt in ALL if not fmt.is_plain)
SHAPES = ((1, 1), (16, 64), (33, 100), (128, 128), (64, 256), (17, 65))


def bits(x: Tensor) -> Tensor:
    """The bytes of `x`."""
    return torch.atleast_1d(x).contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, the sign of zero included; any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.itemsize > 1:
        # Casts and products give different NaNs on different code paths even of one CPU.
        a, b = a.masked_fill(a.isnan(), torch.nan), b.masked_fill(b.isnan(), torch.nan)
    return torch.equal(bits(a), bits(b))


def said(error: LattnError) -> str:
    """An error's parts on lines of their own; the message itself is these parts on one line."""
    assert str(error) == f"[{error.code}] {error.argument}: got {error.got}; want {error.want}. {error.remedy}"
    return f"{error.argument}: got {error.got}\n  want {error.want}\n  {error.remedy}"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rough(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A state with a wide range of magnitudes, ties, zeros of both signs, tiny tiles, one NaN and one Inf."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen, dtype=dtype)
    x = x * 2.0 ** torch.randint(-12, 13, shape[-1:], generator=gen)
    pick = torch.randint(0, 40, shape, generator=gen)
    x = torch.where(pick == 0, torch.zeros((), dtype=dtype), x)
    x = torch.where(pick == 1, -torch.zeros((), dtype=dtype), x)
    x = torch.where(pick == 2, (x * 2).round() / 2, x)
    x[..., : shape[-2] // 2, : shape[-1] // 4] *= 1e-36
    flat = x.view(-1, *shape[-2:])
    flat[0, 0, -1] = torch.nan
    flat[-1, -1, shape[-1] // 2] = -torch.inf
    return x


@st.composite
def small_states(draw: st.DrawFn, max_k: int = 9, max_v: int = 9) -> list[list[float]]:
    """Rows of arbitrary fp32 numbers: subnormals, zeros of both signs, now and then a NaN or an infinity."""
    K, V = draw(st.integers(1, max_k)), draw(st.integers(1, max_v))
    special = draw(st.booleans())
    exponent = draw(st.sampled_from([-140, -100, -30, 0, 0, 0, 30, 120]))
    near = st.integers(-256, 256).map(lambda n: n * 2.0**exponent / 2)  # ties of a tile whose scale is a power of two
    anything = st.floats(width=32, allow_nan=special, allow_infinity=special)
    number = st.one_of(near, near, anything)
    return draw(st.lists(st.lists(number, min_size=V, max_size=V), min_size=K, max_size=K))
