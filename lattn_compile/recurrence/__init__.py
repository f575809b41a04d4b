"""WHAT is computed: one file a recurrence kind, and the list of all of them.

A new kind is one new file with a `KIND` and one line below.
"""

from __future__ import annotations

from lattn_compile.recurrence import delta, gdn, gla, kda, linear, retention
from lattn_compile.recurrence.kind import Kind, KnownCall, Recurrence

KINDS: tuple[Kind, ...] = (gdn.KIND, kda.KIND, gla.KIND, delta.KIND, retention.KIND, linear.KIND)

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}


def classify(rule: str, decay: str) -> Kind:
    """The kind with this rule ("delta", "additive") and decay ("none", "head", "channel")."""
    return next(kind for kind in KINDS if kind.rule == rule and kind.decay == decay)


__all__ = ["BY_NAME", "KINDS", "Kind", "KnownCall", "Recurrence", "classify"]
