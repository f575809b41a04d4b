"""From rewritten sites to the report: the only place that knows both."""

from __future__ import annotations

from typing import Any

from lattn_compile.errors import reason
from lattn_compile.ops import dispatch
from lattn_compile.passes.capture import LeftAlone, Refused
from lattn_compile.passes.context import PassContext, SiteNode, shape_of, value_of
from lattn_compile.passes.recognize import overload_of
from lattn_compile.policy import Exact
from lattn_compile.recurrence import BY_NAME
from lattn_compile.report import Report, Site, Unmatched


def report_of(context: PassContext) -> Report:
    """The report of one graph after the passes ran."""
    recipes = {id(r): r for s in context.sites if (r := context.recipe or s.recipe) is not None}
    only = next(iter(recipes.values())) if len(recipes) == 1 else context.recipe
    return Report(
        sites=[_site(s, context.training) for s in context.sites] + [_left_alone(r) for r in context.left_alone],
        unmatched=[_unmatched(r) for r in context.refused],
        recipe=only.to_dict() if only is not None else None,
        notes=[*_prefill_note(context), *context.warnings],
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
    assert overload is not None
    arguments = site.arguments
    B, T, H, K = shape_of(arguments["k"]) or (None,) * 4
    _, _, HV, V = shape_of(arguments["v"]) or (None,) * 4
    before = after = None
    if isinstance(K, int) and isinstance(V, int) and isinstance(HV, int):
        state = arguments["initial_state"]
        dtype_bytes = value_of(state).element_size() if state is not None else 4
        before = HV * K * V * dtype_bytes
        exact = site.reason is not None or site.policy is None or isinstance(site.policy.write, Exact)
        after = before if exact else HV * site.policy.state.nbytes(K, V)  # type: ignore[union-attr]
    inputs = [a for a in site.node.args if a is not None]
    return Site(
        path=site.path,
        id=site.id,
        kind=site.kind.name,
        rule=site.kind.rule,
        decay=site.kind.decay,
        form="call",
        call=site.call,
        verdict="rewritten" if site.reason is None else "left",
        reason=site.reason,
        shapes={"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V},
        policy=site.policy.to_dict() if site.policy is not None else None,
        op=overload._schema.name,
        kernel=dispatch.choose(
            overload._schema.name.removeprefix("lattn::"), str(site.node.kwargs.get("implementation", "auto"))
        ),
        state_bytes_before=before,
        state_bytes_after=after,
        source=site.source,
        folded=tuple(site.folded),
        autograd_nodes=1 if training else 0,
        residual_count=len(inputs) if training else 0,
        evidence=_evidence(site),
        graph_before=site.before,
        graph_after=site.node.format_node(),
    )


def _evidence(site: SiteNode) -> dict[str, Any]:
    return {"captured": site.call, "form": site.form, "rule_index": site.rule_index}


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
