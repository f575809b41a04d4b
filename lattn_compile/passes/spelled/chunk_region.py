"""Where a chunk form stands in a graph: its seeds, its outputs, and the whole-sequence tensors it is made from.

A chunk form mixes tokens by products of two sequences, cumulative sums of a decay and triangular systems. Those are
the seeds. Outputs are found walking down from the seeds: the first place where all that is still needed of what the
seeds reach is o and perhaps the last state. Inputs are found walking up from the outputs, to nodes that hold every
token once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_clamps import find_clamps
from lattn_compile.passes.spelled.chunk_ops import (
    CASTS,
    LAYOUT,
    PADS,
    PICKS,
    PRODUCTS,
    SOLVES,
    STEPS,
    WRITES,
    Constants,
    alive_nodes,
    is_analytic,
    is_number,
    sizes_of,
    sources,
    users_of,
)
from lattn_compile.passes.spelled.chunk_sums import find_row_sums
from lattn_compile.passes.spelled.chunk_tables import find_tables
from lattn_compile.passes.spelled.chunk_views import Sizes, state_views, views
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.writer import value

if TYPE_CHECKING:
    from lattn_compile.passes.spelled.chunk_roles import Roles

_REACH = 8
"""Steps between a product of two sequences and the contraction it is read by."""

_READS = PRODUCTS | {"sum"}
_MASKS = ("tril", "triu", "where", "masked_fill")

_EXITS = 12
"""Candidate output sets that are looked at per region."""

_VIEWS = 3
"""How many times as many may be looked at where some are views of others."""


@dataclass
class Boundary:
    """Between the graph and a region.

    Attributes:
        tokens: nodes that hold every token once, in graph order.
        states: nodes without a token axis that have the size of a state.
        statics: further inputs, which no token reaches: decays of a head, for instance.
        interior: nodes of the region that are no constants.
        roles: what they were found to be.
    """

    sizes: Sizes
    tokens: list[fx.Node] = field(default_factory=list)
    states: list[fx.Node] = field(default_factory=list)
    statics: list[fx.Node] = field(default_factory=list)
    interior: set[fx.Node] = field(default_factory=set)
    roles: Roles | None = None


class Survey:
    """One look at a graph: order, what is alive, what is constant, and the seeds by region."""

    def __init__(self, graph: fx.Graph, taken: set[fx.Node]) -> None:
        self.clamps = find_clamps(graph)
        self.sums = find_row_sums(graph)
        self.nodes = list(graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.alive = (alive_nodes(graph) - self.sums.hidden) | set(self.sums.products)
        self.constants = Constants()
        self.taken = taken
        self.proposed: set[fx.Node] = set()  # inside of the forms that were found so far
        self.headless: set[fx.Node] = set()  # of the boundary that is looked for: tokens without a head

    # ---- seeds

    def groups(self) -> list[list[fx.Node]]:
        """Seeds that belong together: of one module, connected by analytic operators. Regions in graph order."""
        parent: dict[int, int] = {}

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        label: dict[fx.Node, int] = {}
        seeds: list[fx.Node] = []
        for i, node in enumerate(self.nodes):
            if node.op != "call_function" or node not in self.alive or node in self.taken:
                continue
            name = short_name(node)
            if not is_analytic(node):
                continue
            found = {root(label[n]) for n in sources(node) if n in label and _path(n) == _path(node)}
            if self._is_seed(node, name):
                seeds.append(node)
                parent[i] = i
                found.add(i)
            if found:
                first = min(found)
                for other in found:
                    parent[other] = first
                label[node] = first
        groups: dict[int, list[fx.Node]] = {}
        for node in seeds:
            groups.setdefault(root(label[node]), []).append(node)
        return list(groups.values())

    def _is_seed(self, node: fx.Node, name: str) -> bool:
        if name in SOLVES or name == "cumprod":
            return not self.is_constant(node)
        if name == "cumsum":
            if self.is_constant(node):
                return False
            return self._reaches(node, ("exp", "exp2")) or (_is_outer(sources(node)[0]) and self._reaches(node, _READS))
        return name in PRODUCTS and self.is_of_sequences(node) and self._reaches(node, PRODUCTS | SOLVES)

    def is_of_sequences(self, node: fx.Node) -> bool:
        """Whether a product is one of two values of the graph, none of them a weight."""
        factors = [n for n in sources(node) if not self.is_constant(n)]
        return len(factors) >= 2 and not any(map(_is_weight, factors))

    def _reaches(self, node: fx.Node, names: Sequence[str] | frozenset[str]) -> bool:
        """Whether products and layout alone lead from a node to one of these operators, in a few steps."""
        near, seen = [node], {node}
        for _ in range(_REACH):
            near = self._next(near, seen)
            if any(short_name(u) in names for u in near):
                return True
            near = [u for u in near if short_name(u) in STEPS]
            if not near:
                return False
        return False

    def _next(self, nodes: Sequence[fx.Node], seen: set[fx.Node]) -> list[fx.Node]:
        """What reads the values of nodes, in whatever arrangement: an einsum is taken apart into many views."""
        found: list[fx.Node] = []
        waiting = list(nodes)
        while waiting:
            for user in users_of(waiting.pop(), self.alive):
                if user not in seen:
                    seen.add(user)
                    (waiting if short_name(user) in LAYOUT else found).append(user)
        return found

    def masks_scores(self, node: fx.Node) -> bool:
        """Whether a product of two sequences is masked, as a causal form is, before it meets a third."""
        if short_name(node) not in PRODUCTS:
            return False
        near, seen, masked = [node], {node}, False
        for _ in range(_REACH):
            near = self._next(near, seen)
            if masked and any(short_name(u) in PRODUCTS for u in near):
                return True
            near = [u for u in near if short_name(u) in STEPS]
            masked = masked or any(self.is_masking(u) for u in near)
        return False

    def is_masking(self, node: fx.Node) -> bool:
        factors = [n for n in sources(node) if sizes_of(n) is not None]
        tables = any(value(n).dtype == torch.bool or self.is_constant(n) for n in factors)
        return short_name(node) in _MASKS or (short_name(node) == "mul" and tables and len(factors) > 1)

    def is_constant(self, node: fx.Node) -> bool:
        return node in self.constants

    # ---- outputs

    def exits(self, core: set[fx.Node], *, early: bool) -> Iterator[list[fx.Node]]:
        """Sets of one or two nodes that are all that is still needed below the core, first ones first.

        With `early`, those that come before the core's last node: below the part of it that is above them.
        """
        last = max(self.order[n] for n in core)
        below: set[fx.Node] = set()
        live: dict[fx.Node, int] = {}
        before: list[fx.Node] = []
        count, looked, product = 0, 0, False
        for at in range(min(self.order[n] for n in core), last if early else len(self.nodes)):
            node = self.nodes[at]
            live = {n: until for n, until in live.items() if until > at}
            if is_number(node):
                continue
            if node in self.alive and (node in core or any(n in below for n in self._sources(node))):
                if node.op == "output" or (at >= last and not is_analytic(node)):
                    return
                below.add(node)
                live[node] = max((self.order[u] for u in users_of(node, self.alive)), default=at)
                product = product or short_name(node) in PRODUCTS | {"sum"}
            if product and 1 <= len(live) <= 2 and (early or at >= last) and (now := list(live)) != before:
                # The views that an einsum is taken apart into are not what there should be few of.
                count += not (before and node in now and short_name(node) in LAYOUT)
                looked += 1
                before = now
                yield now
                if count == _EXITS or looked == _VIEWS * _EXITS:
                    return

    def lowered(self, exits: Sequence[fx.Node], o_at: int, sizes: Sizes) -> list[fx.Node]:
        """The last of the views that are all that is read of each exit and still have an output's or a state's axes."""

        def is_output(n: fx.Node) -> bool:
            return any(v.cost <= 1 and v.size("f", sizes_of(n) or ()) == sizes.width for v in views(n, sizes))

        found = []
        for at, node in enumerate(exits):
            fits = is_output if at == o_at else lambda n: self._is_state(n, sizes)
            while len(users := list(users_of(node, self.alive))) == 1 and self._passes_on(users[0], node):
                if not fits(users[0]):
                    break
                node = users[0]
            found.append(node)
        return found

    def is_exit(self, below: set[fx.Node], exits: Sequence[fx.Node]) -> bool:
        """Whether nothing else of these nodes is needed further down."""
        end = max(self.order[n] for n in exits)
        return all(
            n in exits or all(self.order[u] <= end for u in users_of(n, self.alive)) for n in below if n in self.alive
        )

    def below(self, core: set[fx.Node], exits: Sequence[fx.Node]) -> set[fx.Node]:
        """The core and what it reaches, up to the exits and not through them: one may be a view of a state that is
        taken long after what reads o."""
        end = max(self.order[n] for n in exits)
        found: set[fx.Node] = set()
        for node in self.nodes[min(self.order[n] for n in core) : end + 1]:
            if node in core or any(n in found and n not in exits for n in self._sources(node)):
                found.add(node)
        return found

    @staticmethod
    def _sources(node: fx.Node) -> list[fx.Node]:
        return sources(node) if node.op == "call_function" else node.all_input_nodes

    def _passes_on(self, node: fx.Node, above: fx.Node) -> bool:
        """Whether a node holds what is above it and nothing else, written into an empty tensor perhaps."""
        if _rearranges(node, above):
            return True
        a, b = sizes_of(node), sizes_of(above)
        return short_name(node) in WRITES and a is not None and b is not None and math.prod(a) == math.prod(b)

    # ---- inputs

    def boundary(self, exits: Sequence[fx.Node], below: set[fx.Node], sizes: Sizes, opened: set[fx.Node]) -> Boundary:
        """Walks up from `exits`. Nodes in `opened` are entered although they hold every token once.

        `below`: the seeds and what they reach, where no input of the region can be.

        Raises:
            NoMatch: CHUNK_OPERATOR where something else than an analytic operator of the region's own values is met.
        """
        found = Boundary(sizes)
        self.headless = self._without_heads(below, sizes)
        tokens: dict[fx.Node, None] = {}
        rest: dict[fx.Node, None] = {}
        stack = list(exits)
        found.interior.update(exits)
        while stack:
            node = stack.pop()
            for n in sources(node):
                if n in found.interior or n in tokens or n in rest or self.is_constant(n):
                    continue
                if n not in below and n not in opened:
                    if (top := self._whole(n, sizes, opened)) is not None:
                        tokens[top] = None
                        found.interior.update(_between(n, top))
                        continue
                    if not self._carries_tokens(n, sizes, opened):
                        rest[n] = None
                        continue
                if not is_analytic(n) or n in self.taken:
                    raise NoMatch("CHUNK_OPERATOR", f"{n} ({short_name(n) or n.op}) stands between the tokens and o", n)
                found.interior.add(n)
                stack.append(n)
        found.tokens = sorted(tokens, key=self.order.__getitem__)
        found.interior.difference_update(tokens)
        self._sort_rest(sorted(rest, key=self.order.__getitem__), sizes, found)
        return found

    def _sort_rest(self, rest: Sequence[fx.Node], sizes: Sizes, found: Boundary) -> None:
        """Sorts what no token reaches into initial states and what the states' decays are made from."""
        states: dict[fx.Node, None] = {}
        statics: dict[fx.Node, None] = {}
        for n in rest:
            if n in found.interior:
                continue
            if self._may_be_state(n, sizes):
                top = self._state_top(n, sizes)
                inside, leaves = self._made_of(top, states)
                # What is made from an earlier state, or from no state at all, is no initial state.
                made = bool(inside) and not any(self._may_be_state(s, sizes) and s not in states for s in leaves)
                if top in states or not made:
                    states[top] = None
                    found.interior.update(_between(n, top))
                    continue
                found.interior.update(_between(n, top))
                n = top
            inside, leaves = self._made_of(n, states)
            found.interior.update(inside)
            for leaf in leaves:
                if leaf not in states:
                    (states if self._may_be_state(leaf, sizes) else statics)[leaf] = None
        found.states, found.statics = list(states), sorted(statics, key=self.order.__getitem__)

    def _may_be_state(self, node: fx.Node, sizes: Sizes) -> bool:
        """A mask of a block of K = V tokens has a state's shape, and holds powers of a decay."""
        table = node.op != "call_function" and find_tables([node], sizes.heads) is not None
        return self._is_state(node, sizes) and not table

    def _made_of(self, node: fx.Node, states: dict[fx.Node, None]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The analytic nodes that make a node, and what those are made from; a state is not looked into."""
        inside: list[fx.Node] = []
        leaves: list[fx.Node] = []
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            # One of several results, where another form has taken what makes them: they are no value, it is one.
            taken = n in self.taken or (short_name(n) == "getitem" and n.args[0] in self.taken)
            if n in states or not is_analytic(n) or taken:
                leaves.append(n)
                continue
            inside.append(n)
            for above in sources(n):
                if above not in seen and not self.is_constant(above):
                    seen.add(above)
                    stack.append(above)
        return inside, leaves

    def _whole(self, node: fx.Node, sizes: Sizes, opened: set[fx.Node]) -> fx.Node | None:
        """The highest node that holds the same values as `node`, every token once; None if `node` does not."""
        if node in self.headless:
            return None if node in opened else node
        if not any(v.cost <= 1 for v in views(node, sizes)) or self._mixes(node, sizes, opened):
            return None
        chain = [node]
        while short_name(chain[-1]) in LAYOUT | PICKS | PADS | CASTS and chain[-1].op == "call_function":
            above = sources(chain[-1])
            if not above or self.is_constant(above[0]):
                break
            chain.append(above[0])
        padded = [i for i, n in enumerate(chain[:-1]) if short_name(n) in PADS and not _same_size(n, chain[i + 1])]
        top = padded[-1] + 1 if padded else 0
        if not any(v.cost <= 1 for v in views(chain[top], sizes)):
            top = 0
        for i in range(top, len(chain) - 1):
            if not _rearranges(chain[i], chain[i + 1]):
                break
            if any(v.cost <= 1 for v in views(chain[i + 1], sizes)):
                top = i + 1
        return None if chain[top] in opened else chain[top]

    def _without_heads(self, products: Collection[fx.Node], sizes: Sizes) -> set[fx.Node]:
        """Tensors of tokens, `[B, T, N]`, of which products make scores for all heads: Mamba-2's B and C.

        What is cut into heads later looks like them, and is read by no such product.
        """
        found: set[fx.Node] = set()
        for product in products if sizes.heads > 1 else ():
            shape = [n for n in sizes_of(product) or () if n != 1]
            if short_name(product) not in PRODUCTS or len(shape) < 2 or shape[-1] != shape[-2]:
                continue
            chunks = [] if shape[-1] == sizes.tokens else [sizes.tokens // shape[-1]]
            if shape[:-2] != [n for n in (sizes.batch, *chunks) if n != 1]:
                continue
            for node in sources(product):
                while not any("h" not in v.labels and v.labels.endswith("f") for v in views(node, sizes)):
                    if node.op != "call_function" or short_name(node) not in LAYOUT | CASTS:
                        break
                    node = sources(node)[0]
                else:
                    found.add(node)
        return found

    def _mixes(self, node: fx.Node, sizes: Sizes, opened: set[fx.Node]) -> bool:
        """Whether a node is a product of two sequences."""
        while short_name(node) in LAYOUT | CASTS and node.op == "call_function" and sources(node):
            node = sources(node)[0]
        if node.op != "call_function" or short_name(node) not in PRODUCTS:
            return False
        factors = [n for n in sources(node) if not self.is_constant(n)]
        return len(factors) > 1 and all(
            self._whole(n, sizes, opened) is not None or self._carries_tokens(n, sizes, opened) for n in factors
        )

    def _carries_tokens(self, node: fx.Node, sizes: Sizes, opened: set[fx.Node]) -> bool:
        """Whether a node that holds every token is above this one, through analytic operators alone."""
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            if not is_analytic(n):
                continue
            for above in sources(n):
                if above in seen or self.is_constant(above):
                    continue
                if self._whole(above, sizes, opened) is not None:
                    return True
                seen.add(above)
                stack.append(above)
        return False

    def products_of(self, boundary: Boundary) -> list[fx.Node]:
        """Products outside of a region that are made from its inputs, and perhaps from a state, and nothing else."""
        made = {**dict.fromkeys([*boundary.states, *boundary.statics], False), **dict.fromkeys(boundary.tokens, True)}
        found: list[fx.Node] = []
        for node in self.nodes[min(map(self.order.__getitem__, made)) :]:
            if node in made or not is_analytic(node) or node not in self.alive:
                continue
            above = [n for n in sources(node) if not self.is_constant(n)]
            if (
                not above
                or node in self.taken
                or not all(n in made or self._is_state(n, boundary.sizes) for n in above)
            ):
                continue
            made[node] = any(made.get(n) for n in above)  # whether from tokens
            if short_name(node) in PRODUCTS and len(sources(node)) > 1 and made[node] and node not in boundary.interior:
                found.append(node)
        return found

    def is_above(self, tops: Sequence[fx.Node], node: fx.Node) -> bool:
        """Whether analytic operators alone make a node from another one of `tops`."""
        first = min(self.order[n] for n in tops)
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            if not is_analytic(n) or n in self.taken:
                continue
            for above in sources(n):
                if above in tops:
                    return True
                if above not in seen and self.order[above] > first and not self.is_constant(above):
                    seen.add(above)
                    stack.append(above)
        return False

    def _state_top(self, node: fx.Node, sizes: Sizes) -> fx.Node:
        while node.op == "call_function" and sources(node) and _rearranges(node, above := sources(node)[0]):
            if not self._is_state(above, sizes) or value(above).dtype != value(node).dtype:
                break
            node = above
        return node

    @staticmethod
    def _is_state(node: fx.Node, sizes: Sizes) -> bool:
        shape = sizes_of(node)
        return shape is not None and any(True for _ in state_views(shape, sizes, None))


def _is_outer(node: fx.Node) -> bool:
    """Whether a value is a product with more axes than either factor: the keys and values of every token."""
    shape = sizes_of(node)
    factors = [math.prod(sizes_of(n) or ()) for n in sources(node)]
    if shape is None or len(shape) < 3 or short_name(node) not in PRODUCTS | {"mul"} or len(factors) < 2:
        return False
    return math.prod(shape) > max(factors)


def _path(node: fx.Node) -> object:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.items())) if stack else None


def _is_weight(node: fx.Node) -> bool:
    """A matrix that is an input of the graph, seen through views."""
    while node.op == "call_function" and short_name(node) in LAYOUT | CASTS and sources(node):
        node = sources(node)[0]
    shape = sizes_of(node)
    return node.op in ("placeholder", "get_attr") and shape is not None and len(shape) <= 2


def _same_size(a: fx.Node, b: fx.Node) -> bool:
    return sizes_of(a) == sizes_of(b)


def _rearranges(node: fx.Node, above: fx.Node) -> bool:
    """Whether a node holds what is above it in another arrangement (a cast to the same dtype, a pad by nothing)."""
    name, a, b = short_name(node), sizes_of(node), sizes_of(above)
    if name in LAYOUT:
        return True
    if a is None or b is None or name not in CASTS | PADS | PICKS:
        return False
    return math.prod(a) == math.prod(b) and bool(value(node).dtype == value(above).dtype)


def _between(low: fx.Node, top: fx.Node) -> list[fx.Node]:
    found, node = [], low
    while node is not top:
        found.append(node)
        node = sources(node)[0]
    return found
