# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs of Slurm, by sbatch and `verl_ext.sbatch` beside this file (in the repository: scripts/slurm)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .jobs import JobServerError, JobState, JobStatus

_STATES = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
        JobState.WAITING,
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), JobState.RUNNING
    ),
    "COMPLETED": JobState.DONE,
}
"""Slurm's state -> ours; all others have ended badly."""


class SlurmJobs:
    """Jobs of Slurm."""

    name = "slurm"

    def __init__(
        self, script: str | os.PathLike[str] | None, options: Sequence[str] = (), program: str | None = None
    ) -> None:
        """Check that there is a Slurm.

        Args:
            script: the sbatch file; None: the package's own.
            options: more options of sbatch: nodes, GPUs, partition, account, time.
            program: what is run instead of `python -m verl_ext.main_ppo` (VERL_EXT_PROGRAM).

        Raises:
            JobServerError: no sbatch on this machine, or no such script.
        """
        self.script = Path(script or Path(__file__).with_name("verl_ext.sbatch")).absolute()
        self.options = tuple(options)
        if not self.script.is_file():
            raise JobServerError(f"slurm.script={script}: no such file; accepted: null (the package's own), or a file")
        if shutil.which("sbatch") is None:
            raise JobServerError("launcher=slurm: no sbatch on this machine; run this where jobs are submitted")
        # verl's file logger must write into the run's folder, whatever the caller's own says.
        self.environment = {k: v for k, v in os.environ.items() if k != "VERL_FILE_LOGGER_PATH"}
        self.environment.setdefault("VERL_EXT_PYTHON", sys.executable)
        if program is not None:
            self.environment["VERL_EXT_PROGRAM"] = program

    def _slurm(self, *command: str) -> subprocess.CompletedProcess:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=120, env=self.environment, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise JobServerError(f"{command[0]}: {error}") from error

    def submit(self, name: str, arguments: Sequence[str], log: Path) -> str:
        """See `JobServer`."""
        done = self._slurm(
            "sbatch", "--parsable", "--open-mode=append",
            f"--job-name={name}", f"--chdir={os.getcwd()}", f"--output={log}",
            *self.options, str(self.script), *arguments,
        )  # fmt: skip
        # "12" or, with several clusters, "12;name".
        job = done.stdout.strip().split(";")[0]
        if done.returncode or not job.isdigit():
            raise JobServerError(f"sbatch refused the job {name}: {done.stderr.strip() or done.stdout.strip()}")
        return job

    def status(self, job: str) -> JobStatus:
        """See `JobServer`. Slurm forgets a job minutes after its end; the accounting, where there is one, does not."""
        shown = self._slurm("scontrol", "show", "job", "-o", job)
        if shown.returncode == 0:
            word = re.search(r"\bJobState=(\S+)", shown.stdout)
            code = re.search(r"\bExitCode=(\S+)", shown.stdout)
            return _status(word[1] if word else "", code[1] if code else "")
        if "Invalid job id" not in shown.stderr:
            raise JobServerError(f"scontrol: {shown.stderr.strip()}")
        if shutil.which("sacct") is not None:
            kept = self._slurm("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job)
            if kept.returncode == 0 and kept.stdout.strip():
                word, _, code = kept.stdout.strip().splitlines()[-1].partition("|")
                # "CANCELLED by 1000"
                return _status(word.split()[0], code)
        return JobStatus(JobState.UNKNOWN, "Slurm does not know the job any more")

    def collect(self, job: str, log: Path) -> None:
        """See `JobServer`; Slurm writes the log itself."""

    def hint(self, job: str) -> str:
        """See `JobServer`."""
        return f"scancel {job}"


def _status(word: str, code: str) -> JobStatus:
    return JobStatus(_STATES.get(word, JobState.FAILED), f"{word} {code}".strip())
