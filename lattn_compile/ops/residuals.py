"""How well an approximate inverse solved its chunks: counters of each site, kept where the tokens are.

`‖(I + A) T − I‖` is measured for every chunk and head that is computed, those that a backward computes again included.
Counting it waits for no device. On a CPU the first excess of a site is also a warning; elsewhere it is one when the
counters are read.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import LattnWarning
from lattn_compile.ops import dispatch

__all__ = ["Measured", "inverse_residuals", "record", "reset_inverse_residuals"]


class Measured(NamedTuple):
    """One site's approximate inverse so far.

    Attributes:
        site_id: the op's, in a compiled graph the number of the site in its report.
        inverse: as the op says it, `neumann(7)`. max_residual: the policy's.
        chunks: how many were measured, one for each head. over: how many exceeded `max_residual` or were NaN.
        largest: residual, NaN if any was.
    """

    site_id: int
    inverse: str
    max_residual: float
    chunks: int
    over: int
    largest: float


class _Counter:
    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # a later call may be outside of it, and writes to these in place
            self.counts = torch.zeros(2, dtype=torch.int64, device=device)
            self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self.warned = False

    def add(self, norms: Tensor, max_residual: float) -> None:
        if norms.dtype is torch.float32 and norms.is_cuda:  # as Triton's kernels have them
            dispatch.count_residuals(norms.contiguous(), _below(max_residual), self.counts, self.largest)
            return
        norms = norms.double()
        over = (norms <= max_residual).logical_not().sum()  # a NaN is over
        self.counts += torch.stack(((norms < 0).logical_not().sum(), over))
        self.largest.copy_(torch.maximum(self.largest, norms.max()))


def _below(x: float) -> float:
    """The largest number of float32 that is at most `x`: what is at most the one is at most the other."""
    found = torch.tensor(x, dtype=torch.float32)
    return float(found if float(found) <= x else torch.nextafter(found, torch.tensor(-math.inf)))


_Key = tuple[int, str, float, torch.device]
_counters: dict[_Key, _Counter] = {}
_lock = threading.Lock()


def record(site_id: int, inverse: str, max_residual: float, norms: Tensor) -> None:
    """Count the residuals `norms`, of any shape, of one call; negative ones stand where there was no chunk."""
    key = (site_id, inverse, max_residual, norms.device)
    with _lock:
        counter = _counters.get(key)
        if counter is None:
            counter = _counters[key] = _Counter(norms.device)
        counter.add(norms, max_residual)
    if norms.device.type == "cpu" and not counter.warned:
        _warn(_read(key, counter), counter)


def inverse_residuals() -> list[Measured]:
    """All counters, by site; waits for the devices that they are on."""
    with _lock:
        counters = sorted(_counters.items(), key=lambda item: (*item[0][:3], str(item[0][3])))
    found = []
    for key, counter in counters:
        found.append(measured := _read(key, counter))
        if not counter.warned:
            _warn(measured, counter)
    return found


def reset_inverse_residuals() -> None:
    """Forget all counters, and that a site was warned about."""
    with _lock:
        _counters.clear()


def _read(key: _Key, counter: _Counter) -> Measured:
    chunks, over = counter.counts.tolist()
    return Measured(*key[:3], chunks, over, float(counter.largest))


def _warn(found: Measured, counter: _Counter) -> None:
    if not found.over:
        return
    counter.warned = True
    warnings.warn(
        f"prefill of site {found.site_id}: {found.inverse} left ‖(I + A) T − I‖ = {found.largest:.3g} in the worst of "
        f"{found.chunks} chunks and heads, {found.over} of them over max_residual = {found.max_residual:g}. Take more "
        "terms, another inverse, or 'exact': docs/prefill.md shows where each holds. "
        "lattn_compile.ops.residuals.inverse_residuals() goes on counting.",
        LattnWarning,
        stacklevel=2,
    )
