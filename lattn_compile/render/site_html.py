"""One site of the page: how it was found, what was verified, and its subgraph before and after."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from lattn_compile.render.evidence import checked, errors, found, node_counts, number, others, roles
from lattn_compile.render.graph import LONG, graph_html, op_roles, role_class, role_names, same_but_for_numbers
from lattn_compile.render.labels import AXES, count, meaning, policy_label, state_label

__all__ = ["arrow", "breakable", "facts", "pill", "reason_id", "reason_link", "site_html"]


def site_html(
    site: Mapping[str, Any], index: int, report: Mapping[str, Any], *, opened: bool, first: Mapping[str, Any]
) -> str:
    """A `<details>` with id `site-<index>`.

    Args:
        first: the site that stands for all equal layers. A long subgraph that is its own but for node names is not
            shown again.
    """
    tone = "good" if site["verdict"] == "rewritten" else "warn"
    verdict = reason_link(site["reason"], "pill warn") if site["reason"] else pill(site["verdict"], tone)
    anchor = f'<a class="anchor" href="#site-{index}" title="link to this site">#</a>'
    head = (
        f"<summary><code>{breakable(site['id'])}</code> {verdict} <small>{escape(site['kind'])} · "
        f"{escape(site['rule'])} rule, {_DECAYS.get(site['decay'], escape(site['decay']))} · "
        f"{escape(site['form'])}</small> {anchor}</summary>"
    )
    body = f"{facts(_facts(site, report))}{_subgraphs(site, first, report)}"
    return f'<details class="site" id="site-{index}"{" open" if opened else ""}>{head}{body}</details>'


_DECAYS = {"none": "no decay", "head": "one decay a head", "channel": "one decay a key channel"}


def _facts(site: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, str | None]:
    """HTML of every line of the list, None for what is not known."""
    why = None
    if site["reason"]:
        text, detail = meaning(site["reason"])
        why = escape(text + (f" ({detail})" if detail else "")) + f". {escape(site['reason']['remedy'])}"
    policy = site["policy"]
    training = [
        count(site["autograd_nodes"], "autograd node") if site["autograd_nodes"] else "",
        f"{count(site['residual_count'], 'tensor')} saved for backward" if site["residual_count"] else "",
    ]
    frontier = site["evidence"].get("frontier")
    given = ", ".join(map(str, frontier)) if isinstance(frontier, list) else ""
    return {
        "left because": why,
        "source": f"<code>{escape(site['source'])}</code>" if site["source"] else None,
        "library call": f"<code>{breakable(site['call'])}</code>" if site["call"] else None,
        "found": escape(found(site) or "") or None,
        "self-check": _self_check(site),
        "roles": _legend(roles(site)),
        "folded into the op": escape(", ".join(site["folded"])) or None,
        "shapes": " &nbsp; ".join(
            f'<span class="muted">{a}</span> {escape(str(site["shapes"][a]))}' for a in AXES if a in site["shapes"]
        )
        or None,
        "state": f"{arrow(state_label(site))} per sequence",
        "policy": None
        if policy is None
        else f'<span title="{escape(json.dumps(policy))}">{escape(policy_label(policy))}</span>{_rule(site, report)}',
        "training": escape(", ".join(t for t in training if t)) or None,
        "taken as given": f"<code>{escape(given)}</code>" if given else None,
        "other evidence": " ".join(
            f'<span class="role">{escape(k)} <code>{escape(v if isinstance(v, str) else json.dumps(v))}</code></span>'
            for k, v in others(site)
        )
        or None,
    }


def _rule(site: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """` · rule 2 of the recipe: model.layers.*`, as far as it is known."""
    index = site["evidence"].get("rule_index")
    if type(index) is not int:
        return ""
    rules = (report["recipe"] or {}).get("rules")
    rule = rules[index] if isinstance(rules, list) and 0 <= index < len(rules) else None
    glob = rule.get("match") if isinstance(rule, Mapping) else rule[0] if isinstance(rule, list) and rule else None
    return f" <small>recipe rule {index}{f': <code>{escape(str(glob))}</code>' if glob is not None else ''}</small>"


def _self_check(site: Mapping[str, Any]) -> str | None:
    record = checked(site)
    if record is None:
        if not site["evidence"].get("found_by"):
            return None
        return f"{pill('not checked', 'warn')} the rewrite was not compared with the original"
    ok = record.get("verified")
    pairs = zip(("values", "gradients"), errors(record), strict=True)
    worst = ", ".join(f"{what} {number(error)}" for what, error in pairs if error is not None)
    said = ["original and rewrite in float64" + (f", largest error: {worst}" if worst else "")]
    if isinstance(record.get("gradients"), str):
        said.append(f"gradients {record['gradients']}")
    if record.get("shapes") is not None:
        said.append(f"{record['shapes']} shapes")
    if record.get("cached") is True:
        said.append("taken over from an equal site")
    elif isinstance(record.get("seconds"), (int, float)):
        said.append(f"{record['seconds']:.3f} s")
    mark = pill("failed", "bad") if ok is False else pill("agrees", "good") if ok else ""
    return f"{mark} {escape('; '.join(said))}"


def _legend(texts: Mapping[str, str]) -> str | None:
    marks = (
        f'<span class="role"><mark class="{role_class(role)}">{escape(role)}</mark> <code>{escape(text)}</code></span>'
        for role, text in texts.items()
    )
    return " ".join(marks) or None


def _subgraphs(site: Mapping[str, Any], first: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    before, after = site["graph_before"], site["graph_after"]
    counts = node_counts(site)
    if before is None and after is None:
        return "" if counts is None else f'<p class="change">{counts[0]:,} → {count(counts[1], "node")}</p>'
    size = max(len((text or "").splitlines()) for text in (before, after))
    if site is not first and size > LONG and same_but_for_numbers(before, first["graph_before"]):
        index = next(n for n, s in enumerate(report["sites"]) if s is first)
        link = f'<a href="#site-{index}"><code>{breakable(first["id"])}</code></a>'
        return (
            f'<p class="muted">The subgraphs are those of {link} under other node names; the JSON report has them.</p>'
        )
    names = {**role_names(roles(site), before, after), **op_roles(after)}
    gone = graph_html(before, after, "gone", names, empty="not recorded")
    absent = "left as it is" if site["verdict"] == "left" else "not recorded"
    new = graph_html(after, before, "new", names, empty=absent)
    change = f'<p class="change"><b>{counts[0]:,}</b> nodes → <b>{counts[1]:,}</b></p>' if counts else ""
    return (
        f'{change}<div class="pair"><figure><figcaption>before</figcaption>{gone}</figure>'
        f'<figure class="after"><figcaption>after</figcaption>{new}</figure></div>'
    )


def facts(rows: Mapping[str, str | None]) -> str:
    """A list of `term: HTML`, without the terms of which nothing is known."""
    inner = "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in rows.items() if v is not None)
    return f"<dl>{inner}</dl>" if inner else ""


def pill(text: str, tone: str) -> str:
    return f'<span class="pill {tone}">{escape(text)}</span>'


def reason_id(code: str) -> str:
    return "reason-" + re.sub(r"\W", "_", code)


def reason_link(reason: Mapping[str, Any], classes: str = "") -> str:
    """The code, leading to its explanation on the same page."""
    attribute = f' class="{classes}"' if classes else ""
    return f'<a{attribute} href="#{reason_id(reason["code"])}">{escape(reason["code"])}</a>'


def arrow(text: str) -> str:
    return escape(text).replace("-&gt;", "→")


def breakable(path: str) -> str:
    """Long module paths may wrap at their dots and slashes, nowhere else."""
    return escape(path).replace(".", ".<wbr>").replace("/", "/<wbr>")
