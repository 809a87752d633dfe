"""verl's real trainer, end to end on the tiny policy: Ray, TransferQueue, FSDP and vLLM, nothing in their place."""

from __future__ import annotations

import json

import pytest

from tests.integration.real_run import real_run

pytestmark = pytest.mark.real_stack

QUICK = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.resume_mode=disable")


def test_sara_trains_saves_and_resumes(tmp_path):
    shared = ("recipe=cpu/sara", "trainer.val_before_train=False")
    first = real_run(tmp_path, *shared, "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2")
    first.check_ledger()
    for step in (1, 2):
        metrics = first.step(step)
        assert metrics["allocation/groups"] == 32 and metrics["allocation/rows"] == 256
        assert metrics["allocation/optimizer_steps"] == 2 and metrics["allocation/pad_share"] == 0
        assert metrics["allocation/batch_effective_share"] == 1.0
        assert metrics["allocation/rounds"] >= 2
        assert 0 <= metrics["allocation/round_gap_s"]
        assert metrics["actor/grad_norm"] > 0
    assert 0.2 < first.step(2)["val-core/chain_sums/acc/mean@8"] < 0.8
    state = first.folder / "global_step_2" / "allocation"
    assert state.is_dir() and (first.folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (first.folder / "config.yaml").exists() and (first.folder / "report.png").exists()
    assert "The ledger adds up" in first.log

    second = real_run(tmp_path, *shared, "trainer.total_training_steps=3", "trainer.test_freq=-1")
    second.check_ledger()
    assert [line["step"] for line in second.metrics] == [1, 2, 3]
    assert second.metrics[:2] == first.metrics and second.ledger[:2] == first.ledger
    third = second.step(3)
    assert third["allocation/rollouts"] == first.step(2)["allocation/rollouts"] + third["allocation/step_rollouts"]
    assert third["allocation/pool/epoch_share"] > first.step(2)["allocation/pool/epoch_share"]
    assert third["allocation/groups"] == 32


def test_uniform_is_grpo(tmp_path):
    run = real_run(
        tmp_path, "recipe=cpu/grpo", *QUICK, "trainer.total_training_steps=9", "allocation.stop.run_rollouts=512",
        "trainer.test_freq=9", "trainer.save_freq=9",
    )  # fmt: skip
    run.check_ledger()
    # the run's rollouts are spent at the second step: it is validated and saved like the ninth
    assert len(run.ledger) == 2 and (run.folder / "global_step_2").is_dir()
    assert 0.2 < run.step(2)["val-core/chain_sums/acc/mean@8"] < 0.8
    assert json.loads((run.folder / "run.json").read_text())["ended_at_step"] == 2
    for step in (1, 2):
        metrics = run.step(step)
        assert metrics["allocation/rounds"] == 1 and metrics["allocation/step_rollouts"] == 256
        assert metrics["allocation/fate/trained"] == 256 and metrics["allocation/optimizer_steps"] == 2
        assert 0.1 < metrics["allocation/effective_share"] < 0.7


def test_sara_with_pods_on_two_ranks_with_an_odd_number_of_rows(tmp_path):
    run = real_run(
        tmp_path,
        "recipe=cpu/sara_pods",
        *QUICK,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "allocation.stop.groups=31",
        "allocation.downsampler.keep=7",
    )
    run.check_ledger()
    for step in (1, 2):
        metrics = run.step(step)
        assert metrics["allocation/rows"] == 31 * 7 == metrics["allocation/fate/trained"]
        assert metrics["allocation/fate/down_sampled"] == 31 * 9
        assert metrics["allocation/pad_share"] == pytest.approx(3 / 220)
        assert metrics["allocation/optimizer_steps"] == 2
        assert metrics["actor/grad_norm"] > 0


def test_steps_without_an_update_are_counted_saved_and_left_behind(tmp_path):
    """All answers wrong: SARA finds nothing to train on, and the run goes on to its end, saving and validating."""
    reward = tmp_path / "never.py"
    reward.write_text("def compute_score(*args, **kwargs):\n    return {'score': -0.1 * len(args), 'acc': False}\n")
    run = real_run(
        tmp_path,
        "recipe=cpu/sara",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"reward.custom_reward_function.path={reward}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "allocation.stop.rollouts=256",
    )
    run.check_ledger()
    for step in (1, 2):
        metrics = run.step(step)
        assert metrics["allocation/skipped_updates"] == step and metrics["allocation/short_by"] == 32
        assert "actor/grad_norm" not in metrics
        assert metrics["allocation/fate/abandoned"] == metrics["allocation/step_rollouts"] <= 256
    assert run.step(2)["val-core/chain_sums/acc/mean@8"] == 0.0
    assert (run.folder / "global_step_2" / "allocation").is_dir()
    assert "makes no update" in run.log
