"""One token of `lattn::decode` for every sequence, in one kernel: what a compiled decode step launches.

The same update and the same codec as `decode_forward.py`, without what only a loop needs: keys and queries are
normalised by the program that reads them, nobody asks where a sequence begins, and the state is rounded on its way in
where the call hands it over. Gates may come as what a model computes them from, so that no kernel has to run before
this one; each cast of the model is made where the model makes it.

Sums of a norm are taken in another order than in `pair_up`, so this and the loop hold semantics §8, not the same bits.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.common.early import fetch, wait_for_before
from lattn_compile.kernels.common.inputs import exp, rstd
from lattn_compile.kernels.common.launch import launched
from lattn_compile.kernels.common.pieces import (
    columns,
    dot,
    key_channels,
    lanes,
    load_channels,
    load_state,
    over_channels,
    scaled,
    store_state,
)
from lattn_compile.kernels.decode_call import layout_of, of_sequences, strides, tile_constants
from lattn_compile.kernels.decode_codec import quantize as rounded

__all__ = ["MAMBA", "SIGMOID", "forward", "step"]

MAMBA = 3
"""`DECAY`: by head, of a model that learns how fast it forgets: `g = -exp(log_rate) * softplus(g + bias)`."""

SIGMOID = 2
"""`BETA`: a number before its sigmoid, which the model rounds to the number's own type."""


