"""What the tokens of a chunk see of each other, of rounded keys and queries: the sites `kk` and `qk`.

    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i        w(j -> i) = exp(g_{j+1} + ... + g_i)
    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i

A decay of whole heads stands outside of the products, exact. A decay by channel is inside: rows of 16 tokens meet all
earlier tokens at their start, `q_i` and `k_i` decayed from there and `k_j` decayed to there, and that is what is
rounded, a scale for each row and each column. All exponents are <= 0. The products inside the 16 tokens, and both
matrices where their site is not rounded, are those of `decay.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lattn_compile.kernels.reference.decay import (
    ChannelDecay,
    OperandGrads,
    pair_weights,
    prefix_sum_exclusive,
    suffix_sum,
    suffix_sum_exclusive,
)
from lattn_compile.kernels.reference.operands import Operands

__all__ = ["SUB_BLOCK", "ChannelPairs", "HeadPairs", "Pairs"]

SUB_BLOCK = 16


class HeadPairs:
    """One gate a value head, or none.

    Args:
        q, k: `[B, HV, b, K]`. g: `[B, HV, b]` or None.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor | None, operands: Operands) -> None:
        self._g = g
        self._q, self._read_k = operands.left("qk", q), operands.right("qk", k.mT).mT
        self._k = operands.left("kk", k)  # a row of the left operand is a column of the right one: the same scale

    def overlaps(self) -> Tensor:
        """`[B, HV, b, b]`, strictly lower, float64 (`wy.py`) from operands that were rounded in their own dtype."""
        k = self._k.double()
        weights = 1.0 if self._g is None else pair_weights(self._g.double())
        return (k @ k.mT * weights).tril(-1)

    def reads(self) -> Tensor:
        """`[B, HV, b, b]`, lower."""
        return (self._q @ self._read_k.mT * self._weights()).tril()

    def backward(
        self, dreads: Tensor, reads: Tensor, doverlaps: Tensor | None, overlaps: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of q, k and g from those of the two matrices; rounding passes them on."""
        weights = self._weights()
        dqk = dreads.tril() * weights
        dq, dk = dqk @ self._read_k, dqk.mT @ self._q
        pairs = dreads.tril() * reads
        if doverlaps is not None and overlaps is not None:
            dkk = doverlaps.to(dk.dtype).tril(-1) * weights
            dk = dk + (dkk + dkk.mT) @ self._k
            pairs = pairs + doverlaps * overlaps  # alternating signs: summed in float64
        if self._g is None:
            return dq, dk, None
        dg = torch.zeros_like(self._g)
        dg[..., 1:] = pairs.cumsum(-1).tril(-1).sum(-2)[..., :-1]
        return dq, dk, dg

    def _weights(self) -> Tensor | float:
        return 1.0 if self._g is None else pair_weights(self._g)


class ChannelPairs:
    """One gate a value head and key channel.

    Args:
        q, k, g: `[B, HV, b, K]`, b a power of two.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor, operands: Operands) -> None:
        self._q, self._k, self._g, self._operands = q, k, g, operands
        self._width = min(q.shape[-2], SUB_BLOCK)
        self._count = q.shape[-2] // self._width

    def overlaps(self) -> Tensor:
        """`[B, HV, b, b]`, strictly lower, float64."""
        if not self._operands.rounds("kk"):
            return self._whole().overlaps()[:, :, 0]
        return self._assembled("kk", self._k, self._near().overlaps())

    def reads(self) -> Tensor:
        """`[B, HV, b, b]`, lower."""
        if not self._operands.rounds("qk"):
            return self._whole().reads()[:, :, 0]
        return self._assembled("qk", self._q, self._near().reads())

    def backward(
        self, dreads: Tensor, reads: Tensor, doverlaps: Tensor | None, overlaps: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and g from those of the two matrices; rounding passes them on."""
        del reads, overlaps  # decays inside the products leave no use for them
        far_q, far_k = self._operands.rounds("qk"), self._operands.rounds("kk")
        zero, none = torch.zeros_like(dreads), None if doverlaps is None else torch.zeros_like(doverlaps)
        nothing = torch.zeros_like(self._k)
        dq, dk, dg = nothing, nothing, nothing
        if not (far_q and far_k):
            dq, dk, dg = _added(self._whole(), zero if far_q else dreads, none if far_k else doverlaps, nothing)
        if far_q or far_k:
            own = none if not far_k else doverlaps
            near = _added(
                self._near(),
                self._corners(dreads if far_q else zero),
                None if own is None else self._corners(own),
                self._rows(nothing),
            )
            dq, dk, dg = (x + self._joined(y) for x, y in zip((dq, dk, dg), near, strict=True))
        if far_q:
            self._far_backward("qk", self._q, dreads, dq, dk, dg)
        if far_k and doverlaps is not None:
            self._far_backward("kk", self._k, doverlaps, dk, dk, dg)
        return dq, dk, dg

    def _whole(self) -> ChannelDecay:
        return ChannelDecay(self._q, self._k, self._k, self._g, apart=False)

    def _near(self) -> ChannelDecay:
        """The chunk's runs of 16 tokens as chunks of their own, `[B n, HV, 16, K]`."""
        k = self._rows(self._k)
        return ChannelDecay(self._rows(self._q), k, k, self._rows(self._g), apart=False)

    def _far(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows, the columns before them, and weights: from the rows' start to each, from each column to there."""
        for lo in range(self._width, self._q.shape[-2], self._width):
            rows, columns = slice(lo, lo + self._width), slice(0, lo)
            yield (
                rows,
                columns,
                self._g[:, :, rows].cumsum(-2).exp(),
                suffix_sum_exclusive(self._g[:, :, columns], -2).exp(),
            )

    def _assembled(self, site: str, left: Tensor, near: Tensor) -> Tensor:
        size, dtype = self._q.shape[-2], near.dtype
        full = near.new_zeros(*self._q.shape[:2], size, size)
        self._corners_of(full).copy_(near[:, :, 0].unflatten(0, (-1, self._count)).transpose(1, 2))
        for rows, columns, later, earlier in self._far():
            x = self._operands.left(site, left[:, :, rows] * later)
            y = self._operands.right(site, (self._k[:, :, columns] * earlier).mT)
            full[:, :, rows, columns] = x.to(dtype) @ y.to(dtype)
        return full

    def _far_backward(self, site: str, left: Tensor, grad: Tensor, dleft: Tensor, dk: Tensor, dg: Tensor) -> None:
        """Adds to the gradients of a matrix's left factor, of k and of g."""
        for rows, columns, later, earlier in self._far():
            x, y = left[:, :, rows] * later, self._k[:, :, columns] * earlier
            block = grad[:, :, rows, columns].to(x.dtype)
            dx = block @ self._operands.right(site, y.mT).mT
            dy = block.mT @ self._operands.left(site, x)
            dleft[:, :, rows] += dx * later
            dk[:, :, columns] += dy * earlier
            dg[:, :, rows] += suffix_sum(dx * x, -2)
            dg[:, :, columns] += prefix_sum_exclusive(dy * y, -2)

    def _rows(self, x: Tensor) -> Tensor:
        """`[B, HV, b, K]` to `[B n, HV, 16, K]`."""
        return x.unflatten(2, (self._count, self._width)).transpose(1, 2).flatten(0, 1)

    def _joined(self, x: Tensor) -> Tensor:
        """Inverse of `_rows`."""
        return x.unflatten(0, (-1, self._count)).transpose(1, 2).flatten(2, 3)

    def _corners_of(self, full: Tensor) -> Tensor:
        """View `[B, HV, n, 16, 16]` of the diagonal blocks of `[B, HV, b, b]`."""
        split = full.unflatten(3, (self._count, self._width)).unflatten(2, (self._count, self._width))
        return split.diagonal(dim1=2, dim2=4).movedim(-1, 2)

    def _corners(self, full: Tensor) -> Tensor:
        """The diagonal blocks as `ChannelDecay` takes them, `[B n, HV, 1, 16, 16]`."""
        return self._corners_of(full).transpose(1, 2).flatten(0, 1)[:, :, None]


Pairs = HeadPairs | ChannelPairs


def _added(
    decay: ChannelDecay, dreads: Tensor, doverlaps: Tensor | None, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g that come through the two matrices of `decay` alone."""
    if dreads.dim() == 4:
        dreads, doverlaps = dreads[:, :, None], None if doverlaps is None else doverlaps[:, :, None]
    whole = zero[:, :, 0]
    empty = zero.new_empty(0)
    return decay.backward(
        OperandGrads(zero, zero, zero, dreads, doverlaps, None, None, None, whole), reads=empty, overlaps=None
    )
