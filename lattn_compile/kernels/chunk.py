"""`lattn::chunk` in Triton: the forward of `kernels.reference.chunk`, for CUDA; the backward is the reference's.

Not in `ops/dispatch.py` yet: why some shapes go wrong on Hopper (below) is not understood, and until it is, the ops
keep the reference. `make gpu-test` does not run it; `python -m pytest tests/gpu/test_chunk_kernel.py` does.

Nothing of the forward waits for lengths; grids follow from shapes. It is three launches:

    place                          which program handles which tokens                  chunk_blocks.py
    prepare_head / prepare_channel what blocks need besides the state, in parallel     chunk_prepare.py
    advance                        the state from block to block, and the outputs      chunk_forward.py

Triton 3.6 miscompiles some shapes of these kernels for Hopper: products of 16 or 32 columns in `prepare_head` give NaN
or an illegal access, and eight warps do so or hang. `supports` lets through what was compared with float64 on an H200.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
from torch import Tensor

from lattn_compile.formats import Nvfp4, TiledFormat
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.chunk_blocks import cut, schedule
from lattn_compile.kernels.chunk_forward import advance
from lattn_compile.kernels.chunk_prepare import prepare_channel, prepare_head
from lattn_compile.kernels.reference.chunk import backward

__all__ = ["backward", "forward", "supports"]

_MIN_DIM, _MAX_DIM = 33, 128


def supports(
    *,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    quantize: Quantizer | None,
    by_channel: bool,
    inputs: torch.dtype,
) -> str | None:
    """Why these kernels cannot compute such a call, in words, or None if they can.

    Args:
        dtype: of the arithmetic.
        by_channel: the decay is per key channel. inputs: dtype of q, k and v.
    """
    if device.type != "cuda" and not _interpreted():
        return f"Triton kernels run on GPUs, not on {device.type}"
    if dtype is not torch.float32:
        return f"Triton kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
    if _interpreted():
        return None
    if inputs not in (torch.bfloat16, torch.float32):
        return f"unproven: inputs in {str(inputs).removeprefix('torch.')}; bfloat16 and float32 are"
    if not by_channel and (key_dim, value_dim) != (128, 128):
        return f"unproven: K = {key_dim}, V = {value_dim}; without a decay by channel, only 128 and 128 are"
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not _MIN_DIM <= size <= _MAX_DIM:
            return f"{name} = {size} is not from {_MIN_DIM} to {_MAX_DIM}"
    if quantize is not None:
        return "unproven: rounding of the state in the Triton chunk kernel"
    return None


def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return not isinstance(advance, triton.JITFunction)


class _Call:
    """What the kernels of one call share: its sizes, its inputs made ready, and compile-time options."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        starts: Tensor,
        lengths: Tensor,
        offsets: Tensor | None,
        *,
        rule: str,
        scale: float,
        qk_l2norm: bool,
        chunk_size: int,
        quantize: Quantizer | None,
        readout: str,
    ) -> None:
        self.tokens, self.key_heads, key_dim = q.shape
        self.value_heads, value_dim = v.shape[1:]
        self.sequences, self.scale = starts.shape[0], scale
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
        grid = chunk_size if quantize is not None else None
        self.offsets = None if grid is None or offsets is None else offsets.contiguous()
        self.decay = 0 if g is None else g.dim() - 1
        self.delta = rule == "delta"
        self.low = all(x.dtype is torch.bfloat16 for x in (q, k, v))
        self.keys = max(16, triton.next_power_of_2(key_dim))
        self.cut = cut(self.tokens, grid)
        self.schedule = schedule(self.lengths, self.offsets, self.tokens, self.cut)
        self.common: dict[str, Any] = {
            "BT": self.cut.size,
            "DELTA": self.delta,
            "GRID": self.offsets is not None,
            "LOW": self.low,
            "PRECISION": PRECISION,
            "K": key_dim,
            "BK": self.keys,
            "NORM": qk_l2norm,
            **self.cut.constants(),
        }
        self.write = _write(quantize, key_dim, value_dim, self.keys)
        self.write["AFTER"] = readout == "after_write" and bool(self.write["FORMAT"])
        self.columns, self.warps, self.stages = _shape(self.keys, value_dim, self.low, self.write)
        self._prepare()

    def _prepare(self) -> None:
        size, blocks, heads, value_dim = self.cut.size, self.schedule.blocks, self.value_heads, self.v.shape[2]
        parts, dtype = (2, torch.bfloat16) if self.low else (1, torch.float32)
        new = self.q.new_empty
        width = triton.cdiv(value_dim, self.columns) * self.columns
        self.operands = new(blocks, heads, 3, parts, size, self.keys, dtype=dtype)
        self.updates = new(blocks, heads, size, width, dtype=torch.float32)
        self.outputs = new(blocks, heads, size, width, dtype=torch.float32)
        self.whole = new(blocks, heads, self.keys, dtype=torch.float32)
        system: Tensor | None = None
        if self.delta:
            system = new(blocks, heads, size, size, dtype=torch.float32 if self.low else torch.float64)
        sequences = (self.starts, self.lengths, self.offsets, self.schedule.owner, self.schedule.index)
        results = (system, self.operands, self.updates, self.outputs, self.whole, None, None)
        strides = (*self.q.stride(), *self.k.stride(), *self.v.stride())
        self.common |= {"VP": width, "V": value_dim}
        own = {
            "BETA": self.beta is not None,
            "KEEP": False,
            **_prepare_shape(self.keys, width, self.low, self.decay == 2),
        }
        if self.decay == 2 and self.g is not None:
            prepare_channel[(blocks * heads,)](
                self.q, self.k, self.v, self.g, self.beta, *sequences, *results, self.scale, 0, *strides,
                *self.g.stride(), *_strides(self.beta), self.key_heads, heads,
                **own, **self.common, num_stages=1,
            )  # fmt: skip
            return
        prepare_head[(blocks * heads,)](
            self.q, self.k, self.v, self.g, self.beta, *sequences, *results, self.scale, 0, *strides,
            *_strides(self.g), *_strides(self.beta), self.key_heads, heads,
            DECAY=self.decay, **own, **self.common, num_stages=1,
        )  # fmt: skip

    def advance(self, source: Tensor, final: Tensor, *, o: Tensor | None = None, states: Tensor | None = None) -> None:
        programs = self.common["VP"] // self.columns * self.value_heads * self.sequences
        advance[(programs,)](
            self.q, self.operands, self.updates, self.outputs, self.whole, source, self.starts, self.lengths,
            self.offsets, self.schedule.first, self.schedule.count, o, final, states, self.scale, 0, *self.q.stride(),
            *((0, 0, 0) if o is None else o.stride()), self.key_heads, self.value_heads,
            BV=self.columns, **self.common, **self.write, READ=o is not None, KEEP=states is not None,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip


PRECISION = "ieee"
"""Of fp32 inputs. "tf32x3" puts the state over semantics §8 for one repeated key with beta = 1.9 and g = -0.01."""


def _write(quantize: Quantizer | None, key_dim: int, value_dim: int, keys: int) -> dict[str, Any]:
    """The rounding at grid lines as compile-time constants; tiles in powers of two."""
    if quantize is None or quantize.fmt.name == "fp32":
        return {"FORMAT": "", "BLOCK_K": 1, "BLOCK_V": 1}
    fmt = quantize.fmt
    if isinstance(fmt, Nvfp4) or not isinstance(fmt, TiledFormat):
        return {"FORMAT": fmt.name, "BLOCK_K": 1, "BLOCK_V": 64 if isinstance(fmt, Nvfp4) else 1}
    block_k = keys if fmt.block_k is None or fmt.block_k >= key_dim else fmt.block_k
    block_v = value_dim if fmt.block_v is None else min(fmt.block_v, value_dim)
    return {"FORMAT": fmt.name, "BLOCK_K": block_k, "BLOCK_V": triton.next_power_of_2(block_v)}


def _shape(keys: int, value_dim: int, low: bool, write: dict[str, Any]) -> tuple[int, int, int]:
    """Value columns of a program of `advance`, its warps and its pipeline's stages."""
    columns = max(16, min(32, triton.next_power_of_2(value_dim)))
    columns = max(columns, write["BLOCK_V"])
    return columns, 4, 2 if low and keys <= 128 else 1


def _prepare_shape(keys: int, width: int, low: bool, by_channel: bool) -> dict[str, int]:
    """Channels at a time and warps of the prepare kernels; other choices are miscompiled, see above."""
    return {"BS": min(keys, width, 64 if low and not by_channel else 32), "num_warps": 4}


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    o: Tensor,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
) -> Tensor:
    """As `kernels.reference.chunk.forward`, where `supports` has no objection."""
    final = torch.empty_like(state, memory_format=torch.contiguous_format)
    if state.numel() == 0 or q.shape[0] == 0:
        return final.copy_(state)
    with _on(q.device):
        call = _Call(
            q, k, v, g, beta, starts, lengths, offsets, rule=rule, scale=scale, qk_l2norm=qk_l2norm,
            chunk_size=chunk_size, quantize=quantize, readout=readout,
        )  # fmt: skip
        call.advance(state.contiguous(), final, o=o)
    return final


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Of tokens and heads."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
