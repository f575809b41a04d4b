"""Discover: recurrences that the graph spells out, in a functional copy of it.

The copy takes the graph's place only if it holds one. What is found stands in the copy as an exact op beside the
original spelling, checked in float64, until `replace` puts it in use.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from lattn_compile.errors import reason
from lattn_compile.passes import capture
from lattn_compile.passes.context import PassContext
from lattn_compile.passes.devmap import without_vmap
from lattn_compile.passes.normalize import functional_copy
from lattn_compile.passes.recognize import module_path_of
from lattn_compile.passes.spelled.aten import widens
from lattn_compile.passes.spelled.chunk_clamps import restore_clamps
from lattn_compile.passes.spelled.prefilter import may_hold_a_recurrence
from lattn_compile.passes.spelled.proposal import NearMiss, Proposal, withdraw
from lattn_compile.passes.spelled.ranges import interval
from lattn_compile.passes.spelled.search import region_of, search, sections_of
from lattn_compile.passes.spelled.verify import verify
from lattn_compile.passes.spelled.writer import value
from lattn_compile.recurrence import classify

log = logging.getLogger("lattn_compile")

MAX_TEXT = 400  # lines of a site's subgraph that go into the report


def run(context: PassContext) -> None:
    module = without_vmap(context.module)
    if not may_hold_a_recurrence(module):
        return
    copy = functional_copy(module)
    context.unsearched = copy.refused
    try:
        found = search(copy.graphs)
    except Exception as error:  # a fault of ours must not break a model that has nothing to do with it
        log.exception("the search for spelled-out recurrences failed")
        context.unsearched.append(("", reason("SEARCH_FAILED", f"{type(error).__name__}: {error}")))
        context.warnings.append(context.unsearched[-1][1].text)
        return
    context.misses += found.misses
    sections: dict[fx.Graph, dict[fx.Node, int]] = {}
    for proposal in found.proposals:
        if _left_alone(proposal, context):
            withdraw(proposal)
            continue
        _allow_growth(proposal)
        graph = proposal.op.graph
        if graph not in sections:
            sections[graph] = sections_of(graph)
        if (miss := _confirm(proposal, context, sections[graph])) is None:
            _describe(proposal)
            context.proposals[proposal.op] = proposal
        else:
            withdraw(proposal)
            context.misses.append(miss)
    for searched in copy.graphs:
        restore_clamps(searched.graph)
    if context.proposals:
        context.module = copy.module


def _left_alone(proposal: Proposal, context: PassContext) -> bool:
    """Whether this is the body of a known call that the recipe wants left alone, which was traced as it is."""
    path = module_path_of(proposal.anchor)
    return bool(path) and any(f".{left.path}".endswith(f".{path}") for left in context.left_alone)


def _allow_growth(proposal: Proposal) -> None:
    """The op refuses decays greater than 1, mistakes in a call of it; what a graph spells out may have them."""
    g = proposal.op.args[3]
    if isinstance(g, fx.Node) and interval(g)[1] > 0.0:
        proposal.op.kwargs = {**proposal.op.kwargs, "growth": True}


def _confirm(proposal: Proposal, context: PassContext, sections: dict[fx.Node, int]) -> NearMiss | None:
    """The self-check; what came of it goes into the evidence."""
    if len({sections[n] for n in (*region_of(proposal), proposal.op)}) > 1:
        return NearMiss(proposal.anchor, "its nodes stand in different grad modes", reason("GRAD_MODE"))
    if proposal.form == "chunk" and (low := _low_precision(proposal)) is not None:
        detail = f"{low.name} is {value(low).dtype}"
        return NearMiss(low, detail, reason("ARITHMETIC_DTYPE", detail), proposal.evidence)
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


def _low_precision(proposal: Proposal) -> fx.Node | None:
    """A value inside a chunk form that is rounded below float32, which the check in float64 does not see.

    The casts of the outputs are no part of it.
    """
    region = region_of(proposal)
    inside = set(region)
    for node in reversed(region):
        v = value(node)
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            continue
        source = value(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else v
        rounds = isinstance(source, torch.Tensor) and source.is_floating_point() and not widens(source.dtype, v.dtype)
        if v.dtype in (torch.float32, torch.float64) and not rounds:
            continue
        if node in proposal.old or all(user not in inside for user in node.users):
            inside.discard(node)  # of an output, or what leads only to one
            continue
        return node
    return None


def _describe(proposal: Proposal) -> None:
    """Tag the op for the passes behind, and keep the text of what it stands for."""
    kind = classify(proposal.rule, proposal.decay)
    proposal.op.meta["custom"] = {capture.META: f"{kind.name}:{spelling(proposal.form)}"}
    before = region_of(proposal)
    proposal.before = _text(before)
    proposal.evidence |= {
        "form": proposal.form,
        "nodes_before": len(before),
        "frontier": [n.name for n in proposal.frontier],
    }


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
