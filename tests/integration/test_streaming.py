"""Streaming on fake engines, through the real Ray actors and TransferQueue; and once on the real stack."""

from __future__ import annotations

import threading
import time

import pytest

from tests.integration.real_run import real_run
from verl_ext.testing.fake_run import fake_config, fake_run

STREAMING = "allocation.rounds=streaming"
SHARED = [STREAMING, "data.max_response_length=200", "actor_rollout_ref.rollout.max_model_len=256"]


def left_in_transfer_queue() -> list[str]:
    import transfer_queue as tq

    return list((tq.kv_list("train") or {}).get("train", {}))


def clear(meta) -> None:
    import transfer_queue as tq

    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)


@pytest.fixture(scope="module")
def stack():
    """One Ray cluster, with two workers, for all tests of this file."""
    with fake_run(fake_config([*SHARED, "actor_rollout_ref.rollout.agent.num_workers=2"])) as collector:
        yield collector


def collector_with(running, *overrides, **fake):
    """A fresh streaming collector on the running cluster and its workers, which get the given fake model."""
    from verl_ext.checks.allocation_settings import check_config
    from verl_ext.testing.fake_engine import FakeEngineSettings
    from verl_ext.training.collector import Collector

    settings, budget = check_config(fake_config([*SHARED, *overrides]))
    collector = Collector(settings, budget, running.prompts)
    collector.connect(running.backend.manager)
    collector.backend.manager.set_model(FakeEngineSettings(**fake))
    return collector


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """What a test that failed left in TransferQueue is not the next one's."""
    yield
    if "stack" in request.fixturenames and (keys := left_in_transfer_queue()):
        import transfer_queue as tq

        tq.kv_clear(keys=keys, partition_id="train")


def offered_first(running) -> str:
    """Text of the prompt that a fresh collector offers first."""
    return f"'prompt {running.prompts.order(0)[0]}'"


def check_record(record) -> None:
    assert record["in_flight"] == 0
    assert record["issued_total"] == sum(record["fates_total"].values()) + record["waiting"]
    assert record["tokens_total"] == sum(record["fate_tokens_total"].values()) + record["waiting_tokens"]


@pytest.mark.ray
def test_sara_fills_the_batch_and_leaves_only_the_trained_rows(stack):
    collector = collector_with(stack, mean_tokens=20.0, seconds_per_token=0.002, hang_prompt=offered_first(stack))
    for step in range(1, 3):
        meta, metrics = collector.sample(step)
        assert len(meta.keys) == len(set(meta.keys)) == 256
        assert sorted(left_in_transfer_queue()) == sorted(meta.keys)
        sessions: dict[str, set[int]] = {}
        for key in meta.keys:
            uid, session, _ = key.split("_")
            sessions.setdefault(uid, set()).add(int(session))
        assert all(numbers == set(range(8)) for numbers in sessions.values())
        assert metrics["allocation/rounds"] == 2, "a probe and a top-up of a group"
        assert metrics["allocation/round_gap_s"] > 0
        record = collector.ledger_record
        check_record(record)
        assert record["issued"] <= 6 * 32 * 8 and metrics["allocation/batch_effective_share"] == 1.0
        aborted = record["fates"]["aborted"], record["fate_tokens"]["aborted"]
        assert aborted[0] % 4 == 0, "whole probes"
        if step == 1:
            assert aborted[0] >= 4 and aborted[1] > 0, "a prompt that hangs is undecided to the end"
        clear(meta)
    assert left_in_transfer_queue() == []


@pytest.mark.ray
def test_rows_carry_their_own_rollout(stack):
    import transfer_queue as tq

    collector = collector_with(stack, mean_tokens=3.0)
    meta, _ = collector.sample(1)
    data = tq.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=["uid", "session_id", "rm_scores"])
    scores: dict[str, list[float]] = {}
    for key, uid, session, row in zip(meta.keys, data["uid"], data["session_id"], data["rm_scores"], strict=True):
        assert key == f"{uid}_{int(session)}_0"
        scores.setdefault(uid, []).append(float(row.sum()))
    assert all(0 < sum(group) < len(group) for group in scores.values()), "SARA commits mixed groups only"
    clear(meta)


@pytest.mark.ray
def test_uniform_is_one_request_a_prompt(stack):
    collector = collector_with(stack, "allocation/allocator=uniform", mean_tokens=3.0)
    meta, metrics = collector.sample(1)
    assert len(meta.keys) == 256 and metrics["allocation/rounds"] == 1 and metrics["allocation/fate/aborted"] == 0
    clear(meta)


@pytest.mark.ray
def test_faults_are_counted_and_never_trained(stack):
    collector = collector_with(
        stack, "allocation.deadline_s=1.5", fail_share=0.1, unscored_share=0.1, hang_share=0.01, mean_tokens=3.0
    )
    meta, _ = collector.sample(1)
    record = collector.ledger_record
    check_record(record)
    assert record["fates"]["failed"] > 0 and record["fates"]["unscored"] > 0
    assert record["fates"]["trained"] == len(meta.keys) == len(left_in_transfer_queue())
    clear(meta)


@pytest.mark.ray
@pytest.mark.parametrize("fake", [
    {"logit_mean": 40.0, "logit_std": 0.0}, {"logit_mean": -40.0, "logit_std": 0.0}, {"unscored_share": 1.0}],
    ids=["all_solved", "all_hopeless", "unscorable"])  # fmt: skip
