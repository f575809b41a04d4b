"""Pieces that several kinds' adapters share: options of FLA functions that change, or do not change, the meaning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.gates import lower_bound_gate, softplus_gate, write_strength
from lattn_compile.recurrence.kind import Recurrence

# Options that say how a kernel is run, not what it computes. Anything else that is unknown refuses the call: a later
# library version may give it a meaning.
SPEED_ONLY = frozenset(
    {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate", "use_graph", "max_num_seqs"}
)


def unknown(options: dict[str, Any], *, allowed: frozenset[str] = SPEED_ONLY) -> str:
    """The first option that is set and not known, in words, or an empty string."""
    for name, value in options.items():
        if name not in allowed and value is not None and value is not False:
            return f"option {name}={value!r} is not known to lattn_compile"
    return ""


def gated(
    rec: Recurrence,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Recurrence | str:
    """Apply FLA's in-kernel gates as torch ops."""
    g, beta = rec.g, rec.beta
    if use_gate_in_kernel:
        if g is None:
            return "use_gate_in_kernel=True without g"
        if lower_bound is not None:
            g = lower_bound_gate(g, A_log, lower_bound, dt_bias)
        elif A_log is None:
            return "use_gate_in_kernel=True without A_log"
        else:
            g = softplus_gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        if beta is None:
            return "use_beta_sigmoid_in_kernel=True without beta"
        beta = write_strength(beta, allow_neg_eigval=allow_neg_eigval)
    elif allow_neg_eigval:
        return "allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True"
    return rec._replace(g=g, beta=beta)


def hf_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    seq_idx: Tensor | None = None,
    **ignored: Any,
) -> Recurrence | str:
    """transformers' chunked delta-rule functions (GDN and KDA share one signature).

    Their other keyword arguments are model-wide (`TransformersKwargs`) and are ignored by the originals too.
    """
    if scale is not None:
        return "scale= is honoured by FLA and ignored by the torch function behind the same name"
    if seq_idx is not None and cu_seqlens is None:  # with both, as collators send them, they say the same
        return "seq_idx= marks packed sequences; pass cu_seqlens instead"
    return Recurrence(
        q=query,
        k=key,
        v=value,
        g=g,
        beta=beta,
        scale=None,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def hf_delta_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Recurrence | str:
    """transformers' recurrent delta-rule functions: the chunked ones less `chunk_size`."""
    return hf_delta(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **options,
    )
