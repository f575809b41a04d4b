"""A rank that listens to its neighbours while it computes.

With NCCL a collective does not fail when a rank is gone: the others wait in it. So beside the main thread a byte is
expected over gloo from the rank before and the rank behind. It comes when that rank leaves; if it dies, its connection
breaks at once. Whoever hears of a failure passes it on, so that it goes round, and ends the collectives of NCCL in its
own process, which is what brings a blocked main thread back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lattn_compile.lowering._torch_distributed import Gloo, abort_nccl

__all__ = ["Watch"]

_LEAVES, _FAILED = 0, 1
_FIRST_TAG = 1 << 30
"""Of the group's other messages, a monitored barrier's, tags count from 0."""
_AS_LONG_AS_IT_TAKES = timedelta(days=30)
_ENTERS = timedelta(minutes=30)
"""How long a rank that leaves waits for a neighbour that has not entered yet."""


class Watch:
    """From `__init__` to `leave`, which every rank of `group` has to reach in the same order.

    Attributes:
        heard: what went wrong on another rank, in words; None while nothing is known of.
    """

    _sessions = 0

    def __init__(self, group: Gloo, announce: Callable[[str], None], word: Callable[[], str | None]) -> None:
        """`group`: all ranks. `announce`: tells all of them what went wrong, the first time. `word`: what it was."""
        Watch._sessions += 1
        self.heard: str | None = None
        self._group, self._announce, self._word = group, announce, word
        self._tag = _FIRST_TAG + Watch._sessions
        rank, ranks = group.rank(), group.size()
        self._peers = sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank})
        self._lock, self._left = threading.Lock(), False
        for peer in self._peers:
            byte = torch.full((1,), _FAILED, dtype=torch.uint8, device="cpu")
            work = group.recv([byte], peer, self._tag)
            threading.Thread(target=self._listen, args=(peer, byte, work), daemon=True).start()

    def _listen(self, peer: int, byte: torch.Tensor, work: dist.Work) -> None:
        try:
            work.wait(_AS_LONG_AS_IT_TAKES)
            if int(byte) == _LEAVES:
                return
        except RuntimeError:
            self._announce(f"rank {peer} is gone")
        with self._lock:
            if self._left or self.heard is not None:
                return
            self.heard = self._word() or f"rank {peer} failed"
        print(f"lattn_compile: {self.heard}; this rank ends its collectives", file=sys.stderr, flush=True)
        self._tell(_FAILED)
        abort_nccl()

    def _tell(self, what: int) -> None:
        for peer in self._peers:
            try:
                self._group.send([torch.tensor([what], dtype=torch.uint8, device="cpu")], peer, self._tag).wait(_ENTERS)
            except RuntimeError:  # it is gone, which its other neighbour hears
                continue

    def leave(self, failed: bool) -> None:
        """Says so to the neighbours; what they do from now on is not listened to."""
        with self._lock:
            self._left = True
            told = self.heard is not None
        if not told:
            self._tell(_FAILED if failed else _LEAVES)
