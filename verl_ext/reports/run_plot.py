# SPDX-License-Identifier: Apache-2.0
"""`report.png`: held-out accuracy against cumulative rollouts, effective share by step, fates as a stacked area."""

from __future__ import annotations

import os
from pathlib import Path

from verl_ext.runs.records import Run
from verl_ext.runs.step_line import FATE_PREFIX, fates

FILE = "report.png"

# What is trained on in blue, what was dropped in pale colours, what went wrong in red. Fixed, so that runs compare.
COLOURS = {
    "trained": "#2f6f9f",
    "down_sampled": "#8fbcd4",
    "abandoned": "#f2c572",
    "filtered": "#d9934a",
    "surplus": "#c9c9c9",
    "audit": "#a393bf",
    "stale": "#8d8d8d",
    "skipped": "#5e5e5e",
    "unscored": "#e08f8f",
    "failed": "#c03d3d",
    "aborted": "#7d2323",
}
_LINES = ("#2f6f9f", "#b5523b", "#4f8f4f", "#7a5ea8", "#8d8d8d")
_INK, _GRID = "#333333", "#e4e4e4"


def draw(run: Run, path: str | Path | None = None) -> Path:
    """Draw the report of a run.

    Args:
        run: what `read_run` returned.
        path: file to write (PNG); `report.png` in the run's folder by default.

    Returns:
        The file written.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, share, fate = figure.subplots(1, 3)
    _draw_accuracy(accuracy, run)
    _draw_share(share, run)
    _draw_fates(fate, run)
    figure.suptitle(f"{run.folder.resolve().parent.name} / {run.folder.resolve().name}", fontsize=11, color=_INK)
    path = Path(path) if path is not None else run.folder / FILE
    # Written whole or not at all: a viewer may be looking.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def plot_line(run: Run) -> str:
    """Draw the plot of a run and return the line that names its file; a failure is named instead of raised."""
    try:
        return f"Plot: {draw(run)}"
    except OSError as error:
        return f"No plot: {error}"


def _prepare(axis, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10.5, color=_INK, loc="left", pad=8)
    axis.set_xlabel(x, fontsize=9.5, color=_INK)
    axis.set_ylabel(y, fontsize=9.5, color=_INK)
    axis.tick_params(labelsize=8.5, colors=_INK, length=3)
    axis.grid(True, color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#999999")


def _nothing(axis, what: str) -> None:
    axis.text(0.5, 0.5, what, transform=axis.transAxes, ha="center", va="center", fontsize=9, color="#888888")


def _whole_numbers(axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _draw_accuracy(axis, run: Run) -> None:
    curves = run.accuracy()
    estimates = {estimate for estimate, _ in curves.values()}
    _prepare(axis, "Held-out accuracy", "rollouts so far", ", ".join(sorted(estimates)) or "accuracy")
    if not curves:
        _nothing(axis, "not validated")
        return
    for (source, (_, points)), colour in zip(curves.items(), _LINES * len(curves), strict=False):
        _, rollouts, values = zip(*points, strict=True)
        axis.plot(rollouts, values, color=colour, linewidth=2, marker="o", markersize=4.5, label=source)
        for i in {0, len(points) - 1} if len(curves) == 1 else ():
            axis.annotate(
                f"{values[i]:.3f}",
                (rollouts[i], values[i]),
                (0, -14) if i == 0 and len(points) > 1 else (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    axis.margins(x=0.08, y=0.18)
    axis.xaxis.set_major_formatter(_thousands)
    _whole_numbers(axis)
    if len(curves) > 1:
        axis.legend(fontsize=8.5, frameon=False)


def _thousands(value: float, _position: int) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _draw_share(axis, run: Run) -> None:
    _prepare(axis, "Effective groups among those sampled", "training step", "effective share")
    steps, shares = run.series("allocation/effective_share")
    axis.set_ylim(0, 1)
    if not steps:
        _nothing(axis, "not logged")
        return
    axis.plot(steps, shares, color="#9fc3d9", linewidth=1.2, marker="o", markersize=3 if len(steps) <= 60 else 0)
    window = max(1, len(shares) // 10)
    if window > 1:
        parts = [shares[max(0, i - window + 1) : i + 1] for i in range(len(shares))]
        smooth = [sum(part) / len(part) for part in parts]
        axis.plot(steps, smooth, color=_LINES[0], linewidth=2, label=f"mean of {window} steps")
        axis.legend(fontsize=8.5, frameon=False)
    _whole_numbers(axis)


def _draw_fates(axis, run: Run) -> None:
    _prepare(axis, "What became of the rollouts", "training step", "rollouts")
    steps = [record.step for record in run.steps]
    present = {fate for record in run.steps for fate in fates(record.data)}
    # Unknown fates come last, in grey.
    order = [fate for fate in COLOURS if fate in present] + sorted(present - set(COLOURS))
    if not order:
        _nothing(axis, "not logged")
        return
    counts = [[record.data.get(FATE_PREFIX + fate, 0) for record in run.steps] for fate in order]
    colours = [COLOURS.get(fate, "#bbbbbb") for fate in order]
    if len(steps) == 1:
        bottom = 0.0
        for fate, (count,), colour in zip(order, counts, colours, strict=True):
            axis.bar(steps, [count], bottom=bottom, color=colour, label=fate.replace("_", "-"), width=0.5)
            bottom += count
    else:
        axis.stackplot(steps, counts, colors=colours, labels=[fate.replace("_", "-") for fate in order], linewidth=0)
        axis.set_xlim(steps[0], steps[-1])
    top = max(sum(column) for column in zip(*counts, strict=True))
    # Room above the areas for the legend, in the order of the stack.
    axis.set_ylim(0, top * (1.2 + 0.07 * ((len(order) - 1) // 3)))
    axis.legend(fontsize=8.5, frameon=False, loc="upper left", ncols=3, handlelength=1, columnspacing=1.2)
    _whole_numbers(axis)
