"""Where a claim of equality begins: values that both the old and the new spelling are functions of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import Index, is_tensor, name_of
from lattn_compile.passes.spelled.literals import is_zero
from lattn_compile.passes.spelled.masks import makes_booleans, of_mask
from lattn_compile.passes.spelled.proposal import CONSTANT, NoMatch, Proposal
from lattn_compile.passes.spelled.views import of_booleans
from lattn_compile.passes.spelled.writer import value

__all__ = ["frontier_of", "is_comparison"]

_MAX_REGION = 20_000
_NEAR = 200


def frontier_of(index: Index, proposal: Proposal, needed: Iterable[fx.Node]) -> list[fx.Node]:
    """The inputs of a proposal: what its new nodes read, and whatever else its old nodes need.

    Args:
        needed: nodes that the matcher took as given. New nodes may read what these were computed from (a whole sequence
            where a token was taken as given), so the search goes on upwards from them until it meets such a value.
    """
    inserted = set(proposal.inserted)
    read = {x for n in inserted for x in n.all_input_nodes if x not in inserted}
    given = set(_drawable(index, needed))
    state = proposal.roles.get("state")
    while state is not None and state in inserted:
        state = state.all_input_nodes[0]
    if state is not None:
        read.add(state)
    frontier: dict[fx.Node, None] = {}
    waiting = list(proposal.old)
    seen: set[fx.Node] = set()
    leads = _Leads(index, read)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_REGION:
            raise NoMatch("TOO_MANY_TERMS", "the region between the inputs and the outputs is too large", node)
        if CONSTANT in node.meta:
            continue
        ends = node.op not in ("call_function", "get_attr") or _is_random(node) or is_comparison(node)
        drawn = not index.repeated(node) and not _is_cast_mask(node) and not _is_made(node)
        if ends or (drawn and (node in read or (node in given and not leads.to(node)))):
            frontier[node] = None
        else:
            given.update(_drawable(index, _times_zero(node)))
            waiting.extend(node.all_input_nodes)
    frontier.update(dict.fromkeys(_drawable(index, read)))
    return sorted(_independent(index, frontier), key=index.order.__getitem__)


def _times_zero(node: fx.Node) -> list[fx.Node]:
    """What is multiplied by zeros: the decay of a first token's empty state. No new node reads it, and whatever it is
    computed from (a whole layer, often) need not be run to compare the two."""
    if name_of(node) != "aten::mul":
        return []
    factors = [x for x in node.args if isinstance(x, fx.Node)]
    return [x for x in factors if x.op == "call_function" and any(y is not x and is_zero(y) for y in factors)]


class _Leads:
    """Which values some of the values that the new nodes read are computed into, near by."""

    def __init__(self, index: Index, read: set[fx.Node]) -> None:
        self.index, self.read = index, read
        self.known: dict[fx.Node, bool] = {}

    def to(self, node: fx.Node) -> bool:
        """Whether `node` is computed from one of them, a few calls back. Further up, it is an input of its own."""
        if node not in self.known:
            waiting, seen, found = [node], {node}, False
            while waiting and not found and len(seen) < _NEAR:
                for x in waiting.pop().all_input_nodes:
                    found = found or x in self.read
                    if x not in seen:
                        seen.add(x)
                        waiting.append(x)
            self.known[node] = found
        return self.known[node]


def _drawable(index: Index, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """`nodes`, with the inputs of those that hold the same values again and again, which no random draw would."""
    waiting, out, seen = list(nodes), [], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "get_attr" or CONSTANT in node.meta or _is_made(node):
            continue
        seen.add(node)
        if index.repeated(node) or _is_cast_mask(node):
            waiting.extend(node.all_input_nodes)
        else:
            out.append(node)
    return out


def _independent(index: Index, frontier: Iterable[fx.Node]) -> list[fx.Node]:
    """Values of the frontier that are not computed from others of it."""
    kept = set(frontier)
    oldest = min((index.order[n] for n in kept), default=0)
    above: dict[fx.Node, bool] = {}

    def depends(node: fx.Node) -> bool:
        """Whether a value of the frontier lies above `node`."""
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current in above:
                waiting.pop()
                continue
            inputs = [x for x in current.all_input_nodes if index.order[x] >= oldest]
            todo = [x for x in inputs if x not in above and x not in kept]
            if todo and not any(x in kept for x in inputs):
                waiting.extend(todo)
                continue
            above[current] = any(x in kept or above.get(x, False) for x in inputs)
            waiting.pop()
        return above[node]

    # Only constants may join a value of the frontier on its way; else the value itself is the better input.
    return [n for n in kept if _is_random(n) or is_comparison(n) or not (_closed(index, n, kept) and depends(n))]


def _is_cast_mask(node: fx.Node) -> bool:
    """What is made of a mask, which no random draw would be."""
    if not is_tensor(node):
        return False
    return (value(node).dtype != torch.bool and of_booleans(node)) or of_mask(node) is not None


def is_comparison(node: fx.Node) -> bool:
    """A mask that data make. Drawn on its own, it is any mask: an equality that holds then holds for this one."""
    return makes_booleans(node)


def _is_made(node: fx.Node) -> bool:
    """A tensor that is made of numbers alone: each token may make one of its own."""
    return node.op == "call_function" and not node.all_input_nodes and not _is_random(node)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _closed(index: Index, node: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether everything `node` is computed from is a constant or in the frontier."""
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        current = waiting.pop()
        if current in kept or current in seen:
            continue
        seen.add(current)
        if (current.op not in ("call_function", "get_attr")) or _is_random(current) or len(seen) > 500:
            return False
        waiting.extend(current.all_input_nodes)
    return True
