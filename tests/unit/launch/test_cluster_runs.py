# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs: what is submitted, followed and taken up again. The cluster is a dictionary, not a real one."""

import json
import os
import stat

import pytest
from hydra import compose, initialize_config_module

from verl_ext.compare import job_server
from verl_ext.launch.cluster_runs import run_on_cluster
from verl_ext.launch.comparison_plan import CompareError, State, plan, read_note, state_of
from verl_ext.launch.jobs import JobServerError, JobState, JobStatus
from verl_ext.launch.ray_jobs import RayJobs
from verl_ext.launch.slurm_jobs import SlurmJobs


class Cluster:
    """A job takes the states it is given, one a look; the last one stays. A finished one leaves a run's folder."""

    name = "ray"

    def __init__(self, **states):
        self.states, self.submitted, self.jobs, self.most = states, [], {}, 0

    def submit(self, name, arguments, log):
        folder = dict(a.split("=", 1) for a in arguments)["trainer.default_local_dir"]
        job = f"job-{len(self.submitted)}"
        self.submitted.append(os.path.basename(folder))
        self.jobs[job] = [folder, list(self.states.get(os.path.basename(folder).replace("-", "_"), ["done"]))]
        self.most = max(self.most, sum(len(states) > 1 for _, states in self.jobs.values()))
        return job

    def status(self, job):
        if job not in self.jobs:
            return JobStatus(JobState.UNKNOWN, "no such job")
        folder, states = self.jobs[job]
        state = states.pop(0) if len(states) > 1 else states[0]
        if state == "silent":
            raise JobServerError("no answer")
        if state == "done":
            for name, text in (("config.yaml", "trainer: {total_training_steps: 1}\n"),
                               ("metrics.jsonl", '{"step": 1, "data": {}}\n')):  # fmt: skip
                with open(os.path.join(folder, name), "w") as file:
                    file.write(text)
        return JobStatus(JobState(state), "FAILED, exit code 3" if state == "failed" else state)

    def collect(self, job, log):
        with open(log, "a") as file:
            file.write(f"output of {job}\n")

    def hint(self, job):
        return f"end {job}"


def test_runs_are_submitted_followed_and_done(tmp_path):
    runs, said = plan(["x"], [0, 1, 2], tmp_path), []
    cluster = Cluster(x_seed0=["waits", "runs", "runs", "done"], x_seed1=["runs", "failed"])
    assert [r.seed for r in run_on_cluster(runs, said.append, cluster, poll_s=0.01)] == [1]
    assert [state_of(r.folder) for r in runs] == [State.DONE, State.MISSING, State.DONE]
    assert read_note(runs[0].folder)["finished"] and read_note(runs[0].folder)["job"] == {
        "launcher": "ray",
        "id": "job-0",
    }
    assert "[1/3] x, seed 0: waits" in said and said.count("[1/3] x, seed 0: runs") == 1
    assert any("seed 1: FAILED (FAILED, exit code 3)" in line and "output of job-1" in line for line in said)
    # once more: only what failed
    assert run_on_cluster(runs, said.append, again := Cluster(), poll_s=0.01) == []
    assert again.submitted == ["x-seed1"]


def test_jobs_of_an_earlier_comparison_are_taken_up_not_submitted_twice(tmp_path):
    runs = plan(["x"], [0, 1], tmp_path)
    cluster = Cluster(x_seed0=["runs", "runs"], x_seed1=["runs"])

    def stop(line):
        if "seed 1: runs" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_cluster(runs, stop, cluster, poll_s=0.01)
    # meanwhile the first came to its end, the second was forgotten by the cluster
    cluster.jobs["job-0"][1] = ["done"]
    del cluster.jobs["job-1"]
    cluster.states["x_seed1"] = ["done"]
    said = []
    assert run_on_cluster(runs, said.append, cluster, poll_s=0.01) == []
    assert cluster.submitted == ["x-seed0", "x-seed1", "x-seed1"]
    assert "[1/2] x, seed 0: is job job-0 already" in said


def test_no_more_jobs_at_once_than_asked_for(tmp_path):
    states = {f"x_seed{i}": ["runs", "runs", "done"] for i in range(4)}
    cluster = Cluster(**states)
    assert run_on_cluster(plan(["x"], range(4), tmp_path), print, cluster, at_once=2, poll_s=0.01) == []
    assert cluster.most == 2


