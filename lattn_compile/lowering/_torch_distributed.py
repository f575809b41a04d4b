"""What torch.distributed does not offer in public: an op that is computed on local tensors by a rule of its own, the
store of the default process group, the end of NCCL's collectives, an all-gather with a gradient. Private interfaces of
torch, tested on torch 2.11 and 2.13.

`torch.distributed.tensor.experimental.register_sharding` would be the
public way; four things of the ops here do not fit it. An op whose name ends in "_" returns its first argument there,
and `lattn::decode_` returns outputs. Its cache keys ints and no strings, so that a call under another format would get
the shapes of the first. What a rule raises comes out as a RuntimeError. And one saved output (`checkpoints`) has no
global shape. torch itself sends its convolutions through the table that is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "Gloo",
    "abort_nccl",
    "begins_at",
    "compute_by",
    "default_store",
    "gathered",
    "gloo_of",
    "local_of",
    "uses_nccl",
]


Gloo = Any
"""A `dist.ProcessGroupGloo`; torch does not declare its methods."""


def compute_by(op: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Call `rule(op, args, kwargs)` where a DTensor is among the arguments of `op`; below autograd."""
    DTensor._op_dispatcher._custom_op_handlers[op] = rule


def local_of(x: DTensor) -> Tensor:
    """This rank's tensor itself: what is written to it is written to the DTensor. (`to_local` may return a view.)"""
    return x._local_tensor


def begins_at(x: DTensor) -> tuple[int, ...]:
    """Where this rank's tensor begins in the whole one, an index for each axis."""
    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])


def default_store() -> dist.Store:
    """Where the ranks of the default process group found each other: a word left there is read without a collective."""
    return dist.distributed_c10d._get_default_store()


def gloo_of(ranks: Sequence[int], name: str, timeout: timedelta) -> Gloo:
    """A group of gloo among those ranks, which all have to call it, found under `name` and known to no one else.

    `dist.new_group(use_local_synchronization=True)` would be the public way. It names a group after the number of
    groups that a rank is in: ranks that are in unlike many (of a device mesh, say) wait for one another under different
    names, for half an hour.
    """
    store = dist.PrefixStore(f"{name}/{'_'.join(map(str, ranks))}/", default_store())
    return dist.ProcessGroupGloo(store, list(ranks).index(dist.get_rank()), len(ranks), timeout)


def uses_nccl() -> bool:
    """Whether the default process group, or any other of this process, has NCCL."""
    return bool(_nccl())


def _nccl() -> list[Any]:
    if not dist.is_nccl_available():
        return []
    found = []
    for group in dist.distributed_c10d._world.pg_map:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # of CPUs only
            continue
        if isinstance(backend, dist.ProcessGroupNCCL):
            found.append(backend)
    return found


def abort_nccl() -> None:
    """Ends NCCL's collectives in this process, of all groups: who waits for one goes on, and the next one fails.
    (`dist.distributed_c10d._abort_process_group` does the same and forgets the groups.)"""
    backends = _nccl()
    if backends:
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` of every rank, `[ranks, *x.shape]`. Its gradient is summed over ranks: every rank has to run its backward.
    (`torch.distributed._functional_collectives.all_gather_tensor_autograd`)"""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd

    every = all_gather_tensor_autograd(x.contiguous()[None], 0, group)
    if isinstance(every, AsyncCollectiveTensor):
        every.wait()  # a rank that needs none of it would never
    return every
