# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's configuration that a run does not read: one that is set is named before the start.

verl 0.9.1 composes them for its old trainer, its asynchronous modes and older names, and says nothing where they are
set. docs/configuration.md lists them.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from .findings import Problems, Seen

MOVED: dict[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model, reward.reward_manager and reward.num_workers",
    "sandbox_fusion": "reward.sandbox_fusion",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.forward_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
}
"""Key, or all keys under it -> the name that is read. One that is set is refused."""

WITHOUT_EFFECT: dict[str, str] = {
    "actor_rollout_ref.actor.freeze_vision_tower": "no engine reads it",
    "actor_rollout_ref.actor.use_prefix_grouper": "verl's old trainer alone reads it",
    "actor_rollout_ref.nccl_timeout": "no worker reads it",
    "actor_rollout_ref.rollout.do_sample": "temperature decides",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "actor_rollout_ref.rollout.val_kwargs.temperature decides",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "no engine reads it",
    "actor_rollout_ref.rollout.multi_turn.enable": "actor_rollout_ref.rollout.agent.default_agent_loop decides",
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": "no agent loop reads it",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "no agent loop reads it",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "no agent loop reads it",
    "actor_rollout_ref.rollout.over_sample_rate": "the allocator decides how many rollouts are made",
    "algorithm.pf_ppo": "verl's old trainer alone reads it",
    "algorithm.use_pf_ppo": "verl's old trainer alone reads it",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu decides",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu decides",
    "data.return_raw_input_ids": "no data set reads it",
    "data.reward_fn_key": "the column data_source is what the reward is given",
    "reward.reward_model.rollout.multi_stage_wake_up": "no engine reads it",
    "skip.async_rollout": "verl's asynchronous trainers alone read it",
    "skip.rollout": "verl's old trainer alone reads it",
    "trainer.balance_batch": "rows are always balanced over the ranks",
    "trainer.esi_redundant_time": "verl's old trainer alone reads it",
    "trainer.ray_wait_register_center_timeout": "nothing reads it in verl's V1 trainer",
    "trainer.v1.colocate_async": "trainer.v1.trainer_mode=colocate_async alone reads it",
    "trainer.v1.separate_async": "trainer.v1.trainer_mode=separate_async alone reads it",
}
"""Key, or all keys under it -> why it has no effect. One that is set is warned of."""


_MODES = ("trainer.v1.colocate_async", "trainer.v1.separate_async")


def check_unread(config: DictConfig) -> Seen:
    """Which keys are set that nothing reads.

    Raises:
        Problems: those that are read by another name, all of them.
    """
    from verl_ext.configuration import verl_defaults

    defaults = verl_defaults()
    moved, idle = (_set(config, defaults, table) for table in (MOVED, WITHOUT_EFFECT))
    mode = config.trainer.v1.trainer_mode
    idle = [found for found in idle if found[0] not in _MODES or not mode.endswith(found[0].rpartition(".")[2])]
    if moved:
        raise Problems(
            *(f"{key}={value!r}: verl 0.9.1 does not read it; accepted is {MOVED[top]}" for top, key, value in moved)
        )
    said = tuple(f"{key}={value!r} has no effect: {WITHOUT_EFFECT[top]}" for top, key, value in idle)
    return Seen("no key is set that verl reads by another name", warnings=said)


def _set(config: DictConfig, defaults: DictConfig, table: dict[str, str]) -> list[tuple[str, str, Any]]:
    """(key of the table, key, value) of every leaf that is not as verl has it."""
    found = []
    for top in table:
        before = dict(leaves(OmegaConf.select(defaults, top), top))
        found += [
            (top, key, value)
            for key, value in leaves(OmegaConf.select(config, top), top)
            # What follows another key, where it is not set, is that key's.
            if value != before.get(key) and not OmegaConf.is_interpolation(*_place(defaults, key))
        ]
    return found


def _place(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """The section that a key stands in, and its name there."""
    parent, _, name = key.rpartition(".")
    return (OmegaConf.select(config, parent) if parent else config), name


def leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """Keys and values under a section, or of a single key."""
    if isinstance(value, DictConfig):
        return [leaf for key in value for leaf in leaves(value.get(key), f"{name}.{key}")]
    return [(name, value)]
