"""The triangular system at its worst, one key repeated (field report B38), and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lattn_compile.kernels.reference.wy import rounded_substitution, unit_lower_inverse


def _system(kind: str, size: int, beta: float, g: float) -> torch.Tensor:
    """A of `(I + A)`, float64, for keys of norm 1 that are all equal, or at cosine 0.9 to one direction."""
    rng = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(64, generator=rng, dtype=torch.float64), dim=0)
    keys = direction.expand(size, 64)
    if kind == "cosine 0.9":
        noise = torch.randn(size, 64, generator=rng, dtype=torch.float64)
        noise = torch.nn.functional.normalize(noise - (noise @ direction)[:, None] * direction, dim=-1)
        keys = 0.9 * direction + (1 - 0.81) ** 0.5 * noise
    position = torch.arange(size, dtype=torch.float64)
    return (beta * (keys @ keys.T) * torch.exp(g * (position[:, None] - position))).tril(-1)


@pytest.mark.parametrize("kind", ["repeated", "cosine 0.9"])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("g", [0.0, -0.01])
def test_inverse_in_fp32_is_right_for_correlated_keys_and_slow_decay(
    kind: str, size: int, beta: float, g: float
) -> None:
    # The fp32 matrix is the problem that is solved; that it is itself rounded is no error of the inverse.
    system = _system(kind, size, beta, g).float()
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + system.double())
    got = unit_lower_inverse(system)
    assert (got - want).norm() / want.norm() < 2e-6
    assert torch.equal(got.diagonal(), torch.ones(size)) and (got.triu(1) == 0).all()


def test_only_the_strict_lower_triangle_is_read() -> None:
    system = torch.randn(3, 2, 64, 64, dtype=torch.float64) / 16
    poisoned = system.clone()
    poisoned[torch.ones(64, 64, dtype=torch.bool).triu().expand_as(system)] = torch.nan
    want = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + system.tril(-1))
    torch.testing.assert_close(unit_lower_inverse(poisoned), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_a_blocks_inverse_has_the_same_bits_in_any_batch(size: int) -> None:
    system = torch.randn(7, 3, size, size).tril(-1) / 8
    together = unit_lower_inverse(system)
    for i in range(7):
        assert torch.equal(unit_lower_inverse(system[i : i + 1])[0], together[i])


@pytest.mark.parametrize("size", [1, 8, 16, 32, 64])
def test_substitution_that_rounds_nothing_is_the_product_with_the_inverse(size: int) -> None:
    system = torch.randn(3, 2, size, size, dtype=torch.float64).tril(-1) / 4
    known = torch.randn(3, 2, size, 5, dtype=torch.float64)
    exact, written = rounded_substitution(system, known, range(size), lambda x: x)
    torch.testing.assert_close(exact, unit_lower_inverse(system) @ known, rtol=1e-11, atol=1e-12)
    assert torch.equal(exact, written)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_rows_see_rounded_ones_and_rows_left_out_are_zero(size: int, dtype: torch.dtype) -> None:
    system = torch.randn(size, size, dtype=torch.float64).tril(-1) / 4
    known = torch.randn(size, 5, dtype=dtype)
    rows = [i for i in range(size) if i % 3 != 1]
    known[[i for i in range(size) if i % 3 == 1]] = 0
    exact, written = rounded_substitution(system, known, rows, lambda x: x.bfloat16().to(dtype))
    for i in range(size):
        want = known[i].double() - (system[i, :i, None] * written[:i].double()).sum(0)
        if i % 3 == 1:
            want = torch.zeros_like(want)
        torch.testing.assert_close(exact[i], want.to(dtype))
        assert torch.equal(written[i], exact[i].bfloat16().to(dtype))


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("value_dim", [5, 64])
def test_substitution_gives_a_block_the_same_bits_in_any_batch(size: int, value_dim: int) -> None:
    system, known = torch.randn(7, 3, size, size).double().tril(-1) / 8, torch.randn(7, 3, size, value_dim)
    together = rounded_substitution(system, known, range(size), Tensor.clone)
    for i in range(7):
        alone = rounded_substitution(system[i : i + 1], known[i : i + 1], range(size), Tensor.clone)
        assert all(torch.equal(x[0], y[i]) for x, y in zip(alone, together, strict=True))
