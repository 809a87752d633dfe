"""Runs of the laboratory beside each other: paired differences, intervals, what could have been seen, curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit
from scipy.stats import nct

from verl_ext.reports import drawing
from verl_ext.reports.seed_statistics import first_reach, holm

Run = dict[str, Any]


def final(run: Run) -> float:
    """Held-out success at the end: mean of the evaluations in the last eighth of the run's rollouts."""
    rollouts, held_out = np.array(run["curve"]).T
    return float(held_out[rollouts >= 0.875 * rollouts[-1]].mean())


def curve_mean(run: Run) -> float:
    """Area under the curve over its length in rollouts."""
    rollouts, held_out = np.array(run["curve"]).T
    return float(np.trapezoid(held_out, rollouts) / (rollouts[-1] - rollouts[0]))


MEASURES = {"final": final, "curve mean": curve_mean}


def task_name(run: Run) -> str:
    """The task, with its share of hopeless prompts where that was set."""
    return run["task"] if run["hopeless"] is None else f"{run['task']} {run['hopeless']:g}"


def paired(
    values: dict[tuple, float], reference: dict[tuple, float], confidence: float = 0.95
) -> dict[str, float] | None:
    """Differences of two recipes over the policies and seeds that both have; Student's t of their mean.

    Returns:
        ``n``, ``difference``, ``low``, ``high``, ``p`` (two-sided), ``detectable``: the smallest true difference that a
        test at 1 - confidence finds with probability .8, given this spread. None with fewer than two pairs.
    """
    keys = sorted(values.keys() & reference.keys())
    n = len(keys)
    if n < 2:
        return None
    differences = np.array([values[key] - reference[key] for key in keys])
    error = float(differences.std(ddof=1)) / n**0.5
    mean = float(differences.mean())
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
    p = float(2 * stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return {"n": n, "difference": mean, "low": mean - half, "high": mean + half, "p": p,
            "detectable": detectable(error, n, 1 - confidence)}  # fmt: skip


def detectable(error: float, n: int, level: float = 0.05, power: float = 0.8) -> float:
    """Smallest true mean that a two-sided t test of n values finds with that power, given its standard error."""
    critical = float(stdtrit(n - 1, 1 - level / 2))

    def found(shift: float) -> float:
        value = float(1 - nct.cdf(critical, n - 1, shift) + nct.cdf(-critical, n - 1, shift))
        return value if value == value else 1.0  # SciPy's is NaN where it is next to 1

    return error * float(brentq(lambda shift: found(shift) - power, 0.0, 10 * critical))


def compare(runs: Sequence[Run], baseline: str | None = None) -> list[dict[str, Any]]:
    """Every recipe of every task against the baseline (default: the first recipe), paired by policy and seed.

    The p values of a task and measure are corrected together (Holm).
    """
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(map(task_name, runs)):
        of_task = [run for run in runs if task_name(run) == task]
        recipes = list(dict.fromkeys(run["recipe"] for run in of_task))
        first = baseline if baseline in recipes else recipes[0]
        for measure, value in MEASURES.items():
            by_recipe = {
                recipe: {(run["policy"], run["seed"]): value(run) for run in of_task if run["recipe"] == recipe}
                for recipe in recipes
            }
            part = []
            for recipe, values in by_recipe.items():
                row = {"task": task, "measure": measure, "recipe": recipe, "n": len(values),
                       "mean": float(np.mean(list(values.values()))), "baseline": first}  # fmt: skip
                test = None if recipe == first else paired(values, by_recipe[first])
                part.append({**row, **(test or {})})
            tested = [row for row in part if "p" in row]
            for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
                row["holm"] = p
            rows += part
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison in lines."""
    lines = []
    for task, measure in dict.fromkeys((row["task"], row["measure"]) for row in rows):
        lines.append(f"\n{task}, {measure}")
        for row in rows:
            if (row["task"], row["measure"]) != (task, measure):
                continue
            line = f"  {row['recipe']:<34}{row['mean']:.3f}  {row['n']:>3} runs"
            if "holm" in row:
                word = "" if row["holm"] < 0.05 else f"  not separated (could have seen {row['detectable']:.3f})"
                line += (f"  {row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}) against "
                         f"{row['baseline']}, p after Holm {row['holm']:.3f}{word}")  # fmt: skip
            lines.append(line)
    return "\n".join(lines)


def costs(runs: Sequence[Run]) -> str:
    """What each recipe cost, in lines: rollouts an effective group, coverage, seconds."""
    lines = [
        f"\n{'':<34}{'rollouts a group':>17}{'distinct share':>16}{'longest unseen':>16}{'steps':>8}{'seconds':>9}"
    ]
    for task in dict.fromkeys(map(task_name, runs)):
        lines.append(task)
        of_task = [run for run in runs if task_name(run) == task]
        for recipe in dict.fromkeys(run["recipe"] for run in of_task):
            own = [run for run in of_task if run["recipe"] == recipe]
            groups = sum(run["effective_groups"] for run in own)
            per = sum(run["rollouts"] for run in own) / groups if groups else float("nan")
            mean = {key: np.mean([run[key] for run in own]) for key in
                    ("distinct_share", "longest_unseen_steps", "steps", "seconds")}  # fmt: skip
            lines.append(
                f"  {recipe:<32}{per:>17.1f}{mean['distinct_share']:>16.2f}{mean['longest_unseen_steps']:>16.0f}"
                f"{mean['steps']:>8.0f}{mean['seconds']:>9.1f}"
            )
    return "\n".join(lines)


def rollouts_to(run: Run, target: float) -> float | None:
    """Rollouts at which the curve first reaches a success rate."""
    return first_reach(run["curve"], target)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Mean curves of held-out success against rollouts, one panel a task; bands are the standard error of the mean."""
    order = drawing.colours(list(dict.fromkeys(run["recipe"] for run in runs)))
    charts = []
    for task in dict.fromkeys(map(task_name, runs)):
        curves: dict[str, list[Any]] = {}
        for run in runs:
            if task_name(run) == task:
                curves.setdefault(run["recipe"], []).append(run["curve"])
        charts.append(drawing.mean_curves(task, curves, order))
    drawing.save(charts, path)
