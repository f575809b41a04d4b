"""Inputs and comparisons that the op tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lattn_compile.carry  # noqa: F401 - registers the ops
from lattn_compile.testing.oracle import oracle

OPS = {"chunk": torch.ops.lattn.chunk.default, "decode": torch.ops.lattn.decode.default}
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def inputs(
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 8,
    value_dim: int = 12,
    *,
    sequences: int | None = None,
    decay: str | None = "head",
    beta: bool = True,
    state: bool = True,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    seed: int = 0,
) -> list[Any]:
    """q, k, v, g, beta, initial_state: keys of norm 1, decays between exp(-0.5) and 1, beta in (0, 1)."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    q, k = normal(batch, tokens, heads, key_dim), normal(batch, tokens, heads, key_dim)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = normal(batch, tokens, value_heads, value_dim)
    gate = {
        None: None,
        "head": -0.5 * uniform(batch, tokens, value_heads),
        "channel": -0.5 * uniform(batch, tokens, value_heads, key_dim),
    }[decay]
    strength = uniform(batch, tokens, value_heads) if beta else None
    initial = normal(batch if sequences is None else sequences, value_heads, key_dim, value_dim) if state else None
    out = [x if x is None else x.to(dtype) for x in (q, k, v, gate, strength, initial)]
    return [x if x is None else x.requires_grad_(grad) for x in out]


def options(op: str, write: str = "exact", **more: Any) -> dict[str, Any]:
    """Op options; quantized modes get a format whose tiles do not divide the state, so that tails are exercised."""
    kwargs: dict[str, Any] = {"scale": 0.35, "write": write, **more}
    if write != "exact":
        kwargs.setdefault("state_format", "int8/*x8")
    if write == "chunk":
        kwargs.setdefault("chunk_size", 5)
    return kwargs


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(a: Tensor, b: Tensor, what: str, tolerance: float = 1e-9) -> None:
    assert a.shape == b.shape, what
    scale = b.abs().max().clamp(min=1.0) if b.numel() else torch.tensor(1.0)
    error = (a - b).abs().max() / scale if b.numel() else torch.tensor(0.0)
    assert error <= tolerance, f"{what}: off by {error:.3g}"  # NaN fails too


def assert_like_the_loop(op: str, tensors: list[Any], lengths: tuple[Any, ...], **kwargs: Any) -> None:
    """Outputs, final state and every gradient of the op equal those of the float64 loop; `tensors` require grad."""
    got = OPS[op](*tensors, *lengths, **kwargs)
    want = oracle(*tensors, *lengths, **kwargs)
    assert_close(got[0].double(), want.o, "o")
    assert_close(got[1].double(), want.final_state, "final_state")
    rng = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in want[:2]]
    leaves = {n: x for n, x in zip(NAMES, tensors, strict=True) if x is not None}
    ours = torch.autograd.grad(list(got[:2]), list(leaves.values()), [c.to(x) for c, x in zip(cotangents, got)])  # noqa: B905
    theirs = torch.autograd.grad(list(want[:2]), list(leaves.values()), cotangents, allow_unused=True)
    for name, a, b in zip(leaves, ours, theirs, strict=True):
        assert_close(a, torch.zeros_like(a) if b is None else b, f"d{name}")
