"""The `allocation` namespace of the configuration, typed, and the budget of a training step that follows from it.

An error names the setting, the value seen and what is accepted. What crosses it with verl's other settings is in
`verl_ext.checks.allocation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import SettingError as RuleSettingError
from verl_ext.allocation import make_allocator, make_downsampler, make_selector
from verl_ext.rollout.outcomes import OutcomeRule
from verl_ext.training.batch import StepBudget

T = TypeVar("T")

MODE = "allocated"
DEFAULT_BUDGET_FACTOR = 6
UNGROUPED_ESTIMATORS = ("gae", "reinforce_plus_plus")


class SettingError(ValueError):
    """Settings that cannot be, or that contradict each other: one message a problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class StopSettings:
    """When a step has enough."""

    groups: int | None = None
    """Groups in the batch; null: data.train_batch_size."""

    rollouts: int | None = None
    """Rollouts a step may issue; null: 6 x groups x group_size, so that dead data cannot run away."""

    run_rollouts: int | None = None
    """The run ends, saved and validated, with the step that brings its rollouts to this number; null: after
    trainer.total_training_steps alone. Rules are compared at equal rollouts, not at equal steps."""


@dataclass(frozen=True)
class AllocationSettings:
    """The whole namespace `allocation`."""

    selector: dict[str, Any]
    """Name and settings of the rule that chooses which prompts are offered."""

    allocator: dict[str, Any]
    """Name and settings of the rule that decides how many rollouts each group gets, and when."""

    downsampler: dict[str, Any]
    """Name and settings of the rule that chooses which rollouts of a group reach the update."""

    stop: StopSettings = field(default_factory=StopSettings)
    """When a step has enough."""

    outcome: OutcomeRule = field(default_factory=OutcomeRule)
    """How correctness is read from the reward."""

    rounds: str = "barrier"
    """barrier: whole rounds; streaming: a prompt's next request leaves as soon as its own rollouts are scored, and what
    is undecided when the batch is full is aborted."""

    max_rounds: int = 8
    """Rounds a step may take (streaming: requests of one prompt); every rule ends within them, short if need be."""

    seed: int = 0
    """Seed of all of the rules' randomness; with the data seed it makes a run's decisions repeatable."""

    deadline_s: float = 3600.0
    """Seconds after which a session that has not ended is cancelled and counted as failed."""

    val_deadline_s: float = 14400.0
    """As `deadline_s`, for validation, whose prompts are all sent at once: seconds for a whole pass."""

    reward_deadline_s: float = 300.0
    """Seconds for the reward of a group's answers, and of an answer alone: one that takes longer is not scored, and the
    reward worker that it hangs in is replaced."""

    all_zero_steps: int | None = 3
    """Steps in a row without a right answer after which the run warns, with two sample answers; null never warns."""

    record: str | None = None
    """Folder that every outcome is recorded in (Parquet, a file a step, never the text); null records nothing."""

    resume: str = "strict"
    """strict: a saved state that does not fit this run is an error; fresh: start the rules anew beside the weights."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        sizes = {"max_rounds": self.max_rounds} | {
            f"stop.{name}": value
            for name in ("groups", "rollouts", "run_rollouts")
            if (value := getattr(self.stop, name)) is not None
        }
        for name, value in sizes.items():
            attempt(problems, _positive_int, f"allocation.{name}", value)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            problems.append(f"allocation.seed={self.seed!r}: a non-negative whole number is accepted")
        for name in ("deadline_s", "val_deadline_s", "reward_deadline_s"):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not seconds > 0:
                problems.append(f"allocation.{name}={seconds!r}: a positive number of seconds is accepted")
        if self.all_zero_steps is not None:
            attempt(problems, _positive_int, "allocation.all_zero_steps", self.all_zero_steps)
        if self.rounds not in ("barrier", "streaming"):
            problems.append(f"allocation.rounds={self.rounds!r}: accepted are barrier, streaming")
        if self.resume not in ("strict", "fresh"):
            problems.append(f"allocation.resume={self.resume!r}: accepted are strict, fresh")
        if self.record is not None and not isinstance(self.record, str):
            problems.append(f"allocation.record={self.record!r}: null or a folder's path is accepted")
        if not isinstance(self.outcome.key, str) or not self.outcome.key:
            said = "the name of a field of the reward's dictionary is accepted"
            problems.append(f"allocation.outcome.key={self.outcome.key!r}: {said}")
        if self.outcome.threshold is not None and not _is_number(self.outcome.threshold):
            problems.append(f"allocation.outcome.threshold={self.outcome.threshold!r}: null or a number is accepted")
        if problems:
            raise SettingError(*problems)

    @classmethod
    def from_config(cls, config: DictConfig) -> AllocationSettings:
        """Read `config.allocation`; unknown keys are refused by name."""
        if config.get("allocation") is None:
            raise SettingError("the configuration has no `allocation` namespace: start python -m verl_ext.main_ppo")
        raw = OmegaConf.to_container(config.allocation, resolve=True)
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(raw) - known):
            raise SettingError(f"allocation.{unknown[0]}: unknown setting; known are {', '.join(sorted(known))}")
        raw["stop"] = _typed(StopSettings, raw.get("stop"), "allocation.stop")
        raw["outcome"] = _typed(OutcomeRule, raw.get("outcome"), "allocation.outcome")
        return cls(**raw)

    def make_selector(self) -> Any:
        return make_selector(**self.selector)

    def make_allocator(self) -> Any:
        return make_allocator(**self.allocator)

    def make_downsampler(self) -> Any:
        return make_downsampler(**self.downsampler)


def _typed(cls: type, raw: dict[str, Any] | None, name: str) -> Any:
    if not isinstance(raw := {} if raw is None else raw, dict):
        raise SettingError(f"{name}={raw!r}: accepted are {', '.join(cls.__dataclass_fields__)} under it")
    if unknown := sorted(set(raw) - set(cls.__dataclass_fields__)):
        raise SettingError(f"{name}.{unknown[0]}: unknown setting; known are {', '.join(cls.__dataclass_fields__)}")
    return cls(**raw)


def attempt(problems: list[str], check: Callable[..., T], *args: Any) -> T | None:
    """Make a check; what it refuses is noted, so that the checks after it are made too."""
    try:
        return check(*args)
    except SettingError as error:
        problems += error.problems
    except RuleSettingError as error:
        problems.append(str(error))
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name}={value!r}: a whole number of at least 1 is accepted")


def resolve_budget(config: DictConfig, settings: AllocationSettings) -> StepBudget:
    """The budget of a training step from the configuration.

    Raises:
        SettingError: sizes that contradict each other, by name.
    """
    rollout_n = config.actor_rollout_ref.rollout.n
    train_batch_size = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    allocator, downsampler = settings.make_allocator(), settings.make_downsampler()
    group_size = allocator.settings.group_size
    if group_size != rollout_n:
        raise SettingError(
            f"allocation.allocator.group_size={group_size} contradicts actor_rollout_ref.rollout.n={rollout_n}: "
            f"leave group_size at its default (it follows rollout.n) or set both to the same number"
        )
    keep = downsampler.keep
    _positive_int("data.train_batch_size", train_batch_size)
    _positive_int("actor_rollout_ref.actor.ppo_mini_batch_size", actor.ppo_mini_batch_size)
    if train_batch_size % actor.ppo_mini_batch_size:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} does not divide "
            f"data.train_batch_size={train_batch_size}: their quotient is the number of mini-batches a step"
        )
    groups = settings.stop.groups or train_batch_size
    budget = StepBudget(
        prompts=groups,
        group_size=group_size,
        rollouts=settings.stop.rollouts or DEFAULT_BUDGET_FACTOR * groups * group_size,
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
        _positive_int(name, size)
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
