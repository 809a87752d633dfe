# SPDX-License-Identifier: Apache-2.0
"""The charts of a comparison as Plotly traces and layouts: plain values, drawn by the page itself."""

from __future__ import annotations

from typing import Any

from verl_ext.reports.compared_runs import AXES
from verl_ext.reports.run_plot import COLOURS as FATE_COLOURS

PALETTE = ("#4c4c4c", "#1f77b4", "#d1602d", "#2e8b57", "#8a5ab8", "#c2185b", "#00838f", "#a67c00", "#5d7c1f", "#7f4f3a")
"""By recipe, the baseline first."""
FATES = {**FATE_COLOURS, "waiting": "#b9d9c3", "in_flight": "#dddddd"}
_AXIS = {"gridcolor": "#e8e8e8", "linecolor": "#999", "zeroline": False, "automargin": True, "ticks": "outside"}
_LAYOUT = {
    "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#333"},
    "hovermode": "closest",
    "showlegend": False,
}


def colours(comparison: dict[str, Any]) -> dict[str, str]:
    """One colour for each recipe."""
    order = sorted(comparison["recipes"], key=lambda name: name != comparison["baseline"])
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(order)}


def charts(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """All charts: ``id``, ``title``, ``note``, ``traces``, ``layout``; those without data are left out."""
    found = [_accuracy(comparison, axis) for axis in AXES]
    found += [_share(comparison), _fates(comparison), _calibration(comparison)]
    return [chart for chart in found if chart["traces"]]


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    layout = {**_LAYOUT, "xaxis": {**_AXIS, "title": {"text": x}}, "yaxis": {**_AXIS, "title": {"text": y}}}
    for key, value in more.items():
        layout[key] = {**layout[key], **value} if isinstance(layout.get(key), dict) else value
    return layout


def _accuracy(comparison: dict[str, Any], axis: str) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for name, colour in colours(comparison).items():
        curve = comparison["recipes"][name]["curves"].get(axis)
        if not curve:
            continue
        if curve["low"] is not None:
            traces.append({
                "x": curve["x"] + curve["x"][::-1], "y": curve["high"] + curve["low"][::-1], "fill": "toself",
                "fillcolor": _pale(colour), "line": {"width": 0}, "hoverinfo": "skip", "type": "scatter",
                "mode": "lines", "meta": name,
            })  # fmt: skip
        traces.append({
            "x": curve["x"], "y": curve["mean"], "line": {"color": colour, "width": 2.2}, "type": "scatter",
            "mode": "lines", "name": name, "meta": name,
            "hovertemplate": f"{name}<br>%{{x:,.4~g}} {AXES[axis]}: %{{y:.3f}}<extra></extra>",
        })  # fmt: skip
    shapes = []
    if comparison["target"] is not None:
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": comparison["target"],
                   "y1": comparison["target"], "line": {"color": "#999", "width": 1, "dash": "dot"}}]  # fmt: skip
    note = "Mean over seeds, with the 95% bootstrap interval of the mean; as far as every seed goes."
    if axis == "hours":
        note += " Time of training steps; validation not counted."
    return {
        "id": f"accuracy-{axis}",
        "title": f"Held-out accuracy against {AXES[axis]}",
        "note": note,
        "traces": traces,
        "layout": _layout(AXES[axis], "held-out accuracy", shapes=shapes),
    }


def _share(comparison: dict[str, Any]) -> dict[str, Any]:
    traces = []
    for name, colour in colours(comparison).items():
        series = comparison["recipes"][name]["share_by_step"]
        if series["x"]:
            window = max(1, len(series["x"]) // 12)
            traces.append({
                "x": series["x"], "y": running_mean(series["mean"], window), "type": "scatter", "mode": "lines",
                "line": {"color": colour, "width": 2}, "name": name, "meta": name,
                "hovertemplate": f"{name}<br>step %{{x}}: %{{y:.3f}}<extra></extra>",
            })  # fmt: skip
    return {
        "id": "effective-share",
        "title": "Effective groups among those sampled",
        "note": "Share of the groups started in a step that had right and wrong answers; mean over seeds, smoothed "
        "over a twelfth of the run.",
        "traces": traces,
        "layout": _layout("training step", "effective share", yaxis={"range": [0, 1.02]}),
    }


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and those before it, ``window`` in all."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _fates(comparison: dict[str, Any]) -> dict[str, Any]:
    recipes = {name: comparison["recipes"][name]["fates"] for name in colours(comparison)}
    recipes = {name: fates for name, fates in recipes.items() if fates}
    present = {fate for fates in recipes.values() for fate in fates}
    order = [fate for fate in FATES if fate in present] + sorted(present - set(FATES))
    traces = []
    for fate in order:
        shares = [100 * fates.get(fate, 0) / sum(fates.values()) for fates in recipes.values()]
        traces.append({
            "type": "bar", "orientation": "h", "name": fate.replace("_", "-"), "x": shares, "y": list(recipes),
            "marker": {"color": FATES.get(fate, "#bbbbbb")}, "customdata": [f.get(fate, 0) for f in recipes.values()],
            "hovertemplate": "%{y}: %{x:.1f}% " + fate.replace("_", "-") + " (%{customdata:,})<extra></extra>",
        })  # fmt: skip
    return {
        "id": "fates",
        "title": "What became of the rollouts",
        "note": "Per cent of all rollouts issued, over the seeds, as the runs' ledgers have them.",
        "traces": traces,
        "layout": _layout(
            "per cent of rollouts", "", barmode="stack", showlegend=True, xaxis={"range": [0, 100]},
            yaxis={"autorange": "reversed", "title": {"text": ""}},
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        ),
        "height": max(300, 150 + 36 * len(recipes)),
    }  # fmt: skip


_SYMBOLS = ("circle", "x", "square", "triangle-up", "diamond")


def _calibration(comparison: dict[str, Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(p["what"] for r in comparison["recipes"].values() for p in r["predictions"]))
    traces: list[dict[str, Any]] = []
    for name, colour in colours(comparison).items():
        for kind in kinds:
            pairs = [p for p in comparison["recipes"][name]["predictions"] if p["what"] == kind]
            if pairs:
                traces.append({
                    "type": "scatter", "mode": "markers", "x": [p["predicted"] for p in pairs],
                    "y": [p["realised"] for p in pairs], "name": f"{name}: {kind}", "meta": name,
                    "marker": {"color": colour, "size": 9, "symbol": _SYMBOLS[kinds.index(kind) % len(_SYMBOLS)],
                               "opacity": 0.8},
                    "hovertemplate": f"{name}<br>{kind}<br>predicted %{{x:.3f}}, realised %{{y:.3f}}<extra></extra>",
                })  # fmt: skip
    if traces:
        traces.insert(0, {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip",
                          "line": {"color": "#999", "width": 1, "dash": "dot"}, "showlegend": False})  # fmt: skip
    return {
        "id": "calibration",
        "title": "Calibration of p_eff and of the selectors",
        "note": "What a rule predicted against what came of it, each point a fifth of a run (audits: a whole run). On "
        "the dotted line the two agree. "
        + " ".join(f"{_GLYPHS[i % len(_GLYPHS)]} {kind}." for i, kind in enumerate(kinds)),
        "traces": traces,
        "layout": _layout("predicted", "realised", xaxis={"range": [0, 1.02]}, yaxis={"range": [0, 1.02]}),
    }


_GLYPHS = ("●", "✕", "■", "▲", "◆")


def _pale(colour: str) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},0.15)"
