# SPDX-License-Identifier: Apache-2.0
"""Run what is missing, one child process after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from verl_ext.files import private_opener
from verl_ext.launch.cleanup import end_child
from verl_ext.launch.comparison_plan import PlannedRun, State, check_same, read_note, state_of, write_note
from verl_ext.runs.provenance import provenance

LOG = "train.log"
COMMAND = (sys.executable, "-m", "verl_ext.main_ppo")


def run_all(
    runs: Sequence[PlannedRun], say: Callable[[str], None], command: Sequence[str] = COMMAND
) -> list[PlannedRun]:
    """Run or resume every run that is not done.

    Args:
        command: what the arguments of a run are given to.

    Returns:
        The runs that failed; the others are done.

    Raises:
        CompareError: a folder holds a run with other settings; nothing has been run then.
    """
    for run in runs:
        check_same(run)
    failed = []
    for number, run in enumerate(runs, start=1):
        name = f"[{number}/{len(runs)}] {run.recipe}, seed {run.seed}"
        state = state_of(run.folder)
        if state is State.DONE:
            say(f"{name}: done")
            continue
        say(f"{name}: {'goes on' if state is State.CUT_OFF else 'starts'}; output in {run.folder / LOG}")
        started = time.monotonic()
        status = _child(run, command)
        if status == 0:
            write_note(run.folder, {**read_note(run.folder), "finished": True})
            say(f"{name}: done after {(time.monotonic() - started) / 60:.1f} minutes")
        else:
            failed.append(run)
            say(f"{name}: FAILED with status {status}; the end of its log:\n{tail(run)}")
    return failed


def _child(run: PlannedRun, command: Sequence[str]) -> int:
    write_note(run.folder, {**read_note(run.folder), **run.note(), **provenance(), "finished": False})
    # verl prints prompts and answers.
    with open(run.folder / LOG, "ab", opener=private_opener) as log:
        child = subprocess.Popen(
            [*command, *run.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # verl's file logger must write into this run's folder, whatever the caller's own says.
            env={**{k: v for k, v in os.environ.items() if k != "VERL_FILE_LOGGER_PATH"}, "PYTHONUNBUFFERED": "1"},
            # Its own group: Ctrl-C reaches it through `end_child` alone, once.
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            end_child(child)


def tail(run: PlannedRun, lines: int = 15) -> str:
    """The end of a run's log, indented."""
    if not (run.folder / LOG).is_file():
        return f"    (no {run.folder / LOG})"
    text = (run.folder / LOG).read_text(encoding="utf-8", errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
