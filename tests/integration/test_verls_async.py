"""verl's own asynchronous modes on the CPU platform: Ray, TransferQueue, FSDP and vLLM, nothing in their place."""

from __future__ import annotations

import pytest

from tests.integration.real_run import real_run

pytestmark = pytest.mark.real_stack

QUICK = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.resume_mode=disable",
         "trainer.total_training_steps=3")  # fmt: skip
SAME = 5e-3
"""Most that probabilities of one policy differ between the engine and the trainer; those of weights that two optimizer
steps of at most 7e-5 lie between differed by .1."""


@pytest.fixture
def verls_run(tmp_path, monkeypatch):
    """A run in a mode of verl's, which keeps no ledger and writes its metrics where it is told."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run" / "metrics.jsonl"))
    return lambda *overrides: real_run(tmp_path, *overrides)


def test_separate_async_trains_the_weights_that_generate_and_keeps_the_old_policy(verls_run):
    """Steps so large that weights which did not arrive, or a pi_old that is the live policy, would show."""
    run = verls_run(
        "recipe=cpu/grpo_separate_async", *QUICK,
        "trainer.v1.separate_async.num_warmup_batches=0",
        "actor_rollout_ref.actor.optim.lr=3e-4", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    )  # fmt: skip
    for step in (1, 2, 3):
        found = run.step(step)
        assert found["training/off_policy/trajectory_staleness/max"] == 0, "all rollouts are of the newest weights"
        assert found["training/rollout_probs_diff_max"] < SAME
        assert found["actor/grad_norm"] > 0


@pytest.mark.long
def test_colocate_async_keeps_rollouts_in_flight_across_the_update(verls_run):
    run = verls_run("recipe=cpu/grpo_colocate_async", *QUICK)
    assert run.step(1)["training/rollout_probs_diff_max"] < SAME
    assert max(run.step(step)["training/off_policy/trajectory_staleness/max"] for step in (2, 3)) == 1
    for step in (1, 2, 3):
        found = run.step(step)
        assert found["actor/grad_norm"] > 0 and found["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1)
