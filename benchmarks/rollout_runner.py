"""The actor of `bench_rollout`: starts the trainer's stack and times two agent-loop managers on it. Imports verl."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import transfer_queue as tq
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_ext.rollout.worker import AllocatedAgentLoopManager, GroupRequest
from verl_ext.training.task_runner import AllocatedTaskRunner

GROUPS, REPEATS = 32, 6
RESULT = "rollout_bench.json"


class BenchTaskRunner(AllocatedTaskRunner):
    """Starts the trainer's stack and times two agent-loop managers on it instead of training."""

    def init_agent_loop_manager(self) -> None:
        parts = dict(
            config=self.config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )
        ours = AllocatedAgentLoopManager.create(**parts)
        verls = AgentLoopManagerTQ.create(**parts)
        result = compare(self.trainer, ours, verls, self.config.actor_rollout_ref.rollout.n)
        with open(os.path.join(self.trainer.run_folder.path, RESULT), "w") as file:
            json.dump(result, file)
        self.trainer.fit = lambda manager: None


def compare(trainer, ours, verls, n: int) -> dict:
    """Seconds of each run of GROUPS x n rollouts, alternating, and the fields each worker writes."""
    seconds: dict[str, list[float]] = {"ours": [], "verl": []}
    fields: dict[str, dict[str, str]] = {}
    for repeat in range(REPEATS + 1):
        rows = [trainer.prompts.fetch(repeat * GROUPS + i) for i in range(GROUPS)]
        for name, run in (("verl", run_verl), ("ours", run_ours)):
            started = time.perf_counter()
            keys = run(trainer, ours if name == "ours" else verls, rows, n, f"{name}{repeat}")
            if repeat:
                seconds[name].append(time.perf_counter() - started)
            assert len(keys) == GROUPS * n, f"{name}: {len(keys)} rows for {GROUPS * n} rollouts"
            data = tq.kv_batch_get(keys=keys, partition_id="train")
            fields[name] = {key: type(data.get(key)).__name__ for key in sorted(data.keys())}
            tq.kv_clear(keys=keys, partition_id="train")
    return {"seconds": seconds, "fields": fields, "rollouts": GROUPS * n}


def run_ours(trainer, manager, rows: list[dict], n: int, tag: str) -> list[str]:
    """One round; returns the keys of its rows."""
    replies = manager.generate_round([GroupRequest(f"{tag}g{i}", 0, n, row) for i, row in enumerate(rows)], 1, 600.0)
    return [key for reply in replies for key, _ in reply.rows]


def run_verl(trainer, manager, rows: list[dict], n: int, tag: str) -> list[str]:
    """verl's own submission of the same prompts; returns the keys of its rows once all prompts are finished."""
    batch_dict = collate_fn(rows)
    batch_dict["uid"] = np.array([f"{tag}g{i}" for i in range(len(rows))], dtype=object)
    batch = tu.get_tensordict(batch_dict)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in rows]
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    while True:
        rows_now = tq.kv_list("train")["train"]
        prompts = [t for t in rows_now.values() if t.get("is_prompt")]
        if all(t["status"] in ("finished", "failure") for t in prompts):
            break
        time.sleep(0.005)
    uids = [key for key, t in rows_now.items() if t.get("is_prompt")]
    keys = [key for key, t in rows_now.items() if not t.get("is_prompt")]
    tq.kv_clear(keys=uids, partition_id="train")
    return keys
