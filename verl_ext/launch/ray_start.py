"""Start or join Ray as verl does, without printing the runtime environment."""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf

from verl_ext.launch.join_cluster import job_variables, join_cluster

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
        ClusterError: a setting that cannot be on the cluster that is joined.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return
    if join_cluster(config) is None:
        bound_task_events()
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
    ray.init(**OmegaConf.to_container(OmegaConf.create({**ray_init, "runtime_env": runtime_env}), resolve=True))
