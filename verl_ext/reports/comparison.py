# SPDX-License-Identifier: Apache-2.0
"""Compare runs: everything that the report shows, as plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ext.launch.comparison_plan import CompareError
from verl_ext.reports.compared_runs import AXES, RunData, differing_settings
from verl_ext.reports.seed_statistics import bootstrap_mean, bootstrap_ratio, first_reach, holm, interpolate, welch

_GRID = 61
ALPHA = 0.05


def compare(runs: Sequence[RunData], baseline: str | None = None, target: float | None = None) -> dict[str, Any]:
    """Compare the runs, recipe by recipe.

    Args:
        baseline: recipe the others are measured against; the first one by default.
        target: held-out accuracy to be reached; by default the highest, in hundredths, that all the baseline's runs do.

    Raises:
        CompareError: no runs, an unknown baseline, the same recipe and seed twice, or a target outside (0, 1].
    """
    if not runs:
        raise CompareError("there are no runs to compare")
    groups: dict[str, list[RunData]] = {}
    for data in runs:
        group = groups.setdefault(data.recipe, [])
        if data.seed is not None and (other := next((o for o in group if o.seed == data.seed), None)):
            raise CompareError(f"{other.folder} and {data.folder} are both {data.recipe} with seed {data.seed}")
        group.append(data)
    baseline = next(iter(groups)) if baseline is None else baseline
    if baseline not in groups:
        raise CompareError(f"baseline={baseline!r}; accepted: {', '.join(groups)}")
    check_target(target)
    given = target is not None
    target = _default_target(groups[baseline]) if target is None else target
    common = {axis: _common(runs, axis) for axis in AXES}
    recipes = {name: _recipe(group, common["rollouts"]) for name, group in groups.items()}
    for name, found in recipes.items():
        reference = None if name == baseline else groups[baseline]
        found["to_target"] = {axis: _to_target(groups[name], reference, axis, target) for axis in AXES}
    comparison = {
        "baseline": baseline,
        "target": target,
        "target_given": given,
        "estimate": next((data.estimate for data in runs if data.estimate), ""),
        "common": common,
        "recipes": recipes,
        "differences": _differences(groups, baseline, common["rollouts"]),
        "settings": differing_settings(runs),
        "runs": [_run(data) for data in runs],
    }
    return comparison | {"sentences": _sentences(comparison)}


def check_target(target: Any) -> None:
    """Refuse a target that is not a held-out accuracy.

    Raises:
        CompareError: says what is accepted.
    """
    number = isinstance(target, int | float) and not isinstance(target, bool)
    if target is not None and not (number and 0 < target <= 1):
        raise CompareError(f"target={target!r}; accepted: null, or a number in (0, 1]")


def _default_target(group: Sequence[RunData]) -> float | None:
    best = [max(point["accuracy"] for point in data.points) for data in group if data.points]
    if not best:
        return None
    target = math.floor(min(best) * 100 + 1e-9) / 100
    return target if target > 0 else None


def _common(runs: Sequence[RunData], axis: str) -> float | None:
    """The largest value of an axis that every validated run reaches."""
    ends = [data.points[-1][axis] for data in runs if data.points]
    return min(ends) if ends and min(ends) > 0 else None


def _curve(data: RunData, axis: str) -> list[tuple[float, float]]:
    return [(point[axis], point["accuracy"]) for point in data.points]


def _mean(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, bootstrap interval over seeds, and the values."""
    values = [float(value) for value in values]
    if not values:
        return None
    interval = bootstrap_mean(np.array(values))
    low, high = (None, None) if interval is None else map(float, interval)
    return {"mean": sum(values) / len(values), "low": low, "high": high, "values": values}


