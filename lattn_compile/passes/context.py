"""What passes hand to one another: the graph, the recipe, and the sites found so far."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lattn_compile.errors import LattnError, Reason
from lattn_compile.passes.capture import LeftAlone, Refused
from lattn_compile.passes.spelled.proposal import NearMiss, Proposal
from lattn_compile.policy import Exact, Policy, Recipe
from lattn_compile.recurrence import Kind


@dataclass
class SiteNode:
    """One recurrence in the graph.

    `arguments` are the op's, by schema name, defaults filled in, and are what `replace` writes back: a pass that
    changes one changes the op. `form` is "chunk" or "recurrent". `other_paths` are those of further layers that run the
    same node: a region's body may serve several (`nested_compile_region`). `proposal` is set for a recurrence that the
    graph spells out: its op stands beside the spelling until `replace` puts it in use. `blocked` is raised if the site
    is rewritten: the active phase cannot reach it.
    """

    node: fx.Node
    kind: Kind
    form: str
    call: str
    path: str
    source: str | None
    arguments: dict[str, Any]
    recipe: Recipe | None = None
    policy: Policy | None = None
    rule_index: int | None = None
    reason: Reason | None = None
    folded: list[str] = field(default_factory=list)
    other_paths: tuple[str, ...] = ()
    id: str = ""
    before: str | None = None
    proposal: Proposal | None = None
    blocked: LattnError | None = None

    @property
    def all_prefix(self) -> bool:
        """Whether every token is exact prefix whatever the policy: a library's chunk form outside a phase.

        `lc.linear_attention` is suffix without a phase (semantics §4) and says so with prefix lengths of its own.
        """
        return self.form == "chunk" and self.arguments["prefix_lengths"] is None

    @property
    def rewritten(self) -> bool:
        """Whether an op of ours stands there by a policy, be it `exact`."""
        return self.reason is None and self.policy is not None

    @property
    def op_quantizes(self) -> bool:
        """Whether the op that stands there now rounds its state by a policy."""
        return self.rewritten and not isinstance(self.policy.write, Exact)  # type: ignore[union-attr]

    def output(self, index: int) -> list[fx.Node]:
        """Nodes that take the op's output `index`."""
        return [u for u in self.node.users if u.target is operator.getitem and u.args[1] == index]

    def used(self, index: int) -> bool:
        """Whether anything reads output `index`. A user that is no `getitem` takes them all."""
        whole = any(u.target is not operator.getitem for u in self.node.users)
        return whole or any(u.users for u in self.output(index))


@dataclass
class PassContext:
    """One graph on its way through the passes.

    Attributes:
        module: the GraphModule or ExportedProgram's module being rewritten in place.
        recipe: policies by path; None leaves every site exact, as captured.
        training: whether the graph will be differentiated.
        left_alone, refused: known calls that were not captured while this graph was traced.
        warnings: what would otherwise be silent.
        idle_rules: by number, rules of `recipe` without a site here, in words.
        verify: whether rewrites of spelled-out recurrences are checked in float64 first.
        proposals: spelled-out recurrences, by the op that stands for them. misses: what looked like one.
        unsearched: parts of the graph that could not be searched for them, and why.
        live: whether the graph will be run by the backend, which hands in the phase that is active then.
        resumed: whether it is the rest of a frame behind a graph break.
        packed: recurrences whose ops stand on packed states (`QuantizedState`), as captured; only the report sees them.
        appended: by name, the fake values of the phase's tensors that became inputs at the end of the graph, in order.
    """

    module: fx.GraphModule
    recipe: Recipe | None
    training: bool = False
    left_alone: list[LeftAlone] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    sites: list[SiteNode] = field(default_factory=list)
    packed: list[SiteNode] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle_rules: dict[int, str] = field(default_factory=dict)
    verify: bool = True
    proposals: dict[fx.Node, Proposal] = field(default_factory=dict)
    misses: list[NearMiss] = field(default_factory=list)
    unsearched: list[tuple[str, Reason]] = field(default_factory=list)
    live: bool = False
    resumed: bool = False
    appended: dict[str, Any] = field(default_factory=dict)


def nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node, those of region bodies (activation checkpoints, `cond`, `scan`, autocast and grad-mode regions of an
    exported program, ...) included, each body once, where it is first named."""
    seen: set[int] = set()

    def walk(current: fx.GraphModule) -> Iterator[fx.Node]:
        seen.add(id(current))
        bodies = dict(bodies_of(current))
        for node in current.graph.nodes:
            if node in bodies and id(bodies[node]) not in seen:
                yield from walk(bodies[node])
            yield node

    yield from walk(module)


def graph_modules_of(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`module` and the bodies of its regions, each once."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        for _, body in bodies_of(waiting.pop()):
            if id(body) not in found:
                found[id(body)] = body
                waiting.append(body)
    yield from found.values()


def bodies_of(module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The nodes of `module` that name a region's body, and the bodies."""
    found = []
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            body: Any = module
            for name in str(node.target).split("."):
                body = getattr(body, name, None)
            if isinstance(body, fx.GraphModule):
                found.append((node, body))
    return found


def value_of(node: Any) -> Any:
    """The fake value of a node of a Dynamo graph (`example_value`) or ATen graph (`val`); a constant is itself."""
    if isinstance(node, fx.Node):
        return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")
    return node


def shape_of(node: Any) -> tuple[Any, ...] | None:
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
