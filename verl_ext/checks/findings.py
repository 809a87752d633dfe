# SPDX-License-Identifier: Apache-2.0
"""Results of checks. All checks are made, also after one that fails."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError


class Problems(ValueError):
    """Problems that a check found: one message each, with the setting, the value seen and what is accepted."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class State(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    SKIPPED = "skipped"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at."""
    state: State
    """How it ended."""
    text: str
    """What was seen; of a problem: the setting, the value, what is accepted."""

    def __str__(self) -> str:
        head, *rest = self.text.splitlines() or [""]
        return "\n".join([f"{self.state.value:8} {self.check:14} {head}", *(f"{'':24}{line}" for line in rest)])


@dataclass(frozen=True)
class Seen:
    """Result of a check that passed."""

    text: str
    """For the report."""
    value: Any = None
    """For the checks after it."""
    warnings: tuple[str, ...] = ()
    """What does not stop a run, but should be known."""


class Checks:
    """Runs checks one after the other and keeps what each found.

    Args:
        say: called with every finding as it is made.
    """

    def __init__(self, say: Callable[[Finding], None] | None = None) -> None:
        self.findings: list[Finding] = []
        self._say = say or (lambda finding: None)

    def run(self, name: str, check: Callable[..., Seen], *args: Any) -> Any:
        """Make one check.

        Returns:
            The value it gave; None where it found a problem, which is noted, not raised, whatever its class: a check
            that calls verl may meet any.
        """
        try:
            seen = check(*args)
        except Exception as error:
            for problem in _problems(error):
                self.add(name, State.PROBLEM, problem)
            return None
        self.add(name, State.OK, seen.text)
        for warning in seen.warnings:
            self.add(name, State.WARNING, warning)
        return seen.value

    def skip(self, name: str, why: str) -> None:
        """Note that a check could not be made, or was not asked for."""
        self.add(name, State.SKIPPED, why)

    def add(self, name: str, state: State, text: str) -> None:
        finding = Finding(name, state, text)
        self.findings.append(finding)
        self._say(finding)

    @property
    def problems(self) -> list[str]:
        """All that is wrong."""
        return [finding.text for finding in self.findings if finding.state is State.PROBLEM]

    def stop_if_short(self) -> None:
        """
        Raises:
            Problems: all that was found to be wrong so far.
        """
        if problems := self.problems:
            raise Problems(*problems)


def missing_setting(error: Exception) -> str | None:
    """What to say of a setting that is read, but was taken away (`~trainer.logger`); None of another error."""
    if not isinstance(error, ConfigKeyError | ConfigAttributeError | InterpolationKeyError):
        return None
    wanted = re.match(r"Interpolation key '(.+)' not found", str(error))
    if wanted is None:
        return f"{error.full_key} is missing: it is read, so `~{error.full_key}` cannot take it away; give it a value"
    return f"{wanted[1]} is missing: {error.full_key} refers to it; give one of the two a value"


def _problems(error: Exception) -> tuple[str, ...]:
    if missing := missing_setting(error):
        return (missing,)
    if problems := getattr(error, "problems", None):
        return tuple(problems)
    if type(error).__module__.split(".")[0] == "verl_ext":
        return (str(error),)
    said = " ".join(str(error).split())
    return (f"{type(error).__name__}: {said}" if said else type(error).__name__,)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(number: int, frame: Any) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
