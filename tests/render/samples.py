"""One report with everything in it: three equal layers, a symbolic size, a left site, an unmatched candidate."""

from __future__ import annotations

from typing import Any

from lattn_compile.errors import Reason, reason
from lattn_compile.report import Report, Site, Unmatched

# As Policy.to_dict() writes it: every key.
INT8_TOKEN: dict[str, Any] = {
    "state": {"format": "int8", "block_v": 64, "block_k": None},
    "write": {"mode": "token"},
    "readout": "before_write",
    "rounding": "nearest",
    "seed": 0,
    "feedback": None,
    "rotation": None,
    "gate": None,
    "prefill": None,
    "storage": "emulated",
    "kernel": "auto",
}

BEFORE = """\
q_1 = l2norm(q);  q = None
k_1 = l2norm(k);  k = None
g = gdn_gate(a, A_log, dt_bias);  a = None
out = torch_chunk_gated_delta_rule(q_1, k_1, v, g=g, beta=beta)
o = out[0];  out = None"""

AFTER = """\
g = gdn_gate(a, A_log, dt_bias);  a = None
out = torch.ops.lattn.chunk(q, k, v, g, beta, None, rule='delta', scale=0.25, qk_l2norm=True, state_format='int8/*x64')
o = out[0];  out = None"""


def site(layer: int, **changes: Any) -> Site:
    values: dict[str, Any] = {
        "path": f"model.layers.{layer}.linear_attn",
        "id": f"model.layers.{layer}.linear_attn/gdn#0",
        "kind": "gdn",
        "rule": "delta",
        "decay": "head",
        "form": "call",
        "call": "transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule",
        "shapes": {"B": 1, "T": "s27", "H": 2, "HV": 4, "K": 16, "V": 16},
        "policy": INT8_TOKEN,
        "op": "lattn::chunk",
        "kernel": "reference",
        "state_bytes_before": 4096,
        "state_bytes_after": 1040,
        "source": "modeling_qwen3_next.py:612",
        "verdict": "rewritten",
        "folded": ("l2norm",),
        "autograd_nodes": 1,
        "residual_count": 7,
        "evidence": {"how": "known call", "max_error": 2.5e-12},
        "graph_before": BEFORE,
        "graph_after": AFTER,
    }
    return Site(**{**values, **changes})


def left(layer: int, why: Reason | None = None) -> Site:
    return site(
        layer,
        verdict="left",
        reason=why or reason("DENSE_CACHE"),
        op=None,
        kernel=None,
        state_bytes_after=4096,
        graph_after=None,
    )


def full_report() -> Report:
    return Report(
        sites=[site(0), site(1), site(2), left(4)],
        unmatched=[
            Unmatched(
                path="model.layers.5.mixer",
                node="add_12",
                stopped_at="erase and read use different keys",
                reason=Reason(code="KEYS", text="the two keys are not one value", remedy="Use one key for both."),
                source="mixer.py:88",
            )
        ],
        graph_breaks=["app.py:31: call to print"],
        skipped_frames=["forward (app.py:12): generator"],
        compiles=2,
        seconds=12.34,
        recipe={"version": 1, "rules": [["*", INT8_TOKEN]]},
        notes=["autocast inside the region: rewritten without normalisation"],
    )


# One token of a layer that spells its recurrence out, as `Node.format_node()` prints it.
SPELLED_BEFORE = """\
%select_4 : [num_users=1] = call_function[target=torch.ops.aten.select.int](args = (%q, 1, 0), kwargs = {})
%exp : [num_users=1] = call_function[target=torch.ops.aten.exp.default](args = (%view_2,), kwargs = {})
%mul : [num_users=2] = call_function[target=torch.ops.aten.mul.Tensor](args = (%state, %exp), kwargs = {})
%bmm : [num_users=1] = call_function[target=torch.ops.aten.bmm.default](args = (%transpose, %mul), kwargs = {})
%sub : [num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%v, %bmm), kwargs = {})
%mul_1 : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%sub, %beta), kwargs = {})
%baddbmm : [num_users=2] = call_function[target=torch.ops.aten.baddbmm.default](args = (%mul, %view_1, %mul_1), kwargs = {})
%bmm_1 : [num_users=1] = call_function[target=torch.ops.aten.bmm.default](args = (%select_4, %baddbmm), kwargs = {})
%_to_copy : [num_users=1] = call_function[target=torch.ops.aten._to_copy.default](args = (%bmm_1,), kwargs = {dtype: torch.bfloat16})"""  # noqa: E501

SPELLED_AFTER = (
    "%decode : [num_users=3] = call_function[target=torch.ops.lattn.decode.default](args = (%unsqueeze, %unsqueeze_1, "
    "%unsqueeze_2, %unsqueeze_3, %beta, %state, None, None, None, None), kwargs = {rule: delta, scale: 1.0})"
)


def spelled(layer: int, **changes: Any) -> Site:
    """A site that the graph spells out, token by token, with the evidence of its recognition."""
    values: dict[str, Any] = {
        "form": "loop",
        "call": None,
        "shapes": {"B": 1, "T": 17, "H": 2, "HV": 2, "K": 16, "V": 16},
        "op": "lattn::decode",
        "source": "my_layer.py:41",
        "folded": (),
        "evidence": {
            "found_by": "algebra",
            "form": "loop",
            "steps": 17,
            "roles": {"q": "select_4", "k": "view_1", "v": "v", "g": "view_2", "beta": "beta", "state": "%state"},
            "nodes_before": 1204,
            "nodes_after": 1,
            "self_check": {
                "verified": True,
                "max_error": 3.1e-13,
                "max_gradient_error": 8.25e-12,
                "shapes": "real",
                "seconds": 0.024,
                "cached": layer > 0,
            },
            "frontier": ["q", "view_1", "v", "view_2", "beta", "state"],
            "rule_index": 0,
            "captured": None,
            "chained_by": "data flow",
        },
        "graph_before": SPELLED_BEFORE,
        "graph_after": SPELLED_AFTER,
    }
    return site(layer, **{**values, **changes})


def candidate(layer: int, **changes: Any) -> Unmatched:
    values: dict[str, Any] = {
        "path": f"model.layers.{layer}.mixer",
        "node": f"add_{layer}",
        "stopped_at": "erase and read use different keys",
        "reason": Reason(code="KEYS", text="the two keys are not one value", remedy="Use one key for both."),
        "source": "mixer.py:88",
    }
    return Unmatched(**{**values, **changes})
