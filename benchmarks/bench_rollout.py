"""Rollouts a second through the whole path (request, engine, reward, TransferQueue): ours against verl's own worker.

    python -m benchmarks.bench_rollout [recipe=cpu/grpo] [any key]

One start of the stack, one engine, the same reward workers and storage units. Both managers run the same prompts in turn;
verl's is timed until its last prompt is finished, found by a poll of 5 ms instead of its trainer's 2 s. The first pair of
runs warms the engine up and is not counted. Then the rows each left in TransferQueue are compared field by field.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import hydra
import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf

from verl_ext.training.rollout_worker import AllocatedAgentLoopManager, GroupRequest
from verl_ext.training.task_runner import AllocatedTaskRunner

GROUPS, REPEATS = 32, 6
RESULT = "rollout_bench.json"


class BenchTaskRunner(AllocatedTaskRunner):
    """Starts the trainer's stack and times two agent-loop managers on it instead of training."""

    def init_agent_loop_manager(self) -> None:
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

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
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

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


def report(result: dict) -> None:
    """Print both rates and their ratio; keep them in benchmarks/results/rollout.json."""
    rates = {name: result["rollouts"] / statistics.median(s) for name, s in result["seconds"].items()}
    for name, rate in rates.items():
        spread = [result["rollouts"] / s for s in result["seconds"][name]]
        print(f"{name:>5}: {rate:7.1f} rollouts a second (median of {len(spread)}; {min(spread):.1f} to {max(spread):.1f})")
    print(f"ratio: {rates['ours'] / rates['verl']:.2f} (at least 2 wanted)")
    same = result["fields"]["ours"] == result["fields"]["verl"]
    print("fields in TransferQueue: " + ("the same" if same else f"DIFFERENT: {result['fields']}"))
    result["rollouts_per_second"] = rates
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "rollout.json"), "w") as file:
        json.dump(result, file, indent=1)


@hydra.main(config_path="pkg://verl_ext.configs", config_name="main", version_base=None)
def main(config: DictConfig) -> None:
    from verl_ext.platform import activate_cpu_platform, run_guard
    from verl_ext.tiny import ensure_tiny

    ensure_tiny(config.tiny.mix)
    config.trainer.experiment_name = "bench-rollout"
    config.trainer.resume_mode = "disable"
    OmegaConf.resolve(config)
    with run_guard():
        activate_cpu_platform(config)
        from verl.trainer.main_ppo import run_ppo

        run_ppo(config, task_runner_class=ray.remote(BenchTaskRunner))
    with open(os.path.join(config.trainer.default_local_dir, RESULT)) as file:
        report(json.load(file))


if __name__ == "__main__":
    if not any(arg.startswith("recipe=") for arg in sys.argv):
        sys.argv.append("recipe=cpu/grpo")
    import verl_ext.main_ppo  # noqa: F401  (registers the resolvers of the configuration)

    main()
