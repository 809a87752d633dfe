"""scripts/slurm/verl_ext.sbatch on a real Slurm of two nodes: exit codes, cancel, requeue, lost nodes, a real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.nodes import wait_until
from tests.cluster.slurm import REPOSITORY, SCRIPT

pytestmark = pytest.mark.cluster

PROGRAM = f"{sys.executable} {REPOSITORY}/tests/cluster/tiny_program.py"
CPU = {
    "VERL_EXT_PYTHON": sys.executable,
    "VERL_EXT_CPU_SLOTS": "1",
    # /dev/shm of a node is small here.
    "VERL_EXT_RAY_ARGS": "--object-store-memory=200000000",
    "VERL_EXT_START_TIMEOUT": "400",
    # Two nodes start Ray on two cores.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}
TINY = {**CPU, "VERL_EXT_PROGRAM": PROGRAM}


@pytest.fixture
def clean(slurm):
    """After every job nothing of it is left on a node: no process but slurmd, no folder of Ray's."""
    yield
    try:
        wait_until("no process left", lambda: not left(slurm.nodes), 40)
    except TimeoutError:
        raise AssertionError(f"left on the nodes: {left(slurm.nodes)}") from None


def left(nodes):
    """What runs on the nodes beside slurmd."""
    return [f"{node.name}: {p[:150]}" for node in nodes.nodes for p in node.processes() if "slurmd" not in p]


def folders(node):
    """Ray's folders under the node's /tmp."""
    return [name for name in node.run("ls", "/tmp").stdout.split() if name.startswith("ray_")]


def test_runs_on_both_nodes_and_passes_the_exit_code(slurm, shared, clean):
    job = slurm.submit(shared / "ok", **TINY)
    assert job.end() == ("COMPLETED", "0:0"), job.text
    assert "ran on n1 n2" in job.text and "Ray is up on 2 node(s)" in job.text
    assert [folders(node) for node in slurm.nodes.nodes] == [[], []]

    job = slurm.submit(shared / "fails", "exit=7", **TINY)
    assert job.end() == ("FAILED", "7:0"), job.text
    assert "the run ended with status 7" in job.text


def test_cancelling_ends_everything(slurm, shared, clean):
    job = slurm.submit(shared / "cancelled", "sleep=600", **TINY)
    job.wait_for("ran on n1 n2")
    slurm.command("scancel", job.number)
    assert job.end(90)[0] == "CANCELLED", job.text
    assert "stopped by signal 15" in job.text


def test_requeue_starts_anew_on_the_same_arguments(slurm, shared, clean):
    job = slurm.submit(shared / "requeued", "sleep=600", **TINY)
    job.wait_for("ran on n1 n2")
    slurm.command("scontrol", "requeue", job.number)
    job.wait_for("ran on n1 n2", times=2)
    assert "start 1: 2 node(s)" in job.text and "start 2: 2 node(s)" in job.text
    assert job.show()["Restarts"] == "1"
    slurm.command("scancel", job.number)
    assert job.end(90)[0] == "CANCELLED"


