"""Gated linear attention (GLA): additive rule with one decay per key channel. Yang et al., arXiv:2312.06635."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lattn_compile.recurrence.adapters import unknown
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence


def _fla_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> Recurrence | str:
    if why := unknown(options):
        return why
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
        state_v_first=state_v_first,
    )


def _fla_gla_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Recurrence | str:
    if gv is not None:
        return "a decay per value channel (gv) is outside the recurrences known here"
    if reverse:
        return "reverse=True runs from the last token to the first"
    if gk is None:
        return "GLA without gk is plain linear attention; call that"
    return _fla_gla(
        q,
        k,
        v,
        gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first or transpose_state_layout,
        cu_seqlens=cu_seqlens,
        **options,
    )


KIND = Kind(
    name="gla",
    rule="additive",
    decay="channel",
    paper="arXiv:2312.06635",
    calls=(
        KnownCall("fla", "fla.ops.gla.chunk", "chunk_gla", "chunk", _fla_gla),
        KnownCall("fla", "fla.ops.gla.fused_recurrent", "fused_recurrent_gla", "recurrent", _fla_gla_recurrent),
    ),
)
