"""The reward, tried before Ray starts: it can be imported, and correctness can be read from what it returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from verl_ext.checks.findings import deadline
from verl_ext.rollout.outcomes import OutcomeError, OutcomeRule, Reading, read_outcome
from verl_ext.training.training_settings import TrainingSettings
from verl_ext.typed_settings import SettingError

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""Seconds after which a reward that is tried on one answer is given up."""

WRONG = "#### -987654321\n\\boxed{-987654321}\nAnswer: -987654321"
"""A wrong answer, in the forms that rewards look for."""


def check_reward(
    config: DictConfig,
    settings: TrainingSettings | None,
    rows: Sequence[dict[str, Any]],
    warn: Callable[[str], None] = logger.warning,
) -> str:
    """Import the reward, score an empty and a wrong answer to each prompt, and read correctness from what comes back.

    Args:
        settings: None for verl's own trainer, which needs a score alone.
        rows: one of each data source, of training and validation; none where they could not be read: the reward is
            imported only.
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
    if not rows:
        return f"{name}: can be imported"
    if inspect.iscoroutinefunction(inspect.unwrap(compute_score)):
        return f"{name}: can be imported; it is a coroutine, which is not tried here"
    said = [_tried(config, settings, compute_score, name, row, warn) for row in rows]
    return said[0] + (f"; tried on {len(said)} data sources" if len(said) > 1 else "")


def _tried(
    config: DictConfig,
    settings: TrainingSettings | None,
    compute_score: Callable[..., Any],
    name: str,
    row: dict[str, Any],
    warn: Callable[[str], None],
) -> str:
    """What the reward says of an empty answer and of a wrong one to a prompt."""
    source, said = row.get("data_source"), ""
    for what, answer in (("an empty answer", ""), ("a wrong answer", WRONG)):
        where = f"{what} to a prompt of data_source={source!r}"
        try:
            with deadline(ANSWER_S, f"the reward of {where}"):
                result = compute_score(
                    data_source=source,
                    solution_str=answer,
                    ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
                    extra_info=dict(row.get("extra_info") or {}) | {"truncated": False, "validate": False},
                )
        except NotImplementedError as error:
            raise SettingError(f"the reward of data_source={source!r} is not known: {error}") from error
        except SettingError:
            raise
        except TimeoutError as error:
            raise SettingError(f"reward.custom_reward_function: {error}") from error
        except Exception as error:
            raised = f"{name}: raises {error!r} on {where}, which counts as not scored"
            warn(f"{raised}; where it is not the answer's fault, no answer to such a prompt is scored")
            said = said or raised
            continue
        if settings is not None:
            try:
                reading = _read_outcome(result, settings.outcome)
            except OutcomeError as error:
                raise SettingError(f"the reward gives no outcome of {where}: {error}") from error
            if reading.said:
                warn(f"{name}: {where}: {reading.said}")
            if reading.correct:
                warn(f"{name}: {where} is right: {result!r:.200}")
        said = said or f"{name}: {what} scores {result!r}"
    return said


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


def _read_outcome(result: Any, rule: OutcomeRule) -> Reading:
    if isinstance(result, dict):
        if "score" not in result:
            raise OutcomeError(f"the reward's dictionary has no 'score': keys seen {sorted(map(str, result))}")
        return read_outcome(result["score"], result, rule)
    # verl's reward managers file a bare number under 'acc'.
    return read_outcome(result, {"acc": result}, rule)
