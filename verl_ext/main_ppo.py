# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.main_ppo recipe=... any.verl.key=value`: verl's trainer with rollouts allocated by rules.

Composes the configuration, checks all that needs no cluster, and hands over to verl's `run_ppo`. Nothing of verl is
imported before the platform is chosen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import entry_points

import hydra
from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import SettingError as RuleSettingError
from verl_ext.platform import CpuPlatformError, VersionError, activate_cpu_platform, check_versions, run_guard
from verl_ext.tiny.store import ensure_tiny, tiny_paths
from verl_ext.training.settings import AllocationSettings, SettingError, check_config


def _verl_config_dir() -> str:
    """The folder of verl's configuration, found without importing verl, whose platform is chosen at its first import.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed in this environment; verl_ext needs it")
    return os.path.join(spec.submodule_search_locations[0], "trainer", "config")


def _searchpath() -> list[str]:
    """Where Hydra looks beside verl_ext's own configuration: verl's, and that of every package with rules.

    Such a package names its configuration, laid out as verl_ext's, by an entry point of the group `verl_ext.configs`.
    """
    packages = {f"pkg://{point.value}" for point in entry_points(group="verl_ext.configs")}
    return [f"file://{_verl_config_dir()}", *sorted(packages)]


OmegaConf.register_new_resolver("verl_ext_searchpath", _searchpath, replace=True)
OmegaConf.register_new_resolver("tiny_path", lambda part, mix: str(getattr(tiny_paths(mix), part)), replace=True)


def run(config: DictConfig) -> None:
    """Check the configuration and the machine, choose the platform, and hand over to verl's `run_ppo`.

    Raises:
        SettingError: a setting that cannot be, or two that contradict each other.
        VersionError: an installed package has another version than the one needed.
        CpuPlatformError: `trainer.device=cpu` on a machine whose accelerator is visible.
    """
    settings = None
    if config.trainer.v1.trainer_mode == "sync":
        print("trainer.v1.trainer_mode=sync: verl's own trainer; nothing under allocation is used", flush=True)
    else:
        settings, budget = check_config(config)
        print(budget.describe(), flush=True)
    check_versions(config.trainer.device)
    if config.get("tiny") is not None:
        ensure_tiny(config.tiny.mix)
    OmegaConf.resolve(config)
    with run_guard():
        if config.trainer.device == "cpu":
            activate_cpu_platform(config)
        _run_verl(config, settings)
    if settings is not None:
        _show_report(config.trainer.default_local_dir)


def _show_report(folder: str) -> None:
    """The run's table, and report.png in its folder."""
    from verl_ext.report import RunError, read_run
    from verl_ext.report.plot import draw
    from verl_ext.report.table import table

    try:
        run = read_run(folder)
    except RunError as error:
        print(f"No report: {error} (trainer.logger needs 'file', and the folder must be on this machine)", flush=True)
        return
    print(f"\n{table(run)}\nPlot: {draw(run)}", flush=True)


def _run_verl(config: DictConfig, settings: AllocationSettings | None) -> None:
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(
        config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    task_runner = TaskRunnerV1
    if settings is not None:
        from verl_ext.training.preflight import check_reward, first_row
        from verl_ext.training.task_runner import AllocatedTaskRunnerActor

        check_reward(config, settings, first_row(config))
        task_runner = AllocatedTaskRunnerActor
    run_ppo(config, task_runner_class=task_runner)


@hydra.main(config_path="pkg://verl_ext.configs", config_name="main", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration from the command line and run."""
    try:
        run(config)
    except (SettingError, RuleSettingError, VersionError, CpuPlatformError) as error:
        sys.exit(f"verl_ext: {error}")


if __name__ == "__main__":
    main()
