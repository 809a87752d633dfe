# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison: its page and its pictures."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from verl_ext.reports.charts import charts, colours
from verl_ext.reports.compared_runs import AXES
from verl_ext.reports.drawing import save
from verl_ext.reports.page import Cell, cards, document, dot, made_with, number, sentences, table, text


def draw_all(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write accuracy.png, and shares.png with effective share, fates and calibration; returns the files.

    Raises:
        OSError: one cannot be written.
    """
    found = charts(comparison)
    accuracy = [chart for chart in found if chart.id.startswith("accuracy")]
    return [save(accuracy, folder / "accuracy.png"),
            save([chart for chart in found if chart not in accuracy], folder / "shares.png", columns=3)]  # fmt: skip


def page(comparison: dict[str, Any], title: str) -> str:
    """The whole document."""
    found = charts(comparison)
    chips = "".join(
        f'<button type="button" data-recipe="{html.escape(name)}" aria-pressed="true">{dot(colour)}'
        f"{html.escape(name)}</button>"
        for name, colour in colours(comparison).items()
    )
    seeds = sorted({seed for r in comparison["recipes"].values() for seed in r["seeds"] if seed is not None})
    faults = [fault for recipe in comparison["recipes"].values() for fault in recipe["faults"]]
    body = f"""<p class="note">{len(comparison["recipes"])} recipes, {len(comparison["runs"])} runs, seeds
{", ".join(map(str, seeds)) or "not known"}. Accuracy: {html.escape(comparison["estimate"] or "not measured")}.</p>
{sentences(comparison["sentences"])}
<h2>Recipes</h2>{main_table(comparison)}<p class="note">{_notes(comparison)}</p>
{_target(comparison)}
<h2>Charts</h2><div class="chips" aria-label="recipes shown">{chips}</div>{cards(found)}
<h2>What was run</h2>{runs_table(comparison)}
{"<h2>Ledgers that do not add up</h2>" + sentences(faults) if faults else ""}
<details><summary>Settings in which the recipes differ ({len(comparison["settings"])})</summary>
{settings_table(comparison)}</details>
"""
    return document(title, body, found, {"comparison": comparison})


def _notes(comparison: dict[str, Any]) -> str:
    few = min(len(found["seeds"]) for found in comparison["recipes"].values())
    return (
        "95% bootstrap intervals of the mean over seeds"
        + (f"; with {few} seeds such intervals are too narrow, and show the spread only. " if few < 8 else ". ")
        + "Differences: Welch's t with its 95% interval; * where it separates at 5% after Holm's correction. Holm's "
        "correction raises the p values when several recipes are tested, so that the chance of calling even one of "
        "them different by luck stays below 5%. A click on a column's head sorts by it."
    )


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
    equal, baseline = comparison["common"]["rollouts"], comparison["baseline"]
    head = ["recipe", "runs", "final accuracy", f"accuracy at {equal:,.0f} rollouts" if equal else "accuracy",
            f"difference to {baseline}", "rollouts", "tokens", "hours", "steps", "effective share",
            "rollouts per effective group"]  # fmt: skip
    rows = []
    for name, colour in colours(comparison).items():
        found, runs = comparison["recipes"][name], len(comparison["recipes"][name]["seeds"])
        difference: Cell = ("baseline" if name == baseline else "not tested", None)
        if test := comparison["differences"].get(name):
            mark = " *" if test["separates"] else ""
            shown = f"{test['difference']:+.3f}{mark} <small>{test['low']:+.3f} to {test['high']:+.3f}</small>"
            difference = (shown, test["difference"])
        rows.append([
            (dot(colour) + html.escape(name), name),
            (f"{runs}" + ("" if found["complete"] == runs else f", {found['complete']} complete"), float(runs)),
            _with_interval(found["final"], "{:.3f}"),
            _with_interval(found["at_equal_rollouts"], "{:.3f}"),
            difference,
            *(number(found["totals"][axis]["mean"], _form(axis)) for axis in ("rollouts", "tokens", "hours", "steps")),
            _with_interval(found["effective_share"], "{:.3f}"),
            _with_interval(found["rollouts_per_effective_group"], "{:.1f}"),
        ])  # fmt: skip
    return table(head, rows, "recipes")


def _form(axis: str) -> str:
    return "{:.3g}" if axis == "hours" else "{:,.0f}"


def target_table(comparison: dict[str, Any]) -> str:
    """One row a recipe: cost of reaching the target, and the ratio to the baseline."""
    baseline = comparison["baseline"]
    titles = [title for label in AXES.values() for title in (f"{label} to target", f"ratio to {baseline}")]
    rows = []
    for name, colour in colours(comparison).items():
        found = comparison["recipes"][name]["to_target"]
        reached, of = (found["rollouts"][key] for key in ("reached", "of"))
        short = "not reached" if of else "not measured"
        share = reached / of if of else None
        row: list[Cell] = [(dot(colour) + html.escape(name), name), (f"{reached} of {of}", share)]
        for axis in AXES:
            needed = found[axis]["needed"]
            missing = "baseline" if name == baseline else "–" if needed else short
            row += [_with_interval(needed, _form(axis), short), _with_interval(found[axis]["ratio"], "{:.2f}", missing)]
        rows.append(row)
    return table(["recipe", "runs that reached it", *titles], rows, "target")


def runs_table(comparison: dict[str, Any]) -> str:
    """One row a run: folder and progress; machine and versions are said once where they are the same for all."""
    made = {name: [made_with(run, name) for run in comparison["runs"]] for name in ("machine", "versions")}
    same = {name: of[0] for name, of in made.items() if len(set(of)) == 1}
    differ = [name for name in made if name not in same]
    head = ["recipe", "seed", "folder", "steps", "complete", "ledger", *differ, "settings given"]
    rows = []
    for i, run in enumerate(comparison["runs"]):
        of = f" of {run['total_steps']}" if run["total_steps"] else ""
        rows.append([
            text(run["recipe"]),
            number(run["seed"], "{}", "not known"),
            _folder(run["folder"]),
            (f"{run['steps']}{of}", float(run["steps"])),
            text("yes" if run["complete"] else "no"),
            text(run["ledger"]),
            *(text(made[name][i]) for name in differ),
            text(" ".join(run["overrides"]) or "none"),
        ])  # fmt: skip
    said = "".join(f'<p class="note">{name.capitalize()} of all runs: {html.escape(of)}.</p>'
                   for name, of in same.items())  # fmt: skip
    return table(head, rows, "runs") + said


def settings_table(comparison: dict[str, Any]) -> str:
    """Settings in which the recipes differ."""
    if not comparison["settings"]:
        return "<p>The recipes' configurations do not differ, or are not in the run folders.</p>"
    names = list(next(iter(comparison["settings"].values())))
    rows = [[text(setting), *(text(values[name]) for name in names)]
            for setting, values in comparison["settings"].items()]  # fmt: skip
    return table(["setting", *names], rows, "settings")
