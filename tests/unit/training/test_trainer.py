"""verl's own training loop with our trainer in it: counters, saving, logging, resuming, rows and mini-batches.

The policy, its engine and TransferQueue are stood in for; the loop, the steps, checkpoints and advantages are the code
that a run goes through.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np
import pytest

from tests.unit.training.conftest import PROMPTS, train

# One group of which fewer rows are left than there are mini-batches.
NOT_ENOUGH = ("allocation.stop.groups=1", "allocation/downsampler=random", "allocation.downsampler.keep=2",
              "actor_rollout_ref.actor.ppo_mini_batch_size=1")  # fmt: skip


def steps_of(trainer):
    return [step for step, _ in trainer.logged]


def test_rounds_are_not_steps(made):
    """Several rounds of generation are one step, one update and one line of the log; so is a step of no update."""
    trainer = train(made("trainer.total_training_steps=3", "allocation.allocator.chunk=1"))
    assert len(trainer.manager.requests) >= 3 * 3
    assert steps_of(trainer) == [1, 2, 3] and len(trainer.actor_rollout_wg.updates) == 3
    for _, metrics in trainer.logged:
        assert metrics["allocation/rounds"] >= 3 and metrics["allocation/optimizer_steps"] == 2
    # What the learning-rate schedule is laid out over, and how often it moves.
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 3
    assert all(update["num_mini_batch"] == 2 and update["epochs"] == 1 for update in trainer.actor_rollout_wg.updates)


def test_steps_of_no_update_are_logged_and_counted_and_move_nothing(made, queue, caplog):
    trainer = train(made("trainer.total_training_steps=3", *NOT_ENOUGH))
    assert steps_of(trainer) == [1, 2, 3] and trainer.actor_rollout_wg.updates == []
    assert [metrics["allocation/skipped_updates"] for _, metrics in trainer.logged] == [1, 2, 3]
    assert not queue.rows["train"]
    assert caplog.text.count("makes no update") == 3


@pytest.mark.parametrize(("overrides", "last", "saved", "horizon"), [
    (("trainer.total_training_steps=5", "trainer.save_freq=2"), 5, [2, 4, 5], 5),
    (("trainer.total_training_steps=2", "trainer.save_freq=100"), 2, [2], 2),
    (("trainer.total_training_steps=50", "trainer.total_epochs=1", "trainer.save_freq=2"), 3, [2, 3], 3),
    (("trainer.total_training_steps=null", "trainer.total_epochs=2", "trainer.save_freq=4"), 6, [4, 6], 6),
    (("trainer.total_training_steps=5", "trainer.save_freq=4", "allocation.stop.run_rollouts=129",
      "allocation/allocator=uniform"), 3, [3], 5),
])  # fmt: skip
def test_the_last_step_is_saved_validated_and_noted(made, tmp_path, overrides, last, saved, horizon):
    trainer = train(made(*overrides, "trainer.test_freq=100"))
    assert steps_of(trainer)[-1] == last and trainer.saved == saved
    assert trainer.validated == [last] and "val-core/sums/acc/mean@8" in trainer.logged[-1][1]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert f'"ended_at_step": {last}' in (tmp_path / "run" / "run.json").read_text()
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == horizon


def test_the_run_ends_when_every_prompt_is_retired(made, caplog):
    trainer = made("trainer.total_training_steps=6", "trainer.save_freq=5", "trainer.test_freq=5")
    end_step = trainer.on_step_begin

    def retire_all():
        if trainer.global_steps == 2:
            for row in range(PROMPTS):
                trainer.collector.allocation.pool.retire(row)
        end_step()

    trainer.on_step_begin = retire_all
    train(trainer)
    assert steps_of(trainer) == [1, 2] == [1, *trainer.saved] == [1, *trainer.validated]
    assert "every prompt" in caplog.text


@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_goes_on_with_the_next_step_and_the_same_prompts(made, tmp_path, at):
    """Also where step 3 ends verl's epoch: no step is left out, made twice or logged twice."""

    def prompts(trainer):
        return [[key.split("_")[0] for key in update["keys"]] for update in trainer.actor_rollout_wg.updates]

    common = ("allocation/allocator=uniform", "trainer.total_epochs=2", "trainer.save_freq=1")
    whole = train(made("trainer.resume_mode=disable", *common, f"trainer.default_local_dir={tmp_path / 'whole'}"))
    first = train(made(*common, f"trainer.total_training_steps={at}"))
    second = made(*common)
    assert second.actor_rollout_wg.loaded == [str(tmp_path / "run" / f"global_step_{at}" / "actor")]
    train(second)
    assert steps_of(first) + steps_of(second) == [1, 2, 3, 4, 5, 6] == steps_of(whole)
    rows = [sorted(update) for update in prompts(first) + prompts(second)]
    assert rows == [sorted(update) for update in prompts(whole)] and all(len(update) == 64 for update in rows)
    totals = [metrics["allocation/rollouts"] for _, metrics in first.logged + second.logged]
    assert totals == [64 * step for step in range(1, 7)]
    assert [m["allocation/pool/epoch"] for _, m in whole.logged] == [0, 0, 0, 1, 1, 1]


def test_steps_never_fall_also_with_a_validation_before_and_after_a_resume(made):
    """A service that takes rising steps only loses nothing but the validation that was made before."""
    common = ("trainer.val_before_train=True", "trainer.test_freq=2", "trainer.save_freq=2")
    first = train(made(*common, "trainer.total_training_steps=2"))
    second = train(made(*common, "trainer.total_training_steps=4"))
    assert steps_of(first) == [0, 1, 2] and steps_of(second) == [2, 3, 4]
    assert set(second.logged[0][1]) == {"val-core/sums/acc/mean@8"}
    assert "val-core/sums/acc/mean@8" in first.logged[2][1] and "allocation/rollouts" in first.logged[2][1]


