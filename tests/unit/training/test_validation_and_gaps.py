# SPDX-License-Identifier: Apache-2.0
"""What a dead engine does to a validation, and how the time between rounds is measured."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import ray
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.unit.training.in_process import Queue, Rewards, Worker, collector
from verl_ext.allocation import RoundError
from verl_ext.rollout.validation import look_at
from verl_ext.testing.fake_engine import FakeEngineSettings
from verl_ext.testing.fake_run import FakePrompts, fake_config
from verl_ext.training import trainer as trainer_module
from verl_ext.training.trainer import AllocatedReplayBuffer


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def validated(worker, uid):
    prompt = {**FakePrompts(4)[0], "uid": uid, "global_steps": 3}
    asyncio.run(worker._run_prompt(prompt, {}, {"validate": True}))


@pytest.fixture
def worker(queue):
    made = Worker(fake_config(), reward_workers=[Rewards()])
    made.set_model(FakeEngineSettings())
    return made


def as_actors(monkeypatch, *workers):
    """Workers of this process, called as actors are."""
    monkeypatch.setattr(ray, "get", lambda calls: [asyncio.run(call) for call in calls])
    return [SimpleNamespace(broken=SimpleNamespace(remote=worker.broken)) for worker in workers]


def test_a_dead_engine_in_validation_ends_it_and_a_failed_session_does_not(worker, queue, monkeypatch):
    actors = as_actors(monkeypatch, worker)
    for error, status in ((None, "finished"), (RuntimeError("this one only"), "failure")):

        async def session(*_, error=error):
            if error:
                raise error
            return await Worker._run_session(worker, *_)

        worker._run_session = session
        validated(worker, f"u{status}")
        assert queue.tags["val"][f"u{status}"] == {"status": status}
        look_at(actors)

    async def dead(*_):
        raise RoundError("a rollout server died: EngineDeadError: gone")

    worker._run_session = dead
    validated(worker, "u3")
    assert queue.tags["val"]["u3"] == {"status": "failure"}
    with pytest.raises(RoundError, match="in validation: a rollout server died: EngineDeadError"):
        look_at(actors)


def test_a_rollout_worker_that_died_ends_a_validation(monkeypatch):
    def dead(calls):
        raise ray.exceptions.RayActorError()

    monkeypatch.setattr(ray, "get", dead)
    with pytest.raises(RoundError, match="a rollout worker died in validation"):
        look_at([])


def test_verls_wait_for_a_validation_looks_whether_it_can_end(monkeypatch):
    """While verl waits for prompts that will never come back, and once more when all have."""
    looks, batch = [], SimpleNamespace(keys=["u_0_0"])
    monkeypatch.setattr(trainer_module, "look_at", looks.append)
    monkeypatch.setattr(ReplayBuffer, "_sync_metadata_from_transfer_queue", lambda self: None)
    monkeypatch.setattr(ReplayBuffer, "sample", lambda self, **given: (batch, given["partition_id"]))
    buffer = object.__new__(AllocatedReplayBuffer)
    manager = SimpleNamespace(agent_loop_workers=["worker"])
    buffer.collector = SimpleNamespace(backend=SimpleNamespace(manager=manager))
    assert buffer.sample(3, "val", 8) == (batch, "val") and looks == [["worker"]]
    for _ in range(3):
        buffer._sync_metadata_from_transfer_queue()
    assert len(looks) == 2, "not at each of verl's polls"
    monkeypatch.setattr(trainer_module, "_LOOK_EVERY_S", 0.0)
    buffer._sync_metadata_from_transfer_queue()
    assert len(looks) == 3


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_the_time_between_rounds_needs_no_two_clocks_to_agree(queue, ahead_s):
    """The worker's clock is an hour before or behind the driver's."""
    run = collector("recipe=cpu/sara", "allocation.allocator.chunk=1")
    generate = run.backend.manager.generate_round

    def elsewhere(*given):
        replies = generate(*given)
        for reply in replies:
            reply.started_at += ahead_s
            reply.scored_at += ahead_s
        return replies

    run.backend.manager.generate_round = elsewhere
    _, metrics = run.sample(1)
    assert len(run.backend.round_gaps) == metrics["allocation/rounds"] - 1 >= 2
    assert 0 <= metrics["allocation/round_gap_s"] <= metrics["allocation/round_gap_max_s"]
    assert sum(run.backend.round_gaps) < metrics["allocation/collect_s"]
