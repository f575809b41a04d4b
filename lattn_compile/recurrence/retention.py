"""Retention and its gated form (simple GLA): additive rule with one decay per head. RetNet, arXiv:2307.08621."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.adapters import unknown
from lattn_compile.recurrence.gates import retention_decay
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence


def _fla_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Recurrence | str:
    if reverse:
        return "reverse=True runs from the last token to the first"
    if why := unknown(options):
        return why
    if g_gamma is not None:
        constant = g_gamma.float().expand(q.shape[0], q.shape[1], q.shape[2])
        g = constant if g is None else g.float() + constant
    return Recurrence(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first or transpose_state_layout,
    )


# chunk_simple_gla takes cu_seqlens_cpu where the recurrent function takes reverse; by position they differ.
def _fla_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    return _fla_simple_gla(
        q,
        k,
        v,
        g,
        g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **options,
    )


def _fla_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    return _fla_simple_gla(
        q,
        k,
        v,
        retention_decay(q),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        **options,
    )


def _fla_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    return _fla_simple_gla(
        q,
        k,
        v,
        retention_decay(q),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **options,
    )


KIND = Kind(
    name="retention",
    rule="additive",
    decay="head",
    paper="arXiv:2307.08621",
    calls=(
        KnownCall("fla", "fla.ops.simple_gla.chunk", "chunk_simple_gla", "chunk", _fla_chunk_simple_gla),
        KnownCall(
            "fla", "fla.ops.simple_gla.fused_recurrent", "fused_recurrent_simple_gla", "recurrent", _fla_simple_gla
        ),
        KnownCall("fla", "fla.ops.retention.chunk", "chunk_retention", "chunk", _fla_chunk_retention),
        KnownCall(
            "fla",
            "fla.ops.retention.fused_recurrent",
            "fused_recurrent_retention",
            "recurrent",
            _fla_recurrent_retention,
        ),
    ),
)
