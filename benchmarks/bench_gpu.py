"""First figures on a GPU, in stages of at most 8 minutes; without one, a rehearsal of stage A's short runs.

    python -m benchmarks.bench_gpu [--stages A,B,C,D] [--minutes 8] [--steps 4] [--runs "sara streaming"]

(A) the tiny policy, generated for by Hugging Face code: rules, precision, LoRA, FSDP 1 and 2, saving and resuming;
(B) the same with vLLM: memory that its sleep frees, seconds of a weight sync, requests aborted, prefix-cache hits;
(C) random weights of half a billion parameters, answers of up to 4,096 tokens: rules against verl's own trainer;
(D) the laboratory with policies of 10 and 100 million parameters.

What a stage lacks is said, and the others run. A run that fails or takes too long is written down as such.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.measured_run import run
from benchmarks.gpu.stages import STAGES, cuda_here
from benchmarks.result_files import write_result
from verl_ext.runs.provenance import provenance

RESULTS = Path(__file__).parent / "results" / "gpu.json"
REHEARSAL = ("sara streaming", "sara saved", "sara saved+resumed")
"""Runs of a rehearsal, unless others are named."""


def stage_runs(stage: str, folder: Path, steps: int, only: list[str] | None, until: float) -> dict[str, Any]:
    """Figures of each run of a stage, until its time is over."""
    found = {}
    for name, overrides in STAGES[stage].runs(folder, steps).items():
        left = until - time.monotonic()
        if only is not None and name not in only:
            continue
        if left < 20:
            found[name] = {"left_out": "the stage's time is over"}
            continue
        found[name] = run(folder / name.partition("+")[0].replace(" ", "-").replace(",", ""), overrides, left)
        print(f"  {name}: {json.dumps(found[name])}", flush=True)
    return found


def laboratory(until: float, sizes: tuple[str, ...], device: str) -> dict[str, Any]:
    """Stage D."""
    found: dict[str, Any] = {}
    for size in sizes:
        command = [sys.executable, "-m", "benchmarks.gpu.laboratory", size, device]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            found[size] = {"failed": "the stage's time is over"}
            continue
        printed = done.stdout.splitlines()
        found[size] = json.loads(printed[-1]) if done.returncode == 0 else {"failed": done.stderr.strip()[-300:]}
        print(f"  {size}: {json.dumps(found[size])}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the stages asked for, print and keep what they gave. Exit status 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="A,B,C,D", help="comma-separated")
    parser.add_argument("--minutes", type=float, default=8.0, help="time of a stage")
    parser.add_argument("--steps", type=int, default=4, help="training steps of a run; the first is not counted")
    parser.add_argument("--runs", default=None, help="runs, comma-separated (default: all; in a rehearsal, few)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the figures")
    parser.add_argument("--folder", type=Path, default=Path("outputs", "bench-gpu"), help="where the runs lie")
    given = parser.parse_args(argv)
    stages = given.stages.split(",")
    if unknown := [name for name in stages if name not in (*STAGES, "D")]:
        parser.error(f"--stages {','.join(unknown)}: accepted are {', '.join((*STAGES, 'D'))}")
    gpu, folder = cuda_here(), given.folder / time.strftime("%Y%m%d-%H%M%S")
    only = given.runs.split(",") if given.runs else None if gpu else list(REHEARSAL)
    if not gpu:
        print("No CUDA device here: a rehearsal on the CPU. Its figures say that the command works, nothing of a GPU.")
    record: dict[str, Any] = {"kind": "measured on a GPU" if gpu else "rehearsal on a CPU", **provenance()}
    # Times are worth little where others compute on the same cores.
    record["machine"]["load_before"] = f"{os.getloadavg()[0]:.1f}"
    if gpu:
        import torch

        record["machine"]["device"] = torch.cuda.get_device_name(0)
    for name in stages:
        until = time.monotonic() + given.minutes * 60
        if name == "D":
            print("stage D: the laboratory", flush=True)
            sizes, device = (("10M", "100M"), "cuda") if gpu else (("0.5M",), "cpu")
            record["D"] = laboratory(until, sizes, device)
        elif lacking := STAGES[name].missing():
            print(f"stage {name} left out: it needs {' and '.join(lacking)}", flush=True)
            record[name] = {"left_out": f"needs {' and '.join(lacking)}"}
        else:
            print(f"stage {name}: {STAGES[name].what}", flush=True)
            record[name] = stage_runs(name, (folder / name).resolve(), given.steps, only, until)
        write_result(given.out, record)
    print(f"Written to {given.out}; the runs' logs lie in {folder}")
    failed = [run for stage in stages for run in record[stage].values() if isinstance(run, dict) and "failed" in run]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