def _recipe(group: Sequence[RunData], equal: float | None) -> dict[str, Any]:
    validated = [data for data in group if data.points]
    curves = {}
    for axis in AXES if validated else ():
        end = min(data.points[-1][axis] for data in validated)
        start = max(data.points[0][axis] for data in validated)
        grid = np.linspace(start, end, _GRID) if end > start else np.array([end])
        values = np.array([interpolate(_curve(data, axis), grid) for data in validated])
        low, high = bootstrap_mean(values) or (None, None)
        lines = {"x": grid, "mean": values.mean(0), "low": low, "high": high}
        curves[axis] = {name: None if line is None else line.tolist() for name, line in lines.items()}
    shares = [data.run.series("allocation/effective_share") for data in group]
    fates: Counter[str] = Counter()
    for data in group:
        fates.update(data.fates())
    groups = [data.effective_groups() for data in group]
    per_group = [data.totals["rollouts"] / n for data, n in zip(group, groups, strict=True) if n]
    return {
        "seeds": [data.seed for data in group],
        "complete": sum(data.complete for data in group),
        "curves": curves,
        "final": _mean([data.final for data in validated]),
        "best": _mean([max(point["accuracy"] for point in data.points) for data in validated]),
        "at_equal_rollouts": _mean([float(interpolate(_curve(data, "rollouts"), equal)) for data in validated])
        if equal is not None else None,
        "totals": {axis: _mean([data.totals[axis] for data in group]) for axis in AXES},
        "effective_share": _mean([sum(values) / len(values) for _, values in shares if values]),
        "share_by_step": _by_step(shares),
        "rollouts_per_effective_group": _mean(per_group),
        "fates": dict(fates),
        "predictions": [pair for data in group for pair in data.predictions()],
        "faults": [f"{data.folder}: {fault}" for data in group for fault in data.faults()[:3]],
        "ledgers": sum(bool(data.run.ledger) for data in group),
    }  # fmt: skip


def _by_step(series: Sequence[tuple[list[int], list[float]]]) -> dict[str, list[float]]:
    """Mean over the seeds that logged the step."""
    found: dict[int, list[float]] = {}
    for steps, values in series:
        for step, value in zip(steps, values, strict=True):
            found.setdefault(step, []).append(value)
    steps = sorted(found)
    return {"x": [float(step) for step in steps], "mean": [sum(found[s]) / len(found[s]) for s in steps]}


def _to_target(
    group: Sequence[RunData], reference: Sequence[RunData] | None, axis: str, target: float | None
) -> dict[str, Any]:
    """Cost of reaching the target, and its ratio to the baseline (the reference) where all runs of both reached it.

    Of the runs that were validated: what the others reached is not known.
    """

    def costs(runs: Sequence[RunData]) -> list[float | None]:
        return [first_reach(_curve(data, axis), target) for data in runs if data.points and target is not None]

    own, theirs = costs(group), costs(reference or ())
    found: dict[str, Any] = {"reached": sum(value is not None for value in own),
                             "of": sum(bool(data.points) for data in group), "needed": None, "ratio": None}  # fmt: skip
    if own and None not in own:
        found["needed"] = _mean(own)
        if theirs and all(theirs):
            ratio, low, high = bootstrap_ratio(own, theirs)
            several = len(own) > 1 and len(theirs) > 1
            found["ratio"] = {"mean": ratio, "low": low if several else None, "high": high if several else None}
    return found


def _differences(groups: dict[str, list[RunData]], baseline: str, equal: float | None) -> dict[str, Any]:
    """Accuracy at equal rollouts against the baseline: Welch's test, corrected for the number of recipes."""
    if equal is None:
        return {}
    at = {name: [float(interpolate(_curve(d, "rollouts"), equal)) for d in group if d.points]
          for name, group in groups.items()}  # fmt: skip
    tests = {name: welch(values, at[baseline]) for name, values in at.items() if name != baseline}
    known = {name: test for name, test in tests.items() if test is not None}
    for (_, test), corrected in zip(known.items(), holm([test["p"] for test in known.values()]), strict=True):
        test["p_corrected"] = corrected
        test["separates"] = corrected < ALPHA
    return known


