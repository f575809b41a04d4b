"""Where the launches of a call go: to the device, or, while a graph is traced, into that graph.

A call's host side says which kernels run, on what and how wide; it is one description for both. `lowering/gpu.py`
traces it under `recording`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

__all__ = ["aligned", "is_recorded", "launched", "recording"]

_RECORDER: ContextVar[Callable[[Any], Any] | None] = ContextVar("lattn_compile.kernels.recorder", default=None)


@contextlib.contextmanager
def recording(recorder: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `launched(kernel)` is `recorder(kernel)`, launched as a kernel is: `[grid](*args, **options)`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def launched(kernel: Any) -> Any:
    """What `[grid](*args, **options)` is said to, to launch `kernel`."""
    recorder = _RECORDER.get()
    return kernel if recorder is None else recorder(kernel)


def is_recorded() -> bool:
    """Whether tensors stand for others that come later, and have no memory yet."""
    return _RECORDER.get() is not None


def aligned(x: Tensor) -> bool:
    """Whether `x` begins at a multiple of 16 bytes; of a graph's tensor, whether it does in its memory, which does."""
    if not is_recorded():
        return x.data_ptr() % 16 == 0
    offset = x.storage_offset()
    return isinstance(offset, int) and offset * x.element_size() % 16 == 0
