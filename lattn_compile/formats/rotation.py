"""The Hadamard rotation of a state before it is rounded, which spreads an outlier over its axis (semantics §3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lattn_compile.errors import PolicyError

__all__ = ["ROTATIONS", "check_rotation", "rotate"]

_AXES = {"hadamard_k": ("K", -2), "hadamard_v": ("V", -1)}

ROTATIONS: tuple[str | None, ...] = (None, *_AXES)


def check_rotation(rotation: str | None, K: int, V: int) -> None:
    """Raise unless a `[K, V]` state can be rotated.

    Raises:
        PolicyError: the rotated axis is not a power of two.
    """
    if rotation is None:
        return
    axis, dim = _AXES[rotation]
    size = (K, V)[dim]
    if size < 1 or size & (size - 1):
        raise PolicyError(
            "rotation",
            got=f"{rotation!r} on a state with {axis} = {size}",
            want=f"a power of two for {axis}",
            remedy="Drop rotation, or rotate the other axis.",
        )


def rotate(S: Tensor, rotation: str | None) -> Tensor:
    """`H_K S` or `S H_V` of `S [..., K, V]`, fp32 or fp64, in a new tensor; `S` itself without a rotation.

    H is the orthonormal Hadamard matrix in Sylvester's order: butterflies `(a, b) -> (a + b, a - b)` of elements i and
    i + h for h = 1, 2, 4, ..., then one product with `fl(1/sqrt(n))`. Every step is one correctly rounded operation, so
    the bits are the same everywhere. H is symmetric and its own inverse: the same function undoes it, up to rounding.

    A NaN or an infinity spreads over the axis, and sums of values near the dtype's limit overflow to infinities: the
    codec's edge rules see them.

    Raises:
        PolicyError: see `check_rotation`.
    """
    if rotation is None:
        return S
    K, V = S.shape[-2:]
    check_rotation(rotation, K, V)
    # On rows: a butterfly of neighbours in memory would run on single elements.
    x = S if rotation == "hadamard_k" else S.mT
    x = x.clone(memory_format=torch.contiguous_format)
    size, stride = x.shape[-2], 1
    while stride < size:
        a, b = x.unflatten(-2, (-1, 2, stride)).unbind(-3)
        difference = a - b
        a.add_(b)
        b.copy_(difference)
        stride *= 2
    x.mul_(math.sqrt(1.0 / size))  # 1/size is exact and sqrt correctly rounded, unlike size ** -0.5
    return x if rotation == "hadamard_k" else x.mT.contiguous()
