# SPDX-License-Identifier: Apache-2.0
"""Synthetic run folders: the form of real ones, the numbers made up."""

import json
import math
import random

import pytest
import yaml

from verl_ext.allocation.groups import Fate, Outcome
from verl_ext.allocation.ledger import Ledger


def write_run(folder, *, speed=1.0, seed=0, steps=20, upto=None, per_step=64, noise=0.01, note=True, recipe=None,
              selector=None):  # fmt: skip
    """Held-out accuracy .4 + .5 (1 - exp(-speed rollouts / 1000)), with noise of the seed; validated every 4 steps."""
    rng = random.Random(f"{folder.name} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "trainer": {"total_training_steps": steps, "experiment_name": folder.name},
        "allocation": {"seed": seed, "allocator": {"name": "sara" if selector else "uniform"}},
        "data": {"seed": seed, "train_batch_size": 8},
        "actor_rollout_ref": {"rollout": {"n": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if note:
        machine = {"processor": "A processor", "cores": "2", "memory": "24 GiB"}
        (folder / "compare.json").write_text(json.dumps({
            "recipe": recipe or folder.name.rpartition("-seed")[0], "seed": seed, "overrides": [],
            "versions": {"verl": "0.9.1", "numpy": "2.3.5"}, "machine": machine, "finished": False}))  # fmt: skip
    shift = rng.gauss(0, noise)
    ledger, lines, metrics = Ledger(), [], []

    def accuracy(rollouts):
        return 0.4 + 0.5 * (1 - math.exp(-speed * rollouts / 1000)) + shift * min(1, rollouts / 500)

    metrics.append({"step": 0, "data": {"val-core/sums/acc/mean@8": accuracy(0)}})
    for step in range(1, (upto or steps) + 1):
        for fate, n in ((Fate.TRAINED, 48), (Fate.ABANDONED, per_step - 52), (Fate.SURPLUS, 4)):
            outcomes = [Outcome("g", i, True, 1.0, 7, rng.randint(2, 5)) for i in range(n)]
            ledger.issue(n)
            ledger.returned(outcomes)
            ledger.settle(outcomes, fate)
        record = ledger.step_record(step)
        lines.append(record)
        data = {
            "allocation/effective_share": 0.35 + 0.05 * rng.random(),
            "allocation/batch_effective_share": 1.0,
            "allocation/groups": 6,
            "allocation/rollouts": record["issued_total"],
            "allocation/tokens": record["tokens_total"],
            "timing_s/step": 3.6,
        }
        if selector:
            data |= {"allocation/p_eff_predicted": 0.6, "allocation/p_eff_realised": 0.3 + 0.1 * rng.random(),
                     f"allocation/selector/{selector}_predicted": 0.5,
                     f"allocation/selector/{selector}_realised": 0.45}  # fmt: skip
        if step % 4 == 0 or step == steps:
            data["val-core/sums/acc/mean@8"] = accuracy(record["issued_total"])
        metrics.append({"step": step, "data": data})
    for name, rows in (("metrics.jsonl", metrics), ("ledger.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def root(tmp_path):
    """Three recipes, three seeds: one like the baseline, one faster."""
    root = tmp_path / "outputs" / "comparison"
    for seed in range(3):
        write_run(root / f"cpu-grpo-seed{seed}", seed=seed, recipe="cpu/grpo")
        write_run(root / f"cpu-dapo-seed{seed}", seed=seed, recipe="cpu/dapo", per_step=128)
        write_run(root / f"cpu-sara-seed{seed}", seed=seed, recipe="cpu/sara", speed=2.0, selector="mixed")
    return root
