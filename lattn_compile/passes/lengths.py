"""Lengths: what the active phase says, as arguments of the recurrences that a graph spells out.

A captured call reads the phase while it is traced, and Dynamo makes the lengths inputs of the graph. Spelled-out code
reads nothing, so they become inputs here: placeholders at the end of the graph, operands of every region on the way to
a site. The backend hands in the tensors of the phase that is active when the graph runs (`backend._with_lengths`).

A phase counts the tokens of a sequence. Where the graph had to be cut into several recurrences, of which one continues
the state of another, the later one's lengths are those that are left (`_Flow`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile import phase
from lattn_compile.errors import LattnError, PhaseError, SequenceError
from lattn_compile.ops.validate import hint_of, told
from lattn_compile.passes.context import PassContext, SiteNode, bodies_of, graph_modules_of, shape_of, value_of
from lattn_compile.passes.spelled.aten import SHAPE_ONLY, name_of
from lattn_compile.passes.spelled.labels import same_size
from lattn_compile.passes.spelled.proposal import Proposal
from lattn_compile.passes.spelled.writer import Writer, fake_mode_of

PREFIX, SEQUENCE, POSITION, _ = phase.NAMES

_LOOPS = ("scan", "while_loop", "associative_scan")


def run(context: PassContext) -> None:
    if not phase.kind():
        return
    if not context.live:
        for site in context.sites:
            site.blocked = PhaseError(
                "lc.training_phase",
                got=f"a rewrite of a graph inside a phase ({site.id})",
                want="no active phase: the rewritten graph does not read one when it runs",
                remedy="Leave the phase for lc.rewrite and lc.inspect; use the torch.compile backend to train in one.",
            )
        return
    regions = _Regions(context.module)
    reached = [site for site in context.sites if any(True for _ in regions.ways(site.node.graph))]
    sites = [site for site in reached if site.proposal is not None]
    if not sites:
        return
    given = {name: x for name, x in zip(phase.NAMES, active(), strict=True) if x is not None}
    flow = _Flow(regions, reached)
    inputs = _Inputs(context, regions, given, sites)
    for site in sites:
        try:
            _place(site, flow, inputs, context.resumed)
        except LattnError as error:  # raised by `validate`, if the site is rewritten at all
            site.blocked = error
    _warn_about_states_from_outside(context, flow, sites)


def active() -> tuple[Tensor | None, ...]:
    """The active phase's tensors, in the order of `phase.NAMES`."""
    return *phase.current(), *phase.current_identity()


def _place(site: SiteNode, flow: _Flow, inputs: _Inputs, resumed: bool) -> None:
    assert site.proposal is not None
    inputs.check(site)
    before = flow.before(site)
    if flow.from_outside(site) and resumed:
        raise PhaseError(
            "lc.training_phase",
            got=f"{site.id}, whose state comes from before a graph break",
            want="a recurrence in one graph: the tokens before the break cannot be counted here",
            remedy="Mend the graph break (fullgraph=True shows it), or call lc.linear_attention there.",
        )
    graph = site.node.graph
    for name in inputs.given:
        if name == PREFIX and site.proposal.state_dtype is not None:
            continue  # the graph itself rounds its state at every token, and keeps doing so
        node = inputs.node(name, graph)
        if name in (PREFIX, SEQUENCE):
            node = _left(site, node, before, last=flow.is_last(site))
        elif name == POSITION and before:
            node = _moved(Writer(site.node, site.node), node, before, torch.ops.aten.add.Scalar)
        site.arguments[name] = node


def _left(site: SiteNode, node: fx.Node, before: list[Any], *, last: bool) -> fx.Node:
    """The lengths that are left for `site` after `before` tokens. What the op would refuse, lengths beyond the end of
    all tokens, is left for the op to refuse, in the last recurrence."""
    if last and not before:
        return node
    w = Writer(site.node, site.node)
    node = _moved(w, node, before, torch.ops.aten.sub.Scalar)
    most = None if last else w.size(_tokens(site))
    return w.call(torch.ops.aten.clamp.default, node, 0, most)


def _moved(w: Writer, node: fx.Node, by: list[Any], how: Any) -> fx.Node:
    for tokens in by:
        try:
            node = w.call(how, node, w.size(tokens))
        except LookupError as error:
            raise PhaseError(
                "lc.training_phase",
                got=f"a recurrence behind {tokens} tokens of another region of the graph",
                want="a number of tokens that the region it stands in knows",
                remedy="Compile with dynamic=False, or call lc.linear_attention there.",
            ) from error
    return node


def _tokens(site: SiteNode) -> Any:
    shape = shape_of(site.arguments["k"])
    assert shape is not None
    return shape[1]


# Regions.

_Way = tuple[fx.Node, ...]
"""How a graph is reached from the root: the nodes that call region after region. A shared region is reached in many."""


