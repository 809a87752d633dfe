# SPDX-License-Identifier: Apache-2.0
"""The charts of a comparison as PNGs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_ext.reports.charts import FATES, colours, running_mean
from verl_ext.reports.compared_runs import AXES

_INK, _GRID = "#333333", "#e4e4e4"


def draw_all(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write accuracy.png, and shares.png with effective share, fates and calibration; returns the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = []
    for name, draw, shape, size in (
        ("accuracy.png", _accuracies, (2, 2), (12.0, 8.0)),
        ("shares.png", _shares, (1, 3), (15.0, 4.6)),
    ):
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(*shape).ravel(), comparison, figure)
        path = folder / name
        partial = path.with_name(f".{name}.{os.getpid()}")
        figure.savefig(partial, format="png")
        os.replace(partial, path)
        files.append(path)
    return files


def _prepare(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=11, color=_INK, loc="left")
    axis.set_xlabel(x, fontsize=9.5, color=_INK)
    axis.set_ylabel(y, fontsize=9.5, color=_INK)
    axis.tick_params(labelsize=8.5, colors=_INK)
    axis.grid(True, color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _thousands(value: float, _position: int) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _accuracies(axes: Any, comparison: dict[str, Any], figure: Any) -> None:
    for axis, (name, label) in zip(axes, AXES.items(), strict=True):
        _prepare(axis, f"against {label}", label, "held-out accuracy")
        axis.xaxis.set_major_formatter(_thousands)
        for recipe, colour in colours(comparison).items():
            curve = comparison["recipes"][recipe]["curves"].get(name)
            if not curve:
                continue
            axis.plot(curve["x"], curve["mean"], color=colour, linewidth=2, label=recipe)
            if curve["low"] is not None:
                axis.fill_between(curve["x"], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
        if comparison["target"] is not None:
            axis.axhline(comparison["target"], color="#999999", linewidth=1, linestyle=":")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        columns = min(6, len(labels))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9.5)


def _shares(axes: Any, comparison: dict[str, Any], figure: Any) -> None:
    share, fates, calibration = axes
    _prepare(share, "Effective groups among those sampled", "training step", "effective share")
    _prepare(fates, "What became of the rollouts", "per cent of rollouts", "")
    _prepare(calibration, "Predicted against realised", "predicted", "realised")
    share.set_ylim(0, 1.02)
    calibration.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
    markers: dict[str, str] = {}
    for recipe, colour in colours(comparison).items():
        found = comparison["recipes"][recipe]
        series = found["share_by_step"]
        if series["x"]:
            smooth = running_mean(series["mean"], max(1, len(series["x"]) // 12))
            share.plot(series["x"], smooth, color=colour, linewidth=2, label=recipe)
        for pair in found["predictions"]:
            marker = markers.setdefault(pair["what"], "oxs^D"[len(markers) % 5])
            calibration.plot(pair["predicted"], pair["realised"], marker, color=colour, alpha=0.8, markersize=6)
    for what, marker in markers.items():
        calibration.plot([], [], marker, color="#777777", label=what)
    if markers:
        calibration.legend(fontsize=8, frameon=False)
    if share.lines:
        share.legend(fontsize=8.5, frameon=False)
    recipes = [name for name in colours(comparison) if comparison["recipes"][name]["fates"]]
    counts = [comparison["recipes"][name]["fates"] for name in recipes]
    present = {fate for each in counts for fate in each}
    left = [0.0] * len(recipes)
    for fate in [f for f in FATES if f in present] + sorted(present - set(FATES)):
        widths = [100 * each.get(fate, 0) / sum(each.values()) for each in counts]
        fates.barh(recipes, widths, left=left, color=FATES.get(fate, "#bbbbbb"), label=fate.replace("_", "-"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    if recipes:
        fates.invert_yaxis()
        fates.legend(fontsize=8.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
