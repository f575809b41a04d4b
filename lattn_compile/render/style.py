"""Style sheet of the HTML report. Inlined into the page, so that one file is the whole report."""

from __future__ import annotations

__all__ = ["CSS"]

CSS = """
:root { color-scheme: light dark; --ink: #1d2129; --muted: #667085; --line: #e2e5ea; --page: #f7f8fa; --card: #fff;
  --good: #1a7f4b; --good-bg: #e3f5ea; --warn: #98610a; --warn-bg: #fdf0d8; --bad: #b3261e; --bad-bg: #fde7e5;
  --link: #2456b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --muted: #98a1b0; --line: #30353f; --page: #14171c;
  --card: #1c2027;
  --good: #6fd39b; --good-bg: #173526; --warn: #e8b45a; --warn-bg: #3a2c12; --bad: #f2a09a; --bad-bg: #421d1a;
  --link: #8ab4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 92rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .7rem; font-size: 1.05rem; }
header p { margin: .3rem 0 1.2rem; color: var(--muted); }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
small, .muted { color: var(--muted); } a { color: var(--link); text-decoration: none; } a:hover { text-decoration:
  underline; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { flex: 1 1 8rem; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius:
  8px; }
.card b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card.good b { color: var(--good); } .card.warn b { color: var(--warn); } .card.bad b { color: var(--bad); }
.card.wide { flex: 2 1 18rem; }
.bar { position: relative; height: 1.3rem; margin-bottom: .25rem; border-radius: 4px; overflow: hidden; background:
  var(--page); }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--line); } .bar.after i { background:
  var(--good-bg); }
.bar span { position: relative; padding-left: .5rem; font-size: .8rem; line-height: 1.3rem; font-variant-numeric:
  tabular-nums; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .7rem; text-align: left; vertical-align: top; white-space: nowrap; }
td:first-child { white-space: normal; min-width: 16rem; }
th { color: var(--muted); font-weight: 600; font-size: 12px; } tbody tr { border-top: 1px solid var(--line); }
.pill { display: inline-block; padding: 0 .55rem; border-radius: 99px; background: var(--line); font-size: 12.5px;
  white-space: nowrap; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.warn { color: var(--warn); background: var(--warn-bg); }
ul.plain { margin: 0; padding: 0; list-style: none; } ul.plain li { margin-bottom: .5rem; overflow-wrap: anywhere; }
.group { margin-bottom: .6rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.group > summary { padding: .6rem 1rem; cursor: pointer; } .group > pre { margin: 0; border-top: 1px solid
  var(--line); }
.site { padding: .6rem 1rem; border-top: 1px solid var(--line); } .site > summary { cursor: pointer; }
.site > dl { margin: .5rem 0 .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: 13.5px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: .8rem; margin-top: .8rem; }
@media (max-width: 60rem) { .pair { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; } figcaption { color: var(--muted); font-size: 12px; font-weight: 600; margin-bottom: .25rem; }
pre { margin: 0; padding: .7rem .8rem; overflow: auto; max-height: 34rem; background: var(--page); border-radius:
  6px; line-height: 1.5; }
pre span { display: block; min-height: 1.5em; width: max-content; min-width: 100%; }
.gone { background: var(--bad-bg); } .new { background: var(--good-bg); }
""".strip()
