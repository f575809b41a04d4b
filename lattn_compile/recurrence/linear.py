"""Plain linear attention: additive rule without decay. Katharopoulos et al., arXiv:2006.16236."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.recurrence.adapters import fla
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


def _normalizing(*args: Any, **kwargs: Any) -> Recurrence | str:
    """`chunk_linear_attn` divides by the normaliser unless told not to; its recurrent twin only when told to."""
    return _CHUNK(*args, **{"normalize": True, **kwargs}) if len(args) < 7 else _CHUNK(*args, **kwargs)


_CHUNK = fla("q k v scale initial_state output_final_state normalize cu_seqlens")
_RECURRENT = fla("q k v scale initial_state output_final_state reverse normalize cu_seqlens")

KIND = Kind(
    name="linear",
    rule="additive",
    decay="none",
    paper="arXiv:2006.16236",
    calls=(
        KnownCall("fla", "fla.ops.linear_attn.chunk", "chunk_linear_attn", "chunk", _normalizing),
        KnownCall("fla", "fla.ops.linear_attn.fused_recurrent", "fused_recurrent_linear_attn", "recurrent", _RECURRENT),
    ),
)
