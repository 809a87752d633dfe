"""The Ray actor that runs the trainer: verl's own task runner with the mode `allocated` registered and our manager."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import TaskRunnerV1

from verl_ext.masking import masked
from verl_ext.rollout.logs import show_own_logs
from verl_ext.rollout.worker import AllocatedAgentLoopManager
from verl_ext.training import trainer_async  # noqa: F401  (registers the trainer modes in this process)

_VerlTaskRunner = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__

_MARK = "_verl_ext_masks"
MANAGER = f"{AllocatedAgentLoopManager.__module__}.{AllocatedAgentLoopManager.__name__}"


def hide_credentials() -> None:
    """verl logs the whole configuration, credentials included, to the driver's output and to W&B and its like; here
    they are masked.

    The task runner prints it by the first, and gives it to every logging service by the second.

    Replaces: verl.trainer.main_ppo.pprint (verl 0.9.1)
    Replaces: verl.trainer.ppo.v1.trainer_base.Tracking (verl 0.9.1)
    """
    from verl.trainer import main_ppo
    from verl.trainer.ppo.v1 import trainer_base

    printed, tracking = main_ppo.pprint, trainer_base.Tracking
    if hasattr(tracking, _MARK):
        return

    def pprint(value: Any, *args: Any, **kwargs: Any) -> None:
        printed(masked(value), *args, **kwargs)

    class Tracking(tracking):
        def __init__(
            self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
        ) -> None:
            shown, proxy = masked(config), (config or {}).get("trainer", {}).get("wandb_proxy")
            if proxy and shown["trainer"]["wandb_proxy"] != proxy:
                # verl would have W&B use the masked one, and the whole one would be uploaded with the configuration.
                shown["trainer"]["wandb_proxy"] = None
                _set_wandb_proxy(default_backend, proxy)
            super().__init__(project_name, experiment_name, default_backend, shown)

    setattr(Tracking, _MARK, True)
    main_ppo.pprint, trainer_base.Tracking = pprint, Tracking


def _set_wandb_proxy(loggers: str | Sequence[str], proxy: str) -> None:
    """Where W&B (to verl also "tracking") is one of the loggers, have it use the proxy."""
    if {"wandb", "tracking"} & ({loggers} if isinstance(loggers, str) else set(loggers)):
        import wandb

        wandb.setup(settings=wandb.Settings(https_proxy=proxy))


def log_with_flush() -> None:
    """Take the argument `flush` in a call of a logger. verl passes it where separate_async starts with
    hybrid_engine=False, and the run ends with a TypeError.

    Replaces: verl.trainer.ppo.v1.trainer_separate_async.logger (verl 0.9.1)
    """
    from verl.trainer.ppo.v1 import trainer_separate_async

    class WithFlush(logging.LoggerAdapter):
        def process(self, msg: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            kwargs.pop("flush", None)
            return msg, kwargs

    if isinstance(trainer_separate_async.logger, logging.Logger):
        trainer_separate_async.logger = WithFlush(trainer_separate_async.logger, {})


class CarefulTaskRunner(_VerlTaskRunner):
    """verl's own task runner, which logs no credentials."""

    def run(self, config: DictConfig) -> None:
        """Nothing of a run's configuration that is a credential is logged."""
        hide_credentials()
        log_with_flush()
        super().run(config)


class AllocatedTaskRunner(CarefulTaskRunner):
    """Runs the mode `allocated`: with our agent-loop manager unless the user named one."""

    def run(self, config: DictConfig) -> None:
        """The package's own log is shown in this process."""
        show_own_logs()
        super().run(config)

    def init_agent_loop_manager(self) -> None:
        """Our manager, whose workers can run rounds."""
        agent = self.config.actor_rollout_ref.rollout.agent
        if not agent.get("agent_loop_manager_class"):
            with open_dict(agent):
                agent.agent_loop_manager_class = MANAGER
        super().init_agent_loop_manager()


AllocatedTaskRunnerActor = ray.remote(AllocatedTaskRunner)
VerlTaskRunnerActor = ray.remote(CarefulTaskRunner)
