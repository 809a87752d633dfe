"""The published methods and their compositions inside verl, for real; and every estimator the rules work with."""

from __future__ import annotations

import pytest

from tests.integration.real_run import real_run
from verl_ext.runs.outcome_records import read_record

pytestmark = [pytest.mark.real_stack, pytest.mark.long]

QUICK = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.resume_mode=disable")


def test_pilot_commit_binds_pilots_to_the_next_steps_commits_over_a_resume(tmp_path):
    record = tmp_path / "record"
    shared = ("recipe=cpu/pilot_commit", "trainer.val_before_train=False", "trainer.test_freq=-1",
              f"allocation.record={record}")  # fmt: skip
    first = real_run(tmp_path, *shared, "trainer.total_training_steps=2", "trainer.save_freq=2")
    first.check_ledger()
    assert first.ledger[0]["waiting"] > 0 and first.ledger[1]["waiting"] > 0
    assert first.step(2)["allocation/lag_max"] == 1
    assert first.step(2)["training/off_policy/trajectory_staleness/max"] == 1
    second = real_run(tmp_path, *shared, "trainer.total_training_steps=3")
    second.check_ledger()
    assert second.step(3)["allocation/groups"] == 16 and second.step(3)["allocation/lag_max"] >= 1

    requests = read_record(record).to_pylist()
    pilots = {
        number: {r["prompt"] for r in requests if r["step"] == number and r["session"] < 4} for number in (1, 2, 3)
    }
    for number in (2, 3):
        call = [r for r in requests if r["step"] == number and r["round"] == 1]
        commits = {r["prompt"] for r in call if r["session"] >= 4}
        # one generate call: commits of this step, piloted in an earlier one, ride with pilots of the next
        assert commits and commits <= set().union(*(pilots[earlier] for earlier in range(1, number)))
        assert len({r["prompt"] for r in call if r["session"] < 4}) == 48
        assert all(sum(r["prompt"] == prompt for r in call) == 12 for prompt in commits)


def test_sara_dps_pods_runs_twenty_steps(tmp_path):
    run = real_run(tmp_path, "recipe=cpu/sara_dps_pods", *QUICK, "trainer.total_training_steps=20")
    run.check_ledger()
    assert len(run.ledger) == 20
    assert all(line["issued"] <= 512 for line in run.ledger)
    assert all(run.step(step)["allocation/optimizer_steps"] == 2 for step in range(1, 21))


@pytest.mark.parametrize("recipe", ["cero_sara", "mopps", "knapsack", "reinforce_ada", "ar3po", "hora", "vip", "dapo",
                                    "pods"])  # fmt: skip
def test_recipe_runs(tmp_path, recipe):
    run = real_run(tmp_path, f"recipe=cpu/{recipe}", *QUICK, "trainer.total_training_steps=2")
    run.check_ledger()
    for step in (1, 2):
        assert run.step(step)["actor/grad_norm"] > 0 and run.step(step)["allocation/optimizer_steps"] == 2


ESTIMATORS = {
    "gae": ("algorithm.adv_estimator=gae",),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "kl_in_reward": ("algorithm.use_kl_in_reward=True",),
    "kl_in_loss": ("actor_rollout_ref.actor.use_kl_loss=True",),
    "lora": (
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.rollout.load_format=safetensors",
    ),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sara_under_every_estimator(tmp_path, estimator):
    run = real_run(tmp_path, "recipe=cpu/sara", *QUICK, "trainer.total_training_steps=2", *ESTIMATORS[estimator])
    run.check_ledger()
    for step in (1, 2):
        metrics = run.step(step)
        assert metrics["allocation/groups"] == 32 and metrics["actor/grad_norm"] > 0
        assert metrics["allocation/optimizer_steps"] == 2
        if estimator == "gae":
            assert metrics["critic/grad_norm"] > 0
