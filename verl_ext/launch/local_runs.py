# SPDX-License-Identifier: Apache-2.0
"""Run what is missing, one child process after the other, and show how far all are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from verl_ext.files import private_opener
from verl_ext.launch.cleanup import end_child
from verl_ext.launch.comparison_plan import PlannedRun, State, check_same, read_note, state_of, write_note
from verl_ext.launch.screen import LOG
from verl_ext.runs.provenance import provenance

SHOWN = "job.log"
"""In a run's folder: what the run showed. What verl, Ray and vLLM printed is in `train.log`."""

COMMAND = (sys.executable, "-m", "verl_ext.main_ppo")
_STEP = re.compile(r"step +(\d+)/(\d+) \| ")


class Progress:
    """How far a comparison is: the run, its step line, and the time left.

    On a terminal its line is written over; elsewhere one is written every `every_s` seconds at the most.
    """

    def __init__(self, say: Callable[[str], None], runs: int, every_s: float = 30.0) -> None:
        self._say, self._every_s = say, every_s
        self._left = runs
        self._took: list[float] = []
        self._terminal = sys.stdout.isatty()
        self._spoke = 0.0

    def begin(self, name: str) -> None:
        """A run begins; `name` says which, and of how many."""
        self._name, self._began = name, time.monotonic()
        self._first: tuple[float, int] | None = None

    def line(self, text: str) -> None:
        """What the run showed."""
        text, now = text.rstrip("\n"), time.monotonic()
        if step := _STEP.search(text):
            number, total = int(step[1]), int(step[2])
            self._first = self._first or (now, number)
            text += f" | {time_left(self.seconds_left(now, number, total))}"
        elif not text.startswith(("...", "warning:", "verl_ext:")):
            return
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self._name} | {text}"[: width + 4], end="", flush=True)
        elif step and now - self._spoke >= self._every_s or not step and not text.startswith("..."):
            self._spoke = now
            self._say(f"{self._name} | {text}")

    def seconds_left(self, now: float, number: int, total: int) -> float | None:
        """Of all runs: this one's steps at its pace, the others as long as those before, or as this one will take."""
        began, first = self._first
        if number == first:
            return None
        rest = (total - number) * (now - began) / (number - first)
        whole = sum(self._took) / len(self._took) if self._took else now - self._began + rest
        return rest + (self._left - 1) * whole

    def end(self, well: bool) -> None:
        """The run has ended."""
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)
        self._left -= 1
        if well:
            self._took.append(time.monotonic() - self._began)


def time_left(seconds: float | None) -> str:
    """In words."""
    if seconds is None:
        return "time left not known yet"
    minutes = max(1, round(seconds / 60))
    return f"about {minutes} min left" if minutes < 120 else f"about {minutes / 60:.1f} h left"


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
    states = [state_of(run.folder) for run in runs]
    progress = Progress(say, sum(state is not State.DONE for state in states))
    for number, (run, state) in enumerate(zip(runs, states, strict=True), start=1):
        name = f"[{number}/{len(runs)}] {run.recipe}, seed {run.seed}"
        if state is State.DONE:
            say(f"{name}: done")
            continue
        say(f"{name}: {'goes on' if state is State.CUT_OFF else 'starts'}; output in {run.folder / LOG}")
        started = time.monotonic()
        progress.begin(name)
        status = _child(run, command, progress)
        progress.end(status == 0)
        if status == 0:
            write_note(run.folder, {**read_note(run.folder), "finished": True})
            say(f"{name}: done after {(time.monotonic() - started) / 60:.1f} minutes")
        else:
            failed.append(run)
            say(f"{name}: FAILED with status {status}; the last that it said:\n{tail(run)}")
    return failed


def _child(run: PlannedRun, command: Sequence[str], progress: Progress) -> int:
    write_note(run.folder, {**read_note(run.folder), **run.note(), **provenance(), "finished": False})
    child = subprocess.Popen(
        [*command, *run.arguments()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # verl's file logger must write into this run's folder, whatever the caller's own says.
        env={**{k: v for k, v in os.environ.items() if k != "VERL_FILE_LOGGER_PATH"}, "PYTHONUNBUFFERED": "1"},
        # Its own group: Ctrl-C reaches it through `end_child` alone, once.
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        with open(run.folder / SHOWN, "a", encoding="utf-8", opener=private_opener) as shown:
            for line in child.stdout:
                shown.write(line)
                shown.flush()
                progress.line(line)
        return child.wait()
    finally:
        end_child(child)


def tail(run: PlannedRun, lines: int = 15) -> str:
    """The last that a run showed, indented."""
    if not (run.folder / SHOWN).is_file():
        return f"    (no {run.folder / SHOWN})"
    text = (run.folder / SHOWN).read_text(encoding="utf-8", errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
