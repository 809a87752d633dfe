"""The `allocation` namespace of the configuration, typed, and the budget of a training step that follows from it.

An error names the setting, the value seen and what is accepted. What crosses it with verl's other settings is in
`verl_ext.checks.allocation_settings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import AllocationSettings
from verl_ext.rollout.outcomes import OutcomeRule
from verl_ext.training.batch import StepBudget
from verl_ext.typed_settings import SettingError, build, is_number, is_whole, require

MODE = "allocated"
COLOCATE_ASYNC = "allocated_colocate_async"
SEPARATE_ASYNC = "allocated_separate_async"
MODES = (MODE, COLOCATE_ASYNC, SEPARATE_ASYNC)
"""Trainer modes that allocate."""
VERLS_OWN = ("sync", "colocate_async", "separate_async")
"""Trainer modes that are verl's: nothing under `allocation` is used."""
UNGROUPED_ESTIMATORS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class TrainingSettings(AllocationSettings):
    """The whole namespace `allocation` of a training run: what decides, and how the rollouts are made."""

    outcome: OutcomeRule = field(default_factory=OutcomeRule)
    """How correctness is read from the reward."""

    deadline_s: float = 3600.0
    """Seconds after which a session that has not ended is cancelled and counted as failed."""

    val_deadline_s: float = 14400.0
    """As `deadline_s`, for validation, whose prompts are all sent at once: seconds for a whole pass."""

    reward_deadline_s: float = 300.0
    """Seconds for the reward of a group's answers, and of an answer alone: one that takes longer is not scored, and the
    reward worker that it hangs in is replaced."""

    all_zero_steps: int | None = 3
    """Steps in a row without a right answer after which the run warns, with two sample answers; null never warns."""

    record: str | None = "auto"
    """Folder that every outcome is recorded in (Parquet, a file a step, never the text); null records nothing; auto:
    `outcomes` in the run's folder."""

    answers: bool = True
    """Keep two answers of each verdict (right, wrong, unscored) a step, with their prompts, in answers.jsonl of the
    run's folder; of long ones the last 2,000 characters."""

    resume: Literal["strict", "fresh"] = "strict"
    """strict: a saved state that does not fit this run is an error; fresh: start the rules anew beside the weights."""

    def _checks(self) -> list[tuple[bool, str, Any, str]]:
        steps, threshold = self.all_zero_steps, self.outcome.threshold
        return [
            *super()._checks(),
            *(
                (is_number(seconds := getattr(self, name)) and seconds > 0, f"allocation.{name}", seconds,
                 "a number of seconds above 0")
                for name in ("deadline_s", "val_deadline_s", "reward_deadline_s")
            ),
            (steps is None or steps >= 1, "allocation.all_zero_steps", steps, "null or an integer of 1 or more"),
            (bool(self.outcome.key), "allocation.outcome.key", self.outcome.key,
             "the name of a field of the reward's dictionary"),
            (threshold is None or is_number(threshold), "allocation.outcome.threshold", threshold, "null or a number"),
        ]  # fmt: skip

    @classmethod
    def from_config(cls, config: DictConfig) -> TrainingSettings:
        """Read `config.allocation`; without `stop.groups` a batch has data.train_batch_size groups.

        Raises:
            SettingError: every setting that is unknown or not accepted, by name.
        """
        if config.get("allocation") is None:
            raise SettingError("the configuration has no `allocation` namespace: start python -m verl_ext.main_ppo")
        raw = OmegaConf.to_container(config.allocation, resolve=True)
        stop, groups = raw.get("stop") or {}, config.data.train_batch_size
        if isinstance(stop, dict) and stop.get("groups") is None and is_whole(groups, 1):
            raw["stop"] = stop | {"groups": groups}
        return build(cls, "allocation", raw)


def resolve_budget(config: DictConfig, settings: TrainingSettings) -> StepBudget:
    """The budget of a training step from the configuration.

    Raises:
        SettingError: sizes that contradict each other, by name.
    """
    rollout_n = config.actor_rollout_ref.rollout.n
    train_batch_size = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    _, allocator, downsampler = settings.rules
    group_size = allocator.group_size
    if group_size != rollout_n:
        raise SettingError(
            f"allocation.allocator.group_size={group_size} contradicts actor_rollout_ref.rollout.n={rollout_n}: "
            f"leave group_size at its default (it follows rollout.n) or set both to the same number"
        )
    keep = downsampler.keep
    if train_batch_size % actor.ppo_mini_batch_size:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} does not divide "
            f"data.train_batch_size={train_batch_size}: their quotient is the number of mini-batches a step"
        )
    budget = StepBudget(
        prompts=settings.stop.groups,
        group_size=group_size,
        rollouts=settings.stop.budget(group_size),
        rows_per_group=min(keep or group_size, group_size),
        mini_batches=train_batch_size // actor.ppo_mini_batch_size,
        ppo_epochs=actor.ppo_epochs,
        ranks=data_parallel_ranks(config),
        min_group_rows=1 if config.algorithm.adv_estimator in UNGROUPED_ESTIMATORS else 2,
    )
    if budget.rollouts < group_size:
        raise SettingError(
            f"allocation.stop.rollouts={budget.rollouts} is less than one group of "
            f"allocation.allocator.group_size={group_size}"
        )
    return budget


def data_parallel_ranks(config: DictConfig) -> int:
    """Ranks of the actor that hold different rows: all, but for those that share a sequence (FSDP with Ulysses) or a
    model (Megatron).

    Raises:
        SettingError: they do not divide the ranks there are, by name.
    """
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        names = [f"megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")]
    else:
        # verl's actor has it twice; the deprecated one is taken where it is above 1.
        deprecated = actor.get("ulysses_sequence_parallel_size", 1) > 1
        names = [("" if deprecated else "fsdp_config.") + "ulysses_sequence_parallel_size"]
    sizes = {f"actor_rollout_ref.actor.{name}": OmegaConf.select(actor, name, default=1) for name in names}
    for name, size in sizes.items():
        require(is_whole(size, 1), name, size, "an integer of 1 or more")
    shared = math.prod(sizes.values())
    if ranks % shared:
        said = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise SettingError(f"{said} does not divide the {ranks} ranks (trainer.n_gpus_per_node x trainer.nnodes)")
    return ranks // shared


def rows_multiple(config: DictConfig, use_critic: bool, use_reference: bool) -> int:
    """The number that a rank's rows must be a multiple of, so that all mini-batches and micro-batches come out whole.

    With `use_dynamic_bsz` micro-batches are cut by tokens and the multiple is the number of mini-batches alone.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update = config.data.train_batch_size // actor.ppo_mini_batch_size
    multiple = update * (1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu or 1)
    if not rollout.log_prob_use_dynamic_bsz:
        multiple = math.lcm(multiple, rollout.log_prob_micro_batch_size_per_gpu or 1)
    if use_reference and not config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz:
        multiple = math.lcm(multiple, config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu or 1)
    if use_critic:
        critic = config.critic
        fixed = 1 if critic.use_dynamic_bsz else critic.ppo_micro_batch_size_per_gpu or 1
        multiple = math.lcm(multiple, config.data.train_batch_size // critic.ppo_mini_batch_size * fixed)
    return multiple
