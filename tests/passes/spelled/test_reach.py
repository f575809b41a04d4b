"""Masks that reach further than the lengths a graph was traced at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lattn_compile as lc
from lattn_compile.report import Report

B, H, T, K, V = 1, 2, 8, 4, 6


def inputs(tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, tokens, n) for n in (K, K, V))


def distance(tokens: int) -> Tensor:
    at = torch.arange(tokens)
    return at[:, None] - at


def window_of_diagonals(s: Tensor) -> Tensor:
    s = s.tril()
    return s - s.tril(-16)


def sliding_window(s: Tensor) -> Tensor:
    d = distance(s.shape[-1])
    return s * ((d >= 0) & (d < 20))


def sink_and_window(s: Tensor) -> Tensor:
    d = distance(s.shape[-1])
    return s * ((d >= 0) & ((d < 20) | (torch.arange(s.shape[-1]) < 9)))


def blocks(s: Tensor) -> Tensor:
    at = torch.arange(s.shape[-1]) // 32
    return (s * (at[:, None] == at)).tril()


def blocks_of_blocks(s: Tensor) -> Tensor:
    at = torch.arange(s.shape[-1]) // 8
    return (s * (at[:, None] - at < 4)).tril()


def clamped_distance(s: Tensor) -> Tensor:
    d = distance(s.shape[-1])
    return (s * (-0.1 * d.clamp(max=24)).exp()).tril()


def clamped_decay(s: Tensor) -> Tensor:
    d = distance(s.shape[-1])
    return (s * (-0.1 * d).clamp(min=-3.0).exp()).tril()


def table(s: Tensor) -> Tensor:
    n = s.shape[-1]
    d = torch.arange(65)[:, None] - torch.arange(65)
    return s * ((d >= 0) & (d < 20))[:n, :n]


class Scores(nn.Module):
    """(mask(Q K^T)) V."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mask(q @ k.mT) @ v


class FewChunks(nn.Module):
    """Chunks of 4 tokens, of which each sees itself and the eight before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
        d = distance(q.shape[2])
        between = ((d > 0) & (d < 9)).to(q.dtype)
        states = torch.einsum("nm,bhmkv->bhnkv", between, k.mT @ v)
        return ((q @ k.mT).tril() @ v + q @ states).flatten(2, 3)


def rewritten(module: nn.Module, tokens: int, step: int = 1) -> tuple[nn.Module, Report]:
    any_length = step * Dim("n", min=2, max=64 // step) if step > 1 else Dim("t", min=2, max=64)
    dims = ({2: any_length},) * 3
    result = lc.rewrite(torch.export.export(module, inputs(tokens), strict=False, dynamic_shapes=dims), "exact")
    return result.module.module(), result.report


def agrees(module: nn.Module, made: nn.Module, lengths: tuple[int, ...]) -> bool:
    return all(torch.allclose(module(*inputs(n)), made(*inputs(n)), rtol=1e-4, atol=1e-4) for n in lengths)


FAR = [
    window_of_diagonals,
    sliding_window,
    sink_and_window,
    blocks,
    blocks_of_blocks,
    clamped_distance,
    clamped_decay,
    table,
]


@pytest.mark.parametrize("mask", FAR, ids=lambda f: f.__name__)
def test_a_mask_that_shows_only_at_greater_lengths_is_seen(mask: Callable[[Tensor], Tensor]) -> None:
    module = Scores(mask)
    made, report = rewritten(module, T)
    assert not report.rewritten
    assert agrees(module, made, (T, 48))


def test_a_mask_between_chunks_is_seen_at_more_chunks() -> None:
    module = FewChunks()
    made, report = rewritten(module, 8, 4)
    assert not report.rewritten
    assert agrees(module, made, (8, 48))


def test_what_a_fixed_length_was_proven_for_is_no_proof_for_any_length() -> None:
    """The second claim has the same numbers as the first."""
    module = Scores(window_of_diagonals)
    fixed = lc.rewrite(torch.export.export(module, inputs(T), strict=False), "exact")
    assert fixed.report.rewritten
    assert agrees(module, fixed.module.module(), (T,))
    made, _ = rewritten(module, T)
    assert agrees(module, made, (T, 48))


def test_a_reach_that_no_test_comes_up_to_is_refused() -> None:
    module = Scores(lambda s: s.tril() - s.tril(-6000))
    result = lc.rewrite(
        torch.export.export(module, inputs(T), strict=False, dynamic_shapes=({2: Dim("t", min=2)},) * 3), "exact"
    )
    assert not result.report.rewritten
    assert "SELF_CHECK" in [u.reason.code for u in result.report.unmatched]


@pytest.mark.parametrize(
    "mask",
    [
        lambda s: s.tril(),
        lambda s: s * (distance(s.shape[-1]) >= 0),
        lambda s: s.tril() - s.tril(-80),  # no length that the graph takes is as long
        lambda s: (s * (-0.1 * distance(s.shape[-1]).clamp(min=0)).exp()).tril(),
    ],
    ids=["tril", "compared", "beyond", "decay"],
)
def test_a_causal_mask_of_any_length_is_rewritten(mask: Callable[[Tensor], Tensor]) -> None:
    module = Scores(mask)
    made, report = rewritten(module, T)
    assert report.rewritten
    assert agrees(module, made, (T, 48))
