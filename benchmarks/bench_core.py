"""The core's own cost on one core: verdicts, down-sampling, and the loop around an engine that takes no time.

``make bench-core`` prints a table and writes ``benchmarks/results/core.json``. Times are CPU seconds of this process,
the best of several runs; limits are those the project has set itself.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.allocation import (  # noqa: E402
    Allocation,
    max_variance_mask,
    sara_verdicts,
)
from verl_ext.simulation.simulated_backend import SimulatedBackend  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "core.json"


def best(work, repeats=5):
    """Least CPU seconds of a call, and its result."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def verdicts():
    """SARA's verdicts for a million groups of eight."""
    rng = np.random.default_rng(0)
    trials = rng.integers(0, 9, 1_000_000)
    successes = rng.binomial(trials, rng.beta(0.3, 0.4, len(trials)))
    seconds, codes = best(lambda: sara_verdicts(successes, trials, 8, probe=4))
    expected = np.where((successes > 0) & (successes < trials), 1, np.where(trials >= 4, 2, 0))
    assert np.array_equal(codes, expected), "the verdicts differ from the rule"
    return seconds


def every_split(rewards, keep):
    """The published PODS code's method: sort, then compute the variance of each split of highest and lowest.

    Its strict comparison keeps the split with the fewest highest rewards among equal ones; variances are rounded to
    1e-12 here, since float residue would otherwise decide ties.
    """
    mask = np.zeros(rewards.shape, bool)
    for row, values in enumerate(rewards):
        order = np.argsort(values, kind="stable")
        found, widest = None, -1.0
        for high in range(keep + 1):
            chosen = np.concatenate([order[: keep - high], order[len(values) - high :]])
            variance = round(float(np.var(values[chosen])), 12)
            if variance > widest:
                found, widest = chosen, variance
        mask[row, found] = True
    return mask


def pods(rewards, keep, groups_tried):
    """Seconds for all groups; and for the first ``groups_tried`` beside the published way, with the same results."""
    seconds, mask = best(lambda: max_variance_mask(rewards, keep))
    seeded, _ = best(lambda: max_variance_mask(rewards, keep, np.random.default_rng(0)))
    part = rewards[:groups_tried]
    theirs, reference = best(lambda: every_split(part, keep), repeats=1)
    ours, _ = best(lambda: max_variance_mask(part, keep))
    chosen, wanted = (np.sort(np.where(m, part, np.inf), axis=1)[:, :keep] for m in (mask[:groups_tried], reference))
    assert np.array_equal(chosen, wanted), "the two ways choose different rewards"
    return seconds, seeded, theirs / groups_tried, ours / groups_tried


def loop(name, **settings):
    """Microseconds a rollout of everything around ``generate``: ask, checks, records, verdicts, fates, ledger."""
    rates = np.random.default_rng(0).beta(0.15, 0.25, 20_000)
    backend = SimulatedBackend(rates)
    generating = 0.0
    generate = backend.generate

    def timed(requests):
        nonlocal generating
        start = time.process_time()
        outcomes = generate(requests)
        generating += time.process_time() - start
        return outcomes

    backend.generate = timed
    given = {"allocator": {"name": name, **settings}, "stop": {"groups": 512}}
    allocation = Allocation.from_settings(given, [str(i) for i in range(len(rates))])
    cost = []
    for step in range(12):
        generating, start = 0.0, time.process_time()
        collected = allocation.collect(step, backend)
        cost.append((time.process_time() - start - generating) / collected.rollouts)
    return float(np.median(cost)) * 1e6


def main() -> int:
    rng = np.random.default_rng(1)
    shape = (10_000, 64)
    rewards = {
        "binary": (rng.random(shape) < rng.random((shape[0], 1))).astype(float),
        "graded": np.round(rng.random(shape), 1),
        "continuous": rng.normal(size=shape),
    }
    rows = [("SARA verdicts, 1,000,000 groups", verdicts(), "s", 0.2)]
    for name, values in rewards.items():
        seconds, seeded, theirs, ours = pods(values, 16, 500)
        rows += [
            (f"max_variance_mask, 10,000 x 64 -> 16, {name}", seconds, "s", 0.1),
            (f"  the same, equal rewards sampled, {name}", seeded, "s", 0.1),
            (f"  every split's variance, {name}, scaled from 500", theirs * shape[0], "s", None),
            (f"  times faster, {name}, on the same 500 groups", theirs / ours, "x", None),
        ]
    rows += [
        ("collect around generate, uniform", loop("uniform"), "us/rollout", 10),
        ("collect around generate, dynamic_sampling", loop("dynamic_sampling"), "us/rollout", 10),
        ("collect around generate, sara", loop("sara"), "us/rollout", 10),
    ]
    width = max(len(name) for name, *_ in rows)
    print(f"{'':{width}}  {'measured':>10}  {'limit':>6}")
    for name, value, unit, limit in rows:
        over = "" if limit is None or value <= limit else "  OVER"
        print(f"{name:{width}}  {value:10.4g}  {'' if limit is None else limit:>6} {unit}{over}")
    RESULTS.parent.mkdir(exist_ok=True)
    write_result(
        RESULTS,
        {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "results": [dict(zip(("name", "value", "unit", "limit"), row, strict=True)) for row in rows],
        },
    )
    return int(any(limit is not None and value > limit for _, value, _, limit in rows))


if __name__ == "__main__":
    sys.exit(main())
