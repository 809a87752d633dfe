# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.check recipe=... any.verl.key=value`: all that can be known of a run before it is started.

Takes what `verl_ext.main_ppo` takes. First the checks that need no cluster, which `main_ppo` makes too; then, unless
`check.cluster=false`, those that need one, on the cluster that the run would use. All that is short is said, not the
first only. The exit status is 0 where nothing is, else 1; no process is left behind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import Checks, Problems, State
from verl_ext.checks.findings import Seen
from verl_ext.checks.local import check_inputs, check_settings, check_with_verl
from verl_ext.checks.numbers import number_problems
from verl_ext.checks.resume import check_resume
from verl_ext.command_line import run_command
from verl_ext.configuration import CONFIG_PATH
from verl_ext.cpu import activate_cpu_platform
from verl_ext.launch.cleanup import run_guard
from verl_ext.runs.own_folder import own_folder


def run(config: DictConfig, checks: Checks, command: Sequence[str] = ()) -> None:
    """Make all checks.

    Args:
        command: the arguments of the run that is to be started.

    Raises:
        Problems: a setting of the check itself.
    """
    if not isinstance(own := config.get("check"), DictConfig):
        raise Problems(f"check={own!r}: timeout_s and cluster under it are accepted")
    seconds = own.timeout_s
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise Problems(f"check.timeout_s={seconds!r}: a positive number of seconds is accepted")
    if not isinstance(config.check.cluster, bool):
        raise Problems(f"check.cluster={config.check.cluster!r}: true or false is accepted")
    settings = check_settings(config, checks)
    if checks.findings[0].state is not State.OK:
        checks.skip("all others", "the configuration has to be right first")
        return
    inputs = check_inputs(config, checks)
    OmegaConf.resolve(config)
    with run_guard():
        if config.trainer.device == "cpu":
            checks.run("platform", _activate, config)
            if checks.findings[-1].state is not State.OK:
                return
        check_with_verl(config, checks, settings, inputs)
        trainer = config.trainer
        if settings is not None and "://" not in trainer.default_local_dir:
            folder = own_folder(trainer.default_local_dir, command, trainer.resume_mode, trainer.resume_from_path)
            checks.run("resume", check_resume, config, settings, folder)
        if not config.check.cluster:
            checks.skip("cluster", "check.cluster=false")
            return
        if number_problems(config):
            checks.skip("cluster", "the settings that say how much is needed have to be right first")
            return
        from verl_ext.checks.cluster import check_cluster

        check_cluster(config, checks, seconds)


def _activate(config: DictConfig) -> Seen:
    activate_cpu_platform(config)
    return Seen("trainer.device=cpu: the CPU platform is switched on")


@hydra.main(config_path=CONFIG_PATH, config_name="main", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration, make all checks, and say how they went."""
    checks = Checks(say=lambda finding: print(finding, flush=True))
    started = time.monotonic()
    try:
        words = HydraConfig.get().overrides.task
        run(config, checks, [word for word in words if not word.startswith("check.")])
    except Problems as error:
        sys.exit(f"verl_ext: {error}")
    short = len(checks.problems)
    print(f"{'Nothing is short' if not short else f'{short} problem(s)'}, {time.monotonic() - started:.0f} s")
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    run_command(main)
