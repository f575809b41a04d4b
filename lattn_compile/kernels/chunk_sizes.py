"""What a chunk-form call's kernels are compiled for besides its shapes: the device's memory, and the state's format."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from lattn_compile.formats import Nvfp4, TiledFormat
from lattn_compile.formats.quantizer import Quantizer

__all__ = ["shared_memory", "write"]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a device; off the GPU, where nothing is allocated, as many as on Hopper."""
    if device.type != "cuda":
        return 227 * 1024
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def write(quantize: Quantizer | None, key_dim: int, value_dim: int, keys: int) -> dict[str, Any]:
    """The rounding at grid lines as compile-time constants; tiles in powers of two. keys: BK."""
    if quantize is None or quantize.fmt.name == "fp32":
        return {"FORMAT": "", "BLOCK_K": 1, "BLOCK_V": 1}
    fmt = quantize.fmt
    if isinstance(fmt, Nvfp4) or not isinstance(fmt, TiledFormat):
        return {"FORMAT": fmt.name, "BLOCK_K": 1, "BLOCK_V": 64 if isinstance(fmt, Nvfp4) else 1}
    block_k = keys if fmt.block_k is None or fmt.block_k >= key_dim else fmt.block_k
    block_v = value_dim if fmt.block_v is None else min(fmt.block_v, value_dim)
    return {"FORMAT": fmt.name, "BLOCK_K": block_k, "BLOCK_V": triton.next_power_of_2(block_v)}
