"""Tables of real training: equal rollouts a step against uniform, equal effective groups against dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.reports.compared_runs import RunData, find, load
from verl_ext.reports.comparison import compare
from verl_ext.reports.seed_statistics import bootstrap_mean, holm, interpolate, welch

UNIFORM, DYNAMIC = "cpu/grpo", "cpu/dapo"
SAME_ROLLOUTS = ("cpu/grpo", "cpu/cero", "cpu/sara_dps")
"""256 rollouts a step, at the most or on average."""
SAME_GROUPS = ("cpu/dapo", "cpu/sara")
"""Until 32 groups are effective."""
ALPHA = 0.05


def tables(folder: Path) -> tuple[str, dict[str, Any]]:
    """Both tables and all recipes at equal rollouts, as Markdown, and their numbers."""
    runs = [load(path) for path in find(folder, ())]
    groups: dict[str, list[RunData]] = {}
    for data in runs:
        groups.setdefault(data.recipe, []).append(data)
    found = compare(runs, baseline=UNIFORM)
    everything = _against(groups, UNIFORM, "rollouts", list(groups))
    same_rollouts = _against(groups, UNIFORM, "rollouts", [name for name in SAME_ROLLOUTS if name in groups])
    parts = [
        _markdown("All recipes at equal rollouts", everything, UNIFORM),
        _markdown("Equal rollouts a step, against uniform allocation", same_rollouts, UNIFORM),
    ]
    numbers = {"runs": len(runs), "all": everything, "equal_rollouts_a_step": same_rollouts}
    numbers["sentences"] = found["sentences"]
    if DYNAMIC in groups:
        same_groups = _against(groups, DYNAMIC, "steps", [name for name in SAME_GROUPS if name in groups])
        parts.append(_markdown("Equal effective groups a step (32), against dynamic sampling", same_groups, DYNAMIC))
        numbers["equal_effective_groups"] = same_groups
    parts.append("\n".join(f"- {sentence}" for sentence in found["sentences"]))
    return "\n\n".join(parts), numbers


def _against(groups: dict[str, list[RunData]], baseline: str, axis: str, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy at the same point of ``axis``, cost per effective group, and what separates from the baseline."""
    chosen = {name: [data for data in groups[name] if data.points] for name in names}
    equal = min(data.points[-1][axis] for runs in chosen.values() for data in runs)
    accuracy = {
        name: [float(interpolate([(p[axis], p["accuracy"]) for p in data.points], equal)) for data in runs]
        for name, runs in chosen.items()
    }
    start = {name: [data.points[0]["accuracy"] for data in runs] for name, runs in chosen.items()}
    cost = {name: [_cost(data) for data in runs] for name, runs in chosen.items()}
    step = {name: [data.totals["rollouts"] / data.totals["steps"] for data in runs] for name, runs in chosen.items()}
    tests = _tested(accuracy, baseline)
    finite = {name: values for name, values in cost.items() if all(map(isfinite, values))}
    logs = {name: [log(value) for value in values] for name, values in finite.items()}
    costs = _tested(logs, baseline) if baseline in logs else {}
    rows = {}
    for name in chosen:
        rows[name] = {
            "seeds": len(chosen[name]),
            "start": float(np.mean(start[name])),
            "accuracy": _spread(accuracy[name]),
            "difference": tests.get(name),
            "rollouts_a_step": float(np.mean(step[name])),
            "rollouts_per_effective_group": _spread(cost[name]),
            "cost_ratio": _ratio(costs[name]) if name in costs else None,
        }
    return {"axis": axis, "at": equal, "baseline": baseline, "rows": rows}


def _tested(values: dict[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Welch's test of each recipe with two seeds or more against the baseline, p corrected for their number."""
    tests = {name: welch(found, values[baseline]) for name, found in values.items() if name != baseline}
    tests = {name: test for name, test in tests.items() if test}
    for test, p in zip(tests.values(), holm([test["p"] for test in tests.values()]), strict=True):
        test |= {"p_corrected": p, "separates": p < ALPHA}
    return tests


def _ratio(test: dict[str, Any]) -> dict[str, Any]:
    """A test on logarithms, as a ratio."""
    parts = {"mean": "difference", "low": "low", "high": "high"}
    return {key: exp(test[of]) for key, of in parts.items()} | {"separates": test["separates"]}


def _cost(data: RunData) -> float:
    effective = data.effective_groups()
    return data.totals["rollouts"] / effective if effective else float("inf")


def _spread(values: Sequence[float]) -> dict[str, Any]:
    interval = bootstrap_mean(np.array(values))
    low, high = (None, None) if interval is None else map(float, interval)
    return {"mean": float(np.mean(values)), "low": low, "high": high, "values": list(values)}


def _markdown(title: str, table: dict[str, Any], baseline: str) -> str:
    lines = [
        f"### {title}",
        "",
        f"Held-out mean@8 at {table['at']:,.0f} {table['axis']}; differences from {baseline} with the 95 % interval of "
        "Welch's t test; rollouts per effective group with the bootstrap interval over seeds, their ratio with that of "
        "Welch's test on logarithms. What separates, does so after Holm's correction.",
        "",
        "| recipe | seeds | held-out | difference | separates | rollouts a step | rollouts per effective group "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in table["rows"].items():
        test = row["difference"]
        difference = f"{test['difference']:+.3f} ({test['low']:+.3f} to {test['high']:+.3f})" if test else "-"
        said = "-" if not test else f"yes, p = {test['p_corrected']:.2g}" if test["separates"] else "no"
        lines.append(
            f"| {name} | {row['seeds']} | {_shown(row['accuracy'], '.3f')} | {difference} | {said} "
            f"| {row['rollouts_a_step']:.0f} | {_shown(row['rollouts_per_effective_group'], '.1f')} "
            f"| {_shown(row['cost_ratio'], '.2f') if row['cost_ratio'] else '-'} |"
        )
    return "\n".join([*lines, "", _costs_said(table)])


def _costs_said(table: dict[str, Any]) -> str:
    """Whose cost of an effective group is told from the baseline's, after correction for the number of recipes."""
    sides: dict[str, list[str]] = {"lower": [], "higher": [], "not told apart": []}
    for name, row in table["rows"].items():
        ratio = row["cost_ratio"]
        if ratio:
            side = "not told apart" if not ratio["separates"] else "lower" if ratio["mean"] < 1 else "higher"
            sides[side].append(f"{name} {ratio['mean']:.2f}")
    said = "; ".join(f"{side}: {', '.join(names)}" for side, names in sides.items() if names)
    return f"- Rollouts per effective group, over {table['baseline']}'s: {said or 'one seed, nothing to tell'}."


def _shown(value: dict[str, Any], form: str) -> str:
    text = format(value["mean"], form)
    return text if value["low"] is None else f"{text} ({format(value['low'], form)} to {format(value['high'], form)})"
