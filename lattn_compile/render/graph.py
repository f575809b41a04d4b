"""The text of a subgraph as HTML: names and operators in columns, roles marked, the middle of a long one folded away.

Two spellings are read, `Node.format_node()` and generated Python; a line that is neither is shown as it came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from lattn_compile.render.labels import count, nodes_of_line

__all__ = ["graph_html", "op_roles", "role_class", "role_names", "same_but_for_numbers"]

# Above this many lines only the first and last are shown at once.
LONG, HEAD, TAIL = 40, 16, 8

# Positional arguments of the lattn:: ops.
OP_ROLES = ("q", "k", "v", "g", "beta", "state")

_NODE = re.compile(
    r"\s*%?(?P<name>\w+)\s*:.*?=\s*(?P<opcode>\w+)\[target=(?P<target>[^\]]+)\]"
    r"(?:\(args = \((?P<args>.*)\), kwargs = \{(?P<kwargs>.*)\}\))?\s*$"
)
_PYTHON = re.compile(r"\s*(?P<name>\w+)\s*(?::\s*(?P<type>\"[^\"]*\"|'[^']*'|[\w.]+))?\s*=\s*(?P<value>[^=].*)$")
_NAME = re.compile(r"(?<![\w.%])%?([A-Za-z_]\w*)(?![\w.(]|\s*=(?!=))")
_OPERATOR = re.compile(r"^(?:torch\.ops\.)?[A-Za-z_][\w.]*(?=\()")


def role_names(roles: Mapping[str, str], *texts: str | None) -> dict[str, str]:
    """Which role the values of a graph have, by name: of each role's text, the first word that is a value's name."""
    known = {m.group(1) for text in texts if text for m in _NAME.finditer(text)}
    out: dict[str, str] = {}
    for role, text in roles.items():
        name = next((n for n in re.findall(r"[A-Za-z_]\w*", text) if n in known), None)
        if name is not None:
            out.setdefault(name, role)
    return out


def same_but_for_numbers(a: str | None, b: str | None) -> bool:
    """Whether two texts are one subgraph in two layers, whose node names differ in their numbers only."""
    if a is None or b is None:
        return a is b
    return re.sub(r"\d+", "", a) == re.sub(r"\d+", "", b)


def graph_html(text: str | None, other: str | None, mark: str, names: Mapping[str, str], *, empty: str) -> str:
    """One side of a site.

    Args:
        text: the subgraph, a node a line; None if it was not recorded.
        other: the other side. Lines that it lacks get the class `mark`.
        names: role of a value, by its name, as `role_names` and `op_roles` give it.
        empty: what to say where there is no text.
    """
    if not text or not text.strip():
        return f'<p class="muted">{escape(empty)}</p>'
    raw = [line for line in text.splitlines() if line.strip()]
    known = None if other is None else {line.strip() for line in other.splitlines()}
    parsed = [_split(line) for line in raw]
    lines = [
        _line(cells, names, mark if known is not None and line.strip() not in known else "")
        for line, cells in zip(raw, _aligned(parsed), strict=True)
    ]
    if len(lines) <= LONG:
        return f'<div class="code">{_block(lines, 0)}</div>'
    head, middle = (sum(map(nodes_of_line, part)) for part in (raw[:HEAD], raw[HEAD:-TAIL]))
    return (
        f'<div class="code">{_block(lines[:HEAD], 0)}'
        f"<details><summary>{count(middle, 'more node')}</summary>{_block(lines[HEAD:-TAIL], head)}</details>"
        f"{_block(lines[-TAIL:], head + middle)}</div>"
    )


def op_roles(text: str | None) -> dict[str, str]:
    """Roles of the values that an exact op takes, read from its arguments."""
    out: dict[str, str] = {}
    for line in (text or "").splitlines():
        cells = _split(line)
        if len(cells) == 3 and cells[2].startswith(("lattn.", "lattn::")):
            arguments = list(_arguments(cells[2].partition("(")[2]))
            for role, argument in zip(OP_ROLES, arguments, strict=False):
                if argument.isidentifier() and argument != "None":
                    out.setdefault(argument, role)
    return out


def _split(line: str) -> tuple[str, ...]:
    """`(name, type, expression)` of a node, or the line as it is."""
    if (node := _NODE.match(line)) is not None:
        if node["args"] is None:
            return node["name"], "", f"{node['opcode']} {node['target']}"
        arguments = [*_arguments(node["args"]), *(a.replace(": ", "=", 1) for a in _arguments(node["kwargs"]))]
        return node["name"], "", f"{_operator(node['target'])}({re.sub(r'%(?=[A-Za-z_])', '', ', '.join(arguments))})"
    if (python := _PYTHON.match(line)) is not None:
        # Generated code ends in `;  x = y = None`, which frees values and says nothing.
        value = re.sub(r";\s+\w+ = (?:\w+ = )*None\s*$", "", python["value"])
        return python["name"], (python["type"] or "").strip("\"'"), _OPERATOR.sub(lambda m: _operator(m[0]), value)
    return (line.rstrip(),)


def _operator(target: str) -> str:
    return target.removeprefix("torch.ops.").removeprefix("operator.").removesuffix(".default")


def _arguments(text: str) -> Iterator[str]:
    """Arguments of a call, split at the commas that stand in no bracket and in no quotes."""
    depth, start, quote = 0, 0, ""
    for at, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth < 0:  # the call's own bracket
                text = text[:at]
                break
        elif c == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()


def _aligned(lines: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The same cells, padded: names and types each as wide as most, so that one long name does not push all others."""
    widths = []
    for column in (0, 1):
        lengths = sorted(len(cells[column]) for cells in lines if len(cells) == 3)
        widths.append(lengths[int(len(lengths) * 0.95)] if lengths else 0)
    for cells in lines:
        if len(cells) == 3:
            yield cells[0].ljust(widths[0]), cells[1].ljust(widths[1]) + ("  " if widths[1] else ""), cells[2]
        else:
            yield cells