@triton.jit
def softplus(x):
    """`log(1 + e**x)`, x itself above 20 (torch's threshold), and NaN, which a GPU's minimum drops."""
    y = exp(tl.minimum(x, 20.0))
    # Kahan's: what the rounding of 1 + y loses is made up for by the quotient.
    one = 1.0 + y
    log1p = tl.where(one == 1.0, y, tl.log(one) * tl.div_rn(y, one - 1.0))
    return tl.where(x <= 20.0, log1p, x)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def _times(x, factor, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (x[i].to(tl.float32) * factor,)
    return out


@triton.jit
def _decays(g, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (exp(g[i].to(tl.float32)),)
    return out


@triton.jit
def step(
    q,
    k,
    v,
    g,
    log_rate,
    bias,
    beta,
    source,
    o,
    final,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_group,
    g_head,
    beta_token,
    beta_group,
    beta_head,
    key_heads,
    value_heads,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    FLIP: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
    G_RUN: tl.constexpr,
    BETA_RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTER: tl.constexpr,
    AFTER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token of every sequence.

    Args:
        q, k: `[N, H, K]`, v `[N, HV, V]`, channels contiguous. scale: of the query, after its norm.
        g: `[N, HV]` (DECAY 1), `[N, HV, K]` (2), or before softplus, `[N, HV]` (3, MAMBA); beta: `[N, HV]` (BETA 1), or
            before its sigmoid (2, SIGMOID). log_rate, bias: `[HV]`, of MAMBA. Heads of both may lie in groups of G_RUN
            and BETA_RUN, as one projection leaves them.
        source: states `[N, HV, K, V]`, fp32. o: `[N, HV, V]`, contiguous. final: like `source`, and may be it.
        BK: a power of two, at least K. FORMAT: "" rounds nothing. ENTER: the state is rounded before the token, too.
            AFTER: outputs are read after the rounding. EARLY: launched while the kernel before may still run.

    Grid: (column blocks * HV * N,).
    """
    i = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + WARPS * COLUMNS - 1) // (WARPS * COLUMNS)
    i_block, i_head, i_seq = i % BLOCKS, (i // BLOCKS) % value_heads, (i // (BLOCKS * value_heads)).to(tl.int64)
    if EARLY:
        # The program's columns of the state, as far as the second-level cache.
        p_ahead = source + (i_seq * value_heads + i_head) * (K * V) + i_block * (WARPS * COLUMNS)
        row = tl.arange(0, BK)
        line = tl.arange(0, (WARPS * COLUMNS + 31) // 32) * 32
        inside = (row < K)[:, None] & (i_block * (WARPS * COLUMNS) + line < V)[None, :]
        fetch(p_ahead + tl.where(inside, row[:, None] * V + line[None, :], 0))
        wait_for_before()
    i_key = i_head // (value_heads // key_heads)
    RUN: tl.constexpr = PIECES * STEP
    MASK_K: tl.constexpr = LANES * RUN != K
    channel = key_channels(LANES, RUN, STEP, FLIP)
    column = columns(i_block * (WARPS * COLUMNS), WARPS, COLUMNS)
    lane = lanes(LANES, FLIP)
    once = tl.max_contiguous(column[None, :, None, :] + lane * 0, (1, 1, 1, VECTOR))
    write_once = (lane == 0) & (column[None, :, None, :] < V)

    head = i_seq * value_heads + i_head
    S = load_state(source + head * (K * V), channel, column, K, V, VECTOR, PIECES, STEP)

    p_q = q + (i_seq * q_token + i_key * q_head)
    p_k = k + (i_seq * k_token + i_key * k_head)
    at = tl.arange(0, BK)
    w_q = tl.load(p_q + at, mask=at < K, other=0.0).to(tl.float32)
    w_k = tl.load(p_k + at, mask=at < K, other=0.0).to(tl.float32)
    norm_q = 1.0
    norm_k = 1.0
    if NORM:
        norm_q = rstd(tl.sum(w_q * w_q, 0))
        norm_k = rstd(tl.sum(w_k * w_k, 0))
    b_dot = tl.sum((w_k * norm_k) * (w_q * norm_q * scale), 0)
    b_q = _times(load_channels(p_q, channel, K, PIECES, STEP, MASK_K), norm_q, PIECES)
    b_q = _times(b_q, scale, PIECES)
    b_k = _times(load_channels(p_k, channel, K, PIECES, STEP, MASK_K), norm_k, PIECES)
    b_v = tl.load(v + (i_seq * v_token + i_head * v_head) + column, mask=column < V, other=0.0).to(tl.float32)

    if ENTER:
        S, _codes, _steps = rounded(S, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
    p_g = g
    if DECAY:
        p_g = g + (i_seq * g_token + i_head // G_RUN * g_group + i_head % G_RUN * g_head)
    if DECAY == 1:
        S = scaled(S, exp(tl.load(p_g).to(tl.float32)), False, PIECES)
    if DECAY == 2:
        S = scaled(S, _decays(load_channels(p_g, channel, K, PIECES, STEP, MASK_K), PIECES), True, PIECES)
    if DECAY == 3:
        rate = exp(tl.load(log_rate + i_head).to(tl.float32))
        b_g = -rate * softplus(tl.load(p_g).to(tl.float32) + tl.load(bias + i_head).to(tl.float32))
        S = scaled(S, exp(b_g), False, PIECES)
    u = b_v
    if DELTA:
        u = b_v - dot(S, b_k, PIECES, FLIP)
    if BETA:
        b_beta = tl.load(beta + (i_seq * beta_token + i_head // BETA_RUN * beta_group + i_head % BETA_RUN * beta_head))
        if BETA == 2:
            b_beta = sigmoid(b_beta.to(tl.float32)).to(b_beta.dtype)
        u = b_beta.to(tl.float32) * u
    if not AFTER:
        read = tl.fma(u, b_dot, dot(S, b_q, PIECES, FLIP))
    new = ()
    for piece in tl.static_range(PIECES):
        new = new + (tl.fma(over_channels(b_k[piece]), u[None, :, None, :], S[piece]),)
    if FORMAT != "":
        new, _codes, _steps = rounded(new, FORMAT, BLOCK_K, BLOCK_V, PIECES, STEP, FLIP)
    if AFTER:
        read = dot(new, b_q, PIECES, FLIP)
    value = tl.broadcast_to(read[None, :, None, :], once.shape).to(o.dtype.element_ty)
    tl.store(o + head * V + once, value, mask=write_once)
    store_state(final + head * (K * V), new, channel, column, K, V, VECTOR, PIECES, STEP)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    o: Tensor,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    enter: bool,
) -> Tensor:
    """One token of every sequence; writes `o`, contiguous, and over `state`, if that is contiguous and aligned.

    Args:
        q, k: `[N, H, K]`, v: `[N, HV, V]`, g, beta: `[N, HV(, K)]` or None, state `[N, HV, K, V]`, fp32.
        enter: the state is handed over: rounded before the token.

    Returns:
        The new state. What `kernels.decode.supports` objects to is not asked again.
    """
    q, k, v, g = (x if x is None or x.stride(-1) == 1 or x.dim() == 2 else x.contiguous() for x in (q, k, v, g))
    (sequences, value_heads, value_dim), key_dim = v.shape, q.shape[2]
    lay = layout_of(key_dim, value_dim, quantize)
    block_k, block_v = tile_constants(lay, quantize)
    name = "" if quantize is None or quantize.fmt.name == "fp32" else quantize.fmt.name
    states = of_sequences(state).states
    launched(step)[(lay.blocks * value_heads * sequences,)](
        q, k, v, g, None, None, beta, states, o, states, *strides(q), *strides(k), *strides(v), *_heads(g),
        *_heads(beta), q.shape[1], value_heads, float(scale),
        **lay.constants(), BK=triton.next_power_of_2(key_dim), NORM=qk_l2norm, DELTA=rule == "delta",
        DECAY=0 if g is None else g.dim() - 1, BETA=int(beta is not None), G_RUN=value_heads, BETA_RUN=value_heads,
        FORMAT=name, BLOCK_K=block_k, BLOCK_V=block_v,
        ENTER=enter and bool(name), AFTER=readout == "after_write" and bool(name), EARLY=False,
        num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return states


def _heads(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of tokens, groups, of which there is one, and heads."""
    token, head = strides(x)
    return token, 0, head
