"""Style sheet of the HTML report. Inlined into the page, so that one file is the whole report."""

from __future__ import annotations

__all__ = ["CSS"]

CSS = """
:root { color-scheme: light dark; --ink: #1c2128; --muted: #667085; --line: #e3e6eb; --page: #f6f7f9; --card: #fff;
  --good: #1a7f4b; --good-bg: #e4f4ea; --warn: #8a5a08; --warn-bg: #fcf0d6; --bad: #b3261e; --bad-bg: #fde7e5;
  --link: #2456b8; --q: #dbe7ff; --k: #d9f0e3; --v: #fbe6cf; --g: #ece2fb; --beta: #fbdfe8; --state: #fff1b8;
  --out: #e2e8ee; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --muted: #98a1b0; --line: #2f343e; --page: #13161b;
  --card: #1b1f26; --good: #6fd39b; --good-bg: #173526; --warn: #e8b45a; --warn-bg: #3a2c12; --bad: #f2a09a;
  --bad-bg: #421d1a; --link: #8ab4ff; --q: #23375f; --k: #1d4430; --v: #51381b; --g: #3b2c5c; --beta: #552638;
  --state: #4d4310; --out: #333b46; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { margin: 0 auto; padding: 2.2rem 1.5rem 3rem; max-width: 96rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.6rem; letter-spacing: -.01em; }
h2 { margin: 2.4rem 0 .8rem; font-size: 1.1rem; }
h3 { margin: 0 0 .5rem; font-size: .95rem; font-weight: 600; }
header p { margin: .4rem 0 1.4rem; max-width: 62rem; color: var(--muted); }
footer { margin-top: 3rem; color: var(--muted); font-size: 12px; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
small, .muted { color: var(--muted); }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { flex: 1 1 8rem; padding: .8rem 1rem; }
.card, .scroll, .group, .site, article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card b { display: block; font-size: 1.4rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.card small { display: block; line-height: 1.35; }
.card.good b { color: var(--good); } .card.warn b { color: var(--warn); } .card.bad b { color: var(--bad); }
.card.wide { flex: 2 1 16rem; }
.bar { position: relative; height: 1.3rem; margin-bottom: .25rem; border-radius: 4px; overflow: hidden; background:
  var(--page); }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--line); } .bar.after i { background:
  var(--good-bg); }
.bar span { position: relative; padding-left: .5rem; font-size: .8rem; line-height: 1.3rem; font-variant-numeric:
  tabular-nums; }
.scroll { overflow: auto; max-height: 85vh; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .65rem; text-align: left; vertical-align: top; white-space: nowrap; }
th { position: sticky; top: 0; z-index: 1; background: var(--card); border-bottom: 1px solid var(--line);
  color: var(--muted); font-weight: 600; font-size: 12px; }
td:first-child { white-space: normal; min-width: 13rem; }
@media (max-width: 72rem) { table { font-size: 12.5px; } th, td { padding: .45rem .5rem; }
  th, td { white-space: normal; } td:first-child { min-width: 9rem; overflow-wrap: anywhere; } }
.fixed { white-space: nowrap; }
td small { display: block; font-size: 12px; }
tbody tr + tr td { border-top: 1px solid var(--line); } tbody tr:hover td { background: var(--page); }
.pill { display: inline-block; padding: 0 .55rem; border-radius: 99px; background: var(--line); font-size: 12.5px;
  font-weight: 400; white-space: nowrap; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.warn { color: var(--warn); background: var(--warn-bg); }
ul.plain { margin: 0; padding: 0; list-style: none; } ul.plain li { margin-bottom: .5rem; overflow-wrap: anywhere; }
article, .site, .group { margin-bottom: .7rem; } article { padding: .8rem 1rem; }
summary { cursor: pointer; } .site > summary, .group > summary { padding: .65rem 1rem; }
.group > .site { margin: 0; border-width: 1px 0 0; border-radius: 0; }
.group > .site:last-child { border-radius: 0 0 8px 8px; }
.group > .code { padding: 0 1rem 1rem; }
.site > :not(summary) { margin: 0 1rem .9rem; }
.site:target, article:target { border-color: var(--link); }
.anchor { float: right; color: var(--muted); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.2rem; margin: 0; font-size: 13.5px;
  max-width: 74rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.after pre span { width: auto; padding-left: 4.6rem; text-indent: -4.6rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.after pre span::before { text-indent: 0; }
.role mark { margin: 0; }
.role { display: inline-block; margin: 0 .9rem .15rem 0; }
.change { font-size: 13.5px; color: var(--muted); } .change b { color: var(--ink); font-size: 1.05rem; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: .9rem; align-items: start; }
@media (max-width: 54rem) { .pair { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; min-width: 0; }
figcaption { margin-bottom: .3rem; color: var(--muted); font-size: 12px; font-weight: 600; }
.code { overflow: auto; max-height: 36rem; border-radius: 6px; background: var(--page); padding: .5rem 0; }
dd .code { padding: .5rem .8rem; }
pre { margin: 0; line-height: 1.55; }
.group > .code pre { padding: .3rem .8rem; }
pre span { display: block; width: max-content; min-width: 100%; padding-right: 1rem; border-left: 3px solid
  transparent; }
pre span::before { counter-increment: line; content: counter(line); display: inline-block; width: 2.8rem;
  padding-right: .9rem; text-align: right; color: var(--muted); opacity: .55; }
pre span.gone { border-color: var(--bad); } pre span.new { border-color: var(--good); }
pre span.note { color: var(--muted); } pre span.note::before { counter-increment: none; content: ""; }
pre i { font-style: normal; color: var(--muted); } pre b { font-weight: 600; }
mark { margin: 0 -.2em; padding: 0 .2em; border-radius: 3px; background: var(--out); color: inherit; }
.r-q { background: var(--q); } .r-k { background: var(--k); } .r-v { background: var(--v); }
.r-g { background: var(--g); } .r-beta { background: var(--beta); } .r-state { background: var(--state); }
.code summary { padding: .25rem .8rem; color: var(--link); font-size: 12.5px; position: sticky; left: 0;
  width: max-content; }
@media print { :root { --page: #fff; }
  body { padding: 0; max-width: none; font-size: 10.5pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  .scroll, .code { overflow: visible; max-height: none; } .anchor { display: none; }
  th { position: static; } thead { display: table-header-group; } td:first-child { min-width: 0; }
  td, th { white-space: normal; padding: .25rem .35rem; font-size: 8pt; } td:first-child { overflow-wrap: anywhere; }
  td small, td .pill { font-size: 7pt; }
  tr, .card, article, dl { break-inside: avoid; } h2, h3, summary, figcaption { break-after: avoid; }
  pre, code { font-size: 7.5pt; } pre span { width: auto; white-space: pre-wrap; overflow-wrap: anywhere; } }
""".strip()
