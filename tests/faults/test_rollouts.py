"""Rollouts that fail, hang or die, on fake engines behind real rollout workers and TransferQueue."""

from __future__ import annotations

import threading
import time

import pytest

from tests.integration.fake_stack import clear, clear_all, left_in_transfer_queue

pytestmark = [pytest.mark.faults, pytest.mark.ray]

GRPO = ("recipe=cpu/grpo", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
SARA = ("recipe=cpu/sara", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


@pytest.fixture(scope="module")
def engines(stack):
    """Rollout workers whose engines say what is right."""
    return stack.new_manager()


@pytest.fixture(autouse=True)
def tidy():
    yield
    clear_all()


def stops(collector, message, kind=None) -> tuple[str, float]:
    """The step stops with this error and the ledger adds up; returns the message and the seconds."""
    from verl_ext.allocation import RoundError

    began = time.monotonic()
    with pytest.raises(kind or RoundError, match=message) as caught:
        collector.sample(1)
    collector.allocation.ledger.check()
    record = collector.allocation.ledger.step_record(1)
    assert record["issued"] == sum(record["fates"].values()) > 0 and record["in_flight"] == record["waiting"] == 0
    return str(caught.value), time.monotonic() - began


@pytest.mark.row("a session raises")
def test_a_session_that_raises(stack, engines, fault):
    collector = stack.collector(*SARA, manager=engines, fail_share=0.1)
    meta, _ = collector.sample(1)
    record = collector.ledger_record
    assert record["issued"] == sum(record["fates"].values()) and record["fates"]["failed"] > 0
    assert record["fates"]["trained"] == len(meta.keys) == len(left_in_transfer_queue())
    clear(meta)
    fault.saw(
        f"{record['fates']['failed']} of {record['issued']} failed, {record['fates']['trained']} trained on", record
    )


@pytest.mark.row("a tenth of the prompts is always refused")
def test_a_tenth_of_the_prompts_is_always_refused(stack, engines, fault):
    """As many steps as offer the pool of 64 prompts more than three times."""
    collector = stack.collector(*SARA, manager=engines, prompts=64, refuse_share=0.1)
    issued = failed = trained = 0
    for step in range(1, 41):
        meta, _ = collector.sample(step)
        clear(meta)
        record = collector.ledger_record
        assert record["issued"] == sum(record["fates"].values())
        issued, failed = issued + record["issued"], failed + record["fates"]["failed"]
        trained += record["fates"]["trained"]
    collector.allocation.ledger.check()
    out = collector.allocation.failures.out
    assert out >= 3 and trained == 40 * 64 and 0 < failed < issued / 20
    fault.saw(f"40 whole steps; {failed} of {issued} failed; {out} of 64 prompts left the pool after 3 visits", record)


@pytest.mark.row("one prompt never ends")
def test_one_prompt_that_never_ends(stack, engines, fault):
    collector = stack.collector(
        *GRPO, "allocation.deadline_s=3", manager=engines, prompts=8, hang_prompt="'prompt 5'"
    )  # fmt: skip
    began = time.monotonic()
    meta, _ = collector.sample(1)
    seconds = time.monotonic() - began
    record = collector.ledger_record
    assert record["fates"]["failed"] == 8 and record["fates"]["trained"] == 56 == len(meta.keys)
    assert 3 <= seconds < 60
    clear(meta)
    fault.saw(f"8 of 64 failed, 56 trained on, after {seconds:.1f} s with deadline_s=3", record)


@pytest.mark.row("no session comes back")
def test_no_session_comes_back(stack, engines, fault):
    collector = stack.collector(*SARA, manager=engines, fail_share=1.0)
    message, seconds = stops(collector, "none of the rollouts of 16 prompts in a row came back; the last .*fails")
    fault.saw(f"RoundError after {seconds:.1f} s: {message[:100]}", collector.allocation.ledger.step_record(1))


@pytest.mark.row("the engine never answers")
def test_the_engine_never_answers(stack, engines, fault):
    collector = stack.collector(*SARA, "allocation.deadline_s=3", manager=engines, hang_share=1.0)
    message, seconds = stops(collector, "none of the rollouts of 16 prompts.* session .* did not end within 3 s")
    assert seconds < 60
    record = collector.allocation.ledger.step_record(1)
    fault.saw(f"RoundError after {seconds:.1f} s with deadline_s=3: {message[:100]}", record)


@pytest.mark.row("a rollout worker is killed in a round")
def test_a_rollout_worker_is_killed_in_a_round(stack, fault):
    import ray

    manager = stack.new_manager()
    collector = stack.collector(*SARA, manager=manager, seconds_per_token=2.0)
    killed = threading.Timer(1.0, lambda: ray.kill(manager.agent_loop_workers[0]))
    killed.start()
    message, seconds = stops(collector, "a rollout worker died")
    assert seconds < 60
    fault.saw(f"RoundError after {seconds:.1f} s: {message[:60]}", collector.allocation.ledger.step_record(1))


@pytest.mark.row("TransferQueue is full")
def test_transfer_queue_is_full(stack, engines, fault):
    """Rows of another origin take the room; when they are gone, the next step is whole."""
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    keys = [f"other_{i}_0" for i in range(2980)]
    fields = TensorDict({"responses": torch.zeros(len(keys), 1, dtype=torch.int64)}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, fields=fields, tags=[{} for _ in keys], partition_id="other")
    try:
        message, seconds = stops(
            stack.collector(*SARA, manager=engines), "TransferQueue.*it is full: raise .*total_storage_size"
        )
    finally:
        tq.kv_clear(keys=keys, partition_id="other")
        clear_all()
    assert seconds < 60
    collector = stack.collector(*SARA, manager=engines)
    meta, _ = collector.sample(1)
    assert len(meta.keys) == 64
    clear(meta)
    fault.saw(f"RoundError after {seconds:.1f} s: ...{message[-90:]}", collector.allocation.ledger.step_record(1))


@pytest.mark.row("the disk is full at a save of the rules' state")
def test_the_disk_is_full_at_a_save_of_the_rules_state(stack, engines, fault, small_disk):
    """Waiting trajectories and all, on a file system of its own that has no room for the second state."""
    import errno

    recipe = ("recipe=cpu/pilot_commit", *SARA[1:])
    collector = stack.collector(*recipe, manager=engines, prompts=64)
    clear(collector.sample(1)[0])
    disk = small_disk(512)
    folder = str(disk / "allocation")
    collector.save(folder)
    clear(collector.sample(2)[0])
    wanted = collector.ledger_record["issued_total"] - collector.ledger_record["issued"]
    filler = disk / "filler"
    with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError) as caught:
        collector.save(folder)
    assert caught.value.errno == errno.ENOSPC
    filler.unlink()
    clear_all()
    again = stack.collector(*recipe, manager=engines, prompts=64)
    again.load(folder)
    ledger = again.allocation.ledger
    assert ledger.issued == wanted and ledger.waiting == len(left_in_transfer_queue()) > 0
    clear(again.sample(2)[0])
    assert again.ledger_record == collector.ledger_record, "the step that was lost is made again exactly"
    fault.saw(
        f"{caught.value}; the state before loads, and its next step is the one that was lost", again.ledger_record
    )
