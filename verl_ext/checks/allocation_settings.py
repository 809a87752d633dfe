"""Checks of the `allocation` namespace against verl's own settings, before Ray starts and without importing verl.

An error names the setting, the value seen and what is accepted.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import Rules, make_rules, normalised_over
from verl_ext.checks.async_modes import async_problems
from verl_ext.checks.numbers import number_problems
from verl_ext.rollout.engine_abort import ENGINES
from verl_ext.training.batch import StepBudget
from verl_ext.training.training_settings import (
    COLOCATE_ASYNC,
    MODE,
    MODES,
    SEPARATE_ASYNC,
    VERLS_OWN,
    TrainingSettings,
    resolve_budget,
)
from verl_ext.typed_settings import SettingError, attempt


def check_config(config: DictConfig) -> tuple[TrainingSettings, StepBudget]:
    """Contradictions between `allocation` and verl's settings, by name.

    Raises:
        SettingError: all that are independent of each other, not the first only.
    """
    mode = config.trainer.v1.trainer_mode
    if not config.trainer.use_v1:
        raise SettingError("trainer.use_v1=False: allocation works in verl's V1 trainer only")
    if mode not in MODES:
        raise SettingError(
            f"trainer.v1.trainer_mode={mode!r}: accepted is {', '.join(MODES)}, or verl's own without allocation: "
            + ", ".join(VERLS_OWN)
        )
    problems = number_problems(config)
    if numbers_fit := not problems:
        problems += async_problems(config)
    budget = None
    settings = attempt(problems, TrainingSettings.from_config, config)
    rules = attempt(problems, _rules, config, settings) if config.get("allocation") else None
    if settings is not None and rules is not None:
        attempt(problems, _check_rounds, config, settings)
        attempt(problems, _check_mode, config, settings)
        attempt(problems, _check_rules, config, rules)
        if numbers_fit:
            budget = attempt(problems, resolve_budget, config, settings)
    problems += _unsupported(config)
    if budget is not None:
        attempt(problems, _check_storage, config, settings, budget)
    if problems:
        raise SettingError(*problems)
    return settings, budget


def _rules(config: DictConfig, settings: TrainingSettings | None) -> Rules:
    """The rules of the settings; where those cannot be, what is wrong with the rules is found all the same."""
    if settings is not None:
        return settings.rules
    raw = OmegaConf.to_container(config.allocation, resolve=True)
    return make_rules(**{part: raw[part] for part in Rules._fields if isinstance(raw.get(part), dict)})


def _check_rounds(config: DictConfig, settings: TrainingSettings) -> None:
    engine = config.actor_rollout_ref.rollout.name
    if settings.rounds == "streaming" and engine not in ENGINES:
        raise SettingError(
            f"allocation.rounds=streaming with actor_rollout_ref.rollout.name={engine}: single requests can be "
            f"aborted in {' and '.join(ENGINES)} only; accepted are these, or allocation.rounds=barrier"
        )
    if settings.rounds == "streaming" and OmegaConf.select(
        config, "actor_rollout_ref.rollout.disaggregation.enabled"
    ):
        raise SettingError(
            "allocation.rounds=streaming with actor_rollout_ref.rollout.disaggregation.enabled=True: a request "
            "that one server prefills and another decodes cannot be aborted; accepted is False, or "
            "allocation.rounds=barrier"
        )


def _check_mode(config: DictConfig, settings: TrainingSettings) -> None:
    """What goes on over the update needs a mode in which it can, and a correction for what is older."""
    mode, carry, lag = config.trainer.v1.trainer_mode, settings.async_.carry, settings.async_.max_lag
    if mode == MODE and carry:
        raise SettingError(
            f"allocation.async.carry={carry} with trainer.v1.trainer_mode={MODE}, whose engines sleep during the "
            f"update; accepted is 0, or trainer.v1.trainer_mode={COLOCATE_ASYNC} or {SEPARATE_ASYNC}"
        )
    if mode == COLOCATE_ASYNC and not carry:
        raise SettingError(
            f"allocation.async.carry=0 with trainer.v1.trainer_mode={mode}: nothing would go on over the update; "
            f"accepted is a number above 0, or trainer.v1.trainer_mode={MODE}"
        )
    if mode == SEPARATE_ASYNC and config.actor_rollout_ref.get("hybrid_engine", True):
        raise SettingError(
            f"actor_rollout_ref.hybrid_engine=True with trainer.v1.trainer_mode={mode}: a group keeps its server, and "
            "engines on the trainer's devices come and go; accepted is False"
        )
    correction = config.algorithm.get("rollout_correction") or {}
    corrected = correction.get("rollout_is") or correction.get("bypass_mode")
    if mode != MODE and lag > 1 and not (corrected and config.actor_rollout_ref.rollout.calculate_log_probs):
        raise SettingError(
            f"allocation.async.max_lag={lag} without a correction: rollouts of weights {lag} versions old would be "
            "trained on as if they were new; accepted are 1, or algorithm.rollout_correction.rollout_is=token (or "
            "sequence, or bypass_mode=True) with actor_rollout_ref.rollout.calculate_log_probs=True"
        )


_UNSUPPORTED = {
    "actor_rollout_ref.rollout.full_determinism": "every request of a server is sampled with the same seed, so that "
    "all rollouts of a group are one and the same; accepted is False",
    "actor_rollout_ref.rollout.router_config_path": "a group is given its server before it has tokens to route by; "
    "accepted is null",
    **dict.fromkeys(
        ("actor_rollout_ref.actor.shuffle", "critic.shuffle"),
        "verl shuffles the rows after padding was spread over the mini-batches, so that one may be padding alone; "
        "accepted is False",
    ),
    "algorithm.filter_groups.enable": "filtering is the allocator's work here; choose "
    "allocation/allocator=dynamic_sampling",
    "distillation.enabled": "on-policy distillation is not supported with allocation",
    "skip.rollout_tq.enable": "a step's rollouts cannot be replayed; accepted is False",
    "trainer.default_hdfs_dir": "verl copies the weights there, but neither the state of the rules nor that of the "
    "data, and resumes from none of it; accepted is null, with trainer.default_local_dir in a folder that lasts",
    "trainer.v1.sampler.custom_sampler.path": "allocation brings its own sampler; accepted is null",
    "trainer.v1.sampler.sync_refill_failed_groups": "the allocator replaces what failed; accepted is False",
}
"""Setting of verl's that has to be false or null with rounds within a step -> why."""


