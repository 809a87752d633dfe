# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a line a step, what its start waits for, and warnings. All else that is printed goes to a log.

The output of verl, Ray and vLLM, children included, goes to `train.log` in the run's folder: the two descriptors of
this process are pointed there, and a thread reads the file and picks what is shown.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_ext.files import private_opener
from verl_ext.runs.line_file import not_written

LOG = "train.log"
STAGES = {
    "create worker group": "the trainer loads the policy",
    "model engine initialized": "the engine starts",
    "ready to fit": "rollout workers start",
    "Creating file logger": "the first answers are generated",
    "Initial validation metrics": "validated; the first step is made",
    "cannot be scheduled right now": "the cluster has no room for the run: it waits for CPUs or accelerators",
}
"""What the log says, and what that means to who waits."""

HINTS = {
    "out of memory|OutOfMemory|No available memory for the cache": (
        "python -m verl_ext.check with the same words estimates what is needed; less is with a lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization, micro-batch or max_response_length"
    ),
    "No space left on device": "make room on the disk",
    "ActorDiedError|ActorUnavailableError|WorkerCrashedError": "a process was killed, often for want of memory",
}
"""In an error, and what can be done about it."""

_STEP = re.compile(r"step +\d+(/\d+)? \| .*")
_WARNING = re.compile(r"(?:(?:WARNING|ERROR|CRITICAL) verl_ext[\w.]*: |\[verl_ext[\w.]*\]\[(?:WARNING|ERROR)\] - )(.*)")
_END = re.compile(r"INFO verl_ext[\w.]*: (.*: the run ends after step \d+)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ACTOR = re.compile(r"^\([^()]*pid=\d+[^()]*\) ?")
_SAME = 3
"""Warnings of one kind that are shown; further ones are counted."""
_STILL_S = 60.0
"""Seconds of a start after which what it waits for is said again."""


def lines(path: Path, start: int, ended: Callable[[], bool]) -> Iterator[str]:
    """The lines of a file from a position as they come, until `ended` and all is read; "" while none comes."""
    with path.open("rb") as file:
        file.seek(start)
        line = b""
        while True:
            last = ended()
            line += (piece := file.readline())
            if line.endswith(b"\n") or last and line and not piece:
                yield line.decode("utf-8", "replace")
                line = b""
            elif not piece:
                if last:
                    return
                yield ""
                time.sleep(0.1)


class Picked:
    """Picks from a log what is shown."""

    def __init__(self) -> None:
        self.stage = "the start"
        self.steps = 0
        self._stages: set[str] = set()
        self._warnings: Counter[str] = Counter()
        self._shows = False

    def pick(self, line: str) -> str | None:
        """What is shown of a line; None: nothing."""
        line = _COLOURS.sub("", line).rstrip("\n").rsplit("\r", 1)[-1]
        text = _ACTOR.sub("", line)
        # A message of several lines goes on with lines that are indented.
        if self._shows and text.startswith("  "):
            return text
        self._shows = False
        if step := _STEP.search(text):
            self.steps += 1
            return step[0]
        if warning := _WARNING.search(text):
            kind = re.sub(r"\d+", "#", warning[1])
            self._warnings[kind] += 1
            self._shows = self._warnings[kind] <= _SAME
            return f"warning: {warning[1]}" if self._shows else None
        if text.startswith("verl_ext: "):
            return text
        if end := _END.search(text):
            return end[1]
        for sign in () if self.steps else STAGES.keys() - self._stages:
            if sign in line:
                self._stages.add(sign)
                self.stage = STAGES[sign]
                return f"... {self.stage}"
        return None

    def rest(self) -> str | None:
        """How many warnings were not shown."""
        more = sum(max(0, count - _SAME) for count in self._warnings.values())
        return f"{more} more warning(s) of the kinds above" if more else None


class Screen:
    """While it is open, `say` writes to the screen and all else to the log, unless `verbose`: then nothing is changed.

    Before `log_to` names a folder, output is kept aside; it is shown only where an error ends the run by then.

    Args:
        verbose: whether nothing is changed.
        plain: errors that say all there is to say: of these no traceback is logged.
    """

    def __init__(self, verbose: bool = True, plain: tuple[type[Exception], ...] = ()) -> None:
        self.verbose, self._plain = verbose, plain
        self.log: Path | None = None
        self._picked = Picked()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Screen:
        if not self.verbose:
            _flush()
            self._own = os.dup(1), os.dup(2)
            self._early = tempfile.TemporaryFile(buffering=0)
            _point_to(self._early.fileno())
            # Python buffers whole blocks where its output was no terminal when it started.
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, ValueError):
                    stream.reconfigure(line_buffering=True)
        return self

    def say(self, text: str) -> None:
        """Show a line."""
        if self.verbose:
            print(text, flush=True)
            return
        # Who read the output may have gone; the run goes on.
        with suppress(OSError):
            os.write(self._own[0], f"{text}\n".encode())

    def wait_for(self, stage: str) -> None:
        """Show what the start waits for from here on."""
        self._picked.stage = stage
        self.say(f"... {stage}")

    def log_to(self, folder: str, name: str = LOG) -> None:
        """From here on output goes to a file in the folder; it stays where it is if that is our output already.

        Raises:
            NotWrittenError: the log cannot be written.
        """
        if self.verbose:
            return
        path = Path(folder, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open(path, "ab", buffering=0, opener=private_opener)  # noqa: SIM115
        except OSError as error:
            raise not_written(path, error) from error
        with log:
            if os.path.samestat(os.fstat(log.fileno()), os.fstat(self._own[0])):
                return self.show_all()
            start = os.fstat(log.fileno()).st_size
            self._early.seek(0)
            _flush()
            log.write(self._early.read())
            _point_to(log.fileno())
        self.log = path
        self._thread = threading.Thread(target=self._show, args=(start,), name="verl_ext-screen", daemon=True)
        self._thread.start()
        self.say(f"All output of verl, Ray and vLLM: {path} (verbose=true shows it here)")

    def show_all(self) -> None:
        """Before there is a log: from here on nothing is picked."""
        if not self.verbose:
            self._give_back()
            self._leave()
            self.verbose = True

    def _show(self, start: int) -> None:
        began = spoke = time.monotonic()
        for line in lines(self.log, start, self._closed.is_set):
            now = time.monotonic()
            if line and (shown := self._picked.pick(line)) is not None:
                self.say(shown)
                spoke = now
            elif not self._picked.steps and now - spoke > _STILL_S and not self._closed.is_set():
                self.say(f"... still: {self._picked.stage} ({now - began:.0f} s)")
                spoke = now

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        unforeseen = isinstance(error, Exception) and not isinstance(error, self._plain)
        if unforeseen:
            traceback.print_exception(error)
        if self.verbose:
            return
        self._give_back()
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            if rest := self._picked.rest():
                self.say(rest)
        elif unforeseen:
            self._early.seek(0)
            self.say(self._early.read().decode("utf-8", "replace"))
        self._leave()

    def _leave(self) -> None:
        for own in self._own:
            os.close(own)
        self._early.close()

    def _give_back(self) -> None:
        _flush()
        for number, own in enumerate(self._own, start=1):
            os.dup2(own, number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _point_to(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def cause_of(error: BaseException) -> BaseException:
    """The error of an actor behind the one that Ray raises for it."""
    seen = error
    while isinstance(getattr(seen, "cause", None), BaseException):
        seen = seen.cause
    return seen


def one_line(error: BaseException) -> str:
    """What an error is, in a line, and what can be done about it."""
    cause = cause_of(error)
    text = [part.strip() for part in str(cause).splitlines() if part.strip()]
    said = f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
    hint = next((f"; {advice}" for sign, advice in HINTS.items() if re.search(sign, f"{said} {error}")), "")
    return f"{said:.400}{hint}"
