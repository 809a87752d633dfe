"""Rollouts per effective group: SARA beside dynamic sampling in its variants, on simulated populations.

    python -m benchmarks.bench_collection [--seeds 20] [--steps 20] [--out benchmarks/results/collection.json]

Everything runs through `collect`, as in training. Populations are U-shaped with a given effective share e (P(a group of
8 is mixed)) and a mean success rate of .35, frozen but for the last table. Exit status 1 if a limit does not hold for
the mean over the seeds, taken at the upper end of its 95 % interval (Student's t). Single seeds are noisier than that:
whether waves of three batches need a second one is nearly a coin's toss at each step. How many seeds are within the
limit is shown.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from scipy.special import expit, ndtri, stdtrit  # noqa: E402

from benchmarks import closed_form  # noqa: E402
from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.allocation import AllocationSettings, Stop  # noqa: E402
from verl_ext.simulation.population import solve_logits  # noqa: E402
from verl_ext.simulation.simulation import Simulation, simulate  # noqa: E402
from verl_ext.simulation.simulation_settings import WorldSettings  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "collection.json"
PROMPTS, BATCH, SIZE, PROBE = 10_000, 128, 8, 4
SHARES = (0.30, 0.35, 0.42)
# Dynamic sampling may take the rounds that refilling one by one needs; no rule is to end short here.
AMPLE = {"stop": Stop(rollouts=60 * BATCH * SIZE), "max_rounds": 40}
RULES = {
    "DS waves 1B": {"name": "dynamic_sampling", "gen_multiple": 1},
    "DS waves 3B": {"name": "dynamic_sampling", "gen_multiple": 3},
    "DS adaptive": {"name": "dynamic_sampling", "gen_multiple": "auto"},
    "DS one for one": {"name": "dynamic_sampling", "refill": "one_for_one"},
    "SARA top_up": {"name": "sara", "probe": PROBE},
    "SARA stop": {"name": "sara", "probe": PROBE, "commit": "stop"},
}
SARA_DPS = AllocationSettings({"name": "dps"}, {"name": "sara"}, stop=AMPLE["stop"])
# (rule, to what, {e: most}).
LIMITS = [
    ("SARA top_up", "DS waves 1B", {0.30: 0.78, 0.35: 0.83, 0.42: 0.78}),
    ("SARA top_up", "DS waves 3B", {0.30: 0.78, 0.35: 0.78, 0.42: 0.78}),
    ("SARA top_up", "DS one for one", {0.30: 0.91, 0.35: 0.94, 0.42: 0.96}),
    ("SARA top_up", "DS adaptive", {0.30: 0.94, 0.35: 0.94, 0.42: 0.94}),
    ("SARA stop", "DS one for one", {0.30: 0.75, 0.35: 0.75, 0.42: 0.75}),
    ("SARA stop", "DS waves 1B", {0.30: 0.67, 0.35: 0.67, 0.42: 0.67}),
]
MOST_ROUNDS, MOST_EXTRA = 3.0, 0.05
SELECTED_SHARE, WARMUP, SELECTED_STEPS, MOST_SELECTED = 0.33, 50, 10, 0.40
LEARNING_SEEDS, TARGET, MOST_LEARNING, LONGEST = 3, 0.65, 0.85, 260
LEARNING = {
    "uniform": AllocationSettings(),
    "SARA + DPS": AllocationSettings({"name": "dps"}, {"name": "sara"}, stop=Stop(rollouts=BATCH * SIZE)),
    "SARA + CERO": AllocationSettings(
        {"name": "cero", "rounds": 200}, {"name": "sara"}, stop=Stop(rollouts=BATCH * SIZE)
    ),
}


def world(share: float, steps: int, **more) -> WorldSettings:
    return WorldSettings(prompts=PROMPTS, batch=BATCH, steps=steps, effective_share=share, **more)


def collection(share: float, seed: int, steps: int) -> dict[str, dict[str, float]]:
    """Every rule on one population."""
    frozen = world(share, steps, frozen=True, held_out=1)
    found = {}
    for name, allocator in RULES.items():
        result = simulate("u_shaped", frozen, AllocationSettings(allocator=allocator, **AMPLE), seed)
        assert not result["short_steps"], f"{name}: {result['short_steps']} short steps"
        found[name] = {
            "per_group": result["rollouts_per_effective_group"],
            "rounds": result["rounds_per_step"],
            "surplus": result["ledger"]["fates"]["surplus"] / steps,
        }
    return found


def selected(seed: int) -> dict[str, dict[str, float]]:
    """SARA on the prompts DPS chooses, once it knows the population."""
    warm = world(SELECTED_SHARE, SELECTED_STEPS, frozen=True, held_out=1, warmup_steps=WARMUP)
    waves = AllocationSettings(allocator=RULES["DS waves 1B"], **AMPLE)
    cold = world(SELECTED_SHARE, 20, frozen=True, held_out=1)
    found = {}
    for name, settings, rules in (("DS waves 1B", cold, waves), ("SARA + DPS, warm", warm, SARA_DPS)):
        result = simulate("u_shaped", settings, rules, seed)
        found[name] = {"per_group": result["rollouts_per_effective_group"], "rounds": result["rounds_per_step"]}
    return found


def learning(update: str, name: str, seed: int) -> float | None:
    """Rollouts until held-out accuracy reaches the target; None if it does not."""
    run = Simulation.of_world("u_shaped", world(0.328, LONGEST, update=update), LEARNING[name], seed)
    before, rollouts = run.accuracy(), 0
    for _ in range(LONGEST):
        issued = run.step().rollouts
        after = run.accuracy()
        if after >= TARGET:
            return rollouts + issued * (TARGET - before) / (after - before)
        before, rollouts = after, rollouts + issued
    return None


def bounds(share: float) -> dict[str, float]:
    """What the closed forms and the oracles say."""
    location, sd = solve_logits(share, 0.35, SIZE)
    rates = expit(location + sd * ndtri((np.arange(PROMPTS) + 0.5) / PROMPTS))
    return {
        "DS one for one": closed_form.dynamic_sampling(rates, SIZE),
        "SARA top_up": closed_form.sara(rates, SIZE, PROBE),
        "SARA stop": closed_form.sara(rates, SIZE, PROBE, "stop"),
        "oracle of outcomes": closed_form.oracle_of_outcomes(SIZE),
        "oracle of rates, 95 % of effective groups": closed_form.oracle_of_rates(rates, SIZE, 0.95),
        "P(effective | abandoned)": closed_form.false_abandonment(rates, SIZE, PROBE),
    }


class Limits:
    """What must hold, what was measured."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def check(self, what: str, values, most: float) -> None:
        values = np.asarray(values, float)
        n, mean = len(values), float(values.mean())
        half = float(stdtrit(n - 1, 0.975) * values.std(ddof=1) / n**0.5) if n > 1 and np.isfinite(mean) else 0.0
        row = {
            "what": what, "mean": mean, "upper": mean + half, "least": float(values.min()), "most": float(values.max()),
            "limit": most, "seeds": n, "seeds_within": int((values <= most).sum()), "holds": bool(mean + half <= most),
        }  # fmt: skip
        self.rows.append(row)
        print(
            f"  {'ok  ' if row['holds'] else 'FAIL'} {what:<51} {mean:6.3f} + {half:.3f} [{row['least']:.3f}, "
            f"{row['most']:.3f}]  at most {most:.2f}; {row['seeds_within']} of {n} seeds",
            flush=True,
        )


