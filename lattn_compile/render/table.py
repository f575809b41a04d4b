"""The report as text for a terminal or a log. Equal layers are folded into one row; nothing is cut off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lattn_compile.render.evidence import self_checks
from lattn_compile.render.labels import (
    AXES,
    fold_candidates,
    fold_sites,
    meaning,
    policy_label,
    shape_label,
    state_label,
    summary_line,
)

__all__ = ["COLUMNS", "Group", "columns", "details", "render_table", "site_groups"]

# Label, the sites folded into one row, and their common cells in the order of COLUMNS[2:].
Group = tuple[str, list[Mapping[str, Any]], tuple[str, ...]]

COLUMNS = (
    "site",
    "n",
    "kind",
    "rule/decay",
    "form",
    ",".join(AXES),
    "policy",
    "op",
    "kernel",
    "state per sequence",
    "verdict",
)


def _cells(site: Mapping[str, Any]) -> tuple[str, ...]:
    verdict = "rewritten" if site["verdict"] == "rewritten" else f"left {site['reason']['code']}"
    return (
        site["kind"],
        f"{site['rule']}/{site['decay']}",
        site["form"],
        shape_label(site["shapes"]),
        policy_label(site["policy"]),
        site["op"] or "-",
        site["kernel"] or "-",
        state_label(site),
        verdict,
    )


def site_groups(report: Mapping[str, Any]) -> list[Group]:
    """The rows of the table, equal layers folded."""
    return [(label, members, _cells(members[0])) for label, members in fold_sites(report["sites"], _cells)]


def details(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`(heading, text)` of everything below the table: sites left, unmatched candidates (a line each, and a remedy a
    code), cost of the self-check, graph breaks, skipped frames, notes."""

    def why(site: Mapping[str, Any]) -> str:
        return json.dumps(site["reason"], sort_keys=True)

    left = [s for s in report["sites"] if s["verdict"] == "left"]
    for label, members in fold_sites(left, why):
        reason, source = members[0]["reason"], members[0]["source"]
        at = f" at {source}" if source else ""
        yield "left", f"{label}{at}: [{reason['code']}] {reason['text']}. {reason['remedy']}"
    for label, members in fold_candidates(report["unmatched"]):
        yield "unrecognised", _candidate(label, members)
    for code, reason in {u["reason"]["code"]: u["reason"] for u in report["unmatched"]}.items():
        yield "remedy", f"[{code}] {meaning(reason)[0]}. {reason['remedy']}"
    if (checks := self_checks(report)) is not None:
        yield "self-check", str(checks)
    for heading, key in (("graph break", "graph_breaks"), ("skipped frame", "skipped_frames")):
        for line, times in Counter(report[key]).items():
            yield heading, line if times == 1 else f"{line} ({times} times)"
    for line in report["notes"]:
        yield "note", line


def _candidate(label: str, members: Sequence[Mapping[str, Any]]) -> str:
    """`model.layers.[0-2].mixer, node add_12 at mixer.py:88: [KEYS] erase and read use different keys`."""
    first = members[0]
    path = f"{label}, " if label else ""
    more = f" and {len(members) - 1} alike" if len(members) > 1 else ""
    at = f" at {first['source']}" if first["source"] else ""
    words, detail = first["stopped_at"], meaning(first["reason"])[1]
    if detail and detail != words:
        words = f"{words}; {detail}"
    return f"{path}node {first['node']}{more}{at}: [{first['reason']['code']}] {words}"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned lines: header, rule, rows. As wide as the content: a log is searched, not fitted to a window."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (header, ["-" * w for w in widths], *rows)
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def render_table(report: Mapping[str, Any]) -> str:
    """Summary, table, details, in plain text."""
    lines = [summary_line(report)]
    rows = [(label, str(len(members)), *cells) for label, members, cells in site_groups(report)]
    if rows:
        lines += ["", *columns(COLUMNS, rows)]
    extra = [f"{heading}: {text}" for heading, text in details(report)]
    if extra:
        lines += ["", *extra]
    return "\n".join(lines)
