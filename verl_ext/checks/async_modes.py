# SPDX-License-Identifier: Apache-2.0
"""What verl's asynchronous trainer modes need. verl asserts it once Ray has started, or hangs.

Nothing of verl is imported here.
"""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks.numbers import PARALLEL
from verl_ext.cpu.activate import PLATFORM_NAME
from verl_ext.training.training_settings import VERLS_OWN
from verl_ext.typed_settings import is_number, is_whole

LEAST_CALLS, CONTROL_CALLS = 1000, 16
"""Calls that verl lets a server answer at once are the first number, or max_num_seqs and the second, if more."""

_ROLLOUT = "actor_rollout_ref.rollout"


def async_problems(config: DictConfig) -> list[str]:
    """Settings that the trainer mode cannot run with, verl's own or one of ours, by name.

    The numbers of `number_problems` have to be right.
    """
    mode = config.trainer.v1.trainer_mode
    problems = _separate_problems(config) if mode.endswith("separate_async") else _needs_shared_devices(config)
    # Our own client keeps the room in a server that control calls need.
    if problems or mode not in VERLS_OWN or mode == "sync":
        return problems
    warmup = config.trainer.v1[mode].num_warmup_batches
    if not is_number(warmup) or warmup < 0:
        return [f"trainer.v1.{mode}.num_warmup_batches={warmup!r}: a number of at least 0 is accepted"]
    return _too_many_in_flight(config, mode, warmup)


def _needs_shared_devices(config: DictConfig) -> list[str]:
    if config.actor_rollout_ref.get("hybrid_engine", True):
        return []
    return [
        f"actor_rollout_ref.hybrid_engine=False with trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: only in "
        "separate_async have the engines devices of their own; accepted is True"
    ]


def _separate_problems(config: DictConfig) -> list[str]:
    rollout, problems = config.actor_rollout_ref.rollout, []
    for name in ("nnodes", "n_gpus_per_node"):
        if not is_whole(rollout[name], 1):
            problems.append(
                f"{_ROLLOUT}.{name}={rollout[name]!r}: in separate_async the engines have nodes of their own, a whole "
                "number of at least 1 is accepted"
            )
    if not problems and (rollout.nnodes * rollout.n_gpus_per_node) % (replica := replica_ranks(config)):
        problems.append(
            f"{_ROLLOUT}.nnodes={rollout.nnodes} x {_ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}: a multiple of "
            f"the {replica} ranks of an engine ({' x '.join(PARALLEL)}) is accepted"
        )
    batch, mini_batch = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    syncs = config.trainer.v1.separate_async.parameter_sync_step
    if not is_whole(syncs, 1) or batch != syncs * mini_batch:
        problems.append(
            f"trainer.v1.separate_async.parameter_sync_step={syncs!r}: the number of mini-batches is accepted, "
            f"data.train_batch_size={batch} / actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}"
        )
    backend, on_cpu = rollout.checkpoint_engine.backend, config.trainer.device == PLATFORM_NAME
    if backend == "naive" or (backend == "gloo") != on_cpu:
        accepted = "gloo" if on_cpu else "nccl, nixl and others of verl's"
        problems.append(
            f"{_ROLLOUT}.checkpoint_engine.backend={backend}: weights travel to engines apart from the trainer; on "
            f"trainer.device={config.trainer.device} accepted is {accepted}"
        )
    return problems


def replica_ranks(config: DictConfig) -> int:
    """Ranks of an engine."""
    return math.prod(OmegaConf.select(config, name) for name in PARALLEL)


def _too_many_in_flight(config: DictConfig, mode: str, warmup: float) -> list[str]:
    """verl's client sends all that it has. Requests that wait for new weights keep their places in a server, and where
    they keep all of them, the call that would let them go on is never heard."""
    rollout, separate = config.actor_rollout_ref.rollout, mode == "separate_async"
    pool = rollout if separate else config.trainer
    replicas = pool.nnodes * pool.n_gpus_per_node // replica_ranks(config)
    sent = math.ceil((1 + warmup) * config.data.train_batch_size * rollout.n / replicas)
    room = max(LEAST_CALLS, rollout.max_num_seqs + CONTROL_CALLS) - CONTROL_CALLS
    if sent <= room:
        return []
    return [
        f"trainer.v1.{mode}.num_warmup_batches={warmup}: (1 + {warmup}) x data.train_batch_size="
        f"{config.data.train_batch_size} x {_ROLLOUT}.n={rollout.n} rollouts in flight are {sent} for each of "
        f"{replicas} engines, and more than {room} lock it up; accepted: fewer rollouts, more engines, or "
        f"{_ROLLOUT}.max_num_seqs of at least {sent}"
    ]
