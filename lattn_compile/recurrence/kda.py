"""Kimi Delta Attention (KDA): delta rule with one decay per key channel. Kimi Linear, arXiv:2510.26692."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.adapters import gated, hf_delta, hf_delta_recurrent, unknown
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence


def _fla_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Recurrence | str:
    if cp_context is not None:
        return "context parallelism (cp_context) is not supported"
    if return_intermediate_states:
        return "return_intermediate_states=True reads states inside the sequence"
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
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )


def _fla_kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    return _fla_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        **options,
    )


KIND = Kind(
    name="kda",
    rule="delta",
    decay="channel",
    paper="arXiv:2510.26692",
    calls=(
        KnownCall("transformers", "transformers.models.*.*", "chunk_kimi_delta_attention", "chunk", hf_delta),
        KnownCall(
            "transformers",
            "transformers.models.*.*",
            "recurrent_kimi_delta_attention",
            "recurrent",
            hf_delta_recurrent,
        ),
        KnownCall("fla", "fla.ops.kda.chunk", "chunk_kda", "chunk", _fla_kda),
        KnownCall("fla", "fla.ops.kda.fused_recurrent", "fused_recurrent_kda", "recurrent", _fla_kda_recurrent),
    ),
)
