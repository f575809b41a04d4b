"""Plain linear attention: additive rule without decay. Katharopoulos et al., arXiv:2006.16236."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence

NORMALIZER_EPS = 1e-10


def normalize(o: Tensor, q: Tensor, k: Tensor, scale: float, z_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Divide by the running normaliser, `o_t / (scale · q_tᵀ z_t + 1e-10)`, `z_t = z_0 + Σ_{s<=t} k_s` (eq. 18-20).

    Args:
        o: `[B, T, H, V]`. q, k: `[B, T, H, K]`. z_state: `[B, 1, H, K]`, the sum carried in.
    Returns:
        `(o, z_state)`, the latter `[B, 1, H, K]` after the last token.
    """
    z = torch.cumsum(k.float(), dim=1)
    if z_state is not None:
        z = z + z_state.float()
    denominator = (q.float() * scale * z).sum(-1, keepdim=True) + NORMALIZER_EPS
    return (o.float() / denominator).to(o.dtype), z[:, -1:].to(k.dtype)


def _fla_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    reverse: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> Recurrence | str:
    if reverse:
        return "reverse=True runs from the last token to the first"
    if normalize and cu_seqlens is not None:
        return "the running normaliser of packed sequences (normalize=True with cu_seqlens) is not supported"
    z_state = None
    if normalize and isinstance(initial_state, tuple):
        initial_state, z_state = initial_state
    return Recurrence(
        q=q,
        k=k,
        v=v,
        g=None,
        beta=None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize=normalize,
        z_state=z_state,
    )


def _fla_chunk_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Recurrence | str:
    return _fla_linear(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def _fla_recurrent_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Recurrence | str:
    return _fla_linear(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens)


KIND = Kind(
    name="linear",
    rule="additive",
    decay="none",
    paper="arXiv:2006.16236",
    calls=(
        KnownCall("fla", "fla.ops.linear_attn.chunk", "chunk_linear_attn", "chunk", _fla_chunk_linear),
        KnownCall(
            "fla",
            "fla.ops.linear_attn.fused_recurrent",
            "fused_recurrent_linear_attn",
            "recurrent",
            _fla_recurrent_linear,
        ),
    ),
)
