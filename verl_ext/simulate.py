# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.simulate allocation/allocator=sara ... output=x.json`: rules on a population of prompts.

The population is simulated, or a real run's recorded outcomes. The same `collect`, rules and configuration groups as in
training; no verl, Ray or torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # arrays are small: threads only get in the way

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from verl_ext.allocation.settings import SettingError  # noqa: E402
from verl_ext.files import restrict_umask  # noqa: E402
from verl_ext.simulation.record import RecordError  # noqa: E402
from verl_ext.simulation.run import Rules, simulate  # noqa: E402
from verl_ext.simulation.settings import SimulationError, need, world_settings  # noqa: E402

_ALLOCATION = {"selector", "allocator", "downsampler", "stop", "rounds", "max_rounds", "seed"}


def run(config: DictConfig) -> dict[str, Any]:
    """Simulate what the configuration says.

    Raises:
        SettingError, SimulationError, RecordError: a setting that cannot be, by name.
    """
    seed = config.seed
    need(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0, "seed", seed, "an integer of 0 or more")
    groups = config.allocation.stop.groups
    if groups is not None:
        config.simulation.batch = groups
    if config.trainer.total_training_steps is None:
        config.trainer.total_training_steps = config.simulation.steps + config.simulation.warmup_steps
    plain = OmegaConf.to_container(config, resolve=True)
    world = world_settings(plain["population"], plain["simulation"])
    allocation = plain["allocation"]
    for name in sorted(set(allocation) - _ALLOCATION):
        need(False, f"allocation.{name}", allocation[name], "in a simulation " + ", ".join(sorted(_ALLOCATION)))
    rules = Rules(
        allocation["selector"], allocation["allocator"], allocation["downsampler"],
        allocation["stop"]["rollouts"], allocation["max_rounds"], allocation["rounds"],
    )  # fmt: skip
    result = simulate(plain["population"], world, rules, seed)
    return {**result, "settings": plain}


def summary(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    per_group = result["rollouts_per_effective_group"]
    fates = ", ".join(f"{fate} {n:,}" for fate, n in result["ledger"]["fates"].items() if n)
    accuracies = [p["accuracy"] for p in (result["curve"][0], result["curve"][-1])]
    accuracy = "not known" if None in accuracies else f"{accuracies[0]:.3f} -> {accuracies[1]:.3f}"
    rows = [
        ("steps", f"{len(result['curve']) - 1:,} ({result['short_steps']} short), "
                  f"{result['rounds_per_step']:.2f} rounds each"),
        ("rollouts", f"{result['rollouts']:,} ({result['tokens']:,} tokens): {fates}"),
        ("effective groups", f"{result['effective_groups']:,}, at "
                             f"{'no' if per_group is None else f'{per_group:.2f}'} rollouts each"),
        ("accuracy, recorded" if "reused_rollouts" in result else "held-out accuracy", accuracy),
    ]  # fmt: skip
    if "seconds" in result:
        idle = f", {result['idle_share']:.1%} of the slots idle" if "idle_share" in result else ""
        rows.append(("at a token a second", f"{result['seconds']:,.0f} s{idle}"))
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


@hydra.main(config_path="pkg://verl_ext.configs", config_name="simulate", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration from the command line, simulate, print, write."""
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)  # short steps are counted, not warned of
    restrict_umask()
    output = config.output
    start = time.perf_counter()
    try:
        need(output is None or str(output).endswith(".json"), "output", output, "null or a path that ends in .json")
        result = run(config)
    except (SettingError, SimulationError, RecordError, OmegaConfBaseException) as error:
        sys.exit(f"verl_ext.simulate: {error}")
    print(summary(result))
    if output is not None:
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
        print(f"{'written to':<20}{path}")
    print(f"{'seconds':<20}{time.perf_counter() - start:.1f}")


if __name__ == "__main__":
    main()
