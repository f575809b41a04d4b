"""DeltaNet: delta rule without decay. Schlag et al., arXiv:2102.11174; Yang et al., arXiv:2406.06484."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.adapters import unknown
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence


def _fla_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    if beta is not None and beta.ndim != 3:
        return "beta per value channel ([B, T, H, V]) is not a write strength per head"
    if why := unknown(options):
        return why
    return Recurrence(
        q=q,
        k=k,
        v=v,
        g=None,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


KIND = Kind(
    name="delta",
    rule="delta",
    decay="none",
    paper="arXiv:2406.06484",
    calls=(
        KnownCall("fla", "fla.ops.delta_rule.chunk", "chunk_delta_rule", "chunk", _fla_delta),
        KnownCall("fla", "fla.ops.delta_rule.fused_recurrent", "fused_recurrent_delta_rule", "recurrent", _fla_delta),
    ),
)
