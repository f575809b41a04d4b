"""Search a functional ATen graph for spelled-out recurrences."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from lattn_compile.passes.spelled.apart import Apart, put_together, take_einsums_apart, take_lerps_apart
from lattn_compile.passes.spelled.associative import find_associative_scans
from lattn_compile.passes.spelled.aten import Index, name_of
from lattn_compile.passes.spelled.build import build, role_nodes
from lattn_compile.passes.spelled.canonical import canonicalize
from lattn_compile.passes.spelled.chain import Chain, Link, find_chains
from lattn_compile.passes.spelled.chunkform import find_chunk_forms
from lattn_compile.passes.spelled.labels import is_one, size_of
from lattn_compile.passes.spelled.lift import as_before
from lattn_compile.passes.spelled.proposal import NearMiss, NoMatch, Proposal, withdraw
from lattn_compile.passes.spelled.scan import is_scan, is_while_loop, rewrite_scan, rewrite_while_loop
from lattn_compile.passes.spelled.stacked_reads import StackedRead, put_reads_together, take_reads_apart, unused
from lattn_compile.passes.spelled.stacks import simplify_stacks
from lattn_compile.passes.spelled.writer import Writer, keep_gradient, value

__all__ = ["Found", "commit", "find", "region_of", "search", "sections_of", "tidy"]


@dataclass
class Found:
    """Proposals, standing in their graphs, near misses, updates of states that are none of ours, and what was taken
    apart for the search."""

    proposals: list[Proposal] = field(default_factory=list)
    misses: list[NearMiss] = field(default_factory=list)
    refused: set[fx.Node] = field(default_factory=set)
    apart: list[Apart] = field(default_factory=list)
    stacked: list[StackedRead] = field(default_factory=list)


def search(graphs: list[fx.GraphModule]) -> Found:
    """Every form, in a graph and the bodies of its regions. What is proposed stands in the graphs, unused."""
    found = Found()
    bodies: set[int] = set()
    for gm in graphs:  # a loop is looked into from outside
        for node in gm.graph.nodes:
            if is_scan(node) or is_while_loop(node):
                bodies |= {id(getattr(gm, str(x.target))) for x in node.all_input_nodes if x.op == "get_attr"}
    for gm in graphs:
        if id(gm) not in bodies:
            _search(gm, found)
    return found


def _search(gm: fx.GraphModule, found: Found) -> None:
    mine = find(gm)
    for node in [n for n in gm.graph.nodes if is_scan(n) or is_while_loop(n)]:
        _sort(mine, _through_loop(gm, node, mine))
    # What is a site already, and what was looked at as a step and refused, is not looked at as a chunk form.
    taken = {n for p in mine.proposals for n in region_of(p)} | mine.refused
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "lattn":
            taken |= {node, *node.users}
    mine.apart += take_einsums_apart(gm.graph, taken.union(*(p.frontier for p in mine.proposals)))
    mine.misses += find_associative_scans(Index(gm.graph), taken)
    tokens = {n for m in mine.misses for n in m.token}
    for outcome in find_chunk_forms(gm, taken):
        # That the products of a token that was refused are no chunk form either is no news.
        if isinstance(outcome, Proposal) or tokens.isdisjoint({outcome.node, *outcome.token}):
            _sort(mine, outcome)
    inside = {n for p in mine.proposals if p.form == "chunk" for n in region_of(p)}
    mine.misses = [m for m in mine.misses if m.node not in inside and inside.isdisjoint(m.token)]
    used = {n for p in mine.proposals for n in (*region_of(p), *p.frontier, *p.inserted)}
    put_together(mine.apart, used)
    put_reads_together(mine.stacked, used)
    found.proposals += mine.proposals
    found.misses += mine.misses


def _sort(found: Found, outcome: Proposal | NearMiss | None) -> None:
    if isinstance(outcome, Proposal):
        found.proposals.append(outcome)
    elif outcome is not None:
        found.misses.append(outcome)


def _through_loop(gm: fx.GraphModule, node: fx.Node, found: Found) -> Proposal | NearMiss | None:
    """A loop of one step becomes one op, or the step in its body is replaced; of several steps, each is."""

    def match_body(body: fx.GraphModule) -> Proposal | NearMiss | None:
        inside = find(body, in_loop=True)
        found.apart += inside.apart
        found.stacked += inside.stacked
        if len(inside.proposals) == 1:
            return inside.proposals[0]
        for proposal in inside.proposals:
            proposal.form = "scan"
        found.proposals += inside.proposals
        if inside.misses or inside.proposals:
            return inside.misses[0] if inside.misses else None
        return _chunk_in_loop(body)

    return (rewrite_scan if is_scan(node) else rewrite_while_loop)(gm, node, match_body)


def _chunk_in_loop(body: fx.GraphModule) -> NearMiss | None:
    """A loop over chunks, told: its tokens are on two axes, and the state goes from one call to the next."""
    miss: NearMiss | None = None
    for outcome in find_chunk_forms(body, set()):
        node = outcome.node if isinstance(outcome, NearMiss) else outcome.anchor
        if isinstance(outcome, Proposal):
            withdraw(outcome)
        if isinstance(outcome, Proposal) or outcome.reason.code == "CHUNK_NOT_EQUAL":  # sums made outside are none here
            outcome = NoMatch("CHUNK_INPUTS", "a loop runs over chunks of its tokens").at(node)
        miss = miss or outcome
    return miss


def find(gm: fx.GraphModule, *, in_loop: bool = False) -> Found:
    """Steps and loops of one graph. What it proposes stands in the graph, unused."""
    found = Found()
    canonicalize(gm)
    found.apart = take_lerps_apart(gm.graph)
    found.stacked = take_reads_apart(gm.graph)
    index = Index(gm.graph)
    index.hidden = unused(one.whole for one in found.stacked)
    chains, found.misses, found.refused = find_chains(index, in_loop=in_loop)
    chains += _with_ones(index, chains, found, in_loop)
    for chain in chains:
        for piece in _without_feedback(index, chain):
            try:
                found.proposals.append(build(index, piece))
            except NoMatch as error:
                found.refused |= {n for link in piece.links for n in link.step.path}
                found.misses.append(error.at(piece.links[-1].step.update, steps=len(piece.links)))
    return found


def _with_ones(index: Index, known: list[Chain], found: Found, in_loop: bool) -> list[Chain]:
    """Chains whose K or V is 1. Looked for once the others are known, of which their axes could be broadcast ones."""
    taken = {n for chain in known for link in chain.links for n in link.step.path}
    index.ones = True
    more, misses, refused = find_chains(index, in_loop=in_loop)
    index.ones = False
    chains = [
        chain
        for chain in more
        if any(is_one(size_of(axis)) for axis in (chain.links[0].step.key, chain.links[0].step.column))
        and not any(link.step.path & taken for link in chain.links)
    ]
    mine = {n for chain in chains for link in chain.links for n in link.step.path}
    told = {miss.node for miss in found.misses} | taken | mine
    found.misses = [m for m in found.misses if m.node not in mine]
    found.misses += [m for m in misses if m.node not in told and any(is_one(n) for n in value(m.node).shape[-2:])]
    found.refused = (found.refused | refused) - mine
    return chains


def _without_feedback(index: Index, chain: Chain) -> list[Chain]:
    """A chain cut before every token whose inputs depend on an earlier token's output."""
    needed = [max((index.order[n] for n in role_nodes(link)), default=0) for link in chain.links]
    last = max(needed)
    pieces: list[Chain] = []
    links: list[Link] = []
    below: set[fx.Node] = set()
    root = chain.root
    for link in chain.links:
        if links and any(n in below for n in role_nodes(link)):
            pieces.append(Chain(links, root, chain.state_dtype))
            root, links, below = link.step.root, [], set()
        links.append(link)
        _descend(index, [link.step.update, *([link.read.node] if link.read else [])], last, below)
    return [*pieces, Chain(links, root, chain.state_dtype)]


