"""Time a step and idle share of the engines: `allocation.rounds=streaming` against the barrier, long-tailed answers.

    python -m benchmarks.bench_streaming [--steps 4] [--out benchmarks/results/streaming.json]

1. The real collector, Ray actors and TransferQueue around fake engines: 4 workers of 64 slots, log-normal lengths (mean
   100 tokens, sigma 1, at most 1,000), 10 ms a token, SARA, 32 groups of 8. The modes take turns, a step each, on one
   cluster, so that they share the machine's other load; the first step, with the commit rate unknown, is not counted.
2. The same loops in virtual time at 128 groups on 2,048 slots, wrong answers being half as long again: what the order
   of arrival does to the lengths trained on, and what a margin costs and gains.

Idle is the share of slot-seconds between the begin and the end of a step's collection in which no token was generated.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil

from benchmarks.result_files import write_result

RESULTS = Path(__file__).parent / "results" / "streaming.json"
WORKERS, SLOTS, GROUPS, SIZE = 4, 64, 32, 8
FAKE = {"mean_tokens": 100.0, "length_sigma": 1.0, "seconds_per_token": 0.01, "slots": SLOTS}
MODES = {
    "barrier": [],
    "streaming": ["allocation.rounds=streaming"],
    "streaming, margin .25": ["allocation.rounds=streaming", "allocation.allocator.margin=0.25"],
}
SIMULATED = {"groups": 128, "slots": 2048, "prompts": 20_000, "effective_share": 0.33, "seeds": 3, "steps": 8}
RULES = {
    "sara, barrier": ("sara", {}, "barrier"),
    "sara, streaming": ("sara", {}, "streaming"),
    "sara, streaming, margin .25": ("sara", {"margin": 0.25}, "streaming"),
    "dynamic_sampling 3B, barrier": ("dynamic_sampling", {}, "barrier"),
    "dynamic_sampling auto, barrier": ("dynamic_sampling", {"gen_multiple": "auto"}, "barrier"),
    "dynamic_sampling auto, streaming": ("dynamic_sampling", {"gen_multiple": "auto"}, "streaming"),
}


def on_fake_engines(steps: int) -> dict[str, list[dict[str, float]]]:
    """Numbers of each step, by mode."""
    from verl_ext.testing.fake_run import fake_config, fake_run

    shared = [
        "data.max_response_length=1000", "actor_rollout_ref.rollout.max_model_len=1024",
        f"actor_rollout_ref.rollout.agent.num_workers={WORKERS}",
        f"data.train_batch_size={GROUPS}",
    ]  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {}
    with fake_run(fake_config(shared)) as running:
        import transfer_queue as tq

        from verl_ext.checks.allocation_settings import check_config
        from verl_ext.testing.fake_engine import FakeEngineSettings
        from verl_ext.training.collector import Collector

        manager, collectors, own = running.backend.manager, {}, psutil.Process()
        for mode, overrides in MODES.items():
            settings, budget = check_config(fake_config([*shared, *overrides]))
            collectors[mode] = Collector(settings, budget, running.prompts)
            collectors[mode].connect(manager)
        manager.set_model(FakeEngineSettings(**FAKE))
        busy = sum(manager.slots_busy())
        for step in range(1, steps + 2):
            for mode, collector in collectors.items():
                lines, cpu = found.setdefault(mode, []), _cpu(own)
                start = time.perf_counter()
                meta, metrics = collector.sample(step)
                seconds = time.perf_counter() - start
                before, busy = busy, sum(manager.slots_busy())
                tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
                record = collector.ledger_record
                lines.append(
                    {
                        "seconds": seconds,
                        "idle": 1 - (busy - before) / (seconds * WORKERS * SLOTS),
                        "groups": metrics["allocation/groups"],
                        "rollouts": record["issued"],
                        "tokens": record["tokens"],
                        "aborted": record["fates"]["aborted"],
                        "aborted_tokens": record["fate_tokens"]["aborted"],
                        "surplus": record["fates"]["surplus"],
                        "trained_tokens": mean(tag["response_len"] for tag in meta.tags),
                        "gap_s": metrics["allocation/round_gap_s"],
                        "driver_s": metrics["allocation/driver_s"],
                        "cpu_s": _cpu(own) - cpu,
                        "load": os.getloadavg()[0],
                    }
                )
                said = f"idle {lines[-1]['idle']:.2f}, CPU {lines[-1]['cpu_s']:.1f} s, load {lines[-1]['load']:.1f}"
                print(f"  {mode:22} step {step}: {seconds:6.2f} s, {said}", flush=True)
    return {mode: lines[1:] for mode, lines in found.items()}


def _cpu(process: Any) -> float:
    """CPU seconds of the driver, the workers, and all else of the cluster."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def in_virtual_time(rule: str, seed: int) -> list[dict[str, float]]:
    """Numbers of each step but the first, one token a slot and second."""
    from verl_ext.allocation import AllocationSettings, Stop
    from verl_ext.simulation.simulation import Simulation
    from verl_ext.simulation.simulation_settings import LengthSettings, WorldSettings

    name, settings, rounds = RULES[rule]
    groups, slots = SIMULATED["groups"], SIMULATED["slots"]
    world = WorldSettings(
        prompts=SIMULATED["prompts"], batch=groups, frozen=True, effective_share=SIMULATED["effective_share"],
        topics=1, held_out=1, slots=slots, length=LengthSettings(1000, sigma=0.8, wrong_factor=1.5, max_tokens=8192),
    )  # fmt: skip
    stop = Stop(groups, rollouts=24 * groups * SIZE)
    chosen = AllocationSettings(allocator={"name": name, **settings}, stop=stop, max_rounds=16, rounds=rounds)
    run, lines = Simulation.of_world("u_shaped", world, chosen, seed), []
    for step in range(1, SIMULATED["steps"] + 2):
        start, busy = run.engine.now, run.engine.busy
        done = run.step()
        record, seconds = run.ledger.step_record(step), run.engine.now - start
        lines.append(
            {
                "seconds": seconds,
                "idle": 1 - (run.engine.busy - busy) / (seconds * slots),
                "groups": len(done.groups),
                "rollouts": record["issued"],
                "tokens": record["tokens"],
                "aborted": record["fates"]["aborted"],
                "aborted_tokens": record["fate_tokens"]["aborted"],
                "surplus": record["fates"]["surplus"],
                "trained_tokens": float(np.mean([outcome.response_tokens for outcome in done.kept])),
            }
        )
    return lines[1:]


