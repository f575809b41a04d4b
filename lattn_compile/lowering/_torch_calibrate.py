"""What `lc.calibrate` has to know of Dynamo's inside to compile a model and leave nothing behind.

Private interfaces of torch, tested on torch 2.13, apart from `_torch_private` because nothing else needs them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType

from lattn_compile.lowering._torch_private import _translator, dynamo_counters

__all__ = ["Frames", "forget", "frames", "traced_code"]


class Frames:
    """What Dynamo did inside `frames()`: graph breaks, and frames that it could not compile. Filled on exit."""

    def __init__(self) -> None:
        self.breaks = self.skipped = 0


def traced_code() -> CodeType | None:
    """The code of the frame whose graph the backend is being handed."""
    tx = _translator()
    return None if tx is None or tx.output.root_tx is None else tx.output.root_tx.f_code


def forget(codes: Iterable[CodeType]) -> None:
    """Drop what was compiled for these code objects, by whatever backend. (`torch._dynamo.eval_frame.reset_code`)"""
    from torch._dynamo.eval_frame import reset_code

    for code in codes:
        reset_code(code)


@contextlib.contextmanager
def frames() -> Iterator[Frames]:
    """Inside, no number of recompiles is too large, and what Dynamo counts is counted apart."""
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    before = {name: Counter(counted) for name, counted in counters.items()}
    found = Frames()
    started = dynamo_counters()
    with config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30):
        try:
            yield found
        finally:
            ended = dynamo_counters()
            found.breaks = sum(ended["graph_breaks"].values()) - sum(started["graph_breaks"].values())
            total, ok = (ended[name] - started[name] for name in ("frames_total", "frames_ok"))
            found.skipped = total - ok
            counters.clear()
            for name, counted in before.items():
                counters[name].update(counted)
