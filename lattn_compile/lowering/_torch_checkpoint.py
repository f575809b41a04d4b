"""What `torch.utils.checkpoint` does not offer: that a recompute finds the ambient state of its forward.

Private interfaces of torch, tested on torch 2.11 to 2.13, apart from `_torch_private` because that one imports Dynamo
and this one serves eager training too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

__all__ = ["recompute_under"]


def recompute_under(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Pass every function that a checkpoint keeps for its recompute through `bind`, when its forward begins.

    (`checkpoint.CheckpointFunction.forward` keeps it with use_reentrant=True, `checkpoint._CheckpointFrame` without.)
    """
    reentrant, frame = checkpoint.CheckpointFunction.forward, checkpoint._CheckpointFrame.__init__

    @functools.wraps(reentrant)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, bind(run_function), *args)

    @functools.wraps(frame)
    def init(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        frame(self, bind(recompute_fn), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    checkpoint._CheckpointFrame.__init__ = init  # type: ignore[method-assign]
