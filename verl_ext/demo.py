# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.demo [any.verl.key=value ...]`: watch a policy learn on this machine's CPU, with the whole stack.

Runs `python -m verl_ext.main_ppo recipe=cpu/sara` as a child whose own output goes to `train.log` in the run's folder,
follows the run's metrics, and ends with the run's table and plot. Exit status: 0 if held-out accuracy rose by at least
`MIN_GAIN` and the ledger adds up, 1 if not or if the run failed, 130 if it was stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ext.files import private_opener, restrict_umask
from verl_ext.launch.cleanup import end_child
from verl_ext.reports.run_plot import FILE as PLOT
from verl_ext.reports.run_table import table
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import METRICS, Run, read_run
from verl_ext.runs.step_line import progress_line

MIN_GAIN = 0.10
"""Held-out accuracy must rise by this much over the untrained policy's."""

LOG = "train.log"
_POLL_S = 0.25
_QUIET_S = 15.0
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

INTRO = """\
verl_ext demo: reinforcement learning with verifiable rewards, for real, on this machine's CPU.

  stack   verl's own V1 trainer, Ray, TransferQueue, FSDP and vLLM's CPU build; nothing is simulated
  policy  a Qwen2 of half a million parameters, pre-trained on sums such as 9+8+7+6= by a sloppy adder, who forgets each
          carried ten half of the time; so it is right on some prompts always, on some never, on some now and then
  reward  1 for the true total, else 0: the habit of forgetting tens has to go
  SARA    decides where rollouts go: a few per prompt first, more only where right and wrong answers are mixed, since
          a group that is all right or all wrong teaches GRPO nothing
"""

HINTS = (
    (("No space left on device",), "The disk is full: a run needs about 1 GB, also under the temporary folder."),
    (
        ("OutOfMemoryError", "Cannot allocate memory", "MemoryError", "OOM"),
        "Memory may have run out: the stack needs about 6 GiB. Close what else is running.",
    ),
    (("needs other versions than those installed",), "The environment is not as it should be: run `make setup`."),
    (("No module named",), "A package is missing: remove .venv and run `make setup`."),
    (("AF_UNIX path length",), "The path of the temporary folder is too long for Ray: set TMPDIR=/tmp."),
)


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


STAGES = (
    ("ready to fit", "rollout workers start; then the policy is validated as it is"),
    ("vLLMHttpServer", "vLLM starts"),
    ("Started a local Ray instance", "Ray is up; FSDP loads the policy"),
    ("", "checking the configuration, starting Ray"),
)
"""What the run's log shows of how far the start has come, the last stage first; used for the sign of life alone."""


@dataclass(frozen=True)
class Plan:
    """What is going to be run."""

    overrides: list[str]
    """Arguments of `verl_ext.main_ppo`."""
    folder: Path
    """The run's folder."""
    total_steps: int | None
    """Training steps, or None if the configuration counts in epochs."""
    mix: str | None
    """Mix of the tiny task, or None if the run is on another task."""


