"""Selectors on one core: CPU seconds of an update and bytes a prompt, by size of the pool.

    python -m benchmarks.bench_selectors [--sizes 1000 17000] [--out benchmarks/results/selectors.json]

An update is everything between two steps: outcomes into posteriors, duals (or filters), the price, and the next
ranking with its first batch. It is timed with new outcomes for all prompts at once (``all_s``), which is an epoch's
update, and as a step of 128 groups goes, through the same calls as in training (``step_s``).
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from statistics import median

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.result_files import write_result  # noqa: E402
from verl_ext.allocation import PromptPool, make_selector  # noqa: E402

SIZES = (1_000, 17_000, 100_000, 1_000_000)
MOST_S = {("cero", 17_000): 0.010, ("cero", 1_000_000): 0.5}
"""Most seconds for hearing of the outcomes of the whole pool and updating on them."""
GROUPS, GROUP_SIZE = 128, 8
RESULTS = Path(__file__).parent / "results" / "selectors.json"


def array_bytes(selector) -> int:
    """Bytes of the arrays a selector keeps between steps."""
    return sum(value.nbytes for value in vars(selector).values() if isinstance(value, np.ndarray))


def settings(name: str) -> dict:
    return {"rounds": 265} if name == "cero" else {}


def begin(selector, pool: PromptPool, step: int) -> list[int]:
    """Open a step and choose its first batch."""
    pool.begin_step()
    selector.begin_step(step, pool)
    selector.step_budget(GROUPS, GROUP_SIZE, 6 * GROUPS * GROUP_SIZE)
    return selector.select(GROUPS)


def outcomes(rng: np.random.Generator, rows: list[int]) -> list[tuple[int, int]]:
    return list(zip(rows, rng.binomial(GROUP_SIZE, rng.beta(0.3, 0.5, len(rows))).tolist(), strict=True))


def tell(selector, told: list[tuple[int, int]], issue: bool) -> None:
    for row, successes in told:
        if issue:
            selector.issued(row, GROUP_SIZE)
        selector.observe(row, successes, GROUP_SIZE, GROUP_SIZE)


def measure(name: str, size: int, repeats: int) -> dict[str, float]:
    """Medians over ``repeats`` steps."""
    rng = np.random.default_rng(size)
    pool = PromptPool([str(i) for i in range(size)])
    selector = make_selector(name, **settings(name))
    rows = begin(selector, pool, 0)
    step_s, all_s, tell_s = [], [], []
    for step in range(1, 2 * repeats + 1):
        every = step > repeats
        told = outcomes(rng, list(range(size)) if every else rows)
        start = time.process_time()
        tell(selector, told, issue=not every)  # an update of the whole pool needs no budget for it
        between = time.process_time()
        selector.end_step()
        rows = begin(selector, pool, step)
        end = time.process_time()
        if every:
            all_s.append(end - between)
            tell_s.append(between - start)
        else:
            step_s.append(end - start)
    return {
        "step_s": median(step_s),
        "all_s": median(all_s),
        "observe_us": median(tell_s) / size * 1e6,
        "together_s": median(told + updated for told, updated in zip(tell_s, all_s, strict=True)),
        "bytes_a_prompt": array_bytes(selector) / size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--names", nargs="+", default=["cero", "dps", "mopps"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    print(
        f"{'selector':9} {'prompts':>9} {'step of 128':>12} {'whole pool':>11} {'observe':>9} {'together':>11} "
        f"{'bytes/prompt':>12}"
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    over: list[tuple[str, int]] = []
    for name in args.names:
        for size in args.sizes:
            numbers = measure(name, size, args.repeats)
            results.setdefault(name, {})[str(size)] = numbers
            limit = MOST_S.get((name, size))
            if limit and numbers["together_s"] > limit:
                over.append((name, size))
            print(
                f"{name:9} {size:9,} {numbers['step_s'] * 1e3:9.2f} ms {numbers['all_s'] * 1e3:8.2f} ms "
                f"{numbers['observe_us']:6.2f} us {numbers['together_s'] * 1e3:8.2f} ms "
                f"{numbers['bytes_a_prompt']:12.1f}"
                + (f"  limit {limit * 1e3:.0f} ms" + "  OVER" * (numbers["together_s"] > limit) if limit else ""),
                flush=True,
            )
    record = {
        "what": "update of a selector: median CPU seconds on one core; observe_us: microseconds an observed group",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "numpy": np.__version__,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "repeats": args.repeats,
        "limits_together_s": {f"{name} {size}": limit for (name, size), limit in MOST_S.items()},
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, record)
    print(f"written to {args.out}")
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
