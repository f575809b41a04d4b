"""Time and memory of a call on the current CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

__all__ = ["by_kernel", "copy_bandwidth", "milliseconds", "peak_bytes"]


def milliseconds(call: Callable[[], object], replays: int = 9) -> float:
    """Median time of a CUDA graph of one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for i in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that one call holds at once, what it returns included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a kernel that reads and writes every number once.

    Not of `copy_`: in a graph that is a copy engine's work, a third slower on an H200 than kernels are.
    """
    x = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / (milliseconds(lambda: torch.neg(x, out=y)) / 1e3)


def by_kernel(call: Callable[[], object], most: int = 8) -> dict[str, float]:
    """Milliseconds of one call by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    found = {e.key: e.device_time_total / 1e3 for e in trace.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:most])
