"""The core by number of prompts, on one core: seconds, bytes a prompt, and how they grow.

    python -m benchmarks.bench_scaling [--sizes 1000 10000 100000 1000000] [--out benchmarks/results/scaling.json]

For each selector: a training step of 128 groups of 8 on a pool of M prompts (open the step, choose, hear of the
outcomes, update), an update with outcomes of all M prompts, bytes a prompt of the selector's own state and of the pool.
For the allocators: verdicts on M groups at once, and the whole loop around an engine that takes no time, M rollouts a
step. Times are CPU seconds, medians; bytes are what tracemalloc counts. Growth is the slope of log seconds over log M,
by least squares over all sizes (``slope``) and over the largest two (``slope_last``): 1 is linear, 0 independent of M.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import time
import tracemalloc
from pathlib import Path
from statistics import median

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.bench_core import best  # noqa: E402
from benchmarks.bench_selectors import GROUP_SIZE, begin, outcomes, settings, tell  # noqa: E402
from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.allocation import (  # noqa: E402
    Allocation,
    PromptPool,
    make_selector,
    prompt_key,
    sara_verdicts,
)
from verl_ext.simulation.simulated_backend import SimulatedBackend  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "scaling.json"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
SELECTORS = ("shuffled", "cero", "dps", "mopps", "greso")
ALLOCATORS = ("uniform", "dynamic_sampling", "sara")
MOST_ROLLOUTS = 100_000  # a million rollouts in one step is no use case, and half a gigabyte of Python objects
SLOPE = 1.1
"""Most that anything may grow by: linearly, with room for caches that a large pool no longer fits."""


def keys(size: int) -> list[str]:
    """Of the length that the keys of real prompts have, at least."""
    width = len(prompt_key("a", "b", "c"))
    return [f"{row:0{width}x}" for row in range(size)]


def slopes(seconds: dict[int, float]) -> dict[str, float]:
    """Of log seconds over log size."""
    x, y = np.log10(list(seconds)), np.log10(list(seconds.values()))
    return {"slope": float(np.polyfit(x, y, 1)[0]), "slope_last": float((y[-1] - y[-2]) / (x[-1] - x[-2]))}


def held(make):
    """Bytes that ``make()`` leaves allocated, and what it returns."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size, made


def selector_at(name: str, size: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(size)
    pool = PromptPool(keys(size))
    selector = make_selector(name, **settings(name))
    rows = begin(selector, pool, 0)
    step_s, all_s = [], []
    for step in range(1, 2 * repeats + 1):
        every = step > repeats
        told = outcomes(rng, list(range(size)) if every else rows)
        start = time.process_time()
        tell(selector, told, issue=not every)
        selector.end_step()
        rows = begin(selector, pool, step)
        (all_s if every else step_s).append(time.process_time() - start)
    del selector

    def grown():
        fresh = make_selector(name, **settings(name))
        chosen = begin(fresh, pool, 3 * repeats)
        tell(fresh, outcomes(rng, chosen), issue=True)
        fresh.end_step()
        return fresh

    return {"step_s": median(step_s), "all_s": median(all_s), "bytes_a_prompt": held(grown)[0] / size}


def pool_bytes(size: int) -> dict[str, float]:
    names, pool = held(lambda: keys(size))
    own, pool = held(lambda: PromptPool(pool))
    order, _ = held(lambda: (pool.begin_step(), pool.take(1)))
    return {"keys": names / size, "pool": own / size, "order": order / size}


def verdicts_at(size: int) -> float:
    rng = np.random.default_rng(0)
    trials = rng.integers(0, 9, size)
    successes = rng.binomial(trials, rng.beta(0.3, 0.4, size))
    return best(lambda: sara_verdicts(successes, trials, GROUP_SIZE, probe=4), repeats=9)[0]


def loop_at(name: str, rollouts: int, repeats: int) -> float:
    """CPU seconds of a step of about ``rollouts`` rollouts, the engine's time taken off."""
    prompts = max(1_000, rollouts)
    backend = SimulatedBackend(np.random.default_rng(0).beta(0.15, 0.25, prompts))
    stop = {"groups": max(1, rollouts // (3 * GROUP_SIZE)), "rollouts": rollouts}
    allocation = Allocation.from_settings({"allocator": {"name": name}, "stop": stop, "max_rounds": 20}, keys(prompts))
    generate, generating = backend.generate, 0.0

    def timed(requests):
        nonlocal generating
        start = time.process_time()
        given = generate(requests)
        generating += time.process_time() - start
        return given

    backend.generate = timed
    cost = []
    for step in range(1, repeats + 1):
        generating, start = 0.0, time.process_time()
        done = allocation.collect(step, backend)
        cost.append((time.process_time() - start - generating) / done.rollouts * rollouts)
    return median(cost)


def line(name: str, numbers: list[float], growth: dict[str, float], unit: str, scale: float) -> None:
    cells = "".join(f"{value * scale:11.3f}" for value in numbers)
    print(f"{name:48}{cells} {unit:4} slope {growth['slope']:5.2f}, last {growth['slope_last']:5.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)
    began = time.perf_counter()
    print(f"{'CPU seconds on one core, by prompts':48}" + "".join(f"{size:11,}" for size in args.sizes))
    timed: dict[str, dict] = {}

    def keep(name: str, seconds: dict[int, float], unit: str = "ms", scale: float = 1e3) -> None:
        growth = slopes(seconds)
        timed[name] = {"seconds": {str(size): value for size, value in seconds.items()}, **growth}
        line(name, list(seconds.values()), growth, unit, scale)

    memory: dict[str, dict[str, float]] = {}
    for name in SELECTORS:
        found = {size: selector_at(name, size, args.repeats) for size in args.sizes}
        keep(f"{name}, step of 128 groups", {size: row["step_s"] for size, row in found.items()})
        keep(f"{name}, outcomes of all prompts", {size: row["all_s"] for size, row in found.items()})
        memory[name] = {str(size): row["bytes_a_prompt"] for size, row in found.items()}
    keep("sara_verdicts, a group a prompt", {size: verdicts_at(size) for size in args.sizes})
    few = [size for size in args.sizes if size <= MOST_ROLLOUTS]
    for name in ALLOCATORS:
        keep(f"collect, {name}, M rollouts", {size: loop_at(name, size, args.repeats) for size in few})
    pools = {size: pool_bytes(size) for size in args.sizes}
    for part in ("keys", "pool", "order"):
        memory[f"pool: {part}"] = {str(size): row[part] for size, row in pools.items()}
    print(f"{'bytes a prompt':48}" + "".join(f"{size:11,}" for size in args.sizes))
    for name, row in memory.items():
        print(f"{name:48}" + "".join(f"{value:11.1f}" for value in row.values()))
    over = [name for name, row in timed.items() if row["slope"] > SLOPE]
    seconds = time.perf_counter() - began
    record = {
        "what": "CPU seconds and bytes a prompt by size of the pool; see benchmarks/bench_scaling.py",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(), "numpy": np.__version__, "seconds": round(seconds, 1),
        "groups": 128, "group_size": GROUP_SIZE, "repeats": args.repeats, "most_slope": SLOPE,
        "grows_faster": over, "time": timed, "bytes_a_prompt": memory,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, record)
    print(f"written to {args.out} after {seconds:.0f} s; grows faster than M^{SLOPE}: {', '.join(over) or 'nothing'}")
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
