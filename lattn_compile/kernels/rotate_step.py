"""Queries and keys of one new token in front of attention: each head's norm, and the rotation by its position.

As operations of a graph these are a reduction and two kernels more for queries, and as many for keys: a rotation joins
halves that are exchanged, and what is joined is written first. Here a program has a head of a sequence, queries and
keys in one launch, every cast of the model's own operations made.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.early import wait_for_before
from lattn_compile.kernels.common.launch import launched

__all__ = ["Heads", "forward", "rotate", "supports"]


class Heads(NamedTuple):
    """Of queries, or of keys.

    Attributes:
        memory: number j of sequence i, of `heads * D`, lies at `i * row + j // run * group + j % run` from its begin.
        weight: `[D]`, to which 1 is added.
    """

    memory: Tensor
    weight: Tensor
    heads: int
    row: int
    group: int
    run: int


@triton.jit
def _normed(p, weight, scale, mask):
    """As the operations apart: in fp32, then cast."""
    x = tl.load(p, mask=mask, other=0.0)
    wide = x.to(tl.float32) * scale
    return (wide * (tl.load(weight, mask=mask, other=0.0).to(tl.float32) + 1.0)).to(x.dtype)


@triton.jit
def rotate(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    q_row,
    q_group,
    k_row,
    k_group,
    turn_row,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_RUN: tl.constexpr,
    K_RUN: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`y = (x / sqrt(mean(x * x) + eps) * (weight + 1))` in fp32, cast; of its first R channels `y * cos + z * sin`,
    each rounded, where z is y with its halves exchanged and the first one's sign turned.

    Args:
        q, k: see `Heads`. k may be None. cos, sin: `[N or 1, R]`, turn_row apart. q_out, k_out: `[N, heads, D]`,
            contiguous. BLOCK: a power of two, at least D.
        EARLY: launched while the kernel before may still run.

    Grid: (Q_HEADS + K_HEADS, N).
    """
    if EARLY:
        wait_for_before()
    i_head, i_seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside, turned = d < D, d < R
    other = tl.where(turned, (d + R // 2) % R, d)
    first = i_head * D
    base = q + i_seq * q_row
    p_x = base + (first + d) // Q_RUN * q_group + (first + d) % Q_RUN
    p_z = base + (first + other) // Q_RUN * q_group + (first + other) % Q_RUN
    p_weight, p_out = q_weight, q_out + (i_seq * Q_HEADS + i_head) * D
    if K_HEADS:
        if i_head >= Q_HEADS:
            first = (i_head - Q_HEADS) * D
            base = k + i_seq * k_row
            p_x = base + (first + d) // K_RUN * k_group + (first + d) % K_RUN
            p_z = base + (first + other) // K_RUN * k_group + (first + other) % K_RUN
            p_weight, p_out = k_weight, k_out + (i_seq * K_HEADS + i_head - Q_HEADS) * D
    x = tl.load(p_x, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    y = _normed(p_x, p_weight + d, scale, inside)
    z = _normed(p_z, p_weight + other, scale, turned)
    b_cos = tl.load(cos + i_seq * turn_row + d, mask=turned, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + i_seq * turn_row + d, mask=turned, other=0.0).to(tl.float32)
    along = (y.to(tl.float32) * b_cos).to(y.dtype).to(tl.float32)
    across = (tl.where(d < R // 2, -z.to(tl.float32), z.to(tl.float32)) * b_sin).to(y.dtype).to(tl.float32)
    tl.store(p_out + d, tl.where(turned, (along + across).to(y.dtype), y), mask=inside)


def supports(dim: int, turned: int, dtype: torch.dtype) -> bool:
    """Whether `forward` takes heads of so many channels, of which so many are turned."""
    return 0 < turned <= dim <= 1024 and turned % 2 == 0 and dtype is torch.bfloat16


def forward(q: Heads, k: Heads | None, cos: Tensor, sin: Tensor, dim: int, eps: float) -> tuple[Tensor, ...]:
    """`[N, heads, dim]` of queries, and of keys if there are any; see `rotate`. cos, sin: `[N or 1, R]`, contiguous."""
    sequences = q.memory.shape[0]
    outs = [None if x is None else x.memory.new_empty(sequences, x.heads, dim) for x in (q, k)]
    turned = cos.shape[1]
    row, group, run, heads, weight, memory = 0, 0, 1, 0, None, None
    if k is not None:
        memory, weight, heads, row, group, run = k
    launched(rotate)[(q.heads + heads, sequences)](
        q.memory, memory, q.weight, weight, cos, sin, *outs, q.row, q.group, row, group,
        0 if cos.shape[0] == 1 else turned, float(eps), Q_HEADS=q.heads, K_HEADS=heads, Q_RUN=q.run, K_RUN=run, D=dim,
        R=turned, BLOCK=triton.next_power_of_2(dim), EARLY=False, num_warps=1, num_stages=1,
    )  # fmt: skip
    return tuple(x for x in outs if x is not None)
