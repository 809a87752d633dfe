"""Groups that go on over the update, on fake engines behind the real Ray actors and TransferQueue."""

from __future__ import annotations

import time

import pytest

from tests.integration.fake_stack import clear_all, fake_stack, left_in_transfer_queue
from tests.integration.real_run import real_run

pytestmark = pytest.mark.ray

MODES = ("cpu/sara_colocate_async", "cpu/sara_separate_async")
SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=300",
         "actor_rollout_ref.rollout.max_model_len=400", "actor_rollout_ref.rollout.agent.num_workers=2")  # fmt: skip
SLOW = {"mean_tokens": 40.0, "length_sigma": 1.0, "seconds_per_token": 0.003}


@pytest.fixture(scope="module")
def stack():
    with fake_stack(f"recipe={MODES[0]}", *SMALL) as running:
        yield running


@pytest.fixture
def manager(stack):
    """The engines, at rest from what a test before left in flight."""
    stack.manager.wake(0)
    yield stack.manager
    stack.manager.stream.clear()
    clear_all()


def collector_of(stack, mode, *overrides, **fake):
    return stack.collector(f"recipe={mode}", *SMALL, *overrides, **{**SLOW, **fake})


def run_step(collector, step, update_s=0.1):
    """A step, and its books: the ledger's, and TransferQueue's."""
    from verl_ext.testing.fake_run import fake_step

    meta, metrics = fake_step(collector, step, update_s)
    record = collector.ledger_record
    assert record["issued_total"] == sum(record["fates_total"].values()) + record["in_flight"] + record["waiting"]
    assert record["tokens_total"] == sum(record["fate_tokens_total"].values()) + record["waiting_tokens"]
    assert len(meta.keys) == len(set(meta.keys)) == 64 and metrics["allocation/groups"] == 8
    assert not set(meta.keys) & set(left_in_transfer_queue())
    return meta, metrics, record


@pytest.mark.parametrize("mode", MODES)
def test_a_run_keeps_its_books_and_leaves_nothing(stack, manager, mode):
    collector = collector_of(stack, mode)
    trained, spliced, flying, most = set(), 0, 0, collector.settings.async_.max_lag
    for step in range(1, 9):
        meta, metrics, record = run_step(collector, step)
        groups = {key.split("_")[0] for key in meta.keys}
        assert len(groups) == 8 and not groups & trained, "whole groups, each in one batch"
        trained |= groups
        spliced += metrics["allocation/async/spliced"]
        flying += record["in_flight"]
        assert metrics["allocation/async/lag_max"] <= most
        newest = max(tag["max_global_steps"] for tag in meta.tags)
        assert step - 1 - most <= min(tag["min_global_steps"] for tag in meta.tags) <= newest <= step - 1
        assert record["fates"]["aborted"] == 0
    assert spliced > 0 and flying > 0, "answers go on over the update"
    collector.end()
    assert left_in_transfer_queue() == [] and len(manager.stream) == 0


def test_prompts_are_admitted_while_the_trainer_updates(stack, manager):
    """Engines of their own: the next step's requests leave, and come back, before there are new weights."""
    import transfer_queue as tq

    collector = collector_of(stack, MODES[1], mean_tokens=3.0)
    meta, _ = collector.sample(1)
    until = time.monotonic() + 60
    while not collector._ahead.done():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert collector.allocation.ledger.issued > collector.ledger_record["issued_total"]
    assert collector.allocation.generating == 0, "no weights have been exchanged"
    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
    collector.weights_are_out(1)
    run_step(collector, 2, update_s=0.0)
    assert collector.allocation.generating == 2
    collector.end()


def test_a_slow_answer_is_awaited_before_it_is_too_old(stack, manager):
    """A prompt that takes much longer than a step is trained on, within max_lag; the others do not wait for it."""
    collector = collector_of(stack, MODES[0], "allocation/allocator=uniform", "allocation.async.max_lag=2",
                             mean_tokens=30.0, length_sigma=1.5)  # fmt: skip
    lags = []
    for step in range(1, 9):
        _, metrics, record = run_step(collector, step, update_s=0.0)
        lags.append(metrics["allocation/async/lag_max"])
        assert record["fates"]["stale"] == 0
    assert max(lags) == 2
    collector.end()


@pytest.mark.real_stack
@pytest.mark.parametrize("mode", MODES)
def test_it_trains_and_resumes_on_the_real_stack(tmp_path, mode):
    """Whole groups of the lag allowed, two optimizer steps a step, and nothing is left in TransferQueue."""
    small = (f"recipe={mode}", "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
             "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=3")  # fmt: skip
    real_run(tmp_path, *small, "trainer.total_training_steps=3")
    run = real_run(tmp_path, *small, "trainer.total_training_steps=6")
    run.check_ledger()
    most = {MODES[0]: 2, MODES[1]: 3}[mode]
    assert "rows left in TransferQueue: 0" in run.log
    for step in range(1, 7):
        found = run.step(step)
        assert found["allocation/optimizer_steps"] == 2 and found["allocation/rows"] == 128
        assert found["allocation/async/lag_max"] <= most
        assert sum(found[f"allocation/async/lag/{lag}"] for lag in range(most + 1)) == found["allocation/groups"] == 16
    assert run.ledger[-1]["in_flight"] + run.ledger[-1]["waiting"] > 0, "groups are in hand when the run ends"


LONG = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=160",
        "actor_rollout_ref.rollout.ignore_eos=True", "actor_rollout_ref.rollout.max_num_seqs=80",
        "allocation/allocator=uniform", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.resume_mode=disable", "trainer.total_training_steps=3")  # fmt: skip
REWARD = """
import zlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = zlib.crc32(solution_str.encode()) % 2 == 0
    return {"score": float(right), "acc": right}
"""


@pytest.mark.long
@pytest.mark.real_stack
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_that_spans_versions_has_the_log_probs_of_those_that_made_its_tokens(tmp_path, mode):
    """Every answer has 160 tokens, and not all have room in the engine: some go on with new weights, which are as the
    old ones were, since the learning rate is 0. So the trainer has to find the engine's probabilities."""
    (tmp_path / "reward.py").write_text(REWARD)
    run = real_run(
        tmp_path, f"recipe={mode}", *LONG, "actor_rollout_ref.actor.optim.lr=0",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
    )  # fmt: skip
    run.check_ledger()
    found = [run.step(step) for step in (1, 2, 3)]
    assert sum(step["allocation/async/spliced"] for step in found) > 0
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in found)
    assert max(step["training/off_policy/trajectory_spans/max"] for step in found) >= 2
    assert "rows left in TransferQueue: 0" in run.log
