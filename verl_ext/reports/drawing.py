# SPDX-License-Identifier: Apache-2.0
"""Charts as Vega-Lite specifications: the same one is shown on a page and drawn as PNG or SVG, without a browser.

The colours are told apart by the colour-blind too: in deuteranopia and protanopia any two of them are 12 or more apart
(CIEDE2000). Lines of several names have a marker each besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.files import write_whole

LIGHT = ("#333333", "#0072b2", "#d55e00", "#009e73", "#56b4e9", "#aa3377", "#e69f00", "#782d00", "#5af0d2", "#78a5a5",
         "#78d287", "#a54b3c", "#2d87ff")  # fmt: skip
"""The palette on white; the first one is for the baseline."""
DARK = ("#e8e8e8", "#0078f0", "#a58769", "#87ffb4", "#2da5c3", "#b46987", "#ffd20f", "#d28700", "#2d695a", "#00e1ff",
        "#78c3a5", "#b40000", "#0f5a87")  # fmt: skip
"""The same, in the same order, on a dark ground."""
MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
INK, GRID, FAINT, GROUND = "#222221", "#e4e4e1", "#8c8c8b", "#ffffff"
DARK_OF = {**dict(zip(LIGHT, DARK, strict=True)), INK: "#e6e6e3", GRID: "#3a3d42", FAINT: "#9a9a99", GROUND: "#1e2024"}
"""By colour on white, that on a dark ground. A page exchanges them in the specification."""
_FACE = "system-ui, sans-serif"
CONFIG = {
    "background": GROUND,
    "font": _FACE,
    "view": {"stroke": None},
    "axis": {"gridColor": GRID, "domainColor": FAINT, "tickColor": FAINT, "labelColor": INK, "titleColor": INK,
             "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12, "labelOverlap": True,
             "labelSeparation": 8},
    "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "labelLimit": 300, "symbolOpacity": 1,
               "orient": "bottom", "columns": 3},
    "title": {"color": INK, "fontSize": 13, "anchor": "start", "fontWeight": "normal"},
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A chart with its words."""

    id: str
    """Name of its element and of the files it is saved as."""
    title: str
    """What it shows."""
    note: str
    """How to read it."""
    spec: dict[str, Any]
    """Vega-Lite, without sizes and configuration."""
    height: int = 280
    """Of its plot, in pixels."""

    def _repr_svg_(self) -> str:
        """How a notebook shows it."""
        return _drawn([self], ".svg", 1, 560, "").decode()


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in the palette's order."""
    return {name: LIGHT[i % len(LIGHT)] for i, name in enumerate(names)}


def axis(name: str, title: str, form: str | None = None, **scale: Any) -> dict[str, Any]:
    """A quantitative axis, 0 on it only where the scale says so."""
    found: dict[str, Any] = {"field": name, "type": "quantitative", "title": title, "scale": {"zero": False, **scale}}
    return found | ({"axis": {"format": form}} if form else {})


def steps(name: str) -> dict[str, Any]:
    """An axis of training steps: whole numbers."""
    return axis(name, "training step") | {"axis": {"tickMinStep": 1, "format": "~s"}}


def colour(by: str, order: Mapping[str, str], legend: bool = True) -> dict[str, Any]:
    """Colour by name, in a fixed order whatever is shown; ``order`` has the colour of each name."""
    shown = {"title": None} if legend else None
    scale = {"domain": list(order), "range": list(order.values())}
    return {"field": by, "type": "nominal", "scale": scale, "legend": shown, "sort": list(order)}


