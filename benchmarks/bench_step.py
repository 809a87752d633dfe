"""Seconds a training step, and what is trained on: `allocation/allocator=uniform` against verl's synchronous trainer.

    python -m benchmarks.bench_step [--steps 8]

Two runs of the same recipe (cpu/grpo), one after the other: verl's trainer_mode=sync and ours. Both dump the prompts of
every step, which must be the same ones. The first step, which warms the engine up, is not counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.result_files import write_result

PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")


def run(mode: str, steps: int, folder: Path) -> dict:
    """Train `steps` steps in `mode`; seconds by phase a step, prompts by step, optimizer steps and keys of a row."""
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "verl_ext.main_ppo", "recipe=cpu/grpo", f"trainer.v1.trainer_mode={mode}",
        f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={folder}",
        f"trainer.rollout_data_dir={folder}/rollouts",
    ]  # fmt: skip
    with open(folder / "train.log", "w") as log:
        code = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=_environment(folder)
        ).returncode
    if code:
        sys.exit(f"{mode}: exit status {code}\n" + (folder / "train.log").read_text()[-4000:])
    lines = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    prompts = []
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        prompts.append(collections.Counter(row["input"] for row in rows))
    return {
        "step_s": [line["timing_s/step"] for line in lines],
        "phases_s": {phase: [line[f"timing_s/{phase}"] for line in lines] for phase in PHASES},
        "prompts": prompts,
        "lr": [line["actor/lr"] for line in lines],
        "score": [line["critic/score/mean"] for line in lines],
    }


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="training steps of each run, the first not counted")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        results = {mode: run(mode, steps, Path(scratch) / mode) for mode in ("sync", "allocated")}
    print(f"{'seconds (median)':<18}{'verl sync':>12}{'ours':>12}{'ratio':>8}")
    medians = {m: {"step": statistics.median(r["step_s"][1:])} for m, r in results.items()}
    for mode, result in results.items():
        medians[mode] |= {phase: statistics.median(s[1:]) for phase, s in result["phases_s"].items()}
    for phase in ("step", *PHASES):
        verl, ours = medians["sync"][phase], medians["allocated"][phase]
        print(f"{phase:<18}{verl:>12.2f}{ours:>12.2f}{ours / verl:>8.2f}")
    ratio = medians["allocated"]["step"] / medians["sync"]["step"]
    same_prompts = results["sync"]["prompts"] == results["allocated"]["prompts"]
    same_lr = results["sync"]["lr"] == results["allocated"]["lr"]
    print(f"step ratio {ratio:.2f} (at most .6 wanted)")
    print("prompts of every step: " + ("the same" if same_prompts else "DIFFERENT"))
    print("learning rate of every step: " + ("the same" if same_lr else "DIFFERENT"))
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    record = {m: {k: v for k, v in r.items() if k != "prompts"} for m, r in results.items()}
    record |= {"median_ratio": ratio, "same_prompts": same_prompts, "same_lr": same_lr, "steps": steps}
    write_result(folder / "step.json", record)
    if not (same_prompts and same_lr):
        sys.exit(1)


if __name__ == "__main__":
    main()
