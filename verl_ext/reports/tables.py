# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from verl_ext.reports.charts import colours
from verl_ext.reports.compared_runs import AXES

Cell = tuple[str, float | str | None]
"""What is shown, and what a column is sorted by."""


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], identifier: str) -> str:
    """An HTML table that is sorted by a click on a column's head."""
    cells = []
    for row in rows:
        parts = []
        for i, (shown, key) in enumerate(row):
            number = isinstance(key, int | float) or (key is None and i > 0)
            value = "" if key is None else f"{key:.12g}" if isinstance(key, int | float) else html.escape(str(key))
            parts.append(f'<td data-key="{value}"{" class=n" if number else ""}>{shown}</td>')
        cells.append(f"<tr>{''.join(parts)}</tr>")
    heads = "".join(f'<th scope="col" tabindex="0" aria-sort="none">{html.escape(name)}</th>' for name in head)
    return (
        f'<div class="scroll"><table id="{identifier}" class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )


def _text(value: Any) -> Cell:
    return html.escape(str(value)), str(value)


def _number(value: float | None, form: str, missing: str = "–") -> Cell:
    return (missing, None) if value is None else (form.format(value), value)


def _with_interval(found: dict[str, Any] | None, form: str, missing: str = "–") -> Cell:
    if found is None:
        return missing, None
    shown = form.format(found["mean"])
    if found.get("low") is not None:
        shown += f" <small>{form.format(found['low'])} to {form.format(found['high'])}</small>"
    return shown, found["mean"]


def _folder(path: str) -> Cell:
    """The last part of a path; the whole path is shown on hovering."""
    end = "/".join(path.rstrip("/").rsplit("/", 2)[-2:])
    return f'<span title="{html.escape(path)}">{html.escape(end)}</span>', end


def main_table(comparison: dict[str, Any]) -> str:
    """One row a recipe: accuracy, what it took, shares."""
    equal = comparison["common"]["rollouts"]
    head = ["recipe", "runs", "final accuracy", f"accuracy at {equal:,.0f} rollouts" if equal else "accuracy",
            f"difference to {comparison['baseline']}", "rollouts", "tokens", "hours", "steps", "effective share",
            "rollouts per effective group"]  # fmt: skip
    rows = []
    for name, colour in colours(comparison).items():
        found = comparison["recipes"][name]
        test = comparison["differences"].get(name)
        if test is None:
            difference: Cell = ("baseline" if name == comparison["baseline"] else "not tested", None)
        else:
            mark = " *" if test["separates"] else ""
            shown = f"{test['difference']:+.3f}{mark} <small>{test['low']:+.3f} to {test['high']:+.3f}</small>"
            difference = (shown, test["difference"])
        totals = found["totals"]
        runs = len(found["seeds"])
        complete = "" if found["complete"] == runs else f", {found['complete']} complete"
        rows.append([
            (f'<i class="dot" style="background:{colour}"></i>{html.escape(name)}', name),
            (f"{runs}{complete}", float(runs)),
            _with_interval(found["final"], "{:.3f}"),
            _with_interval(found["at_equal_rollouts"], "{:.3f}"),
            difference,
            _number(totals["rollouts"]["mean"], "{:,.0f}"),
            _number(totals["tokens"]["mean"], "{:,.0f}"),
            _number(totals["hours"]["mean"], "{:.3g}"),
            _number(totals["steps"]["mean"], "{:,.0f}"),
            _with_interval(found["effective_share"], "{:.3f}"),
            _with_interval(found["rollouts_per_effective_group"], "{:.1f}"),
        ])  # fmt: skip
    return table(head, rows, "recipes")


def target_table(comparison: dict[str, Any]) -> str:
    """One row a recipe: cost of reaching the target, and the ratio to the baseline."""
    head = ["recipe", "runs that reached it"]
    for axis in AXES:
        head += [f"{AXES[axis]} to target", f"ratio to {comparison['baseline']}"]
    rows = []
    for name, colour in colours(comparison).items():
        found = comparison["recipes"][name]["to_target"]
        reach = found["rollouts"]
        short = "not reached" if reach["of"] else "not measured"
        row: list[Cell] = [
            (f'<i class="dot" style="background:{colour}"></i>{html.escape(name)}', name),
            (f"{reach['reached']} of {reach['of']}", reach["reached"] / reach["of"] if reach["of"] else None),
        ]
        for axis in AXES:
            needed = found[axis]["needed"]
            form = "{:.3g}" if axis == "hours" else "{:,.0f}"
            row.append(_with_interval(needed, form, short))
            missing = "baseline" if name == comparison["baseline"] else "–" if needed else short
            row.append(_with_interval(found[axis]["ratio"], "{:.2f}", missing))
        rows.append(row)
    return table(head, rows, "target")


def runs_table(comparison: dict[str, Any]) -> str:
    """One row a run: folder, progress, machine, versions."""
    head = ["recipe", "seed", "folder", "steps", "complete", "ledger", "machine", "versions", "settings given"]
    rows = []
    for run in comparison["runs"]:
        machine = ", ".join(f"{v} cores" if k == "cores" else str(v) for k, v in run["machine"].items())
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        of = f" of {run['total_steps']}" if run["total_steps"] else ""
        rows.append([
            _text(run["recipe"]),
            _number(run["seed"], "{}", "not known"),
            _folder(run["folder"]),
            (f"{run['steps']}{of}", float(run["steps"])),
            _text("yes" if run["complete"] else "no"),
            _text(run["ledger"]),
            _text(machine or "not recorded"),
            _text(versions or "not recorded"),
            _text(" ".join(run["overrides"]) or "none"),
        ])  # fmt: skip
    return table(head, rows, "runs")


def settings_table(comparison: dict[str, Any]) -> str:
    """Settings in which the recipes differ."""
    if not comparison["settings"]:
        return "<p>The recipes' configurations do not differ, or are not in the run folders.</p>"
    names = list(next(iter(comparison["settings"].values())))
    rows = [[_text(setting), *(_text(values[name]) for name in names)]
            for setting, values in comparison["settings"].items()]  # fmt: skip
    return table(["setting", *names], rows, "settings")