class _Regions:
    """Which nodes run the body of which region."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.root = module.graph
        self.callers: dict[fx.Graph, dict[fx.Node, None]] = {}
        self.bodies: dict[fx.Node, dict[fx.Graph, None]] = {}
        for graph_module in graph_modules_of(module):
            for node, body in bodies_of(graph_module):
                for user in node.users if node.op == "get_attr" else [node]:
                    self.callers.setdefault(body.graph, {})[user] = None
                    self.bodies.setdefault(user, {})[body.graph] = None

    def ways(self, graph: fx.Graph) -> Iterator[_Way]:
        """The ways from the root to a graph."""
        if graph is self.root:
            yield ()
        for caller in self.callers.get(graph, ()):
            for way in self.ways(caller.graph):
                yield (*way, caller)

    def loop_around(self, graph: fx.Graph) -> str | None:
        """The kind of a loop that a graph is the body of, near or far."""
        for way in self.ways(graph):
            for node in way:
                if _kind(node) in _LOOPS:
                    return _kind(node)
        return None


def _kind(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else str(node.target)


def _operands(region: fx.Node) -> list[Any]:
    """What a region's node hands to its body's placeholders, in order."""
    kind = _kind(region)
    if kind == "cond":
        return list(region.args[3])  # type: ignore[arg-type]
    return list(region.args[1 if kind == "tag_activation_checkpoint" else 2 :])


def _hand_in(region: fx.Node, operand: fx.Node) -> None:
    if _kind(region) == "cond":
        handed: Any = region.args[3]
        region.args = (*region.args[:3], type(handed)([*handed, operand]))
    else:
        region.args = (*region.args, operand)


def _inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


class _Inputs:
    """The phase's tensors as inputs of the graph, and of the regions on the way to a site."""

    def __init__(
        self, context: PassContext, regions: _Regions, given: dict[str, Tensor], sites: list[SiteNode]
    ) -> None:
        self.context, self.regions, self.given = context, regions, given
        self._known: dict[tuple[str, fx.Graph], fx.Node] = {}
        self._count = next((x.shape[0] for x in given.values() if x.dim()), None)
        self._mode = fake_mode_of(regions.root)
        # As the graph knows it: a symbol where the batch is one.
        self._sequences = next((n for s in sites if hint_of(n := _sequences(s)) == self._count), self._count)

    def check(self, site: SiteNode) -> None:
        """Raises PhaseError, SequenceError where the lengths cannot be those of a site."""
        loop = self.regions.loop_around(site.node.graph)
        if loop is not None:
            raise PhaseError(
                "lc.training_phase",
                got=f"{site.id}, one token in the body of a {loop} that is kept as a loop",
                want="a recurrence over all tokens: a loop's body does not know which token it is at",
                remedy="Call lc.linear_attention there, or leave the phase: all its tokens are then suffix.",
            )
        if self._count is not None and hint_of(_sequences(site)) != self._count:
            name = next(name for name, x in self.given.items() if x.dim())
            one = "" if name == "sequence_ids" else "one int for all, "
            raise SequenceError(
                name,
                got=f"{self._count} number{'s' if self._count > 1 else ''} in lc.training_phase",
                want=f"{told(_sequences(site))}, the sequences of {site.id} as its code lays them out",
                remedy=f"Give {one}one a sequence, or keep batch and heads on axes of their own in that layer.",
            )

    def node(self, name: str, graph: fx.Graph) -> fx.Node:
        if (name, graph) not in self._known:
            self._known[name, graph] = self._input(name, graph, self._fake(name))
            if graph is not self.regions.root:
                self._hand_down(name, graph)
        return self._known[name, graph]

    def _hand_down(self, name: str, graph: fx.Graph) -> None:
        for region in self.regions.callers[graph]:
            operand = self.node(name, region.graph)
            for body in self.regions.bodies[region]:
                if (name, body) not in self._known:  # another branch of a cond
                    self._known[name, body] = self._input(name, body, self._fake(name))
            _hand_in(region, operand)

    def _fake(self, name: str) -> Any:
        if (root := self._known.get((name, self.regions.root))) is not None:
            return value_of(root)
        real = self.given[name]
        if self._mode is None:
            return real
        with self._mode:
            shape = [self._sequences] if real.dim() else []
            return torch.empty(shape, dtype=real.dtype, device=real.device)  # type: ignore[arg-type]

    def _input(self, name: str, graph: fx.Graph, fake: Any) -> fx.Node:
        behind = _inputs_of(graph)
        with graph.inserting_after(behind[-1]) if behind else graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(f"lattn_{name}")
        node.meta["example_value"] = fake
        if graph is self.regions.root:
            node._dynamo_source = None  # type: ignore[attr-defined]  # as of an input that no user code names
            self.context.appended[name] = fake
        return node


def _sequences(site: SiteNode) -> Any:
    shape = shape_of(site.arguments["k"])
    assert shape is not None
    return shape[0]


# States.


@dataclass
class _Origin:
    """Where a site's first state comes from, on one way to the site.

    Attributes:
        earlier: the site whose last state it is, and the way on which that one ran.
        outside: whether it is an input of the whole graph, or a tensor that the graph holds.
        computed: the node that computes it from several values, if one does.
    """

    earlier: tuple[SiteNode, _Way] | None = None
    outside: bool = False
    computed: fx.Node | None = None


