"""verl's training loop with our trainer in it, without a policy: what the tests of the trainer share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from tests.unit.training.in_process import SMALL, Manager, Queue, Rewards, Worker
from verl_ext.checks.allocation_settings import check_config
from verl_ext.testing.fake_run import FakePrompts, fake_config
from verl_ext.training import trainer as trainer_module
from verl_ext.training.trainer import AllocatedReplayBuffer, PPOTrainerAllocated

PROMPTS = 24  # three steps an epoch


class Actor:
    """The policy's workers: they count updates, note what they were told, and save as verl's FSDP workers do.

    The files have verl's names and are written in verl's order; which older ones go, and when, is verl's own code.
    """

    def __init__(self, ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.updates: list[dict] = []
        self.loaded: list[str] = []
        """Folders that weights were read from."""
        self.manager = object.__new__(BaseCheckpointManager)
        self.manager.previous_saved_paths = []

    def update_actor(self, batch):
        self.updates.append({"keys": list(batch.keys), **batch.extra_info})
        norms = [1.0] * (batch.extra_info["num_mini_batch"] * batch.extra_info["epochs"])
        return {"metrics": {"grad_norm": norms, "mfu": 0.1, "lr": [1e-3] * len(norms)}}

    def _shards(self, folder):
        ranks = self._dispatch_info["actor"]
        for kind in ("model", "optim", "extra_state"):
            for rank in ranks:
                yield Path(folder, f"{kind}_world_size_{len(ranks)}_rank_{rank}.pt")

    def save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep):
        self.manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        os.makedirs(local_path, exist_ok=True)
        for path in self._shards(local_path):
            torch.save({"step": global_step}, path)
        os.makedirs(Path(local_path, "huggingface"), exist_ok=True)
        for name in ("huggingface/config.json", "fsdp_config.json"):
            with open(Path(local_path, name), "w") as file:
                json.dump({"world_size": 1}, file)
        self.manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, **_):
        steps = {torch.load(path)["step"] for path in self._shards(local_path)}
        assert steps == {int(Path(local_path).parent.name.removeprefix("global_step_"))}, "weights of another save"
        self.loaded.append(local_path)


class WithoutPolicy:
    """What verl does with the policy is left out, from the old log-probs to the validation's answers."""

    def _compute_old_log_prob(self, batch, metrics):
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["rollout_log_probs"])
        fields = TensorDict({"old_log_probs": data["rollout_log_probs"]}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _validate(self):
        self.validated.append(self.global_steps)
        return {"val-core/sums/acc/mean@8": 0.5}


class Trainer(WithoutPolicy, PPOTrainerAllocated):
    """The mode `allocated`."""


@pytest.fixture
def queue(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    return Queue(monkeypatch)


@pytest.fixture
def made(queue, monkeypatch, tmp_path):
    """A trainer at the state in the folder, with what it logged and saved; call it again for a resumed one."""
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, *_, **__: None)
    stop = SimpleNamespace(asked=False, trainer_asks=lambda: None)
    monkeypatch.setattr(trainer_module, "StopRequest", lambda: stop)

    def make(*overrides, ranks=1, recipe="cpu/sara", kind=Trainer, prompts=PROMPTS):
        monkeypatch.setattr(trainer_base, "create_rl_dataset", lambda *_, is_train, **__: FakePrompts(prompts))
        config = fake_config([
            f"recipe={recipe}", *SMALL, "trainer.val_before_train=False", "trainer.test_freq=-1",
            "data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path / 'run'}",
            f"trainer.n_gpus_per_node={ranks}", "trainer.logger=[]", *overrides,
        ])  # fmt: skip
        trainer = object.__new__(kind)
        trainer.config, trainer.trainer_mode, trainer.parameter_sync_step = config, "sync", 1
        trainer.settings, trainer.budget = check_config(config)
        trainer.run_folder = trainer_module.RunFolder(config.trainer.default_local_dir, config)
        trainer.use_critic = trainer.use_reference_policy = trainer.stopped = False
        trainer.replay_buffer = object.__new__(AllocatedReplayBuffer)
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[Rewards()])
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda _: None, sleep_replicas=lambda: None)
        trainer.checkpoint_callback = trainer_base.build_checkpoint_callback(config)
        trainer.tokenizer, trainer.processor = SimpleNamespace(eos_token_id=0, pad_token_id=0), None
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
