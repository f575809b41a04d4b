"""Gated linear attention (GLA): additive rule with one decay per key channel. Yang et al., arXiv:2312.06635."""

from __future__ import annotations

from lattn_compile.recurrence.adapters import fla
from lattn_compile.recurrence.kind import Kind, KnownCall

KIND = Kind(
    name="gla",
    rule="additive",
    decay="channel",
    paper="arXiv:2312.06635",
    calls=(
        KnownCall(
            "fla", "fla.ops.gla.chunk", "chunk_gla", "chunk", fla("q k v g scale initial_state output_final_state")
        ),
        KnownCall(
            "fla",
            "fla.ops.gla.fused_recurrent",
            "fused_recurrent_gla",
            "recurrent",
            fla("q k v gk gv scale initial_state output_final_state reverse", decay="gk"),
        ),
    ),
)
