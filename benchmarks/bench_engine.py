"""Driver time a rollout, and memory by step, of the real collector, Ray actors and TransferQueue around a fake engine.

    python -m benchmarks.bench_engine [--steps 20 200] [--out benchmarks/results/fake_engine.json]

Two runs, each on a Ray cluster of its own: 20 steps of 8,192 rollouts and 200 steps of 256. SARA spends a fixed number
of rollouts a step (`allocation.stop.rollouts`) on 17,000 prompts whose success rates are latent; the engine is fake,
all around it is real. After each step the trained rows are cleared, as the trainer does, and the memory that each
process has allocated (RssAnon) is read. The slope of memory over the steps, the first tenth left out, is Theil-Sen's
with its 95 % interval, which takes the steps for independent; they are not quite. Exit status 1 if something is left in
TransferQueue or in the driver after a step, or if the slope of the second half would grow memory by more than a
twentieth over all the counted steps: in the first half caches fill, and the bounded lists that Ray keeps of its tasks.
A run makes no further step after --most-s seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks.result_files import write_result

RESULTS = Path(__file__).parent / "results" / "fake_engine.json"
PROMPTS, GROUP_SIZE, WORKERS = 17_000, 8, 2
RUNS = {"8192 a step": (8192, 20), "256 a step": (256, 200)}
PARTS = {
    "worker": "ray::FakeEngineWorker",
    "storage": "ray::SimpleStorageUnit",
    "controller": "ray::TransferQueueController",
    "gcs": "gcs_server",
}
"""Processes by what Ray calls them; storage and controller are TransferQueue's."""
REST = "rest"
"""All other processes of the run: raylet, Ray's agents, workers without work."""
MOST_GROWTH = 0.05
LEAST_STEPS, MOST_S = 6, 600
"""A slow machine makes fewer steps, which is said."""


def run_steps(rollouts: int, steps: int, out: Path, most_s: float = float("inf")) -> None:
    """All of one run, in this process; a list of numbers a step is written to ``out``, anew after each step.

    Ends after ``most_s`` seconds of steps, but not before it has made a few.
    """
    from verl_ext.testing.fake_run import fake_config, fake_run

    config = fake_config(
        [
            f"data.train_batch_size={rollouts // GROUP_SIZE}",
            f"allocation.stop.rollouts={rollouts}",
            f"actor_rollout_ref.rollout.agent.num_workers={WORKERS}",
        ]
    )
    own, lines = psutil.Process(), []
    with fake_run(config, prompts=PROMPTS) as collector:
        import transfer_queue as tq  # after the platform is set, as all that imports verl

        from verl_ext.testing.fake_engine import FakeEngineSettings
        from verl_ext.training.collector import NoUpdate

        collector.backend.manager.set_model(FakeEngineSettings())  # answers once the workers are there
        titles, rest = set(), []
        processes: dict[str, list[psutil.Process]] = {part: [] for part in PARTS}
        for process in own.children(recursive=True):
            title = " ".join(process.cmdline()[:1])
            titles.add(title)
            for part, name in PARTS.items():
                if title.startswith(name) or os.path.basename(title) == name:
                    processes[part].append(process)
                    break
            else:
                rest.append(process)
        missing = [name for part, name in PARTS.items() if not processes[part]]
        assert not missing, f"no process is called {missing} among {sorted(t for t in titles if t.startswith('ray::'))}"
        processes |= {"driver": [own], REST: rest}
        began = time.perf_counter()
        for step in range(1, steps + 1):
            cpu = {part: _cpu(found) for part, found in processes.items()}
            start = time.perf_counter()
            try:
                meta, metrics = collector.sample(step)
            except NoUpdate as error:
                metrics = error.metrics
            else:
                tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
            line = {"wall_s": time.perf_counter() - start}
            line |= {f"{part}_cpu_s": _cpu(found) - cpu[part] for part, found in processes.items()}
            line |= {f"{part}_bytes": sum(map(allocated_bytes, found)) for part, found in processes.items()}
            names = ("step_rollouts", "rounds", "groups", "effective_share", "driver_s", "round_gap_s")
            line |= {name: metrics[f"allocation/{name}"] for name in names if f"allocation/{name}" in metrics}
            line["left_in_queue"] = len((tq.kv_list("train") or {}).get("train", {}))
            line["left_in_driver"] = len(collector.backend._rows)
            lines.append(line)
            out.write_text(json.dumps({"steps": lines, "processes": {part: len(p) for part, p in processes.items()}}))
            if time.perf_counter() - began > most_s and step >= LEAST_STEPS:
                break


