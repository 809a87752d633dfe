"""What an update costs with and without down-sampling: PODS, 64 rollouts generated a group and 16 of them trained on.

    python -m benchmarks.bench_pods [--steps 4]

Two runs of verl's real trainer, one after the other, of the same recipe (cpu/pods with 32 prompts x 64 rollouts): one
trains on all 64 rows of a group, one on the 16 of most varied reward. The first step, which warms up, is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.result_files import write_result

GENERATED, TRAINED, PROMPTS = 64, 16, 32
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "step")
VARIANTS = {
    "all 64": ("allocation/downsampler=none", "~allocation.downsampler.keep"),
    "16 of 64": (f"allocation.downsampler.keep={TRAINED}",),
}


def run(overrides: tuple[str, ...], steps: int, folder: Path) -> dict:
    """Seconds by phase, rows trained and rollouts issued, a step."""
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "verl_ext.main_ppo", "recipe=cpu/pods", f"actor_rollout_ref.rollout.n={GENERATED}",
        f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={folder}", *overrides,
    ]  # fmt: skip
    with open(folder / "train.log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder).returncode
    if code:
        sys.exit(f"{' '.join(overrides)}: exit status {code}\n" + (folder / "train.log").read_text()[-4000:])
    lines = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": {phase: [line[f"timing_s/{phase}"] for line in lines] for phase in PHASES},
        "rows": [line["allocation/rows"] for line in lines],
        "rollouts": [line["allocation/step_rollouts"] for line in lines],
        "optimizer_steps": [line["allocation/optimizer_steps"] for line in lines],
        "effective_share": [line["allocation/effective_share"] for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="training steps of each run, the first not counted")
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error(f"--steps {steps}: 2 or more are accepted, the first is not counted")
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: run(VARIANTS[name], steps, Path(scratch) / str(i)) for i, name in enumerate(VARIANTS)}
    every, fewer = (results[name] for name in VARIANTS)
    print(f"{'median a step':<18}" + "".join(f"{name:>12}" for name in VARIANTS) + f"{'ratio':>8}")
    ratios = {}
    for phase in PHASES:
        a, b = (statistics.median(result["seconds"][phase][1:]) for result in (every, fewer))
        ratios[phase] = b / a
        print(f"{'timing_s/' + phase:<22}{a:>8.2f}{b:>12.2f}{ratios[phase]:>8.2f}")
    for name in ("rows", "rollouts", "optimizer_steps"):
        a, b = every[name][-1], fewer[name][-1]
        print(f"{name:<22}{a:>8.0f}{b:>12.0f}{b / a:>8.2f}")
    path = Path(__file__).parent / "results" / "pods.json"
    write_result(path, {"generated": GENERATED, "trained": TRAINED, "prompts": PROMPTS, "ratios": ratios,
                                "variants": results})  # fmt: skip


if __name__ == "__main__":
    main()
