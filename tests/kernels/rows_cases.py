"""A few rows times weights. Run with TRITON_INTERPRET=1, whose products of bf16 are wrong: fp32 here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lattn_compile.kernels import few_rows, some_rows


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 40, 512), (8, 16, 1024), (11, 33, 512)])
def test_a_product(rows: int, columns: int, depth: int, pair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, depth + 8, generator=rng)
    x, weights = wide[:, :depth], [torch.randn(columns, depth, generator=rng) / depth**0.5 for _ in range(1 + pair)]
    products = [x.double() @ w.double().T for w in weights]
    want = silu(products[0]) * products[1] if pair else products[0]
    for given in (x, x.T.contiguous().T):
        (got,) = few_rows.forward(given, *weights, pair=pair)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_products_of_one_input_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, 512, generator=rng), [torch.randn(n, 512, generator=rng) for n in (48, 16, 21)]
    for count in (2, 3):
        for got, weight in zip(few_rows.forward(x, *weights[:count]), weights[:count], strict=True):
            want = x.double() @ weight.double().T
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "pair"),
    [
        (17, (128,), 512, False),
        (64, (256,), 512, True),
        (40, (4224, 128, 256), 512, False),
        (33, (128, 256), 512, False),
    ],
)
def test_products_of_some_rows(
    rows: int, columns: tuple[int, ...], depth: int, pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, a pair, several whole, and several cut along the sum."""
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 8, generator=rng)[:, :depth]
    weights = [torch.randn(n, depth, generator=rng) / depth**0.5 for n in columns * (1 + pair)]
    wants = [x.double() @ w.double().T for w in weights]
    wants = [silu(wants[0]) * wants[1]] if pair else wants
    for given in (x, x.T.contiguous().T):
        for got, want in zip(some_rows.forward(given, *weights, pair=pair), wants, strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
