"""Run benchmarks by their Make targets and write down how long each takes: what `make bench` does.

    python -m benchmarks.durations bench-core bench-scaling ... [--out benchmarks/results/durations.json]

All are run, also after one that fails. Targets that are not named keep what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.result_files import write_result

RESULTS = Path(__file__).parent / "results" / "durations.json"
MOST_S = 25 * 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    failed, total = [], 0.0
    for target in args.targets:
        load, start = os.getloadavg()[0], time.perf_counter()
        code = subprocess.run(["make", "--no-print-directory", target]).returncode
        seconds = time.perf_counter() - start
        total += seconds
        record[target] = {"seconds": round(seconds, 1), "exit_status": code, "load_before": round(load, 2)}
        failed += [target] * bool(code)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_result(args.out, record)
    print(f"\n{'benchmark':24}{'seconds':>9}  exit status")
    for target in args.targets:
        print(f"{target:24}{record[target]['seconds']:9.0f}  {record[target]['exit_status']}")
    print(f"{'all':24}{total:9.0f}  ({MOST_S} at the most wanted); written to {args.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
