"""A short causal convolution over whole sequences, each channel by itself: outputs, gradients of inputs and weights.

Tokens lie behind each other and channels are neighbours, as projections leave them and as the kernels of a recurrence
read them; a library's convolution wants it the other way round. A program takes a tile of tokens and channels and reads
it once a tap, all but the first time out of a cache.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.launch import launched

__all__ = ["SOURCES", "convolve_sequence", "forward", "grad_input", "grad_weight", "in_rows", "widest"]

SOURCES = 3
"""Tensors at most that inputs lie in, one behind the other."""

_TOKENS, _CHANNELS = 32, 128
_STRETCH = 512
"""Outputs whose products one program sums up for the gradient of the weights."""


@triton.jit
def _place(channel, RUN: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Where runs of neighbours, a group apart (0: there is one), have this channel, a multiple of WIDTH as both are."""
    if GROUP:
        return tl.multiple_of(channel // RUN * GROUP + channel % RUN, WIDTH)
    else:
        return channel


@triton.jit
def convolve_sequence(
    a,
    b,
    c,
    weight,
    bias,
    out,
    a_token,
    b_token,
    c_token,
    tokens,
    outputs,
    padding,
    CHANNELS: tl.constexpr,
    A_END: tl.constexpr,
    B_END: tl.constexpr,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    C_GROUP: tl.constexpr,
    A_RUN: tl.constexpr,
    B_RUN: tl.constexpr,
    C_RUN: tl.constexpr,
    TAPS: tl.constexpr,
    BACKWARD: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`out[n, t, c] = bias[c] + sum over taps j of weight[c, j] * x[n, t + j - padding, c]`, zeros outside of x.

    Args:
        a, b, c: x of channels up to A_END, up to B_END, and of the others, `tokens` rows a sequence: runs of
            neighbours, a group apart. b and c may be None. BLOCK_C divides groups, and ends and runs but CHANNELS.
        weight: `[CHANNELS, TAPS]`, contiguous. bias: `[CHANNELS]` or None. out: `[N, outputs, CHANNELS]`, contiguous.
        BACKWARD: taps are taken from the last to the first. SILU: of the output, rounded to its type before.

    Grid: (ceil(outputs / BLOCK_T) * ceil(CHANNELS / BLOCK_C), N).
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    i_c, i_t = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    i_seq = tl.program_id(1).to(tl.int64)
    first = i_c * BLOCK_C
    lane = tl.arange(0, BLOCK_C)
    channel = first + lane
    inside = channel < CHANNELS
    row = i_t * BLOCK_T + tl.arange(0, BLOCK_T)

    p_x, token = a + _place(first, A_RUN, A_GROUP, BLOCK_C), a_token
    if b is not None:
        at = first - A_END
        p_x = tl.where(at >= 0, b + _place(at, B_RUN, B_GROUP, BLOCK_C), p_x)
        token = tl.where(at >= 0, b_token, token)
    if c is not None:
        at = first - B_END
        p_x = tl.where(at >= 0, c + _place(at, C_RUN, C_GROUP, BLOCK_C), p_x)
        token = tl.where(at >= 0, c_token, token)
    p_x += i_seq * tokens * token - padding * token
    p_row = p_x + row.to(tl.int64)[:, None] * token + lane[None, :]

    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        p_weight = weight + channel * TAPS + (TAPS - 1 - tap if BACKWARD else tap)
        w = tl.load(p_weight, mask=inside, other=0.0).to(tl.float32)
        at_row = row + (tap - padding)
        mask = ((at_row >= 0) & (at_row < tokens))[:, None] & inside[None, :]
        x = tl.load(p_row + tap * token, mask=mask, other=0.0)
        total += x.to(tl.float32) * w[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))  # of a number of 16 bits, mostly, and rounded to one
    p_out = out + (i_seq * outputs + row)[:, None] * CHANNELS + channel[None, :]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=(row < outputs)[:, None] & inside[None, :])


