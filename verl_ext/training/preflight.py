"""Checks of data and reward that need no cluster: first rows are read, an empty answer is scored, before Ray starts."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

from omegaconf import DictConfig, ListConfig

from verl_ext.training.outcomes import OutcomeError, OutcomeRule, read_outcome
from verl_ext.training.settings import AllocationSettings, SettingError

logger = logging.getLogger(__name__)


def first_row(config: DictConfig) -> dict[str, Any]:
    """The first training row.

    Raises:
        SettingError: a file is missing or unreadable, too few rows, or a column that verl or the reward needs is
            absent.
    """
    import pyarrow.parquet as pq

    files = config.data.train_files
    files = list(files) if isinstance(files, list | ListConfig) else [files]
    total, row = 0, None
    for path in files:
        path = os.path.expanduser(str(path))
        if not path.endswith(".parquet"):
            logger.info("data.train_files: %s is not Parquet; its rows are checked when verl loads them", path)
            return {}
        if "://" in path:
            logger.info("data.train_files: %s is remote; its rows are checked when verl loads them", path)
            return {}
        if not os.path.exists(path):
            raise SettingError(f"data.train_files: {path} does not exist")
        table = pq.ParquetFile(path)
        needed = (config.data.get("prompt_key", "prompt"), "reward_model")
        if missing := [name for name in needed if name not in table.schema_arrow.names]:
            raise SettingError(
                f"data.train_files: {path} has no column {missing[0]!r}; its columns are {table.schema_arrow.names}"
            )
        total += table.metadata.num_rows
        if row is None and table.metadata.num_rows:
            row = next(table.iter_batches(batch_size=1)).to_pylist()[0]
    if total < config.data.train_batch_size:
        raise SettingError(
            f"data.train_files holds {total} prompts, fewer than data.train_batch_size={config.data.train_batch_size}"
        )
    return row


def check_reward(config: DictConfig, settings: AllocationSettings, row: dict[str, Any]) -> None:
    """Score an empty answer to the first prompt and see that correctness can be read from what comes back.

    Raises:
        SettingError: the reward gives no outcome; names the keys seen.
    """
    if config.reward.reward_model.enable or not row:
        return
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    compute_score = get_custom_reward_fn(config) or default_compute_score
    if inspect.iscoroutinefunction(inspect.unwrap(compute_score)):
        return
    try:
        result = compute_score(
            data_source=row.get("data_source"),
            solution_str="",
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=dict(row.get("extra_info") or {}),
        )
    except NotImplementedError as error:
        raise SettingError(f"the reward of data_source={row.get('data_source')!r} is not known: {error}") from error
    except Exception as error:
        logger.warning("the reward raised %r on an empty answer; such answers will be counted as not scored", error)
        return
    try:
        _check_outcome(result, settings.outcome)
    except OutcomeError as error:
        raise SettingError(f"the reward gives no outcome: {error}") from error


def _check_outcome(result: Any, rule: OutcomeRule) -> None:
    if isinstance(result, dict):
        if "score" not in result:
            raise OutcomeError(f"the reward's dictionary has no 'score': keys seen {sorted(result)}")
        read_outcome(result["score"], result, rule)
    else:
        # verl's reward managers file a bare number under 'acc'.
        read_outcome(result, {"acc": result}, rule)
