# SPDX-License-Identifier: Apache-2.0
"""The interface of a cluster that takes runs as jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol


class JobServerError(RuntimeError):
    """The cluster cannot be asked, or refused a job; the message says what was asked, and what it answered."""


class JobState(str, Enum):
    """How far a job is."""

    WAITING = "waits"
    """In the queue, also again after a requeue."""
    RUNNING = "runs"
    DONE = "done"
    """Ended with status 0."""
    FAILED = "failed"
    """Ended in any other way."""
    UNKNOWN = "unknown"
    """The cluster knows no such job (any more)."""


@dataclass(frozen=True)
class JobStatus:
    """State of a job, and what the cluster calls it."""

    state: JobState
    """How far it is."""
    detail: str = ""
    """In the cluster's own words: FAILED 7:0, CANCELLED, ..."""


class JobServer(Protocol):
    """A cluster that takes jobs."""

    name: str
    """As in the setting ``launcher``."""

    def submit(self, name: str, arguments: Sequence[str], log: Path) -> str:
        """Submit a run.

        Args:
            name: of the job.
            arguments: of `verl_ext.main_ppo`.
            log: file that the run's output is appended to, at the latest when it has ended (`collect`).

        Returns:
            The job's id.

        Raises:
            JobServerError: it was refused.
        """

    def status(self, job: str) -> JobStatus:
        """Ask how far a job is.

        Raises:
            JobServerError: the cluster does not answer.
        """

    def collect(self, job: str, log: Path) -> None:
        """Bring the output of a job that has ended to its log, where the cluster has not written it there."""

    def hint(self, job: str) -> str:
        """Command that ends the job."""
