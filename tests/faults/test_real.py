"""Faults that need the real trainer: FSDP, vLLM, checkpoints. Each start takes about 100 s on 2 cores.

The first four go on from one another in one folder, as a run on a cluster does that is stopped again and again; each
stands by itself too, beginning from whatever is there.
"""

from __future__ import annotations

import json
import signal

import pytest

from tests.faults.live_run import LiveRun, saved_steps, tracker
from verl_ext.allocation.state import load_state
from verl_ext.runs.checkpoints import whole_checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.real_stack]

BASE = ("recipe=cpu/sara", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.total_training_steps=90")
EVERY = ("trainer.save_freq=1",)
RARELY = ("trainer.save_freq=80",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture
def start(folder):
    runs = []

    def begin(*overrides, where=folder, run_folder=None):
        runs.append(LiveRun(where, *BASE, *overrides, run_folder=run_folder))
        return runs[-1]

    yield begin
    for run in runs:
        run.tidy()


def last_saved(run_folder) -> int:
    """Step that a resume takes; 0: from scratch."""
    return int(tracker(run_folder)) if (run_folder / "latest_checkpointed_iteration.txt").exists() else 0


@pytest.mark.row("vLLM's engine is killed")
def test_vllms_engine_is_killed(start, fault):
    run = start(*EVERY)
    begins = last_saved(run.run_folder)
    run.wait_for_step(begins + 1)
    run.process("VLLM::EngineCore").kill()
    status, seconds = run.end(within=180)
    assert status == 1 and "a rollout server died" in run.log
    left = run.nothing_left()
    result = run.result()
    result.check_ledger()
    assert int(tracker(run.run_folder)) >= begins + 1
    fault.saw(f"exit status {status} after {seconds:.0f} s, 'a rollout server died'; {left}", result.ledger[-1])


@pytest.mark.row("SIGTERM in a step")
def test_sigterm_in_a_step(start, fault):
    run = start(*RARELY)
    begins = last_saved(run.run_folder)
    run.wait_for_step(begins + 1)
    status, seconds = run.end(signal.SIGTERM)
    assert status == 143, run.log[-4000:]
    left = run.nothing_left()
    result = run.result()
    result.check_ledger()
    ended = len(result.ledger)
    assert result.metrics[-1]["step"] == ended >= begins + 2, "the step in which the signal came was brought to its end"
    assert ended < 80 and int(tracker(run.run_folder)) == ended and saved_steps(run.run_folder)[-1] == ended
    assert (
        load_state(run.run_folder / f"global_step_{ended}" / "allocation")["allocation"]["ledger"]["issued"]
        == (result.ledger[-1]["issued_total"])
    )
    assert json.loads((run.run_folder / "run.json").read_text())["ended_at_step"] is None
    fault.saw(
        f"ended {seconds:.0f} s later, after step {ended}, saved; exit status {status}; {left}", result.ledger[-1]
    )


@pytest.mark.row("SIGKILL of the process that was started")
def test_sigkill_of_the_process_that_was_started(start, fault):
    run = start(*RARELY)
    begins = last_saved(run.run_folder)
    run.wait_for_step(begins + 2)
    started = len(run.processes())
    run.end(signal.SIGKILL)
    left = run.nothing_left(within=60)
    assert last_saved(run.run_folder) == begins
    fault.saw(f"of {started} processes none left; resumed from step {begins}; {left}")


@pytest.mark.row("Ctrl-C in a step")
def test_ctrl_c_in_a_step(start, fault):
    """Goes on from the last checkpoint, although the run before it was killed two steps later."""
    run = start(*RARELY)
    begins = last_saved(run.run_folder)
    run.wait_for_step(begins + 1)
    result = run.result()
    result.check_ledger()
    assert len(result.ledger) in (begins + 1, begins + 2), "the lines of the killed run's lost steps are gone"
    status, seconds = run.end(signal.SIGINT, within=60)
    assert status not in (0, 143)
    left = run.nothing_left()
    fault.saw(f"ended {seconds:.0f} s later, exit status {status}; {left}", result.ledger[-1])


@pytest.mark.row("SIGTERM before the first step")
def test_sigterm_before_the_first_step(start, tmp_path, fault):
    run = start(*EVERY, where=tmp_path)
    run.wait_for(lambda: "VLLM" in " ".join(str(p.cmdline()) for p in run.processes()), 600, "vLLM starts")
    status, seconds = run.end(signal.SIGTERM, within=60)
    assert status == 143
    left = run.nothing_left()
    fault.saw(f"ended {seconds:.0f} s later, exit status {status}; {left}")


@pytest.mark.row("SIGKILL in a save, one checkpoint kept")
def test_sigkill_in_a_save(start, tmp_path, fault):
    """In the middle of the second save: the first one's weights are still there, and are resumed from."""
    keep_one = (*EVERY, "trainer.max_actor_ckpt_to_keep=1")
    run = start(*keep_one, where=tmp_path)
    second = run.run_folder / "global_step_2"
    run.wait_for(lambda: any((second / "actor").glob("*.pt")), 1800, "the second save")
    run.end(signal.SIGKILL)
    left = run.nothing_left(within=60)
    begins = last_saved(run.run_folder)
    assert begins in (1, 2) and begins in whole_checkpoints(run.run_folder)
    again = start(*keep_one, where=tmp_path)
    again.wait_for_step(begins + 2)
    assert again.end(signal.SIGTERM)[0] == 143
    again.nothing_left()
    result = again.result()
    result.check_ledger()
    weights = [path.parent.name for path in run.run_folder.glob("global_step_*/actor")]
    assert weights == [f"global_step_{len(result.ledger)}"], "one checkpoint is kept"
    fault.saw(f"{left}; resumed from step {begins} to {len(result.ledger)}", result.ledger[-1])


@pytest.mark.row("the disk is full at a save")
def test_the_disk_is_full_at_a_save(start, tmp_path, small_disk, fault):
    """Room for one checkpoint and a half; then room for more, and a resume."""
    import subprocess

    disk = small_disk(10 * 1024)
    run = start(*EVERY, where=tmp_path, run_folder=disk / "run")
    status, _ = run.end(within=900)
    assert status == 1 and "No space left on device" in run.log
    left = run.nothing_left()
    kept = last_saved(run.run_folder)
    assert kept >= 1 and load_state(run.run_folder / f"global_step_{kept}" / "allocation")
    assert f"A resume goes on from step {kept}, whose checkpoint is whole" in run.log
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    again = start(*EVERY, where=tmp_path, run_folder=disk / "run")
    again.wait_for_step(kept + 1)
    assert again.end(signal.SIGTERM)[0] == 143
    again.nothing_left()
    result = again.result()
    result.check_ledger()
    assert len(result.ledger) >= kept + 1
    ended = len(result.ledger)
    fault.saw(
        f"exit status {status}, 'No space left on device'; {left}; resumed from step {kept} to {ended}",
        result.ledger[-1],
    )
