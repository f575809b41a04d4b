"""Reports as text, HTML and Graphviz. Input is always `Report.to_dict()`: nothing here knows the dataclasses."""

from __future__ import annotations

from lattn_compile.render.dot import render_dot
from lattn_compile.render.html import render_html
from lattn_compile.render.labels import summary_line
from lattn_compile.render.table import columns, render_table

__all__ = ["columns", "render_dot", "render_html", "render_table", "summary_line"]
