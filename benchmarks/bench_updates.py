"""Seconds an effective group and idle share of the engines, updates included: rounds, streaming, and groups in hand.

    python -m benchmarks.bench_updates [--steps 8] [--out benchmarks/results/updates.json]

1. The real collector, Ray actors and TransferQueue around fake engines: 4 workers of 64 slots, log-normal lengths (mean
   100 tokens, sigma 1, at most 1,000), 10 ms a token, SARA, 32 groups of 8, an update of 2 s in which engines on the
   trainer's devices rest. A mode after the other on one cluster; its first two steps are not counted.
2. The same loop in virtual time at 64 groups on 1,024 slots, an update of 1,000 s, a token a second: the
   table of docs/asynchronous.md.

Idle is the share of slot-seconds in which no token was generated, of all the time: an update's, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.bench_streaming import FAKE, GROUPS, SIZE, SLOTS, WORKERS
from benchmarks.result_files import write_result

RESULTS = Path(__file__).parent / "results" / "updates.json"
UPDATE_S, FIRST = 2.0, 2
CARRY = "allocation.async.carry="
MODES = {
    "barrier": ("cpu/sara", []),
    "streaming": ("cpu/sara", ["allocation.rounds=streaming"]),
    "colocated, carry .25": ("cpu/sara_colocate_async", [f"{CARRY}0.25"]),
    "colocated, carry .5": ("cpu/sara_colocate_async", [f"{CARRY}0.5"]),
    "separate, carry .25": ("cpu/sara_separate_async", [f"{CARRY}0.25"]),
    "separate, carry 1": ("cpu/sara_separate_async", [f"{CARRY}1.0"]),
}
WORLD = {"groups": 64, "slots": 1024, "prompts": 20_000, "effective_share": 0.33, "update_s": 1000.0, "max_lag": 3}
RULES = {"uniform": {}, "sara": {}, "dynamic_sampling": {"gen_multiple": "auto"}}
WAYS = [("barrier", 0.0), ("streaming", 0.0), ("streaming", 0.25), ("streaming", 0.5), ("streaming", 1.0)]


def on_fake_engines(steps: int) -> dict[str, dict[str, float]]:
    """Figures of each mode."""
    from verl_ext.testing.fake_engine import FakeEngineSettings
    from verl_ext.testing.fake_run import FakePrompts, collector_on, fake_config, fake_run, fake_step

    shared = [
        "data.max_response_length=1000", "actor_rollout_ref.rollout.max_model_len=1024",
        f"actor_rollout_ref.rollout.agent.num_workers={WORKERS}",
        f"data.train_batch_size={GROUPS}",
    ]  # fmt: skip
    found = {}
    with fake_run(fake_config(shared)) as running:
        manager, prompts = running.backend.manager, FakePrompts(4096)
        for mode, (recipe, overrides) in MODES.items():
            collector = collector_on(fake_config([f"recipe={recipe}", *shared, *overrides]), manager, prompts)
            manager.set_model(FakeEngineSettings(**FAKE))
            lines = []
            for step in range(1, FIRST + steps + 1):
                if step == FIRST + 1:
                    start, busy = time.perf_counter(), sum(manager.slots_busy())
                _, metrics = fake_step(collector, step, UPDATE_S)
                lines.append({**collector.ledger_record["fates"], **metrics} if step > FIRST else {})
            seconds, busy = time.perf_counter() - start, sum(manager.slots_busy()) - busy
            found[mode] = figures(lines[FIRST:], seconds, busy, WORKERS * SLOTS)
            collector.end()
            print(line(mode, found[mode]), flush=True)
    return found


def figures(lines: list[dict[str, float]], seconds: float, busy: float, slots: int) -> dict[str, float]:
    """Of the steps counted."""
    effective = sum(one["allocation/batch_effective_share"] * one["allocation/groups"] for one in lines)
    return {
        "seconds_an_effective_group": seconds / effective,
        "idle": 1 - busy / (seconds * slots),
        "seconds_a_step": seconds / len(lines),
        "rollouts_an_effective_group": sum(one["allocation/step_rollouts"] for one in lines) / effective,
        "aborted": mean(one["aborted"] for one in lines),
        "stale": mean(one["stale"] for one in lines),
        "lag_mean": mean(one.get("allocation/async/lag_mean", 0.0) for one in lines),
        "lag_max": max(one.get("allocation/async/lag_max", 0.0) for one in lines),
    }


def in_virtual_time(rule: str, rounds: str, carry: float, engines: str, seeds: int, steps: int) -> dict[str, float]:
    """Means over seeds; the first two steps are not counted."""
    from verl_ext.allocation import AllocationSettings, Stop
    from verl_ext.allocation.compose import Async
    from verl_ext.simulation.simulation import Simulation
    from verl_ext.simulation.simulation_settings import LengthSettings, WorldSettings

    groups, slots = WORLD["groups"], WORLD["slots"]
    world = WorldSettings(
        prompts=WORLD["prompts"], batch=groups, frozen=True, effective_share=WORLD["effective_share"], topics=1,
        held_out=1, slots=slots, length=LengthSettings(1000, sigma=0.8, wrong_factor=1.5, max_tokens=8192),
        update_s=WORLD["update_s"], engines=engines,
    )  # fmt: skip
    chosen = AllocationSettings(
        allocator={"name": rule, **RULES[rule]}, stop=Stop(groups, rollouts=24 * groups * SIZE), max_rounds=16,
        rounds=rounds, async_=Async(carry, WORLD["max_lag"]),
    )  # fmt: skip
    runs = []
    for seed in range(seeds):
        run, lines = Simulation.of_world("u_shaped", world, chosen, seed), []
        for step in range(1, FIRST + steps + 1):
            if step == FIRST + 1:
                start, busy = run.engine.now, run.engine.busy
            done = run.step()
            fates = run.ledger.step_record(step)["fates"]
            named = {f"allocation/{name}": value for name, value in done.metrics.items()}
            lags = [step - 1 - group.version for group in done.groups]
            lag = {"allocation/async/lag_mean": mean(lags), "allocation/async/lag_max": max(lags)}
            lines.append({**fates, **named, "allocation/step_rollouts": done.rollouts, **lag})
        runs.append(figures(lines[FIRST:], run.engine.now - start, run.engine.busy - busy, slots))
    return {name: mean(one[name] for one in runs) for name in runs[0]}


def line(name: str, row: dict[str, float]) -> str:
    """A row of the table printed."""
    return (
        f"{name:48}{row['seconds_an_effective_group']:9.2f} s an effective group, idle {row['idle']:.2f}, "
        f"{row['rollouts_an_effective_group']:.1f} rollouts, lag {row['lag_mean']:.2f} at most {row['lag_max']:.1f}, "
        f"{row['aborted']:.0f} aborted, {row['stale']:.0f} stale"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("virtual", "real"), help="one part; the other's figures are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    start, load = time.perf_counter(), os.getloadavg()
    record: dict[str, Any] = {"what": "time an effective group, updates included; see benchmarks/bench_updates.py"}
    if args.only and args.out.exists():
        import json

        record = json.loads(args.out.read_text())
    if args.only != "real":
        record["simulation"], record["simulated"] = {**WORLD, "seeds": args.seeds, "steps": 12}, {}
        for engines in ("colocated", "separate"):
            for rule in RULES:
                for rounds, carry in WAYS:
                    name = f"{engines}, {rule}, {rounds}, carry {carry:g}"
                    row = in_virtual_time(rule, rounds, carry, engines, args.seeds, 12)
                    record["simulated"][name] = row
                    print(line(name, row), flush=True)
    if args.only != "virtual":
        record["measured"] = on_fake_engines(args.steps)
        record["fake"] = {**FAKE, "workers": WORKERS, "groups": GROUPS, "group_size": SIZE, "update_s": UPDATE_S,
                          "steps": args.steps}  # fmt: skip
        record |= {"load_before": load, "load_after": os.getloadavg()}
    record |= {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    write_result(args.out, record)
    print(f"written to {args.out} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
