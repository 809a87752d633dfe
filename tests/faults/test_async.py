"""Faults while groups go on over the update, on fake engines behind real rollout workers and TransferQueue."""

from __future__ import annotations

import time

import pytest

from tests.integration.fake_stack import clear_all, fake_stack, left_in_transfer_queue

pytestmark = [pytest.mark.faults, pytest.mark.ray]

MODES = ("cpu/sara_colocate_async", "cpu/sara_separate_async")
SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=300",
         "actor_rollout_ref.rollout.max_model_len=400", "actor_rollout_ref.rollout.agent.num_workers=2")  # fmt: skip
SLOW = {"mean_tokens": 40.0, "length_sigma": 1.0, "seconds_per_token": 0.003}


@pytest.fixture(scope="module")
def engines():
    with fake_stack(f"recipe={MODES[0]}", *SMALL) as running:
        yield running


@pytest.fixture
def manager(engines):
    """The engines awake, and with nothing in flight; afterwards too."""
    engines.manager.wake(0)
    yield engines.manager
    engines.manager.stream.clear()
    clear_all()


def collector_of(engines, mode, *overrides, **given):
    return engines.collector(f"recipe={mode}", *SMALL, *overrides, **{**SLOW, **given})


def run_step(collector, step):
    from verl_ext.testing.fake_run import fake_step

    meta, metrics = fake_step(collector, step, 0.05)
    record = collector.ledger_record
    assert record["issued_total"] == sum(record["fates_total"].values()) + record["in_flight"] + record["waiting"]
    return meta, metrics, record


@pytest.mark.row("one prompt never ends, and goes on over updates")
def test_one_prompt_that_never_ends(engines, manager, fault):
    prompt = collector_of(engines, MODES[0]).prompts.order(0)[0]
    collector = collector_of(
        engines, MODES[0], "allocation/allocator=uniform", "allocation.deadline_s=15", hang_prompt=f"'prompt {prompt}'"
    )
    waits, failed, over = [], 0, 0
    for step in range(1, 6):
        began = time.monotonic()
        meta, metrics, record = run_step(collector, step)
        waits.append(time.monotonic() - began)
        failed += record["fates"]["failed"]
        over += prompt in {group.prompt for group in collector.allocation.flight.groups if group.pending}
        assert len(meta.keys) == 64 and metrics["allocation/async/lag_max"] <= 2
    assert failed == 8 and record["fates_total"]["stale"] == 0
    assert over >= 1, "a step was made before the one that waited for it"
    collector.end()
    said = ", ".join(f"{seconds:.1f}" for seconds in waits)
    fault.saw(f"8 failed, every batch full, steps of {said} s with deadline_s=15 and max_lag=2", record)


@pytest.mark.row("a rollout worker is killed during an update")
@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_worker_is_killed_during_an_update(engines, mode, fault):
    import ray

    from verl_ext.allocation import RoundError
    from verl_ext.testing.fake_run import fake_step

    manager = engines.new_manager()
    collector = collector_of(engines, mode, manager=manager)
    fake_step(collector, 1, 0.05)
    ray.kill(manager.agent_loop_workers[0])
    began = time.monotonic()
    with pytest.raises(RoundError, match="a rollout worker died") as caught:
        for step in (2, 3, 4):
            meta, _ = collector.sample(step)
    ledger = collector.allocation.ledger
    ledger.check()
    record = ledger.step_record(9)
    assert record["in_flight"] == record["waiting"] == 0
    assert time.monotonic() - began < 60
    clear_all()
    fault.saw(f"RoundError after {time.monotonic() - began:.1f} s: {str(caught.value)[:60]}", record)


@pytest.mark.row("resumed twice with groups in flight")
@pytest.mark.parametrize("mode", MODES)
def test_resumed_twice(engines, manager, mode, tmp_path, fault):
    one = collector_of(engines, mode)
    for step in (1, 2, 3):
        _, _, record = run_step(one, step)
    one.save(str(tmp_path / "allocation"))
    saved = one._state()["allocation"]["flight"]
    one.end()
    assert left_in_transfer_queue() == []
    seen = []
    for _ in range(2):
        two = collector_of(engines, mode)
        two.load(str(tmp_path / "allocation"))
        in_hand = {group.uid: group.missing() for group in two.allocation.flight.groups}
        assert sorted(in_hand) == sorted(saved["uid"]) and any(in_hand.values())
        rows = sum(map(len, two.backend._rows.values()))
        assert len(left_in_transfer_queue()) == rows <= two.allocation.ledger.waiting
        asked, submit = {}, two.backend.submit

        def note(requests, asked=asked, submit=submit):
            for request in requests:
                asked.setdefault(request.group.uid, []).append(list(request.sessions))
            submit(requests)

        two.backend.submit = note
        for step in (4, 5):
            run_step(two, step)
        assert all(asked[uid][0] == sessions for uid, sessions in in_hand.items() if sessions)
        for numbers in asked.values():
            sessions = [session for request in numbers for session in request]
            assert len(sessions) == len(set(sessions)), "no session is asked for twice"
        two.end()
        assert left_in_transfer_queue() == [] and len(manager.stream) == 0
        seen.append(sorted(in_hand.items()))
    assert seen[0] == seen[1]
    flying = sum(map(len, in_hand.values()))
    fault.saw(f"{flying} sessions of {len(in_hand)} groups in hand asked for again, {rows} rows put back", record)


@pytest.mark.row("a run ends with groups in flight")
@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_with_groups_in_flight(engines, manager, mode, fault):
    """At its last step, or when asked to: where the next step is being collected, that breaks off."""
    collector = collector_of(engines, mode, seconds_per_token=0.02)
    for step in (1, 2):
        _, _, record = run_step(collector, step)
    assert record["in_flight"] > 0
    began = time.monotonic()
    collector.end()
    seconds = time.monotonic() - began
    assert seconds < 20 and left_in_transfer_queue() == [] and len(manager.stream) == 0
    fault.saw(f"{record['in_flight']} in flight, ended in {seconds:.1f} s, nothing left", record)