def _line(cells: tuple[str, ...], names: Mapping[str, str], mark: str) -> str:
    if len(cells) == 1:
        text = escape(cells[0])
        if (nodes := nodes_of_line(cells[0])) != 1:
            return f'<span class="note" style="counter-increment:line {nodes}">{text}</span>'
    else:
        name, annotation, value = cells
        bare = name.rstrip()
        operator = _OPERATOR.match(value)
        at = operator.end() if operator else 0
        head = f"<b>{escape(value[:at])}</b>" if at else ""
        shown = _role(bare, names[bare]) if bare in names else f"<i>{escape(bare)}</i>"
        text = f"{shown}{' ' * (len(name) - len(bare))}  {escape(annotation)}{head}{_marked(value[at:], names)}"
    return f'<span class="{mark}">{text}</span>' if mark else f"<span>{text}</span>"


def _marked(text: str, names: Mapping[str, str]) -> str:
    """Escaped text, each name that has a role wrapped."""
    out, last = [], 0
    for m in _NAME.finditer(text):
        if m.group(1) in names:
            out += [escape(text[last : m.start()]), _role(m.group(1), names[m.group(1)])]
            last = m.end()
    return "".join([*out, escape(text[last:])])


def _role(name: str, role: str) -> str:
    return f'<mark class="{role_class(role)}" title="{escape(role)}">{escape(name)}</mark>'


def role_class(role: str) -> str:
    """A colour for each role of the field; any other role has the outputs'."""
    known = {"initial_state": "state", "S": "state"}.get(role, role)
    return f"r-{known}" if known in OP_ROLES else "r-out"


def _block(lines: Sequence[str], before: int) -> str:
    return f'<pre style="counter-reset:line {before}">{"".join(lines)}</pre>'
