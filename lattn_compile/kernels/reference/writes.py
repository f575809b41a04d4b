"""What is rounded on the way, and where: the state at the lines of a grid, and the updates that are written to it.

The chunk form rounds its state every `chunk_size` tokens. The windows of replay do that too, and may round every
update, key and value, as it is written. In two_precision the state is a pair `[R | A]`, side by side along V: two
states that share keys, gates and write strengths, hence decays and inverses, and differ in their updates. Outputs are
read from R, and a line makes R a rounded copy of A. (Semantics §5.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lattn_compile.formats import Format
from lattn_compile.formats.factors import qdq
from lattn_compile.formats.quantizer import Identity, Quantizer

__all__ = ["Writes"]


@dataclass(frozen=True, slots=True)
class Writes:
    """What is rounded in a call.

    Attributes:
        every: tokens between two lines of the grid.
        quantize: of the state at a line (paired: of its read copy); None rounds nothing.
        identity: position of each sequence's first token, and its name, `[N]`; None: nothing is keyed by them.
        after: the last token before a line reads what was written there.
        factors: format of the updates, `formats/factors.py`; None writes them as they are.
        paired: states are pairs `[R | A]`.
        anchor: what A is rounded to at a line, for paired states; None: nothing.
    """

    every: int
    quantize: Quantizer | None
    identity: Identity | None = None
    after: bool = False
    factors: str | None = None
    paired: bool = False
    anchor: Format | None = None

    def state(self, exact: Tensor, owner: Tensor, done: Tensor) -> Tensor:
        """What a line makes of the states `exact [E, HV, K, V]`, or `[E, HV, K, 2 V]` of pairs.

        Args:
            owner: int64 `[E]`, their sequences. done: int64 `[E]`, tokens of each up to the line.
        """
        identity = None
        if self.identity is not None:
            identity = Identity(self.identity.position[owner] + (done - 1), self.identity.sequence[owner])
        if self.paired:
            exact = exact.tensor_split(2, -1)[1]
            exact = exact if self.anchor is None else self.anchor.qdq(exact)
        written = exact if self.quantize is None else self.quantize.qdq(exact, identity)
        return torch.cat((written, exact), -1) if self.paired else written

    def state_backward(self, grad: Tensor) -> Tensor:
        """Adjoint of `state`, straight through all rounding: `grad` of what was written, `[..., V]` or `[..., 2 V]`."""
        if not self.paired:
            return grad
        read, anchor = grad.tensor_split(2, -1)
        return torch.cat((torch.zeros_like(read), read + anchor), -1)

    def returned(self, exact: Tensor, written: Tensor) -> Tensor:
        """The anchors `[E, HV, K, V]` that a call hands back, of states before and after their write.

        A quantizer that is not idempotent would round a written state anew: its caller encodes the exact one, once.
        """
        if self.paired:
            return written.tensor_split(2, -1)[1]
        return written if self.quantize is None or self.quantize.idempotent else exact

    def update(self, x: Tensor) -> Tensor:
        """Keys `[..., K]` or values `[..., V]` as they are written."""
        return x if self.factors is None else qdq(x, self.factors)

    @property
    def apart(self) -> bool:
        """Whether a token reads its own update as it is before it is rounded."""
        return self.factors is not None and not self.after
