"""Numbers of verl's own settings that verl looks at late or not at all: a wrong one is named before Ray starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.typed_settings import is_number, is_whole


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: is_whole(value, least)), f"a whole number of at least {least}"


_POSITIVE = _whole(1)
_OR_NEVER = (_whole(-1)[0], "a whole number of at least 1, or -1 for never")
_ABOVE_ZERO = (lambda value: is_number(value) and value > 0, "a number above 0")
_AT_LEAST_ZERO = (lambda value: is_number(value) and value >= 0, "a number of at least 0")
_WEIGHT = (lambda value: is_number(value) and 0 <= value <= 1, "a number in [0, 1]")
_OR_ALL = (_whole(-1)[0], "a whole number of at least 1, or -1 for all")
_OR_NULL = (lambda value: value is None or _POSITIVE[0](value), f"null, or {_POSITIVE[1]}")
_SHARE = (lambda value: is_number(value) and 0 < value <= 1, "a number in (0, 1]")

PARALLEL = tuple(
    f"actor_rollout_ref.rollout.{name}_size"
    for name in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
)
"""Their product is the number of ranks of a replica of the engine."""

NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm.gamma": _WEIGHT,
    "algorithm.lam": _WEIGHT,
    "data.train_batch_size": _POSITIVE,
    "data.val_batch_size": _OR_NULL,
    "data.train_max_samples": _OR_ALL,
    "data.val_max_samples": _OR_ALL,
    "data.dataloader_num_workers": _whole(0),
    "data.max_prompt_length": _POSITIVE,
    "data.max_response_length": _POSITIVE,
    "actor_rollout_ref.rollout.n": _POSITIVE,
    "actor_rollout_ref.rollout.temperature": _ABOVE_ZERO,
    "actor_rollout_ref.rollout.top_p": _SHARE,
    "actor_rollout_ref.rollout.top_k": _OR_ALL,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _SHARE,
    **{name: _POSITIVE for name in PARALLEL},
    "actor_rollout_ref.rollout.max_num_seqs": _POSITIVE,
    "actor_rollout_ref.rollout.agent.num_workers": _POSITIVE,
    "actor_rollout_ref.rollout.val_kwargs.n": _POSITIVE,
    "actor_rollout_ref.rollout.val_kwargs.temperature": _AT_LEAST_ZERO,
    "actor_rollout_ref.rollout.val_kwargs.top_p": _SHARE,
    "actor_rollout_ref.actor.clip_ratio": _AT_LEAST_ZERO,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _POSITIVE,
    "actor_rollout_ref.actor.ppo_epochs": _POSITIVE,
    "actor_rollout_ref.actor.optim.lr": _AT_LEAST_ZERO,
    "reward.num_workers": _POSITIVE,
    "trainer.n_gpus_per_node": _POSITIVE,
    "trainer.nnodes": _POSITIVE,
    "trainer.total_epochs": _POSITIVE,
    "trainer.total_training_steps": _OR_NULL,
    "trainer.save_freq": _OR_NEVER,
    "trainer.test_freq": _OR_NEVER,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": _POSITIVE,
    "transfer_queue.backend.SimpleStorage.total_storage_size": _OR_NULL,
}
"""Setting -> (whether a value is accepted, what is)."""


def number_problems(config: DictConfig) -> list[str]:
    """Every number that is not accepted, and lengths and ranks that contradict each other."""
    values = {name: OmegaConf.select(config, name) for name in NUMBERS}
    wrong = {name: said for name, (fits, said) in NUMBERS.items() if not fits(values[name])}
    problems = [f"{name}={values[name]!r}: {said} is accepted" for name, said in wrong.items()]
    if problems:
        return problems
    ranks = values["trainer.n_gpus_per_node"] * values["trainer.nnodes"]
    replica = math.prod(values[name] for name in PARALLEL)
    if ranks % replica:
        sizes = " x ".join(f"{name}={values[name]}" for name in PARALLEL if values[name] > 1)
        problems.append(
            f"{sizes} does not divide the {ranks} ranks "
            f"(trainer.n_gpus_per_node={values['trainer.n_gpus_per_node']} x trainer.nnodes={values['trainer.nnodes']})"
        )
    longest = OmegaConf.select(config, "actor_rollout_ref.rollout.max_model_len")
    needed = values["data.max_prompt_length"] + values["data.max_response_length"]
    if longest is not None and (not is_whole(longest) or longest < needed):
        problems.append(
            f"actor_rollout_ref.rollout.max_model_len={longest!r}: null or at least {needed} is accepted, "
            f"data.max_prompt_length={values['data.max_prompt_length']} and "
            f"data.max_response_length={values['data.max_response_length']} together"
        )
    return problems
