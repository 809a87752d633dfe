# SPDX-License-Identifier: Apache-2.0
"""The charts of a comparison."""

from __future__ import annotations

from typing import Any

from verl_ext.reports import drawing
from verl_ext.reports.compared_runs import AXES
from verl_ext.reports.drawing import FAINT, MARKERS, Chart, axis, bands, curves, line_rows
from verl_ext.reports.run_plot import fate_colours


def colours(comparison: dict[str, Any]) -> dict[str, str]:
    """One colour for each recipe, the baseline's first."""
    return drawing.colours(sorted(comparison["recipes"], key=lambda name: name != comparison["baseline"]))


def charts(comparison: dict[str, Any]) -> list[Chart]:
    """All charts; those without data are left out."""
    found = [_accuracy(comparison, name) for name in AXES]
    found += [_share(comparison), _fates(comparison), _calibration(comparison)]
    return [chart for chart in found if chart is not None]


def _accuracy(comparison: dict[str, Any], name: str) -> Chart | None:
    rows: list[dict[str, Any]] = []
    for recipe in colours(comparison):
        if not (curve := comparison["recipes"][recipe]["curves"].get(name)):
            continue
        mean = line_rows(recipe, curve["x"], curve["mean"])
        if curve["low"] is not None:
            mean = [row | {"low": low, "high": high}
                    for row, low, high in zip(mean, curve["low"], curve["high"], strict=True)]  # fmt: skip
            for i, run in enumerate(run for run in comparison["runs"] if run["recipe"] == recipe and run["points"]):
                seed = str(i if run["seed"] is None else run["seed"])
                rows += [{"name": recipe, "seed": seed, "x": p[name], "y": p["accuracy"]} for p in run["points"]]
        rows += mean
    if not rows:
        return None
    note = "Thick: mean over seeds, with its 95% bootstrap interval, as far as every seed goes; thin: each seed."
    if comparison["target"] is not None:
        note += " Dotted: the target."
    if name == "hours":
        note += " Time of training steps; validation not counted."
    x = axis("x", AXES[name], ".3~g" if name == "hours" else "~s")
    spec = curves(rows, x, axis("y", "held-out accuracy"), colours(comparison), rule=comparison["target"])
    return Chart(f"accuracy-{name}", f"Held-out accuracy against {AXES[name]}", note, spec)


def _share(comparison: dict[str, Any]) -> Chart | None:
    rows = []
    for recipe in colours(comparison):
        series = comparison["recipes"][recipe]["share_by_step"]
        if series["x"]:
            smooth = drawing.running_mean(series["mean"], max(1, len(series["x"]) // 12))
            rows += line_rows(recipe, *drawing.thinned(series["x"], smooth))
    note = (
        "Share of the groups started in a step that had right and wrong answers; mean over seeds, smoothed over a "
        "twelfth of the run."
    )
    spec = curves(rows, drawing.steps("x"), axis("y", "effective share", domain=[0, 1]), colours(comparison))
    return Chart("effective-share", "Effective groups among those sampled", note, spec) if rows else None


def _fates(comparison: dict[str, Any]) -> Chart | None:
    rows = []
    for recipe in colours(comparison):
        fates = comparison["recipes"][recipe]["fates"]
        rows += [{"name": fate.replace("_", "-"), "recipe": recipe, "rollouts": n,
                  "per cent": 100 * n / sum(fates.values())} for fate, n in fates.items()]  # fmt: skip
    order = fate_colours({row["name"] for row in rows})
    recipes = {"field": "recipe", "type": "nominal", "title": None, "sort": list(colours(comparison))}
    spec = bands(rows, axis("per cent", "per cent of rollouts", domain=[0, 100]), recipes, order)
    note = "Of all rollouts issued, over the seeds, as the runs' ledgers have them."
    height = max(120, 34 * len(comparison["recipes"]))
    return Chart("fates", "What became of the rollouts", note, spec, height) if rows else None


def _calibration(comparison: dict[str, Any]) -> Chart | None:
    rows = [{"name": recipe, **pair} for recipe in colours(comparison)
            for pair in comparison["recipes"][recipe]["predictions"]]  # fmt: skip
    if not rows:
        return None
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    shape = {"field": "what", "type": "nominal", "title": None, "legend": {"columns": 1},
             "scale": {"domain": kinds, "range": [MARKERS[i % len(MARKERS)] for i in range(len(kinds))]}}  # fmt: skip
    agree = {"mark": {"type": "line", "strokeDash": [2, 3], "color": FAINT},
             "data": {"values": [{"x": 0, "y": 0}, {"x": 1, "y": 1}]},
             "encoding": {"x": axis("x", "predicted"), "y": axis("y", "realised")}}  # fmt: skip
    points = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8, "tooltip": True},
              "encoding": {"x": axis("predicted", "predicted", domain=[0, 1]),
                           "y": axis("realised", "realised", domain=[0, 1]),
                           "color": drawing.colour("name", colours(comparison)), "shape": shape}}  # fmt: skip
    note = (
        "What a rule predicted against what came of it, each point a fifth of a run (audits: a whole run). On the "
        "dotted line the two agree."
    )
    spec = {"data": {"values": rows}, "layer": [agree, points]}
    return Chart("calibration", "Calibration of p_eff and of the selectors", note, spec)