def _sentences(comparison: dict[str, Any]) -> list[str]:
    """The result in sentences."""
    recipes, runs, equal = comparison["recipes"], comparison["runs"], comparison["common"]["rollouts"]
    if len(recipes) == 1:
        return [f"Only {comparison['baseline']} was run: there is nothing to compare it with."]
    unmeasured = [run["folder"] for run in runs if not run["points"]]
    at_the_start = [run["folder"] for run in runs if run["points"] and run["points"][-1]["rollouts"] <= 0]
    if equal is not None:
        said = _separation(comparison, "every validated run" if unmeasured else "every run")
    elif at_the_start:
        said = [
            "Nothing can be said about held-out accuracy at equal rollouts: the last validation is at 0 rollouts in "
            f"{', '.join(at_the_start)}."
        ]
    else:
        return ["Held-out accuracy was not measured in all runs: nothing can be said about it."]
    if unmeasured:
        said.append(f"Left out, for want of a held-out accuracy: {', '.join(unmeasured)}.")
    if comparison["target"] is not None:
        reaches = {name: found["to_target"]["rollouts"] for name, found in recipes.items()}
        short = [f"{name} ({reach['of'] - reach['reached']} of {reach['of']} runs)"
                 for name, reach in reaches.items() if reach["reached"] < reach["of"]]  # fmt: skip
        if short:
            said.append(f"Short of {comparison['target']:g}: {', '.join(short)}.")
    if any(found["faults"] for found in recipes.values()):
        said.append("The ledger of a run does NOT add up; see below.")
    return said


def _separation(comparison: dict[str, Any], who: str) -> list[str]:
    """Which recipes differ from the baseline at equal rollouts."""
    baseline, differences = comparison["baseline"], comparison["differences"]
    equal = comparison["common"]["rollouts"]
    said = []
    where = f"at {equal:,.0f} rollouts, which {who} has reached,"
    separate = {name: test for name, test in differences.items() if test["separates"]}
    for name, test in separate.items():
        word = "above" if test["difference"] > 0 else "below"
        said.append(
            f"{name} separates: {where} its held-out accuracy is {abs(test['difference']):.3f} {word} {baseline}'s "
            f"(95% interval {test['low']:+.3f} to {test['high']:+.3f}; p = {test['p_corrected']:.2g})."
        )
    if not differences:
        said.append("Nothing can be said to separate: that takes two seeds or more of a recipe and of the baseline.")
    elif not separate:
        name, test = max(differences.items(), key=lambda item: abs(item[1]["difference"]))
        said.append(
            f"Nothing separates: {where} no recipe's held-out accuracy differs from {baseline}'s by more than its "
            f"seeds differ among themselves. The largest difference is {name}'s, {test['difference']:+.3f} "
            f"(95% interval {test['low']:+.3f} to {test['high']:+.3f})."
        )
    else:
        rest = [name for name in differences if name not in separate]
        if rest:
            said.append(f"Not separated from {baseline}: {', '.join(rest)}.")
    untested = [name for name in comparison["recipes"] if name != baseline and name not in differences]
    if untested and differences:
        said.append(f"Not tested, for want of seeds: {', '.join(untested)}.")
    return said


def _run(data: RunData) -> dict[str, Any]:
    """Versions, machine and seed of a run."""
    return {
        "recipe": data.recipe,
        "seed": data.seed,
        "folder": str(data.folder),
        "steps": data.run.steps[-1].step if data.run.steps else 0,
        "total_steps": data.run.total_steps,
        "complete": data.complete,
        "overrides": data.note.get("overrides", []),
        "versions": data.note.get("versions", {}),
        "machine": data.note.get("machine", {}),
        "ledger": "none" if not data.run.ledger else "does not add up" if data.faults() else "adds up",
        "points": data.points,
    }
