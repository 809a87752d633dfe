"""Starts `python -m verl_ext.main_ppo` as a user would, in a folder of its own, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.write_metrics import is_described

START_UP_AND_STEPS_S = 900


@dataclass
class RealRun:
    """What a run left behind."""

    folder: Path
    """The run's folder."""

    log: str
    """Everything it printed."""

    metrics: list[dict[str, Any]]
    """metrics.jsonl, a line each: step and data."""

    ledger: list[dict[str, Any]]
    """ledger.jsonl, a line a step; empty where the mode is verl's own."""

    def step(self, step: int) -> dict[str, Any]:
        """All metrics logged for a step (a resumed run validates once more before it goes on)."""
        merged: dict[str, Any] = {}
        for line in self.metrics:
            if line["step"] == step:
                merged |= line["data"]
        return merged

    def check_ledger(self) -> None:
        """Issued = fates + in flight + waiting, a step and in all, in rollouts and in tokens."""
        assert self.ledger
        open_before = {"": 0, "_tokens": 0}
        for line in self.ledger:
            for kind, issued in (("", "issued"), ("_tokens", "tokens")):
                fates = line["fates" if not kind else "fate_tokens"]
                totals = line["fates_total" if not kind else "fate_tokens_total"]
                still_open = line["in_flight" + kind] + line["waiting" + kind]
                assert line[issued] == sum(fates.values()) + still_open - open_before[kind], line
                assert line[issued + "_total"] == sum(totals.values()) + still_open, line
                open_before[kind] = still_open
        assert [line["step"] for line in self.ledger] == list(range(1, len(self.ledger) + 1))


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def real_run(folder: Path, *overrides: str, expect: int = 0) -> RealRun:
    """Run to its end and read the run's folder; `expect` is the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder = folder / "run"
    own = ("verbose=true", f"trainer.default_local_dir={run_folder}")
    command = [sys.executable, "-m", "verl_ext.main_ppo", *overrides, *own]
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0"}
    with open(folder / "train.log", "w") as log:
        done = subprocess.run(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=START_UP_AND_STEPS_S, env=environment
        )
    text = (folder / "train.log").read_text()
    assert done.returncode == expect, text[-6000:]
    run = RealRun(run_folder, text, json_lines(run_folder / "metrics.jsonl"), json_lines(run_folder / "ledger.jsonl"))
    names = {name for line in run.metrics for name in line["data"] if name.startswith("allocation/")}
    assert not [name for name in names if not is_described(name)], "scripts.write_metrics has to describe them"
    return run
