# SPDX-License-Identifier: Apache-2.0
"""Run the missing runs of a comparison as jobs of a cluster: submit them, follow them, pick them up again later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verl_ext.launch.comparison_plan import PlannedRun, State, check_same, read_note, state_of, write_note
from verl_ext.launch.jobs import JobServer, JobServerError, JobState, JobStatus
from verl_ext.launch.local_runs import SHOWN, tail
from verl_ext.runs.records import RunError, read_run
from verl_ext.runs.step_line import progress_line

_SAY_EVERY_S = 30.0
"""Seconds between two step lines of a job."""

PATIENCE_S = 900.0
"""Seconds that a cluster may leave unanswered before the jobs are no longer followed."""


@dataclass
class _Followed:
    run: PlannedRun
    label: str
    job: str
    state: JobState | None = None
    step: int = 0
    """The last step that was shown."""
    spoke: float = 0.0


def run_on_cluster(
    runs: Sequence[PlannedRun],
    say: Callable[[str], None],
    server: JobServer,
    at_once: int | None = None,
    poll_s: float = 10.0,
    patience_s: float = PATIENCE_S,
) -> list[PlannedRun]:
    """Submit or take up every run that is not done, and wait for all.

    A job goes on when this process is stopped; the job's id is in the run's folder, and the same comparison follows it.

    Args:
        at_once: jobs submitted at a time; None: all.
        poll_s: seconds between two looks at the jobs.
        patience_s: seconds without an answer after which it gives up.

    Returns:
        The runs that failed; the others are done.

    Raises:
        CompareError: a folder holds a run with other settings; nothing has been submitted then.
        JobServerError: the cluster refused a job, or did not answer for `patience_s`.
    """
    # The job runs in another folder than this process.
    runs = [replace(run, folder=run.folder.absolute()) for run in runs]
    for run in runs:
        check_same(run)
    failed: list[PlannedRun] = []
    followed: list[_Followed] = []
    queue: list[tuple[PlannedRun, str]] = []
    for number, run in enumerate(runs, start=1):
        label = f"[{number}/{len(runs)}] {run.recipe}, seed {run.seed}"
        kept = read_note(run.folder).get("job") or {}
        if state_of(run.folder) is State.DONE:
            say(f"{label}: done")
        elif kept.get("launcher") == server.name and server.status(kept["id"]).state in (*_GOING_ON, JobState.DONE):
            say(f"{label}: is job {kept['id']} already")
            followed.append(_Followed(run, label, kept["id"]))
        else:
            queue.append((run, label))
    silent_since = None
    while queue or followed:
        while queue and (at_once is None or len(followed) < at_once):
            followed.append(_submit(*queue.pop(0), say, server))
        try:
            for one in list(followed):
                if _look(one, say, server):
                    followed.remove(one)
                    if one.state is JobState.FAILED:
                        failed.append(one.run)
            silent_since = None
        except JobServerError as error:
            if silent_since is None:
                silent_since = time.monotonic()
                say(f"{error}; trying again for {patience_s:g} s")
            elif time.monotonic() - silent_since > patience_s:
                raise
        if followed:
            time.sleep(poll_s)
    return failed


_GOING_ON = (JobState.WAITING, JobState.RUNNING)


def _submit(run: PlannedRun, label: str, say: Callable[[str], None], server: JobServer) -> _Followed:
    going_on = state_of(run.folder) is State.CUT_OFF
    note = {**read_note(run.folder), **run.note(), "finished": False}
    write_note(run.folder, {key: value for key, value in note.items() if key != "job"})
    job = server.submit(f"{run.folder.parent.name}-{run.folder.name}", run.arguments(), run.folder / SHOWN)
    write_note(run.folder, {**read_note(run.folder), "job": {"launcher": server.name, "id": job}})
    say(f"{label}: {'goes on' if going_on else 'starts'} as job {job}; `{server.hint(job)}` ends it")
    return _Followed(run, label, job)


def _show_step(one: _Followed, say: Callable[[str], None]) -> None:
    """The line of the job's last step, where its folder is seen from here and there is a new one."""
    try:
        run = read_run(one.run.folder)
    except (RunError, OSError):
        return
    if run.steps and (last := run.steps[-1]).step != one.step:
        one.step, one.spoke = last.step, time.monotonic()
        say(f"{one.label} | {progress_line(last.step, run.total_steps, last.data)}")


def _look(one: _Followed, say: Callable[[str], None], server: JobServer) -> bool:
    """Ask for the job's state; True if it has ended."""
    status = server.status(one.job)
    if status.state is JobState.UNKNOWN:
        # Forgotten by the cluster: the folder says how far the run came.
        done = state_of(one.run.folder) is State.DONE
        status = JobStatus(JobState.DONE if done else JobState.FAILED, status.detail)
    before, one.state = one.state, status.state
    if status.state in _GOING_ON:
        if status.state is not before:
            say(f"{one.label}: {status.state.value}")
        if time.monotonic() - one.spoke >= _SAY_EVERY_S:
            _show_step(one, say)
        return False
    server.collect(one.job, one.run.folder / SHOWN)
    if status.state is JobState.DONE:
        write_note(one.run.folder, {**read_note(one.run.folder), "finished": True})
        seen = (one.run.folder / "metrics.jsonl").is_file()
        say(f"{one.label}: done" + ("" if seen else f", but {one.run.folder} cannot be seen from here: is it shared?"))
    else:
        say(f"{one.label}: FAILED ({status.detail}); the last that it said:\n{tail(one.run)}")
    return True
