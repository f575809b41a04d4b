"""What a compile or a rewrite found, did, and left: plain data that prints, travels as JSON, and merges.

A `Report` holds no tensor, node or module, only strings, numbers and dicts, so it can be pickled, kept for the life of
the process, and read by a later version. Drawing it is the job of `lattn_compile.render`, which sees `to_dict()` only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lattn_compile.errors import FileFormatError, LattnError, Reason, nearest
from lattn_compile.render import render_dot, render_html, render_table, summary_line

__all__ = ["DECAYS", "FORMS", "SCHEMA_VERSION", "Report", "Site", "Unmatched"]

SCHEMA = "lattn-compile/report"
SCHEMA_VERSION = 1

RULES = ("delta", "additive")
DECAYS = ("none", "head", "channel")
FORMS = ("step", "loop", "chunk", "scan", "call")
VERDICTS = ("rewritten", "left")

# Reasons by which the user asked for the site to stay as it is: not a failure of anything that was requested.
_NOT_ASKED = frozenset({"RULE_NONE", "NO_RULE"})


@dataclass(frozen=True, kw_only=True)
class Site:
    """One recurrence in one graph, and what became of it.

    Attributes:
        path: module path of the layer, `model.layers.3.linear_attn`.
        id: `path/kind#n`, unique in one graph: `model.layers.3.linear_attn/gdn#0`.
        kind: name of the recurrence: gdn, kda, gla, delta, retention, linear, ...
        rule: delta | additive.
        decay: none | head | channel.
        form: how the graph spelled it: step | loop | chunk | scan, or call (one call of a known library function).
        call: qualified name of that function, None for spelled-out forms.
        shapes: `B T H HV K V`, each an int or the name of a symbolic size.
        policy: `Policy.to_dict()`, None if no policy applies.
        op: the op that stands there now, `lattn::chunk`; None where the original spelling stays.
        kernel: implementation chosen for it (`reference`, ...), None while unknown.
        state_bytes_before, state_bytes_after: bytes of recurrent state per sequence, scales included.
        source: `file:line` of the layer's code.
        verdict: rewritten | left.
        reason: why it was left; None for a rewritten site.
        evidence: how the match was established (JSON data).
        folded: nodes of the surrounding graph that went into the op (`l2norm`, `repeat_interleave`, `sigmoid`, ...).
        autograd_nodes: nodes this site adds to the autograd graph.
        residual_count: tensors it saves for its backward.
        graph_before, graph_after: text of the site's subgraph.

    Raises:
        LattnError: `rule`, `decay`, `form` or `verdict` is none of the above, or verdict and reason contradict.
    """

    path: str
    id: str
    kind: str
    rule: str
    decay: str
    form: str
    verdict: str
    call: str | None = None
    shapes: Mapping[str, int | str] = field(default_factory=dict)
    policy: Mapping[str, Any] | None = None
    op: str | None = None
    kernel: str | None = None
    state_bytes_before: int | None = None
    state_bytes_after: int | None = None
    source: str | None = None
    reason: Reason | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    autograd_nodes: int | None = None
    residual_count: int | None = None
    graph_before: str | None = None
    graph_after: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("rule", RULES), ("decay", DECAYS), ("form", FORMS), ("verdict", VERDICTS)):
            value = getattr(self, name)
            if value not in allowed:
                raise LattnError(
                    f"Site.{name}",
                    got=repr(value),
                    want=" | ".join(allowed),
                    remedy=f"Use one of the listed values.{nearest(str(value), allowed)}",
                )
        if (self.verdict == "left") != (self.reason is not None):
            raise LattnError(
                "Site.reason",
                got=f"{self.reason!r} with verdict {self.verdict!r}",
                want="a Reason exactly for sites that were left",
                remedy="Take one from lattn_compile.errors.REASONS.",
            )
        # Sizes may arrive as SymInt; converting those with int() would specialise the graph, so they become names.
        shapes = {k: v if type(v) is int else str(v) for k, v in self.shapes.items()}
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "policy", _plain(self.policy))
        object.__setattr__(self, "evidence", _plain(self.evidence))
        object.__setattr__(self, "folded", tuple(self.folded))

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        return _record(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Site:
        """The site that `to_dict` wrote."""
        return cls(**_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A candidate that looked like a recurrence and was not recognised as one.

    Attributes:
        path: module path, as for `Site`.
        node: name of the graph node at which the search began.
        stopped_at: how far the match came, in words.
        reason: why it stopped, with a remedy.
        source: `file:line`.
        evidence: what had been established until then (JSON data).
    """

    path: str
    node: str
    stopped_at: str
    reason: Reason
    source: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", _plain(self.evidence))

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        return _record(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unmatched:
        """The candidate that `to_dict` wrote."""
        return cls(**_fields(cls, data))


@dataclass(kw_only=True)
class Report:
    """Everything that one or several compiles have to say. `print(report)` shows a table.

    Attributes:
        sites: recognised recurrences, in graph order.
        unmatched: candidates that were not recognised.
        graph_breaks: one entry each, `file:line: why`, repeated if it happened again.
        skipped_frames: one entry for each function that Dynamo gave up on, `name (file:line): why`; it runs uncompiled.
        compiles: how many graphs went through.
        seconds: wall-clock time spent on them.
        recipe: `Recipe.to_dict()`, None if there was none.
        notes: other lines for the reader.
    """

    sites: list[Site] = field(default_factory=list)
    unmatched: list[Unmatched] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    skipped_frames: list[str] = field(default_factory=list)
    compiles: int = 0
    seconds: float = 0.0
    recipe: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> list[Site]:
        """Sites that run the policy they were given."""
        return [s for s in self.sites if s.verdict == "rewritten"]

    @property
    def left(self) -> list[Site]:
        """Sites that stay as they are, each with its `reason`."""
        return [s for s in self.sites if s.verdict == "left"]

    @property
    def left_though_asked(self) -> list[Site | Unmatched]:
        """What a recipe asked for and did not get: sites left for another reason than the recipe's own, and unmatched
        candidates (no recipe can mean a layer that was not recognised)."""
        sites = [s for s in self.left if s.reason is not None and s.reason.code not in _NOT_ASKED]
        return [*sites, *self.unmatched]

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report of several compiles. A site that says the same in each (a recompile) is listed once; the same
        layer in another form (prefill and decode) stays two rows. Counts and seconds add up.

        Raises:
            LattnError: something else than reports.
        """
        reports = list(reports) if isinstance(reports, Iterable) else [reports]
        for other in reports:
            if not isinstance(other, Report):
                raise LattnError(
                    "reports", got=type(other).__name__, want="an iterable of Reports", remedy="lc.reports() is one."
                )
        merged = cls()
        recipes: list[dict[str, Any]] = []
        for report in reports:
            merged.sites += [s for s in report.sites if s not in merged.sites]
            merged.unmatched += [u for u in report.unmatched if u not in merged.unmatched]
            merged.graph_breaks += report.graph_breaks
            merged.skipped_frames += report.skipped_frames
            merged.compiles += report.compiles
            merged.seconds += report.seconds
            merged.notes += [n for n in report.notes if n not in merged.notes]
            if report.recipe is not None and report.recipe not in recipes:
                recipes.append(report.recipe)
        if len(recipes) == 1:
            merged.recipe = recipes[0]
        elif recipes:
            # One recipe for all would be a lie; each site still carries its own policy.
            merged.notes.append(f"merged from compiles under {len(recipes)} different recipes")
        return merged

    def summary(self) -> str:
        """One line: sites rewritten and left, state bytes, compiles, graph breaks, skipped frames."""
        return summary_line(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "sites": [s.to_dict() for s in self.sites],
            "unmatched": [u.to_dict() for u in self.unmatched],
            "graph_breaks": list(self.graph_breaks),
            "skipped_frames": list(self.skipped_frames),
            "compiles": self.compiles,
            "seconds": self.seconds,
            "recipe": _plain(self.recipe),
            "notes": list(self.notes),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Strict JSON (no NaN literals), schema `lattn-compile/report`, with its version."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Inverse of `to_dict`. Raises FileFormatError for another schema, a newer version or an unknown key."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise FileFormatError(
                "report", got=repr(got), want=f"schema {SCHEMA!r}", remedy="Pass what Report.to_json() wrote."
            )
        version = data.get("version")
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise FileFormatError(
                "report",
                got=f"version {version!r}",
                want=f"a version from 1 to {SCHEMA_VERSION}",
                remedy="Read it with the lattn-compile release that wrote it, or a newer one.",
            )
        values = _fields(cls, {k: v for k, v in data.items() if k not in ("schema", "version")})
        values["sites"] = [Site.from_dict(s) for s in values.get("sites", ())]
        values["unmatched"] = [Unmatched.from_dict(u) for u in values.get("unmatched", ())]
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Inverse of `to_json`. Raises FileFormatError, also for text that is not JSON."""
        if not isinstance(text, str | bytes | bytearray):
            raise FileFormatError(
                "report", got=type(text).__name__, want="JSON text", remedy="Report.from_dict takes the data of it."
            )
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise FileFormatError(
                "report", got=f"text that is not JSON ({exc})", want="JSON", remedy="Pass what Report.to_json() wrote."
            ) from exc
        return cls.from_dict(data)

    def to_html(self) -> str:
        """A self-contained page (no network, no script): the table, and each site's graph before and after."""
        return render_html(self.to_dict())

    def to_dot(self) -> str:
        """Graphviz source: the module tree down to the sites, coloured by verdict."""
        return render_dot(self.to_dict())

    def __str__(self) -> str:
        return render_table(self.to_dict())


def _plain(value: Any) -> Any:
    """`value` as JSON data. What JSON cannot say (dtypes, symbolic sizes, NaN) becomes its text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return str(value)


def _record(record: Site | Unmatched) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        out[f.name] = value.to_dict() if isinstance(value, Reason) else _plain(value)
    return out


def _fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `cls`, unknown and missing keys refused by name."""
    if not isinstance(data, Mapping):
        raise FileFormatError(
            "report", got=repr(data), want=f"an object for a {cls.__name__}", remedy="Pass what Report.to_json() wrote."
        )
    known = {f.name: f for f in dataclasses.fields(cls)}
    required = {
        n for n, f in known.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    for key in data:
        if key not in known:
            raise FileFormatError(
                "report",
                got=f"{cls.__name__} with key {key!r}",
                want=", ".join(known),
                remedy=f"Remove the key, or read it with the release that wrote it.{nearest(key, known)}",
            )
    if missing := sorted(required - set(data)):
        raise FileFormatError(
            "report",
            got=f"{cls.__name__} without {', '.join(missing)}",
            want=", ".join(sorted(required)),
            remedy="Pass what Report.to_json() wrote.",
        )
    values = dict(data)
    if isinstance(values.get("reason"), Mapping):
        values["reason"] = Reason(**_fields(Reason, values["reason"]))
    return values
