"""Kimi Delta Attention (KDA): delta rule with one decay per key channel. Kimi Linear, arXiv:2510.26692."""

from __future__ import annotations

from lattn_compile.recurrence.adapters import fla, hf_delta, hf_delta_recurrent
from lattn_compile.recurrence.kind import Kind, KnownCall

_HF = ("transformers", "transformers.models.*.*")

KIND = Kind(
    name="kda",
    rule="delta",
    decay="channel",
    paper="arXiv:2510.26692",
    calls=(
        KnownCall(*_HF, "chunk_kimi_delta_attention", "chunk", hf_delta),
        KnownCall(*_HF, "recurrent_kimi_delta_attention", "recurrent", hf_delta_recurrent),
        KnownCall(
            "fla",
            "fla.ops.kda.chunk",
            "chunk_kda",
            "chunk",
            fla("q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel"),
        ),
        KnownCall(
            "fla",
            "fla.ops.kda.fused_recurrent",
            "fused_recurrent_kda",
            "recurrent",
            fla("q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel"),
        ),
    ),
)
