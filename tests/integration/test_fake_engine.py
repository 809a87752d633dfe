"""Rounds on fake engines through the real Ray actors and TransferQueue: scale, faults, what TransferQueue holds."""

from __future__ import annotations

import json
import threading

import pytest

from verl_ext.testing.fake_run import fake_config, fake_run

pytestmark = pytest.mark.ray




def left_in_transfer_queue() -> list[str]:
    import transfer_queue as tq

    return list((tq.kv_list("train") or {}).get("train", {}))


def plain(value) -> str:
    """A row's value as text, whatever the order of a dictionary's keys."""
    return json.dumps(value, sort_keys=True, default=str)


def clear(meta) -> None:
    import transfer_queue as tq

    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)


@pytest.fixture(scope="module")
def stack():
    """One Ray cluster for all tests of this file; a collector with its own rules a test."""
    config = fake_config()
    with fake_run(config) as collector:
        yield config, collector


def collector_with(stack, *overrides, **fake):
    """A fresh collector on the running cluster and its workers, which get the given fake model."""
    from verl_ext.checks.allocation_settings import check_config
    from verl_ext.testing.fake_engine import FakeEngineSettings
    from verl_ext.training.collector import Collector

    _, running = stack
    settings, budget = check_config(fake_config(overrides))
    collector = Collector(settings, budget, running.prompts)
    collector.connect(running.backend.manager)
    collector.backend.manager.set_model(FakeEngineSettings(**fake))
    return collector


def test_sara_over_several_rounds_leaves_only_the_trained_rows(stack):
    collector = collector_with(stack)
    seen_prompts: set[str] = set()
    for step in range(1, 4):
        meta, metrics = collector.sample(step)
        assert len(meta.keys) == len(set(meta.keys)) == 256
        assert sorted(left_in_transfer_queue()) == sorted(meta.keys)
        sessions: dict[str, set[int]] = {}
        for key in meta.keys:
            uid, session, index = key.split("_")
            assert index == "0"
            sessions.setdefault(uid, set()).add(int(session))
        assert all(numbers == set(range(8)) for numbers in sessions.values())
        assert metrics["allocation/rounds"] >= 2
        record = collector.ledger_record
        assert record["issued"] == sum(record["fates"].values()) and record["in_flight"] == record["waiting"] == 0
        assert record["tokens"] == sum(record["fate_tokens"].values())
        assert not seen_prompts & set(sessions)
        seen_prompts |= set(sessions)
        clear(meta)
    assert left_in_transfer_queue() == []


def test_rows_carry_their_own_rollout(stack):
    """Row identity through the rounds: score, lengths and uid of each row agree with key and tag."""
    import transfer_queue as tq

    collector = collector_with(stack, mean_tokens=2.0)
    meta, _ = collector.sample(1)
    wanted = ["uid", "session_id", "rm_scores", "responses"]
    data = tq.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=wanted)
    uids, sessions = list(data["uid"]), list(data["session_id"])
    for key, tag, uid, session, response in zip(meta.keys, meta.tags, uids, sessions, data["responses"], strict=True):
        assert key == f"{uid}_{int(session)}_0"
        assert tag["response_len"] == len(response)
    scores = [float(row.sum()) for row in data["rm_scores"]]
    by_group: dict[str, list[float]] = {}
    for uid, score in zip(uids, scores, strict=True):
        by_group.setdefault(uid, []).append(score)
    assert all(0 < sum(group) < len(group) for group in by_group.values()), "SARA commits mixed groups only"
    clear(meta)


def test_failing_and_unscored_sessions_are_counted_and_never_trained(stack):
    collector = collector_with(stack, fail_share=0.1, unscored_share=0.1)
    meta, metrics = collector.sample(1)
    record = collector.ledger_record
    assert record["fates"]["failed"] > 0 and record["fates"]["unscored"] > 0
    assert record["issued"] == sum(record["fates"].values())
    assert record["fates"]["trained"] == len(meta.keys) == len(left_in_transfer_queue())
    clear(meta)


def test_a_session_that_never_ends_is_cancelled_at_the_deadline(stack):
    collector = collector_with(stack, "allocation/allocator=uniform", "allocation.deadline_s=2", hang_share=0.05)
    meta, metrics = collector.sample(1)
    record = collector.ledger_record
    assert 0 < record["fates"]["failed"] < 64
    assert record["fates"]["trained"] + record["fates"]["failed"] == 256
    clear(meta)


@pytest.mark.parametrize("allocator", ["sara", "dynamic_sampling", "uniform"])
@pytest.mark.parametrize("logit_mean", [40.0, -40.0], ids=["all_solved", "all_hopeless"])
def test_dead_data_ends(stack, allocator, logit_mean):
    from verl_ext.training.collector import NoUpdate

    collector = collector_with(stack, f"allocation/allocator={allocator}", logit_mean=logit_mean, logit_std=0.0)
    if allocator == "uniform":
        meta, metrics = collector.sample(1)
        assert metrics["allocation/effective_share"] == 0.0 and len(meta.keys) == 256
        clear(meta)
    else:
        with pytest.raises(NoUpdate) as caught:
            collector.sample(1)
        assert caught.value.metrics["allocation/short_by"] == 32
        assert caught.value.metrics["allocation/rounds"] <= 8
    assert collector.ledger_record["issued"] <= 6 * 32 * 8
    assert left_in_transfer_queue() == []


