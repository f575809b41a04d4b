"""Approximations to the triangular inverse of the delta rule in chunk form, and their gradients.

`(I + A)^-1` with A strictly lower triangular is the finite series of the powers of -A. What is cheap on matrix units
are products, so a kernel may cut the series off, or build it by doubling. Both stand on powers of A, which for
repeated keys with slow decay grow like binomials before they cancel: then a cut series is far from the inverse, and a
doubled one has lost its digits. `residual` says by how much.

Approximations are computed in the dtype that they are given, fp32 unless inputs are float64: that rounding is part of
what they are. The exact inverse is float64, as everywhere (`wy.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.kernels.reference.wy import combined, diagonal_blocks, unit_lower_inverse
from lattn_compile.modes import BlockDoubling, Inverse, Neumann, NewtonSchulz

__all__ = ["inverse_backward", "inverse_of", "residual"]


def inverse_of(strict: Tensor, inverse: str | Inverse) -> Tensor:
    """`(I + A)^-1` as the policy asks for it.

    Args:
        strict: A, `[..., n, n]`, zero on and above its diagonal; n at most 16 or a multiple of 16.
        inverse: "exact" or an approximation.
    """
    if isinstance(inverse, Neumann):
        return _neumann(strict, inverse.order)[-1]
    if isinstance(inverse, NewtonSchulz):
        return _newton_schulz(strict, inverse.iterations)[-1]
    if isinstance(inverse, BlockDoubling):
        return _block_doubling(strict, inverse.block)
    if inverse == "exact":
        return unit_lower_inverse(strict)
    raise UnsupportedError("inverse", got=repr(inverse), want="an inverse of modes.py", remedy="Choose one of these.")


def residual(strict: Tensor, inverse: Tensor) -> Tensor:
    """`‖(I + A) T − I‖`, Frobenius, of each matrix: float64 `[...]`."""
    a, t = strict.double(), inverse.double()
    return (t + a @ t - _identity(a)).square().sum((-2, -1)).sqrt()


def inverse_backward(strict: Tensor, inverse: Tensor, grad: Tensor, method: str | Inverse, *, series: bool) -> Tensor:
    """Gradient of A, strictly lower, from that of `T = inverse_of(A)`.

    Args:
        series: the derivative of the truncated sum itself; else the exact inverse's, `-T^T dT T^T`, at the given T.
    """
    if series and isinstance(method, Neumann):
        found = _neumann_backward(strict, grad.to(strict.dtype), method.order)
    elif series and isinstance(method, NewtonSchulz):
        found = _newton_schulz_backward(strict, grad.to(strict.dtype), method.iterations)
    else:
        t = inverse.double()
        found = -(t.mT @ grad.double() @ t.mT)
    return found.tril(-1)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _neumann(strict: Tensor, order: int) -> list[Tensor]:
    """The sums up to each order, by Horner's rule; behind the matrix's size nothing changes any more."""
    sums = [_identity(strict).expand_as(strict)]
    for _ in range(min(order, strict.shape[-1] - 1)):
        sums.append(_identity(strict) - strict @ sums[-1])
    return sums


def _neumann_backward(strict: Tensor, grad: Tensor, order: int) -> Tensor:
    total = torch.zeros_like(strict)
    for before in reversed(_neumann(strict, order)[:-1]):
        total -= grad @ before.mT
        grad = -(strict.mT @ grad)
    return total


def _newton_schulz(strict: Tensor, iterations: int) -> list[Tensor]:
    """The iterates, from the identity on."""
    found = [_identity(strict).expand_as(strict)]
    for _ in range(iterations):
        t = found[-1]
        found.append(t @ (2 * _identity(strict) - (t + strict @ t)))
    return found


def _newton_schulz_backward(strict: Tensor, grad: Tensor, iterations: int) -> Tensor:
    total = torch.zeros_like(strict)
    for t in reversed(_newton_schulz(strict, iterations)[:-1]):
        # T' = T (2I - X), X = T + A T.
        dx = -(t.mT @ grad)
        total += dx @ t.mT
        grad = grad @ (2 * _identity(strict) - (t + strict @ t)).mT + dx + strict.mT @ dx
    return total


def _block_doubling(strict: Tensor, block: int) -> Tensor:
    """`(I - A)(I + A^2)(I + A^4)...` inside each diagonal block, which is all of a series that ends; exact outside."""
    corners = diagonal_blocks(strict, block).movedim(-1, -3)
    found, power, reach = _identity(corners) - corners, corners, 2
    while reach < corners.shape[-1]:
        power = power @ power
        found = found + found @ power
        reach *= 2
    return combined(strict, found)
