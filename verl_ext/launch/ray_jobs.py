# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs of a Ray cluster, by its job server (Ray 2.60)."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.files import private_opener

from .jobs import JobServerError, JobState, JobStatus

_STATES = {
    "PENDING": JobState.WAITING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.FAILED,
}


STOP_WITHIN = {"RAY_JOB_STOP_WAIT_TIME_S": "1800"}
"""Seconds that `ray job stop` gives a run to end its step and to save; Ray's own 3 s are too few."""

AGENT_WITHIN_S = 60.0
"""A job server answers before the agent that starts jobs does: seconds that it is given."""


class RayJobs:
    """Jobs of a Ray cluster."""

    name = "ray"

    def __init__(
        self, address: str | None, command: Sequence[str], runtime_env: Mapping[str, Any] | None = None
    ) -> None:
        """Connect.

        Args:
            address: of the job server, e.g. http://head:8265; None: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the cluster
                on this machine.
            command: what runs a recipe on the cluster's nodes; the run's arguments are added to it.
            runtime_env: Ray's, for all jobs.

        Raises:
            JobServerError: there is no job server.
        """
        from ray.job_submission import JobSubmissionClient

        self.command, self.runtime_env = tuple(command), dict(runtime_env or {})
        self.runtime_env["env_vars"] = {**STOP_WITHIN, **(self.runtime_env.get("env_vars") or {})}
        try:
            self.client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise JobServerError(
                f"ray.address={address}: no job server of Ray answers there ({error}); accepted: http://HEAD:8265, or "
                "null on a machine of the cluster; `ray start --head` starts it unless --include-dashboard=false"
            ) from error

    def submit(self, name: str, arguments: Sequence[str], log: Path) -> str:
        """See `JobServer`."""
        job = f"{re.sub('[^A-Za-z0-9_.-]', '-', name)}-{secrets.token_hex(4)}"
        end = time.monotonic() + AGENT_WITHIN_S
        while True:
            try:
                return self.client.submit_job(
                    entrypoint=shlex.join([*self.command, *arguments]), submission_id=job, runtime_env=self.runtime_env
                )
            except Exception as error:  # the client raises RuntimeError and errors of requests alike
                late = "No available agent" in str(error)
                if not late or time.monotonic() > end:
                    hint = f"; none for {AGENT_WITHIN_S:.0f} s: does another Ray there hold port 52365?" if late else ""
                    raise JobServerError(f"Ray refused the job {job}: {error}{hint}") from error
                time.sleep(1.0)

    def status(self, job: str) -> JobStatus:
        """See `JobServer`."""
        try:
            info = self.client.get_job_info(job)
        except Exception as error:
            if "does not exist" in str(error):
                return JobStatus(JobState.UNKNOWN, str(error).splitlines()[0])
            raise JobServerError(f"Ray's job server does not answer: {error}") from error
        status = str(getattr(info.status, "value", info.status))
        detail = status if info.driver_exit_code is None else f"{status}, exit code {info.driver_exit_code}"
        return JobStatus(_STATES.get(status, JobState.FAILED), detail)

    def collect(self, job: str, log: Path) -> None:
        """See `JobServer`; Ray keeps a job's output itself."""
        try:
            text = self.client.get_job_logs(job)
        except Exception as error:
            text = f"verl_ext: the output of job {job} cannot be had: {error}\n"
        with open(log, "a", encoding="utf-8", opener=private_opener) as file:
            file.write(text)

    def hint(self, job: str) -> str:
        """See `JobServer`."""
        return f"ray job stop {job}"
