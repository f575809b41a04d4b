"""Gated DeltaNet (GDN): delta rule with one decay per head and token. Yang et al., arXiv:2412.06464."""

from __future__ import annotations

from lattn_compile.recurrence.adapters import fla, hf_delta, hf_delta_recurrent
from lattn_compile.recurrence.kind import Kind, KnownCall

_HF = ("transformers", "transformers.models.*.*")
_FLA = "fla.ops.gated_delta_rule"

KIND = Kind(
    name="gdn",
    rule="delta",
    decay="head",
    paper="arXiv:2412.06464",
    calls=(
        KnownCall(*_HF, "torch_chunk_gated_delta_rule", "chunk", hf_delta),
        KnownCall(*_HF, "torch_recurrent_gated_delta_rule", "recurrent", hf_delta_recurrent),
        KnownCall(
            "fla",
            f"{_FLA}.chunk",
            "chunk_gated_delta_rule",
            "chunk",
            fla("q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel"),
        ),
        KnownCall(
            "fla",
            f"{_FLA}.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            "recurrent",
            fla("q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel"),
        ),
    ),
)