def _descend(index: Index, nodes: list[fx.Node], last: int, below: set[fx.Node]) -> None:
    waiting = [n for n in nodes if n not in below]
    below.update(waiting)
    while waiting:
        for user in waiting.pop().users:
            if user not in below and index.order.get(user, last + 1) <= last:
                below.add(user)
                waiting.append(user)


def restore_order(graph: fx.Graph) -> None:
    """Stable topological order: a node that came before one of its inputs moves behind it."""
    placed: set[fx.Node] = set()
    blocked: dict[fx.Node, list[fx.Node]] = {}
    cursor: fx.Node | None = None

    def place(node: fx.Node) -> None:
        nonlocal cursor
        waiting = [node]
        while waiting:
            current = waiting.pop()
            missing = next((x for x in current.all_input_nodes if x not in placed), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(current)
                continue
            if cursor is not None and current.prev is not cursor:
                cursor.append(current)
            cursor = current
            placed.add(current)
            waiting.extend(reversed(blocked.pop(current, [])))

    for node in list(graph.nodes):
        place(node)


def region_of(proposal: Proposal) -> list[fx.Node]:
    """The spelled-out nodes between a proposal's frontier and what it replaces, in graph order."""
    frontier, inserted = set(proposal.frontier), set(proposal.inserted)
    seen: set[fx.Node] = set()
    waiting = [n for n in proposal.old if n not in frontier]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(x for x in node.all_input_nodes if x not in frontier and x.op == "call_function")
    return sorted(seen - inserted)


def sections_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The sections that switches of the grad mode cut a graph into."""
    return Index(graph).section


def commit(proposal: Proposal) -> dict[fx.Node, fx.Node]:
    """Put the replacement in use: what stands for what. The old nodes stay, for `tidy` to take away.

    What leaves the graph keeps the strides it had: a cache of others would be compiled for anew.
    """
    done: dict[fx.Node, fx.Node] = {}
    inserted = set(proposal.inserted)
    for old, new in zip(proposal.old, proposal.new, strict=True):
        if any(u.op == "output" or name_of(u) == "aten::copy_" for u in old.users):
            w = Writer(new.next, new)
            new = as_before(w, new, old) or new
            proposal.inserted += w.inserted
            inserted.update(w.inserted)
        keep_gradient(new, old)
        # What was inserted may read a size off what it replaces.
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inserted)
        done[old] = new
    if proposal.step is not None:
        _erase_loop(proposal.anchor)
    return done


def _erase_loop(loop: fx.Node) -> None:
    """Takes a loop away that one op stands for. Dead code elsewhere may be an effect; this is known to be none, and
    autograd would refuse it where its carries are its inputs."""
    for user in list(loop.users):
        if user.target is operator.getitem and not user.users:
            loop.graph.erase_node(user)
    if not loop.users:
        loop.graph.erase_node(loop)


def tidy(gm: fx.GraphModule, ops: list[fx.Node]) -> None:
    """Order the graph again, drop what nothing uses, and put together at once what a loop did token by token."""
    graph = gm.graph
    restore_order(graph)
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default  # the outputs' strides are others than before
    graph.eliminate_dead_code(_has_effect)
    outputs = [u for op in ops for u in op.users if name_of(u) == "getitem"]
    simplify_stacks(gm, outputs)
    graph.eliminate_dead_code(_has_effect)
    gm.delete_all_unused_submodules()


def _has_effect(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        # A random op that nobody uses still moves the generator.
        return (
            target._schema.is_mutable
            or "assert" in target._schema.name
            or torch.Tag.nondeterministic_seeded in target.tags
        )
    return isinstance(target, torch._ops.HigherOrderOperator) or bool(node.is_impure())
