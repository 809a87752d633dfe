# SPDX-License-Identifier: Apache-2.0
"""A synthetic run folder, its ledger kept by the real ledger."""

import json
import random

import pytest

from verl_ext.allocation.groups import Fate, Outcome
from verl_ext.allocation.ledger import Ledger


def write_run(folder, steps=30, seed=0):
    """32 groups of 8 trained a step, other probes abandoned, validated every 10 steps; returns the ledger's lines."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"trainer:\n  total_training_steps: {steps}\n")
    ledger, lines = Ledger(), []
    untrained = {"val-core/chain_sums/acc/mean@8": 0.47, "val-core/chain_sums/acc/best@8/mean": 0.8}
    metrics = [{"step": 0, "data": untrained}]
    for step in range(1, steps + 1):
        probes = rng.randint(70, 90)
        counts = {Fate.TRAINED: 32 * 8, Fate.ABANDONED: 4 * (probes - 32), Fate.SURPLUS: rng.randint(0, 8)}
        for fate, n in counts.items():
            outcomes = [
                Outcome("g", session=i, correct=True, score=1.0, prompt_tokens=7, response_tokens=rng.randint(2, 3))
                for i in range(n)
            ]
            ledger.issue(n)
            ledger.returned(outcomes)
            ledger.settle(outcomes, fate)
        record = ledger.step_record(step)
        lines.append(record)
        gen = 1.2 + rng.random()
        data = {
            "critic/score/mean": 0.5 + step / 200,
            "allocation/effective_share": 32 / probes,
            "allocation/rounds": 3,
            "allocation/round_gap_s": 0.02,
            "allocation/rollouts": record["issued_total"],
            "allocation/step_rollouts": record["issued"],
            "allocation/tokens": record["tokens_total"],
            "allocation/step_tokens": record["tokens"],
            "allocation/skipped_updates": 0,
            **{f"allocation/fate/{fate}": n for fate, n in record["fates"].items()},
            "timing_s/gen": gen,
            "timing_s/old_log_prob": 0.6,
            "timing_s/update_actor": 1.1,
            "timing_s/update_weights": 0.2,
            "timing_s/step": gen + 2.0,
        }
        if step % 10 == 0:
            data["val-core/chain_sums/acc/mean@8"] = 0.47 + 0.005 * step
            data["timing_s/testing"] = 2.5
        metrics.append({"step": step, "data": data})
    for name, rows in (("metrics.jsonl", metrics), ("ledger.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lines


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "verl_ext" / "synthetic"
    write_run(folder)
    return folder