def test_a_silent_cluster_is_asked_again_but_not_for_ever(tmp_path):
    runs, said = plan(["x"], [0], tmp_path), []
    assert run_on_cluster(runs, said.append, Cluster(x_seed0=["silent", "silent", "done"]), poll_s=0.01) == []
    assert sum("no answer; trying again for" in line for line in said) == 1
    with pytest.raises(JobServerError, match="no answer"):
        run_on_cluster(plan(["y"], [0], tmp_path), print, Cluster(y_seed0=["silent"]), poll_s=0.01, patience_s=0.05)


def test_folders_are_absolute_and_other_settings_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    cluster = Cluster()
    run_on_cluster(plan(["x"], [0], Path("runs")), print, cluster, poll_s=0.01)
    assert cluster.jobs["job-0"][0] == str(tmp_path / "runs" / "x-seed0")
    with pytest.raises(CompareError, match="choose another project"):
        run_on_cluster(plan(["x"], [0], Path("runs"), ["a=1"]), print, cluster, poll_s=0.01)


def test_ray_gives_a_job_that_is_stopped_the_time_to_save(monkeypatch):
    import ray.job_submission

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", lambda address: address)
    assert RayJobs("http://a:1", ("x",)).runtime_env == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1800"}}
    own = {"working_dir": ".", "env_vars": {"A": "1", "RAY_JOB_STOP_WAIT_TIME_S": "9"}}
    assert RayJobs("http://a:1", ("x",), own).runtime_env == own


def settings(*overrides):
    from omegaconf import OmegaConf

    with initialize_config_module("verl_ext.configs", version_base=None):
        return OmegaConf.to_container(compose("compare", list(overrides)), resolve=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("override, error, message", [
    ("launcher=pbs", CompareError, "launcher='pbs'; accepted: local, ray, slurm"),
    ("at_once=0", CompareError, "at_once=0; accepted: null"), ("poll_s=0", CompareError, "poll_s=0; accepted"),
    ("launcher=slurm slurm.script=nowhere", JobServerError, "slurm.script=nowhere: no such file"),
])  # fmt: skip
def test_what_cannot_be(override, error, message):
    with pytest.raises(error, match=message):
        job_server(settings(*override.split()))
    assert job_server(settings()) is None


FAKE = """#!/bin/sh
echo "$0 $*" >> {calls}
case $0 in
*sbatch) echo "12;here" ;;
*scontrol)
    cat {answer}
    [ -s {answer} ] || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }} ;;
*sacct) cat {kept} ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that answer what Slurm 22.05 does, from files."""
    files = {name: tmp_path / name for name in ("calls", "answer", "kept")}
    for path in files.values():
        path.write_text("")
    for name in ("sbatch", "scontrol", "sacct"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE.format(**files))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "script.sbatch").touch()
    return SlurmJobs(tmp_path / "script.sbatch", ["--nodes=2"]), files


@pytest.mark.parametrize("answer, kept, state, detail", [
    ("JobId=12 JobName=x JobState=RUNNING Reason=None ExitCode=0:0", "", JobState.RUNNING, "RUNNING 0:0"),
    ("JobId=12 JobState=PENDING Reason=BeginTime Requeue=1 ExitCode=0:0", "", JobState.WAITING, "PENDING 0:0"),
    ("JobId=12 JobState=FAILED ExitCode=7:0", "", JobState.FAILED, "FAILED 7:0"),
    ("JobId=12 JobState=NODE_FAIL ExitCode=0:9", "", JobState.FAILED, "NODE_FAIL 0:9"),
    ("", "CANCELLED by 1000|0:15", JobState.FAILED, "CANCELLED 0:15"),
    ("", "COMPLETED|0:0", JobState.DONE, "COMPLETED 0:0"),
    ("", "", JobState.UNKNOWN, "Slurm does not know the job any more"),
])  # fmt: skip
def test_states_of_slurm(slurm, tmp_path, answer, kept, state, detail):
    server, files = slurm
    assert server.submit("name", ["recipe=x"], tmp_path / "train.log") == "12"
    files["answer"].write_text(answer)
    files["kept"].write_text(kept)
    assert server.status("12") == JobStatus(state, detail)
    call = files["calls"].read_text().splitlines()[0]
    assert "--nodes=2" in call and f"--output={tmp_path}/train.log" in call and call.endswith("script.sbatch recipe=x")


def test_the_note_names_no_credentials(tmp_path):
    runs = plan(["x"], [0], tmp_path)
    run_on_cluster(runs, print, Cluster(), poll_s=0.01)
    assert set(json.loads((runs[0].folder / "compare.json").read_text())) == {
        "recipe",
        "seed",
        "overrides",
        "finished",
        "job",
    }
