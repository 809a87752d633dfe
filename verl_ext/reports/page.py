# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file that needs nothing beside itself: Plotly is in it, and so are all numbers."""

from __future__ import annotations

import html
import json
from typing import Any

from verl_ext.reports.charts import charts, colours
from verl_ext.reports.tables import main_table, runs_table, settings_table, target_table

_STYLE = """
*{box-sizing:border-box}
body{margin:0;font:15px/1.5 system-ui,sans-serif;color:#222;background:#f6f6f4}
main{max-width:1320px;margin:0 auto;padding:24px 28px 60px}
h1{font-size:1.6rem;margin:0 0 .2em}h2{font-size:1.15rem;margin:2em 0 .5em}h3{font-size:1rem;margin:0 0 .1em}
p{margin:.4em 0}small,.note{color:#666;font-size:.82rem}
section.card,ul.said{background:#fff;border:1px solid #e2e2de;border-radius:8px;padding:14px 16px}
ul.said{list-style:none;margin:1em 0;border-left:5px solid #2f6f9f}ul.said li{margin:.25em 0}
ul.said li:first-child{font-weight:600}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.plot{height:340px;width:100%}
.chips{position:sticky;top:0;z-index:2;background:#f6f6f4;padding:8px 0;display:flex;flex-wrap:wrap;gap:8px}
.chips button{font:inherit;font-size:.86rem;border:1px solid #ccc;border-radius:99px;background:#fff;padding:2px 12px;
cursor:pointer}
.chips button[aria-pressed=false]{opacity:.4;text-decoration:line-through}
.dot{display:inline-block;width:.75em;height:.75em;border-radius:50%;margin-right:.45em}
.scroll{overflow-x:auto;background:#fff;border:1px solid #e2e2de;border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.86rem}
th,td{padding:7px 11px;text-align:left;border-bottom:1px solid #eee;vertical-align:top}
th{background:#fafaf8;cursor:pointer;font-weight:600;vertical-align:bottom}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.n small{display:block}
th[aria-sort=ascending]::after{content:" \\25B2"}th[aria-sort=descending]::after{content:" \\25BC"}
#recipes td:first-child,#target td:first-child{white-space:nowrap}
#runs td{min-width:70px}#runs td:nth-child(n+7){min-width:220px;overflow-wrap:anywhere}
#settings td{overflow-wrap:anywhere;min-width:110px}
details>summary{cursor:pointer;margin:2em 0 .5em;font-weight:600}
@media(max-width:820px){.grid{grid-template-columns:minmax(0,1fr)}main{padding:14px 12px 40px}.plot{height:290px}
h1{font-size:1.3rem}th,td{padding:6px 8px}section.card{padding:10px 8px}}
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById('charts').textContent);
const hidden = new Set();
const options = {responsive: true, displayModeBar: false};
const drawn = data.map(chart => Plotly.newPlot(chart.id, chart.traces, chart.layout, options));
for (const button of document.querySelectorAll('.chips button')) {
  button.onclick = () => {
    const name = button.dataset.recipe;
    hidden.has(name) ? hidden.delete(name) : hidden.add(name);
    button.setAttribute('aria-pressed', String(!hidden.has(name)));
    for (const chart of data) {
      const at = chart.traces.map((t, i) => t.meta === name ? i : -1).filter(i => i >= 0);
      if (at.length) Plotly.restyle(chart.id, {visible: !hidden.has(name)}, at);
    }
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
Promise.all(drawn).then(() => document.documentElement.dataset.drawn = String(drawn.length));
"""


def page(comparison: dict[str, Any], title: str) -> str:
    """The whole document."""
    from plotly.offline import get_plotlyjs

    found = charts(comparison)
    chips = "".join(
        f'<button type="button" data-recipe="{html.escape(name)}" aria-pressed="true">'
        f'<i class="dot" style="background:{colour}"></i>{html.escape(name)}</button>'
        for name, colour in colours(comparison).items()
    )
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in comparison["sentences"])
    plots = "".join(
        f'<section class="card"><h3>{html.escape(chart["title"])}</h3><p class="note">{html.escape(chart["note"])}</p>'
        f'<div class="plot" id="{chart["id"]}"{_height(chart)}></div></section>'
        for chart in found
    )
    seeds = sorted({seed for r in comparison["recipes"].values() for seed in r["seeds"] if seed is not None})
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><main>
<h1>{html.escape(title)}</h1>
<p class="note">{len(comparison["recipes"])} recipes, {len(comparison["runs"])} runs, seeds
{", ".join(map(str, seeds)) or "not known"}. Accuracy: {html.escape(comparison["estimate"] or "not measured")}.</p>
<ul class="said">{said}</ul>
<noscript><p>The charts and the sorting of tables need JavaScript; all numbers are in the tables.</p></noscript>
<h2>Recipes</h2>{main_table(comparison)}<p class="note">{_notes(comparison)}</p>
{_target(comparison)}
<h2>Charts</h2><div class="chips" aria-label="recipes shown">{chips}</div><div class="grid">{plots}</div>
<h2>What was run</h2>{runs_table(comparison)}{_faults(comparison)}
<details><summary>Settings in which the recipes differ ({len(comparison["settings"])})</summary>
{settings_table(comparison)}</details>
</main>
<script type="application/json" id="charts">{_json(found)}</script>
<script type="application/json" id="comparison">{_json(comparison)}</script>
<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script></body></html>
"""


def _height(chart: dict[str, Any]) -> str:
    return f' style="height:{chart["height"]}px"' if "height" in chart else ""


def _json(value: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(value, separators=(",", ":"), default=str).replace("<", "\\u003c")


def _notes(comparison: dict[str, Any]) -> str:
    few = min(len(found["seeds"]) for found in comparison["recipes"].values())
    notes = [
        "Small print: 95% bootstrap intervals of the mean over seeds"
        + (f"; with {few} seeds such intervals are too narrow, and show the spread only." if few < 8 else "."),
        "Differences: Welch's t with its 95% interval; * where it separates at 5% after Holm's correction for the "
        "number of recipes.",
        "Click on a column to sort by it.",
    ]
    return " ".join(notes)


def _target(comparison: dict[str, Any]) -> str:
    if comparison["target"] is None:
        return "<h2>To a target</h2><p>No target: the baseline's accuracy was not measured.</p>"
    origin = "" if comparison["target_given"] else (
        f" (the highest, in hundredths, that every run of {html.escape(comparison['baseline'])} reaches)"
    )  # fmt: skip
    return (
        f"<h2>To a held-out accuracy of {comparison['target']:g}</h2>{target_table(comparison)}"
        f'<p class="note">Target{origin}. First crossing, linear between validations. Ratios below 1 mean less than '
        f"{html.escape(comparison['baseline'])}; they are given where every run of both reached it.</p>"
    )


def _faults(comparison: dict[str, Any]) -> str:
    faults = [fault for found in comparison["recipes"].values() for fault in found["faults"]]
    if not faults:
        return ""
    items = "".join(f"<li>{html.escape(fault)}</li>" for fault in faults)
    return f'<h2>Ledgers that do not add up</h2><ul class="said">{items}</ul>'
