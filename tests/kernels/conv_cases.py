"""The short convolution over sequences and its gradients. Run with TRITON_INTERPRET=1, whose casts to bf16 cut off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from lattn_compile.kernels import conv_sequence

SHAPES = [(2, 3, 5, 4, 3), (1, 70, 200, 4, 3), (2, 33, 16, 3, 0), (3, 40, 24, 1, 0), (1, 2, 8, 4, 2)]
"""Sequences, tokens, channels, taps, padding."""


def _given(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    sequences, tokens, channels, taps, _ = shape
    rng = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(sequences, tokens, channels, generator=rng)
    return x, torch.randn(channels, taps, generator=rng), torch.randn(channels, generator=rng)


def _want(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    y = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=padding, groups=len(weight))
    return y.transpose(1, 2)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_is_convolved(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = _given(shape)
    wide = torch.full((*x.shape[:2], x.shape[2] + 3), torch.nan)
    wide[..., :-3] = x
    for given in (x, wide[..., :-3], x.transpose(1, 2).contiguous().transpose(1, 2)):
        got = conv_sequence.forward(given, weight, b if bias else None, shape[-1])
        want = _want(x.double(), weight.double(), b.double() if bias else None, shape[-1])
        assert got.is_contiguous()
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        fewer = conv_sequence.forward(given, weight, b if bias else None, shape[-1], got.shape[1] // 2)
        assert torch.equal(fewer, got[:, : got.shape[1] // 2])


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, ...]) -> None:
    x, weight, _ = (y.double().requires_grad_() for y in _given(shape))
    y = _want(x, weight, None, shape[-1])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(y, [x, weight], grad.double())
    dx = conv_sequence.grad_input(grad, weight.detach().float(), shape[-1])
    dw = conv_sequence.grad_weight(x.detach().float(), grad, shape[3], shape[-1])
    for got, right in zip((dx, dw), want, strict=True):
        assert got.shape == right.shape
        assert (got - right).abs().max() <= 1e-5 * right.abs().max()


def test_more_outputs_than_one_program_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_sequence, "_STRETCH", 32)
    test_gradients((2, 100, 20, 4, 3))


def test_parts_of_a_projection_and_silu() -> None:
    """Two key heads and four value heads in two groups, as one projection leaves them."""
    heads, dim, tokens, taps = 2, 128, 40, 4
    rng = torch.Generator().manual_seed(0)
    projected = torch.randn(2, tokens, heads, 6 * dim, generator=rng)
    pieces = [y.flatten(2) for y in projected[..., : 4 * dim].split([dim, dim, 2 * dim], -1)]
    x, channels = torch.cat(pieces, -1), heads * 4 * dim
    weight = torch.randn(channels, taps, generator=rng)
    found: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            names = conv_sequence.convolve_sequence.arg_names
            return lambda *args, **more: found.update(dict(zip(names, args, strict=False)) | more, grid=grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_sequence, "launched", lambda kernel: Launch())
        out = conv_sequence.forward(x, weight, None, taps - 1)
    group = 6 * dim
    parts = {"A_END": heads * dim, "B_END": 2 * heads * dim, "SILU": True}
    for i, name in enumerate("abc"):
        parts |= {name: projected[..., i * dim :], f"{name}_token": heads * group, f"{name.upper()}_GROUP": group}
        parts |= {f"{name.upper()}_RUN": dim if i < 2 else 2 * dim}
    assert conv_sequence.widest(heads * dim, 2 * heads * dim, dim, 2 * dim, group) == found["BLOCK_C"]
    conv_sequence.convolve_sequence[found.pop("grid")](**found | parts)
    want = silu(_want(x.double(), weight.double(), None, taps - 1))
    assert (out - want).abs().max() <= 1e-5 * want.abs().max()
