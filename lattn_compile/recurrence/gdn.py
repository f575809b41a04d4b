"""Gated DeltaNet (GDN): delta rule with one decay per head and token. Yang et al., arXiv:2412.06464."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.adapters import gated, hf_delta, hf_delta_recurrent, unknown
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence


def _fla_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Recurrence | str:
    if cp_context is not None:
        return "context parallelism (cp_context) is not supported"
    if why := unknown(options):
        return why
    rec = Recurrence(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first or transpose_state_layout,
    )
    return gated(
        rec,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )


def _fla_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Recurrence | str:
    if gk is not None or gv is not None:
        return "a GDN call with gk or gv mixes per-head and per-channel decay"
    if beta is not None and beta.ndim != 3:
        return "beta per value channel ([B, T, HV, V]) is not a write strength per head"
    return _fla_chunk(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first or transpose_state_layout,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        **options,
    )


KIND = Kind(
    name="gdn",
    rule="delta",
    decay="head",
    paper="arXiv:2412.06464",
    calls=(
        KnownCall("transformers", "transformers.models.*.*", "torch_chunk_gated_delta_rule", "chunk", hf_delta),
        KnownCall(
            "transformers",
            "transformers.models.*.*",
            "torch_recurrent_gated_delta_rule",
            "recurrent",
            hf_delta_recurrent,
        ),
        KnownCall("fla", "fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule", "chunk", _fla_chunk),
        KnownCall(
            "fla",
            "fla.ops.gated_delta_rule.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            "recurrent",
            _fla_recurrent,
        ),
    ),
)
