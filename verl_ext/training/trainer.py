"""Trainer mode `allocated`: verl's synchronous V1 trainer whose training batches come from `collect`.

What is verl's stays verl's: fit, validation, log-probs, advantages, saving, logging. What is ours: where the batch
comes from, how its rows are laid out (a fixed number of mini-batches), the way through a step that makes no update, and
the state of the rules beside the weights.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProtoFuture
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from verl_ext.allocation.group_statistics import normalised_over
from verl_ext.rollout.outcomes import plain
from verl_ext.rollout.validation import look_at
from verl_ext.runs import checkpoints
from verl_ext.runs.folder import RunFolder
from verl_ext.runs.line_file import NotWrittenError
from verl_ext.training.batch import spread_padding
from verl_ext.training.collector import Collector, NoUpdate
from verl_ext.training.group_advantage import (
    RELATIVE_ESTIMATORS,
    check_sessions,
    group_advantages,
    without_advantage,
)
from verl_ext.training.prompts import PromptRows
from verl_ext.training.stopping import StopRequest
from verl_ext.training.training_settings import MODE, TrainingSettings, resolve_budget, rows_multiple
from verl_ext.training.validation_metrics import is_nothing, numbers_alone, or_nothing, without

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


SKIPPED = "skipped_update"
_LOOK_EVERY_S = 5.0


def _is_skipped(batch: KVBatchMeta) -> bool:
    """Whether the batch stands for a step that made no update."""
    return any(tag.get(SKIPPED, False) for tag in batch.tags)


class AllocatedReplayBuffer(ReplayBuffer):
    """verl's replay buffer for validation; a training sample runs the rounds of one step."""

    collector: Collector | None = None
    _looked_at = 0.0
    pad_token: int = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A training sample runs the rounds of one step; validation's is verl's own, and never empty."""
        if partition_id != "train":
            batch, metrics = super().sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
            look_at(self.collector.backend.manager.agent_loop_workers)
            return or_nothing(batch, self.pad_token), metrics
        return self.collector.sample(global_steps)

    def _sync_metadata_from_transfer_queue(self) -> None:
        """verl's look at what has come back, and ours at whether the rest can: a worker or a server may have died."""
        super()._sync_metadata_from_transfer_queue()
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            look_at(self.collector.backend.manager.agent_loop_workers)
            self._looked_at = time.monotonic()


