# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.compare recipes=[cpu/grpo,cpu/sara] seeds=[0,1,2]`: recipes side by side, in one report.

Runs what is missing, resumes what was cut off, never reruns what is done, and builds the report of the run folders.
Runs are made here, one after the other, or as jobs of a cluster: `launcher=ray`, `launcher=slurm`.
Exit status: 1 if a run failed, 2 if a setting or a folder cannot be used, 130 if it was stopped.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.checks import Checks, local
from verl_ext.checks import State as FindingState
from verl_ext.command_line import explain, run_command
from verl_ext.configuration import CONFIG_PATH, compose_config
from verl_ext.files import restrict_umask, write_whole
from verl_ext.launch.cluster_runs import run_on_cluster
from verl_ext.launch.comparison_plan import CompareError, PlannedRun, State, plan, state_of
from verl_ext.launch.jobs import JobServer, JobServerError
from verl_ext.launch.local_runs import COMMAND, run_all
from verl_ext.reports.compared_runs import find
from verl_ext.reports.comparison import compare
from verl_ext.reports.comparison_page import draw_all, page
from verl_ext.reports.comparison_settings import check_baseline, check_settings, prepare_output
from verl_ext.reports.toy_runs import load_all


def build(
    folders: Sequence[Path], output: Path, title: str, baseline: str | None = None, target: float | None = None,
    recipes: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Build the report of some runs: index.html, PNGs, and all numbers as comparison.json.

    Args:
        folders: of runs; or JSON files of the laboratory and of simulations.
        recipes: in this order, others behind them; the first is the baseline where none is named. Without them one
            called grpo comes first.

    Raises:
        CompareError: a folder or a setting that cannot be used.
    """
    runs = [run for folder in folders for run in load_all(folder)]
    order = {recipe: i for i, recipe in enumerate(recipes)}
    grpo = re.compile(r"(^|[/_-])grpo$")
    runs.sort(key=lambda run: (order.get(run.recipe, len(order)), not (order or grpo.search(run.recipe))))
    comparison = compare(runs, baseline, target)
    prepare_output(output)
    draw_all(comparison, output)
    write_whole(output / "comparison.json", (json.dumps(comparison, indent=1, default=str) + "\n").encode())
    write_whole(output / "index.html", page(comparison, title).encode())
    return comparison


def job_server(settings: dict[str, Any], command: tuple[str, ...] = COMMAND) -> JobServer | None:
    """Where the runs are made; None: on this machine.

    Raises:
        CompareError: a setting that cannot be.
        JobServerError: there is no such cluster.
    """
    launcher, at_once, poll_s = settings["launcher"], settings["at_once"], settings["poll_s"]
    if launcher not in ("local", "ray", "slurm"):
        raise CompareError(f"launcher={launcher!r}; accepted: local, ray, slurm")
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise CompareError(f"at_once={at_once!r}; accepted: null, or an integer of 1 or more")
    if isinstance(poll_s, bool) or not isinstance(poll_s, int | float) or poll_s <= 0:
        raise CompareError(f"poll_s={poll_s!r}; accepted: seconds above 0")
    # What a test runs in place of the trainer is run in place of it everywhere.
    own = None if command == COMMAND else command
    if launcher == "ray":
        from verl_ext.launch.ray_jobs import RayJobs

        options = settings["ray"]
        return RayJobs(options["address"], own or (options["python"], *COMMAND[1:]), options["runtime_env"])
    if launcher == "slurm":
        from verl_ext.launch.slurm_jobs import SlurmJobs

        options = settings["slurm"]
        return SlurmJobs(options["script"], options["options"], None if own is None else " ".join(own))
    return None


def run(config: DictConfig, command: tuple[str, ...] = COMMAND) -> int:
    """Do what the configuration says; returns the exit status.

    Raises:
        CompareError: a folder or a setting that cannot be used.
        JobServerError: the cluster cannot be reached, or refused a job.
    """
    settings = OmegaConf.to_container(config, resolve=True)
    check_settings(settings)
    root, output = Path(settings["root"]).expanduser(), Path(settings["output"]).expanduser()
    planned = plan(settings["recipes"], settings["seeds"], root, settings["overrides"], settings["save_freq"])
    extra = find(None, settings["folders"])
    if planned:
        check_baseline(settings["baseline"], settings["recipes"], extra)
    failed = []
    if settings["run"] and (planned or not extra):
        if not planned:
            raise CompareError("recipes=[]; accepted: recipes to run, or run=false for the report alone")
        server = job_server(settings, command)
        # A test runs another program, whose recipes are none of ours.
        if command == COMMAND:
            check_plan(planned, server is None)
        prepare_output(output)
        if server is None:
            failed = run_all(planned, _say, command)
        else:
            failed = run_on_cluster(planned, _say, server, settings["at_once"], settings["poll_s"])
    if planned:
        there = [one.folder for one in planned if (one.folder / "metrics.jsonl").is_file()]
        for one in planned:
            if one.folder not in there:
                _say(f"{one.recipe}, seed {one.seed}: {state_of(one.folder).value}, not in the report")
        folders = there + [folder for folder in extra if folder.resolve() not in {path.resolve() for path in there}]
    else:
        folders = extra if settings["run"] else find(root, settings["folders"])
    if not folders:
        raise CompareError(f"no runs: no folder under {root} has a metrics.jsonl")
    title = settings["title"] or f"Comparison: {settings['project'] if not planned else root.name}"
    comparison = build(folders, output, title, settings["baseline"], settings["target"], settings["recipes"])
    for sentence in comparison["sentences"]:
        _say(sentence)
    _say(f"Report: {output / 'index.html'}")
    return 1 if failed else 0


def check_plan(planned: Sequence[PlannedRun], here: bool) -> None:
    """Compose every recipe that is not done, and make the checks that need neither verl nor a cluster.

    Args:
        here: the runs are made on this machine, so that data and model have to be on it.

    Raises:
        CompareError: all that is wrong with any of them; nothing has been run then.
    """
    said: dict[str, None] = {}
    for one in {run.recipe: run for run in reversed(planned) if state_of(run.folder) is not State.DONE}.values():
        try:
            config = compose_config(one.arguments())
        except HydraException as error:
            said[explain(error, one.arguments())] = None
            continue
        checks = Checks()
        local.check_settings(config, checks)
        if here and checks.findings[0].state is FindingState.OK:
            local.check_inputs(config, checks)
        said |= {f"{one.recipe}: {problem}": None for problem in checks.problems}
    if said:
        raise CompareError("\n".join(said) + "\nNothing was run.")


_GO_ON = dict.fromkeys(("ray", "slurm"), " Jobs that were submitted go on, and it follows them.")


def _say(line: str) -> None:
    print(line, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@hydra.main(config_path=CONFIG_PATH, config_name="compare", version_base=None)
def main(config: DictConfig) -> None:
    """Compose the configuration from the command line and run."""
    restrict_umask()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        status = run(config)
    except KeyboardInterrupt:
        _say("Stopped; the same command goes on from here." + _GO_ON.get(str(config.launcher), ""))
        status = 130
    except (CompareError, JobServerError, OmegaConfBaseException, OSError) as error:
        print(f"verl_ext.compare: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    run_command(main, "compare")