def test_the_time_limit_puts_the_job_back_a_bounded_number_of_times(slurm, shared, clean):
    """Slurm signals the script 300 s before the limit (#SBATCH --signal=B:USR1@300); here we do, by the same way."""
    job = slurm.submit(shared / "limit", "sleep=600", **TINY, VERL_EXT_MAX_RESTARTS="1")
    job.wait_for("ran on n1 n2")
    slurm.command("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for("ran on n1 n2", times=2)
    assert "the time limit is near: back into the queue" in job.text and "start 2: 2 node(s)" in job.text
    slurm.command("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for("was restarted 1 times already")
    assert job.state == "RUNNING"
    slurm.command("scancel", job.number)
    assert job.end(90)[0] == "CANCELLED"


def test_ray_lost_on_one_node_ends_the_job(slurm, shared, clean):
    job = slurm.submit(shared / "lost", "sleep=600", options=("--no-requeue",), **TINY)
    job.wait_for("ran on n1 n2")
    raylet = next(p.split()[0] for p in slurm.nodes[1].processes() if "raylet/raylet" in p)
    os.kill(int(raylet), signal.SIGKILL)
    assert job.end(90) == ("FAILED", "1:0"), job.text
    assert "a node or its Ray was lost" in job.text and "could not be put back into the queue" in job.text


def test_a_lost_node_puts_the_job_back_until_there_are_nodes_again(slurm, shared, clean):
    job = slurm.submit(shared / "node", "sleep=600", **TINY)
    job.wait_for("ran on n1 n2")
    second = slurm.nodes[1]
    second.kill()
    # Whoever notices first: Slurm, or the job itself by Ray.
    wait_until("the job in the queue", lambda: job.state == "PENDING", 180)
    assert job.show()["Restarts"] == "1"
    second.start(slurm.nodes.hosts)
    slurm.start_node(second)
    job.wait_for("ran on n1 n2", times=2)
    slurm.command("scancel", job.number)
    assert job.end(90)[0] == "CANCELLED"


def test_settings_that_cannot_be_are_refused(slurm, shared, clean):
    without = {key: value for key, value in TINY.items() if key != "VERL_EXT_CPU_SLOTS"}
    job = slurm.submit(shared / "none", **without)
    assert job.end() == ("FAILED", "1:0") and "the allocation has no GPUs: ask for them" in job.text
    job = slurm.submit(shared / "word", **{**TINY, "VERL_EXT_CPU_SLOTS": "two"})
    assert job.end() == ("FAILED", "1:0") and "ranks a node: 'two'; accepted" in job.text


def compare(slurm, shared):
    """`python -m verl_ext.compare launcher=slurm`, with a small program in place of the trainer."""
    program = f"{sys.executable} {REPOSITORY}/tests/cluster/cut_off_program.py"
    environment = {**slurm.environment, **CPU, "VERL_EXT_PROGRAM": program}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "verl_ext.compare",
            "launcher=slurm",
            "recipes=[x]",
            "seeds=[0,1]",
            "at_once=null",
            "poll_s=1",
            f"root={shared}/comparison",
            f"slurm.script={SCRIPT}",
            "slurm.options=['--nodes=1']",
        ],
        cwd=shared,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )


def test_compare_submits_follows_and_resumes(slurm, shared, clean):
    first = compare(slurm, shared)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "seed 0: done" in first.stdout and "seed 1: FAILED (FAILED 1:0)" in first.stdout
    assert "cut off" in first.stdout, "the end of the job's log is shown"
    second = compare(slurm, shared)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "seed 1: goes on as job" in second.stdout and second.stdout.count("as job") == 1
    assert (shared / "comparison" / "report" / "index.html").is_file()
    notes = [json.loads((shared / "comparison" / f"x-seed{s}" / "compare.json").read_text()) for s in (0, 1)]
    assert all(note["finished"] and note["job"]["launcher"] == "slurm" for note in notes)


@pytest.mark.real_stack
def test_the_recipe_trains_over_both_nodes_and_goes_on_after_a_requeue(slurm, shared, clean, alone):
    folder = shared / "real" / "run"
    job = slurm.submit(
        shared / "real",
        "recipe=cpu/sara",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={folder}",
        **CPU,
    )
    tracker = folder / "latest_checkpointed_iteration.txt"
    metrics = folder / "metrics.jsonl"
    # A step is saved before it is logged: both have to be there.
    there = tracker.exists, lambda: metrics.exists() and metrics.read_text()
    wait_until("a step", lambda: all(one() for one in there) or job.state not in ("PENDING", "RUNNING"), 900)
    assert all(one() for one in there), job.failure("no step was saved and logged")
    slurm.command("scontrol", "requeue", job.number)
    assert job.end(1200) == ("COMPLETED", "0:0"), job.failure("not completed")
    assert "start 2: 2 node(s)" in job.text and "The ledger adds up" in job.text
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2, 3] and tracker.read_text() == "3"
    # both nodes were trained on: one rank each
    assert {path.name for path in (folder / "global_step_3" / "actor").glob("model_world_size_2_rank_*.pt")} == {
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
    }
