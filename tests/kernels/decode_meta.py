"""`lattn::decode` and its backward on tensors without storage: what memory they hold, and that they read no value.

The ops run as they are, on meta tensors, with the Triton kernels chosen and their launches left out. A meta tensor has
no values, so that whatever a device would have to be waited for raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lattn_compile.ops import decode as op
from lattn_compile.ops import dispatch

__all__ = ["training_bytes", "without_launches"]


class _Alive(TorchDispatchMode):
    """`peak`: the most bytes of new storages that were alive at once, looked at after every torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._known = {key: (ref, size) for key, (ref, size) in self._known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return out


@contextmanager
def without_launches() -> Iterator[None]:
    """The Triton kernels serve every device, and nothing is launched."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dispatch, "choose", lambda form, implementation, work: "triton"))
        stack.enter_context(mock.patch.object(triton.JITFunction, "run", lambda self, *args, **kwargs: None))
        # Meta tensors have no autocast.
        stack.enter_context(mock.patch.object(op, "no_autocast", lambda device: nullcontext()))
        yield


def training_bytes(
    tensors: list[Tensor | None], lengths: tuple[Tensor | None, ...] = (None,) * 4, **options: Any
) -> tuple[int, int]:
    """Bytes beside the arguments and outputs of a forward, and beside those and the gradients of its backward.

    Args:
        tensors: q, k, v, g, beta, initial_state. lengths: cu_seqlens, prefix and sequence lengths, cursor.
        options: of the op. Checkpoints and final state count as beside.
    """
    with without_launches():
        with _Alive() as forward:
            o, _, checkpoints = op.run(*tensors, *lengths, **options)
        grad_o = torch.empty_like(o)
        with _Alive() as backward:
            grads = op.run_backward(grad_o, None, *tensors, *lengths, None, None, checkpoints, **options)
    made = sum(x.nbytes for x in grads)
    return forward.peak - o.nbytes, backward.peak - made + checkpoints.nbytes
