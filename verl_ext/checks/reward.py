"""The reward, tried before Ray starts: it can be imported, and correctness can be read from what it returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl_ext.checks.findings import deadline
from verl_ext.rewards.math_verify import RewardSettingError
from verl_ext.rollout.outcomes import OutcomeError, OutcomeRule, read_outcome
from verl_ext.training.settings import TrainingSettings
from verl_ext.typed_settings import SettingError

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""Seconds after which a reward that is tried on one answer is given up."""


def check_reward(
    config: DictConfig,
    settings: TrainingSettings | None,
    row: dict[str, Any] | None,
    warn: Callable[[str], None] = logger.warning,
) -> str:
    """Import the reward, score an empty answer to the first prompt, and read correctness from what comes back.

    Args:
        settings: None for verl's own trainer, which needs a score alone.
        row: the first row of the training data; None where it could not be read: the reward is imported only.
        warn: called with what does not stop a run, but should be known.

    Returns:
        What was seen.

    Raises:
        SettingError: the reward cannot be imported, does not answer, or gives no outcome; names the keys seen.
    """
    _check_manager(config)
    if config.reward.reward_model.enable:
        return "a reward model scores; it is not tried here"
    from verl.utils.reward_score import default_compute_score

    custom = _custom(config)
    compute_score, name = custom or default_compute_score, _name(config) if custom else "verl's default_compute_score"
    if row is None:
        return f"{name}: can be imported"
    if inspect.iscoroutinefunction(inspect.unwrap(compute_score)):
        return f"{name}: can be imported; it is a coroutine, which is not tried here"
    try:
        with deadline(ANSWER_S, "the reward of an empty answer"):
            result = compute_score(
                data_source=row.get("data_source"),
                solution_str="",
                ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
                extra_info=dict(row.get("extra_info") or {}) | {"truncated": False},
            )
    except NotImplementedError as error:
        raise SettingError(f"the reward of data_source={row.get('data_source')!r} is not known: {error}") from error
    except RewardSettingError as error:
        raise SettingError(str(error)) from error
    except TimeoutError as error:
        raise SettingError(f"reward.custom_reward_function: {error}") from error
    except Exception as error:
        said = f"{name}: raises {error!r} on an empty answer, which counts as not scored"
        warn(f"{said}; where it is not the answer's fault, no answer to such a prompt is scored")
        return said
    if settings is not None:
        try:
            _check_outcome(result, settings.outcome)
        except OutcomeError as error:
            raise SettingError(f"the reward gives no outcome: {error}") from error
    return f"{name}: an empty answer scores {result!r}"


def _check_manager(config: DictConfig) -> None:
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    manager = config.reward.reward_manager
    try:
        resolve_reward_manager_cls(config)
    except Exception as error:
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        raise SettingError(
            f"reward.reward_manager.name={manager.name}: {' '.join(str(error).split())}; "
            f"verl knows {', '.join(sorted(REWARD_MANAGER))}"
        ) from error


def _custom(config: DictConfig) -> Any:
    from verl.trainer.ppo.reward import get_custom_reward_fn

    try:
        return get_custom_reward_fn(config)
    except Exception as error:
        said = " ".join(str(error.__cause__ or error).split())
        function = config.reward.custom_reward_function
        raise SettingError(
            f"reward.custom_reward_function.path={function.path}, reward.custom_reward_function.name={function.name}: "
            f"cannot be imported: {said}"
        ) from error


def _name(config: DictConfig) -> str:
    function = config.reward.custom_reward_function
    return f"{function.path} {function.name}"


def _check_outcome(result: Any, rule: OutcomeRule) -> None:
    if isinstance(result, dict):
        if "score" not in result:
            raise OutcomeError(f"the reward's dictionary has no 'score': keys seen {sorted(result)}")
        read_outcome(result["score"], result, rule)
    else:
        # verl's reward managers file a bare number under 'acc'.
        read_outcome(result, {"acc": result}, rule)
