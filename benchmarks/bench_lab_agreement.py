"""The laboratory beside verl's whole stack: the same recipes, the same policy, the same curves?

    python -m benchmarks.bench_lab_agreement               # all runs (70 minutes on 2 cores); goes on if cut off
    python -m benchmarks.bench_lab_agreement --side lab    # the laboratory's runs alone; --side verl: verl's

Both start from the policy of `verl_ext.tiny`, with 1,024 prompts, 16,384 rollouts, learning rate 1e-4, two optimizer
steps a step. They differ in which 1,024 prompts, their order, the random numbers, and the held-out rate: exact here,
mean@4 there, of the same 256 prompts. They agree where they differ by no more than seeds do: written are, by recipe,
the difference of the means over the curve and that of the finals, and what Welch's test says about it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

from benchmarks import bench_training  # noqa: E402
from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.lab.lab_run import LabSettings  # noqa: E402
from verl_ext.lab.recipes import find_recipe  # noqa: E402
from verl_ext.lab.study import Job, run_missing  # noqa: E402
from verl_ext.lab.update import UpdateSettings  # noqa: E402
from verl_ext.reports.compared_runs import find, load  # noqa: E402
from verl_ext.reports.drawing import colours, mean_curves, save  # noqa: E402
from verl_ext.reports.seed_statistics import welch  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LAB_RUNS = RESULTS / "lab_agreement_runs.json"
RECIPES = {"cpu/grpo": "grpo", "cpu/sara": "sara_full", "cpu/greso": "greso_64x4"}
"""By recipe of training, the laboratory's."""
LR = 1e-4
"""Learning rate of `cpu/base`."""
VALIDATION = "actor_rollout_ref.rollout.val_kwargs.n=4"
"""verl's resampling of best@n takes longer than the rollouts; 1,024 answers a validation are enough."""
Curves = list[np.ndarray]


def stack_curves(root: Path, recipe: str) -> Curves:
    """(points, 2) of each finished run through verl's stack: rollouts, held-out accuracy."""
    runs = [run for run in map(load, find(root, ())) if run.complete and run.recipe in (recipe, Path(recipe).name)]
    return [np.array([(point["rollouts"], point["accuracy"]) for point in run.points]) for run in runs]


def lab_curves(path: Path, recipe: str, mix: str) -> Curves:
    """(points, 2) of each run in the laboratory."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return [np.array(run["curve"]) for run in runs if (run["recipe"], run["task"]) == (recipe, mix)]


def compared(lab: Curves, stack: Curves) -> dict[str, object]:
    """Laboratory minus verl, over the rollouts that all runs have: the mean over the curve, and its end."""
    end = min(curve[-1, 0] for curve in (*lab, *stack))
    grid = np.linspace(0, end, 65)
    ours, theirs = (np.array([np.interp(grid, *curve.T) for curve in curves]) for curves in (lab, stack))
    result: dict[str, object] = {"laboratory_runs": len(lab), "verl_runs": len(stack), "rollouts": float(end)}
    for measure, pick in (("curve_mean", lambda values: values.mean(1)), ("final", lambda values: values[:, -1])):
        a, b = pick(ours), pick(theirs)
        runs = {"laboratory_runs": a.round(4).tolist(), "verl_runs": b.round(4).tolist()}
        result[measure] = {"laboratory": float(a.mean()), "verl": float(b.mean()), **runs, **(welch(a, b) or {})}
    return result


def main() -> None:
    """Run what is missing, compare, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="balanced", choices=("balanced", "sparse"), help="mix of prompts")
    parser.add_argument("--side", choices=("lab", "verl", "none"), help="run one side alone, or only compare")
    parser.add_argument("--root", type=Path, help="folder of verl's runs; default: outputs/lab-agreement-<mix>")
    parser.add_argument("--seeds", type=int, default=8, help="runs in the laboratory of each recipe")
    parser.add_argument("--workers", type=int, help="the laboratory's processes at once; default: one a core")
    given = parser.parse_args()
    root = given.root or Path("outputs") / f"lab-agreement-{given.mix}"
    if given.side in (None, "lab"):
        settings = LabSettings(task=given.mix, update=UpdateSettings(lr=LR))
        jobs = [Job(LAB_RUNS, find_recipe(name), settings, 0, seed)
                for seed in range(given.seeds) for name in RECIPES.values()]  # fmt: skip
        run_missing(jobs, given.workers)
    if given.side in (None, "verl"):
        bench_training.compare(given.mix, [Path(name).name for name in RECIPES], root, (VALIDATION,))
    result, charts = {}, []
    for name, lab_name in RECIPES.items():
        lab, stack = lab_curves(LAB_RUNS, lab_name, given.mix), stack_curves(root, name)
        if not lab or not stack:
            print(f"{name}: {len(lab)} runs in the laboratory, {len(stack)} through verl: nothing to compare")
            continue
        sides = {"laboratory": lab, "verl": stack}
        charts.append(mean_curves(name, sides, colours(list(sides))))
        result[name] = compared(lab, stack)
        for measure in ("curve_mean", "final"):
            print(name, measure, {key: round(value, 4) for key, value in result[name][measure].items()
                                  if isinstance(value, float)})  # fmt: skip
    if result:
        save(charts, RESULTS / f"lab_agreement_{given.mix}.png", columns=3)
        write_result(RESULTS / f"lab_agreement_{given.mix}.json", result)


if __name__ == "__main__":
    main()
