"""Recipes side by side in real training on this machine's CPU: verl's trainer, FSDP, vLLM and Ray on the tiny policy.

    python -m benchmarks.bench_training --mix balanced      # about 90 minutes; goes on where it was cut off
    python -m benchmarks.bench_training --mix sparse --tables-only

Every recipe with three seeds, each run until its rollouts are spent, through `python -m verl_ext.compare`. What the
report and the tables need of the runs is kept in results/training/<mix>/, and
`make report RUNS=benchmarks/results/training/<mix>` shows it. A policy of half a
million parameters on sums of digits is a toy: the figures are its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.training_tables import tables
from verl_ext.compare import build
from verl_ext.reports.compared_runs import find

RESULTS = Path(__file__).parent / "results" / "training"
RECIPES = {
    "balanced": ("grpo", "dapo", "sara", "sara_dps", "pilot_commit", "cero", "pods", "sara_dps_pods"),
    "sparse": ("grpo", "dapo", "sara", "sara_dps", "cero"),
}
SEEDS = (0, 1, 2)
STEPS = 32
ROLLOUTS = STEPS * 32 * 8
EXACTLY = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/old_log_prob")
SETTINGS = (
    "allocation", "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "data.train_batch_size",
    "data.val_max_samples", "data.seed", "tiny.mix", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.clip_ratio", "trainer.total_training_steps", "trainer.test_freq",
    "trainer.project_name", "trainer.experiment_name",
)  # fmt: skip


def overrides(mix: str) -> list[str]:
    """Settings of all runs."""
    spent = f"allocation.stop.run_rollouts={ROLLOUTS}"
    steps = f"trainer.total_training_steps={STEPS}"
    return [f"tiny.mix={mix}", spent, steps, "trainer.test_freq=8", "data.val_max_samples=256"]


def compare(mix: str, recipes: list[str], root: Path) -> None:
    """Run what is missing and build the report; ends this program where a run fails."""
    names = ",".join(f"cpu/{name}" for name in recipes)
    shared = ",".join(f"'{setting}'" for setting in overrides(mix))  # quoted: Hydra reads a = in a list as its own
    command = [
        sys.executable, "-m", "verl_ext.compare", f"recipes=[{names}]", f"seeds=[{','.join(map(str, SEEDS))}]",
        f"root={root}", f"project=bench-training-{mix}", f"overrides=[{shared}]",
        "save_freq=16", f"title='{len(recipes)} recipes on the mix {mix}, three seeds'",
    ]  # fmt: skip
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def take_up(target: Path, root: Path) -> None:
    """Runs kept by an earlier sitting, perhaps on another machine, count as done."""
    for folder in sorted(target.glob("*/compare.json")):
        if not (root / folder.parent.name).exists():
            shutil.copytree(folder.parent, root / folder.parent.name)


def keep(root: Path, target: Path) -> int:
    """Copy of each finished run what the report reads, without paths and without what it does not; the number kept."""
    kept = 0
    for folder in sorted(root.glob("*")):
        note = folder / "compare.json"
        if not note.is_file() or not json.loads(note.read_text()).get("finished"):
            continue
        into = target / folder.name
        into.mkdir(parents=True, exist_ok=True)
        for name in ("compare.json", "run.json", "ledger.jsonl"):
            shutil.copyfile(folder / name, into / name)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        slim = [{"step": line["step"], "data": _slim(line["data"])} for line in lines]
        (into / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slim))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        (into / "config.yaml").write_text(yaml.safe_dump(_chosen(config), sort_keys=False))
        kept += 1
    return kept


def _slim(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}")
        for name, value in data.items()
        if name in EXACTLY
        or name.startswith("val-core/")
        or (name.startswith("allocation/") and not name.startswith(("allocation/fate", "allocation/pool/")))
    }


def _chosen(config: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for dotted in SETTINGS:
        *path, last = dotted.split(".")
        source, into = config, chosen
        for key in path:
            source, into = source[key], into.setdefault(key, {})
        into[last] = source[last]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=sorted(RECIPES), default="balanced", help="mix of prompts")
    parser.add_argument("--recipes", default=None, help="comma-separated; default: all of the mix")
    parser.add_argument("--tables-only", action="store_true", help="run nothing: tables of what is kept in results/")
    given = parser.parse_args()
    recipes = given.recipes.split(",") if given.recipes else list(RECIPES[given.mix])
    if unknown := [name for name in recipes if name not in RECIPES["balanced"]]:
        parser.error(f"--recipes {','.join(unknown)}: accepted are {', '.join(RECIPES['balanced'])}")
    target = RESULTS / given.mix
    if not given.tables_only:
        root = Path("outputs") / f"bench-training-{given.mix}"
        take_up(target, root)
        try:
            compare(given.mix, recipes, root)
        finally:
            print(f"{keep(root, target)} runs kept in {target}")
    text, numbers = tables(target)
    print(text)
    (RESULTS / f"{given.mix}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (RESULTS / f"{given.mix}.md").write_text(text + "\n")
    with TemporaryDirectory() as folder:
        build(find(target, ()), Path(folder), given.mix)
        shutil.copyfile(Path(folder) / "accuracy.png", RESULTS / f"{given.mix}.png")


if __name__ == "__main__":
    main()
