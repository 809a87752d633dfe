"""A training run as a child process, and the figures that it leaves."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.launch.cleanup import end_child
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import json_lines

PHASES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights", "save_checkpoint")
_FREED = re.compile(r"[Ss]leep mode freed ([\d.]+) GiB")
_HITS = re.compile(r"Prefix cache hit rate: ([\d.]+)%")


def run(folder: Path, overrides: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """Train, and say what was measured; or what went wrong, under `failed`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl_ext.main_ppo", *overrides, "verbose=true",
               f"trainer.default_local_dir={folder / 'run'}"]  # fmt: skip
    variables = {"VERL_FILE_LOGGER_PATH": str(folder / "run" / "metrics.jsonl"), "VLLM_LOG_STATS_INTERVAL": "1"}
    begin, log_file = time.monotonic(), folder / "train.log"
    with log_file.open("a") as log, device_memory() as memory:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables},
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_child(child)
    seconds = {"seconds": round(time.monotonic() - begin, 1)}
    log_text = log_file.read_text(errors="replace")
    if code != 0:
        said = [line for line in log_text.splitlines() if line.strip()][-1:] or [""]
        ended = f"not done after {limit_s:.0f} s" if code is None else f"exit status {code}"
        return seconds | {"failed": f"{ended}: {said[0][-300:]}"}
    return seconds | figures(folder / "run", log_text) | memory()


def figures(folder: Path, log: str) -> dict[str, Any]:
    """Medians over the steps but the first, which warms up; differences and memory at their worst."""
    steps = [line["data"] for line in json_lines(folder / "metrics.jsonl") if "timing_s/step" in line["data"]]
    counted = steps[1:] or steps
    found: dict[str, Any] = {"steps": len(steps)}

    def series(name: str, among: list[dict[str, Any]] = steps) -> list[float]:
        return [step[name] for step in among if name in step]

    found["phase_s"] = {
        phase: round(statistics.median(taken), 3)
        for phase in PHASES
        if (taken := series(f"timing_s/{phase}", counted)) or (taken := series(f"timing_s/{phase}"))
    }
    for name, metric, of in (
        ("rollouts_a_step", "allocation/step_rollouts", statistics.median),
        ("tokens_a_step", "allocation/step_tokens", statistics.median),
        ("rounds", "allocation/rounds", statistics.median),
        ("aborted_rollouts", "allocation/fate/aborted", sum),
        ("probability_difference_max", "training/rollout_probs_diff_max", max),
        ("probability_difference_mean", "training/rollout_probs_diff_mean", statistics.mean),
        ("trainer_allocated_gb", "actor/perf/max_memory_allocated_gb", max),
        ("trainer_reserved_gb", "actor/perf/max_memory_reserved_gb", max),
        ("host_memory_gb", "actor/perf/cpu_memory_used_gb", max),
    ):
        if values := series(metric, counted if of is statistics.median else steps):
            found[name] = float(f"{of(values):.4g}")
    rollouts = found.get("rollouts_a_step")
    if rollouts and found["phase_s"].get("step"):
        found["rollouts_a_second"] = round(rollouts / found["phase_s"]["step"], 2)
    if (ledger := folder / "ledger.jsonl").exists():
        found["ledger"] = "; ".join(ledger_faults(list(json_lines(ledger)))) or "adds up"
    for name, pattern, of in (("sleep_freed_gib", _FREED, max), ("prefix_cache_hit_percent", _HITS, max)):
        if values := [float(value) for value in pattern.findall(log)]:
            found[name] = of(values)
    return found


@contextmanager
def device_memory() -> Iterator[Callable[[], dict[str, Any]]]:
    """Looks twice a second at the memory in use on the first device; yields what says the least and the most of it,
    the least after the most, so that it is what is left while the other half of the run has the device."""
    seen: list[float] = []
    over = threading.Event()

    def watch() -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not over.wait(0.5):
            answer = subprocess.run(query, capture_output=True, text=True)
            if answer.returncode == 0:
                seen.append(float(answer.stdout.split()[0]) / 1024)

    def said() -> dict[str, Any]:
        if not seen:
            return {}
        peak = seen.index(max(seen))
        return {"device_gib": {"most": round(max(seen), 2), "least_after": round(min(seen[peak:-4] or [max(seen)]), 2)}}

    watcher = threading.Thread(target=watch, daemon=True)
    if shutil.which("nvidia-smi"):
        watcher.start()
    try:
        yield said
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join(5)
