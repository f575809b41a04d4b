"""Decayed products inside a block, forward and adjoint.

With `w(j -> i) = exp(g_{j+1} + ... + g_i)`, the weight that token j's write still has at token i, a block needs

    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i      what token i reads of token j's write
    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i      what token i's erase sees of it
    q_i, k_i weighted from the block's start, k_j weighted to its end, and the weight of the whole block

Where updates are written rounded (`replay.py`), the k_j that is written is not the k_i that reads: `written`. There a
token may read its own write unrounded (`apart`); then `reads` is strictly lower and `own[i] = q_i . k_i` stands beside
it.

Every weight is the exponential of a sum formed from exactly the gates between the two tokens. A difference of two
cumulative sums would be cheaper, and is NaN after `g = -inf` and off by ulp(200) after `g = -200`. All exponents are
`<= 0`: nothing can overflow, in the forward or in the adjoint, however strong the decay.

The two classes share an interface. `H` are the key heads of the products and `G` the value heads that share one:
per-head decay scales whole rows, so q and k stay at the model's key heads; per-channel decay sits inside the
contraction, so every value head has its own decayed keys (`H = HV, G = 1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "ChannelDecay",
    "HeadDecay",
    "OperandGrads",
    "pair_weights",
    "prefix_sum_exclusive",
    "suffix_sum",
    "suffix_sum_exclusive",
]


@dataclass(frozen=True, slots=True)
class OperandGrads:
    """Gradients that the chunk kernel hands back to the decay.

    Attributes:
        q_in, k_in, k_out: of the operands of the same name, `[B, H, b, K]`.
        reads, overlaps: of the matrices, `[B, H, G, b, b]`; overlaps float64, None for the additive rule.
        own: of `own`, `[B, H, G, b]`; None where that is the diagonal of `reads`.
        from_start, to_end: `[B, H, G, b]`, of the *exponents* of the row weights; None for per-channel decay, whose
            weights are part of the operands.
        whole: of the exponent of the block's weight, `[B, H, G]` or `[B, H, K]`; None without decay.
    """

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    reads: Tensor
    overlaps: Tensor | None
    own: Tensor | None
    from_start: Tensor | None
    to_end: Tensor | None
    whole: Tensor | None


class HeadDecay:
    """One gate per value head, or none.

    Args:
        q, k, written: `[B, H, b, K]` at key heads; `written` may be `k` itself.
        g: `[B, H, G, b]`, or None for no decay at all.
        groups: G.
        apart: a token's own write is not in `reads` but in `own`.

    Attributes:
        q_in, k_in, k_out: q, k, written as they are.
        from_start, to_end: row weights `[B, H, G, b, 1]`, None without decay.
        whole: the block's weight, `[B, H, 1, G, 1]` against a state `[B, H, K, G, V]`; None without decay.
    """

    def __init__(self, q: Tensor, k: Tensor, written: Tensor, g: Tensor | None, groups: int, *, apart: bool) -> None:
        self.q_in, self.k_in, self.k_out = q, k, written
        self._g, self._groups, self._diagonal = g, groups, -1 if apart else 0
        self.from_start = self.to_end = self.whole = self._weights = None
        if g is not None:
            self._weights = pair_weights(g)
            self.from_start = g.cumsum(-1).exp()[..., None]
            # Row b - 1 of the weights is "to the last token", which is the block's end.
            self.to_end = self._weights[..., -1, :, None]
            self.whole = self.from_start[:, :, None, :, -1]

    def overlaps(self) -> Tensor:
        """`[B, H, G, b, b]`, strictly lower, in float64: see `wy.py`."""
        k = self.k_in.double()
        written = k if self.k_out is self.k_in else self.k_out.double()
        weights = None if self._g is None else pair_weights(self._g.double())
        return self._weigh(k @ written.mT, weights).tril(-1)

    def reads(self) -> Tensor:
        """`[B, H, G, b, b]`, lower, without its diagonal if `apart`."""
        return self._weigh(self.q_in @ self.k_out.mT, self._weights).tril(self._diagonal)

    def own(self) -> Tensor:
        """What a token reads of its own unrounded write: `[B, H, 1, b, 1]`."""
        return (self.q_in * self.k_in).sum(-1)[:, :, None, :, None]

    def backward(
        self, grad: OperandGrads, reads: Tensor, overlaps: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of q, k and g, given the two matrices of the forward; `written` is k, rounded straight through."""
        q, k, written = self.q_in, self.k_in, self.k_out
        dqk = self._unweigh(grad.reads.tril(self._diagonal))
        dq = grad.q_in + dqk @ written
        dk = grad.k_in + grad.k_out + dqk.mT @ q
        if grad.own is not None:
            down = grad.own.sum(2)[..., None]
            dq += down * k
            dk += down * q
        pairs = grad.reads * reads
        if grad.overlaps is not None and overlaps is not None:
            dkk = self._unweigh(grad.overlaps.to(k.dtype).tril(-1))
            dk += (dkk + dkk.mT) @ k if written is k else dkk @ written + dkk.mT @ k
            # Repeated keys make these alternate in sign: their sum is much smaller than its terms.
            pairs = pairs + grad.overlaps * overlaps
        if self._weights is None or grad.from_start is None or grad.to_end is None or grad.whole is None:
            return dq, dk, None
        # g_l is in the exponent of every pair j < l <= i. Summed pair by pair: the usual difference of two running
        # sums cancels under strong decay.
        dg = suffix_sum(grad.from_start, -1) + prefix_sum_exclusive(grad.to_end, -1) + grad.whole[..., None]
        dg[..., 1:] += pairs.cumsum(-1).tril(-1).sum(-2)[..., :-1]
        return dq, dk, dg

    def _weigh(self, products: Tensor, weights: Tensor | None) -> Tensor:
        products = products[:, :, None]
        if weights is None:
            return products.expand(-1, -1, self._groups, -1, -1)
        return products * weights

    def _unweigh(self, grad: Tensor) -> Tensor:
        """Adjoint of `_weigh`: key heads receive the sum over their value heads."""
        return (grad if self._weights is None else grad * self._weights).sum(2)


