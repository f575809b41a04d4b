from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import conv1d

from lattn_compile.lowering.conv import MOST_OUTPUTS, short_convolution

_PLAIN: dict[str, Any] = {
    "stride": [1],
    "padding": [0],
    "dilation": [1],
    "transposed": False,
    "output_padding": [0],
    "groups": 6,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(4, 4), (5, 4), (1, 1), (19, 4), (3, 3)])
def test_the_spelling_is_the_convolution(length: int, taps: int, bias: bool, dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 6, length, dtype=torch.float64), torch.randn(6, 1, taps, dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64) if bias else None
    x, w, b = (None if t is None else t.to(dtype) for t in (x, w, b))  # type: ignore[assignment]
    got = short_convolution(x, w, b, **_PLAIN)
    want = conv1d(x.double(), w.double(), None if b is None else b.double(), groups=6)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("change", "x", "w"),
    [
        ({"stride": [2]}, (2, 6, 5), (6, 1, 4)),
        ({"padding": [3]}, (2, 6, 5), (6, 1, 4)),
        ({"dilation": [2]}, (2, 6, 9), (6, 1, 4)),
        ({"transposed": True}, (2, 6, 5), (6, 1, 4)),
        ({"groups": 1}, (2, 6, 5), (6, 6, 4)),
        ({"groups": 3}, (2, 6, 5), (6, 2, 4)),
        ({}, (2, 6, MOST_OUTPUTS + 4), (6, 1, 4)),
        ({}, (2, 6, 3), (6, 1, 4)),
        ({}, (2, 6, 5, 5), (6, 1, 4, 4)),
    ],
)
def test_any_other_convolution_is_left(change: dict[str, Any], x: tuple[int, ...], w: tuple[int, ...]) -> None:
    assert short_convolution(torch.zeros(x), torch.zeros(w), None, **{**_PLAIN, **change}) is NotImplemented


def test_strides_are_the_convolutions() -> None:
    x, w = torch.randn(2, 8, 6).transpose(1, 2), torch.randn(6, 1, 4)
    assert short_convolution(x, w, None, **_PLAIN).stride() == conv1d(x, w, groups=6).stride()


def test_a_graph_without_recurrence_keeps_its_convolutions_numbers() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv1d(x, w, groups=6)[..., -1:].sigmoid()

    x, w = torch.randn(2, 6, 5), torch.randn(6, 1, 4)
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(step, backend="lattn_compile"), x, w)
    assert "extern_kernels.convolution" not in code
    assert (got - step(x, w)).abs().max() <= 1e-6
