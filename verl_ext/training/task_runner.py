"""The Ray actor that runs the trainer: verl's own task runner with the mode `allocated` registered and our manager."""

from __future__ import annotations

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import TaskRunnerV1

from verl_ext.training import trainer  # noqa: F401  (registers the trainer mode in this process)
from verl_ext.training.logs import show_own_logs
from verl_ext.training.rollout_worker import AllocatedAgentLoopManager

_VerlTaskRunner = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__

MANAGER = f"{AllocatedAgentLoopManager.__module__}.{AllocatedAgentLoopManager.__name__}"


class AllocatedTaskRunner(_VerlTaskRunner):
    """Names our agent-loop manager unless the user named one."""

    def run(self, config: DictConfig) -> None:
        show_own_logs()
        super().run(config)

    def init_agent_loop_manager(self) -> None:
        agent = self.config.actor_rollout_ref.rollout.agent
        if not agent.get("agent_loop_manager_class"):
            with open_dict(agent):
                agent.agent_loop_manager_class = MANAGER
        super().init_agent_loop_manager()


AllocatedTaskRunnerActor = ray.remote(AllocatedTaskRunner)
