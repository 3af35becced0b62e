"""The style sheet of the report: light and dark, screens of any width, paper. No font or picture from elsewhere."""

# ruff: noqa: E501
from __future__ import annotations

STYLE = """
:root { --paper:#ffffff; --ink:#1f2933; --muted:#5b6773; --line:#b8c1ca; --wait:#f1f3f5; --band:#d9e6cf; --best:#e8f1fa;
  --warn:#fff3d6; --bad:#a4262c; --deepspeed:#c2610c; --terapipe:#0068b5; --torch:#00806a; color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper:#14191f; --ink:#e4e9ee; --muted:#9dabb8; --line:#46525e; --wait:#232b33; --band:#2c3d2b; --best:#17304a;
    --warn:#40330f; --bad:#ff9a94; --deepspeed:#f0954a; --terapipe:#5cb3f5; --torch:#3fc4a8; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 82rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .5rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
.sub, figcaption, .note { color: var(--muted); font-size: .9rem; }
.headline { font-size: 1.15rem; max-width: 52rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { flex: 1 1 13rem; max-width: 22rem; border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; color: var(--terapipe); font-variant-numeric: tabular-nums; }
.card.slower b { color: var(--bad); }
.card span { display: block; font-size: .88rem; }
.card .sub { margin-top: .25rem; }
.warn { background: var(--warn); border-left: .25rem solid var(--deepspeed); padding: .5rem .8rem; margin: .6rem 0; max-width: 52rem; }
.scroll { overflow-x: auto; margin: .3rem 0 1rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
.runs { width: 100%; }
th, td { text-align: right; padding: .32rem .5rem; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th { font-weight: 600; color: var(--muted); line-height: 1.25; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child, td.reason { text-align: left; }
td.reason { white-space: normal; color: var(--bad); min-width: 16rem; overflow-wrap: anywhere; }
tr.best td { background: var(--best); font-weight: 600; }
tr.failed td:first-child { color: var(--muted); }
.dot { display: inline-block; width: .65em; height: .65em; margin-right: .45em; background: currentColor; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.dot.terapipe { border-radius: 50%; } .dot.torch { clip-path: polygon(50% 0, 100% 100%, 0 100%); }
.deepspeed { color: var(--deepspeed); } .terapipe { color: var(--terapipe); } .torch { color: var(--torch); }
.tag { display: inline-block; margin-left: .4em; padding: 0 .4em; border: 1px solid currentColor; border-radius: .6em; font-size: .75rem;
  font-weight: 600; color: var(--muted); }
tr.best .tag.first { color: var(--terapipe); }
.facts th, .facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.facts th { padding-right: 1.2rem; white-space: nowrap; }
figure { margin: 1rem 0 1.4rem; }
.side { display: flex; flex-wrap: wrap; gap: 0 1.5rem; align-items: flex-start; }
.side figure { flex: 1 1 21rem; min-width: 0; }
svg { display: block; height: auto; }
.shrinks svg { min-width: 36rem; } .small svg { min-width: 20rem; } .wide svg { min-width: 52rem; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: "DejaVu Sans", Verdana, "Segoe UI", sans-serif; }
img { display: block; background: #ffffff; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--muted); }
pre { font-size: .78rem; line-height: 1.4; overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: .4rem;
  padding: .6rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
a { color: var(--terapipe); }
@media (max-width: 40rem) { body { padding: 1rem .8rem 3rem; } h1 { font-size: 1.4rem; } .headline { font-size: 1.05rem; } }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } .raw { display: none; }
  .scroll { overflow: visible; } .scroll svg, .scroll img { min-width: 0 !important; width: 100% !important; }
  .runs { font-size: 6.8pt; } th, td { padding: .2rem .28rem; } h2, h3 { break-after: avoid; }
  .card, tr, .side figure { break-inside: avoid; } tr.best td { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
