# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that needs nothing beside itself: Vega is in it, and so are all numbers.

It follows the reader's light or dark mode. A click sorts a table, hides a recipe, or saves a chart as PNG, SVG or CSV.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.reports.drawing import CONFIG, DARK_OF, Chart, library

_STYLE = """
:root{color-scheme:light dark;--ink:#222;--soft:#5f5f5f;--ground:#f6f6f4;--card:#fff;--line:#e2e2de;--head:#fafaf8;
--said:#0072b2}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e3;--soft:#a9a9a6;--ground:#141518;--card:#1e2024;--line:#3a3d42;
--head:#26292e;--said:#69d2ff}}
*{box-sizing:border-box}
body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground)}
main{max-width:1320px;margin:0 auto;padding:24px 28px 60px}
h1{font-size:1.6rem;margin:0 0 .2em;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2em 0 .5em}
h3{font-size:1rem;margin:0 0 .1em}
p{margin:.4em 0}small,.note{color:var(--soft);font-size:.82rem;overflow-wrap:anywhere}
section.card,ul.said{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px}
ul.said{list-style:none;margin:1em 0;border-left:5px solid var(--said);overflow-wrap:anywhere}ul.said li{margin:.25em 0}
ul.said li:first-child{font-weight:600}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.plot{width:100%;min-height:200px}
button{font:inherit;font-size:.86rem;color:inherit;border:1px solid var(--line);border-radius:99px;
background:var(--card);padding:2px 12px;cursor:pointer}
.save button{font-size:.74rem;padding:0 8px;color:var(--soft)}
.chips{position:sticky;top:0;z-index:2;background:var(--ground);padding:8px 0;display:flex;flex-wrap:wrap;gap:8px}
.chips button[aria-pressed=false]{opacity:.4;text-decoration:line-through}
.dot{display:inline-block;width:.75em;height:.75em;border-radius:50%;margin-right:.45em;background:var(--light)}
@media(prefers-color-scheme:dark){.dot{background:var(--dark)}}
pre{margin:0;padding:12px 14px;font-size:.82rem;line-height:1.45}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.86rem}
th,td{padding:7px 11px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{background:var(--head);cursor:pointer;font-weight:600;vertical-align:bottom}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.n small{display:block}
th[aria-sort=ascending]::after{content:" \\25B2"}th[aria-sort=descending]::after{content:" \\25BC"}
td:first-child{white-space:nowrap}
td.long{min-width:220px;overflow-wrap:anywhere;white-space:pre-wrap}
td.long>div{max-height:11em;overflow-y:auto}
details>summary{cursor:pointer;margin:2em 0 .5em;font-weight:600}
@media(max-width:820px){.grid{grid-template-columns:minmax(0,1fr)}main{padding:14px 12px 40px}
h1{font-size:1.3rem}th,td{padding:6px 8px}section.card{padding:10px 8px}}
"""

_SCRIPT = """
(() => {
const read = id => JSON.parse(document.getElementById(id).textContent);
const charts = read('charts'), look = read('look'), hidden = new Set(), views = {};
const dark = matchMedia('(prefers-color-scheme: dark)');
const shade = value => !dark.matches ? value
  : JSON.parse(JSON.stringify(value).replace(/#[0-9a-f]{6}/g, colour => look.dark[colour] ?? colour));
async function draw() {
  await Promise.all(charts.map(async chart => {
    const place = document.getElementById(chart.id), config = structuredClone(look.config);
    config.legend.columns = Math.max(1, Math.floor(place.clientWidth / 180));
    config.legend.labelLimit = place.clientWidth - 80;
    const values = chart.spec.data.values.filter(row => !hidden.has(row.recipe ?? row.name));
    const spec = {...chart.spec, width: 'container', height: chart.height, data: {values},
                  autosize: {type: 'fit-x', contains: 'padding'}};
    const found = await vegaEmbed(place, shade(spec), {renderer: 'svg', actions: false, config: shade(config)});
    views[chart.id] = found.view;
  }));
  document.documentElement.dataset.drawn = String(charts.length);
}
function csv(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))];
  const quote = value => /[",\\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  return [names, ...rows.map(row => names.map(name => row[name] ?? ''))]
    .map(row => row.map(value => quote(String(value))).join(',')).join('\\n') + '\\n';
}
async function save(id, kind) {
  const rows = charts.find(chart => chart.id === id).spec.data.values;
  const href = kind === 'csv' ? URL.createObjectURL(new Blob([csv(rows)], {type: 'text/csv'}))
    : await views[id].toImageURL(kind, 2);
  Object.assign(document.createElement('a'), {href, download: `${id}.${kind}`}).click();
}
for (const button of document.querySelectorAll('.save button')) {
  button.onclick = () => save(button.dataset.chart, button.dataset.kind);
}
for (const button of document.querySelectorAll('.chips button')) {
  button.onclick = () => {
    const name = button.dataset.recipe;
    hidden.has(name) ? hidden.delete(name) : hidden.add(name);
    button.setAttribute('aria-pressed', String(!hidden.has(name)));
    draw();
  };
}
function sort(head) {
  const table = head.closest('table'), body = table.tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of head.parentNode.children) other.setAttribute('aria-sort', 'none');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const key = row => row.cells[column].dataset.key;
  const rows = [...body.rows], empty = row => key(row) === '' ? 1 : 0;
  rows.sort((a, b) => {
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const x = Number(key(a)), y = Number(key(b));
    const order = isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
    return down ? -order : order;
  });
  rows.forEach(row => body.appendChild(row));
}
for (const head of document.querySelectorAll('table.sortable th')) {
  head.onclick = () => sort(head);
  head.onkeydown = event => { if (event.key === 'Enter') sort(head); };
}
dark.onchange = draw;
draw();
})();
"""