def table(title: str, found: dict[str, list[dict[str, float]]], first: str) -> dict[str, dict[str, float]]:
    """Print medians over the steps; time also as a share of the first row's."""
    heads = f"{'s a step':>10}{'':>8}{'idle':>7}{'rollouts':>10}{'tokens':>11}{'aborted':>9}{'length':>9}"
    print(f"{title}\n{'':34}{heads}   (length: of the answers trained on)")
    rows = {}
    for name, lines in found.items():
        row = rows[name] = {key: median(line[key] for line in lines) for key in lines[0]}
        short = sum(line["groups"] < max(other["groups"] for other in lines) for line in lines)
        print(
            f"{name:34}{row['seconds']:10.2f}{row['seconds'] / rows[first]['seconds']:8.2f}{row['idle']:7.2f}"
            f"{row['rollouts']:10.0f}{row['tokens']:11.0f}{row['aborted']:9.0f}{row['trained_tokens']:9.1f}"
            + (f"  {short} short steps" if short else "")
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    start, load = time.perf_counter(), os.getloadavg()
    simulated = {
        rule: [line for seed in range(SIMULATED["seeds"]) for line in in_virtual_time(rule, seed)] for rule in RULES
    }
    virtual = table("Virtual time, 128 groups on 2,048 slots (a token a second)", simulated, "sara, barrier")
    real = on_fake_engines(args.steps)
    measured = table("Fake engines, 32 groups on 256 slots", real, "barrier")
    record = {
        "what": "time a step and idle share of the engines by mode; see benchmarks/bench_streaming.py",
        "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(),
        "load_before": load, "load_after": os.getloadavg(), "seconds": round(time.perf_counter() - start, 1),
        "fake": {**FAKE, "workers": WORKERS, "groups": GROUPS, "group_size": SIZE, "steps": args.steps},
        "measured": measured, "measured_steps": real,
        "simulation": SIMULATED, "simulated": virtual, "simulated_steps": simulated,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, record)
    print(f"written to {args.out} after {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
