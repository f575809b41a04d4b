"""Retention and its gated form (simple GLA): additive rule with one decay per head. RetNet, arXiv:2307.08621."""

from __future__ import annotations

from lattn_compile.recurrence.adapters import fla
from lattn_compile.recurrence.gates import retention_decay
from lattn_compile.recurrence.kind import Kind, KnownCall

_SIMPLE_GLA = "q k v g g_gamma scale initial_state output_final_state"
_RETENTION = fla("q k v scale initial_state output_final_state", constant_decay=retention_decay)

KIND = Kind(
    name="retention",
    rule="additive",
    decay="head",
    paper="arXiv:2307.08621",
    calls=(
        KnownCall("fla", "fla.ops.simple_gla.chunk", "chunk_simple_gla", "chunk", fla(_SIMPLE_GLA)),
        KnownCall(
            "fla", "fla.ops.simple_gla.fused_recurrent", "fused_recurrent_simple_gla", "recurrent", fla(_SIMPLE_GLA)
        ),
        KnownCall("fla", "fla.ops.retention.chunk", "chunk_retention", "chunk", _RETENTION),
        KnownCall("fla", "fla.ops.retention.fused_recurrent", "fused_recurrent_retention", "recurrent", _RETENTION),
    ),
)
