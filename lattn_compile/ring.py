"""`Ring`: the updates that wait for a flush in the replay and two-precision modes (semantics §5)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Ring"]


class Ring(NamedTuple):
    """The records since the last flush, oldest first; W - 1 slots, those from the cursor on are zero.

    Attributes:
        k: `[N, W - 1, H, K]`, normalised; in replay as its factor is stored and read back.
        u: `[N, W - 1, HV, V]`, the update; in replay likewise, in two_precision that of the read path, as it is.
        g: `[N, W - 1, HV(, K)]`, None without decay.
        v, beta: `[N, W - 1, HV, V]`, `[N, W - 1, HV]`: two_precision only, and beta only where there is one.
    """

    k: Tensor
    u: Tensor
    g: Tensor | None = None
    v: Tensor | None = None
    beta: Tensor | None = None
