"""verl's own training loop with our trainer in it: counters, saving, logging, resuming, rows and mini-batches.

The policy, its engine and TransferQueue are stood in for; the loop, the steps, checkpoints and advantages are the code
that a run goes through.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tests.unit.training.in_process import SMALL, Manager, Queue, Rewards, Worker
from verl_ext.checks.allocation import check_config
from verl_ext.testing.fake_run import FakePrompts, fake_config
from verl_ext.training import trainer as trainer_module
from verl_ext.training.trainer import AllocatedReplayBuffer, PPOTrainerAllocated

PROMPTS = 24  # three steps an epoch
# One group of which fewer rows are left than there are mini-batches.
NOT_ENOUGH = ("allocation.stop.groups=1", "allocation/downsampler=random", "allocation.downsampler.keep=2",
              "actor_rollout_ref.actor.ppo_mini_batch_size=1")  # fmt: skip


class Actor:
    """The policy's workers: they count updates and note what they were told."""

    def __init__(self, ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.updates: list[dict] = []
        self.loaded: list[str] = []
        """Folders that weights were read from."""

    def update_actor(self, batch):
        self.updates.append({"keys": list(batch.keys), **batch.extra_info})
        norms = [1.0] * (batch.extra_info["num_mini_batch"] * batch.extra_info["epochs"])
        return {"metrics": {"grad_norm": norms, "mfu": 0.1, "lr": [1e-3] * len(norms)}}

    def save_checkpoint(self, *_, **__):
        pass

    def load_checkpoint(self, local_path, **_):
        self.loaded.append(local_path)


class Trainer(PPOTrainerAllocated):
    """Without a policy: what verl does with it is left out, from the old log-probs to the validation's answers."""

    def _compute_old_log_prob(self, batch, metrics):
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["rollout_log_probs"])
        fields = TensorDict({"old_log_probs": data["rollout_log_probs"]}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _validate(self):
        self.validated.append(self.global_steps)
        return {"val-core/sums/acc/mean@8": 0.5}


@pytest.fixture
def queue(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    return Queue(monkeypatch)


@pytest.fixture
def made(queue, monkeypatch, tmp_path):
    """A trainer at the state in the folder, with what it logged and saved; call it again for a resumed one."""
    monkeypatch.setattr(trainer_base, "create_rl_dataset", lambda *_, is_train, **__: FakePrompts(PROMPTS))
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, *_, **__: None)
    stop = SimpleNamespace(asked=False, trainer_asks=lambda: None)
    monkeypatch.setattr(trainer_module, "StopRequest", lambda: stop)

    def make(*overrides, ranks=1):
        config = fake_config([
            "recipe=cpu/sara", *SMALL, "trainer.val_before_train=False", "trainer.test_freq=-1",
            "data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path / 'run'}",
            f"trainer.n_gpus_per_node={ranks}", "trainer.logger=[]", *overrides,
        ])  # fmt: skip
        trainer = object.__new__(Trainer)
        trainer.config, trainer.trainer_mode, trainer.parameter_sync_step = config, "sync", 1
        trainer.settings, trainer.budget = check_config(config)
        trainer.run_folder = trainer_module.RunFolder(config.trainer.default_local_dir, config)
        trainer.use_critic = trainer.use_reference_policy = trainer.stopped = False
        trainer.replay_buffer = object.__new__(AllocatedReplayBuffer)
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[Rewards()])
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda _: None, sleep_replicas=lambda: None)
        trainer.checkpoint_callback = trainer_base.build_checkpoint_callback(config)
        trainer.tokenizer, trainer.processor = SimpleNamespace(eos_token_id=0), None
        trainer.actor_rollout_wg = Actor(ranks)
        trainer.validated, trainer.logged, trainer.saved = [], [], []
        logged = SimpleNamespace(log=lambda data, step: trainer.logged.append((step, dict(data))))
        monkeypatch.setattr(trainer_base, "Tracking", lambda **_: logged)
        trainer._init_dump_executor()
        trainer._init_dataloader()
        trainer._load_checkpoint()
        trainer.manager = Manager(Worker(config, reward_workers=[Rewards()]))
        save = trainer._save_checkpoint
        trainer._save_checkpoint = lambda: trainer.saved.append(trainer.global_steps) or save()
        return trainer

    return make


def train(trainer):
    trainer.fit(trainer.manager)
    return trainer


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
def test_a_validation_of_a_runs_folder_leaves_the_run_as_it_was(made, tmp_path, mode):
    train(made("trainer.total_training_steps=2", "trainer.save_freq=1"))
    names = ("config.yaml", "run.json", "ledger.jsonl", "latest_checkpointed_iteration.txt")
    before = [(tmp_path / "run" / name).read_bytes() for name in names]
    only = ("trainer.val_only=True", "trainer.val_before_train=True", f"trainer.resume_mode={mode}")
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