def _unsupported(config: DictConfig) -> list[str]:
    """What verl can do, but not together with rounds within a step."""
    given = {name: OmegaConf.select(config, name) for name in _UNSUPPORTED}
    problems = [f"{name}={value}: {_UNSUPPORTED[name]}" for name, value in given.items() if value]
    engine, strategy = config.get("model_engine", "dp"), config.actor_rollout_ref.actor.strategy
    if engine != "dp" and ("fsdp" in strategy or "fsdp_config" in config.actor_rollout_ref.actor):
        problems.append(
            f"model_engine={engine} with FSDP's settings under actor_rollout_ref.actor (strategy={strategy}): the "
            "recipes and hardware=gpu_... are for FSDP; accepted is model_engine=dp, or hardware=gpu without a recipe"
        )
    reward_model = config.reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        problems.append(
            "reward.reward_model.enable=True without reward.reward_model.enable_resource_pool: a colocated reward "
            "model scores after sampling, so no rule would see an outcome; use a rule-based reward or a resource pool"
        )
    if config.data.get("gen_batch_size") not in (None, config.data.train_batch_size):
        problems.append(
            f"data.gen_batch_size={config.data.gen_batch_size}: how many prompts are sampled at once is the "
            "allocator's work here; accepted is null"
        )
    if config.algorithm.adv_estimator in ("remax",):
        problems.append(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}: needs a greedy rollout a prompt, "
            f"which no rule issues; accepted are grpo, rloo, reinforce_plus_plus, gae and their kin"
        )
    return problems


def warnings_of(config: DictConfig) -> tuple[str, ...]:
    """What does not stop a run, but should be known."""
    engine = config.actor_rollout_ref.rollout.name
    if engine in ENGINES:
        return ()
    return (
        f"actor_rollout_ref.rollout.name={engine}: a session that is over allocation.deadline_s counts as failed, but "
        f"only {' and '.join(ENGINES)} are told to end it: the engine goes on generating it beside the step's other "
        "rollouts",
    )


def _check_storage(config: DictConfig, settings: TrainingSettings, budget: StepBudget) -> None:
    capacity = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.total_storage_size")
    if capacity is None or OmegaConf.select(config, "transfer_queue.backend.storage_backend") != "SimpleStorage":
        return
    # Padding rows and a validation pass share the storage with the step's rollouts.
    waiting = settings.rules.allocator.most_waiting(budget.prompts)
    if settings.async_.carry:
        waiting += settings.async_.max_lag * budget.prompts * settings.rules.allocator.largest_group
    needed = budget.rollouts + waiting + budget.ranks * budget.mini_batches
    if needed > capacity:
        raise SettingError(
            f"transfer_queue.backend.SimpleStorage.total_storage_size={capacity} is too small for up to {needed} "
            f"rows (allocation.stop.rollouts={budget.rollouts}, {waiting} waiting between steps, and padding)"
        )


def _check_rules(config: DictConfig, rules: Rules) -> None:
    """What a rule needs of verl's algorithm."""
    _, allocator, downsampler = rules
    algorithm = config.algorithm
    if normalised_over(allocator, downsampler) == "group":
        if algorithm.adv_estimator != "grpo":
            raise SettingError(
                f"normalise_over=group with algorithm.adv_estimator={algorithm.adv_estimator}: "
                f"the group's mean and deviation enter GRPO's advantage; accepted is grpo, or normalise_over=selected"
            )
        if algorithm.use_kl_in_reward:
            raise SettingError(
                "normalise_over=group with algorithm.use_kl_in_reward=True: the KL penalty of rows that never reach "
                "the update is not known; use actor_rollout_ref.actor.use_kl_loss or normalise_over=selected"
            )
    if getattr(allocator.settings, "off_policy", "recompute") == "importance":
        if not algorithm.rollout_correction or not algorithm.rollout_correction.get("rollout_is"):
            raise SettingError(
                "allocation.allocator.off_policy=importance needs verl's correction: set "
                "algorithm.rollout_correction.rollout_is=token (or sequence)"
            )
        if not config.actor_rollout_ref.rollout.calculate_log_probs:
            raise SettingError(
                "allocation.allocator.off_policy=importance needs the rollouts' own log-probs: set "
                "actor_rollout_ref.rollout.calculate_log_probs=True"
            )
