# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.smollm2_demo [any.verl.key=value ...]`: a real language model learns sums on this machine's CPU.

Prepares SmolLM2-135M-Instruct and its task, runs `python -m verl_ext.main_ppo recipe=smollm2/sara` as a child whose
output goes to `train.log` in the run's folder, and shows its steps. Held-out accuracy is not sampled: it is computed
from the weights before and after, with its standard error over the sums, and kept in `accuracy.json`. Exit status: 0
if it rose by more than two standard errors and the ledger adds up, 1 if not or if the run failed, 130 if stopped.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.data.rows import DataError
from verl_ext.demo import train
from verl_ext.files import restrict_umask, write_whole
from verl_ext.reports.run_page import drawn_lines
from verl_ext.reports.run_table import table
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import read_run
from verl_ext.smollm2.prepare import SmolPaths, prepare
from verl_ext.smollm2.sums import DATA_SOURCE

HELD_OUT = f"val-core/{DATA_SOURCE}/acc/mean@1"
ACCURACY = "accuracy.json"
COMMAND = (
    *(sys.executable, "-m", "verl_ext.main_ppo", "trainer.resume_mode=disable"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=${trainer.total_training_steps}"),
    # On this machine, also where a cluster is at hand.
    *("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]", "++ray_kwargs.ray_init.address=local"),
)

INTRO = """\
verl_ext smollm2: a pre-trained language model of 135 million parameters learns sums of one and two digits, on this
machine's CPU, through verl's trainer, Ray, TransferQueue, FSDP and vLLM.

It takes about 15 minutes on 2 idle cores, 8 GiB of memory and 2 GB of disk: 1 minute for the checkpoint (once), 2 for
the stack to start, 1 for each of 10 steps, the rest to measure. Ctrl-C stops it and leaves nothing running."""


def summary(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Means and standard errors over the held-out sums; that of the difference is over the sums' own differences."""
    size = len(before)

    def error(rates: np.ndarray) -> float:
        return float(rates.std(ddof=1) / size**0.5)

    return {
        "prompts": size, "before": float(before.mean()), "before_error": error(before), "after": float(after.mean()),
        "after_error": error(after), "difference": float((after - before).mean()),
        "difference_error": error(after - before),
    }  # fmt: skip


def sentence(found: dict[str, Any]) -> str:
    """The summary in words."""
    return (
        f"Held-out accuracy on {found['prompts']} sums: {found['before']:.3f} (standard error "
        f"{found['before_error']:.3f}) before, {found['after']:.3f} ({found['after_error']:.3f}) after; difference "
        f"{found['difference']:+.3f} ({found['difference_error']:.3f})."
    )


class Held:
    """Held-out accuracy of the base model and of every step whose weights were saved."""

    def __init__(self, paths: SmolPaths) -> None:
        self.paths, self.rates = paths, {0: self._of(paths.model, paths.val)}

    @staticmethod
    def _of(folder: Path, prompts: Path) -> np.ndarray:
        from transformers.utils.logging import disable_progress_bar

        from verl_ext.smollm2.measure import success

        disable_progress_bar()
        return success(folder, prompts)

    def __call__(self, folder: Path, step: int) -> float | None:
        """The mean after a step; None: not saved."""
        saved = folder / f"global_step_{step}" / "actor" / "huggingface"
        if step not in self.rates and saved.is_dir():
            self.rates[step] = self._of(saved, self.paths.val)
        return float(self.rates[step].mean()) if step in self.rates else None


def run(folder: Path, arguments: list[str]) -> bool:
    """Prepare, train and measure; whether accuracy rose by more than two standard errors.

    Raises:
        DataError: the package with the weights is not installed.
        RuntimeError: the run failed.
    """
    begin = time.monotonic()
    held = Held(prepare())
    if not any(argument.startswith("recipe=") for argument in arguments):
        arguments = ["recipe=smollm2/sara", *arguments]
    train(folder, arguments, COMMAND, held, HELD_OUT)
    made = read_run(folder)
    last = made.records[-1].step
    if last not in held.rates or not last:
        raise RuntimeError(f"{folder}: the weights of step {last} were not saved")
    found = summary(held.rates[0], held.rates[last])
    found |= {"steps": last, "minutes": (time.monotonic() - begin) / 60}
    write_whole(folder / ACCURACY, (json.dumps(found, indent=1) + "\n").encode())
    print(f"\n{table(made)}\n\n{sentence(found)}\n{drawn_lines(made)}\nAll in all {found['minutes']:.1f} minutes.")
    return found["difference"] > 2 * found["difference_error"] and bool(made.ledger) and not ledger_faults(made.ledger)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status (see the module's docstring)."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    restrict_umask()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    folder = Path("outputs", "verl_ext", f"smollm2-{datetime.now():%Y%m%d-%H%M%S}")
    print(f"{INTRO}\nRun's folder: {folder} (all output of the stack: train.log)", flush=True)
    try:
        return 0 if run(folder, arguments) else 1
    except KeyboardInterrupt:
        print("\nStopped.", flush=True)
        return 130
    except (RuntimeError, DataError) as error:
        print(f"\nverl_ext.smollm2_demo: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