def document(title: str, body: str, charts: Sequence[Chart], numbers: Mapping[str, Any] | None = None) -> str:
    """The whole page.

    Args:
        body: HTML; has a `cards` of these charts in it.
        numbers: kept in the page as JSON, by id.

    Raises:
        OSError: the drawing library is not installed.
    """
    kept = {"charts": [{"id": c.id, "spec": c.spec, "height": c.height} for c in charts],
            "look": {"config": CONFIG, "dark": DARK_OF}, **(numbers or {})}  # fmt: skip
    values = "".join(f'<script type="application/json" id="{name}">{_json(value)}</script>\n'
                     for name, value in kept.items())  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><main>
<h1>{html.escape(title)}</h1>
<noscript><p>The charts and the sorting of tables need JavaScript; all numbers are in the tables.</p></noscript>
{body}</main>
{values}<script>{library().javascript_bundle()}</script><script>{_SCRIPT}</script></body></html>
"""


def _json(value: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(value, separators=(",", ":"), default=str).replace("<", "\\u003c")


def cards(charts: Sequence[Chart]) -> str:
    """Places for the charts, with their words."""
    return '<div class="grid">' + "".join(
        f'<section class="card"><h3>{html.escape(chart.title)}</h3><p class="note">{html.escape(chart.note)}</p>'
        f'<div class="plot" id="{chart.id}"></div><p class="save">'
        + " ".join(f'<button type="button" data-chart="{chart.id}" data-kind="{kind}">{kind.upper()}</button>'
                   for kind in ("png", "svg", "csv"))  # fmt: skip
        + "</p></section>"
        for chart in charts
    ) + "</div>"  # fmt: skip


def dot(colour: str) -> str:
    """A spot of a colour, of its counterpart in the dark."""
    return f'<i class="dot" style="--light:{colour};--dark:{DARK_OF[colour]}"></i>'


def sentences(said: Sequence[str]) -> str:
    """A box of sentences, the first in bold."""
    return f'<ul class="said">{"".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)}</ul>'


Cell = tuple[str, float | str | None]
"""What is shown, as HTML, and what a column is sorted by."""


def text(value: Any) -> Cell:
    """A cell of text."""
    return html.escape(str(value)), str(value)


def number(value: float | None, form: str, missing: str = "–") -> Cell:
    """A cell of a number, if there is one."""
    return (missing, None) if value is None else (form.format(value), value)


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], identifier: str) -> str:
    """An HTML table that is sorted by a click on a column's head."""
    cells = []
    for row in rows:
        parts = []
        for i, (shown, key) in enumerate(row):
            numeric = isinstance(key, int | float) or (key is None and i > 0)
            kind = " class=n" if numeric else " class=long" if len(str(key)) > 40 else ""
            value = "" if key is None else f"{key:.12g}" if isinstance(key, int | float) else html.escape(str(key))
            shown = f"<div>{shown}</div>" if "long" in kind else shown
            parts.append(f'<td data-key="{value}"{kind}>{shown}</td>')
        cells.append(f"<tr>{''.join(parts)}</tr>")
    heads = "".join(f'<th scope="col" tabindex="0" aria-sort="none">{html.escape(name)}</th>' for name in head)
    return (
        f'<div class="scroll"><table id="{identifier}" class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )
