"""The report as one page to send to a colleague: no script, no network, light and dark, everything escaped."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lattn_compile.render.evidence import checked, errors, number, self_checks
from lattn_compile.render.labels import (
    AXES,
    count,
    fold_candidates,
    is_emulated,
    meaning,
    policy_label,
    size_label,
    state_label,
    state_totals,
    summary_line,
)
from lattn_compile.render.reasons import EXAMPLES
from lattn_compile.render.site_html import arrow, breakable, facts, pill, reason_id, reason_link, site_html
from lattn_compile.render.style import CSS
from lattn_compile.render.table import Group, site_groups

__all__ = ["render_html"]


def render_html(report: Mapping[str, Any]) -> str:
    """A complete HTML document: figures, the table of sites, candidates that were not recognised, every site with its
    subgraph before and after, what the reason codes mean, the recipe."""
    groups = site_groups(report)
    body = [
        "<header><h1>lattn-compile report</h1>",
        f"<p>{arrow(summary_line(report).removeprefix('lattn-compile: '))}</p></header>",
        _figures(report),
        _sites(groups, report),
        _candidates(report),
        _remarks(report),
        _graphs(groups, report),
        _reasons(groups, report),
        _recipe(report),
        f"<footer>{escape(report['schema'])}, version {escape(str(report['version']))}</footer>",
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
    ]
    if (checks := self_checks(report)) is not None:
        missing = checks.checked < checks.spelled
        tone = "bad" if checks.failed else "warn" if missing else "good"
        value = f"{checks.checked - checks.failed} / {checks.spelled}"
        cards.append(_card("spelled-out sites agree in float64", value, tone, f"{checks.cost}"))
    for label, key in (("graph break", "graph_breaks"), ("skipped frame", "skipped_frames")):
        if report[key] or report["compiles"]:
            cards.append(_card(f"{label}s", str(len(report[key])), "bad" if report[key] else ""))
    if report["compiles"]:
        cards.append(_card(count(report["compiles"], "compile"), f"{report['seconds']:.1f} s", ""))
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


def _card(label: str, value: str, tone: str, more: str = "") -> str:
    below = f"<small>{escape(more)}</small>" if more else ""
    return f'<div class="card {tone}"><b>{escape(value)}</b><small>{escape(label)}</small>{below}</div>'


_HEADS = ("site", "verdict", "kind", "form", ",".join(AXES), "policy", "op", "state per sequence", "self-check")


def _sites(groups: Sequence[Group], report: Mapping[str, Any]) -> str:
    if not groups:
        return '<section><h2>Sites</h2><p class="muted">No linear-attention recurrence was found.</p></section>'
    head = "".join(f'<th scope="col">{_halved(c)}</th>' for c in _HEADS)
    rows = []
    for label, members, cells in groups:
        site = members[0]
        where = escape(site["source"] or "")
        times = f"{count(len(members), 'site')} · " if len(members) > 1 else ""
        first = (
            f'<a href="#site-{_index(site, report)}"><code>{breakable(label)}</code></a><small>{times}{where}</small>'
        )
        op = escape(site["op"] or "–") + (f"<small>{escape(site['kernel'])}</small>" if site["kernel"] else "")
        verdict = pill(site["verdict"], "good" if site["verdict"] == "rewritten" else "warn")
        if site["reason"]:
            verdict += f"<small>{reason_link(site['reason'])}</small>"
        shapes = _halved(cells[3])
        rows.append(
            f"<tr><td>{first}</td><td>{verdict}</td><td>{escape(site['kind'])}<small>{breakable(cells[1])}</small></td>"
            f"<td>{escape(site['form'])}</td><td>{shapes}</td><td>{escape(policy_label(site['policy']))}</td>"
            f"<td>{op}</td><td>{_state(site)}</td><td>{_worst(members)}</td></tr>"
        )
    return (
        f'<section><h2>Sites</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _halved(shapes: str) -> str:
    """Sizes may wrap before K and V, nowhere else."""
    return ",<wbr>".join(escape(part) for part in re.split(r",(?=[^,]*,[^,]*$)", shapes))


def _index(site: Mapping[str, Any], report: Mapping[str, Any]) -> int:
    return next(n for n, s in enumerate(report["sites"]) if s is site)


def _state(site: Mapping[str, Any]) -> str:
    before, after = site["state_bytes_before"], site["state_bytes_after"]
    text = re.sub(r" (?=[KMGT]?i?B\b)", "&nbsp;", arrow(state_label(site)))
    if before and after is not None and after != before:
        text += f"<small>{100 * (after - before) / before:+.0f} %</small>".replace("-", "−")
    return text


def _worst(members: Sequence[Mapping[str, Any]]) -> str:
    """The largest error over the members, or why there is none."""
    records = [checked(s) for s in members]
    if any(r is None for r in records):
        spelled = members[0]["evidence"].get("found_by")
        return '<span class="pill warn">not checked</span>' if spelled else '<span class="muted">–</span>'
    if any(r.get("verified") is False for r in records if r):
        return '<span class="pill bad">failed</span>'
    values, gradients = zip(*(errors(r) for r in records if r), strict=True)
    gradient = max(gradients, key=_finite)
    below = "" if gradient is None else f"<small>gradients {_fixed(gradient)}</small>"
    return _fixed(max(values, key=_finite)) + below


def _fixed(value: Any) -> str:
    # The minus of an exponent is no place to wrap.
    return f'<span class="fixed">{escape(number(value))}</span>'


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0


def _candidates(report: Mapping[str, Any]) -> str:
    cards = []
    for index, (label, members) in enumerate(fold_candidates(report["unmatched"])):
        u = members[0]
        text, detail = meaning(u["reason"])
        rows = {
            "node": f"<code>{escape(', '.join(str(m['node']) for m in members))}</code>",
            "source": f"<code>{escape(u['source'])}</code>" if u["source"] else None,
            "how far it came": escape(u["stopped_at"]),
            "why it stopped": escape(text) + (f" ({escape(detail)})" if detail not in ("", u["stopped_at"]) else ""),
            "what to do": escape(u["reason"]["remedy"]),
            "evidence": " ".join(_pair(k, v) for k, v in u["evidence"].items()) or None,
        }
        title = f"<code>{breakable(label)}</code>" if label else "<span>(no module path)</span>"
        head = f"<h3>{title} {reason_link(u['reason'], 'pill warn')}</h3>"
        cards.append(f'<article id="candidate-{index}">{head}{facts(rows)}</article>')
    return f"<section><h2>Not recognised</h2>{''.join(cards)}</section>" if cards else ""


def _pair(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f'<span class="role">{escape(str(key))} <code>{escape(text)}</code></span>'


def _remarks(report: Mapping[str, Any]) -> str:
    items = [
        f"<li>{pill(heading, tone)} {escape(line)}{f' ({times} times)' if times > 1 else ''}</li>"
        for heading, key, tone in (
            ("graph break", "graph_breaks", "bad"),
            ("skipped frame", "skipped_frames", "bad"),
            ("note", "notes", ""),
        )
        for line, times in Counter(report[key]).items()
    ]
    return f'<section><h2>Also</h2><ul class="plain">{"".join(items)}</ul></section>' if items else ""


def _graphs(groups: Sequence[Group], report: Mapping[str, Any]) -> str:
    parts = []
    for label, members, _ in groups:
        # A group's first site is unfolded: the others look alike.
        inner = "".join(
            site_html(s, _index(s, report), report, opened=n == 0, first=members[0]) for n, s in enumerate(members)
        )
        if len(members) > 1:
            head = f"<code>{breakable(label)}</code> <small>{escape(count(len(members), 'site'))}</small>"
            inner = f'<details class="group" open><summary>{head}</summary>{inner}</details>'
        parts.append(inner)
    return f"<section><h2>Site by site</h2>{''.join(parts)}</section>" if parts else ""


def _reasons(groups: Sequence[Group], report: Mapping[str, Any]) -> str:
    """What each code of this report means, and where it applies."""
    reasons: dict[str, Mapping[str, Any]] = {}
    where: dict[str, list[str]] = {}
    for label, members, _ in groups:
        if (reason := members[0]["reason"]) is not None:
            reasons.setdefault(reason["code"], reason)
            link = f'<a href="#site-{_index(members[0], report)}"><code>{breakable(label)}</code></a>'
            where.setdefault(reason["code"], []).append(link)
    for index, (label, members) in enumerate(fold_candidates(report["unmatched"])):
        reason = members[0]["reason"]
        reasons.setdefault(reason["code"], reason)
        link = f'<a href="#candidate-{index}"><code>{breakable(label or str(members[0]["node"]))}</code></a>'
        where.setdefault(reason["code"], []).append(link)
    parts = []
    for code, reason in reasons.items():
        example = f'<div class="code"><pre>{escape(EXAMPLES[code])}</pre></div>' if code in EXAMPLES else None
        rows = {
            "meaning": escape(meaning(reason)[0]),
            "what to do": escape(reason["remedy"]),
            "example": example,
            "here": ", ".join(where[code]),
        }
        parts.append(f'<article id="{reason_id(code)}"><h3><code>{escape(code)}</code></h3>{facts(rows)}</article>')
    return f"<section><h2>Reason codes</h2>{''.join(parts)}</section>" if parts else ""


def _recipe(report: Mapping[str, Any]) -> str:
    if report["recipe"] is None:
        return ""
    text = escape(json.dumps(report["recipe"], indent=2))
    shown = f'<details class="group"><summary>as JSON</summary><div class="code"><pre>{text}</pre></div></details>'
    return f"<section><h2>Recipe</h2>{shown}</section>"