def curves(
    rows: Sequence[Mapping[str, Any]], x: dict[str, Any], y: dict[str, Any], order: Mapping[str, str],
    rule: float | None = None, legend: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Lines by ``name``, with bands, lines of single seeds, and a marker for each name.

    Args:
        rows: ``name``, x and y; with ``seed``: of a thin line of its own; with ``low`` and ``high``: of the band; with
            ``mark``: a marker is drawn here.
        rule: a dotted line at this y.
    """
    by = colour("name", order, legend)
    # A colour's marker is the same in every chart.
    markers = [MARKERS[LIGHT.index(shade) % len(MARKERS)] for shade in order.values()]
    shape = {**by, "scale": {"domain": list(order), "range": markers}}
    mean, tooltip = {"filter": "!isValid(datum.seed)"}, [
        {"field": "name", "title": " "}, {**x, "format": ",.4~g"}, {**y, "format": ".3f"}]  # fmt: skip
    for channel in tooltip[1:]:
        channel.pop("scale", None), channel.pop("axis", None)
    layers: list[dict[str, Any]] = [
        {"transform": [mean, {"filter": "isValid(datum.low)"}], "mark": {"type": "area", "opacity": 0.15},
         "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"transform": [{"filter": "isValid(datum.seed)"}], "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.4},
         "encoding": {"detail": {"field": "seed"}}},
        {"transform": [mean], "mark": {"type": "line", "strokeWidth": 2}},
        {"transform": [mean, {"filter": "datum.mark"}], "mark": {"type": "point", "filled": True, "size": 55,
         "opacity": 1}, "encoding": {"shape": shape}},
        {"transform": [mean], "mark": {"type": "point", "size": 90, "opacity": 0}, "encoding": {"tooltip": tooltip}},
    ]  # fmt: skip
    if rule is not None:
        dotted = {"type": "rule", "strokeDash": [2, 3], "color": FAINT}
        across = {"x": None, "color": None, "y": {"datum": rule}}
        layers.append({"data": {"values": [{}]}, "mark": dotted, "encoding": across})
    return {"data": {"values": list(rows)}, "encoding": {"x": x, "y": y, "color": by}, "layer": layers}


def line_rows(name: str, x: Sequence[float], y: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    """Rows of a line for `curves`: about eight of them have a marker, the ends among them."""
    every = max(1, (len(x) - 1) // 7)
    last = len(x) - 1
    return [{"name": name, "x": a, "y": b, "mark": i == last or i % every == 0 and last - i >= every, **more}
            for i, (a, b) in enumerate(zip(x, y, strict=True))]  # fmt: skip


def bands(rows: Sequence[Mapping[str, Any]], x: dict[str, Any], y: dict[str, Any],
          order: Mapping[str, str], **mark: Any) -> dict[str, Any]:  # fmt: skip
    """Bars or areas of ``name``, stacked in the order of the names."""
    place = {name: i for i, name in enumerate(order)}
    rows = [{**row, "place": place[row["name"]]} for row in rows]
    kind = {"type": "bar", "tooltip": True, **mark}
    return {"data": {"values": rows}, "mark": kind,
            "encoding": {"x": x, "y": y, "color": colour("name", order), "order": {"field": "place"}}}  # fmt: skip


def thinned(x: Sequence[float], *columns: Sequence[float], most: int = 400) -> list[list[float]]:
    """x and the columns as means of blocks, ``most`` of them at most: a long run stays a small page."""
    size = max(1, -(-len(x) // most))
    return [[sum(column[i : i + size]) / len(column[i : i + size]) for i in range(0, len(column), size)]
            for column in (x, *columns)]  # fmt: skip


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, ``window`` in all."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def save(charts: Sequence[Chart], path: Path, columns: int = 2, width: int = 420, title: str = "") -> Path:
    """Draw charts beside each other, on white, whole or not at all.

    Args:
        path: ends in .png or .svg.
        columns: charts in a row.
        width: of each chart's plot, in pixels.

    Returns:
        The path.

    Raises:
        OSError: it cannot be written, or the drawing library is not installed.
    """
    write_whole(path, _drawn(charts, path.suffix, columns, width, title))
    return path


def _drawn(charts: Sequence[Chart], suffix: str, columns: int, width: int, title: str) -> bytes:
    vega = library()
    nothing = Chart("", "Nothing was logged yet", "", {"data": {"values": [{}]}, "mark": "point"})
    parts = [{"title": chart.title, "width": width, "height": chart.height, **chart.spec}
             for chart in charts or [nothing]]  # fmt: skip
    # Charts have colours of their own; a legend beside a chart alone says whose they are.
    spec = {"concat": parts, "columns": columns, "config": CONFIG, "padding": 12,
            "title": {"text": title, "offset": 14, "fontSize": 15},
            "resolve": {"scale": {"color": "independent", "shape": "independent"}}}  # fmt: skip
    return vega.vegalite_to_svg(spec).encode() if suffix == ".svg" else vega.vegalite_to_png(spec, scale=1.5)


def library() -> Any:
    """The drawing library.

    Raises:
        OSError: it is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise OSError("vl-convert-python is not installed; pip install vl-convert-python") from error
    return vl_convert


def mean_curves(title: str, runs: Mapping[str, Sequence[Any]], order: Mapping[str, str], points: int = 33) -> Chart:
    """Held-out success against rollouts: the mean over runs by name, and its standard error as a band.

    Args:
        runs: by name, curves of (rollouts, success), each (points, 2); read between their points by straight lines.
        order: a colour for each name.
    """
    rows: list[dict[str, Any]] = []
    for name, found in runs.items():
        grid = np.linspace(0, max(curve[-1][0] for curve in found), points)
        values = np.array([np.interp(grid, *np.array(curve).T) for curve in found])
        mean, n = values.mean(0), len(values)
        error = values.std(0, ddof=1) / n**0.5 if n > 1 else None
        rows += [row if error is None else row | {"low": mean[i] - error[i], "high": mean[i] + error[i]}
                 for i, row in enumerate(line_rows(name, grid.tolist(), mean.tolist()))]  # fmt: skip
    here = {name: order[name] for name in runs}
    return Chart(title, title, "", curves(rows, axis("x", "rollouts", "~s"), axis("y", "held-out success"), here))