class _Flow:
    """Which sites continue the states of which."""

    def __init__(self, regions: _Regions, sites: list[SiteNode]) -> None:
        self.regions = regions
        self._finals: dict[fx.Node, SiteNode] = {}
        self._outputs: set[fx.Node] = set()
        for site in sites:
            spelled = site.proposal
            for node in site.output(1) if spelled is None else _finals(spelled):
                self._finals[node] = site
            self._outputs.update(site.output(0) if spelled is None else spelled.old)
        self._origins: dict[tuple[int, _Way], _Origin] = {}
        self._continued: set[int] = set()
        for site in sites:
            for way in regions.ways(site.node.graph):
                origin = self._origins[id(site), way] = self._origin(site, way)
                if origin.earlier is not None:
                    self._continued.add(id(origin.earlier[0]))

    def is_last(self, site: SiteNode) -> bool:
        return id(site) not in self._continued

    def from_outside(self, site: SiteNode) -> bool:
        return any(self._origins[id(site), way].outside for way in self.regions.ways(site.node.graph))

    def before(self, site: SiteNode) -> list[Any]:
        """Sizes that add up to the tokens of a sequence that other sites have processed when `site` begins.

        Raises PhaseError where they cannot be counted.
        """
        first, *others = [self._before(site, way) for way in self.regions.ways(site.node.graph)]
        if not all(same_size(sum(first), sum(other)) for other in others):
            raise PhaseError(
                "lc.training_phase",
                got=f"{site.id} in a region that serves several places, after different numbers of tokens",
                want="as many tokens before each of them",
                remedy="Take nested_compile_region away, or call lc.linear_attention there.",
            )
        return first

    def _before(self, site: SiteNode, way: _Way) -> list[Any]:
        if site.proposal is None:
            return []  # a call of its own, which counts from its own first token
        origin = self._origins[id(site), way]
        if origin.computed is not None:
            raise PhaseError(
                "lc.training_phase",
                got=f"{site.id}, whose first state is computed from several values ({origin.computed.name})",
                want="a state that is an input, zeros, or the last one of another recurrence",
                remedy="How many tokens went into it is not known here: call lc.linear_attention in that layer.",
            )
        if origin.earlier is None:
            return []
        earlier, there = origin.earlier
        return [*self._before(earlier, there), _tokens(earlier)]

    def _origin(self, site: SiteNode, way: _Way) -> _Origin:
        node: Any = site.arguments["initial_state"]
        while isinstance(node, fx.Node):
            if (earlier := self._finals.get(node)) is not None:
                return _Origin(earlier=(earlier, way))
            if node.op in ("placeholder", "get_attr") and not way:
                return _Origin(outside=True)
            above = self._above(node, way)
            if len(above) > 1:
                return _Origin(computed=node)
            node, way = above[0] if above else (None, way)
        return _Origin()

    def _above(self, node: fx.Node, way: _Way) -> list[tuple[fx.Node, _Way]]:
        """The tensors that a value is computed from, over the borders of regions. Outputs of a recurrence are no
        states."""
        if node in self._outputs or name_of(node) in SHAPE_ONLY:
            return []
        inputs = [(x, way) for x in node.all_input_nodes]
        if node.target is torch.ops.aten.where.ScalarOther:  # a state, and the mask that clears it
            inputs = [(x, way) for x in node.args[1:2] if isinstance(x, fx.Node)]
        inner = node.args[0] if node.target is operator.getitem else None
        if node.op == "placeholder":
            region = way[-1]
            if _kind(region) in _LOOPS:
                inputs = [(x, way[:-1]) for x in region.all_input_nodes]
            else:
                operand = _operands(region)[_inputs_of(node.graph).index(node)]
                inputs = [(operand, way[:-1])] if isinstance(operand, fx.Node) else []
        elif isinstance(inner, fx.Node) and inner in self.regions.bodies:
            inputs = []
            for body in self.regions.bodies[inner]:
                returned: Any = body.output_node().args[0]
                some = body.output_node().all_input_nodes if _kind(inner) in _LOOPS else [returned[node.args[1]]]
                inputs += [(x, (*way, inner)) for x in some if isinstance(x, fx.Node)]
        return [(x, at) for x, at in inputs if _holds_numbers(value_of(x))]


def _holds_numbers(x: Any) -> bool:
    return isinstance(x, (Tensor, list, tuple))  # of several outputs


def _finals(proposal: Proposal) -> list[fx.Node]:
    """Those of the spelled-out outputs that are the last state."""
    return [old for old, new in zip(proposal.old, proposal.new, strict=True) if _output_of(new) == 1]


def _output_of(node: Any) -> Any:
    """Which output of an op a node is a view or a cast of."""
    while isinstance(node, fx.Node) and node.target is not operator.getitem:
        node = node.args[0] if node.args else None
    return node.args[1] if isinstance(node, fx.Node) else None


def _warn_about_states_from_outside(context: PassContext, flow: _Flow, sites: list[SiteNode]) -> None:
    several = [s for s in sites if s.blocked is None and flow.from_outside(s)]
    if several:
        context.warnings.append(
            f"{len(several)} spelled-out recurrence(s) continue a state from outside the compiled graph: in a phase, "
            "the tokens of every call count from its own first one."
        )
