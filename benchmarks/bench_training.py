"""Recipes side by side in real training on this machine's CPU: verl's trainer, FSDP, vLLM and Ray on the tiny policy.

    python -m benchmarks.bench_training --mix balanced      # about 3 hours; goes on where it was cut off
    python -m benchmarks.bench_training --mix sparse --tables-only

Every recipe with three seeds, each run for two epochs of 1,024 prompts (64 steps, 16,384 rollouts), through
`python -m verl_ext.compare`. The runs lie in outputs/bench-training-<mix>, finished ones are not run again, and
`make report RUNS=outputs/bench-training-<mix>` shows them. A policy of half a million parameters on sums of digits is
a toy: the figures are its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result_files import write_result
from benchmarks.training_tables import tables
from verl_ext.compare import build
from verl_ext.reports.compared_runs import find

RESULTS = Path(__file__).parent / "results" / "training"
RECIPES = {
    "balanced": ("grpo", "dapo", "sara", "sara_dps", "pilot_commit", "cero", "pods", "sara_dps_pods"),
    "sparse": ("grpo", "dapo", "sara", "sara_dps", "cero"),
}
SEEDS = (0, 1, 2)
STEPS = 64
PROMPTS = 1024
ROLLOUTS = STEPS * 32 * 8


def overrides(mix: str) -> list[str]:
    """Settings of all runs."""
    spent = f"allocation.stop.run_rollouts={ROLLOUTS}"
    steps = f"trainer.total_training_steps={STEPS}"
    return [f"tiny.mix={mix}", spent, steps, "trainer.test_freq=8", "data.val_max_samples=256",
            f"data.train_max_samples={PROMPTS}"]  # fmt: skip


def compare(mix: str, recipes: Sequence[str], root: Path, more: Sequence[str] = ()) -> None:
    """Run what is missing, with ``more`` settings, and build the report; ends this program where a run fails."""
    names = ",".join(f"cpu/{name}" for name in recipes)
    # Quoted: Hydra reads a = in a list as its own.
    shared = ",".join(f"'{setting}'" for setting in (*overrides(mix), *more))
    command = [
        sys.executable, "-m", "verl_ext.compare", f"recipes=[{names}]", f"seeds=[{','.join(map(str, SEEDS))}]",
        f"root={root}", f"project=bench-training-{mix}", f"overrides=[{shared}]",
        "save_freq=16", f"title='{len(recipes)} recipes on the mix {mix}, three seeds'",
    ]  # fmt: skip
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=sorted(RECIPES), default="balanced", help="mix of prompts")
    parser.add_argument("--recipes", default=None, help="comma-separated; default: all of the mix")
    parser.add_argument("--tables-only", action="store_true", help="run nothing: tables of the runs that are there")
    given = parser.parse_args()
    recipes = given.recipes.split(",") if given.recipes else list(RECIPES[given.mix])
    if unknown := [name for name in recipes if name not in RECIPES["balanced"]]:
        parser.error(f"--recipes {','.join(unknown)}: accepted are {', '.join(RECIPES['balanced'])}")
    root = Path("outputs") / f"bench-training-{given.mix}"
    if not given.tables_only:
        compare(given.mix, recipes, root)
    text, numbers = tables(root)
    print(text)
    write_result(RESULTS / f"{given.mix}.json", numbers)
    (RESULTS / f"{given.mix}.md").write_text(text + "\n")
    with TemporaryDirectory() as folder:
        build(find(root, ()), Path(folder), given.mix)
        shutil.copyfile(Path(folder) / "accuracy.png", RESULTS / f"{given.mix}.png")


if __name__ == "__main__":
    main()
