"""What the tests on fake engines share: collectors with rules of their own on one running cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl_ext.testing.fake_run import FakePrompts, collector_on, fake_config, fake_run

TIMES = ("_s", "driver_s", "generate_s")


@dataclass
class Stack:
    """A running cluster with fake engines behind real rollout workers."""

    manager: Any
    config: Any

    def collector(
        self, *overrides: str, prompts: int = 4096, name: str = "prompt", manager: Any = None, **fake: Any
    ) -> Any:
        """A fresh collector, whose engines get the given fake model."""
        from verl_ext.testing.fake_engine import FakeEngineSettings

        manager = manager or self.manager
        collector = collector_on(fake_config(overrides), manager, FakePrompts(prompts, name))
        manager.set_model(FakeEngineSettings(**fake))
        return collector

    def new_manager(self) -> Any:
        """Rollout workers without reward workers: the engines say what is right. For tests that break them."""
        from verl_ext.testing.fake_engine import FakeEngineManager

        return FakeEngineManager.create(config=self.config, llm_client=None)


@contextmanager
def fake_stack(*overrides: str, rewards: bool = False) -> Iterator[Stack]:
    """One cluster for all tests of a file; with `rewards`, verl's own reward workers score."""
    config = fake_config(overrides)
    with fake_run(config, rewards=rewards) as collector:
        yield Stack(collector.backend.manager, config)


def left_in_transfer_queue() -> list[str]:
    """Keys of the training partition."""
    import transfer_queue as tq

    return list((tq.kv_list("train") or {}).get("train", {}))


def clear(meta: Any) -> None:
    """What the trainer does with the batch after its step."""
    import transfer_queue as tq

    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)


def clear_all() -> None:
    """The queue of a process that is gone."""
    import transfer_queue as tq

    if keys := left_in_transfer_queue():
        tq.kv_clear(keys=keys, partition_id="train")


@contextmanager
def requests_of(collector: Any) -> Iterator[list[tuple[str, str, int, int]]]:
    """(group, prompt's key, first session, sessions) of every request that the collector sends to the workers."""
    sent: list[tuple[str, str, int, int]] = []
    backend = collector.backend
    generate = backend.generate

    def logged(requests, *args, **kwargs):
        keys = collector.prompts.keys
        sent.extend((r.group.uid, keys[r.group.prompt], r.first, r.n) for r in requests)
        return generate(requests, *args, **kwargs)

    backend.generate = logged
    try:
        yield sent
    finally:
        del backend.generate


def step_of(collector: Any, step: int) -> dict[str, Any]:
    """Run a step and clear its rows: requests, verdicts by group, rows trained, ledger line, metrics but for times."""
    from verl_ext.training.collector import NoUpdate

    with requests_of(collector) as sent:
        try:
            meta, metrics = collector.sample(step)
            keys = list(meta.keys)
            clear(meta)
        except NoUpdate as skipped:
            keys, metrics = [], skipped.metrics
    return {
        "requests": sent,
        "keys": keys,
        "ledger": collector.ledger_record,
        "statistics": collector.statistics,
        "metrics": {name: value for name, value in metrics.items() if not name.endswith(TIMES)},
    }
