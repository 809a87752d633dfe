"""Rollouts a second through the whole path (request, engine, reward, TransferQueue): ours against verl's own worker.

    python -m benchmarks.bench_rollout [recipe=cpu/grpo] [any key]

One start of the stack, one engine, the same reward workers and storage units. Both managers run the same prompts in
turn; verl's is timed until its last prompt is finished, found by a poll of 5 ms instead of its trainer's 2 s. The first
pair of runs warms the engine up and is not counted. Then the rows each left in TransferQueue are compared by field.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

import verl_ext.main_ppo  # noqa: F401  (registers the resolvers of the configuration)
from benchmarks.result_files import write_result
from verl_ext.cpu import activate_cpu_platform
from verl_ext.launch.cleanup import run_guard
from verl_ext.tiny import ensure_tiny


def report(result: dict) -> None:
    """Print both rates and their ratio; keep them in benchmarks/results/rollout.json."""
    rates = {name: result["rollouts"] / statistics.median(s) for name, s in result["seconds"].items()}
    for name, rate in rates.items():
        spread = [result["rollouts"] / s for s in result["seconds"][name]]
        low, high = min(spread), max(spread)
        print(f"{name:>5}: {rate:7.1f} rollouts a second (median of {len(spread)}; {low:.1f} to {high:.1f})")
    print(f"ratio: {rates['ours'] / rates['verl']:.2f} (at least 2 wanted)")
    same = result["fields"]["ours"] == result["fields"]["verl"]
    print("fields in TransferQueue: " + ("the same" if same else f"DIFFERENT: {result['fields']}"))
    result["rollouts_per_second"] = rates
    write_result(Path(__file__).parent / "results" / "rollout.json", result)


@hydra.main(config_path="pkg://verl_ext.configs", config_name="main", version_base=None)
def main(config: DictConfig) -> None:
    ensure_tiny(config.tiny.mix)
    config.trainer.experiment_name = "bench-rollout"
    config.trainer.resume_mode = "disable"
    OmegaConf.resolve(config)
    with run_guard():
        activate_cpu_platform(config)
        import ray
        from verl.trainer.main_ppo import run_ppo

        from benchmarks.rollout_runner import RESULT, BenchTaskRunner

        run_ppo(config, task_runner_class=ray.remote(BenchTaskRunner))
    with open(os.path.join(config.trainer.default_local_dir, RESULT)) as file:
        report(json.load(file))


if __name__ == "__main__":
    if not any(arg.startswith("recipe=") for arg in sys.argv):
        sys.argv.append("recipe=cpu/grpo")
    main()
