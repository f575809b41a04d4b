"""Norm and rotation of a token's queries and keys. Run with TRITON_INTERPRET=1, which does not round bf16 as a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lattn_compile.kernels import rotate_step
from lattn_compile.kernels.rotate_step import Heads


def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Of `[N, heads, D]`, as transformers' Qwen3-Next has it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (wide * (1.0 + weight.float())).type_as(x)
    turned, rest = y[..., : cos.shape[-1]], y[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("sequences", "heads", "dim", "turned", "each"),
    [(1, (4, 2), 32, 8, False), (3, (2, 0), 24, 24, True), (2, (3, 3), 20, 10, True), (2, (2, 1), 16, 2, False)],
)
def test_heads_are_normed_and_turned(
    sequences: int,
    heads: tuple[int, int],
    dim: int,
    turned: int,
    each: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries with a gate beside each head, keys behind each other, or none; one position for all, or each its own."""
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(dim)
    n, m = heads
    memory = torch.randn(sequences, n * 2 * dim + 5, generator=rng).to(dtype)
    other = torch.randn(sequences, max(m, 1) * dim + 3, generator=rng).to(dtype)
    weights = [torch.randn(dim, generator=rng).to(dtype) for _ in range(2)]
    cos, sin = (torch.randn(sequences if each else 1, turned, generator=rng).to(dtype) for _ in range(2))
    q = Heads(memory, weights[0], n, memory.stride(0), 2 * dim, dim)
    k = Heads(other, weights[1], m, other.stride(0), 0, m * dim) if m else None
    got = rotate_step.forward(q, k, cos, sin, dim, 1e-6)
    x = memory[:, : n * 2 * dim].view(sequences, n, 2 * dim)[..., :dim]
    wants = [rotated(x, weights[0], cos, sin, 1e-6)]
    if m:
        wants.append(rotated(other[:, : m * dim].view(sequences, m, dim), weights[1], cos, sin, 1e-6))
    assert len(got) == len(wants)
    for mine, want in zip(got, wants, strict=True):
        near = 1e-5 if dtype is torch.float32 else 2**-9
        torch.testing.assert_close(mine, want, rtol=near, atol=near)
