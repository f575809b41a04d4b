"""From a library function's own arguments to a `Recurrence`: one adapter for FLA's functions, two for transformers'.

Adapters are traced. They read no values, raise nothing that the library would not, and refuse in words what has no
exact counterpart here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lattn_compile.recurrence.gates import lower_bound_gate, softplus_gate, write_strength
from lattn_compile.recurrence.kind import Adapter, Recurrence

# Options that say how a kernel is run, not what it computes. Anything else that is unknown refuses the call: a later
# library version may give it a meaning.
SPEED_ONLY = frozenset(
    {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate", "use_graph", "max_num_seqs"}
)

# Options that, when set, have no counterpart.
REFUSED = {
    "cp_context": "context parallelism (cp_context) is not supported",
    "return_intermediate_states": "return_intermediate_states=True reads states inside the sequence",
    "reverse": "reverse=True runs from the last token to the first",
    "gv": "a decay per value channel (gv) is outside the recurrences known here",
}


def fla(parameters: str, *, decay: str = "g", constant_decay: Callable[[Tensor], Tensor] | None = None) -> Adapter:
    """The adapter of an FLA function.

    Args:
        parameters: names of the function's first parameters, which may be given by position, in order; the others
            are passed by name.
        decay: the parameter that is the log decay; another one that is set refuses the call.
        constant_decay: for functions whose decay is not an argument, what it is, as `[B, T, H]` of `q`.
    """
    names = parameters.split()

    def adapt(*args: Any, **kwargs: Any) -> Recurrence | str:
        if len(args) > len(names):
            return f"{len(args)} positional arguments, of which {len(names)} are known"
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if constant_decay is not None:
            given["g"] = constant_decay(given["q"])
        return _fla_recurrence(given, decay)

    adapt.parameters = names  # type: ignore[attr-defined]  # a test compares them with the installed library's
    return adapt


def _fla_recurrence(given: dict[str, Any], decay: str) -> Recurrence | str:
    for name, why in REFUSED.items():
        value = given.pop(name, None)
        if value is not None and value is not False:
            return why
    g = given.pop(decay, None)
    for other in ("g", "gk"):
        if given.pop(other, None) is not None:
            return f"{other} is set where the decay is {decay}"
    q, beta = given.pop("q"), given.pop("beta", None)
    if (gamma := given.pop("g_gamma", None)) is not None:
        constant = gamma.float().expand(q.shape[0], q.shape[1], q.shape[2])
        g = constant if g is None else g.float() + constant
    if decay == "gk" and g is None:
        return "GLA without gk is plain linear attention; call that"
    if beta is not None and beta.ndim != 3:
        return "beta per value channel ([B, T, HV, V]) is not a write strength per head"
    gated = _gates(given, g, beta)
    if isinstance(gated, str):
        return gated
    state, z_state, normalize = given.pop("initial_state", None), None, given.pop("normalize", False)
    cu_seqlens = given.pop("cu_seqlens", None)
    if normalize and cu_seqlens is not None:
        return "the running normaliser of packed sequences (normalize=True with cu_seqlens) is not supported"
    if normalize and isinstance(state, tuple):
        state, z_state = state
    call = Recurrence(
        q=q,
        k=given.pop("k"),
        v=given.pop("v"),
        g=gated[0],
        beta=gated[1],
        scale=given.pop("scale", None),
        initial_state=state,
        output_final_state=given.pop("output_final_state", False),
        qk_l2norm=given.pop("use_qk_l2norm_in_kernel", False),
        cu_seqlens=cu_seqlens,
        # The older name of the same option.
        state_v_first=given.pop("state_v_first", False) or given.pop("transpose_state_layout", False),
        normalize=normalize,
        z_state=z_state,
    )
    for name, value in given.items():
        if name not in SPEED_ONLY and value is not None and value is not False:
            return f"option {name}={value!r} is not known to lattn_compile"
    return call


def _gates(given: dict[str, Any], g: Tensor | None, beta: Tensor | None) -> tuple[Tensor | None, Tensor | None] | str:
    """FLA's in-kernel gates as torch ops: `(g, beta)` after their activations."""
    A_log, dt_bias = given.pop("A_log", None), given.pop("dt_bias", None)
    lower_bound = given.pop("lower_bound", None)
    if given.pop("use_gate_in_kernel", False):
        if g is None:
            return "use_gate_in_kernel=True without g"
        if lower_bound is not None:
            g = lower_bound_gate(g, A_log, lower_bound, dt_bias)
        elif A_log is None:
            return "use_gate_in_kernel=True without A_log"
        else:
            g = softplus_gate(g, A_log, dt_bias)
    sigmoid = given.pop("use_beta_sigmoid_in_kernel", False)
    doubled = given.pop("allow_neg_eigval", False)
    if sigmoid:
        if beta is None:
            return "use_beta_sigmoid_in_kernel=True without beta"
        beta = write_strength(beta, allow_neg_eigval=doubled)
    elif doubled:
        return "allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True"
    return g, beta


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
