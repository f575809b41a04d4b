"""Discover: recurrences that the graph spells out, in a functional copy of it.

The copy takes the graph's place only if it holds one. What is found stands in the copy as an exact op beside the original
spelling, checked in float64, until `replace` puts it in use.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from lattn_compile.errors import reason
from lattn_compile.passes import capture
from lattn_compile.passes.context import PassContext
from lattn_compile.passes.normalize import functional_copy
from lattn_compile.passes.spelled.proposal import NearMiss, Proposal, withdraw
from lattn_compile.passes.spelled.search import in_one_section, region_of, search
from lattn_compile.passes.spelled.verify import verify
from lattn_compile.recurrence import classify

MAX_TEXT = 400  # lines of a site's subgraph that go into the report


def run(context: PassContext) -> None:
    copy = functional_copy(context.module)
    context.unsearched = copy.refused
    found = search(copy.graphs)
    context.misses += found.misses
    for proposal in found.proposals:
        if (miss := _confirm(proposal, context)) is None:
            _describe(proposal)
            context.proposals[proposal.op] = proposal
        else:
            withdraw(proposal)
            context.misses.append(miss)
    if context.proposals:
        context.module = copy.module


def _confirm(proposal: Proposal, context: PassContext) -> NearMiss | None:
    """The self-check; what came of it goes into the evidence."""
    if not in_one_section(proposal):
        return NearMiss(proposal.anchor, "its nodes stand in different grad modes", reason("GRAD_MODE"))
    if not context.verify:
        proposal.evidence["self_check"] = {"verified": False, "skipped": True}
        return None
    verdict = verify(proposal.step or proposal)
    if verdict.ok and proposal.step is not None:
        # A whole loop may hold what the check does not follow; what it does follow has to agree.
        whole = verify(proposal)
        verdict = whole if "differs" in whole.detail else verdict
    errors: dict[str, Any] = verdict.evidence.get("max_relative_error") or {}
    proposal.evidence["self_check"] = {
        "verified": verdict.ok,
        "max_error": errors.get("value"),
        "max_gradient_error": errors.get("gradient"),
        "shapes": verdict.evidence.get("shapes"),
        "trials": verdict.evidence.get("trials"),
        "seconds": verdict.evidence.get("seconds", 0.0),
        "cached": bool(verdict.evidence.get("cached", False)),
    }
    if verdict.ok:
        return None
    return NearMiss(proposal.anchor, verdict.detail, reason("SELF_CHECK", verdict.detail), proposal.evidence)


def _describe(proposal: Proposal) -> None:
    """Tag the op for the passes behind, and keep the text of what it stands for."""
    kind = classify(proposal.rule, proposal.decay)
    proposal.op.meta["custom"] = {capture.META: f"{kind.name}:{spelling(proposal.form)}"}
    before = region_of(proposal)
    proposal.before = _text(before)
    proposal.evidence |= {"form": proposal.form, "nodes_before": len(before), "frontier": [n.name for n in proposal.frontier]}


def spelling(form: str) -> str:
    """How the tag of an op says that it was spelled out."""
    return f"<{form}>"


def form_of(call: str) -> str | None:
    """The form in a tag made by `spelling`, None for the name of a library function."""
    return call[1:-1] if call.startswith("<") and call.endswith(">") else None


def _text(nodes: list[fx.Node]) -> str:
    lines = [node.format_node() or node.name for node in nodes]
    if len(lines) > MAX_TEXT:
        half = MAX_TEXT // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more nodes ...", *lines[-half:]]
    return "\n".join(lines)
