"""Many runs in parallel processes: what is done is kept, what is missing is run, and all is compared."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from verl_ext.files import write_whole
from verl_ext.lab import summary
from verl_ext.lab.lab_run import LabSettings, allocation_settings, run
from verl_ext.lab.recipes import Recipe, find_recipe
from verl_ext.lab.update import UpdateSettings
from verl_ext.typed_settings import build, refused

_OWN = ("recipes", "seeds", "policies", "output", "workers", "baseline")


def lab_settings(config: Mapping[str, Any]) -> LabSettings:
    """The settings of the runs from a configuration.

    Raises:
        SettingError: naming the setting, its value and what is accepted.
    """
    values = {key: value for key, value in config.items() if key not in (*_OWN, "update")}
    return build(LabSettings, "lab", {**values, "update": build(UpdateSettings, "lab.update", config["update"])})


def key_of(recipe: Recipe, settings: LabSettings, policy: int, seed: int) -> str:
    """What a run is known by: all that its result depends on."""
    shared = dataclasses.asdict(settings)
    del shared["device"]
    return json.dumps([dataclasses.asdict(recipe), shared, policy, seed], sort_keys=True)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs of an output, none where there is no file yet.

    Raises:
        SettingError: the file is not one of ours.
    """
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text())["runs"]
    except (ValueError, KeyError, TypeError):
        raise refused("output", str(path), "a path, or an earlier output of verl_ext.lab") from None


@dataclasses.dataclass(frozen=True)
class Job:
    """One run, and the output it belongs to."""

    path: Path
    """Where it is kept."""
    recipe: Recipe
    """Rules and sizes."""
    settings: LabSettings
    """Task and update."""
    policy: int
    """Seed of the base policy."""
    seed: int
    """Seed of prompts' order, rollouts and rules."""

    @property
    def key(self) -> str:
        """What the run is known by."""
        return key_of(self.recipe, self.settings, self.policy, self.seed)


def _end_with(parent: int) -> None:
    """End this worker when its parent is gone: killed, it could not tell its workers, and they would wait for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(job: Job) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)  # short steps are counted, not warned of
    return {"key": job.key, **run(job.recipe, job.settings, job.policy, job.seed)}


def run_missing(jobs: Sequence[Job], workers: int | None = None) -> None:
    """Run what its output does not have, in parallel processes; every finished run is kept at once."""
    outputs = {path: read_runs(path) for path in dict.fromkeys(job.path for job in jobs)}
    done = {(path, one["key"]) for path, runs in outputs.items() for one in runs}
    missing = [job for job in jobs if (job.path, job.key) not in done]
    if not missing:
        return
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
    workers = min(len(missing), workers or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with, (os.getpid(),)) as pool:
        futures = {pool.submit(_work, job): job for job in missing}
        for number, future in enumerate(as_completed(futures), 1):
            job, one = futures[future], future.result()
            outputs[job.path].append(one)
            write_whole(job.path, (json.dumps({"runs": outputs[job.path]}) + "\n").encode())
            print(
                f"{number}/{len(missing)} {one['recipe']} {summary.task_name(one)} policy {one['policy']} "
                f"seed {one['seed']}: held-out {one['curve'][0][1]:.3f} -> {summary.final(one):.3f}, "
                f"{one['seconds']:.1f} s",
                flush=True,
            )


def study(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run every recipe with every policy and seed that the output does not have; returns the runs asked for.

    Raises:
        SettingError: a setting that cannot be, before anything is run.
    """
    settings = lab_settings(config)
    recipes = [find_recipe(str(text)) for text in config["recipes"]]
    for recipe in recipes:
        allocation_settings(recipe, 1, 0).rules  # noqa: B018  (a setting that cannot be is refused now)
    path = Path(str(config["output"]))
    if path.suffix != ".json":
        raise refused("output", config["output"], "a path that ends in .json")
    wanted = [
        Job(path, recipe, settings, policy, seed)
        for seed, policy, recipe in product(config["seeds"], config["policies"], recipes)
    ]
    run_missing(wanted, config["workers"])
    by_key = {one["key"]: one for one in read_runs(path)}
    chosen = [by_key[job.key] for job in sorted(wanted, key=lambda job: recipes.index(job.recipe))]
    print(summary.table(summary.compare(chosen, config["baseline"])))
    print(summary.costs(chosen))
    summary.draw(chosen, path.with_suffix(".png"))
    print(f"\nwritten to {path} and {path.with_suffix('.png')}")
    return chosen
