# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.main_ppo recipe=... any.verl.key=value`: verl's trainer with rollouts allocated by rules.

Composes the configuration, checks all that needs no cluster, and hands over to verl's `run_ppo`. Nothing of verl is
imported before the platform is chosen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.checks import Checks, Finding, Problems, State
from verl_ext.checks.findings import missing_setting
from verl_ext.checks.local import check_inputs, check_settings, check_with_verl
from verl_ext.checks.resume import check_resume
from verl_ext.command_line import run_command
from verl_ext.configuration import CONFIG_PATH
from verl_ext.cpu import CpuPlatformError, activate_cpu_platform
from verl_ext.files import restrict_umask
from verl_ext.launch.cleanup import run_guard
from verl_ext.launch.join_cluster import ClusterError, cluster_address
from verl_ext.launch.node_watch import NodeLostError, watched_nodes
from verl_ext.launch.screen import LOG, Screen, cause_of, one_line
from verl_ext.runs import checkpoints
from verl_ext.runs.line_file import NotWrittenError
from verl_ext.runs.own_folder import note_command, own_folder
from verl_ext.tiny.policy_store import default_cache, ensure_tiny
from verl_ext.training.stopping import ask_trainer_to_stop
from verl_ext.training.training_settings import TrainingSettings


def run(config: DictConfig, command: Sequence[str] = (), screen: Screen | None = None) -> None:
    """Check the configuration and the machine, choose the platform, and hand over to verl's `run_ppo`.

    Args:
        command: the arguments that the configuration was composed from.
        screen: what is shown of the run; None: all that is printed.

    Raises:
        Problems: all that the checks found; `python -m verl_ext.check` makes the same ones.
        CpuPlatformError: `trainer.device=cpu` on a machine whose accelerator is visible.
        ClusterError: a setting that cannot be on the Ray cluster that the run joins.
        NodeLostError: a node of the run was lost.
    """
    screen = screen or Screen()
    checks = Checks(say=partial(_say, screen))
    settings = check_settings(config, checks)
    checks.stop_if_short()
    if config.get("tiny") is not None:
        _make_tiny(config.tiny.mix)
    inputs = check_inputs(config, checks)
    checks.stop_if_short()
    # First: other settings refer to these.
    _expand_folders(config)
    OmegaConf.resolve(config)
    with run_guard(ask_trainer_to_stop):
        if config.trainer.device == "cpu":
            activate_cpu_platform(config)
        check_with_verl(config, checks, settings, inputs)
        checks.stop_if_short()
        if settings is not None:
            _choose_folder(config, command, checks, settings, screen)
        _run_verl(config, settings, screen)
    if settings is not None:
        _show_report(config.trainer.default_local_dir, screen.say)


def _choose_folder(
    config: DictConfig, command: Sequence[str], checks: Checks, settings: TrainingSettings, screen: Screen
) -> None:
    """A folder of its own for a run that would overwrite another's records, and the log in it."""
    trainer = config.trainer
    named = trainer.default_local_dir
    if "://" in named:
        return screen.show_all()
    folder = named if trainer.val_only else own_folder(named, command, trainer.resume_mode, trainer.resume_from_path)
    checks.run("resume", check_resume, config, settings, folder)
    checks.stop_if_short()
    if not trainer.val_only:
        if Path(folder) != Path(named):
            screen.say(f"{named} holds another run: the folder of this one is {folder}")
            trainer.default_local_dir = str(folder)
        note_command(folder, command)
    # A validation leaves the records of a run as they are.
    screen.log_to(trainer.default_local_dir, "validation.log" if trainer.val_only else LOG)


def _make_tiny(mix: str) -> None:
    try:
        ensure_tiny(mix)
    except OSError as error:
        raise Problems(
            f"VERL_EXT_CACHE={default_cache()}: the tiny task cannot be made there: {error}; accepted: a folder that "
            "can be written (unset: ~/.cache/verl_ext)"
        ) from error


_PATHS = (
    "trainer.default_local_dir",
    "allocation.record",
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
)


def _expand_folders(config: DictConfig) -> None:
    """The user's home in place of `~`: those who read and write the paths take their names as they are."""
    for setting in _PATHS:
        value = OmegaConf.select(config, setting)
        if isinstance(value, str):
            OmegaConf.update(config, setting, os.path.expanduser(value))
        elif isinstance(value, ListConfig):
            paths = [os.path.expanduser(path) if isinstance(path, str) else path for path in value]
            OmegaConf.update(config, setting, paths, merge=False)


def _say(screen: Screen, finding: Finding) -> None:
    """The resolved budget, and what does not stop the run but should be known."""
    if finding.state is State.WARNING or finding.check == "settings" and finding.state is State.OK:
        screen.say(finding.text)


def _show_report(folder: str, say: Callable[[str], None] = print) -> None:
    """The run's table, and report.png in its folder."""
    from verl_ext.reports.run_page import drawn_lines
    from verl_ext.reports.run_table import table
    from verl_ext.runs.records import RunError, read_run

    try:
        run = read_run(folder)
    except (RunError, OSError) as error:
        say(f"No report: {error} (trainer.logger needs 'file', and the folder must be on this machine)")
        return
    say(f"\n{table(run)}\n{drawn_lines(run)}")


def _run_verl(config: DictConfig, settings: TrainingSettings | None, screen: Screen) -> None:
    from verl.trainer.main_ppo import run_ppo

    from verl_ext.launch.ray_start import start_ray
    from verl_ext.training.task_runner import AllocatedTaskRunnerActor, VerlTaskRunnerActor

    if not screen.verbose:
        address = cluster_address(config)
        screen.wait_for("Ray starts" if address is None else f"Ray at {address} is joined")
    start_ray(config)
    if not screen.verbose:
        screen.wait_for("Ray is up; the trainer starts")
    with watched_nodes():
        run_ppo(config, task_runner_class=VerlTaskRunnerActor if settings is None else AllocatedTaskRunnerActor)


_PLAIN = (Problems, CpuPlatformError, ClusterError, NotWrittenError, NodeLostError, OmegaConfBaseException)
"""Errors whose message says all."""


@hydra.main(config_path=CONFIG_PATH, config_name="main", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration from the command line and run."""
    restrict_umask()
    # verl's own trainer has no line a step.
    quiet = config.get("verbose") is False and OmegaConf.select(config, "trainer.v1.trainer_mode") != "sync"
    screen = Screen(not quiet, _PLAIN)
    try:
        with screen:
            run(config, HydraConfig.get().overrides.task, screen)
    except OmegaConfBaseException as error:
        sys.exit(f"verl_ext: {missing_setting(error) or ' '.join(str(error).split())}")
    except NodeLostError as error:
        print(f"verl_ext: {error}", file=sys.stderr, flush=True)
        # EX_TEMPFAIL: whoever started the run knows that it may be started again.
        sys.exit(75)
    except _PLAIN as error:
        sys.exit(f"verl_ext: {cause_of(error)}")
    except Exception as error:
        sys.exit(f"verl_ext: {one_line(error)}. {_how_to_go_on(config, screen)}")


def _how_to_go_on(config: DictConfig, screen: Screen) -> str:
    """Where a resume begins, and where the whole output is."""
    if screen.log is None:
        return "Nothing was started."
    begins = checkpoints.where_a_resume_begins(config.trainer.default_local_dir)
    return f"{begins}. All output: {screen.log}"


if __name__ == "__main__":
    run_command(main)