@triton.jit
def _weights(
    x,
    grad,
    sums,
    x_token,
    grad_token,
    tokens,
    outputs,
    padding,
    stretches,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`sums[n, s, j, c]`: over the outputs t of stretch s, `grad[n, t, c] * x[n, t + j - padding, c]`.

    Args:
        x, grad: `[N, tokens, CHANNELS]` and `[N, outputs, CHANNELS]`, rows as far apart as said, channels neighbours.
        sums: fp32 `[N, stretches, TAPS, CHANNELS]`, contiguous.

    Grid: (stretches * ceil(CHANNELS / BLOCK_C), N).
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    i_c, i_stretch = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    i_seq = tl.program_id(1).to(tl.int64)
    channel = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channel < CHANNELS)[None, :]
    p_sums = sums + (i_seq * stretches + i_stretch) * (TAPS * CHANNELS) + channel
    for tap in tl.static_range(TAPS):
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for i in range(STRETCH // BLOCK_T):
            row = i_stretch * STRETCH + i * BLOCK_T + tl.arange(0, BLOCK_T)
            at_row = row + (tap - padding)
            is_output = (row < outputs)[:, None] & inside
            is_input = ((at_row >= 0) & (at_row < tokens))[:, None] & inside
            p_grad = grad + (i_seq * outputs + row)[:, None] * grad_token + channel[None, :]
            p_x = x + (i_seq * tokens + at_row)[:, None] * x_token + channel[None, :]
            b_grad = tl.load(p_grad, mask=is_output, other=0.0).to(tl.float32)
            total += b_grad * tl.load(p_x, mask=is_input, other=0.0).to(tl.float32)
        tl.store(p_sums + tap * CHANNELS, tl.sum(total, 0), mask=channel < CHANNELS)


def widest(*sizes: int) -> int:
    """Channels of a tile that sources of these ends, runs and groups can have: the largest power of two in all."""
    width = _CHANNELS
    while any(x % width for x in sizes):
        width //= 2
    return width


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, outputs: int | None = None) -> Tensor:
    """`[N, T + 2 * padding - taps + 1, C]`, contiguous, or that many outputs from the first on, of x `[N, T, C]` and
    weight `[C, taps]`, contiguous; in x's type, summed in fp32."""
    outputs = x.shape[1] + 2 * padding - weight.shape[1] + 1 if outputs is None else outputs
    return _convolved(x, weight, bias, padding, outputs, backward=False)


def grad_input(grad: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Of `forward`'s x, from grad `[N, outputs, C]`: `[N, T, C]`, contiguous."""
    taps = weight.shape[1]
    tokens = grad.shape[1] - 2 * padding + taps - 1
    # Tap j of output t read x[t + j - padding].
    return _convolved(grad, weight, None, taps - 1 - padding, tokens, backward=True)


def grad_weight(x: Tensor, grad: Tensor, taps: int, padding: int) -> Tensor:
    """`[C, taps]`, fp32, of `forward`'s x `[N, T, C]` and grad `[N, outputs, C]`."""
    x, grad = in_rows(x), in_rows(grad)
    sequences, outputs, channels = grad.shape
    stretches = triton.cdiv(outputs, _STRETCH)
    sums = x.new_empty((sequences, stretches, taps, channels), dtype=torch.float32)
    blocks = triton.cdiv(channels, _CHANNELS)
    launched(_weights)[(stretches * blocks, sequences)](
        x, grad, sums, x.stride(1), grad.stride(1), x.shape[1], outputs, padding, stretches,
        CHANNELS=channels, TAPS=taps, STRETCH=_STRETCH, BLOCK_T=_TOKENS, BLOCK_C=_CHANNELS, num_warps=8, num_stages=3,
    )  # fmt: skip
    return sums.sum((0, 1)).T


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, outputs: int, *, backward: bool) -> Tensor:
    x = in_rows(x)
    sequences, tokens, channels = x.shape
    out = x.new_empty((sequences, outputs, channels))
    grid = (triton.cdiv(outputs, _TOKENS) * triton.cdiv(channels, _CHANNELS), sequences)
    launched(convolve_sequence)[grid](
        x, None, None, weight, bias, out, x.stride(1), 0, 0, tokens, outputs, padding,
        CHANNELS=channels, A_END=channels, B_END=channels, A_GROUP=0, B_GROUP=0, C_GROUP=0, A_RUN=channels, B_RUN=1,
        C_RUN=1, TAPS=weight.shape[1], BACKWARD=backward, SILU=False, BLOCK_T=_TOKENS, BLOCK_C=_CHANNELS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def in_rows(x: Tensor) -> Tensor:
    """x `[N, T, C]` with channels as neighbours and all rows equally far apart."""
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()