def report_collection(found: dict[float, list[dict]], limits: Limits) -> dict:
    exact = {share: bounds(share) for share in SHARES}
    print(f"Rollouts per effective group (mean over seeds; rounds a step; surplus groups a step)\n{'':24}" + "".join(
        f"{f'e = {share:.2f}':>26}" for share in SHARES))  # fmt: skip
    for name in RULES:
        cells = []
        for share in SHARES:
            rows = [seed[name] for seed in found[share]]
            mean = {key: np.mean([row[key] for row in rows]) for key in ("per_group", "rounds", "surplus")}
            cells.append(f"{mean['per_group']:8.2f} ({mean['rounds']:5.2f}; {mean['surplus'] / SIZE:5.1f})")
        print(f"{name:24}" + "".join(f"{cell:>26}" for cell in cells))
    for name in next(iter(exact.values())):
        label = name if "oracle" in name or name.startswith("P(") else f"closed form, {name}"
        print(f"{label:42}" + "".join(f"{exact[s][name]:12.3f}" for s in SHARES))
    print("Limits: mean over the seeds + half of its 95 % interval [least, most seed]")
    for rule, other, most in LIMITS:
        for share, limit in most.items():
            ratios = [seed[rule]["per_group"] / seed[other]["per_group"] for seed in found[share]]
            limits.check(f"{rule} / {other}, e = {share:.2f}", ratios, limit)
    for share in SHARES:
        rounds = [seed["SARA top_up"]["rounds"] for seed in found[share]]
        limits.check(f"SARA top_up, rounds a step, e = {share:.2f}", rounds, MOST_ROUNDS)
        extra = [seed["SARA top_up"]["per_group"] / exact[share]["SARA top_up"] - 1 for seed in found[share]]
        limits.check(f"SARA top_up, extra over the closed form, e = {share:.2f}", extra, MOST_EXTRA)
    return {str(share): values for share, values in exact.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)
    start, seeds, limits = time.perf_counter(), range(args.seeds), Limits()
    with ProcessPoolExecutor(args.workers) as workers:
        tasks = {share: [workers.submit(collection, share, seed, args.steps) for seed in seeds] for share in SHARES}
        chosen_tasks = [workers.submit(selected, seed) for seed in seeds]
        submit, few = workers.submit, range(LEARNING_SEEDS)
        learn_tasks = {
            update: {name: [submit(learning, update, name, seed) for seed in few] for name in LEARNING}
            for update in ("linear", "adam1k", "adam20k")
        }
        found = {share: [task.result() for task in row] for share, row in tasks.items()}
        exact = report_collection(found, limits)
        chosen = [task.result() for task in chosen_tasks]
        print(f"SARA + DPS, frozen, e = {SELECTED_SHARE}, after {WARMUP} steps; rollouts per effective group")
        for name in chosen[0]:
            print(f"{name:24}{np.mean([row[name]['per_group'] for row in chosen]):8.2f}")
        ratios = [row["SARA + DPS, warm"]["per_group"] / row["DS waves 1B"]["per_group"] for row in chosen]
        limits.check("SARA + DPS / DS waves 1B, frozen and warm", ratios, MOST_SELECTED)
        print(f"Learning, {BATCH * SIZE} rollouts a step: rollouts to a held-out accuracy of {TARGET}")
        learnt = {
            update: {name: [task.result() for task in row] for name, row in rules.items()}
            for update, rules in learn_tasks.items()
        }
    for update, rules in learnt.items():
        for name, values in rules.items():
            if None in values:
                print(f"  {update}, {name}: {values.count(None)} of {len(values)} do not reach it in {LONGEST} steps")
        for name in list(rules)[1:]:
            ratios = [float("inf") if None in pair else pair[0] / pair[1]
                      for pair in zip(rules[name], rules["uniform"], strict=True)]  # fmt: skip
            limits.check(f"{name} / uniform, {update}", ratios, MOST_LEARNING)
    seconds = time.perf_counter() - start
    record = {
        "what": "rollouts per effective group by rule; see benchmarks/bench_collection.py",
        "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
        "cores": os.cpu_count(), "workers": args.workers, "seconds": round(seconds, 1),
        "prompts": PROMPTS, "batch": BATCH, "group_size": SIZE, "seeds": args.seeds, "steps": args.steps,
        "limits": limits.rows,
        "bounds": exact,
        "collection": {str(share): rows for share, rows in found.items()},
        "selected": chosen,
        "learning": learnt,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, _rounded(record))
    failed = [row["what"] for row in limits.rows if not row["holds"]]
    print(f"written to {args.out} after {seconds:.0f} s; {len(limits.rows) - len(failed)} of {len(limits.rows)} hold")
    return int(bool(failed))


def _rounded(value):
    """Five significant digits, so that the file stays small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
