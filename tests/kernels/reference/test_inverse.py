"""Approximate inverses: what they compute, and for which keys they can be used (the tables of docs/prefill.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lattn_compile.errors import UnsupportedError
from lattn_compile.kernels.reference.inverse import inverse_backward, inverse_of, residual
from lattn_compile.kernels.reference.wy import unit_lower_inverse
from lattn_compile.modes import BlockDoubling, Inverse, Neumann, NewtonSchulz

PAGE = Path(__file__).parents[3] / "docs" / "prefill.md"
WHOLE: tuple[Inverse, ...] = (Neumann(63), NewtonSchulz(6), BlockDoubling(8), BlockDoubling(16))
CUT: tuple[Inverse, ...] = (Neumann(7), Neumann(15), Neumann(31), NewtonSchulz(4))


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_prefill", PAGE.with_name("write_prefill.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mild(size: int) -> torch.Tensor:
    return (
        torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).tril(-1) / 8
    )


@pytest.mark.parametrize("size", [1, 2, 8, 16, 32, 64])
def test_a_whole_series_is_the_inverse(size: int) -> None:
    strict = mild(size)
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + strict)
    for inverse in WHOLE:
        assert (inverse_of(strict, inverse) - want).norm() <= 1e-12 * want.norm(), str(inverse)
    assert torch.equal(inverse_of(strict, "exact"), unit_lower_inverse(strict))


@pytest.mark.parametrize(("inverse", "order"), [(Neumann(5), 5), (NewtonSchulz(3), 7), (NewtonSchulz(1), 1)], ids=str)
def test_a_cut_series_is_the_sum_of_its_powers(inverse: Inverse, order: int) -> None:
    strict = mild(32)
    want = sum(torch.linalg.matrix_power(-strict, i) for i in range(order + 1))
    got = inverse_of(strict, inverse)
    assert (got - want).abs().max() <= 1e-12
    # What is left of (I + A) T - I is the next power.
    want = torch.linalg.matrix_norm(torch.linalg.matrix_power(strict, order + 1))
    torch.testing.assert_close(residual(strict, got), want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("inverse", [*WHOLE, *CUT, "exact"], ids=str)
def test_both_gradients_are_those_that_autograd_finds(inverse: str | Inverse) -> None:
    strict, grad = mild(16).requires_grad_(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = inverse_of(strict.detach(), inverse)
    at = torch.linalg.inv(found.detach()).requires_grad_()  # the matrix whose inverse T is
    (want,) = torch.autograd.grad(torch.linalg.inv(at), at, grad)
    got = inverse_backward(strict.detach(), found, grad, inverse, series=False)
    torch.testing.assert_close(got, want.tril(-1), rtol=1e-9, atol=1e-9)
    if isinstance(inverse, Neumann | NewtonSchulz):
        (want,) = torch.autograd.grad(inverse_of(strict, inverse), strict, grad)
        got = inverse_backward(strict.detach(), found, grad, inverse, series=True)
        torch.testing.assert_close(got, want.tril(-1), rtol=1e-10, atol=1e-10)


def test_an_inverse_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="inverse"):
        inverse_of(mild(8), "neumann")


# Repeated keys with slow decay: beta 1.9, the known way to break them


@pytest.mark.parametrize("g", [0.0, -0.01])
def test_for_repeated_keys_only_the_exact_inverse_and_doubling_in_8_hold(tables: ModuleType, g: float) -> None:
    found = {str(i): tables.worst("repeated", 1.9, g, i) for i in (*WHOLE, *CUT, "exact")}
    # Horner's rule over all 63 orders is forward substitution, row by row.
    assert max(found["exact"], found["neumann(63)"]) < 1e-3, found
    assert found["block_doubling(8)"] < 5e-3 < 1e-2 < found["block_doubling(16)"], found
    assert all(found[str(i)] > 1e9 for i in (*CUT, NewtonSchulz(6)))


def test_fast_decay_makes_every_whole_series_usable_and_no_cut_one(tables: ModuleType) -> None:
    found = {str(i): tables.worst("repeated", 1.9, -1.0, i) for i in (*WHOLE, *CUT)}
    assert {name for name, x in found.items() if x <= tables.MAX_RESIDUAL} == {str(i) for i in WHOLE}, found


@pytest.mark.parametrize("g", [0.0, -0.01, -1.0])
def test_independent_keys_take_all_but_the_shortest_series(tables: ModuleType, g: float) -> None:
    for inverse in (*WHOLE, *CUT[1:]):
        assert tables.worst("independent", 1.9, g, inverse) <= tables.MAX_RESIDUAL, str(inverse)


def test_the_page_shows_what_is_usable_as_it_is_measured(tables: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for beta in tables.BETAS:
        shown = page.split(f"`beta = {beta:g}`:\n\n", 1)[1].split("\n\n")[0].split("<!--")[0].strip().splitlines()
        measured = tables.table(beta).splitlines()
        assert len(shown) == len(measured) and shown[:2] == measured[:2]
        for a, b in zip(shown[2:], measured[2:], strict=True):
            # Digits of what has cancelled away are the machine's own; on which side of the bound they lie is not, but
            # for those close to it.
            for x, y in zip(a.split("|")[3:-1], b.split("|")[3:-1], strict=True):
                close = 1e-4 < float(y.replace("**", "")) < 1e-2
                assert ("**" in x) == ("**" in y) or close, (a, b)
