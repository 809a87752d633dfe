"""The real collector, Ray actors and TransferQueue on fake engines, no trainer: for tests of scale and faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.configuration import compose_config


class FakePrompts:
    """A data set of `n` prompts as `PromptRows` reads it."""

    def __init__(self, n: int, name: str = "prompt") -> None:
        import datasets

        self.dataframe = datasets.Dataset.from_dict(
            {
                "data_source": ["fake"] * n,
                "prompt": [[{"role": "user", "content": f"{name} {i}"}] for i in range(n)],
                "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in range(n)],
            }
        )

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, row: int) -> dict[str, Any]:
        fields = dict(self.dataframe[row])
        return fields | {"raw_prompt": fields.pop("prompt"), "index": row}


def fake_config(overrides: list[str] | tuple[str, ...] = ()) -> DictConfig:
    """The configuration of recipe cpu/sara (or another, by override) with a key `fake_engine` for the fake model."""
    given = list(overrides)
    if not any(item.startswith("recipe=") for item in given):
        given.insert(0, "recipe=cpu/sara")
    config = compose_config(given)
    OmegaConf.resolve(config)
    return config


def _start_ray(tries: int = 10) -> None:
    """Ray 2.60 gives its node half a minute to start, whatever the machine has to do besides."""
    import ray

    from verl_ext.launch.ray_start import bound_task_events

    bound_task_events()
    for left in reversed(range(tries)):
        try:
            ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, ignore_reinit_error=False)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise


def collector_on(config: DictConfig, manager: Any, prompts: FakePrompts) -> Any:
    """A connected `Collector` with rules of its own on a running cluster; `manager` runs its rounds."""
    from verl_ext.checks.allocation_settings import check_config
    from verl_ext.training.ahead import AheadCollector
    from verl_ext.training.collector import Collector
    from verl_ext.training.prompts import PromptRows
    from verl_ext.training.training_settings import SEPARATE_ASYNC

    settings, budget = check_config(config)
    kind = AheadCollector if config.trainer.v1.trainer_mode == SEPARATE_ASYNC else Collector
    collector = kind(settings, budget, PromptRows(prompts, config.data))
    collector.connect(manager)
    return collector


def fake_step(collector: Any, step: int, update_s: float = 0.0) -> tuple[Any, dict[str, Any]]:
    """A training step without a trainer: its batch, an update of so many seconds, and new weights for the engines,
    which rest meanwhile unless they have devices of their own."""
    import time

    import transfer_queue as tq

    from verl_ext.training.ahead import AheadCollector

    manager, separate = collector.backend.manager, isinstance(collector, AheadCollector)
    meta, metrics = collector.sample(step)
    if not separate:
        manager.rest()
    time.sleep(update_s)
    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
    manager.wake(step)
    if separate:
        collector.weights_are_out(step)
    return meta, metrics


@contextmanager
def fake_run(config: DictConfig, prompts: int = 4096, rewards: bool = False) -> Iterator[Any]:
    """A connected `Collector` on a Ray cluster of its own; `collector.sample(step)` runs the rounds of one step.

    Everything started here is ended on leaving.

    Args:
        rewards: verl's own reward workers score, by the configuration's reward; else the engine says what is right.
    """
    from verl_ext.cpu import activate_cpu_platform

    activate_cpu_platform(config)
    import ray
    import transfer_queue as tq

    from verl_ext.testing.fake_engine import FakeEngineManager

    with open_dict(config):
        config.transfer_queue.enable = True
    _start_ray()
    try:
        tq.init(config.transfer_queue)
        try:
            handles = None
            if rewards:
                from verl.experimental.reward_loop import RewardLoopManager

                handles = RewardLoopManager(config).reward_loop_worker_handles
            manager = FakeEngineManager.create(config=config, llm_client=None, reward_loop_worker_handles=handles)
            yield collector_on(config, manager, FakePrompts(prompts))
        finally:
            tq.close()
    finally:
        ray.shutdown()
