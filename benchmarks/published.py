"""Published headline figures of the methods beside ours, in a simulated world.

    python -m benchmarks.published [--only pods ...] [--readme benchmarks/README.md] [--out results/published.json]

Under five minutes of one core. Runs the experiments of `benchmarks.published_runs` for several seeds, means with 95 %
intervals (Student's t) over the seeds, and judges the claims of `benchmarks.published_claims`: reached "yes" or "no"
where the whole interval says so, "open" where it does not, "in part" where some of the numbers do. It is a toy: no
model, no text, and three guesses at how an update turns signal into progress, which decide more than the rules do.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.published_claims import judged, table  # noqa: E402
from benchmarks.published_runs import BATCH, EXPERIMENTS, PROMPTS, SHARE, TARGET, interval  # noqa: E402
from benchmarks.result_files import write_result  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "published.json"
MARKS = "<!-- published: begin -->", "<!-- published: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), help="experiments; default: all")
    parser.add_argument("--seeds", type=int, help="seeds of each experiment; default: its own, 3 or 5")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--saved", action="store_true", help="run nothing: judge the numbers in --out once more")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, help="a file in which the table between the two marks is replaced")
    args = parser.parse_args()
    if args.saved:
        record = json.loads(args.out.read_text())
        record["claims"] = judged(record["experiments"])
    else:
        record = measured(args.only or list(EXPERIMENTS), args.seeds, args.workers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, _plain(record))
    for row in record["claims"]:
        numbers = "; ".join(f"{label}: {value}" if label else value for label, value in row["ours"])
        print(f"[{row['reached']:>7}] {row['claim']} ({row['published']})\n          {row['setting']}: {numbers}")
    if args.readme:
        update(args.readme, table(record))
    print(f"written to {args.out} after {record['seconds']:.0f} s ({record['cpu_seconds']:.0f} s CPU)")


def one(name: str, seed: int) -> tuple[dict[str, float], float]:
    """An experiment with one seed, and its CPU seconds."""
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)
    start = time.process_time()
    numbers = EXPERIMENTS[name][0](seed)
    return numbers, time.process_time() - start


def measured(names: list[str], seeds: int | None, workers: int) -> dict:
    """Run experiments and judge the claims they bear on."""
    began = time.perf_counter()
    found: dict[str, dict] = {}
    seconds: dict[str, float] = {}
    with ProcessPoolExecutor(workers) as pool:
        tasks = {
            name: [pool.submit(one, name, seed) for seed in range(seeds or EXPERIMENTS[name][1])] for name in names
        }
        for name, running in tasks.items():
            rows, spent = zip(*(task.result() for task in running), strict=True)
            seconds[name] = round(sum(spent), 1)
            found[name] = {key: interval([row[key] for row in rows]) for key in rows[0]}
            print(f"{name}: {len(rows)} seeds, {seconds[name]:.0f} CPU seconds", flush=True)
    return {
        "what": "published figures beside ours, simulated; see benchmarks/published.py",
        "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
        "cores": os.cpu_count(), "seconds": round(time.perf_counter() - began, 1),
        "workers": workers, "cpu_seconds": round(sum(seconds.values()), 1), "cpu_seconds_by_experiment": seconds,
        "prompts": PROMPTS, "batch": BATCH, "effective_share_of_8": SHARE, "target": TARGET,
        "claims": judged(found), "experiments": found,
    }  # fmt: skip


def update(readme: Path, markdown: str) -> None:
    """Replace what stands between the marks.

    Raises:
        SystemExit: the file has no marks.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{readme}: no lines {MARKS[0]} and {MARKS[1]} to put the table between")
    readme.write_text(f"{before}{begin}\n{markdown}\n{end}{after}")


def _plain(value):
    """Five significant digits; what is infinite, a target that was not reached, becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if np.isfinite(value) else None
    return value


if __name__ == "__main__":
    main()