@pytest.mark.parametrize("mode", ["disable", "auto"])
@pytest.mark.parametrize("before_train", ["True", "False"])
def test_a_validation_of_a_runs_folder_leaves_the_run_as_it_was(made, tmp_path, mode, before_train):
    """Also where verl would train on, since it was not told to validate first."""
    train(made("trainer.total_training_steps=2", "trainer.save_freq=1"))
    names = ("config.yaml", "run.json", "ledger.jsonl", "latest_checkpointed_iteration.txt")
    before = [(tmp_path / "run" / name).read_bytes() for name in names]
    only = ("trainer.val_only=True", f"trainer.val_before_train={before_train}", f"trainer.resume_mode={mode}")
    trainer = train(made("trainer.total_training_steps=9", *only))
    assert trainer.validated == [0 if mode == "disable" else 2] and trainer.actor_rollout_wg.updates == []
    assert [(tmp_path / "run" / name).read_bytes() for name in names] == before


def test_rollouts_of_validation_that_never_came_are_counted(made):
    trainer = made("trainer.total_training_steps=1")
    infos = {"reward": [1.0, 0.0, 1.0], "acc": [1.0, 0.0, 1.0]}
    wanted = {("sums", "a"): 2, ("sums", "b"): 3}
    metrics = trainer._val_metrics_update(["sums"] * 3, ["a", "a", "b"], infos, [np.array([2])] * 3, wanted)
    assert metrics["allocation/val_lost"] == 2
    assert metrics["val-core/sums/acc/mean@3"] == pytest.approx(1 / 3), "verl takes them for wrong"


@pytest.mark.parametrize("ranks, groups", [(1, 1), (2, 5), (3, 8), (5, 5), (7, 1), (7, 8)])
def test_any_number_of_rows_on_any_number_of_ranks(made, ranks, groups):
    """Odd counts and prime ranks: whole mini-batches, real rows in each, and a loss over the real rows alone."""
    trainer = made(
        "trainer.total_training_steps=1", "allocation/downsampler=random", "allocation.downsampler.keep=5",
        f"allocation.stop.groups={groups}", ranks=ranks,
    )  # fmt: skip
    train(trainer)
    [update], [(_, metrics)] = trainer.actor_rollout_wg.updates, trainer.logged
    rows, total = metrics["allocation/rows"], len(update["keys"])
    assert rows == 5 * metrics["allocation/groups"] and total % (2 * ranks) == 0 and total - rows < 2 * ranks
    assert metrics["allocation/pad_share"] == pytest.approx(1 - rows / total)
    assert metrics["allocation/optimizer_steps"] == 2
    assert update["global_batch_size"] == rows / 2, "padding is no part of the denominator"
    real = np.array([not key.startswith("pad") for key in update["keys"]]).reshape(ranks, 2, -1)
    assert real.sum() == rows and (real.sum(axis=(0, 2)) >= rows // 2).all()


@pytest.mark.parametrize("over", ["selected", "group"])
def test_the_baseline_is_over_the_rows_kept_or_the_whole_group_as_set(made, queue, over):
    """Advantages of every row by hand: padding and rows left out have no part in the mean of those kept."""
    trainer = made(
        "trainer.total_training_steps=1", "allocation/downsampler=max_variance", "allocation.downsampler.keep=3",
        f"allocation.downsampler.normalise_over={over}", "allocation.stop.groups=5", ranks=2,
    )  # fmt: skip
    stored, update = {}, trainer._update_actor

    def noted(batch, metrics):
        stored.update({key: dict(queue.rows["train"][key]) for key in batch.keys})
        return update(batch, metrics)

    trainer._update_actor = noted
    groups = {}
    finish = trainer.collector.backend.release
    trainer.collector.backend.release = lambda outcomes: groups.update(kept_scores(queue)) or finish(outcomes)
    train(trainer)
    padding = [row for key, row in stored.items() if key.startswith("pad")]
    kept = {key: row for key, row in stored.items() if not key.startswith("pad")}
    assert padding and all(not row["advantages"].any() for row in padding)
    for key, row in kept.items():
        uid = key.split("_")[0]
        of_kept = [float(r["rm_scores"].sum()) for k, r in kept.items() if k.split("_")[0] == uid]
        scores = of_kept if over == "selected" else groups[uid]
        assert (len(of_kept), len(scores)) == (3, 3 if over == "selected" else 8)
        expected = (float(row["rm_scores"].sum()) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        assert row["advantages"].tolist() == pytest.approx([expected] * len(row["responses"]), abs=1e-4)


def kept_scores(queue):
    """Scores of every group that is in the queue, before the rows left out are freed."""
    scores = defaultdict(list)
    for key, row in queue.rows["train"].items():
        scores[key.split("_")[0]].append(float(row["rm_scores"].sum()))
    return scores


def test_the_budget_of_a_step_is_said_at_the_start(made, caplog):
    caplog.set_level(logging.INFO, logger="verl_ext.training.trainer")
    made("trainer.total_training_steps=1", "allocation/downsampler=random", "allocation.downsampler.keep=5")
    [said] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("allocation: a training step")]
    for part in ("8 groups of 8 rollouts", "at most 384 rollouts", "40 rows", "2 mini-batches", "2 optimizer steps"):
        assert part in said
