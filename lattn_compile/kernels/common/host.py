"""What the host sides of all kernels share: limits that none of them goes beyond, and where a launch goes."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton

from lattn_compile.formats import TiledFormat
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.launch import is_recorded

__all__ = ["interpreted", "on", "refused", "refused_rounding"]

_MAX_DIM = 256


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return not isinstance(exp, triton.JITFunction)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; a graph has its own."""
    if device.type != "cuda" or is_recorded():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def refused(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why no kernel here computes on the device, in the dtype and with heads `[K, V]`, in words, or None."""
    if device.type != "cuda" and not interpreted():
        return f"Triton kernels run on GPUs, not on {device.type}"
    if dtype is not torch.float32:
        return f"Triton kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
    for name, size in (("K", key_dim), ("V", value_dim)):
        if size > _MAX_DIM:
            return f"{name} = {size} exceeds {_MAX_DIM}"
    return None


def refused_rounding(kernel: str, quantize: Quantizer, key_dim: int, value_dim: int) -> str | None:
    """Why the kernel (its name, as users know it) does not write states so, in words, or None."""
    if not quantize.idempotent:
        return f"the Triton {kernel} kernel rounds to nearest, without feedback or rotation, not {quantize}"
    fmt = quantize.fmt
    if isinstance(fmt, TiledFormat):
        for name, block, size in (("block_k", fmt.block_k, key_dim), ("block_v", fmt.block_v, value_dim)):
            if block is not None and block < size and block & (block - 1):
                return f"{name} = {block} is not a power of two"
    return None
