"""What the matchers hand on: a proposed replacement, or a near miss and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lattn_compile.errors import Reason, reason

CONSTANT = "lattn_constant"
"""Key of a placeholder's metadata for the literal that it stands for, while a graph is searched."""

OUTER = "lattn_outer"
"""Key of the metadata of an input of a loop's body, while the body is searched: the value outside that it is, or that
it is a slice of (which then has one axis more)."""


@dataclass
class Proposal:
    """A recurrence found in a functional ATen graph, and its replacement, standing in the graph but not yet in use.

    `old[i]` and `new[i]` are claimed to be the same function of `frontier`; nothing reads `new[i]` yet. Committing
    replaces every use of `old[i]`; withdrawing erases `inserted`.

    Attributes:
        form: step | loop | chunk | scan.
        rule, decay: as in `recurrence.Kind`.
        anchor: the node whose metadata speak for the site (module path, source line): the last update of the state.
        op: the `lattn::` node, an exact op.
        frontier: nodes whose values are taken as given; every path from a graph input to `old` or `new` passes one, or
            starts at a constant.
        old, new: the outputs and what replaces them, pairwise; shapes and dtypes equal.
        inserted: every node that was inserted, in graph order.
        roles: values by role, before they were brought into the op's layout: q, k `[B, HV, K]` and so on in step form.
        domains: how random values for a frontier node are drawn when the claim is tested: "log_decay" (<= 0), "decay"
            (in (0, 1)), "beta" (in (0, 1)), "key" (unit norm over its last axis); others are standard normal.
        state_dtype: dtype in which the graph itself stores the state between tokens, if lower than it computes in.
        evidence: what the report shows. before: text of the spelled-out subgraph.
        step: of a scan that becomes one op: the proposal for one token, standing in the scan's body.
    """

    form: str
    rule: str
    decay: str
    anchor: fx.Node
    op: fx.Node
    frontier: list[fx.Node]
    old: list[fx.Node]
    new: list[fx.Node]
    inserted: list[fx.Node]
    roles: dict[str, fx.Node | None] = field(default_factory=dict)
    domains: dict[fx.Node, str] = field(default_factory=dict)
    state_dtype: torch.dtype | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    before: str = ""
    step: Proposal | None = None


@dataclass
class NearMiss:
    """Something that looked like a recurrence and is left as it is.

    Attributes:
        node: where the match stopped (or the state update it began at).
        stopped_at: how far it came, in words a kernel engineer understands.
        reason: a catalogued reason (`errors.REASONS`).
        token: nodes between the state and its update, where it is a token that was refused.
    """

    node: fx.Node
    stopped_at: str
    reason: Reason
    evidence: Mapping[str, Any] = field(default_factory=dict)
    token: frozenset[fx.Node] = field(default=frozenset(), repr=False, compare=False)


class NoMatch(Exception):
    """Raised inside a matcher to leave it; caught by whoever tried the candidate."""

    def __init__(self, code: str, stopped_at: str, node: fx.Node | None = None) -> None:
        super().__init__(f"{code}: {stopped_at}")
        self.code, self.stopped_at, self.node = code, stopped_at, node

    def at(self, node: fx.Node, **evidence: Any) -> NearMiss:
        return NearMiss(self.node or node, self.stopped_at, reason(self.code, self.stopped_at), evidence)


def withdraw(proposal: Proposal) -> None:
    """Erase what a proposal inserted; the graph is as before."""
    for node in reversed(proposal.inserted):
        node.graph.erase_node(node)
    proposal.inserted.clear()
    if proposal.step is not None:
        withdraw(proposal.step)
