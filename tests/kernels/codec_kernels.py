"""The Triton codec on whole states, which no kernel of the library does on its own; and its `exp` on vectors."""

# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.layout import FLIP
from lattn_compile.kernels.common.pieces import columns, key_channels, load_state, store_state
from lattn_compile.kernels.decode_call import layout_of, tile_of
from lattn_compile.kernels.decode_codec import from_words, quantize, to_words

__all__ = ["exponentials", "qdq", "tiles"]


@triton.jit
def _qdq(
    states,
    out,
    again,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BYTES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + WARPS * COLUMNS - 1) // (WARPS * COLUMNS)
    i = tl.program_id(0)
    at = (i // BLOCKS).to(tl.int64) * (K * V)
    channel = key_channels(LANES, PIECES * STEP, STEP, FLIP)
    column = columns(i % BLOCKS * (WARPS * COLUMNS), WARPS, COLUMNS)
    S = load_state(states + at, channel, column, K, V, VECTOR, PIECES, STEP)
    S, codes, steps = quantize(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
    store_state(out + at, S, channel, column, K, V, VECTOR, PIECES, STEP)
    if BYTES:
        IN_WORD: tl.constexpr = 8 if FORMAT == "nvfp4" else 4
        words = ()
        for word in tl.static_range((PIECES + IN_WORD - 1) // IN_WORD):
            words = words + (to_words(codes, word, FORMAT, True, PIECES),)
        B = ()
        for p in tl.static_range(PIECES):
            B = B + (from_words(words, p, FORMAT) * steps[p // (PIECES // len(steps))],)
        store_state(again + at, B, channel, column, K, V, VECTOR, PIECES, STEP)


def qdq(states: Tensor, spec: str) -> Tensor:
    """QDQ of `[n, K, V]`; where there are codes, also by way of words of them, which must give the same."""
    states = states.contiguous()
    quantizer = Quantizer(parse(spec))
    key_dim, value_dim = states.shape[1:]
    lay = layout_of(key_dim, value_dim, quantizer)
    block_k, block_v = tile_of(key_dim, value_dim, quantizer)
    if block_k >= key_dim:
        block_k = max(block_k, lay.lanes * lay.pieces * lay.step)
    if block_v >= value_dim:
        block_v = max(block_v, lay.width)
    name = quantizer.fmt.name
    whole = name in ("int8", "fp8_e4m3", "nvfp4")
    out, again = torch.full_like(states, torch.nan), torch.full_like(states, torch.nan)
    constants = lay.constants() | {"FLIP": FLIP, "FORMAT": name, "BLOCK_K": block_k, "BLOCK_V": block_v, "BYTES": whole}
    _qdq[(states.shape[0] * lay.blocks,)](states, out, again, **constants, num_warps=lay.warps)
    if whole:
        same = torch.equal(out.nan_to_num().view(torch.int32), again.nan_to_num().view(torch.int32))
        assert same and torch.equal(out.isnan(), again.isnan())
    return out


@triton.jit
def _exp(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, exp(tl.load(x + i)))


def exponentials(x: Tensor) -> Tensor:
    """`exp` of a vector."""
    size = triton.next_power_of_2(x.numel())
    padded = torch.zeros(size, device=x.device)
    padded[: x.numel()] = x
    out = torch.empty_like(padded)
    _exp[(1,)](padded, out, SIZE=size)
    return out[: x.numel()]


def tiles(key_dim: int, value_dim: int, count: int = 4, seed: int = 0) -> Tensor:
    """States `[n, K, V]` of every magnitude that the edge rules of semantics §3 name, with zeros of both signs."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [0.0, 1e-45, 1e-42, 1e-38, 1e-30, 7.8e-31, 8e-31, 1e-20, 1e-5, 1.0, 1e30, 3e38]
    states = [torch.randn(key_dim, value_dim, generator=rng) for _ in range(count)]
    for size in sizes:
        x = torch.randn(key_dim, value_dim, generator=rng)
        states.append(x / x.abs().max() * size)
    for odd in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(key_dim, value_dim, generator=rng)
        x[key_dim // 2, value_dim // 2] = odd
        states.append(x)
    # Half of a format's steps, so that ties are met.
    states.append(torch.randint(-254, 255, (key_dim, value_dim), generator=rng) / 2)
    out = torch.stack(states)
    out[:, ::5, ::3] = 0.0
    out[:, 1::5, 1::3] = -0.0
    return out
