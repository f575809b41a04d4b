"""The report as Graphviz source: the module tree down to the recurrences, green where rewritten."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from lattn_compile.render.evidence import node_counts
from lattn_compile.render.labels import policy_label, shape_label, state_label, summary_line

__all__ = ["render_dot"]


def render_dot(report: Mapping[str, Any]) -> str:
    """Source for `dot -Tsvg`. One box a module on the way to a site, one filled box a site, dashed for unmatched."""
    lines = [
        "digraph lattn_compile {",
        f"  label={_quote(*summary_line(report).split('; '), '')}; labelloc=t; rankdir=LR;",
        '  fontname="Helvetica"; fontsize=11;',
        '  node [shape=box, fontname="Helvetica", fontsize=10]; edge [arrowhead=none, color="#8a8f98"];',
    ]
    seen: set[str] = set()
    for index, site in enumerate(report["sites"]):
        parent = _modules(site["path"], seen, lines)
        name = f"site {index}"
        rewritten = site["verdict"] == "rewritten"
        rows = [
            f"{site['kind']}  {site['rule']}/{site['decay']}  {site['form']}",
            f"B,T,H,HV,K,V = {shape_label(site['shapes'])}",
            f"{site['op']}  {policy_label(site['policy'])}" if rewritten else f"left: {site['reason']['code']}",
            f"state {state_label(site)}",
        ]
        if (nodes := node_counts(site)) is not None:
            rows.append(f"{nodes[0]:,} nodes -> {nodes[1]:,}")
        fill, edge = ("#d9f2e3", "#1a7f4b") if rewritten else ("#fdeccf", "#a8690a")
        style = f'style="filled,rounded", fillcolor="{fill}", color="{edge}"'
        lines.append(f"  {_quote(name)} [label={_quote(*rows)}, tooltip={_quote(site['id'])}, {style}];")
        lines.append(f"  {_quote(parent)} -> {_quote(name)};")
    for index, u in enumerate(report["unmatched"]):
        parent = _modules(u["path"], seen, lines)
        name = f"unmatched {index}"
        where = f" at {u['source']}" if u["source"] else ""
        rows = [f"not recognised: {u['node']}{where}", *textwrap.wrap(u["stopped_at"], 60), u["reason"]["code"]]
        style = 'style="dashed,rounded", color="#a02c2c"'
        lines.append(f"  {_quote(name)} [label={_quote(*rows)}, tooltip={_quote(u['reason']['remedy'])}, {style}];")
        lines.append(f"  {_quote(parent)} -> {_quote(name)};")
    return "\n".join([*lines, "}", ""])


def _modules(path: str, seen: set[str], lines: list[str]) -> str:
    """Boxes and edges for every module on `path` that has none yet; returns the name of the last."""
    parent = ""
    parts = path.split(".") if path else ["(root)"]
    for depth, part in enumerate(parts):
        name = "module " + ".".join(parts[: depth + 1])
        if name not in seen:
            seen.add(name)
            lines.append(f"  {_quote(name)} [label={_quote(part)}];")
            if parent:
                lines.append(f"  {_quote(parent)} -> {_quote(name)};")
        parent = name
    return parent


def _quote(*rows: str) -> str:
    """A quoted Graphviz string, one left-aligned row a line."""
    escaped = [row.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for row in rows]
    return '"' + escaped[0] + '"' if len(rows) == 1 else '"' + "".join(f"{row}\\l" for row in escaped) + '"'
