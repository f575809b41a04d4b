"""How a match was established: `Site.evidence` in words. Any key may be missing, or of another kind than expected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lattn_compile.render.labels import count, nodes_of_line

__all__ = ["SelfChecks", "checked", "errors", "found", "node_counts", "number", "others", "roles", "self_checks"]

# Keys that are said in words, or elsewhere on the page; whatever else the evidence holds is shown as it is.
_SAID = frozenset({"found_by", "form", "steps", "roles", "nodes_before", "nodes_after", "self_check", "frontier"}) | {
    "rule_index",
    "captured",
    "how",
}

_FORMS = {
    "step": "one token's update of the state, matched by algebra",
    "loop": "token by token: each step matched by algebra, the steps chained and re-rolled into one op",
    "scan": "a scan whose body is one token's update, matched by algebra",
    "chunk": "a chunk form, matched by algebra",
}


def found(site: Mapping[str, Any]) -> str | None:
    """How the recurrence was found, as one phrase; None if the evidence does not say."""
    evidence = site["evidence"]
    if evidence.get("found_by") == "hypothesis":
        return "the roles of the inputs were guessed from the graph, and the guess was tested in float64"
    if evidence.get("found_by") == "algebra":
        text = _FORMS.get(site["form"], "matched by algebra")
        steps = evidence.get("steps")
        return f"{text} ({count(steps, 'step')})" if type(steps) is int and site["form"] != "step" else text
    if evidence.get("captured") or site["call"]:
        form = evidence.get("form")
        return "a call of a known library function, captured before it was traced" + (f" ({form} form)" if form else "")
    return _text(evidence.get("found_by") or evidence.get("how"))


def checked(site: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record of the self-check; None where none was made, as with `options={"verify": False}`."""
    record = site["evidence"].get("self_check")
    return record if isinstance(record, Mapping) and record and record.get("skipped") is not True else None


def errors(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """`(values, gradients)`: the largest errors of a self-check, None where nothing was compared. They are either two
    numbers, or one record `max_relative_error` of both."""
    both = record.get("max_relative_error")
    if not isinstance(both, Mapping):
        both = {"value": both}
    value, gradient = record.get("max_error"), record.get("max_gradient_error")
    return both.get("value") if value is None else value, both.get("gradient") if gradient is None else gradient


def roles(site: Mapping[str, Any]) -> dict[str, str]:
    """Text of the value in each role, in the order given; roles without a value are left out."""
    record = site["evidence"].get("roles")
    return {str(k): str(v) for k, v in record.items() if v is not None} if isinstance(record, Mapping) else {}


def node_counts(site: Mapping[str, Any]) -> tuple[int, int] | None:
    """Nodes of a spelled-out site's subgraph before and after; what the evidence does not say is counted in the text.
    None for a site that the evidence counts neither of."""
    found = [site["evidence"].get(key) for key in ("nodes_before", "nodes_after")]
    for i, text in enumerate((site["graph_before"], site["graph_after"])):
        if type(found[i]) is not int and text is not None:
            found[i] = sum(map(nodes_of_line, text.splitlines()))
    named = any(type(site["evidence"].get(key)) is int for key in ("nodes_before", "nodes_after"))
    return (found[0], found[1]) if named and type(found[0]) is type(found[1]) is int else None


def others(site: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Evidence that none of the functions here puts in words."""
    for key, value in site["evidence"].items():
        if key not in _SAID and value is not None:
            yield str(key), value


def number(value: Any) -> str:
    """An error in scientific notation, `0` for none; text (`nan`) as it is."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.1e}" if value else "0"
    return "?" if value is None else str(value)


class SelfChecks(NamedTuple):
    """What the self-checks of one report come to: sites that the graph spells out, those checked, those whose result
    was taken over from an equal site, those that failed; seconds; the largest error of a value or gradient."""

    spelled: int
    checked: int
    cached: int
    failed: int
    seconds: float
    worst: float | None

    def __str__(self) -> str:
        """`5 sites (2 cached), 0.12 s, largest error 3.1e-13`."""
        text = count(self.checked, "site") + (f" ({self.cached} cached)" if self.cached else "") + f", {self.cost}"
        text += f"; {count(self.failed, 'site')} FAILED" if self.failed else ""
        missing = self.spelled - self.checked
        return text + (f"; {count(missing, 'spelled-out site')} not checked" if missing else "")

    @property
    def cost(self) -> str:
        return f"{self.seconds:.2f} s" + ("" if self.worst is None else f", largest error {number(self.worst)}")


def self_checks(report: Mapping[str, Any]) -> SelfChecks | None:
    """None for a report without spelled-out sites."""
    spelled = [s for s in report["sites"] if s["evidence"].get("found_by") or checked(s)]
    records = [r for s in spelled if (r := checked(s)) is not None]
    found_errors = [_float(e) for r in records for e in errors(r) if e is not None]
    if not spelled:
        return None
    return SelfChecks(
        spelled=len(spelled),
        checked=len(records),
        cached=sum(r.get("cached") is True for r in records),
        failed=sum(r.get("verified") is False for r in records),
        seconds=sum(_float(r.get("seconds")) for r in records),
        worst=max(found_errors, key=lambda e: math.inf if math.isnan(e) else e, default=None),
    )


def _float(value: Any) -> float:
    # A report writes what JSON has no number for (nan, inf) as text.
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
