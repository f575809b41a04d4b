"""One step of a short causal convolution: a new input a channel, its last inputs, which move on in memory, and `silu`;
and beside it the small projection that a layer's gates come from.

In front of a decode step stands a convolution over each channel's last three or four inputs. As a library's call it
wants them copied together first, and once more to be kept; here a program reads a channel's inputs, moves them on where
they lie, and writes what the model's own operations would, each cast of theirs made. The projection to a few numbers a
head is far less than a matrix product of a library takes to begin; programs of the same launch compute it.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.early import wait_for_before
from lattn_compile.kernels.common.inputs import exp
from lattn_compile.kernels.common.launch import aligned, launched
from lattn_compile.kernels.decode_step import sigmoid, softplus

__all__ = ["SOURCES", "Gates", "convolve", "forward"]

SOURCES = 3
"""Tensors at most that the new inputs lie in, one behind the other."""


class Gates(NamedTuple):
    """What a projection to two numbers a head is made into.

    Attributes:
        log_rate, bias: `[HV]`. strength: dtype of beta.
        beta, g: where a head's rows of the projection are: first, from group to group, from head to head in a group,
            and heads of a group.
    """

    log_rate: Tensor
    bias: Tensor
    strength: torch.dtype
    beta: tuple[int, int, int, int]
    g: tuple[int, int, int, int]


_BLOCK = 256
_ROWS = 4
"""Of the projection, in one program."""

_INPUTS = 2048
"""Of the projection at once: all on their way together."""


@triton.jit
def _load(x, i_seq, c, token, group, RUN: tl.constexpr, mask):
    return tl.load(x + (i_seq * token + c // RUN * group + c % RUN), mask=mask, other=0.0)


@triton.jit
def _number(words, I: tl.constexpr, dtype: tl.constexpr):
    """Number I of the four of 16 bits in each word."""
    return ((words >> (16 * I)) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def convolve(
    a,
    b,
    c,
    past,
    weight,
    bias,
    out,
    x,
    matrix,
    projected,
    g,
    beta,
    log_rate,
    rate_bias,
    a_token,
    a_group,
    b_token,
    b_group,
    c_token,
    c_group,
    CHANNELS: tl.constexpr,
    A_END: tl.constexpr,
    B_END: tl.constexpr,
    A_RUN: tl.constexpr,
    B_RUN: tl.constexpr,
    C_RUN: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    GATES: tl.constexpr,
    BETA_AT: tl.constexpr,
    BETA_GROUP: tl.constexpr,
    BETA_STEP: tl.constexpr,
    BETA_RUN: tl.constexpr,
    G_AT: tl.constexpr,
    G_GROUP: tl.constexpr,
    G_STEP: tl.constexpr,
    G_RUN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The newest output of every channel, and `past` moved on by one.

    Args:
        a, b, c: new inputs of channels up to A_END, up to B_END, and of the others: runs of neighbours, a group apart.
            b and c may be None.
        past: `[N, CHANNELS, KEPT]`, contiguous, oldest first; written. TAPS - 1 <= KEPT.
        weight: `[CHANNELS, TAPS]`, contiguous. bias: `[CHANNELS]` or None. out: `[N, CHANNELS]`, contiguous.
        WIDTH: a power of two, at least KEPT.
        WORDS: KEPT and TAPS are 4 and numbers of 16 bits: a channel's are one aligned word of 64.
        x: `[N, INPUTS]`, matrix: `[ROWS, INPUTS]`, projected: `[N, ROWS]`, contiguous, `matrix @ x`; ROWS 0: none.
        GATES: of ROWS / 2 heads, which the projection is made into instead: beta `[N, heads]`, the sigmoid of rows
            BETA_AT + head // BETA_RUN * BETA_GROUP + head % BETA_RUN * BETA_STEP, and g `[N, heads]`, fp32,
            `-exp(log_rate) * softplus(row + rate_bias)` of the others; log_rate, rate_bias: `[heads]`. Else all None.
        EARLY: launched while the kernel before may still run.

    Grid: (ceil(ROWS / ROW_BLOCK) + ceil(CHANNELS / BLOCK), N).
    """
    if EARLY:
        wait_for_before()
    i_seq = tl.program_id(1).to(tl.int64)
    PROJECTING: tl.constexpr = (ROWS + ROW_BLOCK - 1) // ROW_BLOCK
    i_block = tl.program_id(0) - PROJECTING
    if ROWS:
        if i_block < 0:
            number = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
            HEADS: tl.constexpr = ROWS // 2
            head = number % HEADS
            row = number
            if GATES:
                of_beta = BETA_AT + head // BETA_RUN * BETA_GROUP + head % BETA_RUN * BETA_STEP
                row = tl.where(number < HEADS, of_beta, G_AT + head // G_RUN * G_GROUP + head % G_RUN * G_STEP)
            column = tl.arange(0, INPUT_BLOCK)
            total = tl.zeros([ROW_BLOCK], tl.float32)
            for first in range(0, INPUTS, INPUT_BLOCK):
                mine = first + column < INPUTS
                b_x = tl.load(x + i_seq * INPUTS + first + column, mask=mine, other=0.0).to(tl.float32)
                p_matrix = matrix + row[:, None] * INPUTS + (first + column)[None, :]
                b_matrix = tl.load(p_matrix, mask=(number < ROWS)[:, None] & mine[None, :], other=0.0).to(tl.float32)
                total += tl.sum(b_matrix * b_x[None, :], 1)
            value = total.to(x.dtype.element_ty)
            if GATES:
                wide = value.to(tl.float32)
                strength = sigmoid(wide).to(value.dtype).to(beta.dtype.element_ty)
                tl.store(beta + i_seq * HEADS + head, strength, mask=number < HEADS)
                decays = (number >= HEADS) & (number < ROWS)
                rate = exp(tl.load(log_rate + head, mask=decays, other=0.0).to(tl.float32))
                wide += tl.load(rate_bias + head, mask=decays, other=0.0).to(tl.float32)
                tl.store(g + i_seq * HEADS + head, -rate * softplus(wide), mask=decays)
            else:
                tl.store(projected + i_seq * ROWS + number, value, mask=number < ROWS)
            return
    channel = i_block * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    new = _load(a, i_seq, channel, a_token, a_group, A_RUN, channel < A_END)
    if b is not None:
        at = channel - A_END
        new += _load(b, i_seq, at, b_token, b_group, B_RUN, (at >= 0) & (channel < B_END))
    if c is not None:
        at = channel - B_END
        new += _load(c, i_seq, at, c_token, c_group, C_RUN, (at >= 0) & inside)
    if WORDS:
        dtype: tl.constexpr = past.dtype.element_ty
        word: tl.constexpr = tl.pointer_type(tl.int64)
        p_word = past.to(word, bitcast=True) + i_seq * CHANNELS + channel
        kept = tl.load(p_word, mask=inside, other=0)
        w = tl.load(weight.to(word, bitcast=True) + channel, mask=inside, other=0)
        y = _number(kept, 1, dtype) * _number(w, 0, dtype)
        y += _number(kept, 2, dtype) * _number(w, 1, dtype)
        y += _number(kept, 3, dtype) * _number(w, 2, dtype)
        y += new.to(tl.float32) * _number(w, 3, dtype)
        newest = new.to(tl.int16, bitcast=True).to(tl.int64) << 48
        tl.store(p_word, ((kept >> 16) & 0xFFFFFFFFFFFF) | newest, mask=inside)
    else:
        slot = tl.arange(0, WIDTH)
        row = inside[:, None] & (slot < KEPT)[None, :]
        p_past = past + (i_seq * CHANNELS + channel)[:, None] * KEPT + slot[None, :]
        kept = tl.load(p_past, mask=row, other=0.0)
        later = tl.load(p_past + 1, mask=row & (slot < KEPT - 1)[None, :], other=0.0)
        tap = slot - (KEPT + 1 - TAPS)
        is_tap = row & (tap >= 0)[None, :]
        w = tl.load(weight + channel[:, None] * TAPS + tap[None, :], mask=is_tap, other=0.0).to(tl.float32)
        last = tl.load(weight + channel * TAPS + (TAPS - 1), mask=inside, other=0.0).to(tl.float32)
        y = tl.sum(tl.where(is_tap, kept.to(tl.float32) * w, 0.0), 1) + new.to(tl.float32) * last
        tl.debug_barrier()  # another thread's lane of `later` lies where this one writes
        tl.store(p_past, tl.where((slot == KEPT - 1)[None, :], new[:, None], later), mask=row)
    if bias is not None:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y = tl.div_rn(y, 1.0 + exp(-y))
    tl.store(out + i_seq * CHANNELS + channel, y.to(out.dtype.element_ty), mask=inside)


def forward(
    new: list[tuple[Tensor, int, int, int, int]],
    past: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
    beside: tuple[Tensor, Tensor] | None = None,
    gates: Gates | None = None,
) -> tuple[Tensor, ...]:
    """`(out [N, C], past moved on)`, and behind them projected `[N, R]` or, with `gates`, g and beta `[N, R / 2]`.
    Writes over `past` `[N, C, KEPT]`, contiguous.

    Args:
        new: at most SOURCES of (memory, channels, stride of tokens, stride of groups, channels of a group), which
            together are one input a channel.
        weight: `[C, TAPS]`, contiguous.
        beside: x `[N, I]` and a matrix `[R, I]`, contiguous, whose product is taken along. gates: what it is made into.
    """
    sequences, channels, kept = past.shape
    memory: list[Tensor | None] = [x[0] for x in new] + [None] * (SOURCES - len(new))
    steps = [n for x in new for n in x[2:4]] + [0] * (2 * (SOURCES - len(new)))
    runs = [x[4] for x in new] + [1] * (SOURCES - len(new))
    out = past.new_empty(sequences, channels)
    x, matrix = (None, None) if beside is None else beside
    rows, inputs = (0, 1) if matrix is None else matrix.shape
    g, beta, projected, log_rate, rate_bias = None, None, None, None, None
    at_beta, at_g = (0, 0, 0, 1), (0, 0, 0, 1)
    if gates is not None:
        log_rate, rate_bias, strength, at_beta, at_g = gates
        g = x.new_empty(sequences, rows // 2, dtype=torch.float32)
        beta = x.new_empty(sequences, rows // 2, dtype=strength)
    elif x is not None:
        projected = x.new_empty(sequences, rows)
    blocks = triton.cdiv(rows, _ROWS) + triton.cdiv(channels, _BLOCK)
    four = kept == weight.shape[1] == 4 and past.element_size() == weight.element_size() == 2
    launched(convolve)[(blocks, sequences)](
        *memory, past, weight, bias, out, x, matrix, projected, g, beta, log_rate, rate_bias, *steps,
        CHANNELS=channels, A_END=new[0][1], B_END=sum(x[1] for x in new[:2]), A_RUN=runs[0], B_RUN=runs[1],
        C_RUN=runs[2], TAPS=weight.shape[1], KEPT=kept, WIDTH=triton.next_power_of_2(kept),
        WORDS=four and aligned(past) and aligned(weight), SILU=silu, BLOCK=_BLOCK, ROWS=rows,
        INPUTS=inputs, ROW_BLOCK=_ROWS, INPUT_BLOCK=min(_INPUTS, triton.next_power_of_2(inputs)),
        GATES=gates is not None, BETA_AT=at_beta[0], BETA_GROUP=at_beta[1], BETA_STEP=at_beta[2], BETA_RUN=at_beta[3],
        G_AT=at_g[0], G_GROUP=at_g[1], G_STEP=at_g[2], G_RUN=at_g[3], EARLY=False, num_warps=4, num_stages=1,
    )  # fmt: skip
    return (out, past, *(x for x in (projected, g, beta) if x is not None))