def _cpu(processes) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(t.user + t.system for t in times)


def allocated_bytes(process: psutil.Process) -> int:
    """Anonymous memory of a process in RAM; nothing once it has ended.

    Pages of programs and libraries are left out. The set size that is unique to a process counts them, and so changes
    by megabytes whenever another run on the machine maps the same files or ends.
    """
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def trend(lines: list[dict], part: str) -> dict[str, float]:
    """How the bytes of a part change with the steps."""
    import numpy as np
    from scipy.stats import theilslopes

    first = max(1, len(lines) // 10)
    counted = np.array([line[f"{part}_bytes"] for line in lines[first:]], float)
    slope, _, low, high = theilslopes(counted, np.arange(len(counted)))
    late = counted[len(counted) // 2 :]  # caches fill while a run is young
    late_slope, _, late_low, late_high = theilslopes(late, np.arange(len(late)))
    rollouts = np.mean([line["step_rollouts"] for line in lines[first:]])
    return {
        "bytes": float(np.median(counted)),
        "first_bytes": float(counted[0]),
        "last_bytes": float(counted[-1]),
        "bytes_a_step": float(slope), "low": float(low), "high": float(high),
        "late_bytes_a_step": float(late_slope), "late_low": float(late_low), "late_high": float(late_high),
        "bytes_a_rollout": float(slope / rollouts),
        "growth": float(late_slope * (len(counted) - 1) / np.median(counted)),
    }  # fmt: skip


def summarise(lines: list[dict]) -> dict:
    """Seconds a rollout (medians over the steps but the first) and trends of memory."""
    counted = lines[1:]

    def a_rollout(name: str) -> float:
        return median(line[name] / line["step_rollouts"] for line in counted) * 1e6

    parts = ("driver", *(part for part in (*PARTS, REST) if f"{part}_bytes" in lines[0]))
    half = len(counted) // 2
    return {
        "us_a_rollout": {
            "driver_cpu": a_rollout("driver_cpu_s"), "driver_outside_generate": a_rollout("driver_s"),
            "wall": a_rollout("wall_s"), **{f"{part}_cpu": a_rollout(f"{part}_cpu_s") for part in parts[1:]},
        },
        "driver_cpu_us_by_half": [
            median(line["driver_cpu_s"] / line["step_rollouts"] for line in part) * 1e6
            for part in (counted[:half], counted[half:])
        ],
        "rollouts_a_second": 1e6 / a_rollout("wall_s"),
        "rounds_a_step": sum(line["rounds"] for line in counted) / len(counted),
        "round_gap_s": median(line["round_gap_s"] for line in counted if "round_gap_s" in line),
        "rollouts": sum(line["step_rollouts"] for line in lines),
        "memory": {part: trend(lines, part) for part in parts},
        "left_in_queue": max(line["left_in_queue"] for line in lines),
        "left_in_driver": max(line["left_in_driver"] for line in lines),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs=2, default=[steps for _, steps in RUNS.values()])
    parser.add_argument("--most-s", type=float, help=f"seconds after which a run makes no further step; {MOST_S}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--saved", action="store_true", help="run nothing: summarise the steps in --out once more")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # rollouts, steps, file: the run itself
    args = parser.parse_args()
    if args.one:
        run_steps(int(args.one[0]), int(args.one[1]), Path(args.one[2]), args.most_s or float("inf"))
        return 0
    if args.saved:
        record = json.loads(args.out.read_text())
        for run in record["runs"].values():
            run |= summarise(run["by_step"])
    else:
        record = measured(args.steps, args.most_s or MOST_S)
    record["failed"] = [fault for name, run in record["runs"].items() for fault in shown(name, run)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, _rounded(record))
    verdict = "; ".join(record["failed"]) or f"nothing is left behind, no memory grows by more than {MOST_GROWTH:.0%}"
    print(f"written to {args.out} after {record['seconds']:.0f} s; {verdict}")
    return int(bool(record["failed"]))


def measured(wanted: list[int], most_s: float) -> dict:
    """Both runs, each in a process of its own."""
    began, results = time.perf_counter(), {}
    for (name, (rollouts, _)), steps in zip(RUNS.items(), wanted, strict=True):
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "steps.json"
            command = [sys.executable, "-m", "benchmarks.bench_engine", "--one", str(rollouts), str(steps), str(file)]
            done = subprocess.run([*command, "--most-s", str(most_s)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name}: exit status {done.returncode}\n" + (done.stdout + done.stderr)[-4000:])
            found = json.loads(file.read_text())
        lines = found["steps"]
        results[name] = {"steps": len(lines), "steps_wanted": steps, "processes": found["processes"]}
        results[name] |= summarise(lines) | {"by_step": lines}
    return {
        "what": "fake engine behind the real collector and TransferQueue; see benchmarks/bench_engine.py",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_after": os.getloadavg()[1], "python": platform.python_version(),
        "seconds": round(time.perf_counter() - began, 1), "prompts": PROMPTS, "most_growth": MOST_GROWTH,
        "runs": results,
    }  # fmt: skip


def shown(name: str, run: dict) -> list[str]:
    """Print a run's numbers.

    Returns:
        What is wrong with it.
    """
    us, halves, failed = run["us_a_rollout"], run["driver_cpu_us_by_half"], []
    print(
        f"{name}, {run['steps']} of {run['steps_wanted']} steps, {run['rollouts']:,.0f} rollouts, "
        f"{run['rounds_a_step']:.1f} rounds a step, {run['rollouts_a_second']:.0f} rollouts/s\n"
        f"  CPU a rollout: driver {us['driver_cpu']:.0f} us (first half of the steps {halves[0]:.0f}, second "
        f"{halves[1]:.0f}), workers {us['worker_cpu']:.0f} us, storage {us['storage_cpu']:.0f} us, controller "
        f"{us['controller_cpu']:.0f} us; {us['driver_outside_generate']:.0f} us of the driver's outside the rounds"
    )
    for part, row in run["memory"].items():
        print(
            f"  {part:10} {row['bytes'] / 2**20:7.1f} MiB, {row['bytes_a_step'] / 2**10:+8.1f} "
            f"[{row['low'] / 2**10:+.1f}, {row['high'] / 2**10:+.1f}] KiB a step, {row['bytes_a_rollout']:+.1f} "
            f"bytes a rollout; in the second half of the steps "
            f"{row['late_bytes_a_step'] / 2**10:+.1f} [{row['late_low'] / 2**10:+.1f}, "
            f"{row['late_high'] / 2**10:+.1f}] KiB a step, which makes {row['growth']:+.1%} over all"
        )
        if row["growth"] > MOST_GROWTH:
            failed.append(f"{name}: memory of {part} grows by {row['growth']:.1%}")
    for where in ("queue", "driver"):
        if run[f"left_in_{where}"]:
            failed.append(f"{name}: {run[f'left_in_{where}']} rows left in the {where} after a step")
    return failed


def _rounded(value):
    """Five significant digits, so that the file stays small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
