"""Start or join Ray as verl does, without printing the runtime environment."""

from __future__ import annotations

import os
import re

from omegaconf import DictConfig, OmegaConf

from verl_ext.launch.join import wait_for_head
from verl_ext.launch.join_cluster import ClusterError, job_variables, join_cluster

_HEAD_WITHIN_S = 30.0

MOST_TASKS = "RAY_task_events_max_num_task_in_gcs"
"""Tasks whose events Ray's gcs_server keeps, for `ray list tasks` alone: about 3 KiB each, 100,000 by default. It is
read where the head is started."""


def bound_task_events() -> None:
    """Keep the memory of a gcs_server that this process starts from growing with every rollout; the user's own value
    comes first."""
    os.environ.setdefault(MOST_TASKS, "1000")


def start_ray(config: DictConfig) -> None:
    """The first half of verl 0.9.1's `run_ppo`, which then finds Ray started.

    verl prints the whole runtime environment, credentials in `env_vars` (WANDB_API_KEY, HF_TOKEN) included, before it
    starts Ray. Does nothing where Ray is started already.

    Raises:
        ClusterError: Ray does not come up, or a setting cannot be on the cluster that is joined.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return
    address = join_cluster(config)
    if address is None:
        bound_task_events()
    elif re.fullmatch(r"[^/]+:\d+", address):
        # ray.init holds on to a head that is not there for a minute and more.
        try:
            wait_for_head(address, _HEAD_WITHIN_S)
        except TimeoutError as error:
            raise ClusterError(_not_up(address, error)) from error
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    if rollout.full_determinism or (reward_model.enable and reward_model.rollout.full_determinism):
        os.environ.update(VERL_FULL_DETERMINISM="1", VLLM_BATCH_INVARIANT="1", PYTHONHASHSEED=str(rollout.seed))
    loggers = config.trainer.get("logger") or []
    if "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers):
        os.environ["VERL_RL_INSIGHT_ENABLE"] = "1"
    default = get_ppo_ray_runtime_env(config)
    # The V1 trainer always uses it: its task runner switches it on in the configuration.
    default.setdefault("env_vars", {})["TRANSFER_QUEUE_ENABLE"] = "1"
    ray_init = config.ray_kwargs.get("ray_init") or {}
    runtime_env = OmegaConf.merge(default, ray_init.get("runtime_env") or {})
    # Ray refuses a variable that the job's own runtime environment has too, whatever its value: the user's is kept.
    for name in job_variables():
        runtime_env.env_vars.pop(name, None)
    arguments = OmegaConf.to_container(OmegaConf.create({**ray_init, "runtime_env": runtime_env}), resolve=True)
    try:
        ray.init(**arguments)
    except Exception as error:  # of many classes: ConnectionError, RuntimeError, ValueError, subprocess's and gRPC's
        raise ClusterError(_not_up(address, error)) from error


def _not_up(address: str | None, error: Exception) -> str:
    """A Ray that does not come up, and what can be done, in one line."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if address is None:
        return (
            f"Ray does not start on this machine: {said}; it needs memory, some space under /tmp, and no other Ray on "
            "its ports (`ray stop` ends one of yours); its logs are in /tmp/ray/session_latest/logs"
        )
    return (
        f"Ray at {address} is not reached: {said}; start it there (ray start --head), give another address "
        "(RAY_ADDRESS), or have Ray started here: ++ray_kwargs.ray_init.address=local"
    )
