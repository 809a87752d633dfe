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
import tempfile
import time
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # arrays are small: threads only get in the way

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from verl_ext.allocation import AllocationSettings  # noqa: E402
from verl_ext.command_line import run_command  # noqa: E402
from verl_ext.configuration import CONFIG_PATH  # noqa: E402
from verl_ext.files import restrict_umask, write_whole  # noqa: E402
from verl_ext.runs.outcome_records import RecordError  # noqa: E402
from verl_ext.simulation.simulation import simulate  # noqa: E402
from verl_ext.simulation.simulation_settings import world_settings  # noqa: E402
from verl_ext.typed_settings import SettingError, build, is_whole, require  # noqa: E402

_SECTIONS = (
    "allocation", "allocation.stop", "allocation.selector", "allocation.allocator", "allocation.downsampler",
    "simulation", "trainer",
)  # fmt: skip


def run(config: DictConfig) -> dict[str, Any]:
    """Simulate what the configuration says.

    Raises:
        SettingError, RecordError: a setting that cannot be, by name.
    """
    seed = config.seed
    require(is_whole(seed, 0), "seed", seed, "an integer of 0 or more")
    for name in _SECTIONS:
        section = OmegaConf.select(config, name)
        require(isinstance(section, DictConfig), name, section, f"a group of settings, {name}.<setting>=<value> each")
    groups, rollouts = config.allocation.stop.groups, config.allocation.stop.rollouts
    accepted = "null or an integer of 1 or more"
    require(groups is None or is_whole(groups, 1), "allocation.stop.groups", groups, accepted)
    require(rollouts is None or is_whole(rollouts, 1), "allocation.stop.rollouts", rollouts, accepted)
    if groups is not None:
        config.simulation.batch = groups
    # checked before the whole is resolved: the rules may refer to the sum of two of these settings
    world = world_settings(config.population, OmegaConf.to_container(config.simulation, resolve=True))
    if config.trainer.total_training_steps is None:
        config.trainer.total_training_steps = world.steps + world.warmup_steps
    plain = OmegaConf.to_container(config, resolve=True)
    settings = build(AllocationSettings, "allocation", plain["allocation"])
    result = simulate(plain["population"], world, settings, seed)
    return {**result, "settings": plain}


def output_path(output: Any) -> Path:
    """Where the result goes; its folder is made, and found to take a file.

    Raises:
        SettingError: no file can be written there.
    """
    accepted = "null or a path that ends in .json"
    require(str(output).endswith(".json"), "output", output, accepted)
    try:
        path = Path(str(output)).expanduser()
        require(not path.is_dir(), "output", output, f"{accepted}; this is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        # a name at least as long as that of the file that the result is first written to
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=f".{os.getpid()}.tmp"):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that there is not
        require(False, "output", output, f"{accepted} and can be written ({error})")
    return path


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


@hydra.main(config_path=CONFIG_PATH, config_name="simulate", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration from the command line, simulate, print, write."""
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)  # short steps are counted, not warned of
    restrict_umask()
    output = config.output
    start = time.perf_counter()
    try:
        path = None if output is None else output_path(output)  # before the simulation, which may take long
        result = run(config)
    except (SettingError, RecordError, OmegaConfBaseException) as error:
        sys.exit(f"verl_ext.simulate: {error}")
    print(summary(result))
    if path is not None:
        try:
            write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
        except OSError as error:
            sys.exit(f"verl_ext.simulate: output={output!r} cannot be written: {error}")
        print(f"{'written to':<20}{path}")
    print(f"{'seconds':<20}{time.perf_counter() - start:.1f}")


if __name__ == "__main__":
    run_command(main, "simulate")
