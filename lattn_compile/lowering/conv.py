"""The short causal convolution in front of a decode step on a CPU, in ATen.

A linear-attention layer convolves each channel with its last three or four inputs. For a handful of outputs the
convolution of the math library costs more than the recurrence behind it, and nothing fuses with it; as products and
sums it disappears into the loops around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MOST_OUTPUTS", "short_convolution"]

MOST_OUTPUTS = 16
"""Positions computed at most: beyond, the library's convolution reads each input once and we would as often as there
are taps."""


def short_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    """Decomposition of `aten.convolution`: one channel a group over `[B, C, L]`, few outputs; NotImplemented else.

    Sums in float32 where the inputs are narrower, as the library does; taps from the oldest to the newest.
    """
    depthwise = input.dim() == 3 and not transposed and weight.shape[1] == 1 and weight.shape[0] == groups
    plain = tuple(stride) == (1,) and tuple(padding) == (0,) and tuple(dilation) == (1,)
    if input.device.type != "cpu" or not depthwise or not plain or not input.dtype.is_floating_point:
        return NotImplemented
    outputs, taps = input.shape[-1] - weight.shape[-1] + 1, weight.shape[-1]
    if not isinstance(outputs, int) or not isinstance(taps, int) or not 1 <= outputs <= MOST_OUTPUTS:
        return NotImplemented
    dtype = torch.promote_types(input.dtype, torch.float32)
    x, w = input.to(dtype), weight.to(dtype)
    total = x[..., :outputs] * w[:, 0, :1]
    for tap in range(1, taps):
        total = total + x[..., tap : tap + outputs] * w[:, 0, tap : tap + 1]
    if bias is not None:
        total = total + bias.to(dtype)[:, None]
    return total.to(input.dtype).contiguous()
