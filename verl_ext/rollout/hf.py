"""A rollout backend of verl's that needs no inference engine: the model's own Hugging Face code, under the name "hf".

    actor_rollout_ref.rollout.name=hf actor_rollout_ref.model.external_lib=verl_ext.rollout.hf

Importing this module registers it; verl imports `external_lib` in every process that reads the model's settings. It is
for machines without vLLM and for telling vLLM's faults from others': much slower, since a batch ends with its longest
answer, and without prefix cache, tensor parallelism or LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

NAME = "hf"


def _actor_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}_0"


class HFReplica(RolloutReplica):
    """One server beside one trainer rank, on its device.

    Raises:
        ValueError: settings that need an inference engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1:
            raise ValueError(
                f"actor_rollout_ref.rollout.name={NAME}: a model on {self.world_size} devices (tensor_, data_ or "
                "pipeline_model_parallel_size); accepted is 1"
            )

    async def launch_servers(self) -> None:
        """Start the server on the worker's node, with the worker's device."""
        from verl_ext.rollout.hf_server import HFServer

        if self.rollout_mode is not RolloutMode.HYBRID:
            raise ValueError(
                f"actor_rollout_ref.rollout.name={NAME} runs beside the trainer alone, not {self.rollout_mode}"
            )
        node, device = await self.workers[0].__ray_call__.remote(_place)
        variables = {name: "1" for name in get_platform().ray_noset_envvars()} | get_platform().rollout_env_vars()
        server = ray.remote(HFServer).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": variables | {get_visible_devices_keyword(): device}},
            name=_actor_name(self.replica_rank),
            max_concurrency=self.max_concurrency,
        )
        self._server_handle = server.remote(self.config, self.model_config)
        self.servers = [self._server_handle]
        self._server_address = await self._server_handle.address.remote()


def _place(worker: Any) -> tuple[str, str]:
    """Runs inside a trainer's worker: its node and its device."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


class HFServerAdapter(BaseRollout):
    """The trainer rank's end: sends weights to its server, wakes it and lets it sleep."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank >= 0 else torch.distributed.get_rank()
        self._handle: Any = None

    @property
    def server(self) -> Any:
        """The server's actor, which is started after this."""
        self._handle = self._handle or ray.get_actor(_actor_name(self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        """Weights back to the device; there is nothing else to resume."""
        if "weights" in tags:
            await self.server.wake_up.remote()

    async def release(self) -> None:
        """The device's memory to the trainer."""
        await self.server.sleep.remote()

    async def update_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], wire_format: str = "named_tensors",
        global_steps: int | None = None, peft_config: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Send the weights through Ray, in parts of checkpoint_engine.update_weights_bucket_megabytes.

        Raises:
            ValueError: LoRA adapters, or weights in another format.
        """
        if peft_config is not None:
            raise ValueError(
                f"actor_rollout_ref.model.lora.merge=False: actor_rollout_ref.rollout.name={NAME} takes no adapter; "
                "accepted is True"
            )
        if wire_format != "named_tensors":
            raise ValueError(f"actor_rollout_ref.rollout.name={NAME} takes named_tensors, not {wire_format}")
        part: dict[str, torch.Tensor] = {}
        most, size = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20, 0
        async for name, weight in ensure_async_iterator(weights):
            if part and size + weight.nbytes > most:
                await self.server.load_weights.remote(part)
                part, size = {}, 0
            part[name] = weight.detach().cpu()
            size += weight.nbytes
        await self.server.load_weights.remote(part)
        await self.server.end_update.remote(global_steps)


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{HFServerAdapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: HFReplica)