def test_unscorable_data_ends_and_says_so(stack):
    from verl_ext.training.collector import NoUpdate

    collector = collector_with(stack, unscored_share=1.0)
    with pytest.raises(NoUpdate):
        collector.sample(1)
    record = collector.ledger_record
    assert record["fates"]["unscored"] == record["issued"] > 0
    assert left_in_transfer_queue() == []


def test_pilots_ride_with_commits_wait_across_the_update_and_survive_a_resume(stack, tmp_path):
    """Pilot-Commit with binding: the rollouts that wait are saved whole and come back row by row."""
    import transfer_queue as tq

    # Waves of 96, of which enough for a batch qualify.
    recipe = ("recipe=cpu/pilot_commit", "allocation.allocator.gen_multiple=6", "allocation.allocator.wave=full")
    straight = collector_with(stack, *recipe)
    requests: list[list[tuple[str, int]]] = []
    generate_round = straight.backend.manager.generate_round

    def logged(groups, *args):
        requests.append([(group.uid, group.n) for group in groups])
        return generate_round(groups, *args)

    straight.backend.manager.generate_round = logged
    try:
        meta, metrics = straight.sample(1)
        clear(meta)
        rounds_of_first = len(requests)
        meta, metrics = straight.sample(2)
    finally:
        straight.backend.manager.generate_round = generate_round
    second = requests[rounds_of_first]
    commits = [uid for uid, n in second if n == 12]
    pilots = [uid for uid, n in second if n == 4]
    assert len(commits) == 16 and len(pilots) == 96, "one call carries this step's commits and the next step's pilots"
    assert all(uid.startswith("s1g") for uid in commits) and all(uid.startswith("s2g") for uid in pilots)
    assert len(requests) == rounds_of_first + 1
    trained = {key.split("_")[0] for key in meta.keys}
    assert trained == set(commits)
    assert metrics["allocation/lag_mean"] == 1.0
    # Pilots carry the version they were generated with, the commits a later one.
    versions = {tag["min_global_steps"] for tag in meta.tags}
    assert versions == {0, 1}
    waiting = sorted(set(left_in_transfer_queue()) - set(meta.keys))
    assert straight.ledger_record["waiting"] == len(waiting) > 0

    folder = str(tmp_path / "global_step_2" / "allocation")
    straight.save(folder)
    clear(meta)
    before = tq.kv_batch_get(keys=waiting, partition_id="train")
    before_rows = {name: [plain(value) for value in before[name]] for name in before.keys()}
    clear_record = straight.sample(3)[0]
    expected = straight.ledger_record, sorted(clear_record.keys)
    tq.kv_clear(keys=left_in_transfer_queue(), partition_id="train")

    resumed = collector_with(stack, *recipe)
    resumed.load(folder)
    assert sorted(left_in_transfer_queue()) == waiting
    after = tq.kv_batch_get(keys=waiting, partition_id="train")
    assert {name: [plain(value) for value in after[name]] for name in after.keys()} == before_rows
    meta, _ = resumed.sample(3)
    assert (resumed.ledger_record, sorted(meta.keys)) == expected
    tq.kv_clear(keys=left_in_transfer_queue(), partition_id="train")


def test_outcomes_are_recorded_for_replay(stack, tmp_path):
    from verl_ext.runs.outcome_records import read_record

    collector = collector_with(stack, f"allocation.record={tmp_path / 'record'}")
    meta, metrics = collector.sample(1)
    clear(meta)
    table = read_record(tmp_path / "record")
    assert len(table) == metrics["allocation/step_rollouts"]
    kept = [answer.record(1) for answer in collector.answers]
    assert [one["verdict"] for one in kept] == ["right", "right", "wrong", "wrong"]
    assert len({one["prompt"] for one in kept[:2]}) == len({one["prompt"] for one in kept[2:]}) == 2
    assert all(one["answer"] and one["truth"] for one in kept)


def test_a_worker_that_dies_is_a_clear_error_and_the_ledger_adds_up(stack):
    import ray

    from verl_ext.rollout.worker import RoundError

    collector = collector_with(stack, seconds_per_token=2.0)
    worker = collector.backend.manager.agent_loop_workers[0]
    threading.Timer(1.0, lambda: ray.kill(worker)).start()
    with pytest.raises(RoundError, match="worker died"):
        collector.sample(1)
    collector.allocation.ledger.check()
    record = collector.allocation.ledger.step_record(1)
    assert record["issued"] == record["fates"]["failed"] > 0
