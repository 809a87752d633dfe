# SPDX-License-Identifier: Apache-2.0
"""Runs of the laboratory and of simulations, read from their JSON as runs to be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_ext.launch.comparison_plan import CompareError
from verl_ext.reports.compared_runs import SEED, RunData, load, measure
from verl_ext.runs.records import Run, StepRecord

_SUCCESS = "val-core/held-out prompts/acc/mean@1"


def load_all(path: Path) -> list[RunData]:
    """The run of a folder, or all runs of a JSON file of `verl_ext.lab` or `verl_ext.simulate`.

    Raises:
        CompareError: it holds no run, or is damaged.
    """
    if path.suffix != ".json":
        return [load(path)]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        runs = list(_of_lab(path, found["runs"]) if "runs" in found else [_of_simulation(path, found)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path}: no output of verl_ext.lab or verl_ext.simulate ({error!r})") from error
    if not runs:
        raise CompareError(f"{path}: holds no runs")
    return runs


def _of_lab(path: Path, runs: Sequence[dict[str, Any]]) -> Iterable[RunData]:
    tasks = {(run["task"], run["hopeless"]) for run in runs}
    for run in runs:
        hopeless = "" if run["hopeless"] is None else f", {run['hopeless']:.0%} hopeless"
        name = run["recipe"] if len(tasks) == 1 else f"{run['recipe']} ({run['task']}{hopeless})"
        curve = zip(run["curve"], run["curve_steps"], run["curve_tokens"], strict=True)
        points = [(step, rollouts, tokens, success) for (rollouts, success), step, tokens in curve]
        # A base policy and a seed make a run.
        yield _run(path, name, 100 * run["policy"] + run["seed"], points, run["effective_groups"], {},
                   f"exact, on the laboratory's task {run['task']}")  # fmt: skip


def _of_simulation(path: Path, found: dict[str, Any]) -> RunData:
    points = [(p["step"], p["rollouts"], p["tokens"], p["accuracy"]) for p in found["curve"]]
    seed = found["settings"]["seed"]
    return _run(path, SEED.sub("", path.stem), seed, points, found["effective_groups"], found["settings"],
                "of the simulated population")  # fmt: skip


def _run(
    path: Path, recipe: str, seed: int, points: Sequence[tuple[int, int, int, float | None]], effective: int,
    config: dict[str, Any], estimate: str,
) -> RunData:  # fmt: skip
    """A run under the names that a trainer logs; its effective groups are known for the whole alone."""
    records = []
    for number, (step, rollouts, tokens, success) in enumerate(points, start=1):
        whole = number == len(points)
        data = {"allocation/rollouts": rollouts, "allocation/tokens": tokens}
        data |= {"allocation/groups": effective * whole, "allocation/batch_effective_share": float(whole)}
        records.append(StepRecord(step, data if success is None else {**data, _SUCCESS: success}))
    found = RunData(recipe, seed, path, Run(path, records), config, {"finished": True})
    measure(found)
    found.estimate = estimate
    return found
