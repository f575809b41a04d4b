"""Which calls of `lattn::replay_` go to `packed_lines.py`, and how they are launched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import packed_lines
from lattn_compile.kernels.common.launch import aligned
from lattn_compile.kernels.decode_call import tile_of

__all__ = ["STATES", "constants_of", "fits", "heads_of", "step"]

STATES = 1024
"""From how many states of a pool on, a head and slot each, these kernels step it: of few the others are faster. By the
pool and not by the call, so that a sequence has the same bits in any batch."""

_SIZE = 128
_MANY, _SOME = 4096, 1024
"""From how many states of a call on a warp has a whole head, or half of one."""

step = packed_lines.step


def fits(
    quantize: Quantizer | None,
    *,
    slots: int,
    heads: tuple[int, int, int, int],
    decay: int,
    window: int,
    anchor: str | None,
    after: bool,
) -> bool:
    """Whether these kernels step such a pool: from sizes and formats alone, so that bits follow from these.

    Args:
        slots: of the pool. heads: H, HV, K, V. decay: 0 none, 1 by head, 2 by channel. anchor: of two_precision, else
            None. after: outputs are read after the rounding.
    """
    H, HV, K, V = heads
    if quantize is None or (K, V) != (_SIZE, _SIZE) or slots * HV < STATES:
        return False
    formats, tile = (("int8", "fp8_e4m3"), (_SIZE, 64)) if anchor is None else (("fp8_e4m3",), (_SIZE, 1))
    return (
        quantize.fmt.name in formats
        and tile_of(K, V, quantize) == tile
        and anchor in (None, "fp32")
        and HV % 2 == 0
        and HV // H in (1, 2, 4, 8)
        and decay < 2
        and window <= 16
        and not after
    )


def heads_of(states: int, key_heads: int, value_heads: int, *, single: bool) -> int:
    """Of a program: a head for each of eight warps, or for two or four of them. Several tokens: all of a key head."""
    own = 8 if states >= _MANY else 4 if states >= _SOME else 2
    while value_heads % own:
        own //= 2
    return own if single else max(own, value_heads // key_heads)


def constants_of(codes: Tensor, quantize: Quantizer, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the kernel and options of its launch. codes: of what is read. dtype: of q and k."""
    return {
        "FORMAT": quantize.fmt.name,
        "PARTS": 1 if dtype.itemsize == 2 else 3,
        "TURNED": not codes.is_contiguous(),
        "ODD": not aligned(codes),
        "num_warps": 8,
        "maxnreg": 128,  # two programs on a multiprocessor
        "enable_fp_fusion": False,
    }
