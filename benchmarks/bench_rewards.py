"""Answers a second through the mathematics reward, as verl calls it: one call an answer, from threads, group by group.

``make bench-rewards`` prints a table and writes ``benchmarks/results/rewards.json``. Wall figures are the best of
several passes with warm workers. Processor time (this process and its workers) is given beside them: on a busy machine
it says what the clock cannot.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.result_files import write_result
from verl_ext.rewards import math_verify
from verl_ext.rewards import worker_pool as pool
from verl_ext.rewards.math_verify import compute_score

RESULTS = Path(__file__).parent / "results" / "rewards.json"
LIMIT = 500
PROMPTS, ROLLOUTS, PASSES = 100, 8, 2
THREADS = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio's default executor has, in which verl calls a reward."""

PROSE = "We use the identity $a^2-b^2=(a-b)(a+b)$ and simplify; hence $n=\\frac{m(m+1)}{2}$ for all $m \\ge 1$. " * 20
"""About 2,000 characters before the final answer."""


def integer(rng: random.Random, off: int) -> tuple[str, str]:
    a = rng.randrange(10_000)
    return str(a + off), str(a)


def fraction(rng: random.Random, off: int) -> tuple[str, str]:
    a, b = rng.randrange(1, 200), rng.randrange(2, 200)
    return rf"\dfrac{{{2 * (a + off)}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b}}}"


def decimal(rng: random.Random, off: int) -> tuple[str, str]:
    a = rng.randrange(1000)
    return f"{a + off}.5", rf"\frac{{{2 * a + 1}}}{{2}}"


def root(rng: random.Random, off: int) -> tuple[str, str]:
    a, b = rng.randrange(2, 99), rng.choice([2, 3, 5, 6, 7, 10, 11])
    return rf"{a + off}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}"


def pair(rng: random.Random, off: int) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return rf"\left({a + off}, {b}\right)", f"({a},{b})"


def polynomial(rng: random.Random, off: int) -> tuple[str, str]:
    a, b, c = (rng.randrange(2, 100) for _ in range(3))
    return f"{b}x + {a + off}x^2 - {c}", f"{a}x^2+{b}x-{c}"


MIXES = {
    "integers after `Answer:` (DAPO-Math-17K)": {integer: 1.0},
    "boxed, two in three integers (like MATH)": {
        integer: 0.66, fraction: 0.12, decimal: 0.05, root: 0.06, pair: 0.05, polynomial: 0.06,
    },
}  # fmt: skip
EXPRESSIONS = {fraction: 0.2, decimal: 0.2, root: 0.2, pair: 0.2, polynomial: 0.2}


def groups(mix: dict, prompts: int, rollouts: int, rng: random.Random) -> list[tuple[str, str, bool]]:
    """(response, truth, whether it is right): groups of rollouts, each right with the prompt's own probability."""
    cases = []
    style = "Answer: ${}$" if len(mix) == 1 else "\\boxed{{{}}}"
    for _ in range(prompts):
        [kind] = rng.choices(list(mix), list(mix.values()))
        seed, rate = rng.random(), rng.random()
        for _ in range(rollouts):
            off = 0 if rng.random() < rate else rng.choice([1, 2, 3])
            answer, truth = kind(random.Random(seed), off)
            cases.append((PROSE + style.format(answer), truth, off == 0))
    return cases


def workers_cpu() -> float:
    """Processor seconds of the workers that are running."""
    ticks = 0
    for one in pool._pools.values():
        for pid in one.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(mix: dict, prompts: int, rollouts: int, threads: ThreadPoolExecutor) -> dict:
    """Answers a second and processor time an answer, and how many were judged otherwise than they were made."""
    best, cpu, otherwise, unscored = 0.0, [], 0, 0
    for number in range(PASSES + 1):
        cases = groups(mix, prompts, rollouts, random.Random(f"{list(mix)[0].__name__} {len(mix)} {number}"))
        math_verify._verdicts.clear()
        before, started = time.process_time() + workers_cpu(), time.perf_counter()
        results = list(threads.map(lambda case: compute_score("bench", case[0], case[1]), cases))
        seconds, spent = time.perf_counter() - started, time.process_time() + workers_cpu() - before
        otherwise += sum(result["acc"] is not case[2] for result, case in zip(results, cases, strict=True))
        unscored += sum(result["unscored"] is not None for result in results)
        if number:  # in the first pass workers start and tables are built
            best = max(best, len(cases) / seconds)
            cpu.append(1e3 * spent / len(cases))
    return {
        "answers_per_s": round(best, 1),
        "cpu_ms_per_answer": round(min(cpu), 3),
        "judged_otherwise": otherwise,
        "unscored": unscored,
    }


def show(name: str, result: dict) -> dict:
    """Print one line; returns the result."""
    print(
        f"{name:42} {result['answers_per_s']:9.1f} answers/s {result['cpu_ms_per_answer']:8.3f} CPU ms each", flush=True
    )
    return result


def main() -> int:
    """Measure all mixes; 1 where an ordinary one is below the limit or any answer was judged otherwise."""
    results = {}
    with ThreadPoolExecutor(THREADS) as threads:
        for name, mix in MIXES.items():
            results[name] = show(name, measure(mix, PROMPTS, ROLLOUTS, threads))
        name = "expressions only, every answer another"
        results[name] = show(name, measure(EXPRESSIONS, PROMPTS, 1, threads))
    pool.close_pools()
    write_result(
        RESULTS,
        {
            "python": platform.python_version(),
            "math-verify": version("math-verify"),
            "cores": len(os.sched_getaffinity(0)),
            "load_at_end": round(os.getloadavg()[0], 1),
            "limit_answers_per_s": {name: LIMIT for name in MIXES},
            "results": results,
        },
    )
    slow = [name for name in MIXES if results[name]["answers_per_s"] < LIMIT]
    bad = [name for name, result in results.items() if result["judged_otherwise"] or result["unscored"]]
    print(f"below {LIMIT}/s: {slow or 'none'}; judged otherwise or unscored: {bad or 'none'}")
    return int(bool(slow or bad))


if __name__ == "__main__":
    sys.exit(main())
