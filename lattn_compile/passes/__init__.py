"""Graph passes, in the order in which they run. A pass is one file with `run(context)` and one line below.

`capture` works before there is a graph and is not in the list: it decides what the tracer sees.
"""

from __future__ import annotations

from collections.abc import Callable

from lattn_compile.passes import annotate, discover, fold, lengths, recognize, replace, validate
from lattn_compile.passes.context import PassContext, SiteNode

ORDER: tuple[tuple[str, Callable[[PassContext], None]], ...] = (
    ("discover", discover.run),  # recurrences that the graph spells out
    ("recognize", recognize.run),  # where the recurrences are
    ("fold", fold.run),  # what stands around them goes into their arguments
    ("lengths", lengths.run),  # what the active phase says, into the arguments of spelled-out ones
    ("annotate", annotate.run),  # which policy each gets, or why none
    ("replace", replace.run),  # the op that carries the policy
    ("validate", validate.run),  # the graph still means what it meant
)


def run(context: PassContext) -> None:
    """Run every pass. `context.module` is rewritten in place, or replaced by a rewritten functional copy."""
    for _, run_pass in ORDER:
        run_pass(context)


__all__ = ["ORDER", "PassContext", "SiteNode", "run"]
