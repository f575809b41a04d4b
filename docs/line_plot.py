"""Plots of lines that are labelled at their ends, as SVG to be read on white and on black."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Box", "line_plot"]

# Middle tones and dashes: to be told apart on white, on black, and in grey.
COLORS = ("#3b82d6", "#d9702e", "#2f9e6b", "#c2528b", "#8a6fd8", "#a08a2c", "#4d98a8")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444b55; } .axis { stroke: #9aa3ae; } .grid { stroke: #9aa3ae44; }
path { fill: none; stroke-width: 1.8; }
@media (prefers-color-scheme: dark) { text { fill: #c3cad4; } }
"""


class Box(NamedTuple):
    """Where the axes stand, in pixels; right of them, `gap` away, labels within `margin`."""

    left: int
    top: int
    width: int
    height: int
    margin: int
    gap: int

    def x(self, part: float) -> float:
        return self.left + self.width * part

    def y(self, part: float) -> float:
        return self.top + self.height * (1 - part)


def line_plot(
    box: Box,
    title: str,
    unit: str,
    x_marks: Sequence[tuple[float, str]],
    y_marks: Sequence[tuple[float, str]],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    said: Mapping[str, str],
) -> str:
    """An SVG of at most as many lines as there are colours.

    Args:
        x_marks, y_marks: places on the axes, 0 to 1, and what stands there.
        lines: by label, points in parts of the axes. said: by label, what is said of its end.
    """
    parts = [f'<text x="{box.left}" y="16" font-weight="600">{title}</text>']
    right, bottom = box.left + box.width, box.top + box.height
    for at, mark in y_marks:
        y = box.y(at)
        parts.append(f'<line class="grid" x1="{box.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{box.left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark}</text>')
    for at, mark in x_marks:
        parts.append(f'<text x="{box.x(at):.1f}" y="{bottom + 18}" text-anchor="middle">{mark}</text>')
    parts.append(f'<path class="axis" stroke-width="1" d="M{box.left} {box.top}V{bottom}H{right}"/>')
    parts.append(f'<text x="{box.left + box.width / 2}" y="{bottom + 36}" text-anchor="middle">{unit}</text>')
    for i, line in enumerate(lines.values()):
        points = "L".join(f"{box.x(x):.1f} {box.y(y):.1f}" for x, y in line)
        dash = f' stroke-dasharray="{DASHES[i]}"' if DASHES[i] else ""
        parts.append(f'<path stroke="{COLORS[i]}"{dash} d="M{points}"/>')
    colors, below = dict(zip(lines, COLORS, strict=False)), -math.inf
    for label in sorted(lines, key=lambda label: -lines[label][-1][1]):
        below = max(box.y(lines[label][-1][1]) + 4, below + 15)
        x = right + box.gap
        parts.append(f'<circle cx="{x - 9}" cy="{below - 4:.1f}" r="4" fill="{colors[label]}"/>')
        parts.append(f'<text x="{x}" y="{below:.1f}">{label}  {said[label]}</text>')
    body, size = "\n".join(parts), f'viewBox="0 0 {right + box.margin} {bottom + 46}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
