"""DeltaNet: delta rule without decay. Schlag et al., arXiv:2102.11174; Yang et al., arXiv:2406.06484."""

from __future__ import annotations

from lattn_compile.recurrence.adapters import fla
from lattn_compile.recurrence.kind import Kind, KnownCall

_PARAMETERS = "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"

KIND = Kind(
    name="delta",
    rule="delta",
    decay="none",
    paper="arXiv:2406.06484",
    calls=(
        KnownCall("fla", "fla.ops.delta_rule.chunk", "chunk_delta_rule", "chunk", fla(_PARAMETERS)),
        KnownCall(
            "fla", "fla.ops.delta_rule.fused_recurrent", "fused_recurrent_delta_rule", "recurrent", fla(_PARAMETERS)
        ),
    ),
)
