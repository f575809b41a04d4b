"""The triangular inverse of the delta rule in chunk form (the WY representation).

Inside a block, `u_i = beta_i (v_i - S~_i^T k_i)` couples every token to the earlier ones of its block:
`(I + A) U = R` with `A` strictly lower triangular. (Yang et al. 2024, "Parallelizing Linear Transformers with the
Delta Rule", eq. 10-11.)

A, its inverse and the products with it are float64 whatever the state's dtype. In fp32 the rounding errors of A's
entries are amplified by `norm((I + A)^-1)`, up to 20 for repeated keys with beta = 1.9, and are the same in row after
row: ten times the error of the token loop, over the bound of semantics §8. In float64 the loop's own error remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["SUB_BLOCK", "combined", "diagonal_blocks", "rounded_substitution", "unit_lower_inverse"]

SUB_BLOCK = 16


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """`(I + A)^-1` by forward substitution in 16-blocks, in the dtype of `A`.

    Substitution is backward stable row by row. The tempting shortcuts (repeated doubling, a Neumann series) form powers
    of A, which for one repeated key and slow decay grow like binomials before they cancel: wrong by up to 1e19.

    Args:
        strict: A, `[..., n, n]`, n at most 16 or a multiple of 16. Only its strictly lower triangle is read.

    Returns:
        `[..., n, n]`, unit lower triangular.
    """
    corners = diagonal_blocks(strict, SUB_BLOCK)
    # Rows and columns lead, so that one step of the substitution is a few long vector operations over all blocks. Each
    # finished row is taken out of all later ones by elementwise operations only: a block's bits must not depend on how
    # many blocks are computed with it (a run cut on the quantization grid equals the uncut one), and a reduction's do.
    corners = corners.movedim((-3, -2), (0, 1)).contiguous()
    small = torch.zeros_like(corners)
    small.diagonal().fill_(1)
    for j in range(small.shape[0] - 1):
        small[j + 1 :, : j + 1] -= corners[j + 1 :, j, None] * small[j, : j + 1]
    return combined(strict, small.movedim((0, 1), (-2, -1)))


def diagonal_blocks(strict: Tensor, width: int) -> Tensor:
    """View of `[..., n, n]`: its diagonal blocks of at most `width` rows, `[..., width, width, n / width]`."""
    size = strict.shape[-1]
    width = min(size, width)
    count = size // width
    return strict.unflatten(-1, (count, width)).unflatten(-3, (count, width)).diagonal(dim1=-4, dim2=-2)


def combined(strict: Tensor, inverses: Tensor) -> Tensor:
    """`(I + A)^-1` of A `[..., n, n]` from those of its diagonal blocks, `[..., n / width, width, width]`."""
    count, width = inverses.shape[-3:-1]
    if count == 1:
        return inverses.squeeze(-3)
    full = torch.zeros_like(strict)
    for b in range(count):
        lo, hi = b * width, (b + 1) * width
        corner = inverses[..., b, :, :]
        full[..., lo:hi, lo:hi] = corner
        if b:
            full[..., lo:hi, :lo] = -corner @ (strict[..., lo:hi, :lo] @ full[..., :lo, :lo])
    return full


def rounded_substitution(
    strict: Tensor, known: Tensor, rows: Sequence[int], rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Solves `(I + A) U = R` where later rows see rounded ones: `u_i = r_i - sum A_ij rounded(u_j)`, over j < i.

    No inverse can do that. Sums run in float64, `rounded` gets its row in the dtype of R. A block's bits do not depend
    on its company.

    Args:
        strict: A, float64 `[..., n, n]`, strictly lower triangular; leading dimensions broadcast.
        known: R, `[..., n, V]`.
        rows: ascending, the rows that may be anything but zero.
        rounded: `[..., V]` to the same.

    Returns:
        U and its rounded rows, `[..., n, V]`.
    """
    rest = known.to(torch.float64, copy=True)
    exact, written = torch.zeros_like(known), torch.zeros_like(known)
    corner = 0
    for i in rows:
        if i - corner >= SUB_BLOCK:
            # What the rows of finished sub-blocks take out of one more sub-block, by one product each.
            corner = i // SUB_BLOCK * SUB_BLOCK
            block = slice(corner, corner + SUB_BLOCK)
            rest[..., block, :] -= strict[..., block, :corner] @ written[..., :corner, :].double()
        exact[..., i, :] = rest[..., i, :]
        written[..., i, :] = row = rounded(exact[..., i, :])
        later = slice(i + 1, corner + SUB_BLOCK)
        rest[..., later, :] -= strict[..., later, i, None] * row[..., None, :]
    return exact, written
