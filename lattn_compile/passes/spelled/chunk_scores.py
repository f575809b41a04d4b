"""Scores of a parallel form that something changes which is no part of a recurrence: `(relu(q k^T) * causal) @ v`.

Nothing of them is rewritten. They look like linear attention, so the report says what stands in the way. A softmax is
attention, and no candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_ops import PRODUCTS, STEPS, users_of
from lattn_compile.passes.spelled.proposal import NearMiss, NoMatch

if TYPE_CHECKING:
    from lattn_compile.passes.spelled.chunk_region import Survey

__all__ = ["changed_scores"]

_REACH = 12
"""Steps between two products."""

_CHANGES = frozenset(
    ["relu", "square", "pow", "dropout", "native_dropout", "sigmoid", "tanh", "silu", "gelu", "elu", "leaky_relu"]
)

_At = tuple[fx.Node, bool, "fx.Node | None"]
"""A node, whether a mask was met on the way to it, and the first change there."""


def changed_scores(survey: Survey, known: Collection[fx.Node]) -> Iterator[NearMiss]:
    """A near miss for each product of two sequences, `known` ones aside, that is masked, changed, and meets a third."""
    for node in survey.nodes:
        if (
            short_name(node) not in PRODUCTS
            or node in known
            or node in survey.taken
            or not survey.is_of_sequences(node)
        ):
            continue
        if (change := _change(survey, node)) is not None:
            why = f"{change} ({short_name(change)}) stands between the scores and the values"
            yield NoMatch("CHUNK_OPERATOR", why, change).at(node)


def _change(survey: Survey, scores: fx.Node) -> fx.Node | None:
    """What changes scores on a way on which they are masked, too, and that ends in a product."""
    near: list[_At] = [(scores, False, None)]
    seen: set[tuple[fx.Node, bool, bool]] = set()
    for _ in range(_REACH):
        further: list[_At] = []
        for node, masked, change in near:
            for user in users_of(node, survey.alive):
                name = short_name(user)
                if name in PRODUCTS and masked and change is not None:
                    return change
                state: _At
                if name in _CHANGES:
                    state = (user, masked, change or user)
                elif name in STEPS:
                    state = (user, masked or survey.is_masking(user), change)
                else:
                    continue
                if (key := (user, state[1], state[2] is not None)) not in seen:
                    seen.add(key)
                    further.append(state)
        near = further
    return None