def make_plan(arguments: list[str], now: datetime | None = None) -> Plan:
    """Ask the configuration what a run with these arguments would be.

    Args:
        arguments: overrides from the command line; they come last, so that they win.
        now: names the run, so that no run overwrites another; the present time by default.

    Raises:
        DemoError: the configuration is refused; the message is Hydra's or verl_ext's own.
    """
    name = (now or datetime.now()).strftime("demo-%Y%m%d-%H%M%S")
    # On this machine, also where a cluster is at hand.
    here = "++ray_kwargs.ray_init.address=local"
    overrides = [f"trainer.experiment_name={name}", "trainer.resume_mode=disable", here, *arguments]
    if not any(argument.startswith("recipe=") for argument in arguments):
        overrides.insert(0, "recipe=cpu/sara")
    command = [sys.executable, "-m", "verl_ext.main_ppo", *overrides, "--cfg", "job", "--resolve"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise DemoError(f"the configuration was refused:\n{(done.stderr or done.stdout).strip()}")
    import yaml

    config = yaml.safe_load(done.stdout)
    if "file" not in config["trainer"]["logger"]:
        seen = config["trainer"]["logger"]
        raise DemoError(f"trainer.logger must contain 'file', which the demo follows; got {seen}")
    steps = config["trainer"].get("total_training_steps")
    return Plan(
        overrides=overrides,
        folder=Path(config["trainer"]["default_local_dir"]),
        total_steps=steps if isinstance(steps, int) else None,
        mix=(config.get("tiny") or {}).get("mix"),
    )


def new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a JSON-lines file after `offset` bytes, and the offset behind them."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read()
    except FileNotFoundError:
        return [], offset
    whole = piece[: piece.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()], offset + len(whole)


def follow(child: subprocess.Popen, plan: Plan, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """The lines to show while the run goes on: one a step, and a sign of life where nothing happens for long."""
    start = quiet_since = clock()
    offset, started = 0, False
    while True:
        ended = child.poll() is not None
        records, offset = new_lines(plan.folder / METRICS, offset)
        for record in records:
            started, quiet_since = True, clock()
            yield progress_line(record["step"], plan.total_steps, record["data"])
        if ended:
            return
        if clock() - quiet_since >= _QUIET_S:
            quiet_since = clock()
            doing = "the run goes on" if started else stage(read_log(plan.folder / LOG))
            yield f"... {clock() - start:.0f} s: {doing}"
        time.sleep(_POLL_S)


def read_log(path: Path) -> str:
    """The run's log without colours; empty where there is none yet."""
    return _ANSI.sub("", path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ""


def stage(log: str) -> str:
    """How far the start has come."""
    return next(doing for sign, doing in STAGES if sign in log)


def tail(log: str, lines: int = 25) -> str:
    """The last lines of the run's log; of a progress bar its last state."""
    return "\n".join([line.rsplit("\r", 1)[-1] for line in log.split("\n") if line.strip()][-lines:])


def hint(log: str) -> str:
    """What the log's last lines suggest to do."""
    for signs, advice in HINTS:
        if any(sign in log for sign in signs):
            return advice
    return "The first error in the log is usually the cause: search it for 'Error'."


def train(plan: Plan, say: Callable[[str], None]) -> None:
    """Run the training to its end and show its progress.

    Raises:
        DemoError: the run ended with an error; the message holds the end of its log.
        KeyboardInterrupt: it was stopped; nothing of it is left running.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    log = plan.folder / LOG
    # verl prints prompts and answers.
    with open(log, "wb", opener=private_opener) as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "verl_ext.main_ppo", *plan.overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Its own group: Ctrl-C reaches it through `end_child` alone, once.
            start_new_session=True,
        )
        try:
            for line in follow(child, plan):
                say(line)
        finally:
            end_child(child)
    if child.returncode:
        end = tail(read_log(log))
        raise DemoError(f"the run ended with status {child.returncode}. The end of {log}:\n\n{end}\n\n{hint(end)}")


def verdict(run: Run) -> tuple[bool, str]:
    """Whether the run shows what the demo promises, and a sentence that says so."""
    curves = run.accuracy()
    points = next(iter(curves.values()))[1] if curves else []
    if len(points) < 2 or points[0][0] != 0:
        return False, "NOT reached: held-out accuracy was not measured both before and after training."
    estimate, gain = next(iter(curves.values()))[0], points[-1][2] - points[0][2]
    if not run.ledger or ledger_faults(run.ledger):
        return False, "NOT reached: the ledger does not add up."
    reached = gain >= MIN_GAIN
    return reached, (
        f"{'Reached' if reached else 'NOT reached'}: held-out {estimate} {points[0][2]:.3f} -> {points[-1][2]:.3f}, "
        f"{gain:+.3f}; at least {MIN_GAIN:+.2f} was to be shown."
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _on_signal(number, frame):
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status (see the module's docstring)."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    restrict_umask()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    begin = time.monotonic()
    try:
        _say(INTRO)
        plan = make_plan(arguments)
        if plan.mix is not None:
            from verl_ext.tiny import ensure_tiny

            ensure_tiny(plan.mix)
        _say(f"Run's folder: {plan.folder} (all output of the stack: {LOG})")
        _say("Starting the stack takes a minute or two. Ctrl-C stops it and leaves nothing running.")
        train(plan, _say)
        run = read_run(plan.folder)
        _say(f"\n{table(run)}\n")
        reached, sentence = verdict(run)
        # The run itself drew it.
        plot = plan.folder / PLOT if (plan.folder / PLOT).is_file() else f"none, see {plan.folder / LOG}"
        _say(f"{sentence}\nPlot: {plot}\nAll in all {(time.monotonic() - begin) / 60:.1f} minutes.")
        return 0 if reached else 1
    except KeyboardInterrupt:
        _say("\nStopped.")
        return 130
    except (DemoError, ValueError) as error:
        print(f"\nverl_ext.demo: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
