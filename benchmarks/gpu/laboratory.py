"""The laboratory with policies of other sizes: seconds of a run, and what it learned.

    python -m benchmarks.gpu.laboratory 10M cuda
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

from verl_ext.lab import lab_run, tasks
from verl_ext.lab.decoder import DecoderSettings
from verl_ext.lab.recipes import find_recipe
from verl_ext.lab.update import UpdateSettings

SIZES = {
    "0.5M": None,
    "10M": DecoderSettings(264, 384, 1536, 6, 6, 2),
    "100M": DecoderSettings(264, 768, 3072, 12, 12, 4),
}
"""None: the policy that comes with the package."""
RECIPES = ("grpo_64x4", "sara")
ROLLOUTS = {"cpu": 1024, "cuda": 8192}


def measure(size: str, device: str) -> dict[str, dict[str, float]]:
    """A run of each recipe, by its name."""
    sizes, seed = SIZES[size], 0
    if sizes is not None:
        sums, seed = tasks.FAMILIES["sums"], 1
        tasks.FAMILIES["sums"] = replace(sums, name=f"sums-{size}", sizes=sizes, lr=1e-3 if size == "10M" else 4e-4)
    rollouts, update = ROLLOUTS[device], UpdateSettings(lr=2e-5 if size == "100M" else 1e-4)
    settings = lab_run.LabSettings(device=device, rollouts=rollouts, eval_every=rollouts, update=update)
    found = {}
    for name in RECIPES:
        begin = time.monotonic()
        run = lab_run.run(find_recipe(name), settings, seed, 0)
        found[name] = {
            "seconds": round(run["seconds"], 1), "with_base_policy_s": round(time.monotonic() - begin, 1),
            "rollouts_a_second": round(run["rollouts"] / run["seconds"], 1), "steps": run["steps"],
            "held_out": [round(success, 4) for _, success in run["curve"]],
        }  # fmt: skip
    if device == "cuda":
        import torch

        found["memory"] = {"most_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)}
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))