class ChannelDecay:
    """One gate per value head and key channel.

    A weight inside the contraction cannot be pulled out of it, but it factors at any token m between j and i:
    `w(j -> i) = w(m -> i) w(j -> m)`, both exponents `<= 0`. So the block is halved again and again, and each level's
    lower half times its upper half is one matrix product with the middle as reference point. The diagonal carries no
    weight. Every pair of tokens is covered at exactly one level; cost and memory are `b K log b`, not `b^2 K`.

    Args:
        q, k, written: `[B, H', b, K]` at the model's key heads; `written` may be `k` itself.
        g: `[B, HV, b, K]`; b a power of two.
        apart: a token's own write is not in `reads` but in `own`.

    Attributes:
        q_in, k_in: `[B, HV, b, K]`, weighted from the block's start. k_out: `written`, weighted to its end.
        from_start, to_end: None, they are inside the operands.
        whole: the block's weight `[B, HV, K, 1, 1]` against a state `[B, HV, K, 1, V]`.
    """

    from_start: None = None
    to_end: None = None

    def __init__(self, q: Tensor, k: Tensor, written: Tensor, g: Tensor, *, apart: bool) -> None:
        self._q, self._k, self._written, self._g = q, k, written, g
        self._key_heads, self._apart = q.shape[1], apart
        self._from_start, self._to_end = g.cumsum(-2).exp(), suffix_sum_exclusive(g, -2).exp()
        self.q_in, self.k_in = self._times(self._from_start, q), self._times(self._from_start, k)
        self.k_out = self._times(self._to_end, written)
        self.whole = self._from_start[..., -1, :][..., None, None]

    def overlaps(self) -> Tensor:
        """`[B, HV, 1, b, b]`, strictly lower, in float64: see `wy.py`."""
        return self._products(self._k.double(), self._written.double(), self._g.double())[:, :, None]

    def reads(self) -> Tensor:
        """`[B, HV, 1, b, b]`, lower, without its diagonal if `apart`."""
        out = self._products(self._q, self._written, self._g)
        if not self._apart:
            out.diagonal(dim1=-2, dim2=-1).copy_(self._same_token(self._written))
        return out[:, :, None]

    def own(self) -> Tensor:
        """What a token reads of its own unrounded write: `[B, HV, 1, b, 1]`."""
        return self._same_token(self._k)[:, :, None, :, None]

    def backward(self, grad: OperandGrads, reads: Tensor, overlaps: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and g; `written` is k, rounded straight through."""
        assert grad.whole is not None
        dreads = grad.reads[:, :, 0]
        doverlaps = None if grad.overlaps is None else grad.overlaps[:, :, 0].to(self._g.dtype)
        own = dreads.diagonal(dim1=-2, dim2=-1) if grad.own is None else grad.own[:, :, 0]
        diagonal = self._fold(own[..., None])
        dq = self._fold(grad.q_in * self._from_start) + diagonal * (self._written if grad.own is None else self._k)
        dk = self._fold(grad.k_in * self._from_start + grad.k_out * self._to_end) + diagonal * self._q
        dg = suffix_sum(grad.q_in * self.q_in + grad.k_in * self.k_in, -2)
        dg += prefix_sum_exclusive(grad.k_out * self.k_out, -2) + grad.whole[:, :, None]
        for half, later, earlier in _levels(self._g):
            early_k = self._half(self._written, half, 0, earlier)
            late_q, g_reads = self._half(self._q, half, 1, later), _quadrants(dreads, half)
            dlate, dearly = g_reads @ early_k, g_reads.mT @ late_q
            self._add_half(dq, half, 1, dlate * later)
            exponent = dlate * late_q
            if doverlaps is not None:
                late_k, g_overlaps = self._half(self._k, half, 1, later), _quadrants(doverlaps, half)
                dlate = g_overlaps @ early_k
                dearly += g_overlaps.mT @ late_k
                self._add_half(dk, half, 1, dlate * later)
                exponent += dlate * late_k
            self._add_half(dk, half, 0, dearly * earlier)
            _halves(dg, half)[..., 1, :, :] += suffix_sum(exponent, -2)
            _halves(dg, half)[..., 0, :, :] += prefix_sum_exclusive(dearly * early_k, -2)
        return dq, dk, dg

    @property
    def _groups(self) -> int:
        return self._g.shape[1] // self._key_heads

    def _same_token(self, k: Tensor) -> Tensor:
        """`q_i . k_i`, `[B, HV, b]`."""
        return (self._q * k).sum(-1).repeat_interleave(self._groups, 1)

    def _products(self, left: Tensor, right: Tensor, g: Tensor) -> Tensor:
        """`left_i . (w(j -> i) right_j)` for `j < i`, `[B, HV, b, b]`."""
        out = g.new_zeros(*g.shape[:-1], g.shape[-2])
        for half, later, earlier in _levels(g):
            block = self._half(left, half, 1, later) @ self._half(right, half, 0, earlier).mT
            _quadrants(out, half).copy_(block)
        return out

    def _times(self, weight: Tensor, x: Tensor) -> Tensor:
        """`weight [B, HV, ...] * x [B, H', ...]`, each key head for its value heads."""
        if self._groups == 1:
            return weight * x
        return (weight.unflatten(1, (self._key_heads, self._groups)) * x[:, :, None]).flatten(1, 2)

    def _half(self, x: Tensor, half: int, which: int, weight: Tensor) -> Tensor:
        return self._times(weight, _halves(x, half)[..., which, :, :])

    def _fold(self, x: Tensor) -> Tensor:
        """Adjoint of the sharing of key heads: `[B, HV, ...]` summed to `[B, H', ...]`."""
        return x if self._groups == 1 else x.unflatten(1, (self._key_heads, self._groups)).sum(2)

    def _add_half(self, total: Tensor, half: int, which: int, x: Tensor) -> None:
        _halves(total, half)[..., which, :, :] += self._fold(x)


def pair_weights(g: Tensor) -> Tensor:
    """`w(j -> i)` for `j <= i`, 0 above the diagonal: `g [..., b]` to `[..., b, b]`."""
    size = g.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=g.device)
    # Column j holds g_l for l > j only, so its running sum at i is exactly g_{j+1} + ... + g_i.
    segments = g[..., :, None].expand(*g.shape, size).masked_fill(ones.triu(), 0).cumsum(-2)
    return segments.masked_fill_(ones.triu(1), -torch.inf).exp_()


def _levels(g: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Per level: the length of a half, and the weights `[B, HV, n, half, K]` middle -> later and earlier -> middle.

    The middle lies between the halves. Recomputed where needed: cheaper than the memory they take.
    """
    half = g.shape[-2] // 2
    while half:
        split = _halves(g, half)
        yield half, split[..., 1, :, :].cumsum(-2).exp(), suffix_sum_exclusive(split[..., 0, :, :], -2).exp()
        half //= 2


def _halves(x: Tensor, half: int) -> Tensor:
    """`[..., b, K]` viewed as `[..., b / 2 half, 2, half, K]`."""
    return x.unflatten(-2, (-1, 2, half))


def _quadrants(matrix: Tensor, half: int) -> Tensor:
    """View `[..., n, half, half]` of the lower left quadrants of the diagonal blocks of size `2 half`."""
    split = matrix.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return split[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def suffix_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over positions `>= l`, as sums (a total minus a prefix would cancel)."""
    return x.flip(dim).cumsum(dim).flip(dim)


def suffix_sum_exclusive(x: Tensor, dim: int) -> Tensor:
    """Sum over positions `> l`."""
    return _shift(x.flip(dim).cumsum(dim), dim).flip(dim)


def prefix_sum_exclusive(x: Tensor, dim: int) -> Tensor:
    """Sum over positions `< l`."""
    return _shift(x.cumsum(dim), dim)


def _shift(x: Tensor, dim: int) -> Tensor:
    """Moves every entry one position on, 0 enters: drops the last entry instead of subtracting it."""
    return pad(x.narrow(dim, 0, x.shape[dim] - 1), [0, 0] * (-dim - 1) + [1, 0])
