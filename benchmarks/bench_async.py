"""The three ways through a step on the whole CPU stack: what they learn, how far they lag, and whether books add up.

    python -m benchmarks.bench_async [--seeds 3] [--steps 30] [--out benchmarks/results/async.json]

`uniform` and `sara` in the modes `allocated` (a step waits for its own rollouts), `allocated_colocate_async` and
`allocated_separate_async`: verl, Ray, TransferQueue, FSDP and vLLM's CPU build on the tiny policy. Runs that the result
file has are not made again; one seed's runs come before the next seed's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.result_files import write_result

RESULTS = Path(__file__).parent / "results" / "async.json"
MODES = {"allocated": "cpu/sara", "colocate": "cpu/sara_colocate_async", "separate": "cpu/sara_separate_async"}
LEFT = re.compile(r"rows left in TransferQueue: (\d+)")


def run(mode: str, rule: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train, and read what the run wrote.

    Raises:
        RuntimeError: it did not end with status 0; with the end of its log.
    """
    command = [
        sys.executable, "-m", "verl_ext.main_ppo", "verbose=true", f"recipe={MODES[mode]}",
        f"allocation/allocator={rule}", f"data.seed={seed}", f"allocation.seed={seed}",
        f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{mode}, {rule}, seed {seed} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return figures(folder, done.stdout) | {"seconds": round(time.monotonic() - began, 1)}


def figures(folder: Path, log: str) -> dict[str, Any]:
    """Of a run's folder and its log."""
    from verl_ext.runs.ledger_check import ledger_faults

    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    metrics = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line[name] for line in metrics for name in line if re.match(r"val-core/.*acc.*mean", name)]
    lags: Counter[str] = Counter()
    for line in metrics:
        for name, value in line.items():
            if name.startswith("allocation/async/lag/"):
                lags[name.rpartition("/")[2]] += int(value)
    left = LEFT.findall(log)
    return {
        "accuracy_before": accuracies[0],
        "accuracy": accuracies[-1],
        "steps": len(ledger),
        "rollouts": ledger[-1]["issued_total"],
        "effective_groups": sum(
            line["allocation/batch_effective_share"] * line["allocation/groups"]
            for line in metrics
            if "allocation/groups" in line
        ),
        "groups_by_lag": dict(lags),
        "spliced": sum(line.get("allocation/async/spliced", 0) for line in metrics),
        "fates": {fate: n for fate, n in ledger[-1]["fates_total"].items() if n},
        "in_flight_at_the_end": ledger[-1]["in_flight"],
        "ledger_faults": ledger_faults(ledger),
        "left_in_transfer_queue": int(left[-1]) if left else None,
        "optimizer_steps": sum(line.get("allocation/optimizer_steps", 0) for line in metrics),
    }


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over the seeds of each mode and rule, with their spread."""
    rows = {}
    for name in dict.fromkeys(key.rpartition(", ")[0] for key in runs):
        ours = [one for key, one in runs.items() if key.rpartition(", ")[0] == name]
        accuracy = [one["accuracy"] for one in ours]
        rows[name] = {
            "seeds": len(ours),
            "accuracy": mean(accuracy),
            "accuracy_sd": stdev(accuracy) if len(accuracy) > 1 else None,
            "rollouts": mean(one["rollouts"] for one in ours),
            "ledger_faults": sum(len(one["ledger_faults"]) for one in ours),
            "left_in_transfer_queue": sum(one["left_in_transfer_queue"] for one in ours),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if record.get("steps", args.steps) != args.steps:
        sys.exit(f"{args.out} has runs of {record['steps']} steps: another --out, or --steps {record['steps']}")
    runs = record.get("runs", {})
    for seed in range(args.seeds):
        for rule in ("sara", "uniform"):
            for mode in MODES:
                name = f"{mode}, {rule}, seed {seed}"
                if name in runs:
                    continue
                with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
                    runs[name] = run(mode, rule, seed, args.steps, Path(folder) / "run")
                said = {key: runs[name][key] for key in ("accuracy", "rollouts", "groups_by_lag", "seconds")}
                print(f"{name}: {said}", flush=True)
                record = {"what": "see benchmarks/bench_async.py", "steps": args.steps, "cores": os.cpu_count(),
                          "summary": summary(runs), "runs": runs}  # fmt: skip
                write_result(args.out, record)


if __name__ == "__main__":
    main()