def test_dead_data_ends(stack, fake):
    from verl_ext.training.collector import NoUpdate

    collector = collector_with(stack, "allocation.stop.groups=8", **fake)
    with pytest.raises(NoUpdate) as caught:
        collector.sample(1)
    assert caught.value.metrics["allocation/short_by"] == 8
    check_record(collector.ledger_record)
    assert left_in_transfer_queue() == []


@pytest.mark.ray
def test_no_session_at_all_coming_back_ends_the_step(stack):
    from verl_ext.allocation import RoundError

    collector = collector_with(stack, fail_share=1.0)
    with pytest.raises(RoundError, match="none of the rollouts of 16 prompts in a row.*a session that fails"):
        collector.sample(1)
    collector.allocation.ledger.check()


@pytest.mark.ray
def test_an_answer_that_never_ends_does_not_hold_up_a_batch_that_is_full(stack):
    """A prompt that hangs is undecided when the batch has its groups: it is aborted, long before the deadline."""
    collector = collector_with(stack, "allocation.stop.groups=8", hang_prompt=offered_first(stack))
    start = time.monotonic()
    meta, _ = collector.sample(1)
    assert time.monotonic() - start < 0.1 * collector.settings.deadline_s
    assert len(meta.keys) == 64 and not any(key.startswith("s1g0_") for key in meta.keys)
    check_record(collector.ledger_record)
    assert collector.ledger_record["fates"]["aborted"] >= 4
    clear(meta)


@pytest.mark.ray
def test_a_step_that_broke_off_leaves_nothing_running(stack):
    collector = collector_with(stack, mean_tokens=20.0, seconds_per_token=0.005)
    real, calls = collector.backend.next, []

    def fails():
        calls.append(1)
        if len(calls) == 20:
            raise OSError("gone")
        return real()

    collector.backend.next = fails
    with pytest.raises(OSError, match="gone"):
        collector.sample(1)
    assert len(collector.backend.manager.stream) == 0
    collector.allocation.ledger.check()
    collector.allocation.ledger.step_record(1)
    stored = set(left_in_transfer_queue())
    meta, _ = collector.sample(2)
    assert len(meta.keys) == 256 and not {key for key in meta.keys if key.startswith("s1g")}
    assert set(left_in_transfer_queue()) - set(meta.keys) == stored, "nothing of the broken step is stored later"


@pytest.mark.ray
def test_outcomes_are_recorded_without_the_aborted_ones(stack, tmp_path):
    from verl_ext.runs.outcome_records import read_record

    record = tmp_path / "record"
    collector = collector_with(stack, f"allocation.record={record}", hang_prompt=offered_first(stack))
    meta, metrics = collector.sample(1)
    clear(meta)
    assert metrics["allocation/fate/aborted"] > 0
    table = read_record(record).to_pylist()
    assert len(table) == metrics["allocation/step_rollouts"] - metrics["allocation/fate/aborted"]
    assert all((row["round"] == 1) == (row["session"] < 4) for row in table)


@pytest.mark.ray
def test_a_worker_that_dies_is_a_clear_error_and_the_ledger_adds_up(stack):
    """The last test: the cluster has a worker less after it."""
    import ray

    from verl_ext.allocation import RoundError

    collector = collector_with(stack, mean_tokens=100.0, seconds_per_token=0.02)
    threading.Timer(1.0, lambda: ray.kill(collector.backend.manager.agent_loop_workers[0])).start()
    with pytest.raises(RoundError, match="worker died with groups in flight"):
        collector.sample(1)
    collector.allocation.ledger.check()
    record = collector.allocation.ledger.step_record(1)
    assert record["issued"] == sum(record["fates"].values()) and record["fates"]["failed"] > 0


@pytest.mark.real_stack
@pytest.mark.long
def test_streaming_trains_and_vllm_aborts_what_is_undecided(tmp_path):
    """Answers of 40 tokens, right by the toss of a coin, on an engine of 32 slots: prompts queue and are cut off."""
    reward = tmp_path / "coin.py"
    reward.write_text(
        "import zlib\n\n\ndef compute_score(data_source, solution_str, *args, **kwargs):\n"
        "    right = zlib.crc32(solution_str.encode()) % 2 == 0\n    return {'score': float(right), 'acc': right}\n"
    )
    run = real_run(
        tmp_path, "recipe=cpu/sara", STREAMING, "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.resume_mode=disable", "trainer.total_training_steps=2", "allocation.allocator.margin=1",
        "data.max_response_length=40", "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.max_num_seqs=32", f"reward.custom_reward_function.path={reward}",
    )  # fmt: skip
    run.check_ledger()
    for step in (1, 2):
        metrics = run.step(step)
        assert metrics["allocation/groups"] == 32 and metrics["allocation/rows"] == 256
        assert metrics["allocation/batch_effective_share"] == 1.0 and metrics["allocation/rounds"] == 2
        assert metrics["actor/grad_norm"] > 0
        aborted, tokens = metrics["allocation/fate/aborted"], metrics["allocation/fate_tokens/aborted"]
        assert aborted > 0 and aborted % 4 == 0, "whole probes"
        assert 0 < tokens < 40 * aborted, "what an answer had when it was cut off, and none of those that queued"
    assert "did not end after the engine was told" not in run.log
