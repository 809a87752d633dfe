# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that needs nothing beside itself: Vega is in it, and so are all numbers.

It follows the reader's light or dark mode. A click sorts a table, hides a recipe, or saves a chart as PNG, SVG or CSV.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.reports.drawing import CONFIG, DARK_OF, Chart, library

_HERE = Path(__file__).parent


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
    style, script = ((_HERE / name).read_text() for name in ("page.css", "page.js"))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head><body><main>
<h1>{html.escape(title)}</h1>
<noscript><p>The charts and the sorting of tables need JavaScript; all numbers are in the tables.</p></noscript>
{body}</main>
{values}<script>{library().javascript_bundle()}</script><script>{script}</script></body></html>
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


def made_with(run: Mapping[str, Any], what: str) -> str:
    """The machine or the versions that a run was made with, in words."""
    found = [f"{value} cores" if name == "cores" else str(value) if what == "machine" else f"{name} {value}"
             for name, value in (run.get(what) or {}).items()]  # fmt: skip
    return ", ".join(found) or "not recorded"


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
