"""From rewritten sites to the report: the only place that knows both."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lattn_compile.errors import reason
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.ops import dispatch
from lattn_compile.passes.capture import LeftAlone, Refused
from lattn_compile.passes.context import PassContext, SiteNode, shape_of, value_of
from lattn_compile.passes.discover import form_of
from lattn_compile.passes.recognize import module_path_of, overload_of, source_of
from lattn_compile.passes.spelled.proposal import NearMiss
from lattn_compile.policy import Exact
from lattn_compile.recurrence import BY_NAME
from lattn_compile.report import Report, Site, Unmatched


def report_of(context: PassContext) -> Report:
    """The report of one graph after the passes ran."""
    recipes = {id(r): r for s in context.sites if (r := context.recipe or s.recipe) is not None}
    only = next(iter(recipes.values())) if len(recipes) == 1 else context.recipe
    return Report(
        sites=[_site(s, context.training) for s in context.sites + context.packed]
        + [_left_alone(r) for r in context.left_alone],
        unmatched=[_unmatched(r) for r in context.refused] + [_near_miss(m) for m in context.misses],
        recipe=only.to_dict() if only is not None else None,
        notes=[*_prefill_note(context), *_unsearched(context), *context.warnings, *context.idle_rules.values()],
    )


def _prefill_note(context: PassContext) -> list[str]:
    waiting = [
        s
        for s in context.sites
        if s.all_prefix and s.reason is None and s.policy and not isinstance(s.policy.write, Exact)
    ]
    if not waiting:
        return []
    return [
        f"{len(waiting)} chunk-form site(s) outside a phase are exact prefill, whatever the policy: "
        "the state they leave is rounded when a decode step takes it over"
    ]


def _site(site: SiteNode, training: bool) -> Site:
    overload = overload_of(site.node)
    left_spelled = overload is None
    arguments = site.arguments
    B, T, H, K = shape_of(arguments["k"]) or (None,) * 4
    _, _, HV, V = shape_of(arguments["v"]) or (None,) * 4
    before = after = None
    if isinstance(K, int) and isinstance(V, int) and isinstance(HV, int):
        state = arguments.get("initial_state")
        dtype_bytes = value_of(state).element_size() if isinstance(value_of(state), torch.Tensor) else 4
        if site.proposal is not None and site.proposal.state_dtype is not None:
            dtype_bytes = site.proposal.state_dtype.itemsize
        before = HV * K * V * dtype_bytes
        exact = site.reason is not None or site.policy is None or isinstance(site.policy.write, Exact)
        after = before
        if not exact:
            assert site.policy is not None
            has_beta = site.arguments["beta"] is not None
            after = site.policy.nbytes(H, HV, K, V, decay=site.kind.decay, has_beta=has_beta)
    inputs = [a for a in site.node.args if a is not None]
    return Site(
        path=site.path,
        id=site.id,
        kind=site.kind.name,
        rule=site.kind.rule,
        decay=site.kind.decay,
        form=form_of(site.call) or "call",
        call=None if form_of(site.call) else site.call,
        verdict="rewritten" if site.reason is None else "left",
        reason=site.reason,
        shapes={"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V},
        policy=site.policy.to_dict() if site.policy is not None else None,
        op=None if overload is None else overload._schema.name,
        kernel=None if overload is None else _kernel(site, overload._schema.name.removeprefix("lattn::").rstrip("_")),
        state_bytes_before=before,
        state_bytes_after=after,
        source=site.source,
        folded=tuple(site.folded),
        autograd_nodes=None if left_spelled else 1 if training else 0,
        residual_count=None if left_spelled else len(inputs) if training else 0,
        evidence=_evidence(site),
        graph_before=site.before if site.proposal is None else site.proposal.before,
        graph_after=None if left_spelled else _after(site),
    )


def _kernel(site: SiteNode, form: str) -> str | None:
    """What will run the op, as far as its shapes are known."""
    if form.endswith("_device"):
        return "triton"
    q, v = (value_of(site.arguments.get(name)) for name in ("q", "v"))
    policy = site.policy
    if q is None or v is None or policy is None:
        return None
    quantize = None
    if (fmt := policy.rounded_format) is not None and not site.all_prefix and site.reason is None:
        quantize = Quantizer(fmt, policy.rounding, policy.feedback, policy.rotation)
    dtype = torch.float64 if torch.float64 in (q.dtype, v.dtype) else torch.float32
    K, V = (x if isinstance(x, int) else 1 for x in (q.shape[-1], v.shape[-1]))
    given: dict[str, Any] = dict(site.node.kwargs)
    if form == "replay" and given.get("window") == 1 and given.get("write") == "replay" and not given.get("factors"):
        form = "decode"  # the token mode
    growth = bool(given.get("growth", False))
    work = dispatch.Work(q.device, dtype, K, V, quantize, inputs=q.dtype, growth=growth)
    if form == "replay" and "window" in given:
        paired = given.get("write") == "two_precision"
        work = dataclasses.replace(work, factors=given.get("factors"), window=given["window"], paired=paired)
    implementation = str(given.get("implementation", "auto"))
    if site.all_prefix and policy.prefill is not None:
        return dispatch.choose_prefill(implementation, work, policy.prefill)
    return dispatch.choose(form, implementation, work)


def _evidence(site: SiteNode) -> dict[str, Any]:
    if site.proposal is not None:
        return {**site.proposal.evidence, "rule_index": site.rule_index}
    if form_of(site.call):
        return {"form": form_of(site.call), "rule_index": site.rule_index}
    return {"captured": site.call, "form": site.form, "rule_index": site.rule_index}


def _after(site: SiteNode) -> str | None:
    """The nodes that stand there now."""
    if site.proposal is None:
        return site.node.format_node()
    nodes = [n for n in site.node.graph.nodes if n is site.node or n in set(site.proposal.inserted)]
    site.proposal.evidence["nodes_after"] = len(nodes)
    return "\n".join(n.format_node() or n.name for n in nodes)


def _near_miss(miss: NearMiss) -> Unmatched:
    return Unmatched(
        path=module_path_of(miss.node) or next((p for u in miss.node.users if (p := module_path_of(u))), ""),
        node=miss.node.name,
        stopped_at=miss.stopped_at,
        reason=miss.reason,
        source=source_of(miss.node),
        evidence=dict(miss.evidence),
    )


def _unsearched(context: PassContext) -> list[str]:
    return [
        f"not searched for spelled-out recurrences: {name or 'the graph'}: {why.text}"
        for name, why in context.unsearched
    ]


def _left_alone(left: LeftAlone) -> Site:
    kind = BY_NAME[left.kind]
    return Site(
        path=left.path,
        id=f"{left.path}/{left.kind}#0",
        kind=kind.name,
        rule=kind.rule,
        decay=kind.decay,
        form="call",
        call=left.call,
        verdict="left",
        reason=reason("NO_RULE" if left.rule_index is None else "RULE_NONE"),
        evidence={"rule_index": left.rule_index},
    )


def _unmatched(refused: Refused) -> Unmatched:
    return Unmatched(
        path="",
        node=refused.call,
        stopped_at="the call's arguments",
        reason=reason("CALL_OPTIONS", f"{refused.call}: {refused.why}"),
    )
