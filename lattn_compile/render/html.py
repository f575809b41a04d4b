"""The report as one page to send to a colleague: no script, no network, light and dark, everything escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lattn_compile.render.labels import count, is_emulated, size_label, state_totals, summary_line
from lattn_compile.render.style import CSS
from lattn_compile.render.table import COLUMNS, Group, details, site_groups

__all__ = ["render_html"]

_TONES = {"note": "", "graph break": "bad", "skipped frame": "bad"}


def render_html(report: Mapping[str, Any]) -> str:
    """A complete HTML document: figures, the table of sites, what was left and why, every site's graph, the recipe."""
    groups = site_groups(report)
    body = [
        "<header><h1>lattn-compile report</h1>",
        f"<p>{escape(summary_line(report).removeprefix('lattn-compile: '))}</p></header>",
        _figures(report),
        _sites(groups),
        _attention(report),
        _graphs(groups),
        _recipe(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lattn-compile report</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _figures(report: Mapping[str, Any]) -> str:
    ids = {s["id"] for s in report["sites"]}
    left = {s["id"] for s in report["sites"] if s["verdict"] == "left"}
    cards = [
        _card("sites rewritten", f"{len(ids) - len(left)} / {len(ids)}", "good" if ids and not left else "warn"),
        _card("unrecognised", str(len(report["unmatched"])), "warn" if report["unmatched"] else ""),
        _card("graph breaks", str(len(report["graph_breaks"])), "bad" if report["graph_breaks"] else ""),
        _card("skipped frames", str(len(report["skipped_frames"])), "bad" if report["skipped_frames"] else ""),
    ]
    if report["compiles"]:
        cards.append(_card("compiles", f"{report['compiles']} in {report['seconds']:.1f} s", ""))
    totals = state_totals(report)
    if totals is not None and totals[0] > 0:
        before, after = totals
        caption = "recurrent state per sequence" + (", once packed" if is_emulated(report) else "")
        width = min(100.0, 100.0 * after / before)
        bars = (
            f'<div class="bar"><i style="width:100%"></i><span>{size_label(before)} before</span></div>'
            f'<div class="bar after"><i style="width:{width:.1f}%"></i><span>{size_label(after)} after</span></div>'
        )
        cards.append(f'<div class="card wide">{bars}<small>{escape(caption)}</small></div>')
    return f'<section class="cards">{"".join(cards)}</section>'


def _card(label: str, value: str, tone: str) -> str:
    return f'<div class="card {tone}"><b>{escape(value)}</b><small>{escape(label)}</small></div>'


def _sites(groups: Sequence[Group]) -> str:
    if not groups:
        return '<section><h2>Sites</h2><p class="muted">No linear-attention recurrence was found.</p></section>'
    head = "".join(f"<th>{escape(c)}</th>" for c in COLUMNS)
    rows = []
    for index, (label, members, cells) in enumerate(groups):
        tone = "good" if members[0]["verdict"] == "rewritten" else "warn"
        link = f'<a href="#site-{index}"><code>{_breakable(label)}</code></a>'
        middle = "".join(f"<td>{escape(c)}</td>" for c in (str(len(members)), *cells[:-1]))
        rows.append(f'<tr><td>{link}</td>{middle}<td><span class="pill {tone}">{escape(cells[-1])}</span></td></tr>')
    return (
        f'<section><h2>Sites</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _attention(report: Mapping[str, Any]) -> str:
    items = "".join(
        f'<li><span class="pill {_TONES.get(heading, "warn")}">{escape(heading)}</span> {escape(text)}</li>'
        for heading, text in details(report)
    )
    return f'<section><h2>What to look at</h2><ul class="plain">{items}</ul></section>' if items else ""


def _graphs(groups: Sequence[Group]) -> str:
    parts = []
    for index, (label, members, _) in enumerate(groups):
        # Only a group's first site is unfolded: the others look alike.
        inner = "".join(_site(s, opened=n == 0) for n, s in enumerate(members))
        shown = f"<code>{escape(label)}</code> <small>{escape(count(len(members), 'site'))}</small>"
        open_ = " open" if index == 0 else ""
        parts.append(
            f'<details class="group"{open_}><summary>{shown}</summary><div id="site-{index}">{inner}</div></details>'
        )
    return f"<section><h2>Site by site</h2>{''.join(parts)}</section>" if parts else ""


def _site(site: Mapping[str, Any], *, opened: bool) -> str:
    facts = {
        "source": site["source"],
        "library call": site["call"],
        "folded into the op": ", ".join(site["folded"]) or None,
        "autograd nodes": site["autograd_nodes"],
        "saved for backward": None if site["residual_count"] is None else count(site["residual_count"], "tensor"),
        "policy": json.dumps(site["policy"]) if site["policy"] is not None else None,
        "evidence": json.dumps(site["evidence"]) if site["evidence"] else None,
        "left because": f"[{site['reason']['code']}] {site['reason']['text']}" if site["reason"] else None,
    }
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v is not None)
    before, after = site["graph_before"], site["graph_after"]
    graphs = ""
    if before is not None or after is not None:
        graphs = (
            f'<div class="pair"><figure><figcaption>before</figcaption>{_code(before, after, "gone")}</figure>'
            f"<figure><figcaption>after</figcaption>{_code(after, before, 'new')}</figure></div>"
        )
    head = f"<summary><code>{escape(site['id'])}</code></summary>"
    return f'<details class="site"{" open" if opened else ""}>{head}<dl>{rows}</dl>{graphs}</details>'


def _code(text: str | None, other: str | None, mark: str) -> str:
    """Graph text; lines that the other side lacks are marked, so that the change is seen at a glance."""
    if text is None:
        return '<p class="muted">not recorded</p>'
    known = None if other is None else set(_stripped(other.splitlines()))
    lines = []
    for line in text.splitlines():
        changed = known is not None and line.strip() and line.strip() not in known
        lines.append(f'<span class="{mark}">{escape(line)}</span>' if changed else f"<span>{escape(line)}</span>")
    return f"<pre>{''.join(lines)}</pre>"


def _stripped(lines: Iterable[str]) -> Iterable[str]:
    return (line.strip() for line in lines)


def _recipe(report: Mapping[str, Any]) -> str:
    if report["recipe"] is None:
        return ""
    text = escape(json.dumps(report["recipe"], indent=2))
    shown = f'<details class="group"><summary>as JSON</summary><pre>{text}</pre></details>'
    return f"<section><h2>Recipe</h2>{shown}</section>"


def _breakable(path: str) -> str:
    """Long module paths may wrap at their dots and slashes, nowhere else."""
    return escape(path).replace(".", ".<wbr>").replace("/", "/<wbr>")