@register_trainer(MODE)
class PPOTrainerAllocated(PPOTrainerSync):
    """verl's synchronous trainer with rollouts allocated by rules."""

    collector_class: type[Collector] = Collector
    _warned_of: set[str] = set()
    """Variables of the reward that are no numbers, and were said to be."""

    def __init__(self, config: DictConfig) -> None:
        self.settings = TrainingSettings.from_config(config)
        self.budget = resolve_budget(config, self.settings)
        super().__init__(config)
        # verl asks in five places whether the mode is called "sync", and otherwise assumes an asynchronous one.
        self.trainer_mode = "sync"
        self.run_folder = RunFolder(config.trainer.default_local_dir, config)
        self.collector: Collector | None = None
        self.stopped = False
        """Ended by SIGTERM before its last step."""

    # ------------------------------------------------ where batches come from

    def _build_replay_buffer(self) -> ReplayBuffer:
        """A training batch is what the rounds of the step give; validation goes on polling, but often."""
        sampler = self.config.trainer.v1.sampler
        return AllocatedReplayBuffer(
            trainer_mode="sync",
            trainer_config=self.config.trainer.v1.get("sync", {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            # Only validation still polls; its rollouts take seconds, not minutes, on a small model.
            poll_interval=0.1,
        )

    def _init_dataloader(self) -> None:
        """The pool of prompts is made of verl's data set, and the steps that its epochs allow are counted."""
        super()._init_dataloader()
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"data.train_files holds {len(self.train_dataset)} usable prompts, fewer than "
                f"data.train_batch_size={self.config.data.train_batch_size}"
            )
        # verl's loop ends with its epochs without saving or validating: let the last step know that it is the last.
        reachable = self.steps_per_epoch * self.config.trainer.total_epochs
        if self.total_training_steps > reachable:
            logger.warning(
                "trainer.total_training_steps=%d is more than trainer.total_epochs=%d allow: %d steps are made",
                self.total_training_steps,
                self.config.trainer.total_epochs,
                reachable,
            )
            self.total_training_steps = reachable
            with open_dict(self.config):
                self.config.actor_rollout_ref.actor.optim.total_training_steps = reachable
                if self.use_critic:
                    self.config.critic.optim.total_training_steps = reachable
        self.prompts = PromptRows(self.train_dataset, self.config.data)
        self.collector = self.collector_class(self.settings, self.budget, self.prompts, self.run_folder.outcomes)
        self.replay_buffer.collector = self.collector
        self.replay_buffer.pad_token = self.tokenizer.pad_token_id or 0
        logger.info("allocation: %s", self.budget.describe())

    def fit(self, agent_loop_manager: Any) -> None:
        """The rules are given the rollout workers, and the run's files are cut back to the step it is resumed from; a
        run that only validates leaves them as they are.

        Raises:
            NotWrittenError: a record cannot be written; says where, and where a resume begins.
        """
        self.collector.connect(agent_loop_manager)
        try:
            self._begin()
            super().fit(agent_loop_manager)
            self.collector.end()
        except NotWrittenError as error:
            begins = checkpoints.where_a_resume_begins(self.run_folder.path)
            raise NotWrittenError(f"{error}. {begins}") from error

    def _begin(self) -> None:
        trainer = self.config.trainer
        if trainer.val_only:
            # verl trains on after a validation that it was not told to make.
            with open_dict(trainer):
                trainer.val_before_train = True
            return self.run_folder.visit()
        checkpoints.point_at(self.run_folder.path, self.global_steps)
        self.run_folder.begin(self.global_steps)
        if self.collector.finished:  # resumed after its end
            self.total_training_steps = self.global_steps
            self.run_folder.end(self.global_steps)

    def on_validate_begin(self) -> None:
        """verl's file logger empties metrics.jsonl when it opens it: what a resumed run had logged is given back."""
        super().on_validate_begin()
        self.run_folder.restore_metrics(self.logger)

    def _val_metrics_update(
        self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=None
    ) -> dict:
        """verl's, on values that are numbers, and without variables that repeat another: verl resamples each of each
        prompt a thousand times."""
        rows = [i for i, uid in enumerate(sample_uids) if not is_nothing(uid)]
        if len(rows) < len(sample_uids):
            data_sources, sample_uids, sample_turns = (
                [values[i] for i in rows] for values in (data_sources, sample_uids, sample_turns)
            )
        infos = numbers_alone(without(rows, reward_extra_infos_dict), self._warned_of)
        wanted = sum((expected_acc_counts or {}).values()) or len(sample_uids)
        if infos.get("score") == infos["reward"]:
            infos.pop("score")
        if infos.get("acc") == infos["reward"]:
            infos.pop("reward")
        if expected_acc_counts and "acc" in infos:
            keys = zip(data_sources, sample_uids, infos["acc"], strict=True)
            if Counter((source, uid) for source, uid, acc in keys if acc is not None) == expected_acc_counts:
                expected_acc_counts = None  # no rollout is missing: `acc_success_only` would be `acc` once more
        metrics = super()._val_metrics_update(data_sources, sample_uids, infos, sample_turns, expected_acc_counts)
        # verl takes what is missing for wrong.
        metrics["allocation/val_lost"] = wanted - len(sample_uids)
        return metrics

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        """verl's, of answers that there are, and of truths that have a JSON form."""
        rows = [i for i, key in enumerate(reward_extra_infos_dict["uid"]) if not is_nothing(key)]
        inputs, outputs, gts, scores = ([values[i] for i in rows] for values in (inputs, outputs, gts, scores))
        infos = without(rows, reward_extra_infos_dict)
        super()._dump_generations(inputs, outputs, plain(gts), scores, infos, dump_path)

    def on_train_begin(self) -> None:
        """As `on_validate_begin`, for runs that do not validate first."""
        super().on_train_begin()
        self.run_folder.restore_metrics(self.logger)
        self.stop_request = StopRequest()
        self.stop_request.trainer_asks()

    def prepare_step(self) -> dict[str, Any]:
        """Nothing is sent ahead: the rules ask for what they need when the step samples."""
        return {}

    # ------------------------------------------------ a step, also one without an update

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """After a step the ledger is written, and the run may be found to end with it."""
        batch = super().step(metrics, timing_raw)
        # Before a save, so that a run resumed from it has the line of its step too.
        self.run_folder.add_ledger_line(self.collector.ledger_record)
        self.run_folder.add_answers([answer.record(self.global_steps) for answer in self.collector.answers])
        self.stopped = self.stop_request.asked and self.global_steps < self.total_training_steps
        finished = self.collector.finished
        if self.stopped or finished:
            self._make_this_step_the_last(finished)
        return batch

    def _make_this_step_the_last(self, finished: str | None) -> None:
        """verl asked before the step whether it is the last: have it saved, and validated unless time is short."""
        self.total_training_steps = self.global_steps
        trainer = self.config.trainer
        if trainer.save_freq > 0:
            trainer.save_freq = 1
        if trainer.test_freq > 0:
            trainer.test_freq = -1 if self.stopped else 1
        if self.stopped:
            saved = "saved" if trainer.save_freq > 0 else "not saved (trainer.save_freq=-1)"
            logger.warning("SIGTERM: the run ends after step %d, %s", self.global_steps, saved)
        else:
            logger.info("%s: the run ends after step %d", finished, self.global_steps)

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        """A step whose rounds left too little to train on makes no update, and ends like any other."""
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except NoUpdate as skipped:
            logger.warning("step %d makes no update: %s", self.global_steps, skipped)
            metrics.update(skipped.metrics)
            self.on_sample_end()
            # verl clears the step's keys from TransferQueue, which refuses an empty list: one key, without a row.
            marker = {"keys": [f"skipped{self.global_steps}"], "tags": [{SKIPPED: True, "is_padding": True}]}
            tq.kv_batch_put(partition_id="train", **marker)
            return KVBatchMeta(partition_id="train", **marker)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int):
        """A step without an update has few metrics; every step has its progress line."""
        if not _is_skipped(batch):
            super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        else:
            metrics.update({"training/global_step": global_steps, "training/epoch": epoch})
            metrics.update({f"timing_s/{name}": seconds for name, seconds in timing_raw.items()})
        self.run_folder.end_step(metrics, global_steps, self.total_training_steps, self.stopped)

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """Rollouts alone: neither padding, nor what stands for a step without an update."""
        rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        if rows:
            keys, tags = [batch.keys[i] for i in rows], [batch.tags[i] for i in rows]
            rollouts = KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags)
            super()._log_rollout_data(rollouts, timing_raw, rollout_data_dir)

    # ------------------------------------------------ rows, ranks and mini-batches

    def _critic_mini_batches(self) -> int:
        return self.config.data.train_batch_size // self.config.critic.ppo_mini_batch_size

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are padded to ranks x mini-batches, not to a number of whole groups."""
        return dp_size * rows_multiple(self.config, self.use_critic, self.use_reference_policy)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, logging_prefix="global_seqlen", keep_minibatch=False):
        """Padding is spread, so that no mini-batch consists of padding alone, and its share is logged."""
        rows = len(batch)
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        # The critic may cut the rows into another number of mini-batches: spread over the finer one.
        slices = self.budget.mini_batches
        if self.use_critic:
            slices = math.lcm(slices, self._critic_mini_batches())
        batch.reorder(spread_padding(padding, ranks, slices))
        metrics["allocation/pad_share"] = 1.0 - rows / len(batch)
        metrics["allocation/rows"] = rows
        self._real_rows = rows
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Where a rule says so, GRPO's mean and deviation are those of the whole group, not of the rows kept; a group
        whose scores do not differ has advantages of exactly 0."""
        algorithm = self.config.algorithm
        check_sessions(batch, algorithm.adv_estimator)
        batch = super()._compute_advantage(batch, metrics)
        if normalised_over(self.collector.allocation.allocator, self.collector.allocation.downsampler) == "group":
            divide = algorithm.get("norm_adv_by_std_in_grpo", True)
            batch = group_advantages(batch, self.collector.statistics, divide)
        # With the KL penalty in the reward, rows of equal scores differ; a whitened batch has another zero.
        if algorithm.adv_estimator in RELATIVE_ESTIMATORS and not algorithm.use_kl_in_reward:
            batch = without_advantage(batch, self.collector.flat)
        return batch

    def _update_info(self, mini_batches: int, part: DictConfig) -> dict[str, Any]:
        """What `train_mini_batch` needs; a fixed number of mini-batches, losses scaled by the rows that are real."""
        return {
            "global_batch_size": self._real_rows / mini_batches,
            "num_mini_batch": mini_batches,
            "epochs": part.ppo_epochs,
            "seed": part.data_loader_seed,
            "dataloader_kwargs": {"shuffle": part.shuffle},
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl 0.9.1's own, but for the number of mini-batches (no distillation, which is refused at start)."""
        actor = self.config.actor_rollout_ref.actor
        batch.extra_info.update(
            self._update_info(self.budget.mini_batches, actor),
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0,
            distillation_use_topk=False,
            distillation_only=False,
        )
        output: TensorDict = self.actor_rollout_wg.update_actor(batch)
        output = rename_dict(output["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        # Gradient norms come one an optimizer step: their number is the number of steps made.
        metrics["allocation/optimizer_steps"] = len(np.atleast_1d(output["actor/grad_norm"]))
        metrics.update(reduce_metrics(output))
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl 0.9.1's own, but for the number of mini-batches."""
        batch.extra_info.update(self._update_info(self._critic_mini_batches(), self.config.critic))
        output: DataProtoFuture = self.critic_wg.train_mini_batch(batch)
        output = rename_dict(output.get()["metrics"], "critic/")
        output["perf/mfu/critic"] = output.pop("critic/mfu")
        metrics.update(reduce_metrics(output))
        return batch

    # ------------------------------------------------ state

    def _save_checkpoint(self) -> None:
        """The rules' state is saved beside the weights, and older weights stay until verl's tracker names the new ones.

        verl's own save removes the last ones before its tracker, which it writes last, names the new step; a kill
        between the two would leave nothing to resume from.
        """
        root, trainer = self.run_folder.path, self.config.trainer
        folder = os.path.join(root, f"global_step_{self.global_steps}")
        names = {role: f"max_{role}_ckpt_to_keep" for role in checkpoints.ROLES}
        once = {name: trainer.get(name) for name in (*names.values(), "remove_previous_ckpt_in_save")}
        keep = {role: 1 if once["remove_previous_ckpt_in_save"] else once[name] for role, name in names.items()}
        try:
            checkpoints.make_room(folder, keep_whole=not any(keep.values()))
            self.collector.save(os.path.join(folder, "allocation"))
            with open_dict(trainer):
                trainer.remove_previous_ckpt_in_save = False
                trainer.update({names[role]: most + 1 if most else most for role, most in keep.items()})
            try:
                super()._save_checkpoint()
            finally:
                with open_dict(trainer):
                    trainer.update(once)
            checkpoints.commit(root, self.global_steps, remove=any(keep.values()))
        except Exception as error:
            raise checkpoints.SaveError(checkpoints.why_not_saved(folder, error)) from error
        checkpoints.remove_old(root, self.global_steps, keep)
        checkpoints.drop_trajectories(root)

    def _load_checkpoint(self) -> None:
        """The rules' state is restored beside the weights."""
        if self.config.trainer.resume_mode == "auto":
            checkpoints.mend(self.run_folder.path)
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        if self.config.trainer.resume_mode == "resume_path":
            folder = self.config.trainer.resume_from_path
        else:
            folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        self.collector.load(os.path.join(folder, "allocation"))
