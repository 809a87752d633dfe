"""Collector, rollout worker and trainer in one process, without Ray: a dictionary stands for TransferQueue.

The rows, keys, tags and rewards go through the code that a run goes through; what travels between processes does not.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.rollout.sessions import SessionReply
from verl_ext.rollout.worker import AllocatedAgentLoopManager
from verl_ext.testing.fake_engine import FakeEngineWorker
from verl_ext.testing.fake_run import FakePrompts, collector_on, fake_config

SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


class Queue:
    """The functions of TransferQueue that are used, over a dictionary of rows a partition."""

    def __init__(self, monkeypatch: Any) -> None:
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        for name in ("kv_batch_put", "kv_batch_get", "kv_clear", "kv_list"):
            monkeypatch.setattr(tq, name, getattr(self, name))
        monkeypatch.setattr(tq, "async_kv_batch_put", self._later(self.kv_batch_put))
        monkeypatch.setattr(tq, "async_kv_put", self._later(self.kv_put))
        monkeypatch.setattr(tq, "init", lambda *_: None)

    @staticmethod
    def _later(function: Any) -> Any:
        async def call(**given: Any) -> Any:
            await asyncio.sleep(0)
            return function(**given)

        return call

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> KVBatchMeta:
        rows, known = self.rows.setdefault(partition_id, {}), self.tags.setdefault(partition_id, {})
        for at, key in enumerate(keys):
            row = rows.setdefault(key, {})
            for name in fields.keys() if fields is not None else ():
                value = fields[name][at]
                row[name] = value.data if isinstance(value, NonTensorData) else value
            if tags is not None:
                known[key] = tags[at]
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[known[key] for key in keys])

    def kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(partition_id, {})[key] = tag

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        rows = [self.rows[partition_id][key] for key in keys]
        return list_of_dict_to_tensordict(
            [{name: row[name] for name in select_fields or row if name in row} for row in rows]
        )

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: dict(self.tags.get(partition_id, {}))}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows[partition_id].pop(key, None)
            del self.tags[partition_id][key]


class Worker(FakeEngineWorker):
    """A rollout worker whose answers say which prompt and session they answer, and end in any order."""

    refused: frozenset[int] = frozenset()
    """Rows of the prompts that the engine does not take."""

    async def _run_session(self, group, session, sampling_params, global_steps):
        row, fake = group.prompt["index"], self.fake
        chance = np.random.default_rng([row, session, 7])
        await asyncio.sleep(chance.random() / 1000)
        if chance.random() < fake.fail_share or row in self.refused:
            raise RuntimeError("the prompt is refused" if row in self.refused else "the engine broke")
        if fake.hang_prompt and fake.hang_prompt in str(group.prompt["raw_prompt"]):
            await asyncio.Event().wait()
        length = 1 + int(chance.integers(5))
        answer = [1000 + row, session, *[2] * length]
        return [
            AgentLoopOutput(
                prompt_ids=[1] * (1 + row % 3), response_ids=answer, response_mask=[1] * len(answer),
                response_logprobs=[-0.1] * len(answer), num_turns=2, metrics=AgentLoopMetrics(),
                extra_fields={"min_global_steps": global_steps - 1, "max_global_steps": global_steps - 1},
            )
        ]  # fmt: skip


def right(row: int, session: int) -> bool:
    """Whether the answer is right: a third of the prompts are never solved, a third are always."""
    return [False, True, bool((row + session) % 2)][row % 3]


def score(row: int, session: int) -> float:
    """The score of an answer, which no other answer of its group has."""
    return float(right(row, session)) - session / 100


class Rewards:
    """A reward worker that reads prompt and session off the answer it is given."""

    def __init__(self) -> None:
        self.compute_score_batch = SimpleNamespace(remote=self.scores)

    async def scores(self, batch: Any) -> list[dict[str, Any]]:
        results = []
        for answer in batch.batch["responses"].tolist():
            row, session = answer[0] - 1000, answer[1]
            info = {"acc": right(row, session), "score": score(row, session)}
            results.append({"reward_score": info["score"], "reward_extra_info": info})
        return results


class Stream:
    """Groups in flight in this process: one is run when the next is waited for, now the oldest and now the newest."""

    def __init__(self, manager: Manager) -> None:
        self.manager, self.flying, self.turn = manager, {}, 0

    def __len__(self) -> int:
        return len(self.flying)

    def submit(self, groups, global_steps, deadline_s, most_s):
        self.flying |= {group.uid: (group, global_steps, deadline_s) for group in groups}
        self.manager.requests.append({group.uid: group.n for group in groups})

    def next(self):
        self.turn += 1
        uid = list(self.flying)[-1 if self.turn % 3 else 0]
        group, global_steps, deadline_s = self.flying.pop(uid)
        return asyncio.run(self.manager.worker.generate_round([group], global_steps, deadline_s))

    def abort(self, uids):
        groups = [self.flying.pop(uid)[0] for uid in uids if uid in self.flying]
        return [SessionReply(g.uid, s, aborted=True) for g in groups for s in range(g.first, g.first + g.n)]

    def clear(self):
        self.flying.clear()


class Manager(AllocatedAgentLoopManager):
    """Rounds, and groups in flight, on a worker in this process."""

    stream = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.config, self.stream = worker.config, Stream(self)
        self.requests: list[dict[str, int]] = []
        """Sessions asked of each group, a round each."""

    def generate_round(self, groups, global_steps, deadline_s):
        self.requests.append({group.uid: group.n for group in groups})
        return asyncio.run(self.worker.generate_round(groups, global_steps, deadline_s))


def collector(
    *overrides: str, prompts: int = 96, fake: dict[str, Any] | None = None, rewards: Rewards | None = None
) -> Any:
    """A collector on a worker in this process; call it with a :class:`Queue` in place."""
    from verl_ext.testing.fake_engine import FakeEngineSettings

    config = fake_config([*overrides, *SMALL])
    worker = Worker(config, reward_workers=[rewards or Rewards()])
    worker.set_model(FakeEngineSettings(**(fake or {})))
    return collector_on(config, Manager(worker), FakePrompts(prompts))
