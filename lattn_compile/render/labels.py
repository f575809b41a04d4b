"""The short strings that the table, the page and the drawing share: sizes, policies, folded paths, the summary."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lattn_compile.errors import REASONS

__all__ = [
    "count",
    "fold_candidates",
    "fold_sites",
    "meaning",
    "nodes_of_line",
    "policy_label",
    "shape_label",
    "size_label",
    "state_label",
    "state_totals",
    "summary_line",
]

AXES = ("B", "T", "H", "HV", "K", "V")


def count(n: int, noun: str) -> str:
    """`1 site`, `2 sites`, `1,204 nodes`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def size_label(nbytes: int | None) -> str:
    """Bytes in binary units, exact below 1 KiB; `?` for an unknown size."""
    if nbytes is None:
        return "?"
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min(4, int(math.log2(nbytes) // 10))
    return f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def state_label(site: Mapping[str, Any]) -> str:
    before, after = site["state_bytes_before"], site["state_bytes_after"]
    if before is None and after is None:
        return "-"
    if after is None or before == after:
        return size_label(before)
    return f"{size_label(before)} -> {size_label(after)}"


def shape_label(shapes: Mapping[str, int | str]) -> str:
    """Sizes in the order of `AXES`, `1,70,2,4,16,16`; a symbolic one by its name, a missing one `?`."""
    return ",".join(str(shapes.get(a, "?")) for a in AXES) if shapes else "-"


def policy_label(policy: Mapping[str, Any] | None) -> str:
    """`int8/*x64 token`: state format and write mode, then every other key that is not at its usual value."""
    if policy is None:
        return "-"
    write = _write_label(policy.get("write"))
    if write == "exact":
        return "exact"
    parts = [_format_label(policy.get("state")), write]
    usual = {"readout": "before_write", "rounding": "nearest", "storage": "emulated", "kernel": "auto", "seed": 0}
    for key, value in policy.items():
        if key in ("state", "write", "version") or value is None or value == usual.get(key):
            continue
        parts.append(f"{key}={value}")
    return " ".join(p for p in parts if p)


def _format_label(state: Any) -> str:
    if not isinstance(state, Mapping):
        return "" if state is None else str(state)
    name = str(state.get("format", "?"))
    if "block_v" not in state and "block_k" not in state:
        return name
    tile = "x".join("*" if state.get(k) is None else str(state[k]) for k in ("block_k", "block_v"))
    return f"{name}/{tile}"


def _write_label(write: Any) -> str:
    if not isinstance(write, Mapping):
        return "" if write is None else str(write)
    mode = str(write.get("mode", "?"))
    rest = ",".join(
        f"{k}={_format_label(v) if isinstance(v, Mapping) else v}"
        for k, v in write.items()
        if k != "mode" and v is not None
    )
    return f"{mode}({rest})" if rest else mode


def nodes_of_line(line: str) -> int:
    """Nodes that a line of a subgraph's text stands for: one, none for a comment, many where the text was cut."""
    cut = re.match(r"\s*\.\.\. (\d+) more nodes \.\.\.\s*$", line)
    return int(cut[1]) if cut is not None else int(bool(line.strip()) and not line.lstrip().startswith("#"))


def meaning(reason: Mapping[str, Any]) -> tuple[str, str]:
    """A reason's text as `(what the code means, what it means here)`, the second empty if the report adds nothing."""
    known = REASONS.get(reason["code"])
    text = str(reason["text"])
    if known is None or not text.startswith(f"{known.text} (") or not text.endswith(")"):
        return text, ""
    return known.text, text[len(known.text) + 2 : -1]


def fold_sites(sites: Sequence[Mapping[str, Any]], key: Any) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Sites that differ only in one layer number, as one entry with a ranged id.

    Args:
        sites: site dicts in graph order.
        key: what else must agree for two sites to be folded: a function of a site.

    Returns:
        `(label, members)` in order of first appearance; the label of a lone site is its id,
        of a group `model.layers.[0-2,4].linear_attn/gdn#0`.
    """
    return _fold(sites, [s["id"] for s in sites], [key(s) for s in sites])


def fold_candidates(unmatched: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Unmatched candidates that stopped in the same way at the same line of different layers, as one entry; the label
    is the module path, ranged, and empty where no path is known."""

    def same(u: Mapping[str, Any]) -> tuple[Any, ...]:
        # Node names, also those quoted in the words, differ from layer to layer in their number only.
        words = re.sub(r"_\d+\b", "", f"{u['node']} {u['stopped_at']} {u['reason']['text']} {u['evidence']}")
        return words, u["source"], u["reason"]["code"]

    return _fold(unmatched, [u["path"] for u in unmatched], [same(u) for u in unmatched])


def _fold(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], keys: Sequence[Any]
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    groups: dict[Any, list[tuple[int, str, Mapping[str, Any]]]] = {}
    for record, name, key in zip(records, names, keys, strict=True):
        # Only a whole dotted component is a layer number; the 2 in `mamba2` or `#0` is a name.
        number = re.search(r"(?:^|(?<=\.))\d+(?=[./]|$)", name)
        if number is None:
            groups.setdefault((name, None, key), []).append((0, name, record))
        else:
            head, tail = name[: number.start()], name[number.end() :]
            groups.setdefault((head, tail, key), []).append((int(number.group()), name, record))
    out: list[tuple[str, list[Mapping[str, Any]]]] = []
    for which, members in groups.items():
        layers = {n for n, _, _ in members}
        label = members[0][1] if len(layers) == 1 else f"{which[0]}[{_ranges(sorted(layers))}]{which[1]}"
        out.append((label, [record for _, _, record in members]))
    return out


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def state_totals(report: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes per sequence before and after, over the layers whose size is known (a layer in two forms counts once)."""
    sized = {
        s["id"]: (s["state_bytes_before"], s["state_bytes_after"])
        for s in report["sites"]
        if s["state_bytes_before"] is not None and s["state_bytes_after"] is not None
    }
    return (sum(b for b, _ in sized.values()), sum(a for _, a in sized.values())) if sized else None


def is_emulated(report: Mapping[str, Any]) -> bool:
    """Whether the smaller state is only promised: emulated storage rounds for real and saves nothing yet."""
    return any(
        s["state_bytes_before"] != s["state_bytes_after"] and (s["policy"] or {}).get("storage") == "emulated"
        for s in report["sites"]
    )


def summary_line(report: Mapping[str, Any]) -> str:
    """One line. A layer that appears in two forms (prefill, decode) counts once, as left if either was left."""
    left = {s["id"]: s["reason"]["code"] for s in report["sites"] if s["verdict"] == "left"}
    kinds = {s["id"]: s["kind"] for s in report["sites"]}
    done = Counter(kind for site, kind in kinds.items() if site not in left)
    parts = []
    if not kinds:
        parts.append("no linear-attention recurrence found")
    else:
        names = ", ".join(f"{kind} {n}" for kind, n in done.items())
        text = f"{sum(done.values())} of {count(len(kinds), 'site')} rewritten" + (f" ({names})" if names else "")
        if left:
            codes = ", ".join(f"{code} {n}" for code, n in Counter(left.values()).items())
            text += f", {len(left)} left ({codes})"
        parts.append(text)
    if report["unmatched"]:
        parts.append(count(len(report["unmatched"]), "unrecognised candidate"))
    totals = state_totals(report)
    if totals is not None:
        text = f"state {size_label(totals[0])} -> {size_label(totals[1])} per sequence"
        parts.append(text + (" once packed (storage is emulated)" if is_emulated(report) else ""))
    if report["compiles"]:
        cost = f"{count(report['compiles'], 'compile')} in {report['seconds']:.1f} s"
        parts.append(f"{cost}, {count(len(report['graph_breaks']), 'graph break')}")
    elif report["graph_breaks"]:
        parts.append(count(len(report["graph_breaks"]), "graph break"))
    if report["skipped_frames"]:
        # Loud on purpose: a skipped frame runs uncompiled and nothing else would tell.
        parts.append(f"WARNING: Dynamo skipped {count(len(report['skipped_frames']), 'frame')}, which run uncompiled")
    return "lattn-compile: " + "; ".join(parts)
