"""Chunked reference: a run of tokens by matrix products, forward and explicit backward.

Per block of at most 64 tokens, with `S` the state before it and the decayed products of `decay.py`:

    U  = (I + beta overlaps)^-1 beta (V - k_in S)        rule "delta"      (U = beta V for "additive")
    O  = q_in S + reads U
    S' = whole S + k_out^T U

Everything that does not need `S` is computed for many blocks at once; only `U` and `S'` run from block to block. The
backward walks the blocks in reverse with the adjoint of these three lines, recomputing each span of blocks from the
state at its start, so that neither a state per token nor an autograd graph is ever kept.

(Yang et al. 2024, "Gated Delta Networks", section 3.3, for per-head decay; Kimi Team 2025, "Kimi Linear", section 3,
for per-channel decay.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference.adjoint import sweep_back
from lattn_compile.kernels.reference.padding import scatter_
from lattn_compile.kernels.reference.prefill import Prefix
from lattn_compile.kernels.reference.span import Run, Tokens
from lattn_compile.kernels.reference.writes import Writes
from lattn_compile.modes import Prefill

__all__ = ["backward", "forward"]


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
    prefill: Prefill | None = None,
    measured: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Runs every sequence over its tokens.

    Args:
        q, k: `[M, H, K]`, flat tokens, any float dtype and strides.
        v: `[M, HV, V]`, HV a multiple of H.
        g: log decay of one step, `<= 0`, -inf legal: `[M, HV]`, `[M, HV, K]`, or None.
        beta: write strength `[M, HV]`, or None for 1.
        state: `[N, HV, K, V]`, float32 or float64, which is also the dtype of all arithmetic. Not changed.
        starts, lengths: int64 `[N]`; sequence i is the tokens `starts[i] : starts[i] + lengths[i]`. Disjoint.
        offsets: int64 `[N]`, tokens since the last line of the quantization grid; None is 0.
        o: `[M, HV, V]`, receives the outputs of the sequences' tokens; other rows are left as they are.
        rule: "delta" or "additive". scale: of the queries. qk_l2norm: normalise q and k first.
        chunk_size: tokens between two grid lines, any positive int; read only when `quantize` is given.
        quantize: the state becomes `quantize.qdq(state)` at each grid line; None is exact.
        readout: "before_write" or "after_write": the last token before a grid line reads the rounded state.
        identity: position of each sequence's first token, and its name: what keys stochastic rounding.
        prefill: rounded operands and another inverse (`prefill.py`), of a call that is exact otherwise. measured: gets
            the residuals of that inverse, float64 `[chunks, HV]`, a span of chunks at a time.

    Returns:
        The final state `[N, HV, K, V]`, new memory; of a sequence of length 0, its initial state bit for bit. Of one
        that ends on a grid line: what was written there, or, if `quantize` is not idempotent, the state before that
        write, which the caller encodes once. With `quantize`, a run cut on the grid gives the same bits as the uncut
        one.
    """
    tokens = Tokens(q, k, v, g, beta)
    if prefill is not None:
        assert quantize is None and offsets is None, "a prefix has no grid"
        prefix = Prefix(
            tokens, (starts, lengths), state.dtype, rule=rule, scale=scale, qk_l2norm=qk_l2norm, prefill=prefill
        )
        return prefix.forward(state, o, measured)
    writes = None if quantize is None else Writes(chunk_size, quantize, identity, readout == "after_write")
    run = Run(
        tokens,
        (starts, lengths, offsets),
        state.dtype,
        rule=rule,
        scale=scale,
        qk_l2norm=qk_l2norm,
        writes=writes,
    )
    current = run.load(state)
    for span in run.spans:
        blocks = run.prepare(span, reads=True)
        scatter_(o, blocks.slots, run.outputs(blocks, run.advance(span, blocks, current)))
    return run.unload(current)


def backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    grads: dict[str, Tensor],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
    prefill: Prefill | None = None,
) -> Tensor:
    """Adjoint of `forward`, from the same inputs. Rounding is an identity (straight-through, semantics §7).

    Args:
        grad_o: `[M, HV, V]`, gradient of `o`; rows outside the sequences are not read. None is zero.
        grad_final: `[N, HV, K, V]`, gradient of the final state. None is zero.
        grads: by name (`dq dk dv dg dbeta`), tensors of the inputs' shapes that receive the gradients of the sequences'
            tokens; other rows are left as they are. A missing name is not written.
        Others as in `forward`.

    Returns:
        Gradient of the initial state, `[N, HV, K, V]`, new memory.
    """
    tokens = Tokens(q, k, v, g, beta)
    if prefill is not None:
        prefix = Prefix(
            tokens, (starts, lengths), state.dtype, rule=rule, scale=scale, qk_l2norm=qk_l2norm, prefill=prefill
        )
        return prefix.backward(grad_o, grad_final, state, grads)
    writes = None if quantize is None else Writes(chunk_size, quantize, identity, readout == "after_write")
    run = Run(
        tokens,
        (starts, lengths, offsets),
        state.dtype,
        rule=rule,
        scale=scale,
        qk_l2norm=qk_l2norm,
        writes=writes,
    )
    dcurrent = run.load(torch.zeros_like(state) if grad_final is None else grad_final)
    sweep_back(run, state, dcurrent, grad_o, grads)
    return run.unload(dcurrent)
