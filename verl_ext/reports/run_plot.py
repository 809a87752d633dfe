# SPDX-License-Identifier: Apache-2.0
"""The charts of a run: held-out accuracy, effective share, fates and time; and `report.png`, which shows them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from verl_ext.reports import drawing
from verl_ext.reports.drawing import LIGHT, Chart, axis, bands, curves, line_rows, thinned
from verl_ext.reports.run_table import PHASES
from verl_ext.runs.records import Run
from verl_ext.runs.step_line import FATE_PREFIX, fates

FILE = "report.png"
_FATES = ("trained", "down-sampled", "abandoned", "filtered", "surplus", "audit", "waiting", "in-flight", "stale",
          "skipped", "unscored", "failed", "aborted")  # fmt: skip
_FATE_COLOURS = dict(zip(_FATES, (LIGHT[i] for i in (1, 4, 6, 7, 9, 8, 3, 12, 10, 0, 5, 2, 11)), strict=True))


def fate_colours(present: Collection[str]) -> dict[str, str]:
    """Colours of these fates in the order they are stacked, fixed, so that runs compare; unknown ones last, in grey."""
    known = {fate: shade for fate, shade in _FATE_COLOURS.items() if fate in present}
    return known | {fate: drawing.FAINT for fate in sorted(set(present) - set(known))}


def run_charts(run: Run) -> list[Chart]:
    """Those that have data."""
    found = (_accuracy(run), _share(run), _fates(run), _times(run))
    return [chart for chart in found if chart is not None]


def draw(run: Run, path: str | Path | None = None) -> Path:
    """Draw the charts of a run.

    Args:
        run: what `read_run` returned.
        path: file to write (PNG or SVG); `report.png` in the run's folder by default.

    Returns:
        The file written.

    Raises:
        OSError: it cannot be written, or there is nothing to draw it with.
    """
    where = run.folder.resolve()
    path = Path(path) if path is not None else run.folder / FILE
    return drawing.save(run_charts(run), path, title=f"{where.parent.name} / {where.name}")


def plot_line(run: Run) -> str:
    """Draw the plot of a run and return the line that names its file; a failure is named instead of raised."""
    try:
        return f"Plot: {draw(run)}"
    except OSError as error:
        return f"No plot: {error}"


def _accuracy(run: Run) -> Chart | None:
    sets = run.accuracy()
    rows = []
    for source, (_, points) in sets.items():
        _, rollouts, values = zip(*points, strict=True)
        rows += line_rows(source, rollouts, values)
    estimate = ", ".join(sorted({estimate for estimate, _ in sets.values()}))
    spec = curves(rows, axis("x", "rollouts so far", "~s"), axis("y", estimate), _lines(list(sets)))
    return Chart("accuracy", "Held-out accuracy", "Against the rollouts issued so far.", spec) if rows else None


def _lines(names: list[str]) -> dict[str, str]:
    return dict(zip(names, (LIGHT[(i + 1) % len(LIGHT)] for i in range(len(names))), strict=True))


def _share(run: Run) -> Chart | None:
    steps, shares = run.series("allocation/effective_share")
    if not steps:
        return None
    window = max(1, len(shares) // 10)
    name = f"mean of {window} steps" if window > 1 else "effective share"
    rows = line_rows(name, *thinned(steps, drawing.running_mean(shares, window)))
    if window > 1:
        x, y = thinned(steps, shares)
        rows += [{"name": name, "seed": "each step", "x": a, "y": b} for a, b in zip(x, y, strict=True)]
    spec = curves(rows, drawing.steps("x"), axis("y", "effective share", domain=[0, 1]), _lines([name]))
    note = "Share of the groups started in a step that had right and wrong answers."
    return Chart("effective-share", "Effective groups among those sampled", note, spec)


def _fates(run: Run) -> Chart | None:
    present = {fate for record in run.steps for fate in fates(record.data)}
    return _by_step("fates", "What became of the rollouts", "As the ledger has it, a step.", "rollouts", run,
                    {fate.replace("_", "-"): FATE_PREFIX + fate for fate in present},
                    fate_colours({fate.replace("_", "-") for fate in present}))  # fmt: skip


def _times(run: Run) -> Chart | None:
    present = {label: f"timing_s/{timer}" for timer, label in PHASES if run.series(f"timing_s/{timer}")[0]}
    return _by_step("times", "Time of a step", "Phases that do not overlap; validation not counted.", "seconds", run,
                    present, _lines(list(present)))  # fmt: skip


def _by_step(
    identifier: str, title: str, note: str, unit: str, run: Run, metrics: dict[str, str], order: dict[str, str]
) -> Chart | None:
    """Metrics of a step, stacked over the steps."""
    steps = [record.step for record in run.steps]
    if not steps or not metrics:
        return None
    columns = [[record.data.get(metrics[name], 0.0) for record in run.steps] for name in order]
    x, *thin = thinned(steps, *columns)
    rows = [{"name": name, "step": step, unit: value} for name, column in zip(order, thin, strict=True)
            for step, value in zip(x, column, strict=True)]  # fmt: skip
    mark = {"type": "area"} if len(x) > 1 else {"width": 40}
    spec = bands(rows, drawing.steps("step"), {"field": unit, "type": "quantitative"}, order, **mark)
    return Chart(identifier, title, note, spec)
