"""In which dtype a chain keeps its state between tokens."""

from __future__ import annotations

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, name_of, widens
from lattn_compile.passes.spelled.literals import is_zero
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.reads import find_reads
from lattn_compile.passes.spelled.spine import stored_origin
from lattn_compile.passes.spelled.token import Step
from lattn_compile.passes.spelled.views import is_view
from lattn_compile.passes.spelled.writer import value

__all__ = ["LOW", "lowest_dtype", "rounding_of", "stored_casts"]

LOW = (torch.bfloat16, torch.float16)


def rounding_of(index: Index, run: list[Step]) -> torch.dtype | None:
    """The 16-bit dtype that every state of the run is stored in, None if states are kept as they are computed.

    A first state that comes in such a dtype, and a last one that leaves in it, are casts outside of the recurrence.
    """
    computed = value(run[-1].update).dtype
    between = {lowest_dtype(step.root) for step in run[1:]}
    if len(run) == 1:
        before = lowest_dtype(run[0].root)
        return before if before in LOW and stored_casts(run[0].update, before) else None
    if all(widens(computed, d) for d in between):
        return None
    root = run[0].root
    dtype = next(iter(between))
    begins = root is not run[0].update
    if (
        len(between) != 1
        or dtype not in LOW
        or (begins and not is_zero(stored_origin(root)) and lowest_dtype(root) != dtype)
    ):
        raise NoMatch("STATE_ROUNDED", "the state is rounded after some tokens and not after others", run[-1].update)
    last = run[-1]
    stored = stored_casts(last.update, dtype)
    if not stored or find_reads(index, last.update, set(stored))[1]:
        raise NoMatch("STATE_ROUNDED", "the state is rounded before a token and not after the last", last.update)
    return dtype


def lowest_dtype(root: fx.Node) -> torch.dtype:
    """The narrowest dtype between where a state was computed and where it is used."""
    node, lowest = root, value(root).dtype
    while is_view(node) or name_of(node) in CASTS:
        if not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
        if node.op != "call_function" or is_view(node) or name_of(node) in CASTS:
            lowest = lowest if widens(lowest, value(node).dtype) else value(node).dtype
    return lowest  # type: ignore[no-any-return]


def stored_casts(update: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The casts to `dtype` of a state."""
    found, waiting = [], [update]
    while waiting:
        for user in waiting.pop().users:
            if name_of(user) in CASTS and value(user).dtype == dtype:
                found.append(user)
            elif is_view(user):
                waiting.append(user)
    return found
