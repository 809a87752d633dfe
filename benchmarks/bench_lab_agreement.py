"""The laboratory beside verl's whole stack: the same recipes, the same policy, the same curves?

    python -m benchmarks.bench_training --recipes grpo,sara,cero      # verl's runs, three seeds (hours)
    python -m benchmarks.bench_lab_agreement                          # the laboratory's, and both in one picture

Both start from the policy of `verl_ext.tiny`, with 1,024 prompts, learning rate 1e-4, two optimizer steps a step. They
differ in the order of prompts, the random numbers, and the held-out rate: exact here, mean@8 there. They agree where
curves differ by no more than seeds do: written is, by recipe, the difference of the means over the curve, and the
standard error of that difference over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.lab.lab_run import LabSettings  # noqa: E402
from verl_ext.lab.recipes import find_recipe  # noqa: E402
from verl_ext.lab.study import Job, run_missing  # noqa: E402
from verl_ext.lab.update import UpdateSettings  # noqa: E402
from verl_ext.reports.compared_runs import find, load  # noqa: E402
from verl_ext.reports.drawing import colours, mean_curves, save  # noqa: E402

RESULTS = Path(__file__).parent / "results"
RECIPES = {"cpu/grpo": "grpo", "cpu/sara": "sara_full", "cpu/cero": "cero"}
"""By recipe of training, the laboratory's."""
LR = 1e-4
"""Learning rate of `cpu/base`."""


def stack_curves(root: Path, recipe: str) -> list[np.ndarray]:
    """(points, 2) of each finished run through verl's stack: rollouts, held-out accuracy."""
    runs = [run for run in map(load, find(root, ())) if run.complete and run.recipe in (recipe, Path(recipe).name)]
    return [np.array([(point["rollouts"], point["accuracy"]) for point in run.points]) for run in runs]


def lab_curves(path: Path, recipe: str, mix: str, seeds: int, workers: int | None) -> list[np.ndarray]:
    """(points, 2) of each run in the laboratory, made where it is missing."""
    settings = LabSettings(task=mix, update=UpdateSettings(lr=LR))
    run_missing([Job(path, find_recipe(recipe), settings, 0, seed) for seed in range(seeds)], workers)
    runs = json.loads(path.read_text())["runs"]
    return [np.array(run["curve"]) for run in runs if run["recipe"] == recipe]


def on_grid(curves: list[np.ndarray], grid: np.ndarray) -> np.ndarray:
    """(runs, points) by linear interpolation."""
    return np.array([np.interp(grid, *curve.T) for curve in curves])


def main() -> None:
    """Compare, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="balanced", choices=("balanced", "sparse"), help="mix of prompts")
    parser.add_argument("--root", type=Path, help="folder of verl's runs; default: that of bench_training")
    parser.add_argument("--seeds", type=int, default=8, help="runs in the laboratory of each recipe")
    parser.add_argument("--workers", type=int, help="processes at once; default: one a core")
    given = parser.parse_args()
    root = given.root or Path("outputs") / f"bench-training-{given.mix}"
    result, charts = {}, []
    for name, lab_name in RECIPES.items():
        lab = lab_curves(RESULTS / "lab_agreement_runs.json", lab_name, given.mix, given.seeds, given.workers)
        stack = stack_curves(root, name)
        end = min(curve[-1, 0] for curve in lab + stack)
        grid = np.linspace(0, end, 33)
        sides = {label: curves for label, curves in (("laboratory", lab), ("verl", stack)) if curves}
        charts.append(mean_curves(name, sides, colours(["laboratory", "verl"])))
        result[name] = {"laboratory_runs": len(lab), "verl_runs": len(stack)}
        if len(stack) > 1 and len(lab) > 1:
            ours, theirs = on_grid(lab, grid).mean(1), on_grid(stack, grid).mean(1)
            error = (ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs)) ** 0.5
            result[name] |= {"difference": float(ours.mean() - theirs.mean()), "standard_error": float(error)}
        print(name, result[name])
    save(charts, RESULTS / f"lab_agreement_{given.mix}.png", columns=3)
    write_result(RESULTS / f"lab_agreement_{given.mix}.json", result)


if __name__ == "__main__":
    main()
